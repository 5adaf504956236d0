package inproc_test

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

const limit = 20 * time.Second

func newVan(t *testing.T, n *inproc.Network) van.Van {
	t.Helper()
	v, err := n.Factory()(van.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		_ = v.Close(ctx) // tests of Close check its error themselves
	})
	return v
}

// start makes a node at host with id.
func start(t *testing.T, n *inproc.Network, id int, host string, recv van.Receiver) (van.Van, van.Node) {
	t.Helper()
	v := newVan(t, n)
	self := van.Node{Role: van.RoleOf(id), ID: id, Hostname: host}
	port, err := v.Bind(context.Background(), self)
	if err != nil {
		t.Fatal(err)
	}
	self.Port = port
	v.SetID(id)
	v.Start(recv)
	return v, self
}

func connect(t *testing.T, v van.Van, peer van.Node) {
	t.Helper()
	if err := v.Connect(context.Background(), peer.ID, peer); err != nil {
		t.Fatal(err)
	}
}

func message(to, ts int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp = to, int32(ts)
	return m
}

func receive(t *testing.T, c <-chan int) int {
	t.Helper()
	select {
	case x := <-c:
		return x
	case <-time.After(limit):
		t.Fatalf("nothing came within %s", limit)
		return 0
	}
}

func TestBindErrors(t *testing.T) {
	n := inproc.NewNetwork()
	_, taken := start(t, n, 8, "a", func(*van.Message) {})
	for _, c := range []struct {
		name string
		self van.Node
		want error
	}{
		{"port in use", taken, syscall.EADDRINUSE},
		{"no host", van.Node{Port: 1}, van.ErrInvalid},
		{"bad host", van.Node{Hostname: "a b"}, van.ErrInvalid},
		{"negative port", van.Node{Hostname: "a", Port: -1}, van.ErrInvalid},
		{"large port", van.Node{Hostname: "a", Port: 65536}, van.ErrInvalid},
	} {
		if _, err := newVan(t, n).Bind(context.Background(), c.self); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	other := taken
	other.Hostname = "b"
	v := newVan(t, n)
	if port, err := v.Bind(context.Background(), other); err != nil || port != taken.Port {
		t.Errorf("same port of another host: %d, %v; want %d", port, err, taken.Port)
	}
	if _, err := v.Bind(context.Background(), van.Node{Hostname: "c"}); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("second Bind: %v, want %v", err, van.ErrInvalid)
	}
}

func TestKill(t *testing.T) {
	n := inproc.NewNetwork()
	got := make(chan int, 10)
	victim, at := start(t, n, 8, "a", func(m *van.Message) { got <- int(m.Timestamp) })
	watcher := newVan(t, n)
	events := make(chan bool, 10)
	watcher.(van.PeerWatcher).WatchPeers(func(id int, up bool, cause error) {
		if id != 8 || up == errors.Is(cause, van.ErrPeerLost) {
			t.Errorf("told of node %d, up %t, cause %v", id, up, cause)
		}
		events <- up
	})
	connect(t, watcher, at)
	if err := watcher.Send(message(8, 1)); err != nil {
		t.Fatal(err)
	}
	receive(t, got)
	if !n.Kill(at.Addr()) || n.Kill(at.Addr()) {
		t.Error("Kill does not report whether there was a node")
	}
	if up := <-events; up {
		t.Error("told that the killed node is up")
	}
	if err := watcher.Send(message(8, 2)); !errors.Is(err, van.ErrPeerLost) {
		t.Errorf("Send to a killed node: %v, want %v", err, van.ErrPeerLost)
	}
	if err := victim.Send(message(8, 2)); !errors.Is(err, van.ErrClosed) {
		t.Errorf("Send of a killed node: %v, want %v", err, van.ErrClosed)
	}
	again := newVan(t, n)
	if _, err := again.Bind(context.Background(), at); err != nil {
		t.Fatal(err)
	}
	again.Start(func(m *van.Message) { got <- int(m.Timestamp) })
	if up := <-events; !up {
		t.Error("not told that the node is up again")
	}
	if err := watcher.Send(message(8, 3)); err != nil {
		t.Fatal(err)
	}
	if ts := receive(t, got); ts != 3 {
		t.Errorf("got message %d, want 3", ts)
	}
}

