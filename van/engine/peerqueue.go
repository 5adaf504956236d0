package engine

import (
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/wake"
)

// PeerQueue is a FIFO queue of one peer's undelivered items. They are delivered one after the
// other, in the order in which they were received. The zero PeerQueue is ready for use. It
// belongs to one Loop and must not be copied.
type PeerQueue[T any] struct {
	// ID names the peer to Loop.Paused and Loop.Resumed. It is set before the PeerQueue is
	// used.
	ID int

	// Undelivered, if not nil, counts the items of this queue, and of others that share it, that
	// the loop of a Feed has received and not delivered. It is set before the PeerQueue is used.
	Undelivered *atomic.Int32

	// slow says that a goroutine without the receiving role delivers this queue's items, so that
	// new items must be queued. It is set and cleared under mu.
	slow atomic.Bool

	mu      sync.Mutex
	ring    []waiting[T] // len is 0 or a power of two
	head, n int
	bytes   int64         // of the items in ring
	loop    *Loop[T]      // set by the first pause
	paused  bool          // reading of its items is paused
	blocked bool          // the receiver waits for capacity
	free    chan struct{} // one token if there is capacity; made at first use
}

// waiting is an item in a queue.
type waiting[T any] struct {
	item  T
	bytes int64
}

// keepRing is the ring size, in items, up to which an empty queue keeps its ring.
const keepRing = 256

// done records that an item was delivered or discarded.
func (q *PeerQueue[T]) done() {
	if q.Undelivered != nil {
		q.Undelivered.Add(-1)
	}
}

// push appends v if queue is slow. If the queue is not slow any more, push appends nothing and returns
// slow=false. If the queue is full, push pauses it, appends nothing, and returns full=true.
func (l *Loop[T]) push(queue *PeerQueue[T], v T) (slow, full bool) {
	queue.mu.Lock()
	if !queue.slow.Load() {
		queue.mu.Unlock()
		return false, false
	}
	pausedNow := l.pause(queue)
	if full = queue.paused; full {
		if queue.free == nil {
			queue.free = make(chan struct{}, 1)
		}
		queue.blocked = true
	} else {
		w := waiting[T]{item: v}
		if l.Weight != nil {
			w.bytes = int64(l.Weight(v))
		}
		queue.put(w)
		l.Budget.add(w.bytes)
	}
	queue.mu.Unlock()
	if pausedNow {
		l.notePaused(queue)
	}
	return true, full
}

func (q *PeerQueue[T]) put(w waiting[T]) {
	if q.n == len(q.ring) {
		q.grow()
	}
	q.ring[(q.head+q.n)&(len(q.ring)-1)] = w
	q.n++
	q.bytes += w.bytes
}

func (q *PeerQueue[T]) grow() {
	ring := make([]waiting[T], max(16, 2*len(q.ring)))
	k := copy(ring, q.ring[q.head:])
	copy(ring[k:], q.ring[:q.head])
	q.ring, q.head = ring, 0
}

// pop removes and returns the oldest item. If there is none, the queue is not slow any more.
func (l *Loop[T]) pop(queue *PeerQueue[T]) (v T, ok bool) {
	queue.mu.Lock()
	var w waiting[T]
	if queue.n == 0 {
		if len(queue.ring) > keepRing {
			queue.ring, queue.head = nil, 0
		}
		queue.slow.Store(false)
	} else {
		w, queue.ring[queue.head] = queue.ring[queue.head], w
		queue.head = (queue.head + 1) & (len(queue.ring) - 1)
		queue.n--
		queue.bytes -= w.bytes
		ok = true
	}
	others := l.Budget.sub(w.bytes)
	resumed := l.resume(queue)
	queue.mu.Unlock()
	if resumed && l.Resumed != nil {
		l.Resumed(queue)
	}
	for _, p := range others {
		p.recheck()
	}
	return w.item, ok
}

// MayRead reports whether the next item of queue's peer may be received. If it is false, a transport
// that can should leave the item in the source until Resumed is called, so that it uses no memory here.
// An item that is received nevertheless is not lost: the loop waits with it until the queue has
// capacity, and the other queues wait, too. Only the goroutine with the receiving role may call MayRead.
func (l *Loop[T]) MayRead(queue *PeerQueue[T]) bool { return !queue.slow.Load() || l.mayRead(queue) }

func (l *Loop[T]) mayRead(queue *PeerQueue[T]) bool {
	queue.mu.Lock()
	pausedNow := queue.slow.Load() && l.pause(queue)
	paused := queue.paused
	queue.mu.Unlock()
	if pausedNow {
		l.notePaused(queue)
	}
	return !paused
}

// pause pauses queue, which is slow, if it is full. It reports whether the queue was not paused before.
// The caller holds queue.mu.
func (l *Loop[T]) pause(queue *PeerQueue[T]) bool {
	if queue.paused || queue.n < l.QueueCap && !l.Budget.full(queue.bytes) {
		return false
	}
	// The order matters: first the entry, then the check in resume. A pop after the check finds the entry.
	queue.paused, queue.loop = true, l
	l.Budget.note(queue, true)
	return !l.resume(queue)
}

// notePaused counts a pause of queue and calls Paused.
func (l *Loop[T]) notePaused(queue *PeerQueue[T]) {
	l.pauses.Add(1)
	if l.Paused == nil {
		return
	}
	queue.mu.Lock()
	bytes := queue.bytes
	queue.mu.Unlock()
	l.Paused(queue, bytes)
}

// resume ends queue's pause if there is capacity again, and reports whether it did. The caller holds
// queue.mu.
func (l *Loop[T]) resume(queue *PeerQueue[T]) bool {
	free := queue.n <= l.QueueCap/4*3 && l.Budget.mayResume(queue.bytes) || !queue.slow.Load()
	if !queue.paused || !free {
		return false
	}
	queue.paused = false
	l.Budget.note(queue, false)
	if queue.blocked {
		queue.blocked = false
		wake.Put(queue.free)
	}
	return true
}

// recheck resumes the queue if the budget allows it. The budget calls it when it has capacity again.
func (q *PeerQueue[T]) recheck() {
	q.mu.Lock()
	loop := q.loop
	resumed := loop.resume(q)
	q.mu.Unlock()
	if resumed && loop.Resumed != nil {
		loop.Resumed(q)
	}
}
