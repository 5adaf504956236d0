// Package session lets one process, the controller, run functions on many: a worker node
// opens a Session, and each server node is a Rank of it, which has registered functions by
// name and serves. All ranks run the same call. Its result stays on each of them, under
// a Handle that later calls may have as an argument.
//
//	s, err := session.Open(ctx, node, session.Options{})     // on a worker
//	x, err := s.CopyTo(ctx, array)                           // on rank 0
//	x, err = s.Broadcast(ctx, x)                             // on all
//	y, err := s.Call(ctx, "forward", x)                      // all ranks run it
//	err = y.Wait(ctx)                                        // the error of a rank, if there is one
//	v, err := s.CopyFrom(ctx, y)                             // the value on rank 0
//
// # Order
//
// Call returns when the call has been sent. Each rank runs the calls of a session one after
// the other, in the order in which the controller made them, so that a handle may be used
// before its call has ended. Where a call has failed on a rank, its handle has no value
// there, and calls that use it fail there with the same text.
//
// # Data
//
// Arguments and copies are values: nil, bool, int64, float64, string, []byte, Array,
// and, as arguments, handles. They travel with the message, through the controller also in a
// Broadcast: this is the control plane. Functions that exchange
// data while they compute use a communicator of af/collective, which this package does not
// import. A message is shorter than 2 GiB, over RDMA shorter than 16 MiB.
//
// # Failure
//
// An error or a panic of a function, or a name that is not registered, is an error of that
// call, which names the ranks; the session goes on. A function that ends its goroutine (runtime.Goexit)
// ends its rank's Serve. A rank that is lost, or whose Serve ends,
// fails the session: all waits fail at once with the name of the rank, and Serve of the other
// ranks ends, as it does when the controller is lost. After a failed Open the ranks wait for
// the next one. The replacement process of a lost rank does not join the session; open another.
//
// A wait whose context ends does not cancel the call: it continues on the ranks.
//
// This package is experimental: its API may change between minor versions.
package session