func TestPartition(t *testing.T) {
	n := inproc.NewNetwork()
	got := make(chan int, 10)
	_, a := start(t, n, 8, "a", func(m *van.Message) { got <- int(m.Timestamp) })
	_, c := start(t, n, 10, "c", func(m *van.Message) { got <- 100 })
	v, b := start(t, n, 9, "b", func(*van.Message) {})
	connect(t, v, a)
	connect(t, v, c)
	n.Partition(b.Addr(), a.Addr())
	send := func(to, ts int) {
		t.Helper()
		if err := v.Send(message(to, ts)); err != nil {
			t.Fatal(err)
		}
	}
	send(8, 1)
	send(10, 1)
	if x := receive(t, got); x != 100 {
		t.Errorf("message %d crossed the partition", x)
	}
	n.Heal(a.Addr(), b.Addr())
	send(8, 2)
	if x := receive(t, got); x != 2 {
		t.Errorf("got message %d, want 2", x)
	}
}

func TestQueueIsBounded(t *testing.T) {
	n := inproc.NewNetwork()
	n.QueueCap = 10
	v := newVan(t, n)
	connect(t, v, van.Node{ID: 8, Hostname: "nobody", Port: 1})
	var err error
	sent := 0
	for ; err == nil && sent < 100; sent++ {
		err = v.Send(message(8, sent))
	}
	if sent != 11 || !errors.Is(err, van.ErrQueueFull) {
		t.Errorf("Send number %d: %v, want number 11: %v", sent, err, van.ErrQueueFull)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := v.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Close with messages that nobody takes: %v, want %v", err, context.DeadlineExceeded)
	}
}

func TestLingerUntilSomebodyListens(t *testing.T) {
	n := inproc.NewNetwork()
	v := newVan(t, n)
	at := van.Node{ID: 8, Hostname: "late", Port: 7}
	connect(t, v, at)
	if err := v.Send(message(8, 5)); err != nil {
		t.Fatal(err)
	}
	v.Disconnect(8) // sent messages stay queued
	closed := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		closed <- v.Close(ctx)
	}()
	late := newVan(t, n)
	if _, err := late.Bind(context.Background(), at); err != nil {
		t.Fatal(err)
	}
	got := make(chan int, 1)
	late.Start(func(m *van.Message) { got <- int(m.Timestamp) })
	if err := <-closed; err != nil {
		t.Errorf("Close: %v", err)
	}
	if ts := receive(t, got); ts != 5 {
		t.Errorf("got message %d, want 5", ts)
	}
}

// TestCloseAfterDisconnect: Close also waits for messages sent before Disconnect, and reports
// their loss.
func TestCloseAfterDisconnect(t *testing.T) {
	n := inproc.NewNetwork()
	v := newVan(t, n)
	connect(t, v, van.Node{ID: 8, Hostname: "nobody", Port: 7})
	if err := v.Send(message(8, 5)); err != nil {
		t.Fatal(err)
	}
	v.Disconnect(8)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := v.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Close with a message that nobody takes: %v, want %v", err, context.Canceled)
	}
}

// TestCloseAfterPeerLeft: Close does not wait for messages, such as refusals, to a peer that has left. Their
// loss is no fault of the caller.
func TestCloseAfterPeerLeft(t *testing.T) {
	n := inproc.NewNetwork()
	peer, at := start(t, n, 8, "short", func(*van.Message) {})
	if err := peer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	v := newVan(t, n)
	connect(t, v, at)
	if err := v.Send(message(8, 5)); err != nil {
		t.Fatal(err)
	}
	v.Disconnect(8)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := v.Close(ctx); err != nil {
		t.Errorf("Close: %v", err)
	}
}

