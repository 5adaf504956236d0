package sim

import (
	"os"
	"runtime"
	"testing"

	"github.com/stepaf/stepaf-go/tests/internal/sim"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// known are plans that fail because of a known fault: none.
var known = map[string]bool{}

// TestPlans carries out each plan with one seed; make sim uses others. Without the race detector, which watches van/rdma in
// the tests of that package and in the plans for RDMA, each plan that can be is also carried out over RDMA.
func TestPlans(t *testing.T) {
	all, err := plans()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		t.Run(p.Name, func(t *testing.T) {
			if p.Only == "processes" {
				t.Skip("only for real processes")
			}
			carryOut(t, p)
		})
	}
	if vantest.Race {
		return
	}
	for _, p := range overRDMA(all) {
		t.Run(p.Name, func(t *testing.T) { carryOut(t, p) })
	}
}

// carryOut carries out p with seed 0.
func carryOut(t *testing.T, p *plan.Plan) {
	r := sim.Run(t, p, 0)
	if known[p.Name] {
		t.Skipf("known to fail: %v", r.Violations)
	}
	for _, v := range r.Violations {
		t.Error(v)
	}
	if t.Failed() {
		r.WriteTimeline(os.Stderr, 100)
	}
}

// TestRepeats: a seed tells everything: the same one gives the same story. The last five have PS_RESEND.
func TestRepeats(t *testing.T) {
	for _, seed := range []uint64{0, 1, 2, 3, 4, 5, 13, 69, 94, 110, 224} {
		want := sim.Run(t, plan.Random(seed), seed)
		for i := range 4 { // with one processor and with two
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1 + i%2))
			if got := sim.Run(t, plan.Random(seed), seed); got.Hash != want.Hash {
				t.Errorf("seed %d: story %x, then, run %d, %x", seed, want.Hash, i+2, got.Hash)
			}
		}
	}
}

// failed are seeds beyond those of "make test-long" that once failed, and why.
var failed = []struct {
	seed uint64
	why  string
}{
	{3087, "a notice of a death that came after that of the return"},
	{5857, "the same"},
	{8777, "the same"},
	{5241, "a server in Finalize gave up at the moment when the scheduler resumed the cluster"},
	{7715, "the same"},
	{40189, "a withdrawal that came before the record of its process"},
	{5215, "a barrier of a process that had not started"},
	{1087, "a server that was woken got what it had been sent before it heard who was replaced"},
	{6535, "the same, of a server that had been cut off"},
	{13971, "a request that was repeated when its barrier had failed counted for the next one"},
	{26257, "the same"},
	{3549, "a message that came again after its sender, of the original, had been replaced"},
	{24641, "the same, of one whose record came late"},
	{4127, "a scheduler that came back to less than half of a cluster without a name"},
	{5637, "a process that was killed before it had taken its place"},
	{16447, "a server of the original was not sent the record that it had missed"},
	{18327, "a barrier that counts what a node of the original asked for before it gave up"},
	{30035, "a barrier whose release was lost: before it came again, a member was replaced"},
	{32673, "the same, of a release that came to a process that stood still"},
	{21849, "a barrier that counts a request that was given up, before that was known"},
	{11333, "a barrier of the process before one that had not taken its place yet"},
	{89917, "a server that had let messages time out was sent nothing more, and so was never back"},
	{13523, "a replaced worker's barrier of itself alone was taken for one over its group; what it repeated was acknowledged to its successor"},
	{10757, "a release that was lost with the connection, of which only the scheduler noticed"},
	{36095, "the same"},
	{131495, "a node of the original that has given up a barrier is one ahead of the scheduler from then on: the checker did not know"},
	{102115, "a barrier that counts a request that was given up while a cut held it up"},
	{12449, "a node of the original was not sent the record that was on its way when its connection broke, long after"},
	{720903, "a scheduler that was started again and waited for one more new process looked once a second, and gave up between two looks"},
	{3001263, "a barrier that a process gave up while it stood still, so that nobody could know: the checker did not"},
	{2004245, "a copy of a message that was given up before it left: the simulated network made it of what lay there then"},
}

// TestSeedsThatFailed runs these seeds again. The meaning of a seed changes with the plans.
func TestSeedsThatFailed(t *testing.T) {
	for _, f := range failed {
		o := one(t, f.seed, 100)
		for _, v := range o.Violations {
			t.Errorf("seed %d (%s; it failed before with %s): %s", f.seed, o.Plan, f.why, v)
		}
		if t.Failed() {
			t.Log(o.Story)
			return
		}
	}
}
