package rdma

import (
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// linked returns the connection that n assigns to a peer as the peer's own.
func (n *testNode) linked(id int) *inbound { return (*n.tables.peers.Load())[id].inbound.Load() }

// Each peer is assigned the connection that it has opened itself, although others listen on the same port, or connect under its id from another
// port. The end of such a connection does not concern the peer.
func TestPeersAreLinkedWithTheirOwn(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	var servers []*testNode
	for _, id := range []int{8, 10} {
		s := r.make(id)
		s.listenOn(4000)
		s.Start(func(m *van.Message) { s.in <- m.Retain() })
		r.link(w, s)
		servers = append(servers, s)
	}
	check := func(when string) {
		t.Helper()
		w.linkInbounds()
		for _, s := range servers {
			if in := w.linked(s.who.ID); in == nil || in.handshake.node != s.who.ID || in.handshake.incarnation != s.local.incarnation {
				t.Fatalf("%s: %s is linked with a connection of %s", when, van.NodeName(s.who.ID), in.openerName())
			}
		}
	}
	for _, s := range servers {
		r.until("both have been linked", func() bool { return w.linked(s.who.ID) != nil })
	}
	check("at first")
	p := newRaw(r, rawAddr, servers[0].who) // another port; it does not send its node's name
	p.dial(w, 2, func(q int) []byte { return p.privateData(false, 0, q, 2) })
	r.until("it has a connection", func() bool { return len(w.incoming()) == 3 })
	check("beside one with the same id")
	for i, s := range servers {
		w.must(push(s, 1, i, value(3000, i)))
		s.wantValue(i, value(3000, i))
		s.must(push(w, 1, i, value(3000, i)))
		w.wantValue(i, value(3000, i))
	}
	p.end()
	r.until("it has ended", func() bool { return len(w.incoming()) == 2 })
	check("after that has ended")
	servers[0].Disconnect(9)
	r.until("that of the first server has ended", func() bool { return len(w.incoming()) == 1 })
	r.until("it is not linked any more", func() bool { return w.linked(8) == nil })
	if in := w.linked(10); in == nil || in.handshake.node != 10 {
		t.Errorf("the second server is linked with a connection of %s after the end of the first one's", in.openerName())
	}
	if n := w.Stats().Malformed + servers[1].Stats().Malformed; n != 0 {
		t.Errorf("%d malformed messages", n)
	}
	w.wantNoLoss()
}

// openerName names the opener of in.
func (in *inbound) openerName() string {
	if in == nil {
		return "nobody"
	}
	return in.name()
}

// A SEND to a peer that finds the queue full is sent later, once and in order.
func TestRepliesWaitForQueue(t *testing.T) {
	r := newRig(t)
	s := r.node(8, shortQueues)
	p := newRaw(r, rawAddr, van.Node{ID: 11})
	c := p.dial(s, 2, func(q int) []byte { return p.privateData(true, 77, q, 2) })
	in := s.incomingOf(11)
	const n = 20
	said := 0
	for range 3 { // the queue is reused
		for _, q := range in.sends.QueuePairs {
			r.net.HoldQP(q.Num())
		}
		for i := range n {
			var b [slotRequestLen]byte
			(&slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{512, 0, 512}, origin: uint64(said + i)}).put(b[:])
			c.send(immSlotRequest, b[:])
		}
		r.until("those without room wait", func() bool {
			in.mu.Lock()
			defer in.mu.Unlock()
			return in.backlog.Len() == n-1 // one SEND fills the queue
		})
		r.net.Release()
		for i := range n {
			var a slotReply
			p.check(a.get(c.receive(immSlotReply)))
			if a.origin != uint64(said+i) || a.flags&replyRefused != 0 {
				t.Fatalf("answer %d is to request %d with flags %#x, want request %d", i, a.origin, a.flags, said+i)
			}
		}
		said += n
	}
	p.end()
}
