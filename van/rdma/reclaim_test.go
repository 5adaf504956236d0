package rdma

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stepaf/stepaf-go/internal/env"
	"github.com/stepaf/stepaf-go/van"
)

func places(n int) func(*env.Config) {
	return func(c *env.Config) { c.AddressPoolSize = n }
}

// hoard makes n messages lie at s at once, and lets them go.
func hoard(w, s *testNode, n, size int) {
	w.r.Helper()
	for i := range n {
		w.must(push(s, 1, i, value(size, i)))
	}
	var held []*van.Message
	for range n {
		held = append(held, s.next())
	}
	for _, m := range held {
		m.Release()
	}
}

// A peer that once had all places, and is idle, does not keep another from sending: it
// gives back what it does not use.
func TestIdlePeerGivesBack(t *testing.T) {
	r := newRig(t)
	s := r.node(8, places(8))
	a, b := r.node(9), r.node(11)
	r.link(a, s)
	r.link(b, s)
	hoard(a, s, s.table.Room(), 3000)
	b.must(control(s, 1))
	b.must(push(s, 1, 2, value(3000, 2)))
	seen := map[int32]bool{}
	for range 2 {
		m := s.next()
		seen[m.Timestamp] = true
		m.Release()
	}
	if !seen[1] || !seen[2] {
		t.Errorf("timestamps %v, want 1 and 2", seen)
	}
	// The first one can send again.
	hoard(a, s, 3, 3000)
	if n := a.Stats().Malformed + b.Stats().Malformed + s.Stats().Malformed; n != 0 {
		t.Errorf("%d malformed messages", n)
	}
	a.toldNothing()
	b.toldNothing()
}

// A peer whose places all have the wrong size gets some of the right one for them.
func TestPlacesOfOtherSizes(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(places(8))
	for i, size := range []int{3000, 6000, 20000, 1500, 3000} {
		hoard(w, s, s.table.Room(), size+i)
	}
	w.toldNothing()
}

// Control messages come while data holds all places that it can get.
func TestControlIsNotStarved(t *testing.T) {
	r := newRig(t)
	s := r.node(8, places(8))
	a, b := r.node(9), r.node(11)
	r.link(a, s)
	r.link(b, s)
	for i := range 20 {
		a.must(push(s, 1, i, value(3000, i)))
	}
	var held []*van.Message
	for range s.table.Room() {
		held = append(held, s.next())
	}
	r.until("a question waits", func() bool { return r.starved(s) })
	for i := range 50 {
		a.must(control(s, 100+i))
		b.must(control(s, 200+i))
	}
	for seen := 0; seen < 100; seen++ {
		m := s.next()
		if !m.IsControl() {
			t.Fatalf("timestamp %d, want a control message", m.Timestamp)
		}
		m.Release()
	}
	for _, m := range held {
		m.Release()
	}
	for range 20 - len(held) {
		s.next().Release()
	}
}

// Many peers with bursts in three sizes share too few places: all is carried. It is 64
// peers with bursts of 64 and 10,240 places, a thirty-second of it.
func TestBurstsOfManyPeers(t *testing.T) {
	const peers, burst = 8, 16
	r := newRig(t)
	s := r.node(8, places(320))
	var all []*testNode
	for i := range peers {
		n := r.node(9 + 2*i)
		r.link(n, s)
		all = append(all, n)
	}
	for round := range 3 {
		for _, n := range all {
			for k, size := range []int{1000, 3000, 6000} {
				for i := range burst {
					n.must(push(s, uint64(k), round*1000+k*100+i, value(size, i)))
				}
			}
		}
		for range peers * burst * 3 {
			s.next().Release()
		}
	}
	for _, n := range all {
		n.toldNothing()
	}
}

