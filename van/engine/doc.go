// Package engine hands what a transport receives to the layer above so that a
// handler that is slow for one peer never holds up another peer, and so that the
// common case, a quick handler, costs no goroutine hop.
//
// One goroutine has the receiving role: it takes an item and delivers it itself.
// When that delivery takes long, a watchdog gives the role to another goroutine
// and the slow one keeps only its peer's lane: what comes for this lane meanwhile
// queues up behind it, in order, and when the lane is empty that goroutine ends.
//
// What queues up is bounded by number and, with a Budget, in bytes, for one peer and for
// all. A transport with a source for each peer asks MayRead before it receives, and leaves
// what it must not receive where it is: there the peer's own flow control holds it back,
// and other peers are served. Only what waits is counted: a quick delivery is not.
//
// While deliveries are quick there are two goroutines for each Loop, whatever the
// number of peers; each delivery that is stuck at the moment adds one.
package engine
