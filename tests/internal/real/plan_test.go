package real

import (
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// TestExpectations: what a plan expects of errors and times, and what does not come, is found.
func TestExpectations(t *testing.T) {
	from := time.Now()
	at := from.UnixMilli()
	const second = plan.Duration(time.Second)
	full, timeout := Call{Begin: at, MS: 100, Text: "push: send queue full"}, Call{Begin: at, MS: 1000, Text: "timed out"}
	for _, x := range []struct {
		done   []Call
		expect plan.Expect
		wrong  string
	}{
		{[]Call{full, timeout}, plan.Expect{SomeError: "queue full"}, ""},
		{[]Call{timeout}, plan.Expect{SomeError: "queue full"}, "of 1 calls that failed none"},
		{nil, plan.Expect{SomeError: "queue full"}, "of 0 calls that failed none"},
		{[]Call{timeout, {Begin: at, Text: "queue full", Barrier: true}}, plan.Expect{SomeError: "queue full"}, "of 1 calls that failed none"},
		{[]Call{full, timeout}, plan.Expect{Error: "queue full"}, `failed with "timed out"`},
		{[]Call{full}, plan.Expect{Error: "queue full"}, ""},
		{[]Call{{Begin: at, MS: 900, Barrier: true}}, plan.Expect{Barriers: "pass", Within: second}, ""},
		{[]Call{{Begin: at, MS: 8000, Barrier: true}}, plan.Expect{Barriers: "pass", Within: second}, "took 8000 ms"},
		{[]Call{{Begin: at, MS: 8000, Text: "dead"}}, plan.Expect{Within: second}, "took 8000 ms"},
		{[]Call{timeout}, plan.Expect{Within: second}, ""},
	} {
		p := &Process{Role: "worker", done: x.done}
		r := &planRun{c: &Cluster{o: Options{Log: func(string) {}}}, machine: &Machine{begun: time.Now()}}
		x.expect.Nodes = "workers"
		r.expect(&plan.Phase{Name: "x"}, &phaseRun{from: from, to: from.Add(time.Minute), living: []*Process{p}}, &x.expect)
		if got := strings.Join(r.c.Wrong(), "; "); (got == "") != (x.wrong == "") || !strings.Contains(got, x.wrong) {
			t.Errorf("%+v, expecting %+v: %q, want %q", x.done, x.expect, got, x.wrong)
		}
	}
}
