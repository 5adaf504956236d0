package launch

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// slow is an output whose reader pauses at the first line for longer than the launcher waits for the end of an output.
type slow struct {
	lock
	pause sync.Once
}

func (s *slow) Write(p []byte) (int, error) {
	s.pause.Do(func() { time.Sleep(drainTime + drainTime/2) })
	return s.lock.Write(p)
}

// TestSlowReader: all output of the children is printed, even if the reader of the launcher's output pauses until long after the
// children have ended.
func TestSlowReader(t *testing.T) {
	c := newCluster(map[string]string{"worker": "chatter " + strings.Repeat("x", 250) + "; say the end", "server": "complain of something"})
	m := laptop()
	m.Free = free
	plan, err := Resolve(c.spec, environment(c.scripts), m)
	if err != nil {
		t.Fatal(err)
	}
	var out slow
	if err := Run(plan, Streams{&out, &c.err}, c.signals, func(string) (string, bool) { return "", false }); err != nil {
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
