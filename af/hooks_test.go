package af_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// eventually waits until ok is true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	vantest.Eventually(t, 20*time.Second, what, ok)
}

// TestSendRefused: if the transport refuses the message to a server, though no peer is lost, the call fails at once
// with the transport's error, whichever server it is. Messages to other servers do not affect the next call.
func TestSendRefused(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{}
		o.Servers, o.Wrap = 2, hook.Wrap("worker", 0)
		c := testcluster.Start(t, o)
		for _, n := range c.Servers {
			serve(t, n, echoes(t))
		}
		w := newWorker(t, c.Workers[0])
		works(t, w, 2)
		for nth := range 2 { // a message for each server
			sends := 0
			hook.OnSend(func(*van.Message) hooks.Verdict {
				if sends++; sends == nth+1 {
					return hooks.Refuse(fmt.Errorf("the test's queue: %w", van.ErrQueueFull))
				}
				return hooks.Pass
			})
			h, _ := ask(t, w, 2, "refused")
			began := time.Now()
			vantest.Fails(t, cluster.Call(h).Customer().Wait(t.Context(), h.Timestamp(), 20*time.Second), van.ErrQueueFull, "the test's queue")
			if d := time.Since(began); d > 10*time.Second {
				t.Errorf("message %d: Wait has returned after %s", nth, d)
			}
			hook.OnSend(nil)
			works(t, w, 2)
		}
		if n := w.Customer().InFlight(); n != 0 {
			t.Errorf("%d requests are in flight, want none", n)
		}
		c.Finalize(t)
	}, all...)
}

// TestNothingIsSentWithoutAServer: a push_pull to all servers fails while one server is lost. The other servers receive no part
// of it, since they could not answer it.
func TestNothingIsSentWithoutAServer(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Servers: 2, Wrap: hook.Wrap("worker", 0)})
	for _, n := range c.Servers {
		serve(t, n, func(b af.Batch) { _ = echo(b) }) // a node may have left
	}
	w := newWorker(t, c.Workers[0])
	works(t, w, 2)
	heard := peer(t, c.Workers[0], van.ServerID(1))
	c.Servers[1].Close()
	expect(t, heard, false)
	before := hook.Sends()
	h, _ := ask(t, w, 2, "not sent")
	vantest.Fails(t, h.Wait(t.Context()), van.ErrPeerLost, "server 1")
	if n := hook.Sends() - before; n != 0 {
		t.Errorf("%d messages are sent", n)
	}
}

// TestAnswerRefused: a server whose transport refuses an answer gets an error, and keeps neither the batch nor the
// tensors of the answer. The worker's call fails at once.
func TestAnswerRefused(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{}
		o.Wrap = hook.Wrap("server", 0)
		c := testcluster.Start(t, o)
		answered := make(chan error, 1)
		text := make([]byte, 100)
		x, holds := heldTensor(t, text)
		serve(t, c.Servers[0], func(b af.Batch) {
			answered <- b.Respond([]af.KeyTensor{{Key: b.Pulls()[0].Key, Val: x}}, af.ByKey)
		})
		w := newWorker(t, c.Workers[0])
		for range 3 {
			hook.OnSend(func(m *van.Message) hooks.Verdict {
				if m.IsBatch() {
					return hooks.Refuse(van.ErrQueueFull)
				}
				return hooks.Pass
			})
			h, _ := ask(t, w, 1, string(text))
			vantest.Fails(t, <-answered, van.ErrQueueFull)
			eventually(t, "no message of the batch is held", func() bool { return hook.Held() == 0 })
			if n := holds.refs.Load(); n != 0 {
				t.Errorf("%d holds on an answer that was refused, want none", n)
			}
			wantUnanswered(t, h.Wait(t.Context()))
			hook.OnSend(nil)
			h, _ = ask(t, w, 1, string(text))
			if err := <-answered; err != nil {
				t.Error(err)
			}
			if err := h.Wait(t.Context()); err != nil {
				t.Error(err)
			}
		}
		eventually(t, "nothing is held", func() bool { return hook.Held() == 0 && holds.refs.Load() == 0 })
		c.Finalize(t)
	}, all...)
}

// TestReleaseOfHostMemory: a batch whose tensors are not read by a device is released at once, for any stream in
// its release.
func TestReleaseOfHostMemory(t *testing.T) {
	for _, on := range [][]af.StreamOption{nil, {af.Complete}, {af.Stream(0)}, {af.Stream(7)}} {
		hook := &hooks.Van{}
		c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0)})
		kept := make(chan af.Batch, 1)
		serve(t, c.Servers[0], func(b af.Batch) {
			kept <- b.Retain()
			echoes(t)(b)
		})
		w := newWorker(t, c.Workers[0])
		for range 3 {
			h, _ := ask(t, w, 1, "kept")
			if err := h.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			b := <-kept
			if n := hook.Held(); n == 0 {
				t.Error("no message is held for a batch that is")
			}
			b.Release(on...)
			eventually(t, "nothing is held", func() bool { return hook.Held() == 0 })
		}
		c.Finalize(t)
	}
}

// TestEarlyMessagesOfALostWorker: pending messages that wait for a lost message before them are dropped with their
// worker, and counted no more.
func TestEarlyMessagesOfALostWorker(t *testing.T) {
	in, out := &hooks.Van{}, &hooks.Van{Expands: true}
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Set: func(c *postoffice.Config) { c.Resend, c.ResendTimeout = true, 50*time.Millisecond }, Wrap: func(role string, rank int, f van.Factory) van.Factory {
		return in.Wrap("server", 0)(role, rank, out.Wrap("worker", 1)(role, rank, f))
	}})
	s := serve(t, c.Servers[0], echoes(t))
	out.OnSend(func(m *van.Message) hooks.Verdict {
		if m.Head == van.BatchStart {
			return hooks.Lose
		}
		return hooks.Pass
	})
	x := bytesOf(t, make([]byte, 8))
	if _, err := newWorker(t, c.Workers[1]).PushPull([]af.KeyTensor{{Key: 1, Val: x}, {Key: 2, Val: x}, {Key: 3, Val: x}}, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two messages wait", func() bool { return s.Early() == 2 && in.Held() == 2 })
	c.Workers[1].Close()
	eventually(t, "no message waits", func() bool { return s.Early() == 0 && in.Held() == 0 })
	works(t, newWorker(t, c.Workers[0]), 1)
}
