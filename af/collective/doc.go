// Package collective lets nodes of one role exchange tensors among themselves: AllGather,
// AllToAll, Broadcast, Gather, Scatter, Barrier, and, with arithmetic, ReduceScatter and
// AllReduce. C++ StepMesh has nothing like it, so all ranks must be nodes of this library.
//
// A Comm is a communicator: a list of nodes of one role, which every one of them makes with
// New, each naming the same ranks. All ranks make the same calls in the same order. A call
// returns at once with an Op, several may be in flight, and different communicators do not
// wait for each other:
//
//	comm, err := collective.New(ctx, node, collective.Options{Ranks: []int{0, 1, 2}})
//	op, err := comm.AllGather(out, in)
//	err = op.Wait(ctx)
//
// Tensors are the library's from the call until Wait returns nil: by
// then the results are there, and all others have taken their parts of what this rank gives.
//
// Those of a call lie in host memory, or all on the node's device, but not for reductions. Then the call begins
// when the device has done what is in its default stream now, or in the af.Stream that is given; af.Complete says
// that nothing is to be waited for. Ranks may differ in this.
//
// # Errors
//
// Any error of a call in flight ends the communicator on all ranks: a rank that is lost
// (van.ErrPeerLost), a limit that passes (van.ErrTimeout), and calls that do not match
// (ErrMismatch), where the error of every rank names both calls, or says that the other one has
// ended; but calls in which no rank asks another one for anything, as Broadcasts each with its own
// rank as the root, end by the limit.
// After an error result tensors are the caller's again, with any contents. What others may still
// be reading is so when Rebuild or Close has returned: all that this rank gives, and the result of
// AllReduce, of which each rank gives a part. Who writes there before may change what a rank gets
// whose call has succeeded. Rebuild, which all ranks call, begins anew, with the process that has
// taken the place of a lost one.
//
// # How it works
//
// Every call is made of pull requests. A rank asks each rank from which it needs a part, and
// names the memory that it is wanted in; who is asked answers when it has made the same call.
// So a part goes the way that the answer of a server goes to a worker: through shared memory,
// by one RDMA write into the result, or over a socket. Requests carry the call's description,
// which is how calls that do not match are noticed.
//
// A worker that waits receives in place of the transport for a while, as it does for a
// push_pull, and does the arithmetic itself. A server sleeps until it is woken, and so do the
// ranks of a communicator with more of them than this machine has processors. Memory for two
// reductions is kept.
package collective
