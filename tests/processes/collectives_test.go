package processes

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/testlimit"
)

// TestCollectives: the same as in tests/sim, with SIGKILL and SIGSTOP, over sockets and shared memory.
func TestCollectives(t *testing.T) {
	p, err := plan.ReadFile("../plans/apart/collectives.json")
	try(t, err)
	for _, leg := range legs {
		t.Run(string(leg), func(t *testing.T) {
			t.Parallel()
			testlimit.Longer(t, 5*time.Minute)
			res, err := real.RunPlan(t.Context(), p, real.PlanOptions{Leg: leg})
			try(t, err)
			for _, w := range res.Wrong {
				t.Error(w)
			}
			if res.Calls < 50 || res.Failed == 0 {
				t.Errorf("%d calls ended well, %d failed: nothing has happened", res.Calls, res.Failed)
			}
			t.Logf("%d calls ended well, %d failed", res.Calls, res.Failed)
			if t.Failed() {
				t.Logf("timeline:\n%s\n%s", res.Timeline, res.Logs())
			}
		})
	}
}
