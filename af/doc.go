// Package af is the tensor API: attention processes (workers) push tensors to
// FFN processes (servers) and pull results back.
//
// A TensorWorker's ZBatchPushPull sends every push tensor to every server and
// asks each server for its own pull tensors. The call returns a handler at once;
// Wait blocks until all servers have answered everything. A TensorServer collects
// what one worker sent as one Batch, hands it to the application, and sends the
// answers that Response gives.
//
// Memory: tensors of a call belong to the library until Wait returns. The push
// tensors of a Batch are views on receive memory, valid until the Batch is
// released; Response releases it as soon as the answers have left.
//
// Tensors may lie on the node's device: calls with On take the stream in which the
// work on them is queued, wait for it on a goroutine of the library, and keep the order
// of the calls.
//
// The semantics are those of StepMesh's AFTensorWorker and AFTensorServer, with
// errors where those abort or hang.
package af
