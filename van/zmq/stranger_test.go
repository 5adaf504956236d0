package zmq

import (
	"fmt"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// endless sends frames of one message that never ends until the connection breaks, and
// returns how many bytes it got rid of.
func endless(r *raw) (sent int64) {
	f := frame(make([]byte, 1<<20), true)
	_ = r.SetDeadline(time.Now().Add(limit))
	for sent < 512<<20 {
		n, err := r.Write(f)
		sent += int64(n)
		if err != nil {
			break
		}
	}
	return sent
}

// receives returns a function that tells how many bytes n's system has taken from r, also after the
// connection has ended: n cannot hold more of them.
func receives(t *testing.T, n *node, r *raw) func() int64 {
	t.Helper()
	_, accepted := ends(t, n.self.Port)
	for fd := range accepted {
		if a, err := unix.Getpeername(fd); err != nil || addrOf(a).String() != r.LocalAddr().String() {
			continue
		}
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(dup) })
		return func() int64 {
			info, err := unix.GetsockoptTCPInfo(dup, unix.IPPROTO_TCP, unix.TCP_INFO)
			if err != nil {
				t.Fatal(err)
			}
			return int64(info.Bytes_received)
		}
	}
	t.Fatalf("no connection from %s", r.LocalAddr())
	return nil
}

// TestEndlessMessage: an unknown peer whose message never ends loses its connection before the node holds twice
// the budget, the memory is released, and a member notices nothing. On a busy machine the guard may not run while
// 16 MiB arrive, which takes some milliseconds. The test therefore passes if the guard is in time for one of three
// peers.
func TestEndlessMessage(t *testing.T) {
	const most = 32 << 20 // twice the default budget
	for name, id := range map[string]string{"no id": "", "not canonical": "ps09", "not in the table": "ps11"} {
		t.Run(name, func(t *testing.T) {
			scheduler, member := newNode(t, 1, 5, nil, nil), newNode(t, 9, 7, nil, nil)
			link(t, scheduler, member)
			member.must(t, heartbeat(1, 1))
			scheduler.next(t)
			before := resident(t)
			for i := range 3 {
				stranger := dialRaw(t, scheduler, id)
				received := receives(t, scheduler, stranger)
				// The sent bytes include a few MiB in the system's buffers.
				if sent := endless(stranger); sent > 48<<20 {
					t.Errorf("the stranger got rid of %d MiB", sent>>20)
				}
				if n := scheduler.Stats().DroppedUnknown; n != uint64(i+1) {
					t.Errorf("%d connections were ended, want %d", n, i+1)
				}
				until(t, "line of the log", func() bool { return len(counted(scheduler)) > 0 }) // of the first one
				if received() < most {
					break
				}
				t.Logf("the node has received %d MiB", received()>>20)
				if i == 2 {
					t.Errorf("the node has received %d MiB and more of each of 3 strangers, want less", most>>20)
				}
			}
			// The guard's own count; log lines of later connections are suppressed.
			if held := counted(scheduler)[0]; held <= most/2 || held >= most && scheduler.Stats().DroppedUnknown == 1 {
				t.Errorf("the node counted %d bytes when it ended the first connection, want more than the default budget and less than twice that", held)
			}
			until(t, "memory given back", func() bool { return resident(t)-before < 8<<20 })
			member.must(t, heartbeat(1, 2))
			if m := scheduler.next(t); m.Sender != 9 || m.Timestamp != 2 {
				t.Errorf("got message %d of %d, want 2 of 9", m.Timestamp, m.Sender)
			}
		})
	}
}

// counted are the held bytes that n logged when it closed connections of unknown peers.
func counted(n *node) (l []int64) {
	for line := range strings.Lines(n.logged.String()) {
		if _, text, ok := strings.Cut(line, `"bytes of unfinished messages"=`); ok && strings.Contains(line, "closed the connection of an unknown process, which is not a member of the cluster") {
			var held int64
			_, _ = fmt.Sscan(text, &held)
			l = append(l, held)
		}
	}
	return l
}

// TestManyStrangers: all unknown peers share one budget.
func TestManyStrangers(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, func(c *env.Config) { c.StrangerBudget = 4 << 20 })
	before := resident(t)
	part := frame(make([]byte, 1<<20), true)
	ended := 0
	for range 20 {
		r := dialRaw(t, scheduler, "")
		_, _ = r.Write(part)
	}
	until(t, "end of connections", func() bool { ended = int(scheduler.Stats().DroppedUnknown); return ended >= 15 })
	if ended > 18 {
		t.Errorf("%d connections were ended, want 16 or so: four are within the budget", ended)
	}
	until(t, "memory given back", func() bool { return resident(t)-before < 16<<20 })
}

