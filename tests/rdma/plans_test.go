package rdma

import (
	"errors"
	"flag"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/testlimit"
)

var (
	withPlans = flag.Bool("plans", false, "carry out the plans of tests/plans, too, which takes many minutes")
	slow      = flag.Int("slow", 1, "how many times as slow this machine is as the plans take for granted: all their times are so much longer")
)

// TestPlans runs each plan that is possible over RDMA, one after the other: the processors of the virtual machine are too slow for several plans at once.
func TestPlans(t *testing.T) {
	if !*withPlans {
		t.Skip("takes longer than the other tests together: see docs/design/testing.md")
	}
	testlimit.Longer(t, time.Duration(*slow)*5*time.Minute) // for the longest plan
	host := addresses(t)[0]
	plans, err := plan.ReadDir("../plans")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range plans {
		t.Run(p.Name, func(t *testing.T) {
			res, err := real.RunPlan(t.Context(), p, real.PlanOptions{Leg: real.RDMA, Host: host, Margin: 10 * time.Second, Slow: *slow})
			if errors.Is(err, real.ErrCannot) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range res.Wrong {
				t.Error(w)
			}
			t.Logf("%d calls ended well, %d failed", res.Calls, res.Failed)
			for _, line := range res.Times {
				t.Log(line)
			}
			if t.Failed() {
				t.Logf("timeline:\n%s\n%s", res.Timeline, res.Logs())
			}
		})
	}
}
