package af_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// mute is a van whose acknowledgements to worker 0 are lost while on is set. The scheduler gets them: it would declare the node
// lost.
type mute struct {
	van.Van
	on atomic.Bool
}

func (v *mute) Unwrap() van.Van { return v.Van }

func (v *mute) Send(m *van.Message) error {
	if v.on.Load() && m.Control.Cmd == van.Ack && m.Receiver == van.WorkerID(0) {
		return nil
	}
	return v.Van.Send(m)
}

// TestNotSentAgain: with PS_RESEND a push tensor is not sent again after its call is over, acknowledged or not,
// because the application may have changed it.
func TestNotSentAgain(t *testing.T) {
	acks, hook := &mute{}, &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{
		Set: func(c *postoffice.Config) { c.Resend, c.ResendTimeout = true, 200*time.Millisecond }, // ten tries take longer than any pause of a busy machine
		Wrap: func(role string, rank int, f van.Factory) van.Factory {
			if role == "server" {
				return func(o van.Options) (v van.Van, err error) {
					acks.Van, err = f(o)
					return acks, err
				}
			}
			return hook.Wrap("worker", 0)(role, rank, f)
		}})
	var mu sync.Mutex
	pushed := map[uint64]int{} // times that the batch with a key was sent
	times := func(key uint64) int {
		mu.Lock()
		defer mu.Unlock()
		return pushed[key]
	}
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		mu.Lock()
		defer mu.Unlock()
		if m.IsBatch() {
			pushed[m.Key]++
		}
		return hooks.Pass
	})
	serve(t, c.Servers[0], func(b af.Batch) {
		eventually(t, "the push is sent again", func() bool { return times(b.Pushes()[0].Key) >= 3 })
		echoes(t)(b)
	})
	w := newWorker(t, c.Workers[0])
	acks.on.Store(true)
	x, y := bytesOf(t, make([]byte, 4096)), bytesOf(t, make([]byte, 4096))
	call := func(key uint64, pulls ...af.KeyTensor) {
		t.Helper()
		h, err := w.PushPull([]af.KeyTensor{{Key: key, Val: x}}, [][]af.KeyTensor{pulls})
		if err == nil {
			err = h.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	call(1, af.KeyTensor{Key: 10, Val: y})
	n := times(1)
	for i := range x.Bytes() { // the application's again
		x.Bytes()[i] = 1
	}
	call(2, af.KeyTensor{Key: 10, Val: y})
	if now := times(1); now != n {
		t.Errorf("a push was sent %d times by the end of its call, and %d times more", n, now-n)
	}
	acks.on.Store(false)
	c.Finalize(t)
}
