package rdma

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// If a connection breaks during the notification that one message has failed, the peer is not reported as up afterwards.
func TestFailureOfMessageAsConnectionBreaks(t *testing.T) {
	r := newRig(t)
	w, s := r.make(9), r.node(8)
	var armed atomic.Bool
	var once sync.Once
	again, left, ups := make(chan struct{}, 1), make(chan struct{}), atomic.Int32{}
	w.WatchPeers(func(id int, up bool, cause error) {
		now := armed.Load()
		w.changes <- change{id, up, cause}
		switch {
		case !now:
		case up:
			ups.Add(1)
		default:
			first := false
			once.Do(func() { first = true })
			if !first {
				select {
				case again <- struct{}{}:
				default:
				}
				return
			}
			defer close(left)
			// The message fails. Now the connection breaks, and cannot be restored.
			r.net.RejectNext(1<<30, 8)
			p := (*w.tables.peers.Load())[s.who.ID]
			p.mu.Lock()
			l := p.link
			p.mu.Unlock()
			l.fail(van.ErrPeerLost)
			r.until("the connection has ended", func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				return p.link != l
			})
			select { // notified by the goroutine that has noticed it, unless that waits for this one
			case <-again:
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	w.listenOn(0)
	w.Start(func(m *van.Message) { w.in <- m.Retain() })
	r.link(w, s)
	w.must(push(s, 1, 1, value(5000, 1)))
	s.wantValue(1, value(5000, 1))
	armed.Store(true)
	w.stack.Limit(w.stack.Registered())
	w.must(push(s, 2, 2, value(100<<10, 2)))
	w.wantDown(s, "value of 102400 bytes")
	<-left
	for range 3 { // attempts, each later than the previous one
		w.wantDown(s, "no process listens")
	}
	if n := ups.Load(); n > 0 {
		t.Errorf("the peer was reported as up %d times, without a connection", n)
	}
	w.stack.Limit(1 << 40)
	r.net.RejectNext(0, 0)
	w.wantUp(s)
}

// An answer that is lost with the peer's connection fails the request, although this node's own connection is up.
func TestAnswerLost(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	lostAnswer(w, s)
	c := w.wantChange("answers are lost", func(c change) bool { return !c.up })
	if c.id != s.who.ID || !lost(c.cause) || !strings.Contains(c.cause.Error(), "answers") {
		t.Errorf("notified of %s: %v; want %s and %v", van.NodeName(c.id), c.cause, van.NodeName(s.who.ID), van.ErrPeerLost)
	}
	w.wantUp(s)
	dst := make([]byte, 100<<10)
	w.must(pull(s, 1, 2, dst))
	q := s.next()
	s.must(answer(q, value(len(dst), 2)))
	q.Release()
	w.wantValue(2, value(len(dst), 2))
}

// lostAnswer makes s answer w, which breaks the connection of s.
func lostAnswer(w, s *testNode) {
	w.r.Helper()
	dst := make([]byte, 100<<10)
	w.must(pull(s, 1, 1, dst))
	q := s.next()
	w.r.until("the credits of the request have left", func() bool { return s.incomingOf(w.who.ID).owed.count.Load() == 0 })
	var once sync.Once
	w.r.net.FailWR(func(wr fakeverbs.WR) (st verbs.Status) {
		if wr.Stack == s.stack && wr.Op == verbs.OpWrite && wr.Len > 0 {
			once.Do(func() { st = verbs.StatusRetryExceeded })
		}
		return st
	})
	s.must(answer(q, value(len(dst), 1)))
	q.Release()
	s.wantDown(w)
}

// A peer that cannot connect again is lost. It is reported as up when it has connected.
func TestAnswersLostForLong(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	w.times.inboundDown = 20 * time.Millisecond
	r.net.RejectNext(1<<30, 8)
	lostAnswer(w, s)
	w.wantDown(s, "answers")
	r.net.RejectNext(0, 0)
	w.wantUp(s)
	s.wantUp(w)
}

// A peer that shuts down is not reported as lost before this node's connection to it has ended, and never as up.
func TestPeerShutsDown(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(r *rig, w, s *testNode)
		lost bool
	}{
		{"disconnects", func(_ *rig, w, s *testNode) { s.Disconnect(w.who.ID) }, false},
		{"closes", func(_ *rig, _, s *testNode) { s.close() }, true},
		{"killed", func(_ *rig, _, s *testNode) { s.kill(false) }, true},
		{"killed, telling", func(_ *rig, _, s *testNode) { s.kill(true) }, true},
		{"is replaced", func(r *rig, w, s *testNode) {
			next := r.make(s.who.ID)
			next.listenOn(0)
			next.Start(func(m *van.Message) { next.in <- m.Retain() })
			w.connect(next)
			next.connect(w)
			next.wantUp(w)
			w.wantUp(next)
			s.kill(true)
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.probes = true
			w, s := r.pair()
			old := w.incoming()
			c.end(r, w, s)
			if c.lost {
				for range 3 {
					w.wantChange("the peer is lost", func(c change) bool {
						if c.up {
							t.Error("the peer was reported as up")
						}
						return !c.up
					})
				}
			}
			r.until("its connection has ended", func() bool {
				if c.name == "killed" {
					return true // no node notices
				}
				now := w.incoming()
				return len(now) == 0 || now[0] != old[0]
			})
			if !c.lost {
				w.wantNoLoss()
			}
		})
	}
}

// A StepMesh node that connects again has also lost its answers.
func TestAnswerOfOriginalLost(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := newRawServer(r, w)
	s.pull(s.take(), 1, 1000)
	s.open()
	s.open()
	w.wantDown(s.who, "answers", "connected again")
	w.wantUp(s.who)
	s.end()
}

// No loss is reported when a connection ends that its process has replaced by a newer one: no answer is lost with it.
func TestEndOfReplacedConnection(t *testing.T) {
	r := newRig(t)
	_, s := r.pair()
	s.times.inboundDown = 1
	old := s.incomingOf(9)
	s.wantNoLoss()
	p := newRaw(r, rawAddr, van.Node{ID: 9})
	defer p.end()
	p.dial(s, 2, func(q int) []byte {
		h := old.handshake
		h.epoch++
		h.qp = q
		return h.encode()
	})
	r.until("the first connection has ended", func() bool {
		for _, c := range *s.tables.conns.Load() {
			if c.in == old {
				return false
			}
		}
		return true
	})
	s.close() // its watcher has received all notifications
	s.wantNoLoss()
}

// A server is reported to a worker as up when it can answer, that is, not before it has connected to the worker again. Until then requests are
// refused, and not lost.
func TestBackWhenItCanAnswer(t *testing.T) {
	r := newRig(t)
	r.probes = true
	w, s := r.pair()
	open := s.barred() // otherwise an attempt that began before would continue after the cut
	r.net.Cut(w.addr, s.addr)
	r.until("Send fails", func() bool { return lost(w.Send(push(s, 1, 0, value(3000, 1)))) })
	w.wantDown(s, "queue pair")
	r.until("Send of the server fails", func() bool { return lost(s.Send(push(w, 1, 0, value(3000, 1)))) })
	s.wantDown(w)
	back := (*s.tables.peers.Load())[w.who.ID]
	p := (*w.tables.peers.Load())[s.who.ID]
	r.until("the server's own connection has broken, at both ends", func() bool { return back.currentLink() == nil && p.inbound.Load() == nil })
	for len(w.changes) > 0 {
		<-w.changes
	}
	r.net.Heal(w.addr, s.addr)
	r.until("the worker's connection stands", func() bool { return p.currentLink() != nil })
	w.must(control(s, 77))
	s.nextWith(77).Release()
	if err := w.Send(push(s, 1, 0, value(3000, 1))); !lost(err) || !strings.Contains(err.Error(), "has not connected to this node again") {
		t.Errorf("a request that could not be answered: %v, want %v that says so", err, van.ErrPeerLost)
	}
	for len(w.changes) > 0 {
		if c := <-w.changes; c.up {
			t.Error("the server was reported as up before it could answer")
		}
	}
	open()
	w.wantUp(s)
	dst := make([]byte, 100<<10)
	w.must(pull(s, 1, 2, dst))
	q := s.nextWith(2)
	s.must(answer(q, value(len(dst), 2)))
	q.Release()
	m := w.nextWith(2)
	if !bytes.Equal(m.Vals.Host(), value(len(dst), 2)) {
		t.Error("the answer is another one")
	}
	m.Release()
	w.wantNoLoss()
}

// A late notification of a break that lost nothing is dropped if the connection has been restored.
func TestLateNotificationOfAQuietBreak(t *testing.T) {
	r := newRig(t)
	w, s := r.make(9), r.node(8)
	w.times.quiet = time.Hour // not the subject of this test
	var armed atomic.Bool
	w.WatchPeers(func(id int, up bool, cause error) {
		if armed.Load() && up {
			p := (*w.tables.peers.Load())[s.who.ID]
			news := make(chan struct{})
			go func() {
				defer close(news)
				connector{p}.notifyUnlessReconnected(1, van.ErrPeerLost)
			}()
			select { // it may wait for this function to return
			case <-news:
			case <-time.After(100 * time.Millisecond):
			}
		}
		w.changes <- change{id, up, cause}
	})
	w.listenOn(0)
	w.Start(func(m *van.Message) { w.in <- m.Retain() })
	r.link(w, s)
	armed.Store(true)
	(*w.tables.peers.Load())[s.who.ID].currentLink().fail(fmt.Errorf("%w: made to", errUnacknowledged))
	w.wantUp(s)
	w.must(push(s, 1, 1, value(5000, 1)))
	s.wantValue(1, value(5000, 1))
	w.wantNoLoss()
}

// A restarted scheduler has its predecessor's address, and knows nothing of this node. A new process there is reported as a loss, although the
// break has lost nothing.
func TestAnotherProcessAfterAQuietBreak(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(van.SchedulerID)
	w.times.quiet = time.Hour // not the subject of this test
	r.link(w, s)
	w.answeredBefore(s, 77)
	(*w.tables.peers.Load())[s.who.ID].currentLink().fail(fmt.Errorf("%w: made to", errUnacknowledged))
	if c := w.wantChange("anything", func(change) bool { return true }); c.up || !lost(c.cause) || !strings.Contains(c.cause.Error(), "another process") {
		t.Errorf("first notification: up %t, %v; want %v, as another process answers", c.up, c.cause, van.ErrPeerLost)
	}
	w.wantUp(s)
	w.wantNoLoss()
}

// A node that has lost a peer says so when it connects again, but only to the same process: another one has nothing to drop.
func TestLossReportToTheSameProcess(t *testing.T) {
	for before, want := range map[uint32]int32{0: upAfterLoss, 77: up} {
		r := newRig(t)
		w, s := r.node(9), r.node(van.SchedulerID)
		r.link(w, s)
		if before != 0 {
			w.answeredBefore(s, before)
		}
		first := s.incomingOf(w.who.ID).serial
		(*w.tables.peers.Load())[s.who.ID].currentLink().fail(van.ErrPeerLost)
		w.wantDown(s)
		w.wantUp(s)
		said := int32(0)
		r.until("the node has said that it is back", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, in := range s.accepted.inbounds {
				if in.handshake.node == w.who.ID && in.serial != first {
					said = in.confirmed.Load()
				}
			}
			return said != 0
		})
		if said != want {
			t.Errorf("to the process that has answered, before it that of incarnation %d, the node says %d, want %d", before, said, want)
		}
	}
}

// answeredBefore makes n believe that a process of this incarnation answered it before at peer's address.
func (n *testNode) answeredBefore(peer *testNode, incarnation uint32) {
	p := (*n.tables.peers.Load())[peer.who.ID]
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.process = incarnation
}

// A process repeats its report of losses if the report is lost, too.
func TestLossReportIsRepeated(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	dst := make([]byte, 100<<10)
	w.must(pull(s, 1, 1, dst))
	q := s.next()
	r.until("the credits of the request have left", func() bool { return s.incomingOf(w.who.ID).owed.count.Load() == 0 })
	var writes, ups atomic.Int32
	r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
		switch {
		case wr.Stack != s.stack:
		case wr.Op == verbs.OpWrite && wr.Len > 0 && writes.Add(1) == 1, // the answer
			wr.Op == verbs.OpSendImm && writes.Load() > 0 && ups.Add(1) == 1: // the first SEND on the next connection
			return verbs.StatusRetryExceeded
		}
		return verbs.StatusOK
	})
	s.must(answer(q, value(len(dst), 1)))
	q.Release()
	w.wantDown(s, "answers")
	w.wantUp(s)
	if ups.Load() < 2 {
		t.Errorf("it was said %d times, want twice at least", ups.Load())
	}
}

