package zmq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/pebbe/zmq4"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestNativeName: nodes of this library tell each other which process they are in the
// routing id; a node of the original sees what it always saw, both ways.
func TestNativeName(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	native, original := newNode(t, 9, 0xabc, nil, nil), newNode(t, 11, 0, nil, nil)
	link(t, server, native)
	link(t, server, original)
	for _, w := range []*node{native, original} {
		id := w.self.ID
		w.must(t, push(8, 1, make([]byte, 100)))
		if m := server.next(t); m.Sender != id {
			t.Errorf("message of %d, want %d", m.Sender, id)
		}
		m := push(id, 1, make([]byte, 100))
		m.Request = false
		server.must(t, m)
		if m := w.next(t); m.Sender != 8 {
			t.Errorf("answer of %d, want 8", m.Sender)
		}
	}
	for id, want := range map[int]string{9: "ps9.00000abc.00000005", 11: "ps11"} {
		c := (*server.peers.Load())[id]
		if c.who.Load().dest != want || !c.seen() {
			t.Errorf("answers for %d go to %q, and its connection was seen: %v; want %q", id, c.who.Load().dest, c.seen(), want)
		}
	}
}

// TestEarlyMessagesBeyondTheBudget: messages of a replacement process that this node does not know yet are dropped when they
// exceed STEPAF_STRANGER_BUDGET. The node gets each of them, with the reason; the others are handed up when it knows the process.
func TestEarlyMessagesBeyondTheBudget(t *testing.T) {
	type report struct {
		sender, ts int
		why        string
	}
	dropped := make(chan report, 8)
	server := newNodeWith(t, 8, 0, nil, small, van.Options{Incarnation: 5, OnDropped: func(m *van.Message, why string) {
		dropped <- report{m.Sender, int(m.Timestamp), why}
	}})
	connect := func(incarnation uint32) {
		if err := server.Connect(t.Context(), 9, workerRecord(incarnation, 1)); err != nil {
			t.Fatal(err)
		}
	}
	connect(1)
	fresh := dialRaw(t, server, of9(2))
	send := func(ts int) { // one after the other: the guard ends a connection with more unread bytes than the budget
		fresh.send(packed(t, push(8, ts, nil)), make([]byte, 8), make([]byte, 24<<10))
	}
	for ts := range 2 { // these fit
		send(ts)
		until(t, "the message is queued", func() bool { return server.flow.strange.Load() >= int64(ts+1)*24<<10 })
	}
	for want := 2; want < 4; want++ {
		send(want)
		select {
		case got := <-dropped:
			if got.sender != 9 || got.ts != want || !strings.Contains(got.why, "are queued already (STEPAF_STRANGER_BUDGET=65536)") {
				t.Errorf("%+v is reported, want message %d of 9, and the budget", got, want)
			}
		case <-time.After(limit):
			t.Fatalf("message %d is not reported", want)
		}
	}
	server.says(t, "dropped a message of an unknown process, which is not a member of the cluster")
	connect(2)
	server.Admit(9)
	for want := range 2 {
		if m := server.next(t); int(m.Timestamp) != want {
			t.Errorf("got message %d, want %d", m.Timestamp, want)
		}
	}
}

