package af_test

import (
	"bytes"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
)

// TestBatchBeyondTheSendBudget: a batch is sent and answered whole when nothing else waits, however much more it has
// than STEPAF_SEND_BUDGET, in one tensor or in several.
func TestBatchBeyondTheSendBudget(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Set = func(c *postoffice.Config) { c.SendBudget = 1 << 20 }
		c := testcluster.Start(t, o)
		value := func(key uint64, size int) []byte {
			return bytes.Repeat([]byte{byte(key), byte(key >> 8), 3, 5}, size/4)
		}
		serve(t, c.Servers[0], func(b af.Batch) {
			for _, p := range b.Pushes() {
				if !bytes.Equal(p.Val.Bytes(), value(p.Key, p.Val.Len())) {
					t.Errorf("the values of key %d differ", p.Key)
				}
			}
			var out []af.KeyTensor
			for _, p := range b.Pulls() {
				out = append(out, af.KeyTensor{Key: p.Key, Val: bytesOf(t, value(p.Key, p.Len))})
			}
			if err := b.Respond(out); err != nil {
				t.Error(err)
			}
		})
		w := newWorker(t, c.Workers[0])
		for _, x := range []struct {
			name                string
			pushes, pulls, size int
		}{
			{"one push", 1, 0, 4 << 20}, {"one pull", 0, 1, 4 << 20}, {"one of each", 1, 1, 4 << 20},
			{"pushes", 3, 0, 3 << 20}, {"pulls", 0, 3, 3 << 20}, {"both", 3, 3, 3 << 20}, {"short ones", 200, 200, 20_000},
		} {
			t.Run(x.name, func(t *testing.T) {
				var push, pull []af.KeyTensor
				for key := range uint64(x.pushes) {
					push = append(push, af.KeyTensor{Key: key, Val: bytesOf(t, value(key, x.size))})
				}
				for key := range uint64(x.pulls) {
					pull = append(pull, af.KeyTensor{Key: key, Val: bytesOf(t, make([]byte, x.size))})
				}
				for range 3 {
					call, err := w.PushPull(push, pull)
					if err == nil {
						err = call.Wait(t.Context())
					}
					if err != nil {
						t.Fatal(err)
					}
					for _, p := range pull {
						if !bytes.Equal(p.Val.Bytes(), value(p.Key, x.size)) {
							t.Errorf("what was pulled under key %d differs", p.Key)
						}
						clear(p.Val.Bytes())
					}
				}
			})
		}
	}, testcluster.TCP, testcluster.Unix, testcluster.SHM)
}
