package tcp

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/links"
)

// TestCancelAfterDisconnect: the memory of canceled requests is the caller's again although their connection still sends its queue after
// Disconnect.
func TestCancelAfterDisconnect(t *testing.T) {
	worker, _, _ := stuck(t, func(o *van.Options) { o.Config.RecvBudgetPeer = 1 << 20 })
	var done atomic.Int32
	const count = 24
	for i := range count {
		m := dataMessage(8, i, true, true, pattern(4<<20, i))
		m.Done = counter{&done}
		worker.must(m)
	}
	worker.Disconnect(8)
	worker.Cancel(van.Requests{First: 0, Count: count})
	if n := done.Load(); n != count {
		t.Errorf("%d of %d values were given back", n, count)
	}
}

// TestConnectAgain: messages sent before Disconnect arrive before messages sent after the next Connect, also if the receiver has not read
// the earlier ones by then.
func TestConnectAgain(t *testing.T) {
	worker, server, open := stuck(t, func(o *van.Options) { o.Config.RecvBudgetPeer = 1 << 20 })
	const count, times = 200, 3
	for k := range times {
		for i := range count {
			worker.must(dataMessage(8, k*count+i, true, true, pattern(8000, i)))
		}
		vantest.Eventually(t, limit, "the connections", func() bool {
			server.peers.Mu.Lock()
			defer server.peers.Mu.Unlock()
			return len(server.peers.Ins()) == k+1
		})
		if k < times-1 {
			worker.Disconnect(8)
			worker.connect(server)
		}
	}
	open()
	for i := range times * count {
		m := server.next()
		if int(m.Timestamp) != i {
			t.Fatalf("message %d arrived, want %d", m.Timestamp, i)
		}
		m.Release()
	}
}