// TestNewcomerLeavesTheAccount: after a process has become a member, its unfinished messages do not count as
// unknown peers'.
func TestNewcomerLeavesTheAccount(t *testing.T) {
	server := newNode(t, 8, 5, nil, func(c *env.Config) { c.StrangerBudget = 1 << 20 })
	held := func() int64 {
		server.guard.mu.Lock()
		defer server.guard.mu.Unlock()
		return int64(server.guard.held)
	}
	r := dialRaw(t, server, "ps9.00000007")
	r.send(packed(t, push(8, 0, nil)))
	if _, err := r.Write(frame(make([]byte, 300<<10), true)); err != nil {
		t.Fatal(err)
	}
	until(t, "it counts", func() bool { return held() > 200<<10 })
	rec := van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 7}).Encode()}
	if err := server.Connect(t.Context(), 9, rec); err != nil {
		t.Fatal(err)
	}
	until(t, "it counts no more", func() bool { return held() == 0 })
}

// TestConnectionOfMemberAgain: unread bytes of a member's broken connection do not make its next connection, on
// another descriptor, that of an unknown peer, which would be closed.
func TestConnectionOfMemberAgain(t *testing.T) {
	server := newNode(t, 8, 5, nil, func(c *env.Config) { c.StrangerBudget = 64 << 10 })
	rec := van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 7}).Encode()}
	if err := server.Connect(t.Context(), 9, rec); err != nil {
		t.Fatal(err)
	}
	c := (*server.peers.Load())[9]
	say := func(r *raw, ts int) {
		t.Helper()
		m := push(8, ts, nil)
		m.Body = make([]byte, 16<<10)
		r.send(packed(t, m))
		if m := server.next(t); int(m.Timestamp) != ts {
			t.Fatalf("message %d, want %d", m.Timestamp, ts)
		}
	}
	first := dialRaw(t, server, "ps9.00000007")
	say(first, 0)
	fd := -1
	connections := func(n int) func() bool {
		return func() bool {
			server.guard.mu.Lock()
			defer server.guard.mu.Unlock()
			for fd = range server.guard.conns {
			}
			return len(server.guard.conns) == n
		}
	}
	until(t, "connection", connections(1))
	of := fd
	_ = first.Close()
	until(t, "end of it", func() bool {
		server.guard.mu.Lock()
		in := server.guard.conns[of]
		gone := in != nil && in.gone
		server.guard.mu.Unlock()
		if gone { // libzmq reports it before it closes the descriptor, and the guard has checked in between
			server.guard.gone(of)
		}
		return in == nil
	})
	server.guard.heard(of, 1000, peerName{9, 7}) // as the receiver says
	if c.seen() {
		t.Error("a connection that has ended counts as the worker's")
	}
	taken := false // the descriptor, by a socket of the program's
	for range 64 {
		other, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		raw, err := other.(*net.TCPListener).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		_ = raw.Control(func(fd uintptr) { taken = int(fd) == of })
		if taken {
			break
		}
	}
	if !taken {
		t.Fatalf("nothing took descriptor %d", of)
	}
	server.guard.heard(of, 1000, peerName{9, 7})
	if c.seen() {
		t.Error("a socket that is not the ROUTER's counts as the worker's connection")
	}
	again := dialRaw(t, server, "ps9.00000007")
	for ts := range 20 {
		say(again, 1+ts)
	}
	server.guard.mu.Lock()
	for fd, in := range server.guard.conns {
		of = fd
		if in.name != (peerName{9, 7}) || in.member != c {
			t.Errorf("connection %d is %+v's, want worker 0's", fd, in.name)
		}
	}
	server.guard.mu.Unlock()
	server.guard.heard(of, 1000, peerName{11, 7}) // of another worker, whose connection had this descriptor
	server.guard.mu.Lock()
	if in := server.guard.conns[of]; in.name != (peerName{9, 7}) {
		t.Errorf("a late message of another makes the connection %+v's", in.name)
	}
	server.guard.mu.Unlock()
	// The guard reads its events late: those of the connection that had this descriptor come
	// when it is this one's.
	server.guard.accepted(of)
	server.guard.gone(of)
	server.guard.known(c)
	server.guard.accepted(of)
	server.guard.check(of)
	server.guard.mu.Lock()
	if in := server.guard.conns[of]; in == nil || in.member != c || in.name != (peerName{9, 7}) || in.held != 0 || server.guard.held != 0 {
		t.Errorf("after events of the connection before it: %+v, and strangers hold %d bytes", in, server.guard.held)
	}
	server.guard.mu.Unlock()
	if !c.seen() {
		t.Error("the worker's connection does not count any more")
	}
	if n := server.Stats().DroppedUnknown; n != 0 {
		t.Errorf("%d connections were ended as a stranger's, want none", n)
	}
}

