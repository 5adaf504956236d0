package membership

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// longRun makes s as if its scheduler had sent half of all timestamps meanwhile, as one of 1000 nodes does in 25 days.
func longRun(s *script) {
	s.w.pass(2*time.Hour, true)
	s.w.node("sched").m.stamp += 1<<30 + 100
}

// TestStampsOfALongRun: in a cluster that has run for long, the scheduler's Finalize counts, and nodes believe the
// scheduler's record of a replacement process. Timestamps that are 2^30 apart cannot be compared.
func TestStampsOfALongRun(t *testing.T) {
	s := &script{w: newWorld(t), base: Config{Scheduler: van.Node{Hostname: "10.0.0.99", Port: 8123}}}
	replaced, over := map[string]bool{}, map[string]bool{}
	s.w.seen = func(n *testNode, o Output) {
		switch o := o.(type) {
		case PeerReplaced:
			replaced[n.name] = true
		case BarrierDone:
			over[n.name] = true
		case BarrierFailed:
			t.Errorf("%s: %v", n.name, o.Err)
		}
	}
	run := func(lines ...string) {
		t.Helper()
		for _, l := range lines {
			if err := s.command(l); err != nil {
				t.Fatalf("%s: %v", l, err)
			}
		}
	}
	run("cluster workers=1 servers=1 replace=10s", "add sched scheduler", "add s0 server 10.0.0.1:4000", "add w0 worker 10.0.0.2:4000", "deliver",
		"stop sched", "stop s0", "deliver")
	longRun(s)
	run("kill w0", "lose sched w0", "deliver", "add w0 worker 10.0.0.3:4000", "run 1s")
	if !replaced["s0"] {
		t.Error("the server does not know the replacement of the worker")
	}
	run("stop w0", "run 1s")
	if !over["sched"] || !over["s0"] || !over["w0"] {
		t.Fatalf("the barrier of StopBarrier is over on %v, want all", over)
	}
	clear(over)
	run("finalize sched", "finalize s0", "finalize w0", "run 1s")
	if !over["sched"] || !over["s0"] || !over["w0"] {
		t.Errorf("Finalize is over on %v, want all", over)
	}
}
