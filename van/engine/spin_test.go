package engine

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// TestAdaptiveSpin: waits that were short make the next one spin, long ones do not.
func TestAdaptiveSpin(t *testing.T) {
	const most = 50 * time.Microsecond
	var p adaptiveSpin
	wait := func(d time.Duration) {
		p.begin(1000)
		p.came(1000+uint64(d), most)
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

// alone makes the goroutine of a test the only one that runs, until it yields, and returns a function that tells whether
// another one, begun just now, has run.
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

// onceOfSome says whether saw has been true in one of some trials. Who yields may be chosen to run on: Go's scheduler
// looks first, each 61st time, where those wait who have yielded.
func onceOfSome(saw func() bool) bool {
	for range 5 {
		if saw() {
			return true
		}
	}
	return false
}

// TestPauseLong: with few threads other goroutines run after a number of long looks, and at once where that is asked for.
func TestPauseLong(t *testing.T) {
	another := alone(t)
	s := New(time.Second).Spinner()
	if !onceOfSome(func() bool {
		ran := another()
		for range fewLooks {
			s.PauseLong()
		}
		return ran.Load()
	}) {
		t.Errorf("after %d long looks no other goroutine has run", fewLooks)
	}
	if !onceOfSome(func() bool {
		ran := another()
		s.YieldGoroutines()
		return ran.Load()
	}) {
		t.Error("no other goroutine has run")
	}
}
