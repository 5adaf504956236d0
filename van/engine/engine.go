package engine

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van/env"
)

// Engine receives for one node, from all its sources. Each source has a loop, which
// receives and delivers, and sleeps while the source is idle. A goroutine that waits for an
// answer receives in place of the loops: see Poll.
type Engine struct {
	spin    time.Duration // the longest spin before a sleep; 0: none
	forever bool          // loops never sleep
	spinner Spinner       // copied by each caller; if cores is nil, goroutines also spin while other programs want the cores

	sources  atomic.Pointer[[]Pollable]
	mu       sync.Mutex  // guards changes of sources
	polling  atomic.Bool // a Poll runs
	spinning atomic.Bool // a loop spins

	// State of the running Poll.
	claimed   []claim
	spinStats adaptiveSpin
}

// claim is a source that a Poll has claimed.
type claim struct {
	Pollable
	found bool // this Poll has received from it
}

// New makes an Engine whose goroutines spin for the given time before they sleep: 0 is no
// spinning, negative is forever, except in Polls, whose callers have a deadline. While other
// programs keep the cores busy, goroutines with a limited spin do not spin at all.
func New(spin time.Duration) *Engine {
	e := &Engine{spin: spin, forever: spin < 0, spinner: Spinner{oversubscribed: runtime.GOMAXPROCS(0) <= fewThreads}}
	switch {
	case e.forever:
		e.spin = env.SpinThenBlock.Spin()
	case spin > 0:
		e.spinner.cores = &cores{}
	}
	e.sources.Store(&[]Pollable{})
	return e
}

// Spinner returns a Spinner, which passes the time between two polls of a source.
func (e *Engine) Spinner() Spinner { return e.spinner }

// PollResult is the result of one poll of a source.
type PollResult int

const (
	// Nothing: the source is idle.
	Nothing PollResult = iota
	// InFlight: an operation is in flight whose end causes no wake-up. Polling again at once
	// pays.
	InFlight
	// Progress: progress was made, but no message is complete.
	Progress
	// Message: a message was received.
	Message
	// LeaveToLoop: there is a message that a Poll may not receive. The Poll ends, and the loop
	// receives it.
	LeaveToLoop
)

// Pollable is a source from which a Poll can receive. All methods except Claim are called only
// between a successful Claim and its Release, by one goroutine.
type Pollable interface {
	// Claim reserves the source for the caller instead of its loop. It returns false if a Poll
	// cannot receive from the source at present.
	Claim() bool
	// PollOnce receives and delivers one message or one batch. It spins for slice at most.
	PollOnce(slice time.Duration) PollResult
	// SpinTime returns how long a caller that does not sleep on the source should spin.
	SpinTime() time.Duration
	// CanSleep reports whether a Poll can sleep on the source.
	CanSleep() bool
	// Sleep sleeps until there may be a message, limit at most.
	Sleep(limit time.Duration)
	// Release returns the source to its loop. missed says that the Poll has received
	// from other sources only. again says that another Poll is likely soon.
	Release(missed, again bool)
}

// Add adds p to the sources of Polls.
func (e *Engine) Add(p Pollable) {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := append(slices.Clone(*e.sources.Load()), p)
	e.sources.Store(&all)
}

// Remove undoes Add. A running Poll may continue to use p.
func (e *Engine) Remove(p Pollable) {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(*e.sources.Load()), func(x Pollable) bool { return x == p })
	e.sources.Store(&all)
}

const (
	// maxQuiet limits a Poll after its last progress, and maxPoll limits it in total, since its
	// caller has a deadline.
	maxQuiet = time.Millisecond
	maxPoll  = 20 * time.Millisecond

	// clockInterval is the number of successful polls between two readings of the clock.
	clockInterval = 16

	// slicesEach is the number of polls of one source within the longest spin.
	slicesEach = 8
)

// Poll receives and delivers on the caller's goroutine until done returns true or no
// message has arrived for a short time. It saves waking the waiting goroutine. Only one caller
// at a time polls, for all sources; others return at once.
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
	again, found := done(), false
	for i := range claimed {
		found = found || claimed[i].found
	}
	for i := range claimed {
		claimed[i].Release(found && !claimed[i].found, again)
	}
	clear(claimed)
	e.polling.Store(false)
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
	e.spinStats.begin(begun)
	// The clock is read only while the sources are idle, before a poll: not between a message and
	// its delivery, nor before a message that has arrived already.
	now, stale, received := begun, false, 0
	for start := begun; !done(); {
		best := Nothing
		for i := range claimed {
			c := &claimed[i]
			found := c.PollOnce(slice)
			c.found = c.found || found >= Progress
			best = max(best, found)
		}
		if best == LeaveToLoop {
			return
		}
		if best >= Progress {
			e.spinStats.arrived(now, most)
			e.spinStats.begin(now)
			stale = true
			if received++; received%clockInterval == 0 && clock.Now()-begun > uint64(maxPoll) {
				return // messages arrive without a pause
			}
			continue
		}
		if stale {
			now, stale = clock.Now(), false
			e.spinStats.begin(now)
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
		case sleeps && quiet > e.spinStats.spin(most):
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

// minSpin is the least time to spin if the spinning goroutine is not the one that sleeps. Ending such a spin costs two
// wake-ups: the goroutine wakes another one, which sleeps and wakes it when a message arrives. minSpin is longer than
// the time until the answer to 1 MB begins over TCP on a machine with 2 cores, 300 us.
const minSpin = 400 * time.Microsecond
