// Package engine receives and delivers the messages of a node.
//
// A transport implements a Source for each socket or device: take a message, arm before
// sleeping, sleep, wake. NewFeed makes it one of the sources of an Engine. A node has one
// Engine, for all its transports. The engine decides
//   - which goroutine receives: the loop of the source or, in place of all loops, a
//     goroutine that waits for an answer and calls Engine.Poll, which saves waking it;
//   - how long to spin before sleeping, and that only one goroutine of a node spins at a time.
//
// A Poll receives from several sources in turn. It skips sources from which many Polls have
// received nothing, until their loops receive something.
//
// A Loop delivers. A slow handler of one peer does not delay other peers, and the common
// case, a quick handler, costs no goroutine hop:
//  1. One goroutine has the receiving role. It takes an item and delivers it itself.
//  2. If the delivery is slow, a watchdog gives the role to another goroutine. The slow
//     one keeps only its peer's PeerQueue.
//  3. Further items of this peer are queued there, in order. The slow goroutine delivers
//     them and ends when the queue is empty.
//
// The queues are bounded by number and, with a Budget, in bytes, for one peer and for
// all. A transport with a source for each peer calls MayRead before it receives. If MayRead
// is false, it leaves the item in the source: the peer's own flow control then holds the
// sender back, and other peers are served. Only queued items count, not quick deliveries.
//
// While deliveries are quick there are two goroutines for each Loop, for any number of
// peers. Each delivery that is slow at the moment adds one.
//
// A delivery must not wait for the end of deliveries, as closing a transport does.
package engine