// TestOtherConnection: the guard neither counts nor closes a socket of the program that is connected, but not from
// the ROUTER's port.
func TestOtherConnection(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	other, err := net.Dial("tcp", server.self.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	raw, err := other.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		server.guard.heard(int(fd), 0, peerName{11, 7})
		server.guard.mu.Lock()
		defer server.guard.mu.Unlock()
		if in := server.guard.conns[int(fd)]; in != nil {
			t.Errorf("it counts as a connection of %+v", in.name)
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// TestNamedByRename: a connection with messages from before its process became a member is the member's
// immediately afterwards, and its bytes do not count as an unknown peer's any more.
func TestNamedByRename(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, nil)
	r := dialRaw(t, scheduler, "ps9.00000007")
	m := push(1, 0, nil)
	m.Body = make([]byte, 16<<10)
	r.send(packed(t, m))
	in := func(ok func(*incoming) bool) func() bool {
		return func() bool {
			scheduler.guard.mu.Lock()
			defer scheduler.guard.mu.Unlock()
			for _, in := range scheduler.guard.conns {
				return ok(in)
			}
			return false
		}
	}
	until(t, "message", in(func(in *incoming) bool { return in.name == peerName{9, 7} && in.taken > 0 }))
	rec := van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 7}).Encode()}
	if err := scheduler.Connect(t.Context(), -1, rec); err != nil {
		t.Fatal(err)
	}
	if err := scheduler.Rename(-1, 9); err != nil {
		t.Fatal(err)
	}
	c := (*scheduler.peers.Load())[9]
	if !in(func(in *incoming) bool { return in.member == c && in.held == 0 })() {
		t.Error("the connection is still a stranger's")
	}
}

// TestMessageOfAnEarlierConnection: a message longer than all received bytes of a connection arrived over another
// one, which had the descriptor before.
func TestMessageOfAnEarlierConnection(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	rec := van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 7}).Encode()}
	if err := server.Connect(t.Context(), 9, rec); err != nil {
		t.Fatal(err)
	}
	c := (*server.peers.Load())[9]
	dialRaw(t, server, "ps11.00000003")
	g, of := server.guard, -1
	until(t, "connection", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		for of = range g.conns {
		}
		return of >= 0
	})
	g.heard(of, 100<<10, peerName{9, 7})
	g.mu.Lock()
	defer g.mu.Unlock()
	if in := g.conns[of]; in == nil || in.member != nil || in.taken != 0 || c.seen() {
		t.Errorf("a message of 100 KiB makes a connection that has carried a greeting the worker's: %+v", in)
	}
}

// TestGuardForgets: of a connection that has ended nothing stays in the account, also while its
// descriptor is not closed yet.
func TestGuardForgets(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	g, of := server.guard, -1
	stranger := dialRaw(t, server, "")
	_, _ = stranger.Write(frame(make([]byte, 64<<10), true))
	until(t, "bytes of the stranger", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		for fd, in := range g.conns {
			if in.held >= 60<<10 {
				of = fd
			}
		}
		return of >= 0
	})
	g.gone(of)
	g.check(of) // as if more had arrived
	g.mu.Lock()
	held := g.held
	g.mu.Unlock()
	if held != 0 {
		t.Errorf("strangers hold %d bytes, want none", held)
	}
}

// TestStrangersGiveBack: after unknown peers have disconnected, their unfinished messages do not count any more.
func TestStrangersGiveBack(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, func(c *env.Config) { c.StrangerBudget = 4 << 20 })
	held := func() int64 {
		scheduler.guard.mu.Lock()
		defer scheduler.guard.mu.Unlock()
		return scheduler.guard.held
	}
	part := frame(make([]byte, 3<<20), true)
	for range 3 {
		r := dialRaw(t, scheduler, "")
		_, _ = r.Write(part)
		until(t, "what he holds", func() bool { return held() > 2<<20 })
		_ = r.Close()
		until(t, "end of what he held", func() bool { return held() == 0 })
	}
	if n := scheduler.Stats().DroppedUnknown; n != 0 {
		t.Errorf("%d connections were ended, want none: each was within the budget", n)
	}
}

