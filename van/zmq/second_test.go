package zmq

import (
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// workerRecord is the record of worker 0 at a port without a listener; incarnation 0 means a C++ StepMesh node.
func workerRecord(incarnation uint32, port int) van.Node {
	rec := van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: port}
	if incarnation != 0 {
		rec.Endpoint = (&van.NodeExtension{Incarnation: incarnation}).Encode()
	}
	return rec
}

// of9 is the routing id of the process of workerRecord.
func of9(incarnation uint32) string { return peerName{9, incarnation}.String() }

// small sets the budget of unauthenticated connections in these tests. A few messages of a member exceed it.
func small(c *env.Config) { c.StrangerBudget = 64 << 10 }

// dialFrom is dialRaw from another address of this host.
func dialFrom(t *testing.T, n *node, host, id string) *raw {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}, Timeout: limit}
	c, err := d.Dial("tcp", n.self.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	r := &raw{c, t}
	r.shake("DEALER", id)
	return r
}

// has reports whether r is one of the connections of c's peer.
func has(n *node, c *conn, r *raw) (ok bool) {
	for _, s := range n.guard.of(c) {
		s.use(func(fd int) {
			a, err := unix.Getpeername(fd)
			ok = ok || err == nil && addrOf(a).String() == r.LocalAddr().String()
		})
	}
	return ok
}

// pushOf sends a push of size bytes and waits until it was handed up.
func pushOf(t *testing.T, server *node, r *raw, ts, size int) {
	t.Helper()
	r.send(packed(t, push(8, ts, nil)), make([]byte, 8), make([]byte, size))
	m := server.next(t)
	if m.Sender != 9 || int(m.Timestamp) != ts || m.Vals.Len() != size {
		t.Fatalf("got message %d of %d with %d bytes, want %d of 9 with %d", m.Timestamp, m.Sender, m.Vals.Len(), ts, size)
	}
	m.Release()
}

// TestSecondConnection: a member connects again while its former connection is still open. Either only the member
// noticed a network failure, or a C++ StepMesh process replaces a stopped one. The new connection is the member's
// from its first message on. It carries more bytes than an unauthenticated connection may, and ends only when the
// member ends it.
func TestSecondConnection(t *testing.T) {
	for name, x := range map[string]struct {
		incarnation uint32
		replaced    bool // by a process at another address
	}{
		"of this library":                       {7, false},
		"of the original":                       {0, false},
		"a replacement process of the original": {0, true},
	} {
		t.Run(name, func(t *testing.T) {
			server := newNode(t, 8, 5, nil, small)
			connect := func(port int) *conn {
				t.Helper()
				if err := server.Connect(t.Context(), 9, workerRecord(x.incarnation, port)); err != nil {
					t.Fatal(err)
				}
				return (*server.peers.Load())[9]
			}
			c := connect(1)
			first := dialRaw(t, server, of9(x.incarnation))
			pushOf(t, server, first, 0, 100)
			for round := range 3 {
				if x.replaced {
					c = connect(2 + round)
				}
				next := dialRaw(t, server, of9(x.incarnation))
				for ts := range 8 {
					pushOf(t, server, next, ts, 32<<10)
				}
				server.guard.mu.Lock()
				held := server.guard.held
				server.guard.mu.Unlock()
				if held != 0 {
					t.Errorf("strangers hold %d bytes, want none", held)
				}
				if !has(server, c, next) {
					t.Errorf("the connection is not among the worker's %d", len(server.guard.of(c)))
				}
				if want := 2 + round; !x.replaced && len(server.guard.of(c)) != want {
					t.Errorf("the worker has %d connections, want %d", len(server.guard.of(c)), want)
				}
				if x.replaced && len(server.guard.of(c)) != 1 {
					t.Errorf("the worker has %d connections, want 1: the others are of former processes", len(server.guard.of(c)))
				}
			}
			if n := server.Stats().DroppedUnknown; n != 0 {
				t.Errorf("%d connections were ended as a stranger's, want none", n)
			}
		})
	}
}

// TestConnectionsOfMemberEnd: a member counts as connected while one of its connections is open. The order in
// which its connections end does not matter.
func TestConnectionsOfMemberEnd(t *testing.T) {
	for name, order := range map[string][2]int{"first": {0, 1}, "last": {1, 0}} {
		t.Run(name, func(t *testing.T) {
			server := newNode(t, 8, 5, nil, small)
			if err := server.Connect(t.Context(), 9, workerRecord(7, 1)); err != nil {
				t.Fatal(err)
			}
			c := (*server.peers.Load())[9]
			var r [2]*raw
			for i := range r {
				r[i] = dialRaw(t, server, of9(7))
				pushOf(t, server, r[i], i, 100)
			}
			_ = r[order[0]].Close()
			until(t, "end of one", func() bool { return len(server.guard.of(c)) == 1 })
			if !c.seen() {
				t.Error("one of two connections has ended, and the member is not seen")
			}
			if order[0] == 0 { // otherwise libzmq no longer reads the other connection
				for ts := range 8 {
					pushOf(t, server, r[1], ts, 32<<10)
				}
			}
			_ = r[order[1]].Close()
			until(t, "end of the other", func() bool { return !c.seen() })
			if n := server.Stats().DroppedUnknown; n != 0 {
				t.Errorf("%d connections were ended as a stranger's, want none", n)
			}
		})
	}
}

