package cluster

// The timestamps of a customer, and the requests in flight that they belong to.

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// keepFinished is the number of finished requests without a Wait that a customer remembers. Older ones are forgotten,
// so that the memory of an application that only uses callbacks does not grow.
const keepFinished = 4096

// requests issues timestamps and finds the requests that they belong to: those in flight, and the last finished ones
// that have not been waited for.
type requests struct {
	mu       sync.Mutex
	closed   bool
	base     int32 // the first timestamp
	wrapped  bool  // timestamps have passed the largest and continue from 0
	next     int32
	table    atomic.Pointer[[]atomic.Pointer[Request]] // by timestamp; the length is a power of two
	live     map[*Request]struct{}
	inUse    int                    // timestamps of the requests in live
	finished [keepFinished]*Request // a ring of requests that finished without a Wait
	newest   int                    // index of the next one; never wraps, used modulo keepFinished
	timers   []*time.Timer          // for waiting
	expiry   *time.Timer            // calls endExpired; nil before the first Expire
	endsAt   uint64                 // the time, as of clock.Now, for which expiry is set; 0: not set
	failures failures               // of forgotten requests

	unreported   int // requests in finished
	onUnreported func(n int)
}

func (q *requests) init(base int32) {
	q.base, q.next, q.failures.forgotten = base, base, -1
	q.live = map[*Request]struct{}{}
	table := make([]atomic.Pointer[Request], 1024)
	q.table.Store(&table)
}

// enter puts r, whose timestamps reserve has found, into the table. mu is held.
func (q *requests) enter(r *Request) {
	if q.wrapped = q.wrapped || r.first < q.next; q.wrapped {
		q.failures.clearReused(r.first, r.n)
	}
	q.next = r.first + r.n
	q.inUse += int(r.n)
	table := *q.table.Load()
	for ts := r.first; ts < r.first+r.n; ts++ {
		table[int(ts)&(len(table)-1)].Store(r)
	}
	q.live[r] = struct{}{}
}

// reserve finds n consecutive timestamps, from q.next on, whose table slots are free. It
// grows the table when it is half full, and skips slots of requests that have been in
// flight for long. mu is held.
func (q *requests) reserve(n int) (first int32, err error) {
	if q.closed {
		return 0, van.ErrClosed
	}
	for q.inUse+n > len(*q.table.Load())/2 {
		if len(*q.table.Load()) >= maxTable {
			return 0, fmt.Errorf("%w: %d timestamps in flight, want at most %d with these %d: Wait for some", van.ErrQueueFull, q.inUse, maxTable/2, n)
		}
		q.grow()
	}
	table := *q.table.Load()
	first = q.next
	for free, tried := 0, 0; free < n; tried++ {
		if first > math.MaxInt32-int32(n) {
			first, free = 0, 0 // a request's timestamps must not wrap
		}
		if tried == 2*len(table) { // half of the slots are free, but scattered
			if len(table) >= maxTable {
				return 0, fmt.Errorf("%w: no %d consecutive timestamps are free: Wait for some", van.ErrQueueFull, n)
			}
			q.grow()
			table, free, tried = *q.table.Load(), 0, 0
			first = q.next
			continue
		}
		if table[(int(first)+free)&(len(table)-1)].Load() == nil {
			free++
			continue
		}
		first, free = first+int32(free)+1, 0
	}
	return first, nil
}

// grow doubles the table. mu is held.
func (q *requests) grow() {
	bigger := make([]atomic.Pointer[Request], 2*len(*q.table.Load()))
	for r := range q.live {
		for ts := r.first; ts < r.first+r.n; ts++ {
			bigger[int(ts)&(len(bigger)-1)].Store(r)
		}
	}
	q.table.Store(&bigger)
}

// maxTable bounds the table; half of its slots may be in use.
const maxTable = 1 << 23

// lookup finds the request that ts belongs to, which may have been recycled.
func (q *requests) lookup(ts int32) *Request {
	if ts < 0 {
		return nil
	}
	table := *q.table.Load()
	return table[int(ts)&(len(table)-1)].Load()
}

// issued reports whether ts has been issued. mu is held.
func (q *requests) issued(ts int32) bool {
	if q.wrapped {
		return ts >= 0 && (ts < q.next || ts >= q.base)
	}
	return ts >= q.base && ts < q.next
}

// addFinished puts r, which has finished without a waiter, into the ring. The request that it displaces is forgotten.
func (q *requests) addFinished(r *Request, gen uint64) {
	q.mu.Lock()
	if _, ok := q.live[r]; !ok || r.waiting || r.gen != gen || r.ringIndex >= 0 {
		q.mu.Unlock()
		return
	}
	slot := &q.finished[q.newest%keepFinished]
	old := *slot
	if old != nil {
		q.remove(old)
	}
	*slot = r
	r.ringIndex = q.newest
	q.newest++
	q.countUnreported(1)
	q.mu.Unlock()
	if old != nil {
		q.recycle(old)
	}
}

// remove removes r from the table. mu is held.
func (q *requests) remove(r *Request) {
	table := *q.table.Load()
	for ts := r.first; ts < r.first+r.n; ts++ {
		table[int(ts)&(len(table)-1)].CompareAndSwap(r, nil)
	}
	delete(q.live, r)
	q.inUse -= int(r.n)
	if r.err != nil {
		q.failures.add(r.first, r.n, r.err, q.next)
	}
	q.takeFromRing(r)
}

// claim takes r out of the ring for a waiter, so that later requests do not displace it. WaitSlice removes r, or returns it to the
// ring. mu is held.
func (q *requests) claim(r *Request) {
	r.mu.Lock()
	r.waiting = true
	r.mu.Unlock()
	q.takeFromRing(r)
}

// takeFromRing takes r out of the ring if it is there. mu is held.
func (q *requests) takeFromRing(r *Request) {
	if r.ringIndex >= 0 {
		q.finished[r.ringIndex%keepFinished] = nil
		r.ringIndex = -1
		q.countUnreported(-1)
	}
}

// countUnreported adds n to the number of requests in finished. mu is held.
func (q *requests) countUnreported(n int) {
	q.unreported += n
	if q.onUnreported != nil {
		q.onUnreported(q.unreported)
	}
}

// recycle returns r to its owner. The goroutine of a late answer may still have a pointer to r; answer then finds
// that the timestamp is not r's.
func (q *requests) recycle(r *Request) {
	r.mu.Lock()
	sink := r.sink
	r.state, r.sink, r.n = unused, nil, 0
	r.mu.Unlock()
	sink.Recycle()
}

// list returns the requests that are not finished, or not waited for yet.
func (q *requests) list() []*Request {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.Collect(maps.Keys(q.live))
}
