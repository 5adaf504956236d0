package real

import (
	"os/exec"
	"syscall"
	"testing"
)

// TestRuns: a process that was killed and has not ended yet does not keep its place.
func TestRuns(t *testing.T) {
	for _, c := range []struct {
		s    State
		want bool
	}{
		{State{}, false},
		{State{Started: true}, true},
		{State{Started: true, Stopped: true}, false},
		{State{Started: true, Killed: true}, false},
		{State{Started: true, Ended: true}, false},
	} {
		if got := c.s.runs(); got != c.want {
			t.Errorf("%+v: %t, want %t", c.s, got, c.want)
		}
	}
}

// TestRelease: the child that holds the sockets of a killed process ends when a replacement
// process needs them, also if the process was killed after the replacement's first try.
func TestRelease(t *testing.T) {
	holder := exec.Command("sleep", "100")
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	first := &Process{Role: "scheduler", held: []int{holder.Process.Pid}, changed: make(chan struct{})}
	next := &Process{Role: "scheduler", changed: make(chan struct{})}
	c := &Cluster{all: []*Process{first, next}, present: map[string]*Process{key("scheduler", 0): next}}
	c.release("scheduler", 0)
	if err := holder.Process.Signal(syscall.Signal(0)); err != nil || len(first.held) != 1 {
		t.Fatalf("released before the process was killed: %v", err)
	}
	first.change(func(s *State) { s.Killed = true })
	c.release("scheduler", 0)
	if err := holder.Wait(); err == nil || len(first.held) != 0 {
		t.Errorf("not released: %v", err)
	}
}
