package engine

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestWatchdogAfterAPause: the watchdog finds a slow delivery within two limits, also after a long time in which
// all were short, and a pause.
func TestWatchdogAfterAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Millisecond
		var state atomic.Uint64 // odd: a delivery is under way
		w := watchdog{wake: make(chan struct{}, 1)}
		quit, slow := make(chan struct{}), make(chan time.Time, 1)
		go w.watch(limit, &state, quit, func(uint64) {
			slow <- time.Now()
			state.Add(1) // it has ended
		})
		defer close(quit)
		for range 3 {
			for range 20 * calmTicks { // short deliveries, until the watchdog polls at its lowest rate
				w.unpark()
				state.Add(2)
				time.Sleep(limit)
			}
			time.Sleep(2 * idleTicks * maxInterval * limit)
			if !w.parked.Load() {
				t.Fatal("after a pause the watchdog is not parked")
			}
			state.Add(1)
			w.unpark()
			begun := time.Now()
			if took := (<-slow).Sub(begun); took > 2*limit {
				t.Errorf("a slow delivery is found after %s, want %s at most", took, 2*limit)
			}
		}
	})
}
