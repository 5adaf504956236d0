package cluster_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
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

// TestEndBehindAConnection: a StopBarrier passes while the notice to a server still waits for the first connection to it.
func TestEndBehindAConnection(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)})
	gate := make(chan struct{})
	t.Cleanup(func() { close(gate) })
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if isEnd(m) {
			<-gate
		}
		return hooks.Pass
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	results := make(chan error, 3)
	for _, n := range []*postoffice.Node{c.Scheduler, c.Servers[0], c.Workers[0]} {
		go func() { results <- core(n).StopBarrier(ctx) }()
	}
	for range cap(results) {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

// TestNoticeBeforeLeaving: a worker whose Shutdown ends at once, and that has sent nothing before, notifies its server.
func TestNoticeBeforeLeaving(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)})
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if isEnd(m) {
			<-time.After(100 * time.Millisecond) // as for the first connection
		}
		return hooks.Pass
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Workers[0].Shutdown(ctx); err == nil {
		t.Error("Shutdown of one node has ended well")
	}
	vantest.Eventually(t, 20*time.Second, "the end is known", func() bool { return core(c.Servers[0]).App().HasEnded(int(c.Workers[0].ID())) })
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

// TestContinuesWhileAServerIsLost: a server to which a worker had no connection when its program continued receives that
// notice when the connection is restored.
func TestContinuesWhileAServerIsLost(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	w := core(c.Workers[0])
	ended := func(i int) bool { return core(c.Servers[i]).App().HasEnded(w.ID()) }
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- w.StopBarrier(ctx) }()
	vantest.Eventually(t, 20*time.Second, "the end is known", func() bool { return ended(0) && ended(1) })
	w.PeerChanged(van.ServerID(0), false, errors.New("connection reset"))
	cancel()
	<-result
	vantest.Eventually(t, 20*time.Second, "the program goes on at the other server", func() bool { return !ended(1) })
	if !ended(0) {
		t.Fatal("a server without a connection has received the notice")
	}
	w.PeerChanged(van.ServerID(0), true, nil)
	vantest.Eventually(t, 20*time.Second, "the program goes on", func() bool { return !ended(0) })
}

// TestEndsInAnotherCall: a StopBarrier that fails while another StopBarrier or Shutdown of the node waits does not make the
// program continue.
func TestEndsInAnotherCall(t *testing.T) {
	for _, x := range []struct {
		call string
		wait func(*cluster.Node, context.Context) error
	}{{"stop()", (*cluster.Node).StopBarrier}, {"Finalize", (*cluster.Node).Shutdown}} {
		t.Run(x.call, func(t *testing.T) {
			hook := &hooks.Van{}
			c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)})
			w, s := core(c.Workers[0]), core(c.Servers[0])
			var continues atomic.Int32
			hook.OnSend(func(m *van.Message) hooks.Verdict {
				if isEnd(m) && m.Head == 0 {
					continues.Add(1)
				}
				return hooks.Pass
			})
			others, endOthers := context.WithCancel(t.Context())
			ctx, cancel := context.WithCancel(t.Context())
			result, other := make(chan error, 1), make(chan error, 1)
			go func() { result <- w.StopBarrier(ctx) }()
			vantest.Eventually(t, 20*time.Second, "the end is known", func() bool { return s.App().HasEnded(w.ID()) })
			go func() { other <- x.wait(w, others) }()
			vantest.Eventually(t, 20*time.Second, "both calls wait", func() bool { return w.EndingCalls() == 2 })
			cancel()
			if err := <-result; err == nil {
				t.Error("StopBarrier of one node has ended well")
			}
			if n := continues.Load(); n > 0 || !s.App().HasEnded(w.ID()) || w.EndingCall() == "" {
				t.Errorf("the worker has sent %d notices that its program continues, while it waits in %s", n, x.call)
			}
			endOthers()
			if err := <-other; err == nil {
				t.Errorf("%s of one node has ended well", x.call)
			}
			if n := continues.Load(); x.call == "stop()" && n == 0 {
				t.Error("the worker has sent no notice that its program continues, want one after the last call")
			}
		})
	}
}

// TestEndsWhileAnotherCallFails: if a Shutdown begins while a StopBarrier of the node ends with an error, the node refuses requests.
func TestEndsWhileAnotherCallFails(t *testing.T) {
	n := core(testcluster.Start(t, testcluster.Options{}).Servers[0])
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- n.StopBarrier(ctx) }()
	vantest.Eventually(t, 20*time.Second, "the call waits", func() bool { return n.Refuses() == "stop()" })
	n.BeginEnding("Finalize", func() {
		cancel()
		vantest.Eventually(t, 20*time.Second, "the program continues", func() bool { return n.EndingCall() == "" })
	})
	if err := <-result; err == nil {
		t.Error("StopBarrier of one node has ended well")
	}
	if call := n.Refuses(); call != "Finalize" {
		t.Errorf("requests are refused because of the call %q, want Finalize", call)
	}
}

// TestEarlierNoticeOfAWorker: a server ignores a notice of a worker that arrives after a later one.
func TestEarlierNoticeOfAWorker(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	w, s := core(c.Workers[0]), core(c.Servers[0])
	told := func(head, stamp int32) bool {
		m := &van.Message{Sender: w.ID(), Receiver: s.ID()}
		m.Reset()
		m.Sender, m.Request, m.SimpleApp, m.Head = w.ID(), true, true, head
		m.AppID, m.CustomerID, m.Timestamp = 0x5ED0000, 0x5ED0000, stamp
		m.SetIncarnations(w.Incarnation(), s.Incarnation())
		s.Receive(m)
		return s.App().HasEnded(w.ID())
	}
	for _, x := range []struct {
		head, stamp int32
		want        bool
	}{{1, 1, true}, {0, 3, false}, {1, 2, false}, {1, 4, true}, {0, 4, true}} {
		if got := told(x.head, x.stamp); got != x.want {
			t.Errorf("after notice %d with timestamp %d the worker's program has ended: %t, want %t", x.head, x.stamp, got, x.want)
		}
	}
}

// TestEndOfAnUnknownWorker: a server ignores the notice of a process that is not known to be one of this library: only those
// send it, with their incarnation.
func TestEndOfAnUnknownWorker(t *testing.T) {
	s := core(testcluster.Start(t, testcluster.Options{}).Servers[0])
	m := &van.Message{}
	m.Reset()
	m.Sender, m.Receiver, m.Request, m.SimpleApp, m.Head = van.WorkerID(1), s.ID(), true, true, 1
	m.AppID, m.CustomerID, m.Timestamp = 0x5ED0000, 0x5ED0000, 1
	s.Receive(m)
	if s.App().HasEnded(van.WorkerID(1)) {
		t.Error("the program of a worker that has not joined has ended")
	}
}
