package engine

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// cores notices that other programs keep the cores busy. Who yields then waits for a whole turn
// of another program, some milliseconds, whereas a sleeper runs as soon as it is woken. So waits do
// not look for a while, and then try again.
//
// A yield is also long where the hypervisor takes the core away, and then a sleep is no better. So
// one long time between two looks only makes the next yields be examined: whether the core went to another thread.
type cores struct {
	until atomic.Uint64 // until when waits do not look; 0: they never were kept from it
	doubt atomic.Uint64 // until when yields are examined; 0: they are not

	ignored atomic.Bool // it is not noticed: see FeedOptions.DetectsBusyCores

	mu    sync.Mutex
	pause time.Duration // the last one
}

const (
	longYield  = time.Millisecond // longer than a peer of small messages keeps a core that it shares
	doubtTime  = 100 * time.Millisecond
	firstPause = 16 * time.Millisecond
	maxPause   = time.Second
)

// wanted tells whether others want the cores, so that waits are not to look.
func (c *cores) wanted() bool {
	if c == nil {
		return false
	}
	until := c.until.Load()
	return until != 0 && !c.ignored.Load() && clock.Now() < until
}

// passed says that between two looks, of limit at most, so much time has passed until now.
func (c *cores) passed(now, time uint64, limit time.Duration) {
	if c != nil && time >= uint64(limit+longYield) && c.doubt.Load() == 0 {
		c.doubt.Store(now + uint64(doubtTime))
	}
}

// yields is a time in which the core is yielded, examined if c is not nil.
type yields struct {
	c        *cores
	begun    uint64
	switches int64
}

// begin is called before the core is yielded, and end of what it returns behind that, by the same goroutine.
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

// end ends what was to take limit at most.
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

// yield lets other threads have the core.
func (c *cores) yield() {
	y := c.begin()
	_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	y.end(0)
}

// taken says that at time now the core came back from another thread, after a long time.
func (c *cores) taken(now uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	until := c.until.Load()
	switch {
	case now < until: // another wait has seen it
		return
	case now-until > 4*uint64(c.pause):
		c.pause = firstPause
	default:
		c.pause = min(2*c.pause, maxPause)
	}
	c.until.Store(now + uint64(c.pause))
	c.doubt.Store(now + uint64(c.pause+doubtTime))
}

// switches is how often this thread has lost its core to another thread, if the system says so.
func switches() (n int64, ok bool) {
	var u unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return u.Nivcsw, err == nil
}
