package zmq

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	zmq4 "github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestPollKeepsOrder: a Poll does not deliver what came after a message that the loop is
// still delivering.
func TestPollKeepsOrder(t *testing.T) {
	entered, release := make(chan struct{}, 10), make(chan struct{})
	var mu sync.Mutex
	var order []int32
	var inside atomic.Int32
	server := newNode(t, 8, 5, nil, nil)
	worker := newNode(t, 9, 7, func(m *van.Message) {
		if inside.Add(1) > 1 {
			t.Error("two deliveries of one peer at once")
		}
		entered <- struct{}{}
		if m.Timestamp == 0 {
			<-release
		}
		mu.Lock()
		order = append(order, m.Timestamp)
		mu.Unlock()
		inside.Add(-1)
	}, nil)
	link(t, worker, server)
	worker.must(t, push(8, 0, nil))
	server.next(t)
	answer := func(ts int) {
		m := push(9, ts, make([]byte, 100))
		m.Request = false
		server.must(t, m)
	}
	answer(0)
	<-entered // the loop has it
	r := (*worker.peers.Load())[8].rx
	until(t, "the role's change", func() bool { return r.inHand.Load() == 1 })
	for ts := 1; ts <= 3; ts++ {
		answer(ts)
	}
	for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); {
		worker.engine.Poll(func() bool { return false })
	}
	close(release)
	for range 3 {
		<-entered
	}
	until(t, "all", func() bool { mu.Lock(); defer mu.Unlock(); return len(order) == 4 })
	for i, ts := range order {
		if int(ts) != i {
			t.Fatalf("delivered in the order %v", order)
		}
	}
}

// TestFailedSendIsNotDone: Done is not called for a message that was not taken.
func TestFailedSendIsNotDone(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	if err := server.Connect(t.Context(), 9, van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1}); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{0, 1, van.CopyBelow - 1, van.CopyBelow, 1 << 20} {
		var done counter
		m := push(9, 0, make([]byte, size))
		m.Request = false
		m.Done = &done
		if err := server.Send(m); !errors.Is(err, van.ErrPeerLost) { // nobody has connected as 9
			t.Fatalf("%d bytes: %v, want %v", size, err, van.ErrPeerLost)
		}
		until(t, "release", func() bool { server.lent.reap(); return server.Stats().Pinned == 0 })
		if n := done.n.Load(); n != 0 {
			t.Errorf("%d bytes: Done was called %d times", size, n)
		}
		if n := (*server.peers.Load())[9].acct.unsent(); n != 0 {
			t.Errorf("%d bytes: %d are counted as unsent", size, n)
		}
	}
}

// TestHeldMessageLost: Done is called once for a message that was taken, also when it is
// refused later since its peer has gone by then.
func TestHeldMessageLost(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	if err := server.Connect(t.Context(), 9, van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1}); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{1, van.CopyBelow, 1 << 20} {
		var done counter
		m := push(9, 0, make([]byte, size))
		m.Request, m.More, m.Done = false, true, &done
		server.must(t, m) // it waits for a Flush
		server.Flush(9)   // nobody has connected as 9
		until(t, "Done", func() bool { server.lent.reap(); return done.n.Load() == 1 && server.Stats().Pinned == 0 })
		if n := (*server.peers.Load())[9].acct.unsent(); n != 0 {
			t.Errorf("%d bytes: %d are counted as unsent", size, n)
		}
	}
}

// TestMissedLook: a loop that is kept from looking by a Poll, and is not woken again, does
// not miss what came in between.
func TestMissedLook(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	worker := newNode(t, 9, 7, nil, nil)
	link(t, worker, server)
	worker.must(t, push(8, 0, nil))
	server.next(t)
	r := (*worker.peers.Load())[8].rx
	for i, again := range []bool{true, false} {
		// As a Poll does, which looks before the answer is there. The loop may have the source for a moment.
		until(t, "sleep, and a Poll that can receive", func() bool { return r.feed.Parked() && r.feed.Claim() })
		m := push(9, i, make([]byte, 100))
		m.Request = false
		server.must(t, m)
		// What the descriptor shows, and that it was asked not to sleep there, makes the
		// loop look, and it is turned away: that will not wake it again.
		until(t, "look", func() bool { return !r.feed.Parked() })
		r.feed.Release(false, again)
		if m := worker.next(t); int(m.Timestamp) != i {
			t.Errorf("message %d, want %d", m.Timestamp, i)
		}
	}
}

