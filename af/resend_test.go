package af_test

import (
	"bytes"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// mute is a van whose acknowledgements are lost while on is set. The scheduler gets them: it would declare the node lost.
type mute struct {
	van.Van
	on          atomic.Bool
	begun, sent atomic.Int32       // sends of requests that have begun and ended
	received    func(*van.Message) // called before a data message is delivered; may be nil
	delivered   func(ts int32)     // called after that; may be nil
}

func (v *mute) Unwrap() van.Van { return v.Van }

// wrap returns the factory of v, which wraps the van of f.
func (v *mute) wrap(f van.Factory) van.Factory {
	return func(o van.Options) (van.Van, error) {
		var err error
		v.Van, err = f(o)
		return v, err
	}
}

func (v *mute) Send(m *van.Message) error {
	if v.on.Load() && m.Control.Cmd == van.Ack && m.Receiver != van.SchedulerID {
		return nil
	}
	if m.IsControl() || !m.Request {
		return v.Van.Send(m)
	}
	v.begun.Add(1)
	defer v.sent.Add(1)
	return v.Van.Send(m)
}

func (v *mute) Start(recv van.Receiver) {
	v.Van.Start(func(m *van.Message) {
		ts, data := m.Timestamp, !m.IsControl()
		if v.received != nil && data {
			v.received(m)
		}
		if recv(m); v.delivered != nil && data {
			v.delivered(ts)
		}
	})
}

// resends sets PS_RESEND. Ten tries take longer than any pause of a busy machine.
func resends(c *postoffice.Config) { c.Resend, c.ResendTimeout = true, 200*time.Millisecond }

// TestNotSentAgain: with PS_RESEND a push tensor is not sent again after its call is over, acknowledged or not,
// because the application may have changed it.
func TestNotSentAgain(t *testing.T) {
	acks, hook := &mute{}, &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{
		Set: resends,
		Wrap: func(role string, rank int, f van.Factory) van.Factory {
			if role == "server" {
				return acks.wrap(f)
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

// TestAnsweredAgain: with PS_RESEND a repeated answer is not written to a pull tensor of a call that has returned, even
// if the request was sent again after the first answer had arrived.
func TestAnsweredAgain(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		const size = 64 << 10
		var answers atomic.Int32
		worker, server := &mute{}, &mute{}
		worker.received = func(*van.Message) {
			if begun := worker.begun.Load(); answers.Load() == 0 {
				eventually(t, "the request is sent again", func() bool { return worker.sent.Load() > begun })
			}
			answers.Add(1)
		}
		o.Set = resends
		o.Wrap = func(role string, rank int, f van.Factory) van.Factory {
			switch role {
			case "worker":
				return worker.wrap(f)
			case "server":
				return server.wrap(f)
			}
			return f
		}
		c := testcluster.Start(t, o)
		serve(t, c.Servers[0], echoes(t))
		w := newWorker(t, c.Workers[0])
		worker.on.Store(true)
		server.on.Store(true)
		x, y := make([]byte, size), make([]byte, size)
		h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: bytesOf(t, x)}}, [][]af.KeyTensor{{{Key: 2, Val: bytesOf(t, y)}}})
		if err == nil {
			err = h.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		before := answers.Load()
		fill(y, 7) // the application's again
		eventually(t, "the answer is sent again", func() bool { return answers.Load() > before })
		if !bytes.Equal(y, bytes.Repeat([]byte{7}, size)) {
			t.Error("the repeated answer was written to memory of the application")
		}
		worker.on.Store(false)
		server.on.Store(false)
		c.Finalize(t)
	}, testcluster.TCP, testcluster.SHM)
}

// TestPushedAgain: with PS_RESEND a repeated push is not written to the receive buffer that has a later push by then.
func TestPushedAgain(t *testing.T) {
	test := func(t *testing.T, o testcluster.Options, tensor func(role string, b []byte) af.Tensor) {
		const size = 64 << 10
		server := &mute{}
		buffer := make([]byte, size)
		var first, second af.Call
		later, repeated := false, make(chan byte, 1) // the buffer's value after the first push was repeated
		started := make(chan struct{})
		server.received = func(m *van.Message) {
			<-started
			server.on.Store(m.Timestamp == first.Timestamp()) // only the first push is repeated
		}
		server.delivered = func(ts int32) {
			switch {
			case ts == second.Timestamp():
				later = true
			case ts == first.Timestamp() && later && len(repeated) == 0:
				repeated <- buffer[size-1]
			}
		}
		o.Set = resends
		o.Wrap = func(role string, rank int, f van.Factory) van.Factory {
			if role == "server" {
				return server.wrap(f)
			}
			return f
		}
		c := testcluster.Start(t, o)
		batches := make(chan af.Batch, 2)
		s := serve(t, c.Servers[0], func(b af.Batch) { batches <- b.Retain() })
		if err := s.RegisterRecvTensor(tensor("server", buffer), []int{0}, []uint64{1}); err != nil {
			t.Fatal(err)
		}
		w := newWorker(t, c.Workers[0])
		push := func(v byte) af.Call {
			t.Helper()
			call, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: tensor("worker", bytes.Repeat([]byte{v}, size))}}, nil)
			if err != nil {
				t.Fatal(err)
			}
			return call
		}
		first, second = push(1), push(2)
		close(started)
		select {
		case v := <-repeated:
			if v != 2 {
				t.Errorf("the buffer has %d after the first push was repeated, want 2", v)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("the first push is not repeated")
		}
		for _, call := range []af.Call{first, second} {
			b := <-batches
			echoes(t)(b)
			b.Release()
			if err := call.Wait(t.Context()); err != nil {
				t.Error(err)
			}
		}
		c.Finalize(t)
	}
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		t.Run("host", func(t *testing.T) {
			test(t, o, func(_ string, b []byte) af.Tensor { return bytesOf(t, b) })
		})
		t.Run("device", func(t *testing.T) {
			devices := map[string]*simgpu.Device{"worker": simgpu.New(0), "server": simgpu.New(0)}
			o.Backend = func(role string, _ int) backend.Backend {
				if d := devices[role]; d != nil {
					return d
				}
				return nil
			}
			test(t, o, func(role string, b []byte) af.Tensor { return deviceTensor(t, devices[role], b) })
		})
	}, testcluster.TCP, testcluster.SHM)
}
