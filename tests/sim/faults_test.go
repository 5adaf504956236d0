//go:build failpoints

package sim

import (
	"fmt"
	"strings"
	"sync"
	"testing"
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
	{"recall", "memory of a request that was given up is sent with what is put there next"},
	{"recv-budget", "what waits for a handler has no bound"},
	{"send-budget", "what waits to be sent has no bound"},
	{"duplicate", "a message that comes twice is handed up twice"},
	{"rdma-reclaim", "memory that is registered for a peer and that it does not use is not taken back"},
	{"leak", "an answer that cannot be sent keeps its batch"},
}

// mostSeeds are tried for each fault.
const mostSeeds = 500

// TestFaults plants each fault and looks for the first seed that finds it. A seed that
// fails without the fault does not count.
func TestFaults(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute of two processors")
	}
	rows := make([]string, len(faults))
	todo := make(chan int)
	var wg sync.WaitGroup
	for range max(1, min(*procs, len(faults))) {
		wg.Go(func() {
			clean := &runner{}
			defer clean.end()
			for i := range todo {
				f := faults[i]
				seed, what, err := findFault(f.name, clean)
				switch {
				case err != nil:
					t.Errorf("%s: %v", f.name, err)
				case seed == 0:
					rows[i] = fmt.Sprintf("| `%s` | %s | not in %d | | |", f.name, f.what, mostSeeds)
					t.Errorf("%s: not found in %d seeds", f.name, mostSeeds)
				default:
					rows[i] = fmt.Sprintf("| `%s` | %s | %d | %s | `make sim SEEDS=1 FIRST=%d FAULT=%s` |", f.name, f.what, seed, what, seed, f.name)
				}
			}
		})
	}
	for i := range faults {
		todo <- i
	}
	close(todo)
	wg.Wait()
	fmt.Printf("| fault | what it brings back | seeds until found | found as | command |\n|---|---|---|---|---|\n%s\n", strings.Join(rows, "\n"))
}

// findFault returns the first seed that finds the fault, and how, or 0.
func findFault(name string, clean *runner) (uint64, string, error) {
	planted := &runner{fault: name}
	defer planted.end()
	for seed := uint64(1); seed <= mostSeeds; seed++ {
		o, err := planted.run(seed)
		if err != nil {
			return 0, "", err
		}
		if len(o.Violations) == 0 || o.Plan == "" { // no plan: it has crashed, or does not end
			continue
		}
		without, err := clean.run(seed)
		if err != nil {
			return 0, "", err
		}
		if len(without.Violations) == 0 {
			kind := o.Violations[0]
			if parts := strings.SplitN(kind, ": ", 3); len(parts) == 3 { // "at 1.5s: late: worker 0 ..."
				kind = parts[1]
			}
			return seed, fmt.Sprintf("%s (plan `%s`)", kind, o.Plan), nil
		}
	}
	return 0, "", nil
}

// runner runs seeds in a process, and in another one when that is of no use any more.
type runner struct {
	fault string
	p     *process
}

func (r *runner) run(seed uint64) (o outcome, err error) {
	if r.p == nil {
		if r.p, err = begin(r.fault); err != nil {
			return o, err
		}
	}
	o, ok := r.p.run(seed)
	if !ok {
		r.p = nil
	}
	return o, nil
}

func (r *runner) end() {
	if r.p != nil {
		r.p.end()
	}
}