// Once a server is reported as up after a cut, no earlier loss is reported any more.
func TestNothingIsLostAfterTheRepair(t *testing.T) {
	r := newRig(t)
	r.probes = true
	w, s := r.pair()
	for round := range 4 {
		answers := w.incomingOf(s.who.ID)
		r.net.Cut(w.addr, s.addr)
		r.until("Send fails", func() bool { return lost(w.Send(push(s, 1, 0, value(3000, 1)))) })
		r.until("Send of the server fails", func() bool { return lost(s.Send(push(w, 1, 0, value(3000, 1)))) })
		w.wantDown(s)
		// Otherwise the worker considers it up, and receives the loss when the server connects again.
		r.until("the worker notices the end of the server's connection", answers.failed.Load)
		r.net.Heal(w.addr, s.addr)
		w.wantUp(s)
		dst := make([]byte, 3000)
		ts := int32(1 + round)
		w.must(pull(s, 1, int(ts), dst))
		q := s.nextWith(ts)
		s.must(answer(q, value(len(dst), round)))
		q.Release()
		w.nextWith(ts).Release()
		s.wantUp(w)
		w.wantNoLoss()
	}
}

// nextWith waits for the message with this timestamp. Messages that were sent while the connection broke may arrive before it.
func (n *testNode) nextWith(ts int32) *van.Message {
	n.r.Helper()
	for {
		if m := n.next(); m.Timestamp == ts {
			return m
		} else {
			m.Release()
		}
	}
}

