package engine

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van/env"
)

// Engine receives for one node, from all its sources. Each source has a loop, which
// receives and delivers, and sleeps when nothing comes. A goroutine that waits for an
// answer receives in place of the loops: see Poll.
type Engine struct {
	spin    time.Duration // the longest look before a sleep; 0: none
	forever bool          // loops never sleep
	spinner Spinner       // a new one; without cores, waits look also where others want the cores

	sources  atomic.Pointer[[]Pollable]
	mu       sync.Mutex  // guards changes of sources
	polling  atomic.Bool // a Poll is under way
	spinning atomic.Bool // a loop looks without sleeping

	// Of the Poll that is under way.
	claimed []claim
	looks   adaptiveSpin
	turn    Deliverer
	ended   bool // by one of its deliveries
}

// claim is a source that a Poll receives from.
type claim struct {
	Pollable
	found bool // something, in this Poll
}

// New makes an Engine whose waits look for spin before they sleep: 0 not at all, negative
// for ever, but in Polls, whose callers have a deadline. Where other programs keep the
// cores busy, waits of a limited look do not look at all.
func New(spin time.Duration) *Engine {
	e := &Engine{spin: spin, forever: spin < 0, spinner: Spinner{oversubscribed: runtime.GOMAXPROCS(0) <= fewThreads}}
	switch {
	case e.forever:
		e.spin = env.SpinThenBlock.Spin()
	case spin > 0:
		e.spinner.cores = &cores{}
	}
	e.turn.engine = e
	e.sources.Store(&[]Pollable{})
	return e
}

// Spinner returns what passes the time between two looks.
func (e *Engine) Spinner() Spinner { return e.spinner }

// PollResult is what a look at a source has found.
type PollResult int

const (
	// Nothing is there.
	Nothing PollResult = iota
	// InFlight says that something is under way whose end nobody announces: it pays to look
	// again at once.
	InFlight
	// Progress was made, but no message is complete.
	Progress
	// Message says that one was received.
	Message
	// LeaveToLoop says that there is something, but not for a Poll: it ends, and the loop takes
	// over.
	LeaveToLoop
)

// Pollable is what a Poll receives from. Its methods but Claim are called only between a
// Claim that was true and its Release, all by one goroutine.
type Pollable interface {
	// Claim makes the loop leave the source to the caller. It is false when there is
	// nothing to be received that way for now.
	Claim() bool
	// PollOnce receives and delivers what is there, one message or one batch, looking for it
	// for slice at most.
	PollOnce(slice time.Duration) PollResult
	// SpinTime is how long to look for what comes, by who does not sleep on the source.
	SpinTime() time.Duration
	// CanSleep tells whether a Poll can sleep on the source.
	CanSleep() bool
	// Sleep sleeps until there may be something, limit at most.
	Sleep(limit time.Duration)
	// Release gives the source back to its loop. Missed says that the Poll has received
	// something, but not here. Again says that another Poll is likely soon.
	Release(missed, again bool)
}

// Add makes Polls receive from p, too.
func (e *Engine) Add(p Pollable) {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := append(slices.Clone(*e.sources.Load()), p)
	e.sources.Store(&all)
}

// Remove takes back Add. A Poll that is under way may go on to use p.
func (e *Engine) Remove(p Pollable) {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(*e.sources.Load()), func(x Pollable) bool { return x == p })
	e.sources.Store(&all)
}

const (
	// maxQuiet and maxPoll bound a Poll, the first one after the last progress: its
	// caller has a deadline.
	maxQuiet = time.Millisecond
	maxPoll  = 20 * time.Millisecond

	// rarely is how many looks find something between two readings of the clock.
	rarely = 16

	// slicesEach is how many looks of one source there are in the longest look.
	slicesEach = 8
)

// Poll receives and delivers on the caller's goroutine until done returns true or nothing
// has come for a short time. It saves the one who waits from being woken. Only one caller
// at a time polls, for all; others return at once.
func (e *Engine) Poll(done func() bool) {
	if e.spin <= 0 || e.spinner.cores.wanted() || done() || !e.polling.CompareAndSwap(false, true) {
		return
	}
	claimed := e.claimed[:0]
	for _, p := range *e.sources.Load() {
		if p.Claim() {
			claimed = append(claimed, claim{Pollable: p})
		}
	}
	e.claimed = claimed
	if len(claimed) > 0 {
		e.poll(claimed, done)
	}
	if !e.ended {
		e.release(done())
	}
	clear(claimed)
	e.ended = false
	e.polling.Store(false)
}

// release gives the sources of the Poll that is under way back to their loops.
func (e *Engine) release(again bool) {
	found := false
	for i := range e.claimed {
		found = found || e.claimed[i].found
	}
	for i := range e.claimed {
		e.claimed[i].Release(found && !e.claimed[i].found, again)
	}
}

// EndPoll ends the Poll whose delivery calls it, if ctx says that it is one, see Within: loops
// receive from now on, from all sources, and what comes for the lane of the delivery waits
// for its end. What closes a transport calls it first, since what it then waits for has to
// be received.
func (e *Engine) EndPoll(ctx context.Context) {
	if turnOf(ctx) == &e.turn && !e.ended {
		e.ended = true
		e.release(false)
	}
}

// EndPoll is Engine.EndPoll of the Engine whose Poll makes the delivery that ctx is of, if one
// does.
func EndPoll(ctx context.Context) {
	if t := turnOf(ctx); t != nil && t.engine != nil {
		t.engine.EndPoll(ctx)
	}
}

func (e *Engine) poll(claimed []claim, done func() bool) {
	s := e.spinner
	n := len(claimed)
	sleeps, most := n == 1 && claimed[0].CanSleep(), e.spin
	for i := range claimed {
		if !sleeps {
			most = max(most, claimed[i].SpinTime())
		}
	}
	slice := most / time.Duration(slicesEach*n*n)
	begun := clock.Now()
	e.looks.begin(begun)
	// The clock is read while nothing comes: before a look, and not between a message and
	// its delivery, or the next message that is there already.
	now, stale, came := begun, false, 0
	for start := begun; !done(); {
		best := Nothing
		for i := range claimed {
			c := &claimed[i]
			found := c.PollOnce(slice)
			if e.ended {
				return
			}
			c.found = c.found || found >= Progress
			best = max(best, found)
		}
		if best == LeaveToLoop {
			return
		}
		if best >= Progress {
			e.looks.came(now, most)
			e.looks.begin(now)
			stale = true
			if came++; came%rarely == 0 && clock.Now()-begun > uint64(maxPoll) {
				return // there is always more
			}
			continue
		}
		if stale {
			now, stale = clock.Now(), false
			e.looks.begin(now)
			start = now
		}
		if best == InFlight && now-begun < uint64(maxPoll) {
			start = now
		}
		quiet := time.Duration(now - start)
		if quiet > maxQuiet || now-begun > uint64(maxPoll) {
			return
		}
		switch {
		case sleeps && quiet > e.looks.spin(most):
			claimed[0].Sleep(maxQuiet - quiet)
		case !sleeps && quiet > most:
			return
		}
		s.Pause()
		was := now
		now = clock.Now()
		e.spinner.cores.passed(now, now-was, most)
	}
}

// awakeLeast is the least time to look where the goroutine that looks is not the one that
// sleeps: to give up takes waking another goroutine then, and that one's sleep.
const awakeLeast = 100 * time.Microsecond
