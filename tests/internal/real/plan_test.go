package real

import (
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// TestExpectations: unmet expectations of a plan about errors and times are found.
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

// TestClockStandsStill: the plan's clock is stopped as long as any process is being started.
func TestClockStandsStill(t *testing.T) {
	r := &planRun{ctx: t.Context(), stop: make(chan struct{})}
	r.hold(true)
	at := r.clock()
	r.hold(true)
	r.hold(false)
	for range 100 {
		if now := r.clock(); !now.Equal(at) {
			t.Fatalf("it has gone on by %s", now.Sub(at))
		}
	}
	r.hold(false)
	real, asked := time.Now(), r.clock()
	if !r.after(asked.Add(20*time.Millisecond)) || time.Since(real) < 20*time.Millisecond || r.clock().Before(asked.Add(20*time.Millisecond)) {
		t.Errorf("it has gone on by %s within %s", r.clock().Sub(asked), time.Since(real))
	}
	r.hold(true)
	defer r.hold(false)
	close(r.stop)
	if r.after(r.clock().Add(time.Millisecond)) {
		t.Error("a time has come while the clock stood still")
	}
}

// TestLateBetween: the machine's lateness counts for intervals that overlap it.
func TestLateBetween(t *testing.T) {
	begun := time.Now()
	at := func(s int) time.Time { return begun.Add(time.Duration(s) * time.Second) }
	m := &Machine{begun: begun, late: []lateness{{at(2), time.Second}, {at(10), 2 * time.Second}}}
	for _, x := range []struct{ from, to, want int }{{0, 1, 0}, {0, 2, 1}, {1, 3, 1}, {3, 8, 0}, {3, 9, 2}, {0, 20, 2}, {11, 20, 0}} {
		if got, want := m.between(at(x.from), at(x.to)), time.Duration(hops*x.want)*time.Second; got != want {
			t.Errorf("from second %d to %d it was %s late, want %s", x.from, x.to, got, want)
		}
	}
}
