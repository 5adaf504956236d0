//go:build !race

package af_test

import (
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
)

// TestAllocations: a push_pull in steady state allocates nothing, on worker and
// server together.
func TestAllocations(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		defer c.Finalize(t)
		s, err := af.NewTensorServer(c.Servers[0], af.Options{})
		if err != nil {
			t.Fatal(err)
		}
		answer := []af.KeyTensor{{Val: tensor(t, make([]float32, 256))}}
		if err := s.SetRequestHandle(func(b af.Batch) {
			answer[0].Key = b.Pulls()[0].Key
			if err := b.Response(answer, nil); err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
		w, err := af.NewTensorWorker(c.Workers[0], af.Options{})
		if err != nil {
			t.Fatal(err)
		}
		push := []af.KeyTensor{{Key: 1, Val: tensor(t, make([]float32, 256))}}
		pull := []af.KeyTensor{{Key: 2, Val: tensor(t, make([]float32, 256))}}
		ctx := t.Context()
		once := func() {
			h, err := w.ZBatchPushPull(push, pull)
			if err == nil {
				err = w.Wait(ctx, h)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		for range 2000 {
			once()
		}
		if n := testing.AllocsPerRun(2000, once); n > 0 {
			t.Errorf("%.2f allocations for each push_pull, want 0", n)
		}
	}, all...)
}
