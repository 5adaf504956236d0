package conn

import (
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// This file owns the due queues of a device's housekeeping. A connection with nothing due is in no queue, and costs nothing.

// DueQueue holds items that are due a fixed time after they were added, in that order. Any goroutine may add items. Only the goroutine that
// does the housekeeping runs them. Adding takes no lock.
type DueQueue struct {
	Delay       time.Duration
	added       atomic.Pointer[DueItem] // the item added last; next leads to those before it
	first, last *DueItem                // the collected items, the oldest first
}

// DueItem is a task of a connection.
type DueItem struct {
	// Run performs the task. If more is to be done later, it adds the item again.
	Run    func(now uint64)
	queued atomic.Bool
	at     uint64
	next   *DueItem
}

// Add makes x due after the queue's delay. It does nothing if x is in a queue.
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

// collect appends the added items to the list.
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

// Run runs the items that are due, and with early those that are due later, too: the loop is about to sleep.
func (q *DueQueue) Run(now uint64, early bool) {
	q.collect()
	for q.first != nil && (early || q.first.at <= now) {
		x := q.first
		if q.first = x.next; q.first == nil {
			q.last = nil
		}
		x.next = nil
		x.queued.Store(false) // before Run, which may add x again
		x.Run(now)
	}
}

// Empty reports whether the queue has no items.
func (q *DueQueue) Empty() bool { return q.first == nil && q.added.Load() == nil }

// Wait returns the time until the first item is due, at most limit.
func (q *DueQueue) Wait(now uint64, limit time.Duration) time.Duration {
	q.collect()
	if q.first == nil {
		return limit
	}
	return min(limit, max(time.Duration(q.first.at-now), 0))
}