// barred makes the node's connect requests fail until open is called.
func (n *testNode) barred() (open func()) {
	var opened atomic.Bool
	n.r.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpConnect && op.Stack == n.stack && !opened.Load() {
			return fakeverbs.EventError(8)
		}
		return nil
	})
	return func() { opened.Store(true) }
}

// A process that connects again says whether it took this node for lost, and so dropped what it owed it. This fails the requests that wait for the
// process, even if the end of its former connection has not been noticed. A server does not wait for a worker. A report of a process that had the
// id before, with another port, concerns no peer.
func TestLossReport(t *testing.T) {
	for _, c := range []struct {
		name string
		of   int // the node
		said []byte
		lost bool
		port int // port, in addition to the node's
	}{
		{"a server that had lost this worker", 9, []byte{upAfterLoss}, true, 0},
		{"a server that had not", 9, []byte{up}, false, 0},
		{"a server that does not say", 9, nil, false, 0},
		{"a worker that had lost this server", 8, []byte{upAfterLoss}, false, 0},
		{"a process that had the server's id before", 9, []byte{upAfterLoss}, false, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			w, s := r.pair()
			if c.of == 8 {
				w, s = s, w
			}
			s.barred()
			old := w.incomingOf(s.who.ID)
			w.wantNoLoss()
			p := newRaw(r, rawAddr, van.Node{ID: s.who.ID})
			defer p.end()
			again := p.dial(w, 2, func(q int) []byte {
				h := old.handshake
				h.epoch++
				h.qp = q
				h.port += c.port
				return h.encode()
			})
			again.send(immUp, c.said)
			if c.lost {
				w.wantDown(s, "had declared this node lost")
				w.wantUp(s)
			}
			r.until("the first connection has ended, or the other one is confirmed", func() bool {
				stands := false
				for _, x := range *w.tables.conns.Load() {
					if c.port != 0 && x.in != nil && x.in.handshake.port != old.handshake.port {
						return x.in.confirmed.Load() != 0
					}
					stands = stands || x.in == old
				}
				return c.port == 0 && !stands
			})
			w.close() // its watcher has received all notifications
			w.wantNoLoss()
		})
	}
}

// TestLossReportOfOlderConnection: a report of losses also counts if the process has a newer connection by the time the report is read: it is not repeated on
// the newer one.
func TestLossReportOfOlderConnection(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	s.barred()
	old := w.incomingOf(s.who.ID)
	w.wantNoLoss()
	p := newRaw(r, rawAddr, van.Node{ID: s.who.ID})
	defer p.end()
	private := func(epoch uint32) func(q int) []byte {
		return func(q int) []byte {
			h := old.handshake
			h.epoch += epoch
			h.qp = q
			return h.encode()
		}
	}
	first := p.dial(w, 2, private(1))
	q := newRaw(r, rawAddr, van.Node{ID: s.who.ID})
	defer q.end()
	second := q.dial(w, 2, private(2))
	r.until("the second connection is known", func() bool {
		in := w.incomingOf(s.who.ID)
		return in != nil && in.handshake.epoch == old.handshake.epoch+2
	})
	first.send(immUp, []byte{upAfterLoss})
	w.wantDown(s, "had declared this node lost")
	second.send(immUp, []byte{up})
	w.wantUp(s)
}
