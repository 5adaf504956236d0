package processes

import (
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/testlimit"
)

// soon is how long a busy machine may take for an operation of milliseconds.
const soon = 20 * time.Second

// load is the workers' load unless a test sets another.
var load = plan.Load{Nodes: "workers", Every: ms, Size: 3000, Pushes: 2, Pulls: 2}

const ms = plan.Duration(time.Millisecond)

// legs are those that every machine has.
var legs = []real.Leg{real.TCP, real.SHM}

// start starts a cluster, which ends with the test.
func start(t *testing.T, o real.Options) *real.Cluster {
	t.Helper()
	testlimit.Longer(t, 90*time.Second) // tests wait for at most 40 s in one place for stopped processes
	if o.Loads == nil {
		o.Loads = []plan.Load{load}
	}
	if o.Separate && !real.Privileged() {
		t.Skip("a network for each process needs the rights of root")
	}
	return real.Begin(t, o)
}

func try(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// onLegs runs a test on each leg.
func onLegs(t *testing.T, test func(t *testing.T, leg real.Leg)) {
	for _, leg := range legs {
		t.Run(string(leg), func(t *testing.T) { test(t, leg) })
	}
}

// TestRuns: programs as people write them run, and end in order.
func TestRuns(t *testing.T) {
	for _, program := range []string{real.Plain, real.Module} {
		t.Run(program, func(t *testing.T) {
			onLegs(t, func(t *testing.T, leg real.Leg) {
				c := start(t, real.Options{Workers: 2, Servers: 2, Leg: leg, Program: program})
				try(t, c.Works(50, soon))
				try(t, c.Finish(soon))
			})
		})
	}
}

// TestStartsHalf: a node that has started and cannot become what its program says is closed:
// it leaves nothing open, which the runner checks when a process ends.
func TestStartsHalf(t *testing.T) {
	c, err := real.New(real.Options{Leg: real.TCP, Program: "nothing"})
	try(t, err)
	defer c.Close()
	if err := c.Start(); err == nil || !strings.Contains(err.Error(), `no such program: "nothing"`) {
		t.Errorf("Start: %v; want it to say that there is no such program", err)
	}
	for _, p := range c.All() {
		try(t, p.Await(soon, "it ends", func(s real.State) bool { return s.Ended }))
	}
	for _, w := range c.Wrong() {
		t.Errorf("wrong: %s", w)
	}
}
