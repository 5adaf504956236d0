// Package af is the tensor API: attention processes (workers) push tensors to
// FFN processes (servers) and pull results back.
//
// A Worker's PushPull sends every push tensor to every server and
// asks each server for its own pull tensors. It returns a Call at once, whose
// Wait blocks until all servers have answered everything. A Server receives the
// tensors of one worker's call as one Batch, passes it to the application, and sends the
// answers that Respond gets.
//
// A Prepared is a PushPull of the same tensors, again and again: Prepare checks them once,
// Start sends them, or their first rows.
//
// Memory: tensors of a call belong to the library until Wait returns. The push
// tensors of a Batch are views on receive memory, valid until the Batch is
// released; Respond releases it as soon as the answers have been sent.
//
// Tensors may lie on the node's device: a Stream among the options is the one in which the
// work on them is queued. A goroutine of the library waits for it, and keeps the order
// of the calls.
//
// The semantics are those of StepMesh's AFTensorWorker and AFTensorServer, with
// errors where those abort or hang.
package af
