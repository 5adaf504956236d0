// Package engine receives for a node and hands up what comes.
//
// A transport supplies a Source, for each socket or device: take what is there, arm before
// sleeping, sleep, wake. NewFeed makes it one of the sources of an Engine, of which a node
// has one, whatever the number of its transports. The engine owns who receives: the
// source's loop, or, in place of all loops, a goroutine that waits for an answer and calls
// Engine.Poll, which saves waking it. It owns how long to look before sleeping, and that
// only one goroutine of a node looks at a time. A Poll takes from several sources in turn,
// and leaves alone those that nothing has come from for many Polls, until their loops have
// received something.
//
// A handler that is slow for one peer never holds up another peer, and the common case, a
// quick handler, costs no goroutine hop. That is what a Loop does. One goroutine has the
// receiving role: it takes an item and delivers it itself. When that delivery takes long, a
// watchdog gives the role to another goroutine and the slow one keeps only its peer's lane:
// what comes for this lane meanwhile queues up behind it, in order, and when the lane is
// empty that goroutine ends.
//
// What queues up is bounded by number and, with a Budget, in bytes, for one peer and for
// all. A transport with a source for each peer asks MayRead before it receives, and leaves
// what it must not receive where it is: there the peer's own flow control holds it back,
// and other peers are served. Only what waits is counted: a quick delivery is not.
//
// While deliveries are quick there are two goroutines for each Loop, whatever the
// number of peers; each delivery that is stuck at the moment adds one.
//
// A delivery is told by which Deliverer it is made. What it calls that waits for the end of
// deliveries, as closing a transport does, is given that in a context, see Within.
package engine
