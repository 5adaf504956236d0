package processes

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
)

// TestStarved: no node declares a process lost in which no Go code runs for longer than the heartbeat timeout, whatever
// its role: libzmq's threads answer for it. The process and all others continue afterwards.
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
				try(t, c.Starve(role, 6*time.Second, soon))
				try(t, c.Finish(soon))
			})
		})
	}
}
