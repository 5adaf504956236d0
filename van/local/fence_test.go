package local

import (
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/links"
)

// TestFenced: all messages of a replaced process, small or large, are dropped, and it cannot return. Messages of
// the replacement process are delivered.
func TestFenced(t *testing.T) {
	for _, mode := range readModes {
		t.Run(mode.name, func(t *testing.T) {
			n := inproc.NewNetwork()
			server := newNode(t, n, 8, mode.set)
			old, next := newNode(t, n, 9, nil), newNode(t, n, 9, nil)
			buffer := make([]byte, 1<<20)
			if err := server.RegisterRecvBuffer(9, 1, backend.Bytes(buffer)); err != nil {
				t.Fatal(err)
			}
			entered, release := make(chan struct{}), make(chan struct{})
			var first atomic.Bool
			var zombie atomic.Int32
			first.Store(true)
			server.Start(func(m *van.Message) {
				if first.Swap(false) {
					close(entered)
					<-release
				} else if m.Timestamp < 1000 {
					zombie.Add(1)
				}
				server.in <- m.Retain()
			})
			old.start()
			next.start()
			old.connect(server)
			server.connect(old)
			old.must(data(8, 0, pattern(1, 100)))
			select {
			case <-entered:
			case <-time.After(limit):
				t.Fatal("no delivery")
			}
			// These wait behind the first one's handler, some of them in the ring.
			for i := range 20 {
				old.must(data(8, 1+i, pattern(2, []int{100, 1 << 20}[i%2])))
			}
			eventually(t, "some wait", func() bool { return server.rx.feed.Loop.Budget.Used() > 0 })
			server.connect(next)
			server.Admit(9)
			clear(buffer)
			close(release)
			server.next().Release()
			old.event(8, false) // it is notified that it is fenced
			var err error
			eventually(t, "it learns why", func() bool {
				if err = old.Send(data(8, 100, pattern(3, 1<<20))); err != nil && !errors.Is(err, van.ErrPeerLost) {
					t.Fatal(err)
				}
				return errors.Is(err, van.ErrReplaced)
			})
			if !strings.Contains(err.Error(), "server 0") {
				t.Errorf("%v does not name the peer", err)
			}
			old.says("a peer does not hear this process any more")
			for _, now := range []bool{true, false} {
				if path := van.PathTo(old, 8, now); path.Over != "" || now && path.Why != "not over shared memory: "+van.ErrReplaced.Error() {
					t.Errorf("the path to a peer that takes no data of this process, now %t: %+v", now, path)
				}
			}
			if slices.ContainsFunc(buffer, func(b byte) bool { return b != 0 }) {
				t.Error("values of the replaced process came to the registered buffer")
			}
			next.connect(server)
			next.must(data(8, 1000, pattern(4, 1<<20)))
			for m := server.next(); m.Timestamp != 1000; m = server.next() {
				t.Errorf("message %d of the replaced process was handed up", m.Timestamp)
			}
			if n := zombie.Load(); n > 0 {
				t.Errorf("%d messages of the replaced process were handed up", n)
			}
			if n := server.Stats().FencedMessages; n == 0 {
				t.Error("no dropped message is counted")
			}
			eventually(t, "no link of the replaced process is left", func() bool { return len(server.peers.Ins()) == 1 })
		})
	}
}

// twoProcesses are a server and two processes of worker 0, of which the second replaces the first.
func twoProcesses(t *testing.T) (server, old, next *node) {
	n := inproc.NewNetwork()
	server, old, next = newNode(t, n, 8, nil), newNode(t, n, 9, nil), newNode(t, n, 9, nil)
	server.start()
	old.start()
	next.start()
	return server, old, next
}

// TestNewcomerIsHeld: messages of a replacement process wait for Admit, or for holdTime, though the former process
// was admitted.
func TestNewcomerIsHeld(t *testing.T) {
	server, old, next := twoProcesses(t)
	server.peers.O.HoldTime = links.HoldTime
	server.connect(old)
	old.connect(server)
	old.must(data(8, 0, pattern(1, 100)))
	server.next().Release()
	begun := time.Now()
	server.connect(next)
	next.connect(server)
	next.must(data(8, 1, pattern(1, 100)))
	server.next().Release()
	if d := time.Since(begun); d < links.HoldTime/2 {
		t.Errorf("heard after %s, want about %s", d, links.HoldTime)
	}
}

// TestAdmittedIsNotTheNext: that a peer is admitted says nothing of a process that is to take its place, whose link
// is there already: nothing is taken from that before Connect names it.
func TestAdmittedIsNotTheNext(t *testing.T) {
	server, old, next := twoProcesses(t)
	server.connect(old)
	old.connect(server)
	old.must(data(8, 0, pattern(1, 100)))
	server.next().Release()
	next.connect(server)
	next.must(data(8, 1, pattern(1, 100)))
	var early *inLink
	eventually(t, "the link of the next process", func() bool {
		for _, l := range server.peers.Ins() {
			if l.from.id == 9 && l.Process == links.Process(next.own.token.name) {
				early = l
			}
		}
		return early != nil
	})
	server.Admit(9)
	if !early.Held.Load() {
		t.Error("what the next process sends is taken as the peer's, which it is not yet")
	}
	server.connect(next)
	server.Admit(9)
	if m := server.next(); m.Timestamp != 1 {
		t.Errorf("message %d came, want 1", m.Timestamp)
	}
}

// TestLinkOfAReplacedProcess: a link is not used if its process has been replaced while the link was made.
// Messages go to the replacement process.
func TestLinkOfAReplacedProcess(t *testing.T) {
	server, old, next := twoProcesses(t)
	old.peers.Mu.Lock() // until then it does not answer
	if err := server.Connect(t.Context(), 9, old.self); err != nil {
		t.Fatal(err)
	}
	server.peers.Mu.Lock()
	was := server.peers.Of(9)
	server.peers.Mu.Unlock()
	server.connect(next)
	next.connect(server)
	server.Admit(9)
	old.peers.Mu.Unlock()
	select {
	case <-was.Settled():
	case <-time.After(limit):
		t.Fatal("the first link is neither made nor refused")
	}
	server.must(data(9, 1, pattern(1, 100)))
	next.next().Release()
	if len(old.in) > 0 {
		t.Error("the process that was replaced has got the message")
	}
}
