package vantest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
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

// WakeUps returns how often threads of this process have waited and were woken. Threads that have ended do not count. Unlike
// processor time, the number hardly depends on other programs.
func WakeUps(t testing.TB) int {
	t.Helper()
	threads, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(threads) == 0 {
		t.Fatalf("no threads in /proc/self/task: %v", err)
	}
	sum := 0
	for _, name := range threads {
		status, _ := os.ReadFile(name) // the thread may have ended
		_, rest, _ := strings.Cut(string(status), "\nvoluntary_ctxt_switches:")
		line, _, _ := strings.Cut(rest, "\n")
		n, _ := strconv.Atoi(strings.TrimSpace(line))
		sum += n
	}
	return sum
}

// Sleeps checks that threads of this process are woken at most so often a second, in one of three windows. It finds loops that
// poll with a timer; Idle finds those that do not wait.
func Sleeps(t testing.TB, what string, window time.Duration, most float64) {
	t.Helper()
	var found []float64
	for range 3 {
		before, begun := WakeUps(t), time.Now()
		<-time.After(window)
		found = append(found, float64(WakeUps(t)-before)/time.Since(begun).Seconds())
		t.Logf("idle, threads of %s were woken %.0f times a second", what, found[len(found)-1])
		if found[len(found)-1] <= most {
			return
		}
	}
	t.Errorf("idle, threads of %s were woken %.0f times a second, want at most %.0f in one window", what, found, most)
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
