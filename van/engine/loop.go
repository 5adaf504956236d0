package engine

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of a Loop's fields.
const (
	DefaultLimit    = 500 * time.Microsecond
	DefaultQueueCap = 65536
)

// Loop receives items and delivers them, with one goroutine at a time in the
// receiving role. Set its fields before Start.
type Loop[T any] struct {
	// Limit is the time that a delivery may keep the receiving role. Another goroutine
	// gets the role after one to two Limits (and the kernel's timer slack), or after at most
	// eight if all earlier deliveries were shorter.
	Limit time.Duration

	// QueueCap is the number of items that one queue may hold behind a slow
	// delivery. A full queue is paused; see MayRead.
	QueueCap int

	// Budget, if not nil, limits the bytes that are queued behind slow deliveries. A
	// queue at the limit is paused; see MayRead. Loops may share one Budget.
	Budget *Budget

	// Weight returns the number of bytes that a queued item uses; nil: none. It is
	// called for queued items only.
	Weight func(T) int

	// Paused, if not nil, is called by the goroutine with the receiving role when a queue is
	// paused. bytes are the queued bytes.
	Paused func(queue *PeerQueue[T], bytes int64)

	// Resumed, if not nil, is called by any goroutine when a paused queue has capacity
	// again. It must not block.
	Resumed func(queue *PeerQueue[T])

	// Discard, if not nil, is called with each item that will not be delivered because
	// of Stop. Calls may be concurrent.
	Discard func(T)

	// Begin, if not nil, is called by each goroutine before it gets the receiving
	// role. It may lock the goroutine to its thread.
	Begin func()

	recv    func() (T, *PeerQueue[T], bool)
	deliver func(T)

	// state is count<<1 | delivering. The goroutine with the receiving role increments count
	// with each delivery, so that the watchdog can distinguish a slow delivery from a later
	// one. The watchdog takes the role by incrementing it.
	state atomic.Uint64
	cur   atomic.Pointer[PeerQueue[T]] // of the delivery in state

	taken func() // for tests: called while the watchdog takes the role

	dog     watchdog
	pauses  atomic.Uint64
	stopped atomic.Bool
	quit    chan struct{} // closed at the end of receiving

	mu       sync.Mutex
	quitting bool
	runners  int // goroutines that receive or deliver
	watching bool
	changed  chan struct{} // closed and replaced when watching or runners change
}

// NewLoop makes a Loop.
//
// recv waits for the next item and returns it with its queue; with ok false
// the loop ends. It is called by one goroutine at a time, not always the same.
//
// deliver delivers one item. It may block: the deliveries of other queues go
// on. Deliveries of one queue never overlap.
func NewLoop[T any](recv func() (item T, queue *PeerQueue[T], ok bool), deliver func(T)) *Loop[T] {
	return &Loop[T]{
		Limit: DefaultLimit, QueueCap: DefaultQueueCap,
		recv: recv, deliver: deliver,
		dog: watchdog{wake: make(chan struct{}, 1)}, quit: make(chan struct{}),
		changed: make(chan struct{}),
	}
}

// Start begins to receive. Call it once. It does nothing after Stop.
func (l *Loop[T]) Start() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped.Load() || l.watching {
		return
	}
	l.watching = true
	l.dog.parked.Store(true)
	go func() {
		l.dog.watch(l.Limit, &l.state, l.quit, l.takeOver)
		l.mu.Lock()
		l.watching = false
		l.changedLocked()
		l.mu.Unlock()
	}()
	l.spawn(0)
}

// After the end of ctx, Stop waits for lastTicks ticks of lastTick. A process that was suspended during ctx thus has time to
// end its goroutines. If it is suspended again, the ticks of that time do not count.
const (
	lastTicks = 50
	lastTick  = 10 * time.Millisecond
)

