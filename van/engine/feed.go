package engine

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/wake"
)

// Source is where messages of a transport come from: a socket, memory, a device. Take,
// Arm and Disarm are called by one goroutine at a time, which holds the Feed.
type Source[T any] interface {
	// Take takes one message, if one is there, without blocking. A source that can look
	// more cheaply inside than by being called again may look for slice. For a Poll it
	// leaves alone lanes whose Hand is not empty: the loop delivers earlier messages of
	// them.
	Take(slice time.Duration, poll bool) (item T, lane *PeerQueue[T], found PollResult)

	// Arm makes peers wake s from now on, and tells whether there is something that would
	// not: then s does not sleep. For ForLoop it is called by another goroutine than the
	// sleeper.
	Arm(s Sleeper) bool

	// Disarm says that nobody sleeps.
	Disarm()

	// Sleep calls arm and, unless that is true, sleeps until s has been woken, by a peer or
	// by Wake, since Sleep was called. It sleeps for limit at most, if limit is not 0. It may
	// return early.
	Sleep(s Sleeper, arm func() bool, limit time.Duration)

	// Wake ends the sleep of s, or the next one. Any goroutine calls it.
	Wake(s Sleeper)

	// Deliver hands up a message in a turn, see Deliverer.
	Deliver(item T, turn *Deliverer)

	// Discard takes back a message that will not be delivered, since the loop ends.
	Discard(item T)
}

// Sleeper is who may sleep on a source.
type Sleeper uint32

// The sleepers. ForLoop is the loop, if it sleeps, on whose behalf a Poll arms.
const (
	ByLoop  Sleeper = 1
	ByPoll  Sleeper = 2
	ForLoop Sleeper = 3
)

// FeedOptions say how an Engine uses a source.
type FeedOptions struct {
	// Polls lets Polls receive from the source.
	Polls bool
	// Spins lets the loop look for a while before it sleeps.
	Spins bool
	// PollArmsLoop says that a Poll can arm for a loop that sleeps, which is then not woken
	// for what a Poll receives; and that Polls may sleep, too. Otherwise what comes while a
	// Poll looks would wake the loop, so it does not sleep on the source then, but looks
	// now and then.
	PollArmsLoop bool
	// Spin is how long to look before a sleep, if not as long as the Engine says: for a
	// source whose waking takes long.
	Spin time.Duration
	// LongPolls says that a Take which looks takes as long as many of other sources, and yields the core
	// meanwhile, but not to other goroutines.
	LongPolls bool
	// CannotSleep, if not nil, tells whether the source cannot sleep for now. The loop looks at it
	// now and then.
	CannotSleep func() bool
	// DetectsBusyCores says that whoever looks for what comes, and yields the core meanwhile, shows by getting it back
	// late that other programs want the cores. An Engine with a source that is not so never takes them for
	// busy. Over RDMA it may be the kernel that has the core then, to carry out this node's own writes
	// (Soft-RoCE), and who sleeps instead waits longer.
	DetectsBusyCores bool
	// Busy, if not nil, tells whether so much has lately been sent or received that it
	// does not pay to look for what comes next.
	Busy func() bool
}

