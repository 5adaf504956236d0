package conn

import (
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// This file owns the queues of what a device's housekeeping has to look at. A connection
// with nothing due is in none of them, so that it costs nothing.

// DueQueue holds items that are due a fixed time after they were added, in that order. Any
// goroutine adds; only the one that does the housekeeping runs them. Adding takes no lock.
type DueQueue struct {
	Delay       time.Duration
	added       atomic.Pointer[DueItem] // the one added last, with those before it behind it
	first, last *DueItem                // those that run has collected, the oldest first
}

// DueItem is one thing that a connection may have to do.
type DueItem struct {
	// Run does it. early is set before the loop sleeps: what would be due soon is done now.
	// It tells whether there was something to do. An item that has more to do adds itself
	// again.
	Run    func(now uint64, early bool) bool
	queued atomic.Bool
	at     uint64
	next   *DueItem
}

// Add makes x due after the queue's delay. An item that is in a queue stays as it is.
func (q *DueQueue) Add(x *DueItem) {
	if x.queued.Load() || x.queued.Swap(true) {
		return
	}
	x.at = clock.Now() + uint64(q.Delay)
	for {
		last := q.added.Load()
		x.next = last
		if q.added.CompareAndSwap(last, x) {
			return
		}
	}
}

// collect appends what was added to the list.
func (q *DueQueue) collect() {
	var oldest, newest *DueItem
	for x := q.added.Swap(nil); x != nil; {
		before := x.next
		if newest == nil {
			newest = x
		}
		x.next, oldest = oldest, x
		x = before
	}
	switch {
	case oldest == nil:
		return
	case q.last == nil:
		q.first = oldest
	default:
		q.last.next = oldest
	}
	q.last = newest
}

// Run runs what is due, and tells whether any item had something to do.
func (q *DueQueue) Run(now uint64, early bool) (did bool) {
	q.collect()
	for q.first != nil && (early || q.first.at <= now) {
		x := q.first
		if q.first = x.next; q.first == nil {
			q.last = nil
		}
		x.next = nil
		x.queued.Store(false) // before it runs: what becomes due meanwhile adds it again
		did = x.Run(now, early) || did
	}
	return did
}

// Empty tells whether nothing is in the queue.
func (q *DueQueue) Empty() bool { return q.first == nil && q.added.Load() == nil }

// Wait is how long it takes until the first item is due, at most limit.
func (q *DueQueue) Wait(now uint64, limit time.Duration) time.Duration {
	q.collect()
	if q.first == nil {
		return limit
	}
	return min(limit, max(time.Duration(q.first.at-now), 0))
}
