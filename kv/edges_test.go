package kv_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// lender is a van that releases sent messages late: data messages chosen by keep are not sent until the test sends
// them.
type lender struct {
	van.Van
	keep func(m *van.Message) bool
	recv func(van.Receiver) van.Receiver

	mu   sync.Mutex
	kept []*van.Message
}

func (v *lender) Unwrap() van.Van { return v.Van }

func (v *lender) Start(recv van.Receiver) {
	if v.recv != nil {
		recv = v.recv(recv)
	}
	v.Van.Start(recv)
}

func (v *lender) Send(m *van.Message) error {
	if m.IsControl() || v.keep == nil || !v.keep(m) {
		return v.Van.Send(m)
	}
	c := &van.Message{Meta: m.Meta, Receiver: m.Receiver, Frames: m.Frames, Keys: m.Keys, Vals: m.Vals, Lens: m.Lens, Done: m.Done}
	c.DataTypes = slices.Clone(m.DataTypes)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.kept = append(v.kept, c)
	return nil
}

// messages are those kept so far.
func (v *lender) messages() []*van.Message {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.kept)
}

// wrap puts v around the van of the node with that role and rank.
func (v *lender) wrap(role string) func(string, int, van.Factory) van.Factory {
	return func(r string, rank int, f van.Factory) van.Factory {
		if r != role || rank != 0 {
			return f
		}
		return func(o van.Options) (van.Van, error) {
			inner, err := f(o)
			v.Van = inner
			return v, err
		}
	}
}

func floats(m backend.Mem) []float32 { return unsafe.Slice((*float32)(m.Ptr()), m.Len()/4) }

func numbers(m backend.Mem) []uint64 { return unsafe.Slice((*uint64)(m.Ptr()), m.Len()/8) }

// TestPullBeforePush: before the first push a pull gets one zero for each key, for any length that the worker
// announces.
func TestPullBeforePush(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		sums[float32](t, c)
		if _, err := (*cluster.Node)(c.Workers[0]).App().AddCustomer(0, 5, func(*van.Message) {}); err != nil {
			t.Fatal(err)
		}
		// 304 bytes that ask for 512 MiB.
		m := &van.Message{}
		m.Reset()
		m.Receiver, m.Request, m.Head, m.Timestamp, m.AppID, m.CustomerID = van.ServerID(0), true, 0, 1, 0, 5
		m.ValLen = 128 << 20
		datamsg.SetData(m, backend.Slice([]kv.Key{1}), backend.Mem{}, backend.Mem{}, van.TypeFloat)
		before := testcluster.Stats(c.Servers[0]).SentBytes
		if err := (*cluster.Node)(c.Workers[0]).App().Send(m); err != nil {
			t.Fatal(err)
		}
		eventually(t, "answer", func() bool { return testcluster.Stats(c.Servers[0]).SentBytes > before })
		if n := testcluster.Stats(c.Servers[0]).SentBytes - before; n > 1024 {
			t.Errorf("the server answers with %d bytes", n)
		}

		w := newWorker[float32](t, c.Workers[0])
		keys := []kv.Key{1, 2, 3}
		var got []float32
		do(t, w)(w.Pull(keys, &got))
		if !slices.Equal(got, make([]float32, 3)) {
			t.Errorf("got %v, want three zeros", got)
		}
		got = make([]float32, 6)
		ts, err := w.Pull(keys, &got)
		if err == nil {
			err = ts.Wait(t.Context())
		}
		fails(t, err, van.ErrInvalid, "3 values received, the buffer holds 6")
		do(t, w)(w.Push(keys, []float32{1, 2, 3, 4, 5, 6}))
		do(t, w)(w.Pull(keys, &got))
		if !slices.Equal(got, []float32{1, 2, 3, 4, 5, 6}) {
			t.Errorf("got %v", got)
		}
		c.Finalize(t)
	})
}