// Stop ends the loop and waits until no delivery runs and all goroutines of the
// loop have ended, or until shortly after ctx ends; it then returns ctx's error. The caller
// must make a waiting recv return, before Stop or during it. Queued items are
// discarded. Stop may be called more than once. A delivery that calls Stop waits for itself until ctx ends.
func (l *Loop[T]) Stop(ctx context.Context) error {
	l.stopped.Store(true)
	l.mu.Lock()
	l.quitLocked()
	ended, left := ctx.Done(), lastTicks
	var tick <-chan time.Time
	for l.watching || l.runners > 0 {
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-ended:
			ended, tick = nil, time.Tick(lastTick)
		case <-tick:
			if left--; left == 0 {
				return ctx.Err()
			}
		}
		l.mu.Lock()
	}
	l.mu.Unlock()
	return nil
}

// Ticks returns the number of times that the watchdog's timer has fired.
func (l *Loop[T]) Ticks() uint64 { return l.dog.ticks.Load() }

// Pauses returns the number of pauses of queues.
func (l *Loop[T]) Pauses() uint64 { return l.pauses.Load() }

func (l *Loop[T]) quitLocked() {
	if !l.quitting {
		l.quitting = true
		close(l.quit)
	}
}

func (l *Loop[T]) changedLocked() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// spawn starts a goroutine in the receiving role. The caller holds l.mu.
func (l *Loop[T]) spawn(count uint64) {
	l.runners++
	go func() {
		defer l.leave()
		if l.Begin != nil {
			l.Begin()
		}
		l.run(count)
	}()
}

// takeOver gives the receiving role to a new goroutine if the delivery with state
// busy still runs.
func (l *Loop[T]) takeOver(busy uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.quitting {
		return
	}
	queue := l.cur.Load()
	// The goroutine that loses the role locks the queue next, so it finds the queue
	// slow.
	queue.mu.Lock()
	taken := l.state.CompareAndSwap(busy, busy+1)
	if taken && l.taken != nil {
		l.taken()
	}
	if taken {
		queue.slow.Store(true)
	}
	queue.mu.Unlock()
	if taken {
		l.spawn((busy + 1) >> 1)
	}
}

func (l *Loop[T]) leave() {
	l.mu.Lock()
	l.runners--
	l.changedLocked()
	l.mu.Unlock()
}

// run receives and delivers until it loses the receiving role or the loop ends.
func (l *Loop[T]) run(count uint64) {
	var last *PeerQueue[T]
	for !l.stopped.Load() {
		item, queue, ok := l.recv()
		if !ok {
			l.mu.Lock()
			l.quitLocked()
			l.mu.Unlock()
			return
		}
		if queue.slow.Load() && l.enqueue(queue, item) {
			continue
		}
		if l.stopped.Load() {
			l.discard(queue, item)
			return
		}
		if queue != last {
			last = queue
			l.cur.Store(queue)
		}
		count++
		busy := count<<1 | 1
		l.state.Store(busy)
		if l.dog.parked.Load() {
			l.dog.unpark()
		}
		l.deliver(item)
		queue.done()
		if !l.state.CompareAndSwap(busy, busy-1) {
			l.drain(queue)
			return
		}
	}
}

// enqueue queues item for the goroutine that delivers queue's items. It returns false
// if no goroutine does so any more.
func (l *Loop[T]) enqueue(queue *PeerQueue[T], item T) bool {
	for {
		slow, full := l.push(queue, item)
		if !slow {
			return false
		}
		if !full {
			return true
		}
		select {
		case <-queue.free:
		case <-l.quit:
			l.discard(queue, item)
			return true
		}
	}
}

// drain delivers the items of queue until it is empty.
func (l *Loop[T]) drain(queue *PeerQueue[T]) {
	for {
		item, ok := l.pop(queue)
		switch {
		case !ok:
			return
		case l.stopped.Load():
			l.discard(queue, item)
		default:
			l.deliver(item)
			queue.done()
		}
	}
}

func (l *Loop[T]) discard(queue *PeerQueue[T], item T) {
	queue.done()
	if l.Discard != nil {
		l.Discard(item)
	}
}
