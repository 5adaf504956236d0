package af_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// TestGroups: instance i of each worker group talks to instance i of each server
// group, and to no other.
func TestGroups(t *testing.T) {
	const groups, size = 2, 2
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers, o.Servers, o.Group = groups, groups, size
		c := testcluster.Start(t, o)
		for _, n := range c.Servers {
			serve(t, n, func(b af.Batch) {
				text := fmt.Sprintf("%s to group %d instance %d", b.Pushes()[0].Val.Bytes(), n.Topology().GroupRank, n.Topology().Instance)
				if err := b.Respond([]af.KeyTensor{{Key: 2, Val: bytesOf(t, []byte(text))}}, af.ByKey); err != nil {
					t.Error(err)
				}
			})
		}
		var wg sync.WaitGroup
		for rank, n := range c.Workers {
			if n.Topology().GroupRank != rank/size || n.Topology().Instance != rank%size || n.Topology().NumServers != groups || n.Topology().GroupSize != size {
				t.Errorf("worker %d calls itself group %d instance %d of %d servers", rank, n.Topology().GroupRank, n.Topology().Instance, n.Topology().NumServers)
			}
			w := newWorker(t, n)
			wg.Go(func() {
				for round := range 20 {
					from := fmt.Sprintf("round %02d group %d instance %d", round, n.Topology().GroupRank, n.Topology().Instance)
					var want []string
					var pull []af.KeyTensor
					for g := range groups {
						text := fmt.Sprintf("%s to group %d instance %d", from, g, n.Topology().Instance)
						want = append(want, text)
						pull = append(pull, af.KeyTensor{Key: 2, Val: bytesOf(t, make([]byte, len(text)))})
					}
					h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte(from))}}, testcluster.PerServer(pull, groups))
					if err == nil {
						err = h.Wait(t.Context())
					}
					if err != nil {
						t.Error(err)
						return
					}
					for g := range pull {
						if got := string(pull[g].Val.Bytes()); got != want[g] {
							t.Errorf("got %q, want %q", got, want[g])
						}
					}
				}
			})
		}
		wg.Wait()
		c.Finalize(t)
	}, all...)
}
