package launch

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
)

// slow is an output whose reader pauses at the first line for longer than the launcher waits for the end of an output.
type slow struct {
	lock
	pause sync.Once
}

func (s *slow) Write(p []byte) (int, error) {
	s.pause.Do(func() { <-time.After(drainTime + drainTime/2) })
	return s.lock.Write(p)
}

// TestSlowReader: all output of the children is printed, even if the reader of the launcher's output pauses until long after the
// children have ended.
func TestSlowReader(t *testing.T) {
	c := newCluster(map[string]string{"worker": "chatter " + strings.Repeat("x", 250) + "; say the end", "server": "complain of something"})
	var out slow
	if err := c.runTo(t, &out); err != nil {
		t.Fatal(err)
	}
	if got := out.lines(); len(got) != 201 || got[200] != "[worker 0] the end" {
		t.Errorf("%d lines, the last one %q, want 201, to the end", len(got), got[len(got)-1])
	}
	if got := c.err.lines(); !slices.Equal(got, []string{"[server 0] of something"}) {
		t.Errorf("standard error %q", got)
	}
}

// TestOutputHeldOpen: a process that has left the group of a child holds the child's output open, and may write without end. The launch
// ends nevertheless, with all lines of the child.
func TestOutputHeldOpen(t *testing.T) {
	v := newVisits(t)
	c := newCluster(map[string]string{"worker": "leave hang " + v.Addr().String() + "; say the end", "server": "leave flood line"})
	if err := c.run(t); err != nil {
		t.Fatal(err)
	}
	v.await(t, 1) // it still runs
	if !slices.Contains(c.out.lines(), "[worker 0] the end") {
		t.Errorf("the worker's line is missing among %d", len(c.out.lines()))
	}
}

// stopped is an output without a reader until the test closes the channel until.
type stopped struct {
	lock
	began chan struct{} // has a token when a line is to be written
	until chan struct{}
}

func (s *stopped) Write(p []byte) (int, error) {
	select {
	case s.began <- struct{}{}:
	default:
	}
	<-s.until
	return s.lock.Write(p)
}

// TestEndWithoutReader: a signal ends the children, also children that ignore SIGTERM, while the output of the launcher has no reader.
func TestEndWithoutReader(t *testing.T) {
	v := newVisits(t)
	hang := "hang " + v.Addr().String()
	c := newCluster(map[string]string{"worker": "say hello; " + hang, "server": "ignore; " + hang})
	c.spec.KillAfter = time.Millisecond
	out := &stopped{began: make(chan struct{}, 1), until: make(chan struct{})}
	done := make(chan error)
	go func() { done <- c.runTo(t, out) }()
	children := v.await(t, 2)
	<-out.began
	c.signals <- syscall.SIGTERM
	gone(t, children)
	close(out.until)
	if err := <-done; exit.Status(err) != 143 || !slices.Equal(out.lines(), []string{"[worker 0] hello"}) {
		t.Errorf("%v, with %q; want status 143 and the worker's line", err, out.lines())
	}
	if got := c.err.lines(); len(got) != 2 || !strings.Contains(got[0], "stopped by signal: terminated; stopping ") || !strings.Contains(got[1], "killing processes that did not end") {
		t.Errorf("standard error %q", got)
	}
}

// TestChildEndsWithoutReader: if a child ends while the launcher's output has no reader, the other children are ended all the same. All output
// is printed when there is a reader.
func TestChildEndsWithoutReader(t *testing.T) {
	for _, c := range []struct {
		name, worker string
		status       int
	}{{"failure", "say line; say last; exit 3", 3}, {"success", "say line", 1}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			workers, others := newVisits(t), newVisits(t)
			hang := "hang " + others.Addr().String()
			k := newCluster(map[string]string{"worker": "wait " + workers.Addr().String() + "; " + c.worker, "server": hang, "scheduler": hang})
			k.spec.Grace = 10 * time.Millisecond
			out := &stopped{until: make(chan struct{})}
			done := make(chan error, 1)
			go func() { done <- k.runTo(t, out) }()
			worker, rest := workers.await(t, 1), others.await(t, 2)
			for _, conn := range worker {
				conn.Close()
			}
			gone(t, rest)
			close(out.until)
			if err := <-done; exit.Status(err) != c.status || !slices.Contains(out.lines(), "[worker 0] line") {
				t.Errorf("%v, with %q; want status %d and the worker's line", err, out.lines(), c.status)
			} else if c.name == "failure" && !strings.Contains(err.Error(), "\n    last") {
				t.Errorf("%v, want the last line, too", err)
			}
		})
	}
}

// TestSignalWithoutReader: after the children have ended, signals end a launch whose output has no reader, also if --fail-on needs the output.
func TestSignalWithoutReader(t *testing.T) {
	for name, failOn := range map[string]*regexp.Regexp{"plain": nil, "fail-on": regexp.MustCompile("failed")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(map[string]string{"worker": "say line"})
			c.spec.FailOn, c.signals = failOn, make(chan os.Signal)
			out := &stopped{began: make(chan struct{}, 1), until: make(chan struct{})}
			t.Cleanup(func() { close(out.until) })
			done := make(chan error, 1)
			go func() { done <- c.runTo(t, out) }()
			<-out.began
			for late := time.After(30 * time.Second); ; {
				select {
				case c.signals <- syscall.SIGTERM:
				case err := <-done:
					if exit.Status(err) != 143 {
						t.Errorf("%v, want status 143", err)
					}
					return
				case <-late:
					t.Fatal("the launch has not ended after signals")
				}
			}
		})
	}
}
