package engine

import (
	"runtime"
	"time"
)

// Spinner passes the time between two polls. It belongs to one goroutine.
//
// It yields the core often, since on a busy machine the peer may need this core: two processes
// that spin and yield share a core well. It yields to other goroutines less often, and only if
// they may have no other thread: a goroutine that is bound to its thread, such as a caller from
// Python, needs as long as a sleep for that.
type Spinner struct {
	n              uint
	oversubscribed bool
	cores          *cores // nil: it does not detect that other programs want the cores
}

// fewThreads is a number of threads that spinning goroutines may occupy completely.
const fewThreads = 3

// Pause passes the time between two short polls.
func (s *Spinner) Pause() {
	switch s.n++; {
	case s.n%256 == 0 && s.oversubscribed:
		runtime.Gosched()
	case s.n%16 == 0:
		s.cores.yield()
	}
}

// PauseLong passes the time between two long polls, see FeedOptions.LongPolls.
func (s *Spinner) PauseLong() {
	if s.n++; s.n%longPollsPerYield == 0 {
		s.YieldGoroutines()
	}
}

// longPollsPerYield is the number of long polls before other goroutines may run.
const longPollsPerYield = 16 // 160 us over RDMA

// YieldGoroutines lets other goroutines run if they may have no other thread.
func (s *Spinner) YieldGoroutines() {
	if s.oversubscribed {
		runtime.Gosched()
	}
}

// adaptiveSpin computes the spin time before a sleep. While most messages arrive within the longest
// spin, it is long. Otherwise it is short, since other programs, perhaps the peer, need the core.
type adaptiveSpin struct {
	waiting bool
	since   uint64 // begin of the wait
	score   int    // from -maxScore to maxScore
}

const (
	maxScore  = 8
	shortSpin = 5 * time.Microsecond
)

// empty records that there was no message at time now.
func (a *adaptiveSpin) empty(now uint64) {
	if !a.waiting {
		a.waiting, a.since = true, now
	}
}

// begin starts a new wait.
func (a *adaptiveSpin) begin(now uint64) { a.waiting, a.since = true, now }

// arrived records that a message has arrived at time now. most is the longest spin.
func (a *adaptiveSpin) arrived(now uint64, most time.Duration) {
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

// spin returns the spin time. most is the configured longest spin.
func (a *adaptiveSpin) spin(most time.Duration) time.Duration {
	if a.score < 0 {
		return min(most, shortSpin)
	}
	return most
}
