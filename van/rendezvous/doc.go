// Package rendezvous decides where a message is put in its receiver's memory, for
// transports with one-sided writes: write the value, then the meta, then notify. It is
// a pure machine: it knows neither verbs nor sockets, takes no lock and starts no
// goroutine. A Sender is told what has happened and returns what is to be done, see
// Sender.Next.
//
// The sender requests a slot before the first message of a kind (a rendezvous) and
// remembers the reply, so that all later messages go without a request. Messages that
// wait for a slot are kept in order, and so are those behind them.
//
// When is a slot free again? Between native nodes the receiver returns it as a credit:
// each message carries some credits, and a node that has no message to send sends them
// alone. A StepMesh node returns nothing; there, ps-lite's rule holds that a key has one
// request in flight, so that a slot is free when the answer has come.
//
// Slots between native nodes are shared by all keys of a size class, so that their
// number follows what is in flight, not the number of keys. Keys for which the receiver
// has registered a buffer have slots of their own, and so have all keys of StepMesh.
package rendezvous