// TestBufferBoundary: a push that is one element longer than its registered buffer is dropped with a log line. A
// push that just fits is accepted.
func TestBufferBoundary(t *testing.T) {
	var l vantest.Log
	c := testcluster.Start(t, testcluster.Options{Log: l.Logger()})
	place := make([]uint8, 7)
	s, err := kv.NewServer[uint8](c.Servers[0], kv.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RegisterRecvBuffer(0, 10, place); err != nil {
		t.Fatal(err)
	}
	if err := s.Handle(func(r kv.Request[uint8]) {
		if err := r.Respond(kv.Pairs[uint8]{}); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	w := newWorker[uint8](t, c.Workers[0])
	if _, err := w.Push([]kv.Key{10}, make([]uint8, 8)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "log line", func() bool {
		return strings.Contains(l.String(), "pushed 8 bytes under key 10, the registered receive buffer has 7")
	})
	do(t, w)(w.Push([]kv.Key{10}, []uint8{1, 2, 3, 4, 5, 6, 7}))
	if !slices.Equal(place, []uint8{1, 2, 3, 4, 5, 6, 7}) {
		t.Errorf("the buffer has %v", place)
	}
}

// TestCopiesOfAFailedPush: the copies that a push made are not reused while the transport may still send them.
func TestCopiesOfAFailedPush(t *testing.T) {
	v := &lender{keep: func(m *van.Message) bool { return m.Request && m.Push }}
	c := testcluster.Start(t, testcluster.Options{Wrap: v.wrap("worker")})
	sums[float32](t, c)
	w := newWorker[float32](t, c.Workers[0])
	keys := make([]kv.Key, 64)
	for i := range keys {
		keys[i] = kv.Key(i)
	}
	const rounds = 4
	for round := range rounds {
		vals := slices.Repeat([]float32{float32(round)}, len(keys))
		ts, err := w.Push(keys, vals)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		fails(t, ts.Wait(ctx), van.ErrTimeout)
		cancel()
	}
	kept := v.messages()
	if len(kept) != rounds {
		t.Fatalf("%d messages were sent, want %d", len(kept), rounds)
	}
	for round, m := range kept {
		if got := floats(m.Vals); !slices.Equal(got, slices.Repeat([]float32{float32(round)}, len(keys))) {
			t.Errorf("push %d, still being sent, has the values of another one: %v", round, got[:2])
		}
	}
}

// poisoner owns received messages, and overwrites the keys of messages that are no longer held.
type poisoner struct {
	freed chan struct{}
}

func (p poisoner) Free(m *van.Message) {
	clear(m.Keys.Host())
	p.freed <- struct{}{}
}

// TestAnswerHoldsItsRequest: an answer that has the request's keys keeps the request's
// memory until it has left.
func TestAnswerHoldsItsRequest(t *testing.T) {
	p := poisoner{make(chan struct{}, 16)}
	v := &lender{
		keep: func(m *van.Message) bool { return !m.Request && !m.Push },
		recv: func(recv van.Receiver) van.Receiver {
			return func(m *van.Message) {
				if m.IsControl() || !m.Request || m.Push {
					recv(m)
					return
				}
				c := &van.Message{Meta: m.Meta, Sender: m.Sender, Receiver: m.Receiver, Frames: m.Frames}
				c.DataTypes = slices.Clone(m.DataTypes)
				c.Keys = backend.Slice(slices.Clone(numbers(m.Keys)))
				c.Adopt(p, nil)
				recv(c)
				c.Release()
			}
		},
	}
	c := testcluster.Start(t, testcluster.Options{Wrap: v.wrap("server")})
	serve(t, c.Servers[0], func(r kv.Request[float32]) {
		if err := r.Respond(kv.Pairs[float32]{Keys: r.Keys, Vals: make([]float32, len(r.Keys))}); err != nil {
			t.Error(err)
		}
	})
	w := newWorker[float32](t, c.Workers[0])
	keys := make([]kv.Key, 64)
	for i := range keys {
		keys[i] = kv.Key(i + 1)
	}
	var got []float32
	ts, err := w.Pull(keys, &got)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "answer", func() bool { return len(v.messages()) == 1 })
	m := v.messages()[0]
	if sent := numbers(m.Keys); !slices.Equal(sent, keys) {
		t.Errorf("the answer, which has not left, has the keys %v ...", sent[:4])
	}
	select {
	case <-p.freed:
		t.Error("the request's memory was given back before the answer has left")
	default:
	}
	if err := v.Van.Send(m); err != nil {
		t.Fatal(err)
	}
	do(t, w)(ts, nil)
	select {
	case <-p.freed:
	case <-time.After(10 * time.Second):
		t.Error("the request's memory is not given back")
	}
}

// TestPullLands: an answer is written straight to the memory of its pull. That shows when the answer is refused afterwards.
// An answer that comes after its pull has failed is written nowhere.
func TestPullLands(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		const n = 32 << 10 // values: transports copy short answers
		o.Workers, o.Servers = 1, 1
		c := testcluster.Start(t, o)
		keys, sent := make([]kv.Key, n/16), make([]float32, n)
		for i := range keys {
			keys[i] = kv.Key(i)
		}
		for i := range sent {
			sent[i] = 7
		}
		late, other := make(chan *van.Message, 1), []kv.Key{1 << 40}
		raw(t, c.Servers[0], func(s *rawServer, req *van.Message) {
			switch {
			case req.Keys.Len() == 8:
				s.answer(t, req, other, []float32{1}, nil, nil)
			case req.Head == 1:
				late <- req.Retain()
			default:
				wrong := append([]kv.Key{keys[0] + 1<<40}, keys[1:]...)
				s.answer(t, req, wrong, sent, nil, nil)
			}
		})
		w := newWorker[float32](t, c.Workers[0])

		got := make([]float32, n)
		call, err := w.Pull(keys, &got)
		if err == nil {
			err = call.Wait(context.Background())
		}
		fails(t, err, van.ErrMalformed, "key 0 is 1099511627776")
		if !slices.Equal(got, sent) {
			t.Errorf("the answer was not written to the memory of the pull")
		}

		clear(got)
		if call, err = w.Pull(keys, &got, kv.Cmd(1)); err != nil {
			t.Fatal(err)
		}
		req := <-late
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		fails(t, call.Wait(ctx), context.Canceled)
		(&rawServer{c.Servers[0]}).answer(t, req, keys, sent, nil, nil)
		req.Release()
		one := make([]float32, 1)
		do(t, w)(w.Pull(other, &one)) // its answer follows the late one
		if slices.Contains(got, 7) {
			t.Errorf("a late answer was written to the memory of its pull")
		}
	}, testcluster.TCP, testcluster.SHM)
}
