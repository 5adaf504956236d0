package vantest

// Tests of Close under load, and of allocations.

import (
	"errors"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// closeWhileBusy closes nodes that send to each other. A bounded number of messages is under way, so that the test does
// not measure how long a transport takes to discard a full queue.
func closeWhileBusy(w *world) {
	const underWay = 1000
	tokens := make(chan struct{}, underWay)
	for range underWay {
		tokens <- struct{}{}
	}
	var closed [4]atomic.Bool
	var late atomic.Int64
	// Close waits until its ctx ends for a peer to which no connection was ever made, so the test waits until each of the 8
	// connections has carried messages.
	var received [4][16]atomic.Int64 // by receiver, and by sender's id
	var carrying sync.WaitGroup
	carrying.Add(8)
	var nodes []*node
	for i, id := range []int{8, 10, 9, 11} {
		nodes = append(nodes, w.node(id, func(m *van.Message) {
			if closed[i].Load() {
				late.Add(1)
			}
			if received[i][m.Sender].Add(1) == 50 {
				carrying.Done()
			}
			tokens <- struct{}{}
		}))
	}
	servers, workers := nodes[:2], nodes[2:]
	for _, s := range servers {
		for _, k := range workers {
			link(k, s)
		}
	}
	var senders sync.WaitGroup
	stop := make(chan struct{})
	for _, from := range nodes {
		peers := servers
		if from.self.Role == van.Server {
			peers = workers
		}
		for _, to := range peers {
			senders.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-stop:
						return
					case <-tokens:
					}
					m := data(to.self.ID, i, from.self.Role == van.Worker, make([]byte, 8), make([]byte, 300))
					switch err := from.Send(m); {
					case errors.Is(err, van.ErrClosed):
						return
					case errors.Is(err, van.ErrQueueFull), errors.Is(err, van.ErrPeerLost): // a server cannot send before the worker has connected
						tokens <- struct{}{}
						runtime.Gosched()
					case err != nil:
						w.Errorf("Send while closing: %v", err)
						return
					}
				}
			})
		}
	}
	w.waitAll(&carrying, "traffic")
	var closers sync.WaitGroup
	for i, n := range nodes {
		closers.Go(func() {
			ctx, cancel := w.context()
			defer cancel()
			start := time.Now()
			// Peers that go at the same time need not take what was sent.
			_ = n.Close(ctx)
			closed[i].Store(true)
			if d := time.Since(start); d >= Limit {
				w.Errorf("Close of %s took %s", van.NodeName(n.self.ID), d)
			}
		})
	}
	closers.Wait()
	close(stop)
	senders.Wait()
	if k := late.Load(); k > 0 {
		w.Errorf("%d messages were handed up after Close", k)
	}
}

func closeDelivers(w *world) {
	n, size := 100, 64<<10
	if w.suite.Lossy {
		n = 20
	}
	worker, server := w.pair()
	for i := range n {
		worker.must(data(8, i, true, make([]byte, 8), Pattern(i, size)))
	}
	worker.close()
	server.expect(9, n)
}

func allocations(w *world) {
	echo := make(chan struct{}, 1)
	var server *node
	var mu sync.Mutex
	reply := data(9, 0, false, make([]byte, 8), make([]byte, 256))
	server = w.node(8, func(m *van.Message) {
		mu.Lock()
		reply.Timestamp = m.Timestamp
		err := server.Send(reply)
		mu.Unlock()
		if err != nil {
			w.Errorf("Send: %v", err)
		}
	})
	worker := w.node(9, func(m *van.Message) { echo <- struct{}{} })
	link(worker, server)
	request := data(8, 0, true, make([]byte, 8), make([]byte, 256))
	trip := func() {
		if err := worker.Send(request); err != nil {
			w.Fatalf("Send: %v", err)
		}
		select {
		case <-echo:
		case <-w.timeout():
			w.Fatal("no answer")
		}
		request.Timestamp++
	}
	// In parts, each with its own limit, and fewer where a trip takes milliseconds, as it does over
	// emulated hardware. The part with the fewest allocations counts: on a machine that is slow or busy, the engine at times
	// takes a delivery for a long one, and allocates another loop.
	const part, long = 100, 5 * time.Second
	n, trips := math.Inf(1), 0
	parts := func(most int, f func()) time.Duration {
		start := time.Now()
		for trips = 0; trips < most*part && time.Since(start) < long; trips += part {
			w.expiry = nil
			f()
		}
		return time.Since(start)
	}
	parts(20, func() {
		for range part {
			trip() // fills the pools
		}
	})
	took := parts(30, func() { n = min(n, testing.AllocsPerRun(part, trip)) })
	w.Logf("%.2f allocations and %s for a round trip", n, took/time.Duration(trips))
	if n > w.suite.MaxAllocs {
		w.Errorf("%.2f allocations for a round trip, want at most %g", n, w.suite.MaxAllocs)
	}
}
