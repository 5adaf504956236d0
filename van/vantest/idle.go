package vantest

import (
	"syscall"
	"testing"
	"time"
)

// ProcessorTime returns the processor time of this process.
func ProcessorTime(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Idle checks that what uses at most a share of one processor, as used measures it, in one of three windows. A busy
// loop exceeds the share in every window, while other load of the machine affects only some.
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
