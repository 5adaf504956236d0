package sim

import (
	"os"
	"testing"

	"github.com/stepaf/stepaf-go/tests/internal/sim"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// TestCollectives: ranks of a communicator are killed, replaced and stopped while they make calls. It is apart
// from the plans that TestSeeds draws from: calls have many messages, and take long to simulate.
func TestCollectives(t *testing.T) {
	if vantest.Race {
		t.Skip("too slow with the race detector; tests/processes has the same plan")
	}
	p, err := plan.ReadFile("../plans/apart/collectives.json")
	if err != nil {
		t.Fatal(err)
	}
	r := sim.Run(t, p, 2)
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
