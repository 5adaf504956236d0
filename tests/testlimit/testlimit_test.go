package testlimit

import (
	"fmt"
	"hash/maphash"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
)

// role is the environment variable that makes a test of this binary hang.
const role = "TESTLIMIT_HANGS"

// TestHangs: a binary whose test hangs ends, and names the test and the place.
func TestHangs(t *testing.T) {
	if os.Getenv(role) != "" {
		still.Store(int64(100 * time.Millisecond))
		t.Run("sub", func(*testing.T) {
			var wg sync.WaitGroup
			wg.Add(1)
			wg.Wait()
		})
	}
	for _, timeout := range []string{"1m", "0"} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHangs$", "-test.timeout="+timeout)
		cmd.Env = append(os.Environ(), role+"=1")
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		limit := 30 * time.Second
		if timeout == "0" {
			limit = 6 * time.Second
		}
		select {
		case err := <-ended:
			if err == nil || timeout == "0" {
				t.Errorf("-timeout %s: it has ended (%v)\n%s", timeout, err, &out)
			}
			for _, want := range []string{"testlimit: a test has waited in one place for", "limit 100ms: its process used", "sync.(*WaitGroup).Wait", "testlimit.TestHangs.func1(", "testlimit_test.go:"} {
				if !strings.Contains(out.String(), want) {
					t.Errorf("it does not say %q:\n%s", want, &out)
				}
			}
		case <-time.After(limit):
			if timeout != "0" {
				t.Errorf("-timeout %s: it has not ended after %s", timeout, limit)
			}
			_ = cmd.Process.Kill()
			<-ended
		}
	}
}

// TestVerdict: the cases that count as a hang.
func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		name           string
		waited, used   time.Duration
		load           float64
		demand         time.Duration
		fails, measure bool // measure: the demand is measured
	}{
		{"not late", 34 * time.Second, 0, 0.5, 0, false, false},
		{"still", 36 * time.Second, time.Second, 0.5, 0, true, true},
		{"it works", 36 * time.Second, 10 * time.Second, 0.5, 0, false, false},
		{"its children work", 36 * time.Second, time.Second, 0.5, time.Second, false, true},
		{"it works for too long", 121 * time.Second, 120 * time.Second, 0.5, time.Second, true, false},
		{"still on a loaded machine", 36 * time.Second, time.Second, 20, 0, true, true},
		{"a loaded machine keeps it from the processors", 700 * time.Second, time.Second, 20, 3 * time.Second, false, true},
		{"it works on a loaded machine", 700 * time.Second, 200 * time.Second, 20, 0, false, false},
	} {
		measured := false
		why := verdict(c.waited, Still, c.used, c.load, func() time.Duration {
			measured = true
			return c.demand
		})
		if (why != "") != c.fails || measured != c.measure {
			t.Errorf("%s: %q, demand measured: %t", c.name, why, measured)
		}
	}
}

// TestLonger: Longer applies to its test, also while other tests run, and not to the next test.
func TestLonger(t *testing.T) {
	is := func(want time.Duration) {
		t.Helper()
		if got := time.Duration(still.Load()); got != want {
			t.Errorf("the limit is %s, want %s", got, want)
		}
	}
	t.Run("longer", func(t *testing.T) {
		Longer(t, time.Hour)
		t.Run("shorter", func(t *testing.T) { Longer(t, time.Minute) })
		is(time.Hour)
		if why := verdict(50*time.Minute, time.Hour, 50*time.Minute, 1, nil); why != "" {
			t.Error(why)
		}
	})
	is(Still)
	first, second := &ends{TB: t}, &ends{TB: t}
	Longer(first, time.Minute)
	Longer(second, time.Hour)
	first.end()
	is(time.Hour)
	second.end()
	is(Still)
}

// ends is a test that ends on request.
type ends struct {
	testing.TB
	end func()
}

