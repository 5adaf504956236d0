package processes

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// atOnce is how many plans run at a time: most of the time their processes wait.
func atOnce() int {
	if vantest.Race {
		return 8 // and use more time when they do not
	}
	return 12
}

// TestPlans carries out each plan on each leg that can.
func TestPlans(t *testing.T) {
	plans, err := plan.ReadDir("../plans")
	try(t, err)
	type done struct {
		res *real.Result
		err error
	}
	results := map[string]chan done{}
	var wg sync.WaitGroup
	room := make(chan struct{}, atOnce())
	var queue []func()
	byLength := slices.SortedStableFunc(slices.Values(plans), func(a, b *plan.Plan) int { return cmp.Compare(b.Length(), a.Length()) })
	for _, p := range byLength {
		for _, leg := range legs {
			c := make(chan done, 1)
			results[p.Name+string(leg)] = c
			queue = append(queue, func() {
				defer func() { <-room }()
				res, err := real.RunPlan(t.Context(), p, real.PlanOptions{Leg: leg})
				c <- done{res, err}
			})
		}
	}
	go func() {
		for _, f := range queue { // the longest first
			room <- struct{}{}
			wg.Go(f)
		}
	}()
	for _, p := range plans {
		t.Run(p.Name, func(t *testing.T) {
			for _, leg := range legs {
				t.Run(string(leg), func(t *testing.T) {
					d := <-results[p.Name+string(leg)]
					if errors.Is(d.err, real.ErrCannot) {
						t.Skip(d.err)
					}
					try(t, d.err)
					for _, w := range d.res.Wrong {
						t.Error(w)
					}
					t.Logf("%d calls ended well, %d failed", d.res.Calls, d.res.Failed)
					if t.Failed() {
						t.Logf("timeline:\n%s\n%s", d.res.Timeline, d.res.Logs())
					}
				})
			}
		})
	}
	wg.Wait()
}
