package zmq

import (
	"context"
	"errors"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// knows makes n know the process of peer, as the node table does.
func (n *node) knows(t *testing.T, peer *node) {
	t.Helper()
	if err := n.zvan.Connect(t.Context(), peer.self.ID, peer.self); err != nil {
		t.Fatal(err)
	}
}

// dialed reports whether n has a DEALER to peer id.
func (n *node) dialed(id int) bool {
	c := (*n.peers.Load())[id]
	return c != nil && c.sock != nil
}

// TestFirstMessageConnects: only native workers and servers wait for a message before they connect. Until then they need no descriptor for
// each other. All messages of the goroutines that send first arrive, in the order of each goroutine.
func TestFirstMessageConnects(t *testing.T) {
	for name, x := range map[string]struct {
		from, to             int
		fromInc, toInc       uint32
		atOnce, local, quiet bool
	}{
		"worker to server":            {from: 9, to: 8, fromInc: 7, toInc: 5},
		"server to worker":            {from: 8, to: 9, fromInc: 7, toInc: 5},
		"over a Unix socket":          {from: 9, to: 8, fromInc: 7, toInc: 5, local: true},
		"scheduler to worker":         {from: 1, to: 9, fromInc: 7, toInc: 5, atOnce: true},
		"worker to scheduler":         {from: 9, to: 1, fromInc: 7, toInc: 5, atOnce: true},
		"worker to a C++ server":      {from: 9, to: 8, fromInc: 7, atOnce: true},
		"a C++ worker to a server":    {from: 9, to: 8, toInc: 5, atOnce: true},
		"a message before the record": {from: 9, to: 8, fromInc: 7, toInc: 5, quiet: true},
	} {
		t.Run(name, func(t *testing.T) {
			edit := func(c *env.Config) { c.Local = x.local }
			from, to := newNode(t, x.from, x.fromInc, nil, edit), newNode(t, x.to, x.toInc, nil, edit)
			before := descriptors(t)
			if !x.quiet {
				to.knows(t, from)
			}
			from.knows(t, to)
			if got := from.dialed(x.to); got != x.atOnce {
				t.Errorf("connected at once: %t, want %t", got, x.atOnce)
			}
			if more := descriptors(t) - before; !x.atOnce && more > 0 {
				t.Errorf("the peer costs %d descriptors before the first message", more)
			}
			const goroutines, each = 4, 50
			var all sync.WaitGroup
			for g := range goroutines {
				all.Go(func() {
					for i := range each {
						m := heartbeat(x.to, g*each+i)
						if err := from.Send(m); err != nil {
							t.Errorf("message %d: %v", i, err)
						}
					}
				})
			}
			all.Wait()
			next := [goroutines]int{}
			for range goroutines * each {
				m := to.next(t)
				g, i := int(m.Timestamp)/each, int(m.Timestamp)%each
				if m.Sender != x.from || i != next[g] {
					t.Fatalf("message %d of goroutine %d of %d arrived, want %d", i, g, m.Sender, next[g])
				}
				next[g]++
				m.Release()
			}
			if x.fromInc != 0 && x.toInc != 0 && x.to != 1 && !x.local && !x.quiet {
				c := (*to.peers.Load())[x.from]
				until(t, "the accepted connection is the member's", c.seen)
			}
		})
	}
}

// answerOf is an answer of 8 bytes.
func answerOf(receiver, ts int) *van.Message {
	m := push(receiver, ts, make([]byte, 8))
	m.Request = false
	return m
}

// TestAnswersWithoutRequests: answers to requests that have taken another path leave over a connection that the server makes. The
// server makes none for answers to requests that have arrived over ZeroMQ.
func TestAnswersWithoutRequests(t *testing.T) {
	for name, asks := range map[string]bool{"requests over another path": false, "requests over ZeroMQ": true} {
		t.Run(name, func(t *testing.T) {
			server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
			server.knows(t, worker)
			worker.knows(t, server)
			for ts := range 10 {
				if asks {
					worker.must(t, push(8, ts, make([]byte, 100)))
					server.next(t).Release()
				}
				server.must(t, answerOf(9, ts))
				m := worker.next(t)
				if m.Sender != 8 || m.Request || int(m.Timestamp) != ts || m.Vals.Len() != 8 {
					t.Fatalf("%s arrived, want answer %d", m.Meta.String(), ts)
				}
				m.Release()
			}
			if server.dialed(9) == asks || worker.dialed(8) != asks {
				t.Errorf("the server has made a connection: %t, the worker: %t", server.dialed(9), worker.dialed(8))
			}
		})
	}
}

// TestAnswersKeepTheirSocket: answers leave over the socket of the first one, also when requests begin to arrive over ZeroMQ.
func TestAnswersKeepTheirSocket(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	server.knows(t, worker)
	worker.knows(t, server)
	server.must(t, answerOf(9, 0))
	worker.next(t).Release()
	worker.must(t, push(8, 1, nil))
	server.next(t).Release()
	c := (*server.peers.Load())[9]
	if c.overRouter(answerOf(9, 1)) {
		t.Error("the second answer leaves over the ROUTER and may overtake the first one")
	}
	server.knows(t, worker)
	if c := (*server.peers.Load())[9]; c.overRouter(answerOf(9, 2)) {
		t.Error("after another Connect, answers leave over the ROUTER")
	}
}

// TestReplacedWithoutConnection: a node that has no connection to a peer, and learns that another process has replaced it, drops the data of
// the replaced process and delivers that of the new one, also data that arrived first.
func TestReplacedWithoutConnection(t *testing.T) {
	server, former := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	server.knows(t, former)
	former.knows(t, server)
	next := newNode(t, 9, 6, nil, nil)
	next.knows(t, server)
	next.must(t, push(8, 1, nil)) // the server does not know next yet
	until(t, "the message waits", func() bool {
		server.early.mu.Lock()
		defer server.early.mu.Unlock()
		return len(server.early.kept) == 1
	})
	server.knows(t, next)
	former.must(t, push(8, 2, nil))
	until(t, "the message of the replaced process, and the empty one before it, are dropped", func() bool { return server.Stats().FencedMessages == 2 })
	server.Admit(9)
	if m := server.next(t); m.Timestamp != 1 {
		t.Errorf("message %d arrived, want 1", m.Timestamp)
	}
	if c := (*server.peers.Load())[9]; !c.overRouter(answerOf(9, 1)) {
		t.Error("the answer to a request that arrived before its process was known leaves over another connection")
	}
	server.must(t, heartbeat(9, 3))
	if m := next.next(t); m.Timestamp != 3 {
		t.Errorf("message %d arrived, want 3", m.Timestamp)
	}
	if server.dialed(9) && (*server.peers.Load())[9].peer.Port != next.self.Port {
		t.Error("the server is connected to the replaced process")
	}
}

// TestFirstMessageFails: an error of the connection that the first message makes is the error of Send. A later message tries again.
func TestFirstMessageFails(t *testing.T) {
	worker := newNode(t, 9, 7, nil, nil)
	server := newNode(t, 8, 5, nil, nil)
	nowhere := server.self
	nowhere.Hostname = "no host"
	if err := worker.zvan.Connect(t.Context(), 8, nowhere); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := worker.Send(heartbeat(8, 1)); !errors.Is(err, van.ErrPeerLost) {
			t.Errorf("Send: %v, want %v", err, van.ErrPeerLost)
		}
	}
	worker.knows(t, server)
	worker.must(t, heartbeat(8, 2))
	if m := server.next(t); m.Timestamp != 2 {
		t.Errorf("message %d arrived, want 2", m.Timestamp)
	}
	worker.Disconnect(8)
	if err := worker.Send(heartbeat(8, 3)); !errors.Is(err, van.ErrUnknownPeer) {
		t.Errorf("Send after Disconnect: %v, want %v", err, van.ErrUnknownPeer)
	}
}

