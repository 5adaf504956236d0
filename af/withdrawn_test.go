package af_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// rawPush is a push of value under key 1, at any place of a batch.
func rawPush(ts int32, place van.BatchFlag, value []byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Head, m.Timestamp, m.AppID, m.CustomerID = van.ServerID(0), true, true, place, ts, 0, 0
	m.Key, m.ValLen, m.Option = 1, int32(len(value)), 0
	m.IsTensor, m.Dim, m.Shape[0] = true, 1, int64(len(value))
	m.DataTypes = append(m.DataTypes, van.TypeUint64, van.TypeOther)
	m.Src, m.Dst = backend.Host, backend.Host
	m.Frames, m.Keys, m.Vals = 2, backend.Bytes([]byte{1, 0, 0, 0, 0, 0, 0, 0}), backend.Bytes(value)
	m.DataSize = int32(m.PayloadLen())
	return m
}

// TestGivenUpBehindASlowHandler: batches that wait behind a handler and that their worker cancels meanwhile are
// not handed to the handler any more. Later ones are.
func TestGivenUpBehindASlowHandler(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		busy, free := make(chan struct{}), make(chan struct{})
		var mu sync.Mutex
		var served []string
		var told atomic.Int32
		s, err := af.NewServer(c.Servers[0], af.ServerOptions{OnUnwanted: func(worker postoffice.NodeID) {
			if worker != postoffice.WorkerID(0) {
				t.Errorf("told of node %d", worker)
			}
			told.Add(1)
		}})
		if err != nil {
			t.Fatal(err)
		}
		err = s.Handle(func(b af.Batch) {
			mu.Lock()
			served = append(served, string(b.Pushes()[0].Val.Bytes()))
			first := len(served) == 1
			mu.Unlock()
			if first {
				close(busy)
				<-free
			}
			if err := echo(b); err != nil {
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		w := newWorker(t, c.Workers[0])
		first, _ := ask(t, w, 1, "first")
		<-busy
		for range 3 {
			h, _ := ask(t, w, 1, "given up")
			if err := cluster.Call(h).Customer().Wait(t.Context(), h.Timestamp(), time.Millisecond); !errors.Is(err, van.ErrTimeout) {
				t.Fatalf("%v, want %v", err, van.ErrTimeout)
			}
		}
		last, _ := ask(t, w, 1, "last")
		eventually(t, "the server is told", func() bool { return told.Load() == 3 })
		close(free)
		for _, h := range []af.Call{first, last} {
			if err := h.Wait(t.Context()); err != nil {
				t.Error(err)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if want := []string{"first", "last"}; !slices.Equal(served, want) {
			t.Errorf("the handler had %q, want %q", served, want)
		}
	}, testcluster.TCP, testcluster.SHM)
}

// TestOpenBatchBudget: a worker that begins batches and does not end them has its budget of the server's memory;
// the oldest are canceled.
func TestOpenBatchBudget(t *testing.T) {
	const size = 256 << 10
	c := testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.RecvBudgetPeer = 1 << 20 }})
	s := serve(t, c.Servers[0], echoes(t))
	value := make([]byte, size)
	for i := range 12 {
		m := rawPush(int32(100*i), van.BatchStart, value)
		if err := (*cluster.Node)(c.Workers[0]).App().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	works(t, newWorker(t, c.Workers[0]), 1) // behind them
	if n, bytes := af.OpenBatches(s, van.WorkerID(0)); n != 3 || bytes > 1<<20 {
		t.Errorf("%d batches, %d bytes are open, want 3 below %d", n, bytes, 1<<20)
	}
	testcluster.Counted(t, c.Servers[0], postoffice.Stats{RefusedRequests: 9})
}

// TestOpenBatches: a worker that has begun 1024 batches and ended none loses the oldest one with the next, and a
// line says so.
func TestOpenBatches(t *testing.T) {
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Log: logged.Logger()})
	s := serve(t, c.Servers[0], echoes(t))
	w := newWorker(t, c.Workers[0])
	for i := range 1025 {
		if i == 1024 {
			works(t, w, 1)
			if n, _ := af.OpenBatches(s, van.WorkerID(0)); n != i || strings.Contains(logged.String(), "gave up") {
				t.Errorf("%d batches are open, want %d; or one was given up", n, i)
			}
		}
		if err := (*cluster.Node)(c.Workers[0]).App().Send(rawPush(int32(100*i), van.BatchStart, []byte{1})); err != nil {
			t.Fatal(err)
		}
	}
	works(t, w, 1)
	if n, _ := af.OpenBatches(s, van.WorkerID(0)); n != 1024 || !strings.Contains(logged.String(), "dropped a batch that has not ended") {
		t.Errorf("%d batches are open, want 1024, and a line about the oldest one", n)
	}
	testcluster.Counted(t, c.Servers[0], postoffice.Stats{RefusedRequests: 1})
}