// TestReplaced: data of a replaced process is dropped under any name, and the process gets no answers of its
// replacement. Data that the replacement process sends before this node knows it is queued in order, and handed up
// when the node knows it.
func TestReplaced(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	rec := func(incarnation uint32) van.Node {
		return van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: incarnation}).Encode()}
	}
	connect := func(incarnation uint32) {
		if err := server.Connect(t.Context(), 9, rec(incarnation)); err != nil {
			t.Fatal(err)
		}
	}
	connect(1)
	old := dialRaw(t, server, "ps9.00000001")
	say := func(r *raw, ts int) { r.send(packed(t, push(8, ts, nil))) }
	hear := func(want ...int) {
		t.Helper()
		for _, ts := range want {
			if m := server.next(t); m.Sender != 9 || int(m.Timestamp) != ts {
				t.Errorf("got message %d of %d, want %d of 9", m.Timestamp, m.Sender, ts)
			}
		}
	}
	say(old, 1)
	hear(1)
	fresh := dialRaw(t, server, "ps9.00000002")
	say(fresh, 100)
	say(fresh, 101)
	until(t, "kept messages", func() bool {
		server.early.mu.Lock()
		defer server.early.mu.Unlock()
		return len(server.early.kept) == 2
	})
	connect(2)
	say(fresh, 102)
	until(t, "kept message", func() bool {
		server.early.mu.Lock()
		defer server.early.mu.Unlock()
		return len(server.early.kept) == 3
	})
	server.Admit(9)
	hear(100, 101, 102)
	say(old, 2)
	until(t, "refusal", func() bool { return server.Stats().FencedMessages == 1 })
	say(dialRaw(t, server, "ps9"), 3)          // as a node of the original
	say(dialRaw(t, server, "ps9.00000003"), 4) // as an unknown process
	say(fresh, 103)
	hear(103)
	until(t, "messages of others", func() bool {
		server.early.mu.Lock()
		defer server.early.mu.Unlock()
		server.early.most = 0
		return len(server.early.kept) == 2
	})
	server.early.expire()
	server.says(t, "dropped a message of a process that was replaced")
	server.says(t, "dropped a message of a process that the scheduler did not name")
	if n := server.Stats().FencedMessages; n != 3 {
		t.Errorf("%d messages were dropped, want 3: one of the process that was replaced, two of processes that nobody knows", n)
	}
	answer := push(9, 103, make([]byte, 100))
	answer.Request = false
	server.must(t, answer)
	_ = fresh.SetReadDeadline(time.Now().Add(limit))
	if _, err := io.ReadFull(fresh, make([]byte, 100)); err != nil {
		t.Errorf("the answer did not come to the successor: %v", err)
	}
	select {
	case m := <-server.in:
		t.Errorf("message %d of %d was handed up", m.Timestamp, m.Sender)
	default:
	}
	if n := server.flow.strange.Load(); n != 0 {
		t.Errorf("%d bytes of strangers are still counted", n)
	}
}

// TestReplacedByOriginal: a process of the original replaces a process of this library. Messages that it sends before this node
// knows it are handed up in order when the node knows it.
func TestReplacedByOriginal(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	rec := van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 1}).Encode()}
	if err := server.Connect(t.Context(), 9, rec); err != nil {
		t.Fatal(err)
	}
	kept := func(n int) {
		t.Helper()
		until(t, "kept message", func() bool {
			server.early.mu.Lock()
			defer server.early.mu.Unlock()
			return len(server.early.kept) == n
		})
	}
	fresh := dialRaw(t, server, "ps9")
	for ts := range 2 {
		fresh.send(packed(t, push(8, ts, nil)))
	}
	kept(2)
	rec.Endpoint = nil
	if err := server.Connect(t.Context(), 9, rec); err != nil {
		t.Fatal(err)
	}
	server.early.mu.Lock()
	server.early.most = 0
	server.early.mu.Unlock()
	server.early.expire() // too late for other processes, not for the process to be admitted next
	server.Admit(9)
	fresh.send(packed(t, push(8, 2, nil)))
	for want := range 3 {
		if m := server.next(t); m.Sender != 9 || int(m.Timestamp) != want {
			t.Fatalf("got message %d of %d, want %d of 9", m.Timestamp, m.Sender, want)
		}
	}
}

// TestControlOfReplaced: control messages of a replaced process are handed up, so that the process can be
// notified.
func TestControlOfReplaced(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, nil)
	for _, incarnation := range []uint32{1, 2} {
		if err := scheduler.Connect(t.Context(), 9, van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1,
			Endpoint: (&van.NodeExtension{Incarnation: incarnation}).Encode()}); err != nil {
			t.Fatal(err)
		}
	}
	r := dialRaw(t, scheduler, "ps9.00000001")
	r.send(packed(t, heartbeat(1, 4)))
	if m := scheduler.next(t); m.Sender != 9 || m.Timestamp != 4 {
		t.Errorf("got message %d of %d, want 4 of 9", m.Timestamp, m.Sender)
	}
}

