package sim

import (
	"fmt"
	"os"
	"testing"

	"github.com/stepaf/stepaf-go/tests/internal/sim"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// TestCollectives: ranks of a communicator are killed, replaced and stopped while they make calls. It is apart
// from the plans that TestSeeds draws from, whose stories it would change.
func TestCollectives(t *testing.T) {
	p, err := plan.ReadFile("../plans/apart/collectives.json")
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed+1), func(t *testing.T) { collectives(t, p, seed+1) })
	}
}

func collectives(t *testing.T, p *plan.Plan, seed uint64) {
	r := sim.Run(t, p, seed)
	for _, v := range r.Violations {
		t.Error(v)
	}
	if r.Failed == 0 || r.Calls < 100 {
		t.Errorf("%d calls, of which %d failed: nothing has happened", r.Calls, r.Failed)
	}
	t.Logf("%d calls, of which %d failed", r.Calls, r.Failed)
	if t.Failed() {
		r.WriteTimeline(os.Stderr, 100)
	}
}
