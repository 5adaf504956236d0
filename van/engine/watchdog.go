package engine

// The watchdog of a Loop.

import (
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/wake"
)

// idleTicks is how many ticks without an item make the watchdog park. Waking it costs
// some microseconds, which nobody feels after a pause of that length.
const idleTicks = 8

// After so many ticks without a slow delivery the watchdog looks half as often, at last
// every maxPace Limits.
const (
	calmTicks = 16
	maxPace   = 4
)

// watchdog finds deliveries that are slow.
type watchdog struct {
	parked atomic.Bool // it sleeps without a timer
	wake   chan struct{}
	ticks  atomic.Uint64
}

// watch looks every limit whether state, of Loop, still has the same delivery, less often while
// all are short: where processors are few, each look takes one from those who work. It
// calls slow with that state. It parks when nothing has come for a while.
func (w *watchdog) watch(limit time.Duration, state *atomic.Uint64, quit <-chan struct{}, slow func(busy uint64)) {
	ticker := time.NewTicker(limit)
	defer ticker.Stop()
	last, idle := state.Load(), idleTicks
	p := pace{limit: limit}
	p.begin()
	for {
		if idle >= idleTicks {
			ticker.Stop()
			// First the mark, then the look: who begins to deliver after the look
			// sees the mark.
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

// pace is how often the watchdog looks.
type pace struct {
	limit, every time.Duration
	looks        int // since begin
}

// begin makes it look every Limit.
func (p *pace) begin() { p.every, p.looks = p.limit, 0 }

// calm says that a look has found nothing slow. It tells whether every has changed.
func (p *pace) calm() bool {
	if p.looks++; p.looks%calmTicks != 0 || p.every >= maxPace*p.limit {
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