// TestQuietNodeReleases: a value that is lent while the sweeper goes to sleep is released
// on a node that does nothing any more.
func TestQuietNodeReleases(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	worker := newNode(t, 9, 7, nil, nil)
	link(t, worker, server)
	var done, second counter
	var once sync.Once
	hook := func(l *lent) {
		if l != worker.lent {
			return
		}
		once.Do(func() {
			// As by a sender who has seen the sweeper awake: it is not roused.
			l.idle.Store(false)
			m := push(8, 1, make([]byte, 2*bundleBelow))
			m.Done = &second
			if err := worker.Send(m); err != nil {
				t.Error(err)
			}
			l.idle.Store(true)
		})
	}
	testIdle.Store(&hook)
	defer testIdle.Store(nil)
	m := push(8, 0, make([]byte, 2*bundleBelow))
	m.Done = &done
	worker.must(t, m)
	until(t, "first release", func() bool { return done.n.Load() == 1 })
	until(t, "release on a quiet node", func() bool { return second.n.Load() == 1 })
}

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
		if err := worker.Send(push(8, 1, nil)); !errors.Is(err, van.ErrUnknownPeer) {
			t.Errorf("Send where no connection could be made: %v, want %v", err, van.ErrUnknownPeer)
		}
	}
	worker.connect(t, server)
	worker.wg.Wait() // for the end of what was dropped
	worker.accounts.mu.Lock()
	all, closed := len(worker.accounts.all), len(worker.accounts.closed)
	worker.accounts.mu.Unlock()
	if closed != all-1 {
		t.Errorf("%d accounts of %d can be used again, want all but the one that is in use", closed, all)
	}
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

// TestHoldAndGoOn: whatever comes at once, a socket is held while, and only while, its peer has
// asked for it: else what waits there would never leave.
func TestHoldAndGoOn(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	c := (*worker.peers.Load())[8]
	var round, ended atomic.Int64
	defer round.Store(-1)
	go func() {
		for last := int64(0); ; {
			switch now := round.Load(); {
			case now < 0:
				return
			case now == last || c.holdUntil.Load() == 0:
				runtime.Gosched()
			default:
				c.goOn() // as when the connection breaks
				last = now
				ended.Store(now)
			}
		}
	}()
	for i := int64(1); i <= 50000; i++ {
		round.Store(i)
		worker.noticed(c, []byte("stepaf/1 hold 2000"))
		for ended.Load() != i {
			runtime.Gosched()
		}
		if asked, held := c.holdUntil.Load() != 0, c.sock.c.hold != 0; asked != held {
			t.Fatalf("round %d: the peer has asked to wait: %v, the socket is held: %v", i, asked, held)
		}
	}
}

// TestCloseBesideHandler: Close says when a handler runs longer than it may wait, as with other
// transports, and not when it is the handler's own.
func TestCloseBesideHandler(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	server := newNode(t, 8, 5, func(*van.Message) {
		close(entered)
		<-release
	}, nil)
	worker := newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	worker.must(t, push(8, 0, nil))
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := server.Close(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "a receiver still runs") {
		t.Errorf("Close beside a handler returns %v, want that a receiver still runs", err)
	}
	close(release)
}

// TestCloseBesideHandlers: Close waits for the handlers of all peers at once, not for one after the other.
func TestCloseBesideHandlers(t *testing.T) {
	const peers = 20 // engine.Loop.Stop gives each of them half a second
	entered, release := make(chan struct{}, peers), make(chan struct{})
	worker := newNode(t, 9, 7, func(*van.Message) {
		entered <- struct{}{}
		<-release
	}, nil)
	defer close(release)
	for i := range peers {
		server := newNode(t, van.ServerID(i), 5, nil, nil)
		link(t, server, worker)
		worker.must(t, push(server.self.ID, 0, nil))
		answer := push(9, 0, nil)
		server.next(t).Release()
		answer.Request = false
		server.must(t, answer)
		<-entered
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	if err := worker.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Close beside %d handlers returns %v, want %v", peers, err, context.Canceled)
	}
	if took := time.Since(began); took > peers*500*time.Millisecond/2 {
		t.Errorf("Close took %s beside %d handlers, want that of one", took, peers)
	}
}

