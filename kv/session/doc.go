// Package session lets one process, the controller, run functions on many: a worker node
// opens a Session, and each server node is a Rank of it, which has registered functions by
// name and serves. All ranks run the same call; what it returns stays on each of them, under
// a Handle that later calls may name among their arguments.
//
//	s, err := session.Open(ctx, node, session.Options{})     // on a worker
//	x, err := s.CopyTo(ctx, array)                           // on rank 0
//	x, err = s.Broadcast(ctx, x)                             // on all
//	y, err := s.Call(ctx, "forward", x)                      // all ranks run it
//	err = y.Wait(ctx)                                        // the error of a rank, if there is one
//	v, err := s.CopyFrom(ctx, y)                             // what rank 0 has
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
// Arguments and what is copied are values: nil, bool, int64, float64, string, []byte, Array,
// and, as arguments, handles. They travel with the message, through the controller also in a
// Broadcast: this is the control plane. What ranks exchange while they compute goes from one
// to the other, by a communicator of af/collective that the functions refer to; that
// package lies above this one, which therefore knows nothing of it. A message
// is less than 2 GiB long, over RDMA 16 MiB.
//
// # Failure
//
// An error or a panic of a function, or a name that is not registered, is an error of that
// call, which names the ranks; the session goes on. A function that ends its goroutine (runtime.Goexit)
// ends its rank's Serve. A rank that is lost, or whose Serve ends,
// fails the session: all that waits fails at once and names the rank, and the others'
// Serve ends, as it does when the controller is lost. After an Open that failed the ranks
// wait for the next one. A process that takes a lost one's
// place has no part in the session; open another.
//
// A wait that ends with its context gives nothing up: the call goes on on the ranks.
//
// This package is experimental: its API may change between minor versions.
package session
