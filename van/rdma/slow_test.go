package rdma

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// begin makes queue pairs to a node without connecting them.
func (p *raw) begin(to *testNode, qps int) (c *rawConn, ids []verbs.ID) {
	p.r.Helper()
	c = &rawConn{raw: p}
	for q := range qps {
		id, err := p.ch.NewID(uint64(q + 1))
		p.check(err)
		p.check(id.ResolveAddr(p.addr, netip.AddrPortFrom(to.addr, uint16(to.who.Port)), time.Second))
		p.event(verbs.AddrResolved)
		p.check(id.ResolveRoute(time.Second))
		p.event(verbs.RouteResolved)
		c.qps, ids = append(c.qps, p.use(id)), append(ids, id)
	}
	return c, ids
}

// A StepMesh node is answered when all its queue pairs have sent connect requests: it counts resolved routes and answers with one counter. (Fault 3 of the runs
// with C++ nodes.)
func TestOriginalIsAnsweredAtOnce(t *testing.T) {
	for _, all := range []bool{true, false} {
		r := newRig(t)
		s := r.node(8)
		if !all {
			s.times.allQueuePairs = 50 * time.Millisecond // it has fewer queue pairs than the server
		}
		p := newRaw(r, rawAddr, van.Node{ID: 9})
		_, ids := p.begin(s, 2)
		ask := func(q int) {
			p.check(ids[q].Connect(verbs.ConnParam{Private: p.privateData(false, 0, q, 2), RetryCount: 6, RNRRetryCount: 7}))
		}
		ask(0)
		r.until("the server has the first", func() bool { return len(s.incoming()) == 1 })
		in := s.incomingOf(9)
		asked := func(n int) func() bool {
			return func() bool {
				in.mu.Lock()
				defer in.mu.Unlock()
				return len(in.accept.ids) == n
			}
		}
		r.until("it has asked", asked(1))
		if all {
			in.mu.Lock()
			n := in.accept.accepted
			in.mu.Unlock()
			if n != 0 {
				t.Error("one of two queue pairs is accepted before the other has asked")
			}
			ask(1)
			p.event(verbs.Established)
		}
		p.event(verbs.Established)
		p.end()
	}
}

// A node waits long for a slow StepMesh node, which would abort if the connect request were withdrawn. (Fault 4.)
func TestSlowOriginalIsWaitedFor(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	w.times.connect = time.Millisecond
	s := newRawServer(r, w)
	w.must(control(s.who, 1))
	p := (*w.tables.peers.Load())[8]
	r.until("a connect request is with it", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.state.connecting
	})
	begun := time.Now()
	r.until("the time has passed that a native node has", func() bool { return time.Since(begun) > 10*w.times.connect })
	s.take().receive(immSlotRequest)
	p.mu.Lock()
	if p.state.connectCount != 1 {
		t.Errorf("%d connections, want the first", p.state.connectCount)
	}
	p.mu.Unlock()
	if len(s.early) > 0 {
		t.Errorf("%d more events: %v; a connect request was withdrawn", len(s.early), s.early)
	}
	s.end()
}

// A connection that breaks while only control messages are in flight is restored, and they are sent again. None is lost, none is delivered twice, and the peer is
// not reported as lost. (Fault 5.)
func TestControlSurvivesALostConnection(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	w.times.quiet = patience
	for round := range 3 {
		first := (*w.tables.peers.Load())[8].currentLink()
		failed := false
		r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
			if wr.Stack == w.stack && wr.Op == verbs.OpWriteImm && !failed {
				failed = true
				return verbs.StatusRetryExceeded
			}
			return verbs.StatusOK
		})
		for i := range 20 {
			w.must(control(s, 100*round+i))
		}
		for i := range 20 {
			m := s.next()
			if int(m.Timestamp) != 100*round+i {
				t.Fatalf("timestamp %d came, want %d", m.Timestamp, 100*round+i)
			}
			m.Release()
		}
		if (*w.tables.peers.Load())[8].currentLink() == first {
			t.Error("the connection was not lost")
		}
		w.wantNoLoss()
	}
	w.must(push(s, 1, 1000, value(3000, 1)))
	s.wantValue(1000, value(3000, 1))
}

// A control message that is sent again, although it had arrived, is delivered once.
func TestRepeatedControl(t *testing.T) {
	h := newHostileWorld(t, true)
	send := func(c *rawConn, ts int, number uint32) {
		r := c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{0, kindOneShot}, origin: uint64(ts)})
		c.notify(0, r.index, r.meta, r.metaKey, encode(h.rig, control(h.s, ts), &trailer{numbered: true, lens: [van.MaxFrames]uint32{number, 5}}))
	}
	hello := func(epoch uint32) func(int) []byte {
		return func(q int) []byte {
			x := handshake{node: 13, port: h.p.port, host: h.p.addr.String(), native: true, epoch: epoch, qp: q, qpCount: 2, incarnation: 5555}
			return x.encode()
		}
	}
	a := h.p.dial(h.s, 2, hello(1))
	send(a, 1, maxData-1)
	send(a, 2, maxData)
	b := h.p.dial(h.s, 2, hello(2))
	send(b, 3, maxData) // once more
	send(b, 4, 0)
	for _, want := range []int32{1, 2, 4} {
		m := h.s.next()
		if m.Timestamp != want {
			t.Errorf("timestamp %d came, want %d", m.Timestamp, want)
		}
		m.Release()
	}
	h.ends(0)
}

// A node that makes a new connection to a peer numbers its control messages from the start. They are not confused with those of the former connection, whose last
// ones may arrive later.
func TestControlOfAReplacedWriter(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	for i := range 5 {
		w.must(control(s, i))
		s.nextWith(int32(i)).Release()
	}
	for round := range 2 {
		before := (*w.tables.peers.Load())[s.who.ID]
		w.connect(s)
		if (*w.tables.peers.Load())[s.who.ID] == before {
			t.Fatal("the node goes on with the connection that it has")
		}
		w.wantUp(s)
		for i := range 3 {
			ts := 10 + 10*round + i
			w.must(control(s, ts))
			if m := s.next(); int(m.Timestamp) != ts {
				t.Fatalf("message %d came, want %d", m.Timestamp, ts)
			} else {
				m.Release()
			}
		}
	}
}

// There is no warning if a value is released right after the next one was written to its slot.
func TestAnsweredValueIsReleased(t *testing.T) {
	h := newHostileWorld(t, false)
	h.s.times.overwriteGrace = patience
	r := h.c.ask(slotRequest{metaLen: 400, dataNum: 2, data: [4]uint64{8, 600}, origin: 1, key: 6})
	var last *van.Message
	for i := range 20 {
		h.c.notify(0, r.index, r.meta, r.metaKey, encode(h.rig, push(h.s, 6, i, value(600, i)), nil))
		m := h.s.next()
		if last != nil {
			last.Release() // its answer was sent before
		}
		last = m
	}
	last.Release()
	in := h.s.incomingOf(11)
	h.until("it has been looked at", func() bool { in.mu.Lock(); defer in.mu.Unlock(); return in.slots.suspect.slot == nil })
	in.mu.Lock()
	if in.slots.warned {
		t.Error("it was warned of")
	}
	in.mu.Unlock()
	h.ends(0)
}
