// Package streams lets a worker and the servers on GPUs of the same host exchange tensors by an exchange that
// both sides prepare once and then repeat. The rounds are executed by streams of these GPUs, also by captured
// graphs, without a CPU thread or a message; or, with the option ByHost, by CPU threads, without a
// message. C++ StepMesh has nothing like it, so all nodes of an exchange must be nodes of this library.
//
//	x, err := ends.Prepare(ctx, nil, push, pull) // on a worker: tensors to send, and to receive
//	err = x.QueueSend(stream)                    // each server may read the push tensors now
//	err = x.QueueReceive(stream)                 // the stream waits; then the answers are in the pull tensors
//
//	y, err := ends.Prepare(ctx, nil, push, pull) // on a server: tensors to receive, and answers
//	err = y.QueueReceive(stream)                 // the stream waits; then the workers' data is in the push tensors
//	err = y.QueueSend(stream)                    // the answers are in the pull tensors of y
//
// With the option ByHost, CPU threads of both ends perform the rounds, by Send and Receive: see [ByHost]. The
// rest of this page describes streams.
//
// # Rounds
//
// Each end has an 8-byte flag and an 8-byte gate in its device's memory for each peer.
//   - QueueSend clears the flags of its end, and writes its flag at each peer.
//   - QueueReceive waits for the flags of its end, and copies the peers' tensors into its own. A kernel copies: a copy
//     engine that waits for one stream would hold up the copies of the others.
//
// In a graph, a QueueReceive can overlap the work captured since the QueueSend before it, if that is in the same graph. That
// work must not use the tensors that are received.
//
// Only the owner of memory writes data there, as everywhere in this library; a peer writes only its flag. A
// round needs no number, since sends and receives alternate.
//
// Tensors that were sent may be written again when the stream has passed the next QueueReceive: the peer copied
// them before it sent the data that this QueueReceive waited for. Memory that other processes cannot map, such
// as PyTorch's with expandable segments, is first copied into a buffer of the library on the same device.
//
// # Failure
//
// An exchange ends as a whole, and cannot be used again, if a peer is lost or closes its end, if this node ends,
// or if a worker's round exceeds its limit. Servers have no limit, as for batches. The end has these steps:
//  1. The peers' gates are closed: they copy nothing that they have not begun to copy, also if sends still queued in
//     streams write their flags. From now on Check, QueueSend and QueueReceive return the reason.
//  2. The peers are notified, and end their exchanges.
//  3. When all peers have confirmed or are lost, waiting streams are released, and begin no copy. If they were released
//     before that, a peer could take their data for valid.
//
// A peer that neither confirms nor is lost is waited for for 10 seconds; a node that ends does not wait. While a
// launch into CUDA's default stream is blocked because the driver's queue is full, streams cannot be released:
// programs that queue many rounds ahead should use another stream.
//
// After the end, the exchange is prepared again, with the replacement process of a lost peer, and graphs are
// captured again. Received data is valid if Check returns nil after the stream has done its work.
//
// # Memory
//
// Memory stays mapped and allocated until the backend is closed if peers have mapped it, or if a graph that may
// be replayed refers to it: the driver cannot unmap it while streams may wait. For each exchange this is 128
// bytes of device memory for each peer and 128 more; for a captured exchange, also its tensors and a stream.
//
// This package is experimental: its API may change between minor versions.
package streams
