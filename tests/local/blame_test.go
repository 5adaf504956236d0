package local

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// TestLargePushToIdleServer: an idle server logs no slow handler during a push of more than STEPAF_RECV_BUDGET_PEER. The messages that
// wait are parts of an unfinished batch.
func TestLargePushToIdleServer(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		var log nodetest.Text
		o.Log = log.Logger(slog.LevelWarn)
		o.Set = func(c *postoffice.Config) { c.RecvBudgetPeer = 4 << 20 }
		c := testcluster.Start(t, o)
		nodetest.Server(t, c.Servers[0], func(b af.Batch) {
			if err := b.Respond(nil); err != nil {
				t.Error(err)
			}
		})
		w := nodetest.Worker(t, c.Workers[0])
		var push []af.KeyTensor
		for i := range 4 {
			x, err := af.FromSlice(make([]byte, 32<<20))
			if err != nil {
				t.Fatal(err)
			}
			push = append(push, af.KeyTensor{Key: uint64(i), Val: x})
		}
		for range 3 {
			h, err := w.PushPull(push, nil)
			if err == nil {
				err = h.Wait(nodetest.Within(t, time.Minute))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		for _, blames := range []string{"slow", "not read", "asked to wait"} {
			if text := log.String(); strings.Contains(text, blames) {
				t.Errorf("the log says %q:\n%s", blames, text)
			}
		}
	}, testcluster.TCP, testcluster.SHM)
}
