package engine

import (
	"runtime"
	"time"
)

// Spinner passes the time between two looks. It yields often, since on a busy machine the
// peer may be waiting for this very core: two that spin and yield share one well. To other
// goroutines it yields less often, and only where they may have no other thread to run on:
// for a goroutine that is bound to its thread, as Python's callers are, that takes as long
// as a sleep. It belongs to one goroutine.
type Spinner struct {
	n              uint
	oversubscribed bool
	cores          *cores // nil: whether others want the cores is not looked at
}

// fewThreads is a number of threads for goroutines that those who spin may take up.
const fewThreads = 3

// Pause passes a moment.
func (s *Spinner) Pause() {
	switch s.n++; {
	case s.n%256 == 0 && s.oversubscribed:
		runtime.Gosched()
	case s.n%16 == 0:
		s.cores.yield()
	}
}

// PauseLong passes a moment after a look as FeedOptions.LongPolls has it.
func (s *Spinner) PauseLong() {
	if s.n++; s.n%fewLooks == 0 {
		s.YieldGoroutines()
	}
}

// fewLooks is how many long looks may pass before other goroutines have their turn.
const fewLooks = 16 // 160 us over RDMA

// YieldGoroutines lets other goroutines run that may have no other thread.
func (s *Spinner) YieldGoroutines() {
	if s.oversubscribed {
		runtime.Gosched()
	}
}

// adaptiveSpin says for how long to look before sleeping: long while what is awaited has
// mostly come within the longest look, else hardly at all, since then the core is wanted by
// others, perhaps by the very peer.
type adaptiveSpin struct {
	waiting bool
	since   uint64 // when the wait began
	score   int    // from -maxScore to maxScore
}

const (
	maxScore  = 8
	shortSpin = 5 * time.Microsecond
)

// empty says that there is nothing at time now.
func (a *adaptiveSpin) empty(now uint64) {
	if !a.waiting {
		a.waiting, a.since = true, now
	}
}

// begin begins a wait anew.
func (a *adaptiveSpin) begin(now uint64) { a.waiting, a.since = true, now }

// came says that a message has come, where the longest look is most.
func (a *adaptiveSpin) came(now uint64, most time.Duration) {
	if !a.waiting {
		return
	}
	a.waiting = false
	if now-a.since <= uint64(most) {
		a.score = min(a.score+1, maxScore)
	} else {
		a.score = max(a.score-1, -maxScore)
	}
}

// spin is how long to look, of the longest time that the configuration allows.
func (a *adaptiveSpin) spin(most time.Duration) time.Duration {
	if a.score < 0 {
		return min(most, shortSpin)
	}
	return most
}
