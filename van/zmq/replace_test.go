package zmq

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestRenameClosesOther: a connection whose id another one takes over is closed.
func TestRenameClosesOther(t *testing.T) {
	scheduler, worker := newNode(t, 1, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	scheduler.connect(t, worker)
	other := (*scheduler.peers.Load())[9]
	scheduler.must(t, heartbeat(9, 1)) // of two connections under one name the worker keeps the later
	worker.next(t)
	if err := scheduler.Connect(t.Context(), -1, worker.self); err != nil {
		t.Fatal(err)
	}
	if err := scheduler.Rename(-1, 9); err != nil {
		t.Fatal(err)
	}
	until(t, "end of the other connection", func() bool {
		other.sock.use.RLock()
		defer other.sock.use.RUnlock()
		return other.sock.c == nil
	})
	scheduler.must(t, heartbeat(9, 3))
	if m := worker.next(t); m.Timestamp != 3 {
		t.Errorf("message %d, want 3", m.Timestamp)
	}
}

// TestFailedConnect: a connection that cannot be made in place of another one ends that one,
// once.
func TestFailedConnect(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	worker.must(t, push(8, 0, nil))
	server.next(t)
	nowhere := server.self
	nowhere.Hostname = "no host"
	for range 2 {
		if err := worker.Connect(t.Context(), 8, nowhere); err == nil {
			t.Fatal("connected to a host that cannot be")
		}
		if err := worker.Send(push(8, 1, nil)); !errors.Is(err, van.ErrUnknownPeer) && !errors.Is(err, van.ErrPeerLost) {
			t.Errorf("Send where no connection could be made: %v, want %v or %v", err, van.ErrUnknownPeer, van.ErrPeerLost)
		}
	}
	worker.connect(t, server)
	worker.wg.Wait() // for the end of dropped connections
	worker.mu.Lock()
	ending := len(worker.leaving)
	worker.mu.Unlock()
	if ending > 0 {
		t.Errorf("%d connections that have ended are kept", ending)
	}
	worker.must(t, push(8, 1, nil))
	if m := server.next(t); m.Timestamp != 1 {
		t.Errorf("message %d, want 1", m.Timestamp)
	}
}

// TestAddressHasOneProcess: a connection to a process that has ended does not come to the one that has its
// address now, behind the connection to that one, which would be read no more.
func TestAddressHasOneProcess(t *testing.T) {
	scheduler, first := newNode(t, 1, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	if err := scheduler.Connect(t.Context(), -1, first.self); err != nil {
		t.Fatal(err)
	}
	scheduler.must(t, heartbeat(-1, 0))
	first.next(t).Release()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if err := first.Close(ctx); err != nil {
		t.Fatal(err)
	}
	before := (*scheduler.peers.Load())[-1]
	until(t, "end of the connection", before.lost.Load)

	_, rec, in := successor(t, first, 8)
	if err := scheduler.Connect(ctx, -2, rec); err != nil {
		t.Fatal(err)
	}
	select {
	case <-before.ended:
	case <-time.After(limit):
		t.Fatal("the connection to the first process has not ended")
	}
	if err := scheduler.Send(heartbeat(-1, 1)); !errors.Is(err, van.ErrPeerLost) {
		t.Errorf("Send to the first process: %v, want %v", err, van.ErrPeerLost)
	}
	for ts := range int32(3) {
		scheduler.must(t, heartbeat(-2, int(ts)))
		select {
		case got := <-in:
			if got != ts {
				t.Errorf("message %d, want %d", got, ts)
			}
		case <-time.After(limit):
			t.Fatal("the second process receives nothing")
		}
	}
	if err := scheduler.Rename(-2, 9); err != nil {
		t.Fatal(err)
	}
	scheduler.must(t, heartbeat(9, 3))
	<-in
	scheduler.Disconnect(-1)
}

// successor binds another process, of incarnation inc, to the address of first, which is closed.
func successor(t *testing.T, first *node, inc uint32) (*zvan, van.Node, chan int32) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	rec := first.self
	rec.Endpoint = (&van.NodeExtension{Incarnation: inc}).Encode()
	cfg := env.Default()
	cfg.HeartbeatInterval, cfg.HeartbeatTimeout = 0, 0
	v, err := New(van.Options{Config: cfg, Incarnation: inc})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		_ = v.Close(ctx)
	})
	until(t, "the address", func() bool {
		_, err = v.Bind(ctx, rec)
		return !errors.Is(err, syscall.EADDRINUSE)
	})
	if err != nil {
		t.Fatal(err)
	}
	in := make(chan int32, 1000)
	v.Start(func(m *van.Message) { in <- m.Timestamp })
	return v.(*zvan), rec, in
}

