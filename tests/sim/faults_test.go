//go:build failpoints

package sim

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/sim"
)

// faults can be planted, and what each of them brings back. docs/testing.md has the table
// that TestFaults prints.
var faults = []struct{ name, what string }{
	{"incarnation", "messages and answers of an earlier process are taken"},
	{"fencing", "a process that was replaced is not told"},
	{"scheduler-back", "a scheduler that was started again does not learn its cluster"},
	{"heartbeat", "nobody is missed who does not close his connections"},
	{"start-deadline", "the barrier of start-up has no limit"},
	{"barrier-death", "a barrier fails at the first death"},
	{"foreign-barrier", "barrier requests of nodes of the original are thrown away"},
	{"cluster-id", "processes of an earlier cluster take part"},
	{"lost-batches", "get_batch returns batches of a worker that was lost"},
	{"abandon", "get_batch returns batches that were given up"},
	{"recv-budget", "what waits for a handler has no bound"},
	{"send-budget", "what waits to be sent has no bound"},
	{"duplicate", "a message that comes twice is handed up twice"},
	{"leak", "an answer that cannot be sent keeps its batch"},
}

// mostSeeds are tried for each fault, and needed of the faults must be found.
const (
	mostSeeds = 500
	needed    = 12
)

// TestFaults plants each fault and looks for it. A seed that fails without the fault does
// not count.
func TestFaults(t *testing.T) {
	table := &strings.Builder{}
	fmt.Fprintln(table, "| fault | what it brings back | found after | by | command |\n|---|---|---|---|---|")
	found := 0
	for _, f := range faults {
		seed, what := findFault(t, f.name)
		if seed == 0 {
			fmt.Fprintf(table, "| `%s` | %s | not in %d seeds | | |\n", f.name, f.what, mostSeeds)
			t.Logf("%s: not found in %d seeds", f.name, mostSeeds)
			continue
		}
		found++
		fmt.Fprintf(table, "| `%s` | %s | %d seeds | %s | `make sim SEEDS=1 FIRST=%d FAULT=%s` |\n", f.name, f.what, seed, what, seed, f.name)
	}
	fmt.Fprint(os.Stdout, table)
	if found < needed {
		t.Errorf("%d of %d faults were found, want at least %d", found, len(faults), needed)
	}
}

// findFault returns the first seed that finds the fault, and how, or 0.
func findFault(t *testing.T, name string) (uint64, string) {
	defer failpoint.Plant()
	for seed := uint64(1); seed <= mostSeeds; seed++ {
		failpoint.Plant(name)
		p, err := choose(seed)
		if err != nil {
			t.Fatal(err)
		}
		r := sim.Run(t, p, seed)
		if len(r.Violations) == 0 {
			continue
		}
		failpoint.Plant()
		if len(sim.Run(t, p, seed).Violations) == 0 {
			return seed, fmt.Sprintf("%s (`%s`)", r.Violations[0].Kind, strings.TrimSuffix(p.Name, fmt.Sprintf("-%d", seed)))
		}
	}
	return 0, ""
}
