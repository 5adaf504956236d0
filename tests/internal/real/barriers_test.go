package real

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van"
)

// TestBarriersJudged: a barrier that was over before all members had called it is found, whichever
// process has the place. Other barriers are not reported.
func TestBarriersJudged(t *testing.T) {
	const all = van.WorkerGroup | van.ServerGroup
	passed := func(begin, end int64) Vote { return Vote{Group: all, Begin: begin, End: end, Passed: true} }
	failed := func(begin, end int64) Vote { return Vote{Group: all, Begin: begin, End: end} }
	at := func(role string, started int64, votes ...Vote) *Process {
		return &Process{Role: role, startedAt: started, votes: votes}
	}
	worker := func(started int64, votes ...Vote) *Process { return at("worker", started, votes...) }
	server := at("server", 1, passed(100, 200))
	for _, x := range []struct {
		name    string
		workers []*Process
		foreign bool
		missing string
	}{
		{"called", []*Process{worker(1, passed(110, 190))}, false, ""},
		{"late", []*Process{worker(1, passed(201, 210))}, false, "worker 0"},
		{"never", []*Process{worker(1)}, false, "worker 0"},
		{"another group", []*Process{worker(1, Vote{Group: van.WorkerGroup, Begin: 110, End: 190, Passed: true})}, false, "worker 0"},
		{"waits, and was killed", []*Process{worker(1, failed(110, 0))}, false, ""},
		{"the barrier before", []*Process{worker(1, passed(10, 90))}, false, "worker 0"},
		{"given up just before", []*Process{worker(1, failed(10, 95))}, false, ""},
		{"given up long before", []*Process{worker(1, failed(10, 50))}, false, "worker 0"},
		{"given up long before, by the original", []*Process{worker(1, failed(10, 50))}, true, ""},
		{"given up and used up, by the original", []*Process{worker(1, failed(10, 50), passed(60, 70))}, true, "worker 0"},
		{"by the next process", []*Process{worker(1), worker(150, passed(160, 190))}, false, ""},
		{"by the one before, which had the place", []*Process{worker(1, failed(110, 0)), worker(150)}, false, ""},
		{"by the one before, which was replaced", []*Process{worker(1, failed(20, 0)), worker(50)}, false, "worker 0"},
		{"by the one before, whose next never started", []*Process{worker(1, failed(20, 0)), worker(0)}, false, ""},
	} {
		j := &barrierJudge{all: append([]*Process{at("scheduler", 1), server}, x.workers...), late: 10 * time.Nanosecond,
			foreign: func(n plan.Node) bool { return x.foreign && n.Role() == "worker" }}
		var got []string
		j.judge(func(p *Process, v Vote, missing plan.Node) {
			if p == server {
				got = append(got, fmt.Sprint(missing))
			}
		})
		if s := strings.Join(got, ", "); s != x.missing {
			t.Errorf("%s: %q is missing, want %q", x.name, s, x.missing)
		}
	}
	alone := &barrierJudge{all: []*Process{at("worker", 1, Vote{Group: van.WorkerGroup, Begin: 1, End: 2, Passed: true})}, foreign: func(plan.Node) bool { return false }}
	alone.judge(func(_ *Process, _ Vote, missing plan.Node) { t.Errorf("one alone: %s is missing", missing) })
}
