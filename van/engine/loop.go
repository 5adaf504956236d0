package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of a Loop's fields.
const (
	DefaultLimit    = 500 * time.Microsecond
	DefaultQueueCap = 65536
)

// ErrInDeliver is returned by Stop when it was called by a delivery, which it
// cannot wait for.
var ErrInDeliver = errors.New("engine: Stop called from a delivery")

// Loop receives items and delivers them. Set its fields before Start.
type Loop[T any] struct {
	// Limit is how long a delivery may keep the receiving role. Another goroutine
	// has it after one to two Limits (and the kernel's timer slack), and after eight at
	// most if all deliveries before were shorter.
	Limit time.Duration

	// QueueCap is the number of items that may wait in one lane behind a slow
	// delivery. A lane with so many is paused; see MayRead.
	QueueCap int

	// Budget, if not nil, bounds the bytes that wait in lanes behind slow deliveries. A
	// lane that has used it up is paused; see MayRead. Loops may share one.
	Budget *Budget

	// Weight is how many bytes an item takes while it waits; nil: none. It is only
	// asked of items that do.
	Weight func(T) int

	// Paused, if not nil, is told that MayRead is false of a lane from now on, and how
	// many bytes wait in it. It is called by who has the receiving role.
	Paused func(lane *PeerQueue[T], bytes int64)

	// Resumed, if not nil, is told that a paused lane has room again. It is called by
	// any goroutine and must not block.
	Resumed func(lane *PeerQueue[T])

	// Discard, if not nil, is given the items that will never be delivered because
	// of Stop. It may be called by several goroutines at once.
	Discard func(T)

	// Begin, if not nil, is called by each goroutine that is about to have the
	// receiving role. It may lock the goroutine to its thread.
	Begin func()

	recv    func() (T, *PeerQueue[T], bool)
	deliver func(T, *Deliverer)

	// state is epoch<<1 | delivering. Who has the receiving role counts the epoch
	// up with each delivery, so that the watchdog can tell one that is slow from
	// one that has begun since, and takes the role by counting it up itself.
	state atomic.Uint64
	cur   atomic.Pointer[PeerQueue[T]] // of the delivery in state

	taken func() // for tests: called while the role is being taken

	dog     watchdog
	pauses  atomic.Uint64
	stopped atomic.Bool
	quit    chan struct{} // closed when nothing will be received any more

	mu       sync.Mutex
	quitting bool
	runners  map[*Deliverer]struct{}
	watching bool
	changed  chan struct{} // closed and replaced when one of the above changes
}