// Feed is a source of an Engine, with its loop.
type Feed[T any] struct {
	// Loop delivers what the loop has received. Its fields may be set before Start.
	Loop *Loop[T]

	e   *Engine
	src Source[T]
	o   FeedOptions

	// mu is held by who receives: the loop for one Take, a Poll from Claim to Release,
	// also while it delivers.
	mu       sync.Mutex
	claimed  atomic.Bool // a Poll has mu, or waits for it: the loop leaves it alone
	stopping atomic.Bool
	left     bool          // the Poll has left something to the loop; mu
	found    bool          // the Poll has received something; mu
	lane     *PeerQueue[T] // that the Poll delivers in; of the Poll

	misses atomic.Int32  // Polls that received something elsewhere only, since one that received something here
	until  atomic.Uint64 // when no other Poll is expected any more

	// Of who has the receiving role.
	hot    bool // a message has come since it last slept
	looks  adaptiveSpin
	parked atomic.Bool
	timer  *time.Timer
	woken  chan struct{} // ends a wait of the loop for timer

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
	f.Loop = NewLoop(f.receive, src.Deliver)
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

// Free calls free when nobody receives from f, which was stopped. It returns ctx's error,
// without having called free, when a Poll still receives at the end of ctx.
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

// Wake makes the loop look again.
func (f *Feed[T]) Wake() {
	f.src.Wake(ByLoop)
	f.endWait()
}

func (f *Feed[T]) endWait() {
	wake.Put(f.woken)
}

// Lock waits until nobody receives, and keeps others from it until Unlock.
func (f *Feed[T]) Lock() { f.mu.Lock() }

// Unlock ends Lock.
func (f *Feed[T]) Unlock() { f.mu.Unlock() }

// Parked tells whether the loop sleeps, or is about to.
func (f *Feed[T]) Parked() bool { return f.parked.Load() }

// receive waits for the next message. It is the loop's.
func (f *Feed[T]) receive() (item T, lane *PeerQueue[T], ok bool) {
	for !f.stopping.Load() {
		item, lane, found := f.take(0, 0)
		if found == Message {
			return item, lane, true
		}
		if f.spins() && (f.hot || found >= InFlight) {
			if item, lane, ok := f.look(); ok {
				return item, lane, true
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
	return item, lane, false
}

// spins tells whether the loop may look before it sleeps.
func (f *Feed[T]) spins() bool {
	return f.o.Spins && f.o.Spin > 0 && !f.e.spinner.cores.wanted() && (f.o.Busy == nil || !f.o.Busy())
}

// take takes a message if there is one and no Poll has the source. It is time now; 0: the
// clock is read only if that matters.
func (f *Feed[T]) take(slice time.Duration, now uint64) (item T, lane *PeerQueue[T], found PollResult) {
	if f.claimed.Load() || !f.mu.TryLock() {
		return item, lane, Nothing
	}
	defer f.mu.Unlock()
	if f.stopping.Load() {
		return item, lane, Nothing
	}
	item, lane, found = f.takeFrom(slice, false)
	if now == 0 && (found != Message || f.looks.waiting) {
		now = clock.Now()
	}
	if found != Message {
		f.looks.empty(now)
		return item, lane, found
	}
	if lane.Undelivered != nil {
		lane.Undelivered.Add(1) // under mu: a Poll sees it
	}
	f.looks.came(now, f.o.Spin)
	f.hot = true
	if f.misses.Load() != 0 {
		f.misses.Store(0)
	}
	return item, lane, found
}

// takeFrom has the source take a message, which may look for it, and yield the core meanwhile.
func (f *Feed[T]) takeFrom(slice time.Duration, poll bool) (item T, lane *PeerQueue[T], found PollResult) {
	if slice == 0 {
		return f.src.Take(slice, poll)
	}
	y := f.e.spinner.cores.begin()
	item, lane, found = f.src.Take(slice, poll)
	y.end(slice)
	return item, lane, found
}

// look takes a message that comes soon, without sleeping. One loop of a node at a time
// does, and none while a Poll does.
func (f *Feed[T]) look() (item T, lane *PeerQueue[T], ok bool) {
	if !f.e.forever {
		if !f.e.spinning.CompareAndSwap(false, true) {
			return item, lane, false
		}
		defer f.e.spinning.Store(false)
	}
	limit := f.SpinTime()
	if f.o.PollArmsLoop {
		limit = f.looks.spin(f.o.Spin)
	}
	slice := limit / 4 // a Poll need not wait longer than one of them
	s := f.e.spinner
	if f.o.LongPolls {
		s.YieldGoroutines() // to those that the deliveries before have woken
	}
	start := clock.Now()
	for was := start; !f.stopping.Load() && !f.e.polling.Load(); f.pause(&s) {
		now := clock.Now() // before the look, not between it and the delivery
		f.e.spinner.cores.passed(now, now-was, limit)
		was = now
		item, lane, found := f.take(slice, now)
		switch {
		case found == Message:
			return item, lane, true
		case found >= InFlight:
			start = now
		case !f.e.forever && now-start > uint64(limit):
			return item, lane, false
		}
	}
	return item, lane, false
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
	f.parked.Store(true) // before arm looks whether a Poll has the source
	f.src.Sleep(ByLoop, f.armLoop, 0)
	f.parked.Store(false)
	if f.o.PollArmsLoop && !f.claimed.Load() {
		f.src.Disarm()
	}
}

// arm arms the source for the loop. While a Poll has the source it stays as it is: the end
// of the Poll arms it, or the loop is not to sleep on it.
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

// pollGrace is how long after a Poll another one is expected.
const pollGrace = time.Millisecond

func (f *Feed[T]) pollExpected() bool { return f.claimed.Load() || clock.Now() < f.until.Load() }

const (
	// holdTime is longer than the loop holds a source but for what is rare.
	holdTime = 50 * time.Microsecond

	// maxMisses is how many Polls may receive from other sources only, between two that receive from this one. Then they
	// leave it alone until its loop receives something. Polls that receive nothing tell nothing.
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
			f.Wake() // it may have gone to sleep because of the claim
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
		f.src.Wake(ByLoop) // else it would be woken for what this Poll receives
	}
	return true
}

// PollOnce implements Pollable.
func (f *Feed[T]) PollOnce(slice time.Duration) PollResult {
	if f.stopping.Load() {
		return Nothing
	}
	item, lane, found := f.takeFrom(slice, true)
	f.found = f.found || found >= Progress
	switch found {
	case Message:
		f.lane = lane
		f.src.Deliver(item, &f.e.turn)
		f.lane = nil
		if f.e.ended {
			f.Loop.drain(lane, &f.e.turn)
		}
		f.e.turn.ended.Add(1)
	case LeaveToLoop:
		f.left = true
	}
	return found
}

// SpinTime implements Pollable.
func (f *Feed[T]) SpinTime() time.Duration { return max(f.o.Spin, awakeLeast) }

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
	case f.left: // no Poll comes first
		f.misses.Store(maxMisses)
	case f.found && f.misses.Load() != 0:
		f.misses.Store(0)
	}
	again = again && !f.left
	f.left, f.found = false, false
	if f.lane != nil { // EndPoll
		f.lane.keep()
	}
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

// resume makes the loop take over at once, since no Poll is likely soon.
func (f *Feed[T]) resume() {
	f.until.Store(0)
	f.endWait()
}
