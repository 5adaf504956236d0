package engine

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// cores detects that other programs keep the cores busy. A goroutine that yields then waits for a
// time slice of another program, some milliseconds, whereas a sleeping one runs as soon as it is woken.
// Goroutines therefore do not spin for a pause, and then try again.
//
// A yield is also long if the hypervisor takes the core away, and then a sleep is no better. So one long
// time between two polls only starts the examination of the next yields: did the core go to another thread?
type cores struct {
	until atomic.Uint64 // end of the latest pause in spinning; 0: there was none
	doubt atomic.Uint64 // end of the examination of yields; 0: none

	ignored atomic.Bool // detection is off: see FeedOptions.DetectsBusyCores

	mu    sync.Mutex
	pause time.Duration // length of the latest pause
}

const (
	longYield  = time.Millisecond // longer than a peer with small messages keeps a shared core
	doubtTime  = 100 * time.Millisecond
	firstPause = 16 * time.Millisecond
	maxPause   = time.Second
)

// wanted reports whether other programs want the cores, so that goroutines must not spin.
func (c *cores) wanted() bool {
	if c == nil {
		return false
	}
	until := c.until.Load()
	return until != 0 && !c.ignored.Load() && clock.Now() < until
}

// passed records the time between two polls, the latter at time now. A poll lasts limit at most.
func (c *cores) passed(now, time uint64, limit time.Duration) {
	if c != nil && time >= uint64(limit+longYield) && c.doubt.Load() == 0 {
		c.doubt.Store(now + uint64(doubtTime))
	}
}

// yields is an interval in which the core is yielded. If c is not nil, the interval is examined.
type yields struct {
	c        *cores
	begun    uint64
	switches int64
}

// begin is called before the core is yielded. After that, the same goroutine calls end on the result.
func (c *cores) begin() yields {
	if c == nil {
		return yields{}
	}
	doubt := c.doubt.Load()
	if doubt == 0 || c.ignored.Load() {
		return yields{}
	}
	now := clock.Now()
	if now >= doubt {
		c.doubt.CompareAndSwap(doubt, 0)
		return yields{}
	}
	runtime.LockOSThread() // switches are counted for each thread
	n, ok := switches()
	if !ok {
		runtime.UnlockOSThread()
		return yields{}
	}
	return yields{c: c, begun: now, switches: n}
}

// end ends an interval that should have lasted limit at most.
func (y yields) end(limit time.Duration) {
	if y.c == nil {
		return
	}
	now := clock.Now()
	n, _ := switches()
	runtime.UnlockOSThread()
	if now-y.begun >= uint64(limit+longYield) && n != y.switches {
		y.c.taken(now)
	}
}

// yield yields the core to other threads.
func (c *cores) yield() {
	y := c.begin()
	_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	y.end(0)
}

// taken records that another thread has had the core for a long time, until now.
func (c *cores) taken(now uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	until := c.until.Load()
	switch {
	case now < until: // another goroutine has detected it
		return
	case now-until > 4*uint64(c.pause):
		c.pause = firstPause
	default:
		c.pause = min(2*c.pause, maxPause)
	}
	c.until.Store(now + uint64(c.pause))
	c.doubt.Store(now + uint64(c.pause+doubtTime))
}

// switches returns how often this thread has lost its core to another thread, if the system reports it.
func switches() (n int64, ok bool) {
	var u unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return u.Nivcsw, err == nil
}