// answered makes a worker and its server 8, which has answered a push. If busy the worker's handler of answers runs until
// release is called.
func answered(t *testing.T, busy bool) (worker, server *node, release func()) {
	t.Helper()
	entered, released := make(chan struct{}, 10), make(chan struct{})
	worker = newNode(t, 9, 7, func(*van.Message) {
		entered <- struct{}{}
		if busy {
			<-released
		}
	}, nil)
	server = newNode(t, 8, 5, nil, nil)
	link(t, worker, server)
	worker.must(t, push(8, 0, nil))
	server.next(t).Release()
	answer := push(9, 0, nil)
	answer.Request = false
	server.must(t, answer)
	<-entered
	return worker, server, func() { close(released) }
}

// TestAddressHasOneProcessWhileHandlerRuns: the same as TestAddressHasOneProcess, where a handler of the
// connection that has broken still runs, or this node has ended the connection itself just before.
func TestAddressHasOneProcessWhileHandlerRuns(t *testing.T) {
	for _, c := range []struct {
		name             string
		busy, disconnect bool
		id               int
		outage           time.Duration
	}{
		{"a handler runs, the same id", true, false, 8, 3 * time.Second},
		{"a handler runs, another id", true, false, 10, 3 * time.Second},
		{"a handler runs, disconnected before", true, true, 8, 0},
		{"disconnected before", false, true, 8, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			worker, first, release := answered(t, c.busy)
			defer release()
			before := (*worker.peers.Load())[8]
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			if err := first.Close(ctx); err != nil {
				t.Fatal(err)
			}
			until(t, "end of the connection", before.lost.Load)
			<-time.After(c.outage) // libzmq tries again more and more rarely
			_, rec, in := successor(t, first, 6)
			if c.disconnect {
				worker.Disconnect(8)
			}
			if err := worker.Connect(ctx, c.id, rec); err != nil {
				t.Fatal(err)
			}
			end := time.Now().Add(3 * time.Second) // in which libzmq would have tried again
			pace := time.Tick(20 * time.Millisecond)
			for ts := 0; time.Now().Before(end); ts++ {
				worker.must(t, push(c.id, ts, nil))
				select {
				case got := <-in:
					if int(got) != ts {
						t.Fatalf("message %d, want %d", got, ts)
					}
				case <-time.After(3 * time.Second):
					t.Fatalf("the second process does not receive message %d", ts)
				}
				<-pace
			}
		})
	}
}

// TestClaimDuringOutage: a connection to a living member breaks for a moment, and meanwhile an unknown peer claims
// the member's address. After that peer has left, the member can be reached as before.
func TestClaimDuringOutage(t *testing.T) {
	scheduler, member := newNode(t, 1, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	scheduler.connect(t, member)
	scheduler.must(t, heartbeat(9, 0))
	member.next(t).Release()
	c := (*scheduler.peers.Load())[9]
	until(t, "the descriptor", func() bool { return c.link.Load() != nil })
	c.link.Load().use(func(fd int) { _ = unix.Shutdown(fd, unix.SHUT_RDWR) })
	until(t, "end of the connection", c.lost.Load)
	claim := member.self
	claim.ID = van.Empty
	claim.Endpoint = (&van.NodeExtension{Incarnation: 99}).Encode()
	if err := scheduler.Connect(t.Context(), -1, claim); err != nil {
		t.Fatal(err)
	}
	scheduler.Disconnect(-1)
	until(t, "connection to the member", func() bool { return scheduler.Send(heartbeat(9, 1)) == nil })
	if m := member.next(t); m.Timestamp != 1 {
		t.Errorf("message %d, want 1", m.Timestamp)
	}
}

// TestConnectLeavesOthersAlone: a connection to one address ends none that leads to another, also one that has broken,
// which libzmq makes again.
func TestConnectLeavesOthersAlone(t *testing.T) {
	scheduler, first, other := newNode(t, 1, 5, nil, nil), newNode(t, 9, 7, nil, nil), newNode(t, 11, 7, nil, nil)
	scheduler.connect(t, first)
	scheduler.must(t, heartbeat(9, 0))
	first.next(t).Release()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if err := first.Close(ctx); err != nil {
		t.Fatal(err)
	}
	c := (*scheduler.peers.Load())[9]
	until(t, "end of the connection", c.lost.Load)
	scheduler.connect(t, other)
	if c.leaves.Load() {
		t.Error("a connection that had broken was ended by one to another address")
	}
	if err := scheduler.Send(heartbeat(9, 1)); err != nil {
		t.Error(err)
	}
}

// TestConnectWaitsForItsAddress: Connect waits, for a bounded time, for the end of closing connections to its
// address, and then logs their peers. It does not wait for other connections.
func TestConnectWaitsForItsAddress(t *testing.T) {
	scheduler, member := newNode(t, 1, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	ending := func(id int, to string) {
		c := &conn{to: to, ended: make(chan struct{})}
		c.who.Store(&identity{id: id})
		scheduler.mu.Lock()
		defer scheduler.mu.Unlock()
		scheduler.leaving[c] = struct{}{}
	}
	ending(11, "tcp://127.0.0.1:1")
	scheduler.connect(t, member)
	const line = "another connection to the address has not ended yet"
	if strings.Contains(scheduler.logged.String(), line) {
		t.Error("Connect has waited for a connection to another address")
	}
	ending(13, (*scheduler.peers.Load())[9].to)
	connected := make(chan error, 1)
	go func() { connected <- scheduler.Connect(t.Context(), -1, member.self) }()
	select {
	case err := <-connected:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(limit):
		t.Fatal("Connect waits for ever")
	}
	scheduler.says(t, line)
	scheduler.says(t, van.NodeName(13))
}

// TestRestore: when a connection has ended, and not before, those are connected to again that have given way to
// connections to its address, and no others.
func TestRestore(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, nil)
	gaveWay := func(id, port int) *conn {
		t.Helper()
		if err := scheduler.Connect(t.Context(), id, van.Node{Role: van.Worker, ID: id, Hostname: "127.0.0.1", Port: port}); err != nil {
			t.Fatal(err)
		}
		c := (*scheduler.peers.Load())[id]
		scheduler.mu.Lock()
		defer scheduler.mu.Unlock()
		scheduler.drop(c, 0)
		return c
	}
	old := map[int]*conn{}
	for _, id := range []int{-1, -2, -3} {
		old[id] = gaveWay(id, 1)
	}
	other := gaveWay(-4, 2)
	again := func(id int) bool { return (*scheduler.peers.Load())[id] != old[id] }
	c := &conn{to: old[-1].to, ended: make(chan struct{})}
	done := make(chan struct{})
	go func() { defer close(done); scheduler.restore(c) }()
	<-time.After(50 * time.Millisecond)
	for id := range old {
		if again(id) {
			t.Errorf("node %d was connected to before the other connection had ended", id)
		}
	}
	close(c.ended)
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatal("restore does not return")
	}
	for id := range old {
		if !again(id) {
			t.Errorf("node %d is not connected to again", id)
		}
	}
	if (*scheduler.peers.Load())[-4] != other {
		t.Error("a connection to another address was made again")
	}
}

