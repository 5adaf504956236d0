package rdma

import (
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// This file owns the queues of what a device's housekeeping has to look at. A connection
// with nothing due is in none of them, so that it costs nothing.

// dueQueue holds items that are due a fixed time after they were added, in that order. Any
// goroutine adds; only the one that does the housekeeping runs them. Adding takes no lock.
type dueQueue struct {
	delay       time.Duration
	added       atomic.Pointer[dueItem] // the one added last, with those before it behind it
	first, last *dueItem                // those that run has collected, the oldest first
}

// dueItem is one thing that a connection may have to do.
type dueItem struct {
	// run does it. early is set before the loop sleeps: what would be due soon is done now.
	// It tells whether there was something to do. An item that has more to do adds itself
	// again.
	run    func(now uint64, early bool) bool
	queued atomic.Bool
	at     uint64
	next   *dueItem
}

// add makes x due after the queue's delay. An item that is in a queue stays as it is.
func (q *dueQueue) add(x *dueItem) {
	if x.queued.Load() || x.queued.Swap(true) {
		return
	}
	x.at = clock.Now() + uint64(q.delay)
	for {
		last := q.added.Load()
		x.next = last
		if q.added.CompareAndSwap(last, x) {
			return
		}
	}
}

// collect appends what was added to the list.
func (q *dueQueue) collect() {
	var oldest, newest *dueItem
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

// run runs what is due, and tells whether any item had something to do.
func (q *dueQueue) run(now uint64, early bool) (did bool) {
	q.collect()
	for q.first != nil && (early || q.first.at <= now) {
		x := q.first
		if q.first = x.next; q.first == nil {
			q.last = nil
		}
		x.next = nil
		x.queued.Store(false) // before it runs: what becomes due meanwhile adds it again
		did = x.run(now, early) || did
	}
	return did
}

// empty tells whether nothing is in the queue.
func (q *dueQueue) empty() bool { return q.first == nil && q.added.Load() == nil }

// wait is how long it takes until the first item is due, at most limit.
func (q *dueQueue) wait(now uint64, limit time.Duration) time.Duration {
	q.collect()
	if q.first == nil {
		return limit
	}
	return min(limit, max(time.Duration(q.first.at-now), 0))
}
