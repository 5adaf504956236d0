package kv_test

import (
	"cmp"
	"testing"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
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

// TestRefusedIsOver: after the first part that the transport refuses the others are not sent: the request has failed.
func TestRefusedIsOver(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Servers: 3, Wrap: hook.Wrap("worker", 0)})
	var all []kv.Key
	for _, n := range c.Servers {
		serve(t, n, func(r kv.Request[float32]) { t.Errorf("a request for the keys %v came", r.Keys) })
	}
	for _, r := range c.Workers[0].Topology().ServerKeyRanges() {
		all = append(all, kv.Key(r.Begin))
	}
	hook.OnSend(func(m *van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
	w := newWorker[float32](t, c.Workers[0])
	before := hook.Sends()
	call, err := w.Push(all, make([]float32, len(all)))
	if err == nil {
		err = call.Wait(t.Context())
	}
	fails(t, err, van.ErrQueueFull)
	if n := hook.Sends() - before; n != 1 {
		t.Errorf("%d messages were to be sent, want 1", n)
	}
}

// TestNotTaken: a request that the server cannot take fails its worker's call at once, with the reason.
func TestNotTaken(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		s, err := kv.NewServer[float32](c.Servers[0], kv.ServerOptions{})
		if err == nil {
			err = s.RegisterRecvBuffer(0, 10, make([]float32, 2))
		}
		if err == nil {
			err = s.Handle(func(r kv.Request[float32]) {
				if err := r.Respond(kv.Pairs[float32]{}); err != nil {
					t.Error(err)
				}
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		w := newWorker[float32](t, c.Workers[0])
		call, err := w.Push([]kv.Key{10}, make([]float32, 3))
		fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrInvalid, "refused there: worker 0 (id 9) pushed 12 bytes under key 10, the registered receive buffer has 8")
		do(t, w)(w.Push([]kv.Key{10}, make([]float32, 2)))
		other := newWorker[int32](t, c.Workers[1])
		call, err = other.Push([]kv.Key{10}, make([]int32, 2))
		fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrInvalid, "refused there: values of data type")
		testcluster.Counted(t, c.Servers[0], postoffice.Stats{InvalidRequests: 2})
	})
}

func make64() []kv.Key {
	keys := make([]kv.Key, 64)
	for i := range keys {
		keys[i] = kv.Key(i)
	}
	return keys
}
