package sim

import (
	"os"
	"testing"

	"github.com/stepaf/stepaf-go/internal/sim"
	"github.com/stepaf/stepaf-go/internal/sim/plan"
)

const plansDir = "../plans"

// known are plans that fail because of what has not been mended yet.
var known = map[string]bool{"worker-replaced": true}

func TestPlans(t *testing.T) {
	plans, err := plan.ReadDir(plansDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range plans {
		t.Run(p.Name, func(t *testing.T) {
			r := sim.Run(t, p, 1)
			if known[p.Name] {
				t.Skipf("known to fail: %d violations", len(r.Violations))
			}
			for _, v := range r.Violations {
				t.Error(v)
			}
			t.Logf("%d calls, %d failed, %s virtual, hash %x", r.Calls, r.Failed, r.Virtual, r.Hash)
			if t.Failed() {
				r.WriteTimeline(os.Stderr, 200)
			}
		})
	}
}
