package rdma

import (
	"errors"
	"flag"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// atOnce is how many plans run at a time. The processors of the virtual machine are slow.
const atOnce = 3

var withPlans = flag.Bool("plans", false, "carry out the plans of tests/plans, too, which takes many minutes")

// TestPlans carries out each plan that can be over RDMA.
func TestPlans(t *testing.T) {
	if !*withPlans {
		t.Skip("takes longer than the other tests together: make rdma-test PKGS=./tests/rdma RUN=TestPlans ARGS=-plans")
	}
	host := addresses(t)[0]
	plans, err := plan.ReadDir("../plans")
	if err != nil {
		t.Fatal(err)
	}
	type done struct {
		res *real.Result
		err error
	}
	results := make([]chan done, len(plans))
	var wg sync.WaitGroup
	room := make(chan struct{}, atOnce)
	for i, p := range plans {
		results[i] = make(chan done, 1)
		wg.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			res, err := real.RunPlan(t.Context(), p, real.PlanOptions{Leg: real.RDMA, Host: host, Margin: 10 * time.Second})
			results[i] <- done{res, err}
		})
	}
	for i, p := range plans {
		t.Run(p.Name, func(t *testing.T) {
			d := <-results[i]
			if errors.Is(d.err, real.ErrCannot) {
				t.Skip(d.err)
			}
			if d.err != nil {
				t.Fatal(d.err)
			}
			for _, w := range d.res.Wrong {
				t.Error(w)
			}
			t.Logf("%d calls ended well, %d failed", d.res.Calls, d.res.Failed)
			if t.Failed() {
				t.Logf("timeline:\n%s\n%s", d.res.Timeline, d.res.Logs())
			}
		})
	}
	wg.Wait()
}
