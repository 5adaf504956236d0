package af_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// anonymous hides from a node the library of nodes with a role that join while hides is set.
type anonymous struct {
	van.Van
	hides *atomic.Bool
	role  van.Role
}

// Unwrap implements van.Wrapper.
func (a *anonymous) Unwrap() van.Van { return a.Van }

// Start implements van.Van.
func (a *anonymous) Start(recv van.Receiver) {
	a.Van.Start(func(m *van.Message) {
		for i := range m.Control.Nodes {
			if n := &m.Control.Nodes[i]; n.Role == a.role && a.hides.Load() {
				n.Endpoint = nil
			}
		}
		recv(m)
	})
}

// startAnonymous starts two servers and a worker. The worker does not know the library of nodes that join while
// hides is set.
func startAnonymous(t *testing.T, hides *atomic.Bool) *testcluster.Cluster {
	t.Helper()
	return testcluster.Start(t, testcluster.Options{Servers: 2, Wrap: func(role string, _ int, f van.Factory) van.Factory {
		if role != "worker" {
			return f
		}
		return func(o van.Options) (van.Van, error) {
			v, err := f(o)
			return &anonymous{v, hides, van.Server}, err
		}
	}})
}

// TestToForeign: C++ StepMesh's servers wait for a batch of every worker, so none is left out
// in a cluster with one.
func TestToForeign(t *testing.T) {
	var hides atomic.Bool
	hides.Store(true)
	c := startAnonymous(t, &hides)
	w := newWorker(t, c.Workers[0])
	push := []af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte("x"))}}
	_, err := w.PushPull(push, nil, af.To{1})
	vantest.Fails(t, err, van.ErrInvalid, "to servers [1] of 2", "server 0 (id 8)", "of another implementation", "send to all")
	_, err = w.Prepare(push, nil, af.To{1})
	vantest.Fails(t, err, van.ErrInvalid, "prepare", "to servers [1] of 2", "of another implementation")
	call, err := w.PushPull(push, nil, af.To{0, 1})
	if err != nil {
		t.Errorf("to all: %v", err)
	}
	w.Customer().Close()
	vantest.Fails(t, call.Wait(t.Context()), van.ErrClosed)
}

// TestExchangeToForeign: an exchange with some of the servers does not start any more after a node of another
// library has replaced one of the servers. An exchange with all servers is not refused.
func TestExchangeToForeign(t *testing.T) {
	var hides atomic.Bool
	c := startAnonymous(t, &hides)
	for _, n := range c.Servers {
		serve(t, n, masked(t, 1))
	}
	w := newWorker(t, c.Workers[0])
	push := []af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte("x"))}, {Key: 2, Val: bytesOf(t, []byte("y"))}}
	some, both := prepare(t, w, push, nil, af.To{1}), prepare(t, w, push, nil)
	for _, x := range []*af.Prepared{some, both} {
		if err := round(t, x); err != nil {
			t.Fatal(err)
		}
	}
	first := peer(t, c.Workers[0], van.ServerID(0))
	c.Servers[0].Close()
	expect(t, first, false)
	hides.Store(true)
	testcluster.Lost(t, c.Scheduler, van.ServerID(0))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	n, err := c.Join(ctx, "server", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, n, masked(t, 1))
	expect(t, first, true)
	_, err = some.Start()
	vantest.Fails(t, err, van.ErrInvalid, "start exchange", "to servers [1] of 2", "server 0", "of another implementation")
	if _, err := both.Start(); err != nil {
		t.Errorf("to all: %v", err)
	}
}

// TestToldAfterRefusal: OnSent is called for each tensor of an answer, also if the transport refuses it.
func TestToldAfterRefusal(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0)})
	batches := make(chan af.Batch, 1)
	serve(t, c.Servers[0], func(b af.Batch) { batches <- b.Retain() })
	w := newWorker(t, c.Workers[0])
	pull := []af.KeyTensor{{Key: 1, Val: bytesOf(t, make([]byte, 1))}, {Key: 2, Val: bytesOf(t, make([]byte, 1))}}
	if _, err := w.PushPull(nil, [][]af.KeyTensor{pull}); err != nil {
		t.Fatal(err)
	}
	b := <-batches
	var left counter
	vantest.Fails(t, b.Respond(pull[:1], af.OnSent(&left)), van.ErrInvalid)
	if b.Answered() || left.n.Load() != 0 {
		t.Errorf("after tensors that do not fit: answered %t, %d told", b.Answered(), left.n.Load())
	}
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
	vantest.Fails(t, b.Respond(pull, af.OnSent(&left)), van.ErrQueueFull)
	eventually(t, "both are told", func() bool { return left.n.Load() == 2 })
	if !b.Answered() {
		t.Error("not answered")
	}
	b.Release()
}