// An idle peer that does not give back what it is asked for is cut off.
func TestHoarderIsCutOff(t *testing.T) {
	r := newRig(t)
	s, w := r.node(8, places(8)), r.node(9)
	r.link(w, s)
	p := newRaw(r, rawAddr, van.Node{ID: 11})
	c := p.dial(s, 2, func(q int) []byte { return p.hello(true, 77, q, 2) })
	for i := range s.table.Room() {
		c.ask(start{metaLen: cellSize, dataNum: ourStart, data: [4]uint64{1024, kindPush | kindRequest, 1024}, origin: uint64(i), key: 6})
	}
	w.must(push(s, 1, 1, value(3000, 1)))
	s.wantValue(1, value(3000, 1))
	if n := len(s.incoming()); n != 1 {
		t.Errorf("%d incoming connections, want that of the worker", n)
	}
	p.end()
}

func peerBudget(n int) func(*env.Config) {
	return func(c *env.Config) { c.RDMAPeerBudget = n }
}

// Questions for more than one peer may have are refused, each at once; a node learns why.
func TestPeerBudget(t *testing.T) {
	h := newHostileWorld(t, true)
	before := h.s.stack.Registered()
	ask := func(n uint64) reply {
		return h.c.ask(start{metaLen: cellSize, dataNum: ourStart, data: [4]uint64{n, kindPush | kindRequest, n}, origin: n, key: 6})
	}
	for range 8 {
		if r := ask(2 << 30); r.flags != replyRefused|replyBudget {
			t.Errorf("a question for 2 GiB is answered by %+v, want a refusal", r)
		}
	}
	if now := h.s.stack.Registered(); now > before+1<<20 {
		t.Errorf("%d bytes are registered after refusals, %d before", now, before)
	}
	h.ends(0)
}

// A message that is more than the peer's budget allows fails with an error that says so, and
// others go on.
func TestOverPeerBudget(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(peerBudget(1 << 20))
	w.must(push(s, 1, 1, value(3<<20, 1)))
	c := w.wantDown(s, "STEPAF_RDMA_PEER_BUDGET")
	if !errors.Is(c.cause, van.ErrQueueFull) {
		t.Errorf("told %v, want %v", c.cause, van.ErrQueueFull)
	}
	w.wantUp(s)
	w.must(push(s, 1, 2, value(3000, 2)))
	s.wantValue(2, value(3000, 2))
}

// Bytes that an idle peer has in places of one size come back for those of another.
func TestBudgetIsReclaimed(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(peerBudget(1 << 20))
	for round := range 3 {
		for i, size := range []int{60 << 10, 120 << 10, 250 << 10} {
			for k := range 8 {
				w.must(push(s, 1, k, value(size, round+i)))
			}
			for k := range 8 {
				s.wantValue(k, value(size, round+i))
			}
			if n := s.incomingOf(9).bytes.Load(); n > 1<<20 {
				t.Errorf("%d bytes are registered for the worker, want at most %d", n, 1<<20)
			}
		}
	}
	w.toldNothing()
}

// All peers together have a budget, too: idle ones give back for others.
func TestTotalBudget(t *testing.T) {
	r := newRig(t)
	s := r.node(8, func(c *env.Config) { c.RDMABudget = 1 << 20 })
	for i := range 4 {
		n := r.node(9 + 2*i)
		r.link(n, s)
		hoard(n, s, 2, 120<<10)
		hoard(n, s, 3, 60<<10)
		if b := s.leased.Load(); b > 1<<20 {
			t.Errorf("%d bytes are registered for %d peers, want at most %d", b, i+1, 1<<20)
		}
	}
	for _, n := range r.nodes[1:] {
		n.toldNothing()
	}
	r.nodes[1].must(push(s, 1, 7, value(3000, 7)))
	s.wantValue(7, value(3000, 7))
}

// What was registered for a peer is given back with its last connection.
func TestRegisteredBytesComeBack(t *testing.T) {
	r := newRig(t)
	s := r.node(8)
	for i := range 3 {
		n := r.node(9)
		n.connect(s)
		n.wantUp(s)
		for k, size := range []int{100, 3000, 100 << 10} {
			n.must(push(s, uint64(k), k, value(size, k)))
			s.wantValue(k, value(size, k))
		}
		if b := s.leased.Load(); b == 0 {
			t.Error("nothing is counted")
		}
		n.close()
		r.until(fmt.Sprintf("all of peer %d is given back", i), func() bool { return s.leased.Load() == 0 && s.table.Len() == 0 })
	}
}
