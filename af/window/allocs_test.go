//go:build !race

package window

import (
	"testing"

	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// TestAllocations: a PutSignal and its answer allocate nothing at either end, nor do Put and Flush.
func TestAllocations(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		r := newRig(t, o, 2, Options{Size: 8192, Signals: 1})
		a, b, ctx := r.windows[0], r.windows[1], t.Context()
		end := make(chan error, 1)
		go func() {
			for {
				err := b.WaitSignal(ctx, 0, 0)
				if err == nil {
					err = b.Signal(ctx, 0, 0)
				}
				if err != nil {
					end <- err
					return
				}
			}
		}()
		data := filled(8192, 1)
		once := func() {
			err := a.Put(ctx, 1, 0, data)
			if err == nil {
				err = a.PutSignal(ctx, 1, 0, data, 0)
			}
			if err == nil {
				err = a.WaitSignal(ctx, 1, 0)
			}
			if err == nil {
				err = a.Flush(ctx, 1)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		for range 2000 {
			once()
		}
		if n := testing.AllocsPerRun(2000, once); n > 0 {
			t.Errorf("%.2f allocations for each, want 0", n)
		}
		_ = a.Close()
		<-end
	}, testcluster.TCP, testcluster.SHM)
}
