package zmq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

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

// TestEarlyMessagesBeyondTheBudget: messages of a replacement process that this node does not know yet, and that wait for the handler,
// are dropped when they exceed STEPAF_STRANGER_BUDGET. The node gets each of them, with the reason; the others are handed up.
func TestEarlyMessagesBeyondTheBudget(t *testing.T) {
	type report struct {
		sender, ts int
		why        string
	}
	dropped, release, taken := make(chan report, 8), make(chan struct{}), make(chan int32, 8)
	server := newNodeWith(t, 8, 0, func(m *van.Message) {
		<-release
		taken <- m.Timestamp
	}, small, van.Options{Incarnation: 5, OnDropped: func(m *van.Message, why string) {
		dropped <- report{m.Sender, int(m.Timestamp), why}
	}})
	if err := server.Connect(t.Context(), 9, workerRecord(1, 1)); err != nil {
		t.Fatal(err)
	}
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
	close(release)
	for want := range int32(2) {
		if got := <-taken; got != want {
			t.Errorf("got message %d, want %d", got, want)
		}
	}
}

// TestReplaced: data of a replaced process is dropped under any name that the process has, and the process gets no answers of its
// replacement. Data that another process sends is handed up, also before this node knows it: the layers above check its incarnation.
// Answers of a process that this node does not know are dropped.
func TestReplaced(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	connect := func(incarnation uint32) {
		if err := server.Connect(t.Context(), 9, workerRecord(incarnation, 1)); err != nil {
			t.Fatal(err)
		}
	}
	connect(1)
	old := dialRaw(t, server, "ps9.00000001")
	say := func(r *raw, ts int) { r.send(packed(t, push(8, ts, nil))) }
	hear := func(incarnation uint32, want ...int) { // incarnation: that of a message whose sender was not known
		t.Helper()
		for _, ts := range want {
			m := server.next(t)
			if from, _ := m.Incarnations(); m.Sender != 9 || int(m.Timestamp) != ts || from != incarnation {
				t.Errorf("got message %d of %d with incarnation %d, want %d of 9 with %d", m.Timestamp, m.Sender, from, ts, incarnation)
			}
		}
	}
	say(old, 1)
	hear(0, 1)
	fresh := dialRaw(t, server, "ps9.00000002")
	say(fresh, 100)
	pull := push(8, 7, nil)
	pull.Request, pull.Push = false, false
	fresh.send(packed(t, pull)) // an answer
	say(fresh, 101)
	hear(2, 100, 101)
	until(t, "refusal", func() bool { return server.Stats().FencedMessages == 1 })
	connect(2)
	say(fresh, 102)
	hear(0, 102)
	say(old, 2)
	until(t, "refusal", func() bool { return server.Stats().FencedMessages == 2 })
	say(dialRaw(t, server, "ps9"), 3) // as a node of the original
	hear(0, 3)
	say(dialRaw(t, server, "ps9.00000003"), 4) // as an unknown process
	hear(3, 4)
	say(fresh, 103)
	hear(0, 103)
	server.says(t, "dropped a message of a process that was replaced")
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
	until(t, "no bytes of strangers are counted", func() bool { return server.flow.strange.Load() == 0 })
}

// TestReplacedByOriginal: data that a process of the original sends under the id of a process of this library is handed up without
// incarnations, whatever the process puts in their place. When this node knows the process, its data is handed up as it is.
func TestReplacedByOriginal(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	rec := workerRecord(1, 1)
	connect := func() {
		if err := server.Connect(t.Context(), 9, rec); err != nil {
			t.Fatal(err)
		}
	}
	connect()
	fresh := dialRaw(t, server, "ps9")
	say := func(ts int) (from, to uint32) {
		m := push(8, ts, nil)
		m.SetIncarnations(1, 5)
		fresh.send(packed(t, m))
		got := server.next(t)
		if got.Sender != 9 || int(got.Timestamp) != ts {
			t.Fatalf("got message %d of %d, want %d of 9", got.Timestamp, got.Sender, ts)
		}
		return got.Incarnations()
	}
	if from, to := say(0); from != 0 || to != 0 {
		t.Errorf("incarnations %d and %d, want none", from, to)
	}
	rec.Endpoint = nil
	connect()
	if from, to := say(1); from != 1 || to != 5 {
		t.Errorf("incarnations %d and %d, want 1 and 5", from, to)
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

// TestSucceed: a connection that is made again to the same process is what the one before was; one to another process
// remembers which was before it, and answers over the ROUTER if that process has sent a request already.
func TestSucceed(t *testing.T) {
	for _, requested := range []uint32{0, 8, 9} {
		old, again, next := &conn{incarnation: 7}, &conn{incarnation: 7}, &conn{incarnation: 8}
		old.before.Store(6)
		old.next.Store(requested)
		old.answers.Store(overDealer)
		again.succeed(old)
		next.succeed(old)
		if again.before.Load() != 6 || again.next.Load() != requested || again.answers.Load() != overDealer {
			t.Errorf("made again: before it %d, after it %d, answers %d; want 6, %d, %d", again.before.Load(), again.next.Load(), again.answers.Load(), requested, overDealer)
		}
		want := int32(undecided)
		if requested == 8 {
			want = overRouter
		}
		if next.before.Load() != 7 || next.next.Load() != 0 || next.answers.Load() != want {
			t.Errorf("another: before it %d, after it %d, answers %d; want 7, 0, %d", next.before.Load(), next.next.Load(), next.answers.Load(), want)
		}
	}
}
