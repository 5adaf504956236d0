package window

import (
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
)

// TestFlushToWhoHasClosed: what a rank has taken before it closed its end has arrived, though the
// transport lets go of its memory later.
func TestFlushToWhoHasClosed(t *testing.T) {
	for range 4 {
		r := newRig(t, testcluster.Options{Over: testcluster.TCP, Set: func(c *postoffice.Config) {
			c.Resend, c.ResendTimeout, c.DropMsg = true, 200*time.Millisecond, 10
		}}, 2, Options{Size: 1 << 20, Signals: 1})
		var other sync.WaitGroup
		other.Go(func() {
			for range 20 {
				if err := r.windows[1].WaitSignal(t.Context(), 0, 0); err != nil {
					t.Error(err)
				}
			}
			_ = r.windows[1].Close()
		})
		for range 20 {
			if err := r.windows[0].PutSignal(t.Context(), 1, 0, filled(50000, 1), 0); err != nil {
				t.Error(err)
			}
		}
		if err := r.windows[0].Flush(t.Context(), 1); err != nil {
			t.Error(err)
		}
		other.Wait()
		if err := r.windows[0].Close(); err != nil {
			t.Error(err)
		}
	}
}
