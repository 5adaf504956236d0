// Package rendezvous decides where a message may be put in its receiver's memory,
// for transports with one-sided writes: put the value, then the meta, then notify.
// It knows neither verbs nor sockets, holds no lock and starts no goroutine.
//
// The sender asks for a slot before the first message of a kind (a rendezvous) and
// remembers the answer, so that all later ones go without asking. Messages that
// wait for a slot are kept in order, and so are those behind them.
//
// When is a slot free again? Between native nodes the receiver gives it
// back: each message carries some credits, and who has none to send with sends them
// alone. A StepMesh node gives nothing back; there, ps-lite's rule holds that
// a key has one request in flight, so that a slot is free when the answer has come.
//
// Slots between native nodes are shared by all keys of a size class, so
// that their number follows what is in flight, not the number of keys. Keys for
// which the receiver has registered a buffer have slots of their own, and so have
// all keys of StepMesh.
package rendezvous