// TestEndsBesideHandler: a connection that is replaced, or is broken and disconnected, ends at once, not after a
// running handler: until the end libzmq keeps dialing the address.
func TestEndsBesideHandler(t *testing.T) {
	for name, broken := range map[string]bool{"replaced": false, "broken": true} {
		t.Run(name, func(t *testing.T) {
			took := time.Duration(0)
			for range 3 { // on a machine that is busy one may be late
				if took = endBesideHandler(t, broken); took < handlerTime {
					return
				}
			}
			t.Errorf("it took %s, as long as a handler may run", took)
		})
	}
}

// endBesideHandler returns the time that a connection takes to end while a handler of one of its messages runs.
func endBesideHandler(t *testing.T, broken bool) time.Duration {
	t.Helper()
	worker, server, release := answered(t, true)
	defer release()
	c := (*worker.peers.Load())[8]
	if broken {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		if err := server.Close(ctx); err != nil {
			t.Fatal(err)
		}
		until(t, "end of the connection", c.lost.Load)
	}
	began := time.Now()
	if broken {
		worker.Disconnect(8)
	} else {
		worker.connect(t, server)
	}
	select {
	case <-c.ended:
	case <-time.After(limit):
		t.Fatal("the connection does not end")
	}
	return time.Since(began)
}

// TestSendWhileReplaced: a Send while the connection is replaced uses the next one.
func TestSendWhileReplaced(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, worker, server)
	for range 20 {
		ended := make(chan error, 1)
		go func() { ended <- worker.Connect(t.Context(), 8, server.self) }()
		for connected := false; !connected; {
			worker.must(t, heartbeat(8, 0))
			select {
			case err := <-ended:
				if connected = true; err != nil {
					t.Fatal(err)
				}
			default:
			}
		}
	}
}

// TestConnectionsForQuestions: while the scheduler learns which node a process is, it makes several connections to it. Whichever of
// them it keeps, the process reads all.
func TestConnectionsForQuestions(t *testing.T) {
	scheduler, worker := newNode(t, 1, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	for i := range 3 {
		if err := scheduler.Connect(t.Context(), -1-i, worker.self); err != nil {
			t.Fatal(err)
		}
		scheduler.must(t, heartbeat(-1-i, i))
		if m := worker.next(t); m.Sender != 1 || m.Timestamp != int32(i) {
			t.Fatalf("message %d of %d arrived, want %d of 1", m.Timestamp, m.Sender, i)
		}
	}
	if err := scheduler.Rename(-2, 9); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		scheduler.must(t, heartbeat(9, 10+i))
		if m := worker.next(t); m.Sender != 1 || m.Timestamp != int32(10+i) {
			t.Fatalf("message %d of %d arrived, want %d of 1", m.Timestamp, m.Sender, 10+i)
		}
	}
	if down := scheduler.logged.String(); strings.Contains(down, "closed") {
		t.Errorf("a connection was lost: %s", down)
	}
}
