package processes

import (
	"cmp"
	"errors"
	"flag"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// atOnce is how many plans run at a time: most of the time their processes wait.
func atOnce() int {
	if vantest.Race {
		return 8 // and use more time when they do not
	}
	return 15
}

// chosen tells whether -run may want this subtest of TestPlans. A plan begins before the
// subtest that waits for it, so this is asked before package testing is.
func chosen(names ...string) bool {
	pattern := flag.Lookup("test.run").Value.String()
	if strings.ContainsAny(pattern, "|[(\\") {
		return true // not simply names with slashes between them
	}
	parts := strings.Split(pattern, "/")
	for i, name := range names {
		if i+1 >= len(parts) {
			break
		}
		if re, err := regexp.Compile(parts[i+1]); err == nil && !re.MatchString(name) {
			return false
		}
	}
	return true
}

// brief are the plans that -short leaves: one for each API, nodes of the original, and for each role a process that is
// killed, stopped or replaced.
var brief = []string{"worker-replaced", "kv-replacements", "loop-ends", "groups", "foreign-cluster", "dies-while-others-finalize", "scheduler-comes-back",
	"replaced-server-wakes"}

// TestPlans carries out each plan on each leg that can; with -short a few plans, each on one leg.
func TestPlans(t *testing.T) {
	testlimit.Longer(t, 5*time.Minute) // for the longest plan, while other plans run
	plans, err := plan.ReadDir("../plans")
	try(t, err)
	legs := legs
	if testing.Short() {
		plans, legs = slices.DeleteFunc(plans, func(p *plan.Plan) bool { return !slices.Contains(brief, p.Name) }), legs[len(legs)-1:]
		if len(plans) != len(brief) {
			t.Fatalf("%d plans have a name of brief, want %d", len(plans), len(brief))
		}
	}
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
			if !chosen(p.Name, string(leg)) {
				continue
			}
			c := make(chan done, 1)
			results[p.Name+string(leg)] = c
			queue = append(queue, func() {
				defer func() { <-room }()
				res, err := real.RunPlan(t.Context(), p, real.PlanOptions{Leg: leg})
				c <- done{res, err}
			})
		}
	}
	wg.Go(func() {
		for _, f := range queue { // the longest first
			room <- struct{}{}
			wg.Go(f)
		}
	})
	for _, p := range plans {
		t.Run(p.Name, func(t *testing.T) {
			for _, leg := range legs {
				t.Run(string(leg), func(t *testing.T) {
					c, ok := results[p.Name+string(leg)]
					if !ok {
						t.Fatalf("-run=%s has this subtest, and its plan has not begun: chosen is wrong", flag.Lookup("test.run").Value)
					}
					d := <-c
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