// TestCloseAfterDisconnect: Close waits until messages that were sent before Disconnect have left.
func TestCloseAfterDisconnect(t *testing.T) {
	worker, server, open := stuck(t, func(o *van.Options) { o.Config.RecvBudgetPeer = 1 << 20 })
	worker.peers.O.DrainTime = limit
	const count = 32
	for i := range count {
		worker.must(dataMessage(8, i, true, true, pattern(1<<20, i)))
	}
	worker.Disconnect(8)
	closed := make(chan error, 1)
	go func() { closed <- worker.Close(t.Context()) }()
	select {
	case err := <-closed:
		t.Errorf("Close does not wait: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	open()
	for i := range count {
		if m := server.next(); int(m.Timestamp) != i {
			t.Fatalf("message %d arrived, want %d", m.Timestamp, i)
		}
	}
}

// TestReplacedAfterDisconnect: after Disconnect, and Connect with another process, no message of the former process is delivered.
func TestReplacedAfterDisconnect(t *testing.T) {
	worker, server := pair(t, nil)
	worker.must(dataMessage(8, 1, true, true, []byte("before")))
	server.next().Release()
	server.Disconnect(9)
	other := start(t, 9, nil)
	other.connect(server)
	server.connect(other)
	vantest.Eventually(t, limit, "the former process loses its connection", func() bool { return worker.told("8 false") })
	other.must(dataMessage(8, 3, true, true, []byte("other")))
	if m := server.next(); m.Timestamp != 3 {
		t.Errorf("message %d arrived, want 3", m.Timestamp)
	}
}

// TestBrokenBeforeAdmit: a replacement process has lost a connection before it is admitted. The loss is reported on admission, and no
// message of that connection is delivered.
func TestBrokenBeforeAdmit(t *testing.T) {
	worker, server := pair(t, nil)
	worker.must(dataMessage(8, 1, true, true, []byte("before")))
	server.next().Release()
	other := start(t, 9, nil)
	other.connect(server)
	waits := func(incarnation uint32) {
		t.Helper()
		vantest.Eventually(t, limit, "its connection", func() bool {
			server.peers.Mu.Lock()
			defer server.peers.Mu.Unlock()
			for _, c := range server.peers.Ins() {
				if c.Held.Load() && c.again == (incarnation > 0) {
					return true
				}
			}
			return false
		})
	}
	other.must(dataMessage(8, 2, true, true, []byte("lost")))
	waits(0)
	c := other.peers.Of(8).Link()
	c.mu.Lock()
	c.fail(errGone)
	c.mu.Unlock()
	waits(1)
	vantest.Eventually(t, limit, "the next connection", func() bool { return other.told("8 false", "8 true") })
	other.must(dataMessage(8, 3, true, true, []byte("after")))
	server.mu.Lock()
	server.events = nil
	server.mu.Unlock()
	server.connect(other)
	server.Admit(9)
	if m := server.next(); m.Timestamp != 3 {
		t.Errorf("message %d arrived, want 3", m.Timestamp)
	}
	if !server.told("9 false", "9 true") {
		t.Errorf("the server's events: %v", server.events)
	}
}

// TestBackInside: a return that the van inside reports is passed on only when the connection for data exists, too.
func TestBackInside(t *testing.T) {
	worker, server := pair(t, nil)
	worker.must(dataMessage(8, 1, true, true, []byte("before")))
	server.next().Release()
	server.acceptor.mu.Lock() // the server accepts no connection meanwhile
	func() {
		defer server.acceptor.mu.Unlock()
		server.peers.Mu.Lock()
		_ = unix.Shutdown(server.peers.Ins()[0].fd, unix.SHUT_RDWR)
		server.peers.Mu.Unlock()
		vantest.Eventually(t, limit, "the loss is reported", func() bool { return worker.told("8 false") })
		worker.peers.Inside(worker.watch, 8, true, nil)
		if worker.told("8 false", "8 true") {
			t.Error("the peer's return was reported without a connection for data")
		}
	}()
	vantest.Eventually(t, limit, "the return is reported", func() bool { return worker.told("8 false", "8 true") })
	worker.must(dataMessage(8, 2, true, true, []byte("after")))
	server.next().Release()
}

// TestRename: the connection of a peer serves its new id, and the connection to a former peer with that id ends.
func TestRename(t *testing.T) {
	worker, server, former := start(t, 9, nil), start(t, 8, nil), start(t, 10, nil)
	for _, s := range []*end{server, former} {
		worker.connect(s)
		s.connect(worker)
		worker.must(dataMessage(s.self.ID, 1, true, true, []byte("before")))
		s.next().Release()
	}
	c := worker.peers.Of(8).Link()
	if err := worker.Rename(8, 10); err != nil {
		t.Fatal(err)
	}
	worker.must(dataMessage(10, 2, true, true, []byte("after")))
	if m := server.next(); m.Timestamp != 2 {
		t.Errorf("message %d arrived, want 2", m.Timestamp)
	}
	if n := worker.peers.Of(10); n.Link() != c || c.peer.ID() != 10 {
		t.Errorf("another connection: %t, whose id is %d, want that of node 10", n.Link() != c, c.peer.ID())
	}
	vantest.Eventually(t, limit, "the former peer loses its connection", func() bool {
		former.peers.Mu.Lock()
		defer former.peers.Mu.Unlock()
		return len(former.peers.Ins()) == 0
	})
}

// TestLateHello: the hello of a dialer whose time is over, for example because this node was stopped, does not end the later connection
// of the dialer's process.
func TestLateHello(t *testing.T) {
	worker, server := pair(t, nil)
	worker.must(dataMessage(8, 1, true, true, []byte("before")))
	server.next().Release()
	from, _ := worker.self.Extension()
	to, _ := server.self.Extension()
	late := hello{id: 9, own: from.Incarnation, peer: to.Incarnation, again: true, number: newNumber()}
	server.acceptor.mu.Lock() // the server reads no hello meanwhile
	c, err := net.Dial("tcp", dataAddr(server))
	if err == nil {
		_, err = c.Write(late.append(nil))
		_ = c.(*net.TCPConn).CloseWrite()
	}
	server.acceptor.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(limit))
	_, _ = io.Copy(io.Discard, c)
	worker.must(dataMessage(8, 2, true, true, []byte("after")))
	server.next().Release()
	if worker.told("8 false") || server.told("9 false") {
		t.Errorf("events of the worker: %v, of the server: %v", worker.events, server.events)
	}
}

// TestClaimedIDs: after the connections of unknown processes have ended or were refused, the ids that these processes claimed use no memory.
// The order of a member's messages is kept: some of them may not have been delivered.
func TestClaimedIDs(t *testing.T) {
	p := start(t, 8, nil).peers
	member := p.sender(1000)
	member.known = true
	var all []*inConn
	for i := range 100 {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		c := &inConn{n: p.n, Inbound: links.Inbound{From: 1000 + i/2, Process: processOf(uint32(1<<20 + i))}, fd: fd}
		if v := p.enter(c, &hello{}); v != verdictYes {
			t.Fatalf("connection %d: verdict %d", i, v)
		}
		all = append(all, c)
	}
	for _, c := range all {
		p.EndHold(c)
	}
	for _, incarnation := range []uint32{1, 2} {
		n := &peer{}
		n.Init(999, processOf(incarnation), incarnation)
		p.Connect(n)
	}
	for id := range 100 { // a replaced process claims ids, and is refused
		c := &inConn{n: p.n, Inbound: links.Inbound{From: 2000 + id, Process: processOf(1)}, fd: -1}
		if v := p.enter(c, &hello{}); v != verdictReplaced {
			t.Fatalf("id %d: verdict %d", 2000+id, v)
		}
	}
	if n := len(p.senders); n != 1 || p.senders[1000] != member {
		t.Errorf("%d ids are kept, want that of the member", n)
	}
}