func (e *ends) Cleanup(f func()) { e.end = f }

// TestPlaces: no time is counted for a test that makes progress, for a test that waits for its subtests, and for a goroutine
// that runs no test.
func TestPlaces(t *testing.T) {
	w := watcher{seed: maphash.MakeSeed(), places: make([]place, 0, 4)}
	begun := time.Unix(0, 0)
	const wait = "goroutine 7 [chan receive]:\nx.TestX(0x1)\n\tx_test.go:3\ntesting.tRunner(0x1, 0x2)\n\ttesting.go:1\ncreated by testing.(*T).Run in goroutine 1"
	for i, c := range []struct {
		stacks string
		since  int // seconds, -1: none
	}{
		{wait, 0},
		{strings.Replace(wait, "receive", "receive, 2 minutes", 1), 0},
		{strings.Replace(wait, "x_test.go:3", "x_test.go:4", 1), 2},
		{"goroutine 7 [chan receive]:\ntesting.(*T).Run(0x1)\n\ttesting.go:1\nx.TestX(0x1)\n\tx_test.go:3\ntesting.tRunner(0x1, 0x2)", -1},
		{"goroutine 9 [select]:\nx.serve()\n\tx.go:3\n\n" + wait, 4},
		{wait + "\n\ngoroutine 9 [select]:\nx.serve()\n\tx.go:3", 4},
		{"goroutine 9 [select]:\nx.serve()\n\tx.go:3", -1},
		{wait, 7},
	} {
		w.sample([]byte(c.stacks), begun.Add(time.Duration(i)*time.Second), 0)
		since := -1
		if len(w.places) == 1 {
			since = int(w.places[0].since.Sub(begun) / time.Second)
		}
		if since != c.since {
			t.Errorf("sample %d: since %d, want %d", i, since, c.since)
		}
	}
	if got := stackOf([]byte("goroutine 9 [select]:\nx.serve()\n\n"+wait+"\n"), 7); !strings.HasPrefix(got, "goroutine 7 ") {
		t.Errorf("its stack is %q", got)
	}
}

// TestSampleAllocatesNothing: tests count the allocations of the whole process.
func TestSampleAllocatesNothing(t *testing.T) {
	const wait = "goroutine 7 [chan receive]:\nx.TestX(0x1)\n\tx_test.go:3\ntesting.tRunner(0x1, 0x2)\n\ttesting.go:1\n\ngoroutine 9 [select]:\nx.serve()\n\tx.go:3"
	w, stacks := watcher{seed: maphash.MakeSeed(), places: make([]place, 0, 4)}, []byte(wait)
	if n := testing.AllocsPerRun(10, func() { w.sample(stacks, time.Now(), ownTime()) }); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

// TestProcessorTime: the processor time of a busy process grows, also of another process.
func TestProcessorTime(t *testing.T) {
	mine, err := ProcessorTime(os.Getpid())
	if err != nil || mine <= 0 {
		t.Fatalf("%s, %v", mine, err)
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "while :; do :; done")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end := time.After(20 * time.Second)
	for used := time.Duration(0); used < 10*time.Millisecond; {
		if used, err = ProcessorTime(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
		select {
		case <-time.After(time.Millisecond):
		case <-end:
			t.Fatalf("a process that works has used %s", used)
		}
	}
	if got := demand(); got < window/2 {
		t.Errorf("this process has a child that works, and their demand is %s in %s", got, window)
	}
	seen := 0
	threads("stat", func(name, text string) {
		if strings.HasPrefix(name, fmt.Sprintf("/proc/%d/", cmd.Process.Pid)) && strings.Contains(text, " (sh) R ") {
			seen++
		}
	})
	if seen != 1 {
		t.Errorf("%d threads of the child are named sh and want a processor, want 1", seen)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if _, err := ProcessorTime(cmd.Process.Pid); err == nil {
		t.Error("a process that has ended has processor time")
	}
}
