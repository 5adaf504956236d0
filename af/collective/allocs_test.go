//go:build !race

package collective

import (
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// TestAllocations: a call in steady state allocates nothing, on all ranks together.
func TestAllocations(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		const n, size = 2, 1024
		all, _ := comms(t, o, n)
		floats := func(count int) []af.Tensor {
			l := make([]af.Tensor, n)
			for r := range l {
				l[r] = must(af.FromSlice(make([]float32, count)))
			}
			return l
		}
		one, many, big := floats(size), floats(n*size), floats(1<<16)
		outs, ins := [][]af.Tensor{floats(size), floats(size)}, [][]af.Tensor{floats(size), floats(size)}
		ctx := t.Context()
		for name, call := range map[string]func(r int) (Op, error){
			"AllGather":       func(r int) (Op, error) { return all[r].AllGather(many[r], one[r]) },
			"AllGatherV":      func(r int) (Op, error) { return all[r].AllGatherV(outs[r], one[r]) },
			"AllToAll":        func(r int) (Op, error) { return all[r].AllToAll(outs[r], ins[r]) },
			"Broadcast":       func(r int) (Op, error) { return all[r].Broadcast(one[r], 0) },
			"ReduceScatter":   func(r int) (Op, error) { return all[r].ReduceScatter(one[r], many[r], Sum) },
			"small AllReduce": func(r int) (Op, error) { return all[r].AllReduce(one[r], one[r], Sum) },
			"large AllReduce": func(r int) (Op, error) { return all[r].AllReduce(big[r], big[r], Sum) },
			"Barrier":         func(r int) (Op, error) { return Op{}, all[r].Barrier(ctx) },
		} {
			once := func(r int) {
				op, err := call(r)
				if err == nil && name != "Barrier" {
					err = op.Wait(ctx)
				}
				if err != nil {
					t.Error(err)
				}
			}
			next, over := make(chan bool), make(chan bool)
			go func() {
				for range next {
					once(1)
					over <- true
				}
			}()
			both := func() {
				next <- true
				once(0)
				<-over
			}
			for range 100 {
				both()
			}
			if got := testing.AllocsPerRun(100, both); got > 0 {
				t.Errorf("%s: %.2f allocations for each, want 0", name, got)
			}
			close(next)
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}
