package local

import (
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
)

// Messages of one process keep their order when its link breaks.

// breakOut closes the connection of x's link to peer id.
func (x *node) breakOut(id int) {
	if l := x.peers.link(id); l != nil {
		_ = l.conn.Close()
	}
}

// breakLink breaks the link of x to peer, and waits until x can send again.
func (x *node) breakLink(peer int) {
	x.t.Helper()
	x.breakOut(peer)
	x.event(peer, false)
	x.event(peer, true)
}

// mustAll sends the messages with the timestamps from first to last.
func (x *node) mustAll(to, first, last int) {
	x.t.Helper()
	for i := first; i <= last; i++ {
		x.must(data(to, i, []byte("x")))
	}
}

// wantAll receives the messages with the timestamps from first to last.
func (x *node) wantAll(first, last int) {
	x.t.Helper()
	for i := first; i <= last; i++ {
		m := x.next()
		if int(m.Timestamp) != i {
			x.t.Errorf("message %d, want %d", m.Timestamp, i)
		}
		m.Release()
	}
}

// TestOrderOfLinks: the messages of a broken link are delivered before those of the link that replaces it.
func TestOrderOfLinks(t *testing.T) {
	worker, server := pair(t)
	server.rx.feed.Lock() // nothing is received
	worker.mustAll(8, 0, 4)
	worker.breakLink(8)
	worker.mustAll(8, 5, 9)
	worker.breakLink(8)
	worker.mustAll(8, 10, 14)
	server.rx.feed.Unlock()
	server.wantAll(0, 14)
}

// entering is a van inside that closes entered when it delivers the first data message.
type entering struct {
	van.Van
	entered chan struct{}
}

func (e *entering) Start(recv van.Receiver) {
	enter := sync.OnceFunc(func() { close(e.entered) })
	e.Van.Start(func(m *van.Message) {
		if !m.IsControl() {
			enter()
		}
		recv(m)
	})
}

// TestOrderOfLinkAndInside: the messages of a broken link are delivered before those that its peer sends over the van inside afterwards.
func TestOrderOfLinkAndInside(t *testing.T) {
	n := inproc.NewNetwork()
	inside := &entering{entered: make(chan struct{})}
	worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, func(v *Van) { inside.Van, v.inner = v.inner, inside })
	worker.start()
	server.start()
	worker.connect(server)
	server.connect(worker)
	worker.peers.mu.Lock()
	worker.peers.nodes[8].tries = maxTries
	worker.peers.mu.Unlock()
	server.rx.feed.Lock() // nothing is received from links
	worker.mustAll(8, 0, 4)
	worker.breakLink(8)
	if worker.Linked(8) {
		t.Error("linked again")
	}
	worker.mustAll(8, 5, 9)
	select {
	case <-inside.entered:
	case <-time.After(limit):
		t.Error("nothing arrives over the van inside")
	}
	server.rx.feed.Unlock()
	server.wantAll(0, 9)
}

// TestOrderOfMarks: if a link breaks before its marks have arrived, the next link also follows the messages of the van inside.
func TestOrderOfMarks(t *testing.T) {
	n := inproc.NewNetwork()
	x := obstacles()["no memory"]
	worker, server := newNode(t, n, 9, func(v *Van) {
		v.dialer.retry.Pause = time.Millisecond
		x.worker(v)
	}), newNode(t, n, 8, nil)
	worker.start()
	held, gate := make(chan struct{}), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	server.Start(func(m *van.Message) {
		if m.Timestamp == 0 {
			close(held)
			<-gate
		}
		server.in <- m.Retain()
	})
	server.connect(worker)
	if err := worker.Connect(t.Context(), 8, server.self); err != nil {
		t.Fatal(err)
	}
	worker.mustAll(8, 0, 4)
	<-held
	x.remove()
	linked := func() bool { return worker.peers.link(8) != nil }
	eventually(t, "the link is made", linked)
	worker.mustAll(8, 5, 9)
	worker.breakLink(8)
	worker.mustAll(8, 10, 14)
	eventually(t, "a link is made again", linked)
	worker.mustAll(8, 15, 19)
	open()
	server.wantAll(0, 19)
}

// TestUnusedLinkEnds: a link that its dialer has abandoned ends, also if the receiver admits it after the link that is in use.
func TestUnusedLinkEnds(t *testing.T) {
	worker, server := pair(t)
	l, err := worker.dialer.dial(t.Context(), 8, &server.own.token, false)
	if err != nil {
		t.Fatal(err)
	}
	ins := func() int { return len(*server.peers.ins.Load()) }
	if n := ins(); n != 2 {
		t.Fatalf("%d links, want 2", n)
	}
	l.close(true)
	eventually(t, "the abandoned link has ended", func() bool { return ins() == 1 })
	worker.mustAll(8, 0, 4)
	server.wantAll(0, 4)
}
