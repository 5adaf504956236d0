package membership

import (
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// TestLostUnderItsTemporaryID: the transport reports a loss under the id that the connection had, which the machine has
// renamed meanwhile. The loss counts until another process has the id.
func TestLostUnderItsTemporaryID(t *testing.T) {
	for _, x := range []struct {
		name  string
		event func(*Machine, time.Duration, int)
		want  func(Output) bool
	}{
		{"lost", func(m *Machine, now time.Duration, id int) { m.PeerLost(now, id, errors.New("connection reset")) },
			func(o Output) bool { d, ok := o.(PeerDead); return ok && d.ID == van.WorkerID(0) }},
		{"not connected", func(m *Machine, now time.Duration, id int) { m.ConnectFailed(now, id, errors.New("no buffer space")) },
			func(o Output) bool { _, ok := o.(Failed); return ok }},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := &script{w: newWorld(t), base: Config{Scheduler: van.Node{Hostname: "10.0.0.99", Port: 8123}}}
			temp, seen := 0, 0
			s.w.seen = func(n *testNode, o Output) {
				if r, ok := o.(Rename); ok && r.New == van.WorkerID(0) {
					temp = r.Old
				}
				if n.name == "sched" && x.want(o) {
					seen++
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
			// The scheduler connects to the worker to report that the server is missing.
			run("cluster workers=1 servers=1 replace=10s", "add sched scheduler", "add w0 worker 10.0.0.2:4000", "run 6s", "add s0 server 10.0.0.1:4000", "deliver")
			sched := s.w.node("sched")
			if temp == 0 || !sched.m.Ready() {
				t.Fatalf("temporary id %d, ready %t", temp, sched.m.Ready())
			}
			x.event(sched.m, s.w.now, temp)
			s.w.take(sched)
			if seen != 1 {
				t.Fatalf("%d times, want once", seen)
			}
			if x.name == "lost" {
				sched.m.PeerBack(s.w.now, temp)
				s.w.take(sched)
				if dead := sched.m.DeadNodes(s.w.now, 0); len(dead) > 0 {
					t.Errorf("%v is dead after its connection is restored", dead)
				}
				run("kill w0", "lose sched w0", "add w0 worker 10.0.0.3:4000", "run 1s")
				x.event(sched.m, s.w.now, temp)
				s.w.take(sched)
				if seen != 2 {
					t.Errorf("the loss of an earlier process counts for the present one")
				}
			}
		})
	}
}
