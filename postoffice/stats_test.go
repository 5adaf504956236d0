package postoffice_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/clustertest"
)

// TestStats: a snapshot has the requests in flight on the worker, the accepted ones and running handlers on the server, the
// messages of the transport, and the state of each peer. A peer without a connection has no path. OnTrace gets the times of each message.
func TestStats(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var mu sync.Mutex
	traced := map[int32]postoffice.Trace{}
	c := clustertest.Start(t, clustertest.Options{Workers: 2, Node: func(o *postoffice.Options) {
		o.OnTrace = func(server postoffice.NodeID, timestamp int32, trace postoffice.Trace) {
			mu.Lock()
			defer mu.Unlock()
			if traced[timestamp] = trace; server != postoffice.ServerID(0) {
				t.Errorf("a trace of an answer of %s, want server 0", server)
			}
		}
	}})
	begun, free := make(chan struct{}), make(chan struct{})
	server, err := af.NewServer(c.Server(0), af.ServerOptions{AppID: 3})
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Handle(func(b af.Batch) {
		close(begun)
		<-free
		if err := b.Respond(b.Pushes()); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	worker, err := af.NewWorker(c.Worker(0), af.WorkerOptions{AppID: 3, CustomerID: 5})
	if err != nil {
		t.Fatal(err)
	}
	x, err := af.FromSlice(make([]float32, 4))
	if err != nil {
		t.Fatal(err)
	}
	y, err := af.FromSlice(make([]float32, 4))
	if err != nil {
		t.Fatal(err)
	}
	call, err := worker.PushPull([]af.KeyTensor{{Key: 1, Val: x}}, [][]af.KeyTensor{{{Key: 2, Val: y}}})
	if err != nil {
		t.Fatal(err)
	}
	<-begun
	apps := func(n *postoffice.Node, want ...postoffice.AppStats) {
		t.Helper()
		if got := n.Stats().Apps; !slices.Equal(got, want) {
			t.Errorf("%s: %+v, want %+v", n.Name(), got, want)
		}
	}
	apps(c.Worker(0), postoffice.AppStats{AppID: 3, CustomerID: 5, InFlight: 1})
	apps(c.Server(0), postoffice.AppStats{AppID: 3, CustomerID: 3, Accepted: 1, Handlers: 1})
	apps(c.Worker(1))
	close(free)
	if err := call.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	apps(c.Worker(0), postoffice.AppStats{AppID: 3, CustomerID: 5})
	for i, want := range call.Traces() {
		mu.Lock()
		if got := traced[call.Timestamp()+int32(i)]; got != want || got.Request.Start == 0 {
			t.Errorf("the trace of message %d is %+v, want %+v, and times in it", i, got, want)
		}
		mu.Unlock()
	}
	if s := c.Worker(0).Stats().Transport; s.SentMessages == 0 || s.ReceivedMessages == 0 {
		t.Errorf("the transport has counted %+v, want messages sent and received", s)
	}
	for _, p := range c.Worker(0).Stats().Peers {
		if connected := p.ID == postoffice.ServerID(0); connected != (p.Path.Over != "") {
			t.Errorf("data to %s goes over %q, connected: %t", p.ID, p.Path.Over, connected)
		}
	}
	if err := c.Kill(ctx, c.Worker(1)); err != nil {
		t.Fatal(err)
	}
	var ids []postoffice.NodeID
	for _, p := range c.Scheduler().Stats().Peers {
		ids = append(ids, p.ID)
		if lost := p.ID == postoffice.WorkerID(1); lost != errors.Is(p.Lost, postoffice.ErrPeerLost) || !lost && p.Lost != nil {
			t.Errorf("%s is lost: %v, want %t", p.ID, p.Lost, lost)
		}
	}
	if want := []postoffice.NodeID{postoffice.WorkerID(0), postoffice.WorkerID(1), postoffice.ServerID(0)}; !slices.Equal(ids, want) {
		t.Errorf("the scheduler has peers %v, want %v", ids, want)
	}
}
