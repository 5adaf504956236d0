package kv_test

import (
	"testing"

	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/vantest/hooks"
)

// TestOnSentOfARefusedAnswer: OnSent's function is not called for an answer that the transport
// has refused: Respond has said so.
func TestOnSentOfARefusedAnswer(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{}
		o.Wrap = hook.Wrap("server", 0)
		c := testcluster.Start(t, o)
		var sent counter
		answered := make(chan error, 1)
		serve(t, c.Servers[0], func(r kv.Request[float32]) {
			keys := r.Keys // with the request's own keys the answer holds its message
			if r.Cmd == 1 {
				keys = append([]kv.Key(nil), keys...)
			}
			answered <- r.Respond(kv.Pairs[float32]{Keys: keys, Vals: make([]float32, len(keys))}, kv.OnSent(&sent))
		})
		hook.OnSend(func(m *van.Message) hooks.Verdict {
			if m.Frames > 0 {
				return hooks.Refuse(van.ErrQueueFull)
			}
			return hooks.Pass
		})
		w := newWorker[float32](t, c.Workers[0])
		for cmd := range int32(2) {
			var got []float32
			if _, err := w.Pull(make64(), &got, kv.Cmd(cmd)); err != nil {
				t.Fatal(err)
			}
			fails(t, <-answered, van.ErrQueueFull)
			eventually(t, "end of the request", func() bool { return hook.Held() == 0 })
			if n := sent.n.Load(); n != 0 {
				t.Errorf("command %d: told %d times that the answer has left", cmd, n)
			}
		}
	})
}

func make64() []kv.Key {
	keys := make([]kv.Key, 64)
	for i := range keys {
		keys[i] = kv.Key(i)
	}
	return keys
}
