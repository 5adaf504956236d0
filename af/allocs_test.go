//go:build !race

package af_test

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// TestAllocations: a push_pull in steady state, prepared or not, allocates nothing, on
// worker and server together.
func TestAllocations(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		defer c.Finalize(t)
		answer := []af.KeyTensor{{Val: tensor(t, make([]float32, 256))}}
		var left counter
		stream, limit, server, rows := af.Stream(1<<20), 20*time.Second, 0, 256 // variables: a constant becomes an interface without an allocation
		serve(t, c.Servers[0], func(b af.Batch) {
			var err error
			if answer[0].Key = b.Pulls()[0].Key; answer[0].Key == 2 {
				err = b.Respond(answer)
			} else {
				err = b.Respond(answer, af.ByKey, stream, af.OnSent(&left))
			}
			if err != nil {
				t.Error(err)
			}
		})
		w := newWorker(t, c.Workers[0])
		push := []af.KeyTensor{{Key: 1, Val: tensor(t, make([]float32, 256))}}
		pull := [][]af.KeyTensor{{{Key: 2, Val: tensor(t, make([]float32, 256))}}}
		chosen := [][]af.KeyTensor{{{Key: 3, Val: pull[0][0].Val}}}
		x, err := w.Prepare(push, pull)
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		some, err := w.Prepare(push, chosen, stream, af.To{server}, af.Within(limit))
		if err != nil {
			t.Fatal(err)
		}
		defer some.Close()
		ctx := t.Context()
		for name, call := range map[string]func() (af.Call, error){
			"plain":             func() (af.Call, error) { return w.PushPull(push, pull) },
			"options":           func() (af.Call, error) { return w.PushPull(push, chosen, stream, af.To{server}, af.Within(limit)) },
			"prepared":          func() (af.Call, error) { return x.Start() },
			"prepared, options": func() (af.Call, error) { return some.Start(af.Rows(rows), stream) },
		} {
			once := func() {
				h, err := call()
				if err == nil {
					err = h.Wait(ctx)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			for range 2000 {
				once()
			}
			if n := testing.AllocsPerRun(2000, once); n > 0 {
				t.Errorf("%s: %.2f allocations for each, want 0", name, n)
			}
		}
	}, all...)
}