// TestNameForAnother: of a process whose name is for another process at this address, such as a former scheduler, only control
// messages are handed up: it learns then which process is here. It is not taken for the peer, whose name it has otherwise.
func TestNameForAnother(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	if err := server.Connect(t.Context(), 9, van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1,
		Endpoint: (&van.NodeExtension{Incarnation: 7}).Encode()}); err != nil {
		t.Fatal(err)
	}
	r := dialRaw(t, server, "ps9.00000007.00000006")
	r.send(packed(t, push(8, 1, nil)))
	r.send(packed(t, push(8, 2, nil)))
	r.send(packed(t, heartbeat(8, 5)))
	if m := server.next(t); m.Sender != 9 || m.Timestamp != 5 {
		t.Errorf("got message %d of %d, want 5 of 9", m.Timestamp, m.Sender)
	}
	if c := (*server.peers.Load())[9]; c.seen() {
		t.Error("its connection counts as the peer's")
	}
	if s := server.Stats(); s.FencedMessages == 0 {
		t.Errorf("its data counts nowhere: %+v", s)
	}
}

// watched makes a worker with heartbeats and returns what its van says of its peers.
func watched(t *testing.T) (*node, chan error) {
	t.Helper()
	cfg := env.Default()
	cfg.HeartbeatInterval, cfg.HeartbeatTimeout = time.Second, 2*time.Second
	v, err := New(van.Options{Config: cfg, Incarnation: 7})
	if err != nil {
		t.Fatal(err)
	}
	lost := make(chan error, 16)
	v.(*zvan).WatchPeers(func(id int, up bool, cause error) {
		if !up {
			lost <- fmt.Errorf("%d: %w", id, cause)
		}
	})
	if _, err := v.Bind(t.Context(), van.Node{Role: van.Worker, ID: van.Empty, Hostname: "127.0.0.1"}); err != nil {
		t.Fatal(err)
	}
	v.SetID(9)
	v.Start(func(*van.Message) {})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		_ = v.Close(ctx)
	})
	return &node{zvan: v.(*zvan)}, lost
}

// TestGoneWhileNotRead: a server that goes while its worker does not read what it has sent is
// noticed. libzmq 4.3.4 ended the process at the next heartbeat where it had stopped to read, too.
func TestGoneWhileNotRead(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	release := make(chan struct{})
	lost := make(chan error, 1)
	worker := newNode(t, 9, 7, func(*van.Message) { <-release }, func(c *env.Config) {
		c.HeartbeatInterval, c.HeartbeatTimeout = 100*time.Millisecond, limit
		c.RecvBudgetPeer = 1 << 20
	})
	defer close(release)
	worker.WatchPeers(func(_ int, up bool, cause error) {
		if !up {
			select {
			case lost <- cause:
			default:
			}
		}
	})
	link(t, server, worker)
	worker.must(t, push(8, 0, nil))
	server.next(t)
	for i := range 5000 {
		m := push(9, i, make([]byte, 1000))
		m.Request = false
		server.must(t, m)
	}
	until(t, "pause", func() bool { return worker.Stats().PausedReads > 0 })
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_ = server.Close(ctx)
	noticed(t, lost, time.Now())
	<-time.After(10 * worker.cfg.HeartbeatInterval) // one found the connection broken, the next one ended the process
}

// TestGoneWhileLeaving: a peer that answers and goes while a node that closes waits for it to
// take the last messages. A socket of libzmq that was closed reads its connection no more, so
// version 4.3.4 ended the process there, too.
func TestGoneWhileLeaving(t *testing.T) {
	worker, peer, name := full(t, nil)
	done := make(chan error, 1)
	go func() {
		done <- worker.Close(context.Background())
	}()
	until(t, "end of the table of peers", func() bool { return worker.closed.Load() && len(*worker.peers.Load()) == 0 })
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range 200 { // before and behind the moment at which the socket is closed
		<-tick.C
		if _, err := peer.SendMessage(name, "an answer"); err != nil {
			t.Fatal(err)
		}
	}
	if err := peer.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(limit):
		t.Fatal("Close has not ended")
	}
}

