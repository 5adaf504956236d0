package sim

import (
	"os"
	"runtime"
	"testing"

	"github.com/stepaf/stepaf-go/internal/sim"
	"github.com/stepaf/stepaf-go/internal/sim/plan"
)

// known are plans that fail because of what has not been mended yet: none.
var known = map[string]bool{}

// TestPlans carries out each plan with a seed.
func TestPlans(t *testing.T) {
	all, err := plans()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		t.Run(p.Name, func(t *testing.T) {
			if p.Only == "processes" {
				t.Skip("only for real processes")
			}
			for seed := range uint64(3) {
				r := sim.Run(t, p, seed)
				if known[p.Name] {
					t.Skipf("known to fail: %v", r.Violations)
				}
				for _, v := range r.Violations {
					t.Errorf("seed %d: %s", seed, v)
				}
				if t.Failed() {
					r.WriteTimeline(os.Stderr, 100)
					return
				}
			}
		})
	}
}

// TestRepeats: a seed tells everything: the same one gives the same story.
func TestRepeats(t *testing.T) {
	for seed := range uint64(6) {
		want := sim.Run(t, plan.Random(seed), seed)
		for i := range 4 { // with one processor and with two
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1 + i%2))
			if got := sim.Run(t, plan.Random(seed), seed); got.Hash != want.Hash {
				t.Errorf("seed %d: story %x, then, run %d, %x", seed, want.Hash, i+2, got.Hash)
			}
		}
	}
}
