package processes

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/van"
)

// TestStarved: a process in which nothing of Go's runs for longer than its heartbeats may
// stay away is lost for nobody, whatever its role: libzmq's threads answer for it. It goes on
// as if nothing had been, and so do the others.
func TestStarved(t *testing.T) {
	for _, role := range []string{"worker", "server", "scheduler"} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			onLegs(t, func(t *testing.T, leg real.Leg) {
				t.Parallel()
				c := start(t, real.Options{Workers: 2, Leg: leg, Env: []string{"PS_HEARTBEAT_INTERVAL=1"}, Loads: patient,
					NodeEnv: func(r string, rank int) []string {
						if r == role && rank == 0 {
							return real.Starved
						}
						return nil
					}})
				try(t, c.Works(20, soon))
				busy, worker := c.Get(role, 0), c.Get("worker", 1)
				barrier := worker.Barrier(van.WorkerGroup, time.Minute)
				try(t, busy.Spin(6*time.Second))
				try(t, result(t, c.Get("worker", 0).Barrier(van.WorkerGroup, time.Minute), soon, "a barrier of all workers ends"))
				try(t, result(t, barrier, soon, "the barrier of the other worker ends"))
				try(t, c.Works(50, soon))
				for _, p := range c.All() {
					if s := p.State(); s.Stats.Failed > 0 || s.Fenced != "" {
						t.Errorf("%s: %s: want no call that failed", p, s)
					}
					if i := slices.IndexFunc(strings.Split(p.Log(), "\n"), func(l string) bool { return strings.Contains(l, "peer lost") }); i >= 0 {
						t.Errorf("%s has lost a peer: %s", p, strings.Split(p.Log(), "\n")[i])
					}
				}
				try(t, c.Finish(soon))
			})
		})
	}
}
