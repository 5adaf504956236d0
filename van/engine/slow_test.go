package engine

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestSlowDetector: an application counts as slow only if it was busy for most of a second while messages waited.
func TestSlowDetector(t *testing.T) {
	second := func(int) bool { return true }
	for _, x := range []struct {
		name        string
		busy, waits func(sample int) bool
		want        int32
	}{
		{"busy all the time", second, second, 1},
		{"busy every second time", func(i int) bool { return i%2 == 0 }, second, 0},
		{"never busy", func(int) bool { return false }, second, 0},
		{"nothing waits any more", second, func(i int) bool { return i < slowSamples-1 }, 0},
		{"busy later", func(i int) bool { return i > 3*slowSamples }, second, 1},
		{"briefly", func(i int) bool { return i < slowSamples/2 }, second, 0},
	} {
		t.Run(x.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var b SlowDetector
				var samples int
				var called atomic.Int32
				watch := func() {
					b.Watch(func() bool { return x.waits(samples) }, func() bool { samples++; return x.busy(samples) }, func() { called.Add(1) })
				}
				watch()
				watch() // the same
				time.Sleep(10 * slowTime)
				synctest.Wait()
				if got := called.Load(); got != x.want {
					t.Errorf("called slow %d times, want %d", got, x.want)
				}
				time.Sleep(maxSamples * slowTime / slowSamples) // it ends
				synctest.Wait()
				if b.watched.Load() {
					t.Error("it is watched for ever")
				}
			})
		})
	}
}