// TestLongFirstMessageOfSecondConnection: a connection of a C++ StepMesh process does not identify the process
// before its first message is complete. One connection from the host of such a worker is not ended, with a first
// message of any length. A second one, and connections from other hosts, count as unauthenticated.
func TestLongFirstMessageOfSecondConnection(t *testing.T) {
	server := newNode(t, 8, 5, nil, small)
	if err := server.Connect(t.Context(), 9, workerRecord(0, 1)); err != nil {
		t.Fatal(err)
	}
	first := dialRaw(t, server, of9(0))
	pushOf(t, server, first, 0, 100)
	next := dialRaw(t, server, of9(0))
	meta, head, vals := packed(t, push(8, 1, nil)), make([]byte, 8), frame(make([]byte, 1<<20), false)
	half := append(append(frame(meta, true), frame(head, true)...), vals[:512<<10]...)
	if _, err := next.Write(half); err != nil {
		t.Fatal(err)
	}
	held := func(want int64) func() bool {
		return func() bool {
			server.guard.mu.Lock()
			defer server.guard.mu.Unlock()
			return server.guard.held >= want
		}
	}
	until(t, "half of the message", held(500<<10))
	for i, stranger := range []*raw{dialFrom(t, server, "127.0.0.2", ""), dialRaw(t, server, "")} {
		_, _ = stranger.Write(frame(make([]byte, 256<<10), true))
		until(t, "end of the stranger", func() bool { return server.Stats().DroppedUnknown == uint64(i+1) })
	}
	if _, err := next.Write(vals[512<<10:]); err != nil {
		t.Fatal(err)
	}
	if m := server.next(t); m.Sender != 9 || m.Timestamp != 1 {
		t.Fatalf("got message %d of %d, want 1 of 9", m.Timestamp, m.Sender)
	}
	pushOf(t, server, next, 2, 256<<10)
	if n := server.Stats().DroppedUnknown; n != 2 {
		t.Errorf("%d connections were ended, want 2", n)
	}
}

// TestSecondConnectionWhileNotRead: the node reads no messages, since messages that wait for a handler have used
// up its budget. The messages on a worker's second connection meanwhile do not count as unauthenticated, and are
// delivered later.
func TestSecondConnectionWhileNotRead(t *testing.T) {
	const most, size = 2 << 20, 64 << 10
	release, got := make(chan struct{}), make(chan int32, 256)
	server := newNode(t, 8, 5, func(m *van.Message) { <-release; got <- m.Timestamp }, func(c *env.Config) {
		c.StrangerBudget = 512 << 10
		c.RecvBudget, c.RecvBudgetPeer = most, most
	})
	if err := server.Connect(t.Context(), 9, workerRecord(7, 1)); err != nil {
		t.Fatal(err)
	}
	ts := 0
	say := func(r *raw) {
		r.send(packed(t, push(8, ts, nil)), make([]byte, 8), make([]byte, size))
		ts++
	}
	c := (*server.peers.Load())[9]
	first := dialRaw(t, server, of9(7))
	first.send(nil) // as nodes of this library do: the server attributes the connection to worker 9 before it has many bytes
	until(t, "first connection", func() bool { return has(server, c, first) })
	for range 2 * most / size {
		say(first)
	}
	until(t, "budget used up", func() bool { return server.flow.router.Used() >= most && !server.flow.drained.Load() })
	next := dialRaw(t, server, of9(7))
	for range 16 {
		say(next)
	}
	until(t, "bytes of the second connection", func() bool {
		server.guard.mu.Lock()
		held := server.guard.held
		server.guard.mu.Unlock()
		return held >= 16*size || has(server, c, next)
	})
	close(release)
	end := time.After(limit)
	for want := ts - 16; want < ts; { // messages of the first connection may be lost with it
		select {
		case at := <-got:
			if int(at) == want {
				want++
			}
		case <-end:
			t.Fatalf("message %d was not handed up within %s; %d connections were ended as a stranger's", want, limit, server.Stats().DroppedUnknown)
		}
	}
}
