package af_test

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// peer returns a channel that tells when node id is lost (false) or back (true).
func peer(t testing.TB, n *postoffice.Node, id int) <-chan bool {
	t.Helper()
	ch := make(chan bool, 16)
	t.Cleanup(n.OnPeer(func(i postoffice.NodeID, up bool, _ error) {
		if int(i) == id {
			ch <- up
		}
	}))
	return ch
}

func expect(t testing.TB, ch <-chan bool, up bool) {
	t.Helper()
	select {
	case got := <-ch:
		if got != up {
			t.Fatalf("the peer is up: %t, want %t", got, up)
		}
	case <-time.After(20 * time.Second):
		t.Fatalf("nothing heard of the peer, want up: %t", up)
	}
}

// TestRetriesWhileAServerIsAway: a worker that tries again and again while one of
// its servers is away leaves nothing behind at the other one.
func TestRetriesWhileAServerIsAway(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	for _, n := range c.Servers {
		serve(t, n, echoes(t))
	}
	w := newWorker(t, c.Workers[0])
	works(t, w, 2)
	second := peer(t, c.Workers[0], van.ServerID(1))
	c.Servers[1].Close()
	expect(t, second, false)
	for range 1100 { // more than the batches that a server lets a worker leave open
		h, _ := ask(t, w, 2, "away")
		vantest.Fails(t, h.Wait(t.Context()), van.ErrPeerLost)
	}
	testcluster.Lost(t, c.Scheduler, van.ServerID(1))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	n, err := c.Join(ctx, "server", 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, n, echoes(t))
	expect(t, second, true)
	works(t, w, 2)
}

// displaced is a request that calls a function when later requests displace it.
type displaced struct {
	cluster.Request
	recycled func()
}

func (*displaced) Answer(int, int, *van.Message) error { return nil }
func (*displaced) Finished(error)                      {}
func (r *displaced) Recycle()                          { r.recycled() }

// TestDisplacedDuringItsStart: if 4096 requests finish between the failure of a batch and the end of PushPull, no other
// call uses the batch before PushPull returns.
func TestDisplacedDuringItsStart(t *testing.T) {
	const kept = 4096 // finished requests
	c := testcluster.Start(t, testcluster.Options{})
	w := newWorker(t, c.Workers[0])
	gone := peer(t, c.Workers[0], van.ServerID(0))
	c.Servers[0].Close()
	expect(t, gone, false)
	finish := func(recycled func()) {
		r := &displaced{recycled: recycled}
		if err := w.Customer().Open(&r.Request, "test", r, 1, nil); err != nil {
			t.Fatal(err)
		}
	}
	var second af.Call
	finish(func() { // the batch of first has displaced this request
		for range kept {
			finish(func() {})
		}
		second, _ = ask(t, w, 1, "second")
	})
	for range kept - 1 {
		finish(func() {})
	}
	first, _ := ask(t, w, 1, "first")
	if first, second := first.Timestamp(), second.Timestamp(); first >= second {
		t.Errorf("the handlers are %d and %d, want a larger one for the second call", first, second)
	}
	vantest.Fails(t, second.Wait(t.Context()), van.ErrPeerLost)
}

// TestEarlyBatchesOfSeveralWorkers: batches that arrived before the handler was set are served like the others: a
// handler that waits for another worker gets that worker's batch.
func TestEarlyBatchesOfSeveralWorkers(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		before := testcluster.Stats(c.Servers[0]).ReceivedMessages
		var hs [2]af.Call
		w := []*af.Worker{newWorker(t, c.Workers[0]), newWorker(t, c.Workers[1])}
		for i := range w {
			hs[i], _ = ask(t, w[i], 1, "early")
		}
		for end := time.Now().Add(10 * time.Second); testcluster.Stats(c.Servers[0]).ReceivedMessages < before+4; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatal("the requests do not come")
			}
		}
		var all sync.WaitGroup
		all.Add(2)
		serve(t, c.Servers[0], func(b af.Batch) {
			all.Done()
			all.Wait()
			if err := echo(b); err != nil {
				t.Error(err)
			}
		})
		for i := range w {
			if err := hs[i].Wait(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}, testcluster.TCP, testcluster.SHM)
}

// TestPushesAtOnce: acknowledgements of several workers' batches do not wait for
// one another.
func TestPushesAtOnce(t *testing.T) {
	const workers = 4
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = workers
		c := testcluster.Start(t, o)
		serve(t, c.Servers[0], func(b af.Batch) {
			if err := b.Respond(nil); err != nil {
				t.Error(err)
			}
		})
		x := bytesOf(t, make([]byte, 8))
		var wg sync.WaitGroup
		for _, n := range c.Workers {
			w := newWorker(t, n)
			wg.Go(func() {
				for i := range 2000 {
					h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}, {Key: 2, Val: x}}, nil)
					if err == nil {
						err = h.Wait(t.Context())
					}
					if err != nil {
						t.Errorf("batch %d: %v", i, err)
						return
					}
				}
			})
		}
		wg.Wait()
	}, testcluster.TCP, testcluster.SHM)
}