// TestFirstMessageWithoutSockets: if this process has no socket left for the connection that the first message makes, the peer is
// not reported as lost.
func TestFirstMessageWithoutSockets(t *testing.T) {
	worker := newNode(t, 9, 7, nil, func(c *env.Config) { c.ZMQMaxSockets = 2 })
	var err error
	for id := 8; err == nil && id < 28; id += 2 {
		worker.knows(t, newNode(t, id, 5, nil, nil))
		err = worker.Send(heartbeat(id, 1))
	}
	if !errors.Is(err, syscall.EMFILE) || errors.Is(err, van.ErrPeerLost) || !strings.Contains(err.Error(), "BYTEPS_ZMQ_MAX_SOCKET") {
		t.Errorf("Send: %v, want %v and the variable, not %v", err, syscall.EMFILE, van.ErrPeerLost)
	}
}

// begun is a context that closes a channel when it is first used.
type begun struct {
	context.Context
	used func()
}

func (b begun) Done() <-chan struct{} {
	b.used()
	return b.Context.Done()
}

// TestDialDelaysNobody: while the connection to one peer waits for the end of an earlier one to the same address, connections to other peers
// are made.
func TestDialDelaysNobody(t *testing.T) {
	worker := newNode(t, 9, 7, nil, nil)
	first, other := newNode(t, 8, 5, nil, nil), newNode(t, 10, 5, nil, nil)
	delayed := func() bool {
		worker.knows(t, first)
		worker.knows(t, other)
		earlier := &conn{to: worker.endpoint(&first.self), ended: make(chan struct{})}
		earlier.who.Store(&identity{id: 8})
		worker.mu.Lock()
		worker.leaving[earlier] = struct{}{}
		worker.mu.Unlock()
		holds, done := make(chan struct{}), make(chan error)
		go func() {
			worker.mu.Lock()
			defer worker.mu.Unlock()
			_, err := worker.open(begun{t.Context(), sync.OnceFunc(func() { close(holds) })}, 8)
			done <- err
		}()
		<-holds
		if _, err := worker.dial(10); err != nil {
			t.Error(err)
		}
		waits := !worker.dialed(8)
		worker.mu.Lock()
		delete(worker.leaving, earlier)
		close(earlier.ended)
		worker.mu.Unlock()
		if err := <-done; err != nil {
			t.Error(err)
		}
		worker.Disconnect(8)
		worker.Disconnect(10)
		return !waits
	}
	for tries := 0; delayed(); tries++ { // it may also have waited for closeBrokenTimeout, on a slow machine
		if tries == 20 {
			t.Fatal("the connection to another peer always waits, too")
		}
	}
}