// TestLongFirstMessage: a member's connection is not an unknown peer's, also before its first message is complete.
func TestLongFirstMessage(t *testing.T) {
	for name, incarnation := range map[string]uint32{"native": 7, "original": 0} {
		t.Run(name, func(t *testing.T) {
			small := func(c *env.Config) { c.StrangerBudget = 64 << 10 }
			server, worker := newNode(t, 8, 5, nil, small), newNode(t, 9, incarnation, nil, small)
			link(t, server, worker)
			for i := range 3 {
				worker.must(t, push(8, i, make([]byte, 32<<20)))
				m := server.next(t)
				if m.Sender != 9 || int(m.Timestamp) != i {
					t.Fatalf("got message %d of %d, want %d of 9", m.Timestamp, m.Sender, i)
				}
				m.Release()
			}
			if n := server.Stats().DroppedUnknown; n != 0 {
				t.Errorf("%d connections were ended", n)
			}
		})
	}
}

// TestMemberComesBack: a member whose connection broke is recognized by the first message on the next connection.
// All later messages there count as the member's.
func TestMemberComesBack(t *testing.T) {
	server := newNode(t, 8, 5, nil, func(c *env.Config) { c.StrangerBudget = 64 << 10 })
	rec := van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 7}).Encode()}
	if err := server.Connect(t.Context(), 9, rec); err != nil {
		t.Fatal(err)
	}
	c := (*server.peers.Load())[9]
	for i := range 3 {
		r := dialRaw(t, server, "ps9.00000007")
		r.send(packed(t, push(8, i, nil)))
		server.next(t).Release()
		until(t, "connection that is the member's", c.seen)
		for k := range 4 { // more than unknown peers may send
			r.send(packed(t, push(8, k, nil)), make([]byte, 8), make([]byte, 64<<10), []byte{0})
			server.next(t).Release()
		}
		_ = r.Close()
		until(t, "end of the connection", func() bool { return !c.seen() })
	}
	if n := server.Stats().DroppedUnknown; n != 0 {
		t.Errorf("%d connections were ended", n)
	}
}

// TestHeardBeforeAccepted: a member's next connection may have the descriptor of the one before,
// and its first message may be handed up before the guard reads that it was accepted. It is the
// member's then, too.
func TestHeardBeforeAccepted(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	rec := van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 7}).Encode()}
	if err := server.Connect(t.Context(), 9, rec); err != nil {
		t.Fatal(err)
	}
	g, c := server.guard, (*server.peers.Load())[9]
	r := dialRaw(t, server, "ps9.00000007")
	of, now := -1, incoming{}
	until(t, "connection", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		for fd, in := range g.conns {
			of, now = fd, *in
		}
		return of >= 0
	})
	for name, before := range map[string]incoming{
		"one that has ended":         {tcpSocket: tcpSocket{of, now.cookie + 1}, name: peerName{9, 7}, member: c, taken: 100, gone: true},
		"one whose end is read late": {tcpSocket: tcpSocket{of, now.cookie}, name: peerName{id: van.Empty}, gone: true},
	} {
		t.Run(name, func(t *testing.T) {
			g.mu.Lock()
			c.arrives.Store(0)
			seen := before.cookie != now.cookie // an ended connection with the same cookie is this connection
			g.conns[of] = &before
			g.mu.Unlock()
			r.send(packed(t, push(8, 0, nil)))
			server.next(t).Release()
			if c.seen() != seen {
				t.Errorf("before the event the worker is seen: %t, want %t", !seen, seen)
			}
			g.accepted(of)
			g.mu.Lock()
			defer g.mu.Unlock()
			if in := g.conns[of]; in.member != c || !c.seen() {
				t.Errorf("the connection is not the worker's after a message on it: %+v", in)
			}
		})
	}
}

