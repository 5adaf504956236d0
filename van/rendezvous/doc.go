// Package rendezvous assigns messages to slots in the receiver's memory, for
// transports with one-sided writes: write the value, then the meta, then notify. It is
// a pure state machine: it knows neither verbs nor sockets, locks no mutex and starts no
// goroutine. The caller reports events to a Sender and executes the actions that
// Sender.Next returns.
//
// The sender requests a slot before the first message of a kind (a rendezvous) and
// remembers the reply, so that later messages need no request. Messages that
// wait for a slot stay in order, and so do the messages behind them.
//
// When is a slot free again? Between native nodes the receiver returns it as a credit:
// each message carries some credits, and a node that has no message to send sends them
// alone. A StepMesh node returns no credits. By ps-lite's rule a key has one request in
// flight, so its slot is free when the answer has arrived.
//
// Slots between native nodes are shared by all keys of a size class, so that their
// number depends on the messages in flight, not on the number of keys. Each key of a StepMesh
// node has its own slot.
package rendezvous