// raw starts a server that answers each batch and reports its number of tensors, and returns a function by which a worker sends single
// messages of batches, each with a value of size bytes.
func raw(t *testing.T, c *testcluster.Cluster, size int) (s *af.Server, complete chan int, send func(ts int32, flag van.BatchFlag)) {
	complete = make(chan int, 4)
	s = serve(t, c.Servers[0], func(b af.Batch) {
		complete <- len(b.Pushes())
		if err := b.Respond(nil); err != nil {
			t.Error(err)
		}
	})
	return s, complete, func(ts int32, flag van.BatchFlag) {
		t.Helper()
		if err := (*cluster.Node)(c.Workers[0]).App().Send(rawPush(ts, flag, make([]byte, size))); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOpenBatchBudgetOfTheOldest: the batch that exceeds the budget is not the one that is canceled for it, also
// if it is the oldest.
func TestOpenBatchBudgetOfTheOldest(t *testing.T) {
	const size = 256 << 10
	c := testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.RecvBudgetPeer = 1 << 20 }})
	s, complete, send := raw(t, c, size)
	send(100, van.BatchStart)
	send(200, van.BatchStart)
	for ts := range int32(5) {
		send(101+ts, van.BatchMiddle)
	}
	send(106, van.BatchEnd)
	select {
	case n := <-complete:
		if n != 7 {
			t.Errorf("the batch has %d tensors, want 7", n)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the batch that went on does not come")
	}
	if n, bytes := af.OpenBatches(s, van.WorkerID(0)); n != 0 || bytes != 0 {
		t.Errorf("%d batches, %d bytes are open, want none: the other one was given up", n, bytes)
	}
}

// TestWrongMessageEndsItsBatch: an invalid message ends its batch: the memory serves other batches, and later
// messages belong to no batch.
func TestWrongMessageEndsItsBatch(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	s := serve(t, c.Servers[0], func(b af.Batch) {
		if len(b.Pulls()) == 0 {
			t.Errorf("a batch of %d pushes is complete, of which one was wrong", len(b.Pushes()))
		}
		echoes(t)(b)
	})
	w := newWorker(t, c.Workers[0])
	wrong := rawPush(101, van.BatchMiddle, make([]byte, 100))
	wrong.Shape[0] = 99
	for _, m := range []*van.Message{rawPush(100, van.BatchStart, make([]byte, 100)), wrong, rawPush(102, van.BatchEnd, make([]byte, 100))} {
		if err := (*cluster.Node)(c.Workers[0]).App().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	works(t, w, 1) // behind them
	if n, bytes := af.OpenBatches(s, van.WorkerID(0)); n != 0 || bytes != 0 {
		t.Errorf("%d batches, %d bytes are open, want none", n, bytes)
	}
}

// TestHeldOfALostWorker: messages that arrived before the beginnings of their batches are dropped with their
// worker, and counted no more.
func TestHeldOfALostWorker(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Set: func(c *postoffice.Config) { c.Resend = true }})
	s := serve(t, c.Servers[0], echoes(t))
	for i := range 3 {
		if err := (*cluster.Node)(c.Workers[1]).App().Send(rawPush(int32(10*i+5), van.BatchEnd, make([]byte, 64))); err != nil {
			t.Fatal(err)
		}
	}
	id := van.WorkerID(1)
	eventually(t, "the server holds them", func() bool { n, bytes := af.Held(s, id); return n == 3 && bytes == 3*72 })
	lost := peer(t, c.Servers[0], id)
	c.Workers[1].Close()
	expect(t, lost, false)
	eventually(t, "the server has forgotten them", func() bool { n, bytes := af.Held(s, id); return n == 0 && bytes == 0 })
	works(t, newWorker(t, c.Workers[0]), 1)
}

// TestHeldOfRefusedBatches: a C++ worker sends the rest of a batch that was refused, and never cancels it. The server keeps the latest of
// such messages only: the messages of a later batch may still overtake each other.
func TestHeldOfRefusedBatches(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.Resend = true }})
	s, complete, send := raw(t, c, 64)
	const most = 1024
	for i := range int32(most) {
		send(10*i+5, van.BatchEnd)
	}
	id := van.WorkerID(0)
	eventually(t, "the server holds them", func() bool { n, bytes := af.Held(s, id); return n == most && bytes == most*72 })
	send(100_001, van.BatchEnd)
	send(100_000, van.BatchStart)
	select {
	case n := <-complete:
		if n != 2 {
			t.Errorf("the batch has %d tensors, want 2", n)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the batch whose messages have overtaken each other is not complete")
	}
	if n, bytes := af.Held(s, id); n != most-1 || bytes != (most-1)*72 {
		t.Errorf("the server holds %d messages of %d bytes, want %d and %d", n, bytes, most-1, (most-1)*72)
	}
	testcluster.Counted(t, c.Servers[0], postoffice.Stats{RefusedRequests: 1})
}