// TestNameOfAnotherProcess: a process that has a member's id, and is another process, is an unknown peer.
func TestNameOfAnotherProcess(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	rec := van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 7}).Encode()}
	if err := server.Connect(t.Context(), 9, rec); err != nil {
		t.Fatal(err)
	}
	g, c := server.guard, (*server.peers.Load())[9]
	r := dialRaw(t, server, "ps9.00000006")
	r.send(packed(t, push(8, 0, nil)))
	var of incoming
	until(t, "message", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, in := range g.conns {
			of = *in
		}
		return of.taken > 0
	})
	if of.member != nil || c.seen() {
		t.Errorf("the connection of another process is the member's: %+v", of.name)
	}
}

// TestEndedConnectionForgotten: if the next owner of a descriptor makes the guard forget an ended connection, the
// member's other connection is not affected.
func TestEndedConnectionForgotten(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	g, c := server.guard, new(conn)
	g.mu.Lock()
	defer g.mu.Unlock()
	of := -2 // no descriptors
	ended, other := g.at(of-1, 1), g.at(of, 2)
	ended.member, other.member = c, c
	c.arrives.Store(1)
	g.leave(ended)
	if !c.seen() {
		t.Error("of two connections one has ended, and the member is not seen")
	}
	g.forget(ended)
	if !c.seen() {
		t.Error("a connection that had ended was forgotten, and the member is not seen")
	}
	if g.forget(other); c.seen() {
		t.Error("the member's last connection has ended, and it is seen")
	}
}

// TestStrangersMessages: complete messages of unknown peers count, too, while they wait.
func TestStrangersMessages(t *testing.T) {
	release, entered := make(chan struct{}), make(chan struct{}, 1000)
	n := newNode(t, 1, 5, func(m *van.Message) {
		entered <- struct{}{}
		<-release
	}, func(c *env.Config) { c.StrangerBudget = 1 << 20 })
	r := dialRaw(t, n, "")
	m := heartbeat(1, 0)
	m.Body = make([]byte, 64<<10)
	for i := range 100 {
		r.send(packed(t, m))
		until(t, "receipt", func() bool { return n.Stats().ReceivedMessages == uint64(i+1) })
	}
	if got := n.Stats().DroppedUnknown; got < 80 {
		t.Errorf("%d messages were refused, want more than 80", got)
	}
	n.says(t, "dropped a message of an unknown process")
	close(release)
	until(t, "rest", func() bool { return n.flow.strange.Load() == 0 })
	if got := len(entered); got > 17 {
		t.Errorf("%d messages were handed up, want 1 MiB of 64 KiB each", got)
	}
}

// TestMalformedKeepsNothing: a message that is refused leaves no memory behind, nor does
// a long one that was taken.
func TestMalformedKeepsNothing(t *testing.T) {
	n := newNode(t, 1, 5, nil, func(c *env.Config) { c.StrangerBudget = math.MaxInt32 })
	r := dialRaw(t, n, "")
	m := heartbeat(1, 0)
	m.Body = make([]byte, 16<<20) // it arrives within the time that a silent connection may stay open
	b := packed(t, m)
	m.Body = nil
	before := heapInUse()
	send := func() {
		_ = r.SetDeadline(time.Now().Add(limit)) // each takes long on a busy machine
		r.send(b)
	}
	send()
	n.next(t)
	b[8] = 99 // the command
	for range 3 {
		send()
	}
	b[8] = byte(van.Heartbeat)
	until(t, "refusal", func() bool { return n.Stats().Malformed == 3 })
	n.says(t, "dropped a malformed message")
	if after := heapInUse(); after > before+8<<20 {
		t.Errorf("the heap has grown by %d MiB", (after-before)>>20)
	}
}

// TestFrames: a message has no, two or three data frames.
func TestFrames(t *testing.T) {
	n := newNode(t, 8, 5, nil, nil)
	r := dialRaw(t, n, "ps9")
	meta, data := packed(t, push(8, 0, nil)), make([]byte, 8)
	for i, frames := range [][][]byte{
		{meta, data}, {meta, data, data, data, data}, {meta, data, data, data, data, data, data}, {data}, {{}},
	} {
		r.send(frames...)
		want := uint64(min(i+1, 4)) // the last is an empty message: a greeting
		until(t, "refusal", func() bool { return n.Stats().Malformed == want })
	}
	for _, frames := range [][][]byte{{meta}, {meta, data, data}, {meta, data, data, data}} {
		r.send(frames...)
		if m := n.next(t); m.Sender != 9 {
			t.Errorf("message of %d, want 9", m.Sender)
		}
	}
	if got := n.Stats().Malformed; got != 4 {
		t.Errorf("%d malformed messages, want 4", got)
	}
}
