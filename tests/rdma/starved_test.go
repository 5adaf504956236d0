package rdma

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
)

// processes starts a cluster of two workers and a server as processes, with a heartbeat each
// second, in which the first process of a role is real.Starved.
func processes(t *testing.T, role string) *real.Cluster {
	t.Helper()
	const ms = plan.Duration(time.Millisecond)
	c, err := real.New(real.Options{Workers: 2, Leg: real.RDMA, Host: addresses(t)[0], NodeEnv: real.StarvedAs(role),
		Env:   []string{"PS_HEARTBEAT_INTERVAL=1", fmt.Sprintf("STEPAF_RDMA_ACK_TIMEOUT=%d", patientAck)},
		Loads: []plan.Load{{Nodes: "workers", Every: 10 * ms, Size: 3000, Limit: 60_000 * ms}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		for _, w := range c.Wrong() {
			t.Errorf("wrong: %s", w)
		}
		if t.Failed() {
			t.Logf("timeline:\n%s", c.Timeline())
			for _, p := range c.All() {
				log := p.Log()
				t.Logf("the end of the log of %s:\n%s", p, log[max(0, len(log)-3000):])
			}
		}
	})
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestStarved: a process in which nothing of Go's runs for longer than its heartbeats may stay
// away is lost for nobody, whatever its role: a thread answers for it.
func TestStarved(t *testing.T) {
	for _, role := range []string{"worker", "server", "scheduler"} {
		t.Run(role, func(t *testing.T) {
			if err := processes(t, role).Starve(role, 6*time.Second, 2*soon); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestStopped: a worker that is stopped is dead as soon as if no thread had answered for it, 3 s
// after its last heartbeat, whether it was busy before or not.
func TestStopped(t *testing.T) {
	for _, busy := range []bool{false, true} {
		t.Run(fmt.Sprintf("busy=%v", busy), func(t *testing.T) {
			c := processes(t, "worker")
			if err := c.Works(20, 2*soon); err != nil {
				t.Fatal(err)
			}
			victim, other := c.Get("worker", 0), c.Get("worker", 1)
			if busy {
				go victim.Spin(time.Minute)
				<-time.After(6 * time.Second)
				if err := c.NobodyLost(); err != nil {
					t.Fatal(err)
				}
			}
			if err := victim.Stop(); err != nil {
				t.Fatal(err)
			}
			stopped, m := time.Now(), real.WatchMachine(t.Context())
			err := <-other.Barrier(van.WorkerGroup, 30*time.Second)
			took, limit := time.Since(stopped), 4*time.Second+m.Late(stopped)
			t.Logf("after %s (limit %s): %v", took, limit, err)
			if err == nil || !strings.Contains(err.Error(), "worker 0 (id 9)") || took > limit {
				t.Errorf("a barrier with the worker that was stopped: %v after %s, want an error that names it after %s at most", err, took, limit)
			}
			if c.NobodyLost() == nil {
				t.Error("no process has lost a peer")
			}
		})
	}
}