// wantUnanswered tests the error of a call whose batch was processed, but whose answer was not sent. The error differs from those of a batch
// that was not processed: the worker would repeat the batch.
func wantUnanswered(t *testing.T, err error) {
	t.Helper()
	const want = "the request was processed, but its answer was not sent: "
	if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "server 0 (id 8)") {
		t.Errorf("the call fails with %v, want the server and %q", err, want)
	}
	for _, not := range []error{van.ErrRequestRefused, van.ErrQueueFull, van.ErrFinished} {
		if errors.Is(err, not) {
			t.Errorf("%v matches %v", err, not)
		}
	}
}

// TestQueuedAnswerRefused: if the transport refuses an answer that has waited for a device, the worker's call fails at once.
func TestQueuedAnswerRefused(t *testing.T) {
	dev := simgpu.New(0)
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0), Backend: func(role string, _ int) backend.Backend {
		if role == "server" {
			return dev
		}
		return nil
	}})
	batches := make(chan af.Batch, 1)
	serve(t, c.Servers[0], func(b af.Batch) { batches <- b })
	w := newWorker(t, c.Workers[0])
	call, err := w.PushPull(nil, [][]af.KeyTensor{{{Key: 1, Val: bytesOf(t, make([]byte, 8))}}})
	if err != nil {
		t.Fatal(err)
	}
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
	gate := make(chan struct{})
	dev.Queue(3, func() { <-gate })
	var left counter
	if err := (<-batches).Respond([]af.KeyTensor{{Key: 1, Val: deviceTensor(t, dev, make([]byte, 8))}}, af.Stream(3), af.OnSent(&left)); err != nil {
		t.Fatal(err)
	}
	close(gate)
	wantUnanswered(t, call.Wait(t.Context()))
	if n := left.n.Load(); n != 1 {
		t.Errorf("OnSent was called %d times, want once", n)
	}
}

// TestAcknowledgmentRefused: if the transport refuses the acknowledgment of a batch of several pushes, the worker's call fails at
// once.
func TestAcknowledgmentRefused(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0)})
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
	serve(t, c.Servers[0], func(b af.Batch) { _ = b.Respond(nil) })
	w := newWorker(t, c.Workers[0])
	call, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: bytesOf(t, make([]byte, 8))}, {Key: 2, Val: bytesOf(t, make([]byte, 8))}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	wantUnanswered(t, call.Wait(t.Context()))
	hook.OnSend(nil)
}

// TestPausedOriginal: a C++ StepMesh worker that is lost in the middle of a batch may only be paused, so the server keeps the
// beginning of the batch until the worker is replaced.
func TestPausedOriginal(t *testing.T) {
	var hides atomic.Bool
	hides.Store(true)
	hook := &hooks.Van{}
	hook.Expands = true // to the messages that ps-lite sends
	c := testcluster.Start(t, testcluster.Options{Wrap: func(role string, rank int, f van.Factory) van.Factory {
		if role != "server" {
			return hook.Wrap("worker", 0)(role, rank, f)
		}
		return func(o van.Options) (van.Van, error) {
			v, err := f(o)
			return &anonymous{v, &hides, van.Worker}, err
		}
	}})
	s, err := af.NewServer(c.Servers[0], af.ServerOptions{})
	if err == nil {
		err = s.Handle(func(b af.Batch) { t.Error("the application gets an incomplete batch") })
	}
	if err != nil {
		t.Fatal(err)
	}
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		m.SetIncarnations(0, 0)
		if m.Request && !m.Push {
			return hooks.Keep // the end of the batch
		}
		return hooks.Pass
	})
	w, id := newWorker(t, c.Workers[0]), c.Workers[0].ID()
	if _, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte("x"))}}, [][]af.KeyTensor{{{Key: 2, Val: bytesOf(t, []byte("y"))}}}); err != nil {
		t.Fatal(err)
	}
	open := func() int { n, _ := af.OpenBatches(s, int(id)); return n }
	vantest.Eventually(t, 20*time.Second, "the beginning of the batch", func() bool { return open() == 1 })
	c.Workers[0].Close()
	testcluster.Lost(t, c.Scheduler, id)
	testcluster.Lost(t, c.Servers[0], id)
	if n := open(); n != 1 {
		t.Errorf("%d batches are open after the loss of their worker, want 1", n)
	}
	if _, err := c.Join(t.Context(), "worker", 0, nil); err != nil {
		t.Fatal(err)
	}
	vantest.Eventually(t, 20*time.Second, "the end of the batch, whose worker is replaced", func() bool { return open() == 0 })
}