// full makes a worker, which reports its connections to watch, and its peer 8, which does not read. 64 MiB are on
// the way to the peer. name is the worker's routing id there.
func full(t *testing.T, watch func(id int, up bool, cause error)) (worker *node, peer *zmq4.Socket, name []byte) {
	t.Helper()
	ctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	peer, err = ctx.NewSocket(zmq4.ROUTER)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = peer.Close() // the test may have done it
		if err := ctx.Term(); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(peer.SetRcvhwm(1), peer.SetRouterMandatory(1), peer.SetLinger(0), peer.Bind("tcp://127.0.0.1:*")); err != nil {
		t.Fatal(err)
	}
	at, err := peer.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(at[strings.LastIndex(at, ":")+1:])
	if err != nil {
		t.Fatal(err)
	}
	worker = newNode(t, 9, 7, nil, func(c *env.Config) {
		c.HeartbeatInterval, c.HeartbeatTimeout = 100*time.Millisecond, limit
	})
	worker.watch = watch
	server := van.Node{Role: van.Server, ID: 8, Hostname: "127.0.0.1", Port: port, Endpoint: (&van.NodeExtension{Incarnation: 5}).Encode()}
	if err := worker.Connect(t.Context(), 8, server); err != nil {
		t.Fatal(err)
	}
	if name, err = peer.RecvBytes(0); err != nil {
		t.Fatal(err)
	}
	for i := range 64 {
		worker.must(t, push(8, i, make([]byte, 1<<20)))
	}
	return worker, peer, name
}

// TestLeavingIsNoLoss: the end of a connection that this node ends is not reported, also if the peer ends it
// while the last messages leave.
func TestLeavingIsNoLoss(t *testing.T) {
	var left, told atomic.Bool
	worker, peer, _ := full(t, func(id int, up bool, cause error) {
		if left.Load() {
			t.Errorf("reported node %d, up: %t, cause %v", id, up, cause)
		}
		told.Store(true)
	})
	until(t, "the report of the connection", told.Load)
	c := (*worker.peers.Load())[8]
	left.Store(true)
	worker.Disconnect(8)
	if err := peer.Close(); err != nil {
		t.Fatal(err)
	}
	until(t, "its end", c.lost.Load)
	worker.wg.Wait()
}

func noticed(t *testing.T, lost chan error, since time.Time) {
	t.Helper()
	select {
	case err := <-lost:
		if e := (*van.ConnectionError)(nil); !errors.As(err, &e) || e.Incarnation != 5 {
			t.Errorf("the error %v does not name process 5", err)
		}
		t.Logf("noticed after %s: %v", time.Since(since), err)
	case <-time.After(limit):
		t.Fatalf("nobody noticed within %s", limit)
	}
}

// TestSilentHost: a peer that sends nothing any more, though its connection stands, is noticed while requests are
// under way and while none are.
func TestSilentHost(t *testing.T) {
	for name, busy := range map[string]bool{"idle": false, "requests under way": true} {
		t.Run(name, func(t *testing.T) {
			server := newNode(t, 8, 5, nil, nil)
			worker, lost := watched(t)
			proxy, cut := proxyTo(t, server.self.Addr())
			rec := server.self
			rec.Port = proxy
			if err := worker.Connect(t.Context(), 8, rec); err != nil {
				t.Fatal(err)
			}
			worker.must(t, push(8, 1, make([]byte, 1000)))
			server.next(t)
			cut()
			since := time.Now()
			if busy {
				for i := range 10 {
					worker.must(t, push(8, 2+i, make([]byte, 1<<20)))
				}
			}
			noticed(t, lost, since)
		})
	}
}

// proxyTo forwards one connection to addr until cut is called. Then it forwards nothing.
func proxyTo(t *testing.T, addr string) (port int, cut func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex // held while something is forwarded, and once cut
	var conns []net.Conn
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		d, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		conns = append(conns, c, d)
		forward := func(to, from net.Conn) {
			buf := make([]byte, 64<<10)
			for {
				n, err := from.Read(buf)
				if err != nil {
					return
				}
				mu.Lock()
				_, err = to.Write(buf[:n])
				mu.Unlock()
				if err != nil {
					return
				}
			}
		}
		go forward(d, c)
		forward(c, d)
	}()
	locked := false
	t.Cleanup(func() {
		if locked {
			mu.Unlock()
		}
		_ = l.Close()
		for _, c := range conns {
			_ = c.Close()
		}
	})
	return l.Addr().(*net.TCPAddr).Port, func() { mu.Lock(); locked = true }
}

