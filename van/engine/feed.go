package engine

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/wake"
)

// Source is a source of a transport's messages: a socket, memory, a device. Take,
// Arm and Disarm are called by one goroutine at a time, the holder of the Feed.
type Source[T any] interface {
	// Take takes one message, if there is one, without blocking. A source that can spin
	// more cheaply itself than by repeated calls may spin for slice. For a Poll, Take skips
	// queues whose Undelivered is not 0: the loop still delivers earlier messages of them.
	Take(slice time.Duration, poll bool) (item T, queue *PeerQueue[T], found PollResult)

	// Arm makes peers wake s from now on. It returns true if there is a message that will
	// cause no wake-up; s then does not sleep. With ForLoop, the caller is not the sleeping
	// goroutine.
	Arm(s Sleeper) bool

	// Disarm ends Arm: no goroutine sleeps.
	Disarm()

	// Sleep calls arm and, if arm returns false, sleeps until a peer or Wake wakes s. A
	// wake-up since the call of Sleep counts. Sleep lasts limit at most, if limit is not 0. It
	// may return early.
	Sleep(s Sleeper, arm func() bool, limit time.Duration)

	// Wake ends the sleep of s, or its next one. Any goroutine may call it.
	Wake(s Sleeper)

	// Deliver delivers a message. In a Poll it must not block.
	Deliver(item T, inPoll bool)

	// Discard releases a message that will not be delivered, since the loop ends.
	Discard(item T)
}

// Sleeper names a goroutine that may sleep on a source.
type Sleeper uint32

// The sleepers. ForLoop is a loop that sleeps, if a Poll arms the source on its behalf.
const (
	ByLoop  Sleeper = 1
	ByPoll  Sleeper = 2
	ForLoop Sleeper = 3
)

// FeedOptions say how an Engine uses a source.
type FeedOptions struct {
	// Polls allows Polls to receive from the source.
	Polls bool
	// Spins allows the loop to spin before it sleeps.
	Spins bool
	// PollArmsLoop says that a caller inside Poll can re-arm the source on behalf of the sleeping loop. The loop
	// then stays asleep while callers poll, and callers may sleep too. Without it, every message that arrives
	// during a Poll also wakes the loop, so the loop polls periodically instead of sleeping.
	PollArmsLoop bool
	// Spin replaces the Engine's spin time, for a source with slow wake-ups. 0: the Engine's.
	Spin time.Duration
	// LongPolls says that a spinning Take lasts as long as many polls of other sources. It yields the core
	// meanwhile, but not to other goroutines.
	LongPolls bool
	// CannotSleep, if not nil, reports whether the source cannot sleep at present. The loop then polls it
	// periodically.
	CannotSleep func() bool
	// DetectsBusyCores says that a late return from a yield, while spinning on this source, shows that other
	// programs want the cores. If one source of an Engine does not set it, the Engine never considers the cores
	// busy. Over RDMA (Soft-RoCE) the kernel may use the core for this node's own writes, and sleeping would
	// only wait longer.
	DetectsBusyCores bool
	// Busy, if not nil, reports whether the recent traffic is so high that spinning does not pay.
	Busy func() bool
}

// Feed is a source of an Engine, with its loop.
type Feed[T any] struct {
	// Loop delivers what the loop has received. Its fields may be set before Start.
	Loop *Loop[T]

	e   *Engine
	src Source[T]
	o   FeedOptions

	// mu is held while receiving: by the loop for one Take, by a Poll from Claim to Release,
	// also while it delivers.
	mu       sync.Mutex
	claimed  atomic.Bool // a Poll has mu, or waits for it: the loop does not lock it
	stopping atomic.Bool
	left     bool // the Poll has left a message to the loop; mu
	found    bool // the Poll has received a message; mu

	misses atomic.Int32  // Polls that received from other sources only, since the last that received from this one
	until  atomic.Uint64 // time until which another Poll is expected

	// State of the goroutine with the receiving role.
	hot       bool // a message has come since it last slept
	spinStats adaptiveSpin
	parked    atomic.Bool
	timer     *time.Timer
	woken     chan struct{} // ends a wait of the loop for timer

	armLoop, armPoll func() bool
}

// NewFeed makes src one of e's sources. Start begins to receive.
func NewFeed[T any](e *Engine, src Source[T], o FeedOptions) *Feed[T] {
	if o.Spin == 0 || e.spin <= 0 {
		o.Spin = e.spin
	}
	f := &Feed[T]{e: e, src: src, o: o, timer: time.NewTimer(time.Hour), woken: make(chan struct{}, 1)}
	if !o.DetectsBusyCores && e.spinner.cores != nil {
		e.spinner.cores.ignored.Store(true)
	}
	f.Loop = NewLoop(f.receive, func(item T) { src.Deliver(item, false) })
	f.Loop.Discard = src.Discard
	f.armLoop = f.arm
	f.armPoll = func() bool { return f.src.Arm(ByPoll) }
	return f
}

