// Package streams lets a worker and the servers whose GPUs are in one host exchange tensors as often as wanted by what both
// ends have prepared once: in the streams of these GPUs alone, without a CPU, a kernel or a message on the way, also captured into graphs; or, with
// the option ByHost, by their processors, without a message. C++ StepMesh has nothing like it, so all of
// them must be nodes of this library.
//
//	x, err := ends.Prepare(ctx, nil, push, pull) // on a worker, as af.Worker.Prepare
//	err = x.QueueSend(stream)                    // each server may take the push tensors now
//	err = x.QueueReceive(stream)                 // wait; the answers are in the pull tensors then
//
//	y, err := ends.Prepare(ctx, nil, push, pull) // on a server: what comes, and what is answered
//	err = y.QueueReceive(stream)                 // wait; what the workers have pushed is here then
//	err = y.QueueSend(stream)                    // the answers are in the pull tensors of y
//
// With the option ByHost the processors of both ends make the rounds, by Send and Receive: see [ByHost]. What follows is of streams.
//
// # How a round goes
//
// Each end has a word of 8 bytes in its device's memory for each peer. QueueSend clears the words and
// copies 4 bytes, a 1, from its own memory into its word at each peer. QueueReceive waits for its words and
// copies from the peers' tensors into its own. So only the owner of memory writes data there, as everywhere in this library, and
// what a peer may write is its word. A round needs no number: who sends has received before, and the
// other way round.
//
// Tensors that are sent may be written to again when the next QueueReceive has passed in the stream: the peer has
// copied them before it sent what that waited for. Memory that other processes cannot map, as PyTorch's with
// expandable segments, is copied first into a buffer of the library on the same device.
//
// # Failure
//
// An exchange ends as a whole, for good, when a peer is lost or closes its end, when this node ends, or when a
// worker's round takes longer than its limit (a server waits without one, as for batches). First its 1 becomes a 0: whatever its streams
// still copy to a peer's word lets nobody go on, and what is there is taken back. Check, QueueSend and QueueReceive return why from now on. Then the peers are told,
// and end theirs. When all of them have said so, or are lost, the streams that wait go on, with the tensors as they
// are: before that a peer could copy what such a stream writes then, and take it for good. A peer that neither says
// so nor is lost is waited for for 10 seconds; a node that ends waits for none. While a launch into CUDA's default stream
// waits for room in the driver's queue nothing can make streams go on: who queues many rounds ahead does it in
// another stream. An exchange is prepared anew, with the process that has taken
// the place of a lost one, and graphs are captured anew. So values are good when Check returns nil after the
// stream has done its work.
//
// # Memory
//
// What peers have mapped, and what a graph refers to that may still be replayed, stays until the
// backend is closed: the driver unmaps nothing while streams may wait. This is, for each exchange that was captured, its tensors, and for each one
// 128 bytes of the device for each peer and one more.
//
// This package is experimental: its API may change between minor versions.
package streams
