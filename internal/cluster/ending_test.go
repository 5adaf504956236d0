package cluster_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// isEnd reports whether m is a worker's notice that its program ends.
func isEnd(m *van.Message) bool { return m.AppID == 0x5ED0000 && m.Request }

// simpleApp is an application of a node whose handler does nothing.
func simpleApp(t *testing.T, n *postoffice.Node, id int) *kv.SimpleApp {
	t.Helper()
	a, err := kv.NewSimpleApp(n, kv.SimpleOptions{AppID: id, CustomerID: id, Timeout: -1, Handler: func(kv.SimpleMessage) {}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

// TestRefusedAtTheEnd: a node of any role whose program waits at its end refuses requests for applications that it does not
// have. This includes requests that arrived before. When its program continues, the node accepts requests again.
func TestRefusedAtTheEnd(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	for _, x := range []struct{ from, to *postoffice.Node }{
		{c.Workers[0], c.Servers[0]}, {c.Servers[0], c.Workers[0]}, {c.Workers[0], c.Scheduler}, {c.Scheduler, c.Servers[0]},
	} {
		t.Run(x.from.Name()+" to "+x.to.Name(), func(t *testing.T) {
			a := simpleApp(t, x.from, 77)
			refused := func(ask func() (kv.Call, error)) {
				t.Helper()
				call, err := ask()
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				if err := call.Wait(ctx); !errors.Is(err, van.ErrFinished) {
					t.Errorf("%v, want an error that wraps van.ErrFinished", err)
				}
			}
			ask := func() (kv.Call, error) { return a.Request(1, nil, x.to.ID()) }
			before, err := ask()
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- core(x.to).StopBarrier(ctx) }()
			refused(func() (kv.Call, error) { return before, nil })
			refused(ask)
			cancel()
			if err := <-ended; err == nil {
				t.Error("StopBarrier of one node has ended well")
			}
			call, err := ask()
			if err != nil {
				t.Fatal(err)
			}
			vantest.Eventually(t, 20*time.Second, "the request is queued", func() bool { return core(x.to).QueuedRequests() == 1 })
			b, err := kv.NewSimpleApp(x.to, kv.SimpleOptions{AppID: 77, CustomerID: 77, Timeout: -1})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = b.Close() })
			err = call.Wait(t.Context())
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// TestEndOfAWorker: servers receive the notice that a worker's program ends also if the first message is lost. They also receive the
// notice that it continues.
func TestEndOfAWorker(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Servers: 2, Wrap: hook.Wrap("worker", 0)})
	var mu sync.Mutex
	lost := 0
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		mu.Lock()
		defer mu.Unlock()
		if !isEnd(m) || lost == len(c.Servers) {
			return hooks.Pass
		}
		lost++
		return hooks.Lose
	})
	told := make(chan int, 100)
	for _, s := range c.Servers {
		t.Cleanup(core(s).App().OnEnded(func(id int) { told <- id }))
	}
	ended := func() (l []bool) {
		for _, s := range c.Servers {
			for _, w := range c.Workers {
				l = append(l, core(s).App().HasEnded(int(w.ID())))
			}
		}
		return l
	}
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- core(c.Workers[0]).StopBarrier(ctx) }()
	vantest.Eventually(t, 20*time.Second, "the end is known", func() bool { return slices.Equal(ended(), []bool{true, false, true, false}) })
	if id := <-told; id != int(c.Workers[0].ID()) {
		t.Errorf("told of the end of %s, want %s", van.NodeName(id), c.Workers[0].Name())
	}
	if lost != len(c.Servers) {
		t.Errorf("%d messages were lost, want %d", lost, len(c.Servers))
	}
	cancel()
	<-result
	vantest.Eventually(t, 20*time.Second, "the program goes on", func() bool { return !slices.Contains(ended(), true) })
}

// TestReplacementOfAnEndedWorker: the process that replaces a worker whose program had ended has not ended.
func TestReplacementOfAnEndedWorker(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2})
	s, id := c.Servers[0], c.Workers[0].ID()
	ended := func() bool { return core(s).App().HasEnded(int(id)) }
	result := make(chan error, 1)
	go func() { result <- core(c.Workers[0]).StopBarrier(t.Context()) }()
	vantest.Eventually(t, 20*time.Second, "the end is known", ended)
	c.Workers[0].Close()
	<-result
	for _, n := range []*postoffice.Node{c.Scheduler, s} {
		testcluster.Lost(t, n, id)
	}
	if !ended() {
		t.Error("HasEnded is false after the loss of a worker that had ended, want true until it is replaced")
	}
	if _, err := c.Join(t.Context(), "worker", 0, nil); err != nil {
		t.Fatal(err)
	}
	vantest.Eventually(t, 20*time.Second, "its replacement has not ended", func() bool { return !ended() })
}
