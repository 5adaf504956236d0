package engine

// The watchdog of a Loop.

import (
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/wake"
)

// idleTicks is the number of ticks without an item after which the watchdog parks. Waking it costs
// some microseconds, which do not matter after a pause of that length.
const idleTicks = 8

// After calmTicks ticks without a slow delivery the watchdog halves its rate, down to one check
// every maxInterval Limits.
const (
	calmTicks   = 16
	maxInterval = 4
)

// watchdog detects slow deliveries.
type watchdog struct {
	parked atomic.Bool // it sleeps without a timer
	wake   chan struct{}
	ticks  atomic.Uint64
}

// watch checks every limit whether Loop.state still shows the same delivery, and then calls slow with
// that state. While all deliveries are short it checks less often: on a machine with few cores, each
// check takes a core from the application. It parks while no items arrive.
func (w *watchdog) watch(limit time.Duration, state *atomic.Uint64, quit <-chan struct{}, slow func(busy uint64)) {
	ticker := time.NewTicker(limit)
	defer ticker.Stop()
	last, idle := state.Load(), idleTicks
	p := interval{limit: limit}
	p.begin()
	for {
		if idle >= idleTicks {
			ticker.Stop()
			// The order matters: parked first, then the check of state. A delivery that begins
			// after the check sees parked.
			w.parked.Store(true)
			if state.Load() == last {
				select {
				case <-w.wake:
				case <-quit:
					return
				}
			}
			w.parked.Store(false)
			idle = 0
			last = state.Load()
			p.begin()
			ticker.Reset(p.every)
		}
		select {
		case <-quit:
			return
		case <-ticker.C:
		}
		w.ticks.Add(1)
		switch now := state.Load(); {
		case now != last:
			last, idle = now, 0
			if p.calm() {
				ticker.Reset(p.every)
			}
		case now&1 == 1:
			slow(now)
			last, idle = state.Load(), 0
			p.begin()
			ticker.Reset(p.every)
		default:
			idle++
		}
	}
}

// interval is the time between two checks of the watchdog.
type interval struct {
	limit, every time.Duration
	checks       int // since begin
}

// begin sets the interval to one Limit.
func (p *interval) begin() { p.every, p.checks = p.limit, 0 }

// calm records a check without a slow delivery. It reports whether every has changed.
func (p *interval) calm() bool {
	if p.checks++; p.checks%calmTicks != 0 || p.every >= maxInterval*p.limit {
		return false
	}
	p.every *= 2
	return true
}

func (w *watchdog) unpark() {
	if w.parked.CompareAndSwap(true, false) {
		wake.Put(w.wake)
	}
}