// NewLoop makes a Loop.
//
// recv waits for the next item and says which lane it belongs to; with ok false
// the loop ends. It is called by one goroutine at a time, not always the same.
//
// deliver hands up one item in a turn. It may block: the deliveries of other lanes go
// on. Deliveries of one lane never overlap.
func NewLoop[T any](recv func() (item T, lane *PeerQueue[T], ok bool), deliver func(T, *Deliverer)) *Loop[T] {
	return &Loop[T]{
		Limit: DefaultLimit, QueueCap: DefaultQueueCap,
		recv: recv, deliver: deliver,
		dog: watchdog{wake: make(chan struct{}, 1)}, quit: make(chan struct{}),
		runners: map[*Deliverer]struct{}{}, changed: make(chan struct{}),
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

// lastTicks, lastTick apart, are how long Stop waits when ctx has ended. A process that stood still for as long as ctx
// lasts finds it over before its goroutines could end. If it stands still again it misses the ticks of that time.
const (
	lastTicks = 50
	lastTick  = 10 * time.Millisecond
)

// Stop ends the loop and waits until no delivery runs and all goroutines of the
// loop have ended, or until a moment after ctx ends, whose error it then returns. The caller
// sees to it that a recv that is waiting returns, before Stop or meanwhile.
// What waits in lanes is discarded. Stop may be called more than once.
//
// When a delivery calls Stop, with a ctx that Within has made for its turn, it waits for
// all other deliveries (but not for those that are waiting in Stop like itself) and
// returns ErrInDeliver; the loop has ended when that delivery has returned. A delivery
// that calls Stop with another ctx, or waits for another goroutine to Stop the loop,
// waits until that ctx ends.
func (l *Loop[T]) Stop(ctx context.Context) error {
	l.stopped.Store(true)
	self := turnOf(ctx)
	l.mu.Lock()
	l.quitLocked()
	_, inside := l.runners[self]
	if inside {
		self.stopping = true
		l.changedLocked()
	}
	ended, left := ctx.Done(), lastTicks
	var tick <-chan time.Time
	for !l.settledLocked(inside) {
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
	if inside {
		return ErrInDeliver
	}
	return nil
}

// Ticks is the number of times that the watchdog's timer has fired.
func (l *Loop[T]) Ticks() uint64 { return l.dog.ticks.Load() }

// Pauses is how often a lane was paused.
func (l *Loop[T]) Pauses() uint64 { return l.pauses.Load() }

func (l *Loop[T]) settledLocked(inside bool) bool {
	if l.watching {
		return false
	}
	for t := range l.runners {
		if !inside || !t.stopping {
			return false
		}
	}
	return true
}

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

// spawn starts a goroutine that has the receiving role. The caller holds l.mu.
func (l *Loop[T]) spawn(epoch uint64) {
	turn := new(Deliverer)
	l.runners[turn] = struct{}{}
	go func() {
		defer l.leave(turn)
		if l.Begin != nil {
			l.Begin()
		}
		l.run(epoch, turn)
	}()
}

// takeOver gives the receiving role to a new goroutine if the delivery that busy
// stands for still runs.
func (l *Loop[T]) takeOver(busy uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.quitting {
		return
	}
	lane := l.cur.Load()
	// The goroutine that loses the role goes to the lane's lock next, so it finds
	// the lane slow.
	lane.mu.Lock()
	taken := l.state.CompareAndSwap(busy, busy+1)
	if taken && l.taken != nil {
		l.taken()
	}
	if taken {
		lane.slow.Store(true)
	}
	lane.mu.Unlock()
	if taken {
		l.spawn((busy + 1) >> 1)
	}
}

func (l *Loop[T]) leave(t *Deliverer) {
	l.mu.Lock()
	delete(l.runners, t)
	l.changedLocked()
	l.mu.Unlock()
}

// run has the receiving role until it loses it or the loop ends.
func (l *Loop[T]) run(epoch uint64, turn *Deliverer) {
	var last *PeerQueue[T]
	for !l.stopped.Load() {
		item, lane, ok := l.recv()
		if !ok {
			l.mu.Lock()
			l.quitLocked()
			l.mu.Unlock()
			return
		}
		if lane.slow.Load() && l.enqueue(lane, item) {
			continue
		}
		if l.stopped.Load() {
			l.discard(lane, item)
			return
		}
		if lane != last {
			last = lane
			l.cur.Store(lane)
		}
		epoch++
		busy := epoch<<1 | 1
		l.state.Store(busy)
		if l.dog.parked.Load() {
			l.dog.unpark()
		}
		l.deliver(item, turn)
		lane.handed()
		if !l.state.CompareAndSwap(busy, busy-1) {
			l.drain(lane, turn)
			return
		}
	}
}

// enqueue gives item to the goroutine that delivers in lane. It reports false
// when there is none any more.
func (l *Loop[T]) enqueue(lane *PeerQueue[T], item T) bool {
	for {
		slow, full := l.push(lane, item)
		if !slow {
			return false
		}
		if !full {
			return true
		}
		select {
		case <-lane.room:
		case <-l.quit:
			l.discard(lane, item)
			return true
		}
	}
}

// drain delivers what has come for lane until it is empty.
func (l *Loop[T]) drain(lane *PeerQueue[T], turn *Deliverer) {
	for {
		item, ok := l.pop(lane)
		switch {
		case !ok:
			return
		case l.stopped.Load():
			l.discard(lane, item)
		default:
			l.deliver(item, turn)
			lane.handed()
		}
	}
}

func (l *Loop[T]) discard(lane *PeerQueue[T], item T) {
	lane.handed()
	if l.Discard != nil {
		l.Discard(item)
	}
}