// TestHeldMessages: more messages with More than a socket holds, to a peer and over the
// ROUTER, all come, in order; the last leave with Flush.
func TestHeldMessages(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	worker.must(t, push(8, -1, nil))
	server.next(t)
	const n = 100
	for _, c := range []struct {
		from, to *node
		request  bool
	}{{worker, server, true}, {server, worker, false}} {
		for _, size := range []int{0, 1, van.CopyBelow - 1, van.CopyBelow, van.CopyBelow + 1, 5000} {
			var done counter
			for i := range n {
				m := push(c.to.self.ID, i, make([]byte, size))
				m.Request, m.More, m.Done = c.request, true, &done
				c.from.must(t, m)
			}
			c.from.Flush(c.to.self.ID)
			for i := range n {
				if m := c.to.next(t); int(m.Timestamp) != i || m.Vals.Len() != size {
					t.Fatalf("got message %d with %d bytes, want %d with %d", m.Timestamp, m.Vals.Len(), i, size)
				}
			}
			until(t, "release", func() bool { return done.n.Load() == n && c.from.Stats().Pinned == 0 })
			peer := (*c.from.peers.Load())[c.to.self.ID]
			until(t, "even account", func() bool { return peer.acct.unsent() == 0 })
		}
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
	rec.Endpoint = (&van.Identity{Incarnation: inc, Bundles: true}).Encode()
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
			entered, release := make(chan struct{}, 10), make(chan struct{})
			worker := newNode(t, 9, 7, func(m *van.Message) {
				if c.busy {
					entered <- struct{}{}
					<-release
				}
			}, nil)
			defer close(release)
			first := newNode(t, 8, 5, nil, nil)
			link(t, worker, first)
			worker.must(t, push(8, 0, nil))
			first.next(t).Release()
			if c.busy { // an answer
				m := push(9, 0, nil)
				m.Request = false
				first.must(t, m)
				<-entered
			}
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

// stall makes the one I/O thread of n, which is connected to other, wait until goOn is called.
func stall(t *testing.T, n, other *node) (goOn func()) {
	t.Helper()
	// A monitor that nobody reads holds up the thread.
	z, err := n.zctx.NewSocket(zmq4.DEALER)
	if err != nil {
		t.Fatal(err)
	}
	_ = z.SetLinger(0)
	_ = z.SetReconnectIvl(time.Millisecond)
	if err := z.Monitor("inproc://stall", zmq4.EVENT_ALL); err != nil {
		t.Fatal(err)
	}
	pair, err := n.zctx.NewSocket(zmq4.PAIR)
	if err != nil {
		t.Fatal(err)
	}
	_ = pair.SetLinger(0)
	_ = pair.SetRcvhwm(1)
	if err := pair.Connect("inproc://stall"); err != nil {
		t.Fatal(err)
	}
	if err := z.Connect("tcp://127.0.0.1:1"); err != nil {
		t.Fatal(err)
	}
	stalled := false
	pace := time.Tick(100 * time.Millisecond)
	for end := time.Now().Add(limit); !stalled && time.Now().Before(end); <-pace {
		n.must(t, heartbeat(other.self.ID, 1))
		select {
		case m := <-other.in:
			m.Release()
		case <-time.After(2 * time.Second):
			stalled = true
		}
	}
	goOn = sync.OnceFunc(func() {
		go func() {
			for {
				if _, err := pair.RecvMessageBytes(0); err != nil {
					_ = pair.Close()
					return
				}
			}
		}()
		_ = z.Close()
	})
	t.Cleanup(goOn) // else the node's Close would wait
	if !stalled {
		t.Fatal("libzmq's thread does not wait for a monitor")
	}
	return goOn
}

// TestMonitorOutlastsIOThread: a connection is ended while libzmq's thread is busy for longer than freeTime
// (as it is when it looks up a host's name). The node's other connections go on afterwards.
func TestMonitorOutlastsIOThread(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, func(c *env.Config) { c.ZMQIOThreads = 1 })
	peer, other := newNode(t, 9, 7, nil, nil), newNode(t, 11, 7, nil, nil)
	scheduler.connect(t, peer)
	scheduler.connect(t, other)
	for _, n := range []*node{peer, other} {
		scheduler.must(t, heartbeat(n.self.ID, 0))
		n.next(t).Release()
	}
	goOn := stall(t, scheduler, other)
	// A connection that is replaced is ended without linger.
	if err := scheduler.Connect(t.Context(), 9, peer.self); err != nil {
		t.Fatal(err)
	}
	<-time.After(freeTime + freeTime/2)
	goOn()
	for range 3 { // libzmq frees the sockets of others that are ended
		c := (*scheduler.peers.Load())[11]
		if err := scheduler.Connect(t.Context(), 11, other.self); err != nil {
			t.Fatal(err)
		}
		until(t, "the end of the socket", func() bool {
			select {
			case <-c.mon.stopped:
				return true
			default:
				return false
			}
		})
	}
}

// TestCloseOutlastsIOThread: a node is closed while libzmq's thread is busy for longer than freeTime. Close returns
// when the thread goes on.
func TestCloseOutlastsIOThread(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, func(c *env.Config) { c.ZMQIOThreads = 1 })
	other := newNode(t, 11, 7, nil, nil)
	scheduler.connect(t, other)
	scheduler.must(t, heartbeat(11, 0))
	other.next(t).Release()
	goOn := stall(t, scheduler, other)
	ctx, cancel := context.WithTimeout(t.Context(), 0) // no linger
	defer cancel()
	closed := make(chan error, 1)
	go func() { closed <- scheduler.Close(ctx) }()
	<-time.After(freeTime + freeTime/2) // the context is being ended
	goOn()
	select {
	case <-closed:
	case <-time.After(limit):
		t.Fatal("Close does not return")
	}
}

