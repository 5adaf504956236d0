package local

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/tests/inproc"
)

// TestConnectGoesOn: Connect does not wait for a slow peer. Messages sent meanwhile wait, and arrive in order.
func TestConnectGoesOn(t *testing.T) {
	n := inproc.NewNetwork()
	answer := make(chan struct{})
	worker := newNode(t, n, 9, nil)
	server := newNode(t, n, 8, func(v *Van) {
		v.acceptor.refuse = func() error {
			<-answer
			return nil
		}
	})
	worker.start()
	server.start()
	server.connect(worker)
	if err := worker.Connect(t.Context(), 8, server.self); err != nil {
		t.Fatal(err)
	}
	var sent atomic.Int32
	done := make(chan error, 1)
	go func() {
		for i := range 10 {
			if err := worker.Send(data(8, i, pattern(i, 5000))); err != nil {
				done <- err
				return
			}
			sent.Add(1)
		}
		done <- nil
	}()
	if n := sent.Load(); n != 0 {
		t.Errorf("%d messages were sent before it was settled how", n)
	}
	close(answer)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !worker.Linked(8) {
		t.Fatal("there is no link: Connect has waited for one until it gave up")
	}
	for i := range 10 {
		m := server.next()
		if int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), pattern(i, 5000)) {
			t.Fatalf("message %d came when %d was due, or its values differ", m.Timestamp, i)
		}
		m.Release()
	}
}

// TestListenerSurvives: a listener that cannot accept for a while, for example for lack of file descriptors,
// accepts again.
func TestListenerSurvives(t *testing.T) {
	n := inproc.NewNetwork()
	worker := newNode(t, n, 9, nil)
	var fails atomic.Int32
	server := newNode(t, n, 8, func(v *Van) {
		v.acceptor.refuse = func() error {
			switch fails.Add(1) {
			case 1:
				return fmt.Errorf("accept4: %w", unix.EMFILE)
			case 2:
				return fmt.Errorf("accept4: %w", unix.ECONNABORTED)
			}
			return nil
		}
	})
	worker.start()
	server.start()
	worker.connect(server)
	server.connect(worker)
	worker.must(data(8, 1, []byte("x")))
	server.next().Release()
	server.says("no peer can be accepted through shared memory for now")
}

// TestDisconnectGoesOn: Disconnect does not wait for a peer that does not read. Messages sent before it leave, and
// arrive before messages sent after the next Connect.
func TestDisconnectGoesOn(t *testing.T) {
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, func(v *Van) { v.peers.O.DrainTime = limit }), newNode(t, n, 8, nil)
	worker.start()
	worker.connect(server)
	server.connect(worker)
	const before = 8
	for i := range before {
		worker.must(data(8, i, pattern(i, 1<<20)))
	}
	l := worker.peers.link(8)
	l.mu.Lock() // nothing more leaves for now
	worker.Disconnect(8)
	if err := worker.Connect(t.Context(), 8, server.self); err != nil {
		t.Fatal(err)
	}
	server.start()
	worker.peers.Mu.Lock()
	next := worker.peers.Of(8)
	worker.peers.Mu.Unlock()
	select {
	case <-next.Settled():
		t.Error("there is a new link while what was sent before has not left")
	case <-time.After(100 * time.Millisecond):
	}
	l.mu.Unlock()
	worker.must(data(8, before, pattern(before, 1<<20)))
	for i := range before + 1 {
		m := server.next()
		if int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), pattern(i, 1<<20)) {
			t.Fatalf("message %d came when %d was due, or its values differ", m.Timestamp, i)
		}
		m.Release()
	}
}

// TestReadersAreAdmittedLate: the log says once that other processes may read this one's memory, and only if there
// is a peer that does.
func TestReadersAreAdmittedLate(t *testing.T) {
	n := inproc.NewNetwork()
	var said atomic.Int32
	worker := newNode(t, n, 9, func(v *Van) {
		v.dialer.readers = func() (bool, error) {
			said.Add(1)
			return true, nil
		}
	})
	server, other, elsewhere := newNode(t, n, 8, nil), newNode(t, n, 10, nil), newNode(t, n, 12, nil)
	for _, x := range []*node{worker, server, other, elsewhere} {
		x.start()
	}
	elsewhere.self.Endpoint = nil
	if err := worker.Connect(t.Context(), 12, elsewhere.self); err != nil || worker.Linked(12) {
		t.Fatalf("linked %t, %v", worker.Linked(12), err)
	}
	if n := said.Load(); n != 0 {
		t.Errorf("said %d times before there was a peer", n)
	}
	worker.connect(server)
	worker.connect(other)
	if n := said.Load(); n != 1 {
		t.Errorf("said %d times, want once", n)
	}
	worker.says("processes of the same user may read this one's memory")
}

// TestLateHello: a peer that was stopped reads the handshake of a link that has timed out. Data then goes over the
// van inside, so the end of that link is no loss.
func TestLateHello(t *testing.T) {
	n := inproc.NewNetwork()
	stopped := make(chan struct{})
	var accepts atomic.Int32
	worker := newNode(t, n, 9, func(v *Van) { v.own.linkTime = 200 * time.Millisecond }) // the server does not answer
	server := newNode(t, n, 8, func(v *Van) {
		v.acceptor.refuse = func() error {
			accepts.Add(1)
			<-stopped
			return nil
		}
	})
	worker.start()
	server.start()
	server.connect(worker)
	if err := worker.Connect(t.Context(), 8, server.self); err != nil {
		t.Fatal(err)
	}
	if worker.Linked(8) {
		t.Fatal("there is a link to a process that stands still")
	}
	close(stopped)
	eventually(t, "the late hello is read, and its link has ended", func() bool {
		server.peers.Mu.Lock()
		defer server.peers.Mu.Unlock()
		return accepts.Load() == 2 && len(server.acceptor.conns) == 0 && len(server.peers.Ins()) == 0
	})
	server.rx.feed.Lock() // the receiver has reported all peer events
	lost := server.down(9)
	server.rx.feed.Unlock()
	if lost {
		t.Error("the peer is held for lost")
	}
	worker.must(data(8, 1, []byte("x")))
	server.next().Release()
	server.must(data(9, 1, []byte("x")))
	worker.next().Release()
}