// Start begins to receive.
func (f *Feed[T]) Start() {
	if f.o.Polls {
		f.e.Add(f)
	}
	f.Loop.Start()
}

// Stop ends the loop; see Loop.Stop. No Poll begins to receive from f any more, but one
// that does may still be delivering: see Free.
func (f *Feed[T]) Stop(ctx context.Context) error {
	f.stopping.Store(true)
	f.e.Remove(f)
	f.src.Wake(ByPoll)
	f.Wake()
	return f.Loop.Stop(ctx)
}

// Free calls free when no goroutine receives from f any more. f was stopped. If a Poll still
// receives at the end of ctx, Free returns ctx's error and does not call free.
func (f *Feed[T]) Free(ctx context.Context, free func()) error {
	for s, since := f.e.spinner, clock.Now(); !f.mu.TryLock(); s.Pause() {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if clock.Now()-since > uint64(time.Millisecond) {
			wait, cancel := context.WithTimeout(ctx, time.Millisecond)
			<-wait.Done()
			cancel()
		}
	}
	defer f.mu.Unlock()
	free()
	return nil
}

// Wake makes the loop poll the source again.
func (f *Feed[T]) Wake() {
	f.src.Wake(ByLoop)
	f.endWait()
}

func (f *Feed[T]) endWait() {
	wake.Put(f.woken)
}

// Lock waits until no goroutine receives, and prevents receiving until Unlock.
func (f *Feed[T]) Lock() { f.mu.Lock() }

// Unlock ends Lock.
func (f *Feed[T]) Unlock() { f.mu.Unlock() }

// Parked reports whether the loop sleeps, or is about to sleep.
func (f *Feed[T]) Parked() bool { return f.parked.Load() }

// receive waits for the next message. Only the loop calls it.
func (f *Feed[T]) receive() (item T, queue *PeerQueue[T], ok bool) {
	for !f.stopping.Load() {
		item, queue, found := f.take(0, 0)
		if found == Message {
			return item, queue, true
		}
		if f.spins() && (f.hot || found >= InFlight) {
			if item, queue, ok := f.spin(); ok {
				return item, queue, true
			}
		}
		f.hot = f.e.forever
		switch {
		case (f.o.PollArmsLoop || !f.pollExpected()) && (f.o.CannotSleep == nil || !f.o.CannotSleep()):
			f.park()
		default:
			f.timer.Reset(pollGrace)
			select {
			case <-f.timer.C:
			case <-f.woken:
			}
		}
	}
	return item, queue, false
}

// spins reports whether the loop may spin before it sleeps.
func (f *Feed[T]) spins() bool {
	return f.o.Spins && f.o.Spin > 0 && !f.e.spinner.cores.wanted() && (f.o.Busy == nil || !f.o.Busy())
}

// take takes a message if there is one and no Poll has the source. now is the current time; with 0 take
// reads the clock if it needs the time.
func (f *Feed[T]) take(slice time.Duration, now uint64) (item T, queue *PeerQueue[T], found PollResult) {
	if f.claimed.Load() || !f.mu.TryLock() {
		return item, queue, Nothing
	}
	defer f.mu.Unlock()
	if f.stopping.Load() {
		return item, queue, Nothing
	}
	item, queue, found = f.takeFrom(slice, false)
	if now == 0 && (found != Message || f.spinStats.waiting) {
		now = clock.Now()
	}
	if found != Message {
		f.spinStats.empty(now)
		return item, queue, found
	}
	if queue.Undelivered != nil {
		queue.Undelivered.Add(1) // under mu: a Poll sees it
	}
	f.spinStats.arrived(now, f.o.Spin)
	f.hot = true
	if f.misses.Load() != 0 {
		f.misses.Store(0)
	}
	return item, queue, found
}

// takeFrom calls the source's Take, which may spin and yield the core meanwhile.
func (f *Feed[T]) takeFrom(slice time.Duration, poll bool) (item T, queue *PeerQueue[T], found PollResult) {
	if slice == 0 {
		return f.src.Take(slice, poll)
	}
	y := f.e.spinner.cores.begin()
	item, queue, found = f.src.Take(slice, poll)
	y.end(slice)
	return item, queue, found
}

// spin polls the source for a limited time, without sleeping. Only one loop of a node spins
// at a time, and none during a Poll.
func (f *Feed[T]) spin() (item T, queue *PeerQueue[T], ok bool) {
	if !f.e.forever {
		if !f.e.spinning.CompareAndSwap(false, true) {
			return item, queue, false
		}
		defer f.e.spinning.Store(false)
	}
	limit := f.SpinTime()
	if f.o.PollArmsLoop {
		limit = f.spinStats.spin(f.o.Spin)
	}
	slice := limit / 4 // the longest time that a Poll waits for this loop
	s := f.e.spinner
	if f.o.LongPolls {
		s.YieldGoroutines() // to goroutines that earlier deliveries have woken
	}
	start := clock.Now()
	for was := start; !f.stopping.Load() && !f.e.polling.Load(); f.pause(&s) {
		now := clock.Now() // before the poll, not between it and the delivery
		f.e.spinner.cores.passed(now, now-was, limit)
		was = now
		item, queue, found := f.take(slice, now)
		switch {
		case found == Message:
			return item, queue, true
		case found >= InFlight:
			start = now
		case !f.e.forever && now-start > uint64(limit):
			return item, queue, false
		}
	}
	return item, queue, false
}

