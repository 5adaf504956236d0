package vantest

import (
	"syscall"
	"testing"
	"time"
)

// ProcessorTime is how long this process has used processors.
func ProcessorTime(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Idle checks that what uses at most a share of one processor, by used, in one of three windows: what
// burns the processor does so in every window, and what else the machine does makes it dearer in some.
func Idle(t testing.TB, what string, used func() time.Duration, window time.Duration, most float64) {
	t.Helper()
	for i := 1; ; i++ {
		before, begun := used(), time.Now()
		<-time.After(window)
		share := float64(used()-before) / float64(time.Since(begun))
		t.Logf("idle, %s used %.2f %% of a processor", what, 100*share)
		if share <= most {
			return
		}
		if i == 3 {
			t.Errorf("idle, %s used %.2f %% of a processor, and more than %g %% before", what, 100*share, 100*most)
			return
		}
	}
}