func TestDeviceMemoryIsRefused(t *testing.T) {
	n := inproc.NewNetwork()
	v, self := start(t, n, 8, "a", func(*van.Message) {})
	connect(t, v, self)
	m := message(8, 0)
	m.Frames = 2
	m.Vals = backend.At(nil, 8, backend.Device{Type: backend.GPU}, nil)
	if err := v.Send(m); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("Send of device memory: %v, want %v", err, van.ErrInvalid)
	}
	m.Frames = 4
	if err := v.Send(m); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("Send of 4 frames: %v, want %v", err, van.ErrInvalid)
	}
}

func TestStats(t *testing.T) {
	n := inproc.NewNetwork()
	got := make(chan int, 1)
	v, self := start(t, n, 8, "a", func(m *van.Message) { got <- 0 })
	connect(t, v, self)
	m := message(8, 0)
	m.Frames = 2
	m.Keys, m.Vals = backend.Bytes(make([]byte, 8)), backend.Bytes(make([]byte, 100))
	if err := v.Send(m); err != nil {
		t.Fatal(err)
	}
	receive(t, got)
	want := van.Stats{SentMessages: 1, SentBytes: 108, ReceivedMessages: 1, ReceivedBytes: 108}
	if s := v.(van.Meter).Stats(); s != want {
		t.Errorf("stats %+v, want %+v", s, want)
	}
}

// TestManyNodes connects 64 workers with 64 servers.
func TestManyNodes(t *testing.T) {
	const side = 64
	before := runtime.NumGoroutine()
	n := inproc.NewNetwork()
	var received atomic.Int64
	done := make(chan struct{})
	recv := func(*van.Message) {
		if received.Add(1) == 2*side*side {
			close(done)
		}
	}
	var vans [2][]van.Van
	var nodes [2][]van.Node
	for i := range side {
		for k, id := range []int{van.ServerID(i), van.WorkerID(i)} {
			v, self := start(t, n, id, "host", recv)
			vans[k] = append(vans[k], v)
			nodes[k] = append(nodes[k], self)
		}
	}
	for k := range 2 {
		for _, v := range vans[k] {
			for _, peer := range nodes[1-k] {
				connect(t, v, peer)
			}
		}
	}
	for k := range 2 {
		for _, v := range vans[k] {
			for _, peer := range nodes[1-k] {
				if err := v.Send(message(peer.ID, 0)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatalf("%d of %d messages came within %s", received.Load(), 2*side*side, limit)
	}
	// Two for each node, and a few that were slow.
	if g := runtime.NumGoroutine() - before; g > 3*2*side {
		t.Errorf("%d goroutines for %d nodes, want about 2 for each", g, 2*side)
	}
}

// TestGivenUp: when a sender closes and its messages to an address without a listener are
// dropped, earlier and later messages of other senders stay in order.
func TestGivenUp(t *testing.T) {
	n := inproc.NewNetwork()
	at := van.Node{Role: van.Server, ID: 8, Hostname: "a", Port: 7}
	first, second := newVan(t, n), newVan(t, n)
	connect(t, first, at)
	connect(t, second, at)
	for _, s := range []struct {
		v  van.Van
		ts int
	}{{first, 100}, {second, 1}, {first, 101}, {second, 2}, {first, 102}} {
		if err := s.v.Send(message(8, s.ts)); err != nil {
			t.Fatal(err)
		}
	}
	now, cancel := context.WithCancel(context.Background())
	cancel()
	if err := first.Close(now); !errors.Is(err, context.Canceled) {
		t.Errorf("Close with messages that nobody takes: %v, want %v", err, context.Canceled)
	}
	for ts := 3; ts <= 4; ts++ {
		if err := second.Send(message(8, ts)); err != nil {
			t.Fatal(err)
		}
	}
	listener := newVan(t, n)
	got := make(chan int, 10)
	if _, err := listener.Bind(context.Background(), at); err != nil {
		t.Fatal(err)
	}
	listener.Start(func(m *van.Message) { got <- int(m.Timestamp) })
	for want := 1; want <= 4; want++ {
		if ts := receive(t, got); ts != want {
			t.Errorf("message %d came when %d was due", ts, want)
		}
	}
}
