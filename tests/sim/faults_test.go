//go:build failpoints

package sim

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
)

// faults are the faults that can be planted. "what" says which old mistake it brings back, "as" lists the kinds of violations
// that count as found, "seed" is one that found it. TestFaults prints them as a table.
var faults = []struct {
	name, what string
	as         []string
	seed       uint64
}{
	{"stale-answer", "an answer to a request of an earlier process counts for a request of its successor", []string{"wrong data"}, 80},
	{"incarnation", "messages of an earlier process are accepted", []string{"not replaced"}, 2},
	{"fencing", "a replaced process gets no notice", []string{"late"}, 60},
	{"scheduler-back", "a restarted scheduler does not learn its cluster", []string{"not replaced"}, 2},
	{"heartbeat", "a process that ends without closing its connections is not declared dead", []string{"failed", "late"}, 2},
	{"start-deadline", "the barrier of start-up has no limit", []string{"never ends"}, 202},
	{"barrier-death", "a barrier fails at the first death", []string{"failed"}, 4},
	{"foreign-barrier", "barrier requests of C++ nodes are dropped", []string{"failed"}, 14},
	{"cluster-id", "processes of an earlier cluster take part", []string{"another cluster"}, 66},
	{"lost-batches", "get_batch returns batches of a worker that was lost", []string{"batch of a lost worker"}, 68},
	{"abandon", "get_batch returns canceled batches", []string{"abandoned batch"}, 70},
	{"recall", "the memory of a canceled request is sent with the data that the application puts there next", []string{"wrong data", "seen twice"}, 38},
	{"recv-budget", "the queue of a handler has no bound", []string{"budget"}, 48},
	{"send-budget", "the output queue of a peer has no bound", []string{"budget"}, 48},
	{"duplicate", "a message that arrives twice is delivered twice", []string{"seen twice"}, 21},
	{"rdma-reclaim", "unused memory that is registered for a peer is not reclaimed", []string{"failed"}, 19},
	{"proof", "a process that registers, or returns, need not listen at the address in its record", []string{"not replaced", "not started", "failed", "late", "another cluster"}, 5},
	{"scheduler-origin", "a table without an incarnation counts as the scheduler's, from any sender", []string{"not started", "not replaced", "not finalized", "wrong barrier", "failed", "late", "another cluster"}, 56},
	{"names", "a node uses one routing id for all processes, and a second connection with that id replaces the first", []string{"failed", "not replaced", "late"}, 5},
	{"foreign", "a record without a cluster id is accepted in a cluster that has one", []string{"not replaced", "failed", "late"}, 30},
	{"leak", "an answer that cannot be sent keeps its batch", []string{"leak"}, 10},
}

func init() {
	for _, f := range faults {
		faultNames = append(faultNames, f.name)
	}
}

// A name that is no fault is refused: with nothing planted every seed would pass.
func TestUnknownFault(t *testing.T) {
	out, err := exec.Command(os.Args[0], "-test.run=^$", "-sim.fault=abandon,abandom").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(out), `no fault "abandom": want of stale-answer, incarnation`) {
		t.Errorf("-sim.fault=abandon,abandom: %v, %s; want status 2, and the name and those that there are", err, out)
	}
}

// mostSeeds are tried for each fault.
const mostSeeds = 500

// TestFaults plants each fault and searches the first seed that finds it. A seed that fails without the fault does not count.
func TestFaults(t *testing.T) {
	rows := make([]string, len(faults))
	todo := make(chan int)
	var wg sync.WaitGroup
	for range max(1, min(*procs, len(faults))) {
		wg.Go(func() {
			clean := &runner{}
			defer clean.end()
			for i := range todo {
				f := faults[i]
				seed, what, err := findFault(f.name, f.as, f.seed, clean)
				switch {
				case err != nil:
					t.Errorf("%s: %v", f.name, err)
				case seed == 0:
					rows[i] = fmt.Sprintf("| `%s` | %s | not in %d | |", f.name, f.what, mostSeeds)
					t.Errorf("%s: not found in %d seeds", f.name, mostSeeds)
				default:
					rows[i] = fmt.Sprintf("| `%s` | %s | %d | %s |", f.name, f.what, seed, what)
				}
			}
		})
	}
	for i := range faults {
		todo <- i
	}
	close(todo)
	wg.Wait()
	fmt.Printf("| fault | what it brings back | seed | found as |\n|---|---|---|---|\n%s\n", strings.Join(rows, "\n"))
}

// findFault returns a seed that finds the fault as one of these kinds, and how, or 0: the seed first, or the first one from 1 on.
func findFault(name string, as []string, first uint64, clean *runner) (uint64, string, error) {
	planted := &runner{fault: name}
	defer planted.end()
	for n := range uint64(mostSeeds + 1) {
		seed := cmp.Or(n, first)
		o, err := planted.run(seed)
		if err != nil {
			return 0, "", err
		}
		i := slices.IndexFunc(o.Violations, func(v string) bool { return slices.Contains(as, kindOf(v)) })
		if i < 0 || o.Plan == "" { // no plan: it has crashed, or does not end
			continue
		}
		without, err := clean.run(seed)
		if err != nil {
			return 0, "", err
		}
		if len(without.Violations) == 0 {
			return seed, fmt.Sprintf("%s (plan `%s`)", kindOf(o.Violations[i]), o.Plan), nil
		}
	}
	return 0, "", nil
}

// kindOf is "late" of "at 1.5s: late: worker 0 ...".
func kindOf(violation string) string {
	if parts := strings.SplitN(violation, ": ", 3); len(parts) == 3 {
		return parts[1]
	}
	return violation
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
