package vantest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testlimit"
)

// window is how long Idle observes a process at a time.
const window = 2 * time.Second

// Idle checks that a process waits without polling: in one of three windows its threads are woken at most wakeUps times a second, and
// use at most 25 % of one processor. A loop that polls with a timer exceeds the first limit, and a loop that does not wait the second,
// in every window. The limits are far above what nodes use: with as many wake-ups, an idle node used between 0.3 % and 1.8 % of a
// processor on different days.
func Idle(t testing.TB, what string, pid int, wakeUps float64) {
	t.Helper()
	const most = 25 // % of a processor
	for range 3 {
		woken, used, begun := wokenUp(t, pid), processorTime(t, pid), time.Now()
		<-time.After(window)
		seconds := time.Since(begun).Seconds()
		rate, share := float64(wokenUp(t, pid)-woken)/seconds, 100*(processorTime(t, pid)-used).Seconds()/seconds
		t.Logf("idle, threads of %s were woken %.0f times a second, and used %.2f %% of a processor", what, rate, share)
		if rate <= wakeUps && share <= most {
			return
		}
	}
	t.Errorf("idle, %s exceeded %.0f wake-ups a second or %d %% of a processor in each of 3 windows", what, wakeUps, most)
}

func processorTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	used, err := testlimit.ProcessorTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	return used
}

// wokenUp returns how often threads of a process have waited and were woken. Threads that have ended do not count.
func wokenUp(t testing.TB, pid int) (sum int) {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(threads) == 0 {
		t.Fatalf("process %d has no threads: %v", pid, err)
	}
	for _, name := range threads {
		status, _ := os.ReadFile(name) // the thread may have ended
		_, rest, _ := strings.Cut(string(status), "\nvoluntary_ctxt_switches:")
		line, _, _ := strings.Cut(rest, "\n")
		n, _ := strconv.Atoi(strings.TrimSpace(line))
		sum += n
	}
	return sum
}
