package engine

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// TestAdaptiveSpin: after short waits the next one spins, after long waits it does not.
func TestAdaptiveSpin(t *testing.T) {
	const most = 50 * time.Microsecond
	var p adaptiveSpin
	wait := func(d time.Duration) {
		p.begin(1000)
		p.arrived(1000+uint64(d), most)
	}
	if got := p.spin(most); got != most {
		t.Errorf("at first it spins for %s, want %s", got, most)
	}
	for range 3 {
		wait(time.Second)
	}
	if got := p.spin(most); got != shortSpin {
		t.Errorf("after long waits it spins for %s, want %s", got, shortSpin)
	}
	if got := p.spin(0); got != 0 {
		t.Errorf("where it is not to spin it spins for %s", got)
	}
	for range 100 {
		wait(time.Second)
	}
	for range maxScore {
		wait(time.Microsecond)
	}
	if got := p.spin(most); got != most {
		t.Errorf("after short waits it spins for %s, want %s", got, most)
	}
}

// alone makes the goroutine of a test the only running one until it yields. It returns a function that starts another
// goroutine and returns whether it has run.
func alone(t *testing.T) (another func() (ran *atomic.Bool)) {
	t.Helper()
	was := runtime.GOMAXPROCS(1)
	t.Cleanup(func() { runtime.GOMAXPROCS(was) })
	return func() *atomic.Bool {
		var ran atomic.Bool
		go ran.Store(true)
		return &ran
	}
}

// onceOfSome reports whether saw was true in one of some trials. A yielding goroutine may continue at once: each 61st
// time, Go's scheduler first checks the queue of yielding goroutines.
func onceOfSome(saw func() bool) bool {
	for range 5 {
		if saw() {
			return true
		}
	}
	return false
}

// TestPauseLong: with few threads other goroutines run after a number of long polls, and at once after YieldGoroutines.
func TestPauseLong(t *testing.T) {
	another := alone(t)
	s := New(time.Second).Spinner()
	if !onceOfSome(func() bool {
		ran := another()
		for range longPollsPerYield {
			s.PauseLong()
		}
		return ran.Load()
	}) {
		t.Errorf("after %d long polls no other goroutine has run", longPollsPerYield)
	}
	if !onceOfSome(func() bool {
		ran := another()
		s.YieldGoroutines()
		return ran.Load()
	}) {
		t.Error("no other goroutine has run")
	}
}