func (f *Feed[T]) pause(s *Spinner) {
	if f.o.LongPolls {
		s.PauseLong()
	} else {
		s.Pause()
	}
}

// park sleeps until there may be something to receive.
func (f *Feed[T]) park() {
	f.parked.Store(true) // before arm checks whether a Poll has the source
	f.src.Sleep(ByLoop, f.armLoop, 0)
	f.parked.Store(false)
	if f.o.PollArmsLoop && !f.claimed.Load() {
		f.src.Disarm()
	}
}

// arm arms the source for the loop. While a Poll has the source, arm does not change it: the end
// of the Poll arms it, or the loop must not sleep on it.
func (f *Feed[T]) arm() bool {
	for s := f.e.spinner; !f.claimed.Load(); s.Pause() {
		if f.mu.TryLock() {
			found := f.stopping.Load() || f.src.Arm(ByLoop)
			f.mu.Unlock()
			return found
		}
	}
	return !f.o.PollArmsLoop || f.stopping.Load()
}

// pollGrace is the time after a Poll in which another one is expected.
const pollGrace = time.Millisecond

func (f *Feed[T]) pollExpected() bool { return f.claimed.Load() || clock.Now() < f.until.Load() }

const (
	// holdTime is the longest time that Claim waits for a loop. Loops seldom hold a source longer.
	holdTime = 50 * time.Microsecond

	// maxMisses is the number of successive Polls that may receive from other sources only. Further Polls skip this source
	// until its loop receives a message. Polls that receive nothing do not count.
	maxMisses = 64
)

// Claim implements Pollable.
func (f *Feed[T]) Claim() bool {
	if f.stopping.Load() || f.misses.Load() >= maxMisses {
		return false
	}
	if f.o.Busy != nil && f.o.Busy() {
		if f.until.Load() != 0 {
			f.resume()
		}
		return false
	}
	f.claimed.Store(true)
	s := f.e.spinner
	for begun := uint64(0); !f.mu.TryLock(); s.Pause() {
		now := clock.Now()
		if begun == 0 {
			begun = now
		}
		if now-begun > uint64(holdTime) {
			f.claimed.Store(false)
			f.Wake() // the loop may have gone to sleep because of the claim
			return false
		}
	}
	if f.stopping.Load() {
		f.claimed.Store(false)
		f.mu.Unlock()
		return false
	}
	if f.o.PollArmsLoop {
		f.src.Disarm()
	} else if f.parked.Load() {
		f.src.Wake(ByLoop) // otherwise each message of this Poll would wake the loop
	}
	return true
}

// PollOnce implements Pollable.
func (f *Feed[T]) PollOnce(slice time.Duration) PollResult {
	if f.stopping.Load() {
		return Nothing
	}
	item, _, found := f.takeFrom(slice, true)
	f.found = f.found || found >= Progress
	switch found {
	case Message:
		f.src.Deliver(item, true)
	case LeaveToLoop:
		f.left = true
	}
	return found
}

// SpinTime implements Pollable.
func (f *Feed[T]) SpinTime() time.Duration { return max(f.o.Spin, minSpin) }

// CanSleep implements Pollable.
func (f *Feed[T]) CanSleep() bool { return f.o.PollArmsLoop }

// Sleep implements Pollable.
func (f *Feed[T]) Sleep(limit time.Duration) {
	if !f.stopping.Load() {
		f.src.Sleep(ByPoll, f.armPoll, limit)
		f.src.Disarm()
	}
}

// Release implements Pollable.
func (f *Feed[T]) Release(missed, again bool) {
	switch {
	case missed:
		f.misses.Add(1)
	case f.left: // the loop must receive before the next Poll
		f.misses.Store(maxMisses)
	case f.found && f.misses.Load() != 0:
		f.misses.Store(0)
	}
	again = again && !f.left
	f.left, f.found = false, false
	defer f.mu.Unlock()
	f.claimed.Store(false)
	switch {
	case f.stopping.Load():
	case f.o.PollArmsLoop:
		if f.src.Arm(ForLoop) {
			f.src.Wake(ByLoop)
		}
	case again:
		f.until.Store(clock.Now() + uint64(pollGrace))
	default:
		f.resume()
	}
}

// resume makes the loop continue at once, since no Poll is expected soon.
func (f *Feed[T]) resume() {
	f.until.Store(0)
	f.endWait()
}
