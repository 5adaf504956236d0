// Package collective lets nodes of one role exchange tensors among themselves: AllGather,
// AllToAll, Broadcast, Gather, Scatter, Barrier, and, with arithmetic, ReduceScatter and
// AllReduce. C++ StepMesh has nothing like it, so all ranks must be nodes of this library.
//
// A Comm is a communicator: a list of nodes of one role. Every one of them creates it with New
// and the same list of ranks. All ranks make the same calls in the same order. A call returns
// an Op at once. Several calls may be in flight, and different communicators do not wait for
// each other:
//
//	comm, err := collective.New(ctx, node, collective.Options{Ranks: []int{0, 1, 2}})
//	op, err := comm.AllGather(out, in)
//	err = op.Wait(ctx)
//
// The library uses the tensors from the call until Wait returns nil. At that time the results are
// complete, and all other ranks have received their parts from this rank.
//
// The tensors of a call are all in host memory, or all on the node's device. Reductions take host
// memory only. A call with device tensors begins when the device has done the work that its default
// stream, or the given af.Stream, contains now; with af.Complete it begins at once. Ranks may
// differ in this.
//
// # Errors
//
// Any error of a call in flight ends the communicator on all ranks:
//   - A rank is lost: postoffice.ErrPeerLost.
//   - A limit passes: postoffice.ErrTimeout.
//   - Calls do not match: ErrMismatch. The error of every rank names both calls, or says that the
//     other call has ended. Calls in which no rank requests anything from another one, such as
//     Broadcasts with each rank as its own root, end by the limit instead.
//
// After an error the result tensors are the caller's again, with undefined contents. Other ranks
// may still read memory of this rank until Rebuild or Close has returned: all tensors that this
// rank sends, and the result of AllReduce, of which each rank sends a part. A program that writes
// to this memory earlier may change the result of a rank whose call has succeeded. Rebuild, which
// all ranks call, makes the communicator usable again, together with the replacement processes of
// lost ranks.
//
// # How it works
//
// Every call consists of pull requests. A rank sends a request to each rank from which it needs a
// part, with the address of the destination. The other rank answers when it has made the same call.
// A part therefore takes the path of a server's answer to a worker: shared memory, one RDMA write
// into the result, or a socket. Requests carry the description of the call, by which mismatches are
// detected.
//
// A worker that waits receives in place of the transport for a while, as it does for a push_pull,
// and computes reductions itself. A server sleeps until it is woken, and so do the ranks of a
// communicator with more ranks than this machine has processors. Memory for two reductions is kept
// for reuse.
package collective