// TestKilledWithChild: a killed process is noticed though a forked child of it holds all its sockets open.
func TestKilledWithChild(t *testing.T) {
	if os.Getenv("STEPAF_TEST_PARENT") != "" {
		parent(t)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestKilledWithChild$", "-test.v")
	cmd.Env = append(os.Environ(), "STEPAF_TEST_PARENT=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := func(prefix string) string {
		var b [1]byte
		for s := ""; ; {
			if _, err := out.Read(b[:]); err != nil {
				t.Fatalf("%q: %v", s, err)
			}
			if b[0] != '\n' {
				s += string(b[0])
				continue
			}
			if v, ok := strings.CutPrefix(s, prefix); ok {
				return v
			}
			s = ""
		}
	}
	port, err := strconv.Atoi(line("port "))
	if err != nil {
		t.Fatal(err)
	}
	worker, lost := watched(t)
	rec := van.Node{Role: van.Server, ID: 8, Hostname: "127.0.0.1", Port: port, Endpoint: (&van.NodeExtension{Incarnation: 5}).Encode()}
	if err := worker.Connect(t.Context(), 8, rec); err != nil {
		t.Fatal(err)
	}
	worker.must(t, push(8, 1, make([]byte, 1000)))
	line("message")
	fmt.Fprintln(in, "fork")
	child, err := strconv.Atoi(line("child "))
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(child, syscall.SIGKILL)
	_ = cmd.Process.Kill()
	_, _ = cmd.Process.Wait()
	since := time.Now()
	select {
	case err := <-lost:
		t.Fatalf("noticed at once (%v): the child does not hold the connection open", err)
	case <-time.After(100 * time.Millisecond):
	}
	noticed(t, lost, since)
}

// parent is the process that is killed.
func parent(t *testing.T) {
	n := newNode(t, 8, 5, nil, nil)
	fmt.Printf("port %d\n", n.self.Port)
	n.next(t)
	fmt.Println("message")
	fmt.Scanln(new(string))
	cmd := exec.Command("sleep", "60")
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range fds {
		fd, _ := strconv.Atoi(e.Name())
		if link, _ := os.Readlink("/proc/self/fd/" + e.Name()); strings.HasPrefix(link, "socket:") {
			if dup, err := syscall.Dup(fd); err == nil {
				cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(uintptr(dup), link))
			}
		}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	fmt.Printf("child %d\n", cmd.Process.Pid)
	select {}
}

// bare is a van without sockets.
func bare() *zvan {
	v := &zvan{}
	v.log = slog.New(slog.DiscardHandler)
	v.flow.n, v.early.n, v.early.flow = &v.shared, &v.shared, &v.flow
	return v
}

// TestEarlyMessagesStayInFront: a new message of a process that is known by now is queued after the pending messages of that
// process, once. If the process has no pending messages, the new message is not queued.
func TestEarlyMessagesStayInFront(t *testing.T) {
	v, c := bare(), &conn{incarnation: 7}
	c.admitted.Store(true)
	v.peers.Store(&map[int]*conn{9: c, 11: c})
	from := func(id int) *van.Message {
		m := &van.Message{}
		m.Reset()
		m.Sender = id
		return m
	}
	e, first, behind := &v.early, from(9), from(9)
	e.most = time.Hour
	if e.keep(first, peerName{9, 7}) {
		t.Error("a message is kept though nothing is before it")
	}
	e.ready = append(e.ready, first)
	if e.keep(from(11), peerName{11, 7}) {
		t.Error("a message is kept behind another node's")
	}
	if !e.keep(behind, peerName{9, 7}) {
		t.Error("a message overtakes one that is kept")
	}
	for i, want := range []*van.Message{first, behind, nil} {
		if got := e.next(); got != want {
			t.Errorf("message %d that is ready: %v, want %v", i, got, want)
		}
	}
	if n := len(e.kept); n != 0 {
		t.Errorf("%d messages are kept, want none", n)
	}
}

// freedOf counts how often a message is released.
type freedOf int

func (n *freedOf) Free(*van.Message) { *n++ }

// TestEarlyMessages: messages of a process that this node does not know yet wait until that process is admitted, or until their
// limit. Messages that are dropped at the limit, by close, or after close are released once.
func TestEarlyMessages(t *testing.T) {
	v := bare()
	next, stranger := &conn{incarnation: 7}, &conn{incarnation: 1}
	next.who.Store(&identity{id: 9})
	v.peers.Store(&map[int]*conn{9: next, 11: stranger})
	e := &v.early
	e.most = time.Hour
	defer func() { e.close() }()
	var freed [6]freedOf
	said := func(want ...freedOf) {
		t.Helper()
		for i, n := range want {
			if freed[i] != n {
				t.Errorf("message %d was given back %d times, want %d", i, freed[i], n)
			}
		}
	}
	keep := func(i int, name peerName) {
		t.Helper()
		m := &van.Message{}
		m.Reset()
		m.Sender, m.Timestamp = name.id, int32(i)
		f := new(frames)
		f.setWeight(10, true)
		v.flow.strange.Add(10)
		m.Adopt(&freed[i], unsafe.Pointer(f))
		if !e.keep(m, name) {
			t.Errorf("message %d is not kept", i)
		}
	}
	age := func(d time.Duration) {
		e.mu.Lock()
		for i := range e.kept {
			e.kept[i].at -= uint64(d)
		}
		e.mu.Unlock()
	}
	keep(0, peerName{9, 7})
	keep(1, peerName{9, 8}) // it will take the place of 7
	keep(2, peerName{11, 7})
	keep(3, peerName{9, 7})
	if e.timer == nil {
		t.Error("nothing looks after what is kept")
	}
	age(time.Hour - time.Minute)
	e.expire()
	said(0, 0, 0, 0)
	age(2 * time.Minute)
	e.expire() // 7 is about to be admitted
	said(0, 1, 1, 0)
	if n := v.stats.stale.Load(); n != 2 {
		t.Errorf("%d are counted as dropped, want 2", n)
	}
	if e.timer == nil {
		t.Error("nothing looks after what is kept still")
	}
	if e.next() != nil {
		t.Error("a message is ready before its process is admitted")
	}
	keep(1, peerName{9, 8})
	v.Admit(9)
	keep(4, peerName{9, 7}) // behind those
	if m := e.next(); m == nil || m.Timestamp != 0 {
		t.Errorf("first comes %v, want message 0", m)
	} else {
		m.Release()
	}
	if len(e.kept) != 1 || len(e.ready) != 2 {
		t.Errorf("%d are kept and %d ready, want 1 and 2", len(e.kept), len(e.ready))
	}
	e.close()
	said(1, 2, 1, 1, 1)
	keep(5, peerName{9, 8})
	said(1, 2, 1, 1, 1, 1)
	if n := v.flow.strange.Load(); n != 40 { // messages dropped by close are no longer counted for any peer
		t.Errorf("%d bytes are counted, want those of the four that did not expire", n)
	}
	if e.next() != nil || len(e.kept) > 0 {
		t.Error("something is left at the end")
	}
}

// TestSucceed: a connection that is made again to the same process is what the one before was; one to another process
// waits to be admitted, and remembers which was before it.
func TestSucceed(t *testing.T) {
	for _, admitted := range []bool{false, true} {
		old, again, next := &conn{incarnation: 7}, &conn{incarnation: 7}, &conn{incarnation: 8}
		old.before.Store(6)
		old.admitted.Store(admitted)
		next.admitted.Store(true)
		again.succeed(old)
		next.succeed(old)
		if again.before.Load() != 6 || again.admitted.Load() != admitted {
			t.Errorf("made again: before it %d, admitted %t; want 6, %t", again.before.Load(), again.admitted.Load(), admitted)
		}
		if next.before.Load() != 7 || next.admitted.Load() {
			t.Errorf("another: before it %d, admitted %t; want 7, false", next.before.Load(), next.admitted.Load())
		}
	}
}

// TestEarlyMessagesExpire: each message is checked when its time is over, also messages after the first. The hours are
// those of the bubble, whose clock advances when all its goroutines are idle.
func TestEarlyMessagesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := bare()
		v.peers.Store(&map[int]*conn{})
		v.early.most = time.Hour
		var freed [4]freedOf
		for i := range freed {
			m := &van.Message{}
			m.Reset()
			m.Adopt(&freed[i], unsafe.Pointer(new(frames)))
			if i == 3 {
				time.Sleep(2 * time.Hour) // the other processes have left
			}
			v.early.keep(m, peerName{9, 7})
			time.Sleep(20 * time.Minute)
		}
		said := func(want [4]freedOf) {
			t.Helper()
			v.early.mu.Lock()
			defer v.early.mu.Unlock()
			if freed != want {
				t.Errorf("given back %v times, want %v", freed, want)
			}
		}
		said([4]freedOf{1, 1, 1, 0})
		time.Sleep(50 * time.Minute)
		said([4]freedOf{1, 1, 1, 1})
		v.early.close()
	})
}