// TestFilesLackForMonitor: a connection that cannot be watched, since this process may have no more descriptors, does
// not keep libzmq from freeing the sockets of others.
func TestFilesLackForMonitor(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, worker, server)
	worker.must(t, push(8, 0, nil))
	server.next(t).Release()
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &l) }()
	refused := 0
	for n := range 12 { // of them some for each descriptor that is the first which lacks
		next, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(next)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next + n), Max: l.Max}); err != nil {
			t.Fatal(err)
		}
		err = worker.Connect(t.Context(), van.ServerID(1+n), van.Node{Role: van.Server, Hostname: "127.0.0.1", Port: 1})
		if setErr := unix.Setrlimit(unix.RLIMIT_NOFILE, &l); setErr != nil {
			t.Fatal(setErr)
		}
		if err != nil {
			refused++
		}
	}
	if refused < 5 {
		t.Errorf("%d of 12 failed, want those that had less than 5", refused)
	}
	c := (*worker.peers.Load())[8]
	worker.Disconnect(8)
	until(t, "the end of the socket", func() bool {
		select {
		case <-c.mon.stopped:
			return true
		default:
			return false
		}
	})
}

// TestClaimDuringOutage: a connection to a member that lives breaks for a moment, and meanwhile a stranger says
// that it has the member's address. When it has gone, the member can be reached as before.
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
	claim.Endpoint = (&van.Identity{Incarnation: 99, Bundles: true}).Encode()
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

// TestConnectWaitsForItsAddress: Connect waits for the end of the connections to its address that end, not for ever,
// and then says for whom; and not for others.
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

// TestEndsBesideHandler: a connection that is replaced, or has broken and is given up, ends at once, not behind a
// handler that runs: until then libzmq goes on to connect to the address.
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

// endBesideHandler returns how long a connection takes to end while a handler runs of what came over it.
func endBesideHandler(t *testing.T, broken bool) time.Duration {
	t.Helper()
	entered, release := make(chan struct{}, 10), make(chan struct{})
	worker := newNode(t, 9, 7, func(*van.Message) {
		entered <- struct{}{}
		<-release
	}, nil)
	defer close(release)
	server := newNode(t, 8, 5, nil, nil)
	link(t, worker, server)
	worker.must(t, push(8, 0, nil))
	server.next(t).Release()
	m := push(9, 0, nil)
	m.Request = false
	server.must(t, m)
	<-entered
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

// TestSendWhileReplaced: who sends while the connection is replaced uses the next one.
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
