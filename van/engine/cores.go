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
	return until != 0 && clock.Now() < until
}

// passed says that between two looks, of limit at most, so much time has passed until now.
func (c *cores) passed(now, time uint64, limit time.Duration) {
	if c != nil && time >= uint64(limit+longYield) && c.doubt.Load() == 0 {
		c.doubt.Store(now + uint64(doubtTime))
	}
}

// Look is one that yields the core now and then.
type Look struct {
	c        *cores // nil: it is not examined
	begun    uint64
	switches int64
}

// BeginLook is called before a look of a source that yields the core by itself, and End of what it
// returns behind it, by the same goroutine.
func (e *Engine) BeginLook() Look { return e.cores.begin() }

func (c *cores) begin() Look {
	if c == nil {
		return Look{}
	}
	doubt := c.doubt.Load()
	if doubt == 0 {
		return Look{}
	}
	now := clock.Now()
	if now >= doubt {
		c.doubt.CompareAndSwap(doubt, 0)
		return Look{}
	}
	runtime.LockOSThread() // switches are counted for each thread
	n, ok := switches()
	if !ok {
		runtime.UnlockOSThread()
		return Look{}
	}
	return Look{c: c, begun: now, switches: n}
}

// End ends a look that was to take limit at most.
func (l Look) End(limit time.Duration) {
	if l.c == nil {
		return
	}
	now := clock.Now()
	n, _ := switches()
	runtime.UnlockOSThread()
	if now-l.begun >= uint64(limit+longYield) && n != l.switches {
		l.c.taken(now)
	}
}

// yield lets other threads have the core.
func (c *cores) yield() {
	l := c.begin()
	_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	l.End(0)
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
