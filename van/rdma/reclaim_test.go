package rdma

import (
	"errors"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

func places(n int) func(*env.Config) {
	return func(c *env.Config) { c.AddressPoolSize = n }
}

// hoard makes s hold n messages at a time, and then releases them.
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

// A peer that once had all slots, and is idle, does not keep another peer from sending: it returns the slots.
func TestIdlePeerReturnsSlots(t *testing.T) {
	r := newRig(t)
	s := r.node(8, places(8))
	a, b := r.node(9), r.node(11)
	r.link(a, s)
	r.link(b, s)
	hoard(a, s, s.budget.slots.Room(), 3000)
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
	// The first peer can send again.
	hoard(a, s, 3, 3000)
	if n := a.Stats().Malformed + b.Stats().Malformed + s.Stats().Malformed; n != 0 {
		t.Errorf("%d malformed messages", n)
	}
	a.wantNoLoss()
	b.wantNoLoss()
}

// If a peer's slots all have the wrong size, it gets some of the right size for them.
func TestSlotsOfOtherSizes(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(places(8))
	for i, size := range []int{3000, 6000, 20000, 1500, 3000} {
		hoard(w, s, s.budget.slots.Room(), size+i)
	}
	w.wantNoLoss()
}

// Control messages arrive while data occupies all the slots that it may have.
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
	for range s.budget.slots.Room() {
		held = append(held, s.next())
	}
	r.until("a slot request waits", func() bool { return r.starved(s) })
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

// Many peers with bursts in three sizes share too few slots, and all messages arrive. The test models 64 peers with bursts of 64 and 10,240 slots, at a
// thirty-second of that size.
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
		n.wantNoLoss()
	}
}

// An idle peer that does not return slots when asked is disconnected.
func TestHoarderIsDisconnected(t *testing.T) {
	r := newRig(t)
	s, w := r.node(8, places(8)), r.node(9)
	s.times.reclaim = 500 * time.Millisecond
	r.link(w, s)
	p := newRaw(r, rawAddr, van.Node{ID: 11})
	c := p.dial(s, 2, func(q int) []byte { return p.privateData(true, 77, q, 2) })
	for i := range s.budget.slots.Room() {
		c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{1024, 0, 1024}, origin: uint64(i), key: 6})
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

// Requests for more bytes than a peer may have are refused, each at once. A node's error says why.
func TestPeerBudget(t *testing.T) {
	h := newHostileWorld(t, true)
	before := h.s.stack.Registered()
	ask := func(n uint64) slotReply {
		return h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{n, 0, n}, origin: n, key: 6})
	}
	for range 8 {
		if r := ask(2 << 30); r.flags != replyRefused|replyBudget {
			t.Errorf("a slot request for 2 GiB is answered by %+v, want a refusal", r)
		}
	}
	if n := h.s.Stats().RefusedSlots; n != 8 {
		t.Errorf("%d slot requests are counted as refused, want 8", n)
	}
	if now := h.s.stack.Registered(); now > before+1<<20 {
		t.Errorf("%d bytes are registered after refusals, %d before", now, before)
	}
	h.ends(0)
}

// A message that exceeds the peer's budget fails with an error that says so, and other messages are sent.
func TestOverPeerBudget(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(peerBudget(1 << 20))
	w.must(push(s, 1, 1, value(3<<20, 1)))
	c := w.wantDown(s, "STEPAF_RDMA_PEER_BUDGET")
	if !errors.Is(c.cause, van.ErrQueueFull) {
		t.Errorf("told %v, want %v", c.cause, van.ErrQueueFull)
	}
	s.says("rdma: a peer gets no more memory", van.NodeName(9))
	w.wantUp(s)
	w.must(push(s, 1, 2, value(3000, 2)))
	s.wantValue(2, value(3000, 2))
}

// Bytes of an idle peer's slots of one size are returned for slots of another size.
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
			if n := s.incomingOf(9).slots.registeredBytes.Load(); n > 1<<20 {
				t.Errorf("%d bytes are registered for the worker, want at most %d", n, 1<<20)
			}
		}
	}
	w.wantNoLoss()
}

// The total budget also holds: idle peers return bytes for others.
func TestTotalBudget(t *testing.T) {
	r := newRig(t)
	s := r.node(8, func(c *env.Config) { c.RDMABudget = 1 << 20 })
	for i := range 4 {
		n := r.node(9 + 2*i)
		r.link(n, s)
		hoard(n, s, 2, 120<<10)
		hoard(n, s, 3, 60<<10)
		if b := s.budget.registered.Load(); b > 1<<20 {
			t.Errorf("%d bytes are registered for %d peers, want at most %d", b, i+1, 1<<20)
		}
	}
	for _, n := range r.nodes[1:] {
		n.wantNoLoss()
	}
	if x := s.Stats(); x.SlotWaits == 0 || x.RefusedSlots != 0 {
		t.Errorf("%d slot requests are counted as waiting, %d as refused, want some and none", x.SlotWaits, x.RefusedSlots)
	}
	s.says("rdma: a peer waits for a slot", "BYTEPS_ADDRESS_POOL_SIZE")
	r.nodes[1].must(push(s, 1, 7, value(3000, 7)))
	s.wantValue(7, value(3000, 7))
}

// TestMoreThanTotalBudget: a value that is longer than the total budget is refused, since its slot request would wait forever. Messages
// after it are sent.
func TestMoreThanTotalBudget(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8, func(c *env.Config) { c.RDMABudget = 1 << 20 })
	r.link(w, s)
	w.must(push(s, 1, 1, value(2<<20, 1)))
	w.wantChange("a message has failed", func(c change) bool { return !c.up && errors.Is(c.cause, van.ErrQueueFull) })
	w.wantUp(s)
	w.must(push(s, 1, 2, value(3000, 2)))
	s.wantValue(2, value(3000, 2))
}

// TestTotalBudgetInUse: a value that fits only in place of other peers' values that are in use waits for a while, then fails.
func TestTotalBudgetInUse(t *testing.T) {
	r := newRig(t)
	s, a, b := r.node(8, func(c *env.Config) { c.RDMABudget = 1 << 20 }), r.node(9), r.node(11)
	s.times.budgetWait, s.times.reclaim = 20*time.Millisecond, 20*time.Millisecond
	r.link(a, s)
	r.link(b, s)
	var held []*van.Message
	for i := range 3 {
		a.must(push(s, 1, i, value(250<<10, i)))
		held = append(held, s.next())
	}
	b.must(push(s, 1, 3, value(300<<10, 3)))
	if c := b.wantDown(s, "STEPAF_RDMA_BUDGET"); !errors.Is(c.cause, van.ErrQueueFull) {
		t.Errorf("notified of %v, want %v", c.cause, van.ErrQueueFull)
	}
	b.wantUp(s)
	s.says("rdma: a peer gets no more memory", van.NodeName(11), "STEPAF_RDMA_BUDGET")
	b.must(push(s, 1, 4, value(3000, 4)))
	s.wantValue(4, value(3000, 4))
	for _, m := range held {
		m.Release()
	}
	a.wantNoLoss()
}

// TestIdlePeerWithFairShare: if the peers that have more than their share use all of it, an idle peer returns its share, too.
func TestIdlePeerWithFairShare(t *testing.T) {
	r := newRig(t)
	s, a, b, idle := r.node(8, func(c *env.Config) { c.RDMABudget = 1 << 20 }), r.node(9), r.node(11), r.node(13)
	s.times.budgetWait = 20 * time.Millisecond
	for _, n := range []*testNode{a, b, idle} {
		r.link(n, s)
	}
	hoard(idle, s, 1, 250<<10)
	var held []*van.Message
	for i := range 2 {
		a.must(push(s, 1, i, value(250<<10, i)))
		held = append(held, s.next())
	}
	b.must(push(s, 1, 2, value(300<<10, 2)))
	s.wantValue(2, value(300<<10, 2))
	for _, m := range held {
		m.Release()
	}
	for _, n := range []*testNode{a, b, idle} {
		n.wantNoLoss()
	}
}

// All bytes registered for a peer are released with its last connection.
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
		if s.budget.registered.Load() == 0 {
			t.Error("nothing is counted")
		}
		long := control(s, 10) // its meta does not fit into a cell
		long.Body = make([]byte, 20*conn.CellSize)
		n.must(long)
		if m := s.next(); m.Timestamp != 10 || len(m.Body) != len(long.Body) {
			t.Errorf("message %d with %d bytes, want 10 with %d", m.Timestamp, len(m.Body), len(long.Body))
		} else {
			m.Release()
		}
		n.close()
		r.until(fmt.Sprintf("all of peer %d is released", i), func() bool { return s.budget.registered.Load() == 0 && s.budget.slots.Len() == 0 })
	}
}

// allInUse makes a worker whose slots at a server all have messages in use, held, and that waits to send message 3. The server asked it for slots long ago.
// askedTwice returns when the server has asked twice more, or has disconnected the worker.
func (r *rig) allInUse() (w, s *testNode, held []*van.Message, askedTwice func()) {
	s, w = r.node(8, func(c *env.Config) { c.RDMABudget = 900 << 10 }), r.node(9)
	r.link(w, s)
	for i := range 3 {
		w.must(push(s, 1, i, value(250<<10, i)))
		held = append(held, s.next())
	}
	w.must(push(s, 1, 3, value(250<<10, 3)))
	in := s.incomingOf(9)
	asked := func() (at uint64) {
		in.mu.Lock()
		defer in.mu.Unlock()
		return in.slots.reclaim.at
	}
	r.until("it is asked for slots", func() bool { return asked() != 0 })
	in.mu.Lock()
	in.slots.reclaim.since = 1
	in.mu.Unlock()
	return w, s, held, func() {
		for range 2 {
			before := asked()
			r.until("it is asked again, or cut off", func() bool { return asked() != before || in.failed.Load() })
		}
	}
}

// A peer is not disconnected for slots that it has used until just now, however long ago it was asked for them: its response is in flight.
func TestSlotsInUseAreNotMissed(t *testing.T) {
	r := newRig(t)
	w, s, held, askedTwice := r.allInUse()
	r.net.Stop(w.stack)
	held[0].Release()
	askedTwice()
	r.net.Wake(w.stack)
	s.wantValue(3, value(250<<10, 3))
	for _, m := range held[1:] {
		m.Release()
	}
	w.wantNoLoss()
}

// TestSlotIsReleasedAtOnce: a search for unused slots does not find one that is being released, before its last use is recorded. Otherwise the peer would be
// disconnected.
func TestSlotIsReleasedAtOnce(t *testing.T) {
	r := newRig(t)
	w, s, held, _ := r.allInUse()
	in := s.incomingOf(9)
	in.mu.Lock()
	released := make(chan struct{})
	go func() {
		held[0].Release()
		close(released)
	}()
	<-time.After(50 * time.Millisecond)
	free := slotSet{in}.hasFreeSlots()
	in.mu.Unlock()
	if free {
		t.Error("a slot is free of which it is not noted when it was used last")
	}
	<-released
	s.wantValue(3, value(250<<10, 3))
	for _, m := range held[1:] {
		m.Release()
	}
	w.wantNoLoss()
}

// TestSlotsInUseAreAllItHas: a peer that cannot return anything, since its messages are still in use, is asked again and again, and not disconnected.
func TestSlotsInUseAreAllItHas(t *testing.T) {
	r := newRig(t)
	w, s, held, askedTwice := r.allInUse()
	askedTwice()
	if s.incomingOf(9).failed.Load() {
		t.Error("it was cut off")
	}
	for _, m := range held {
		m.Release()
	}
	s.wantValue(3, value(250<<10, 3))
	w.wantNoLoss()
}

// A value that fits only in place of values that are in use waits for a while, then fails.
func TestBudgetInUse(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(peerBudget(1 << 20))
	s.times.budgetWait = 20 * time.Millisecond
	for i := range 2 {
		w.must(push(s, 1, i, value(400<<10, i)))
	}
	held := []*van.Message{s.next(), s.next()}
	w.must(push(s, 2, 2, value(50<<10, 2)))
	if c := w.wantDown(s, "STEPAF_RDMA_PEER_BUDGET"); !errors.Is(c.cause, van.ErrQueueFull) {
		t.Errorf("told %v, want %v", c.cause, van.ErrQueueFull)
	}
	w.wantUp(s)
	if x := s.Stats(); x.SlotWaits == 0 || x.RefusedSlots == 0 {
		t.Errorf("%d slot requests are counted as waiting, %d as refused, want some of both", x.SlotWaits, x.RefusedSlots)
	}
	for _, m := range held {
		m.Release()
	}
	w.must(push(s, 2, 3, value(50<<10, 3)))
	s.wantValue(3, value(50<<10, 3))
}

// Buffers that the application has registered do not count as the peer's.
func TestRegisteredBuffersDoNotCount(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(peerBudget(1 << 20))
	if err := s.RegisterRecvBuffer(9, 1, backend.Bytes(make([]byte, 3<<20))); err != nil {
		t.Fatal(err)
	}
	w.must(push(s, 1, 1, value(3<<20, 1)))
	s.wantValue(1, value(3<<20, 1))
	w.wantNoLoss()
	if n := s.incomingOf(9).slots.registeredBytes.Load(); n != 0 {
		t.Errorf("%d bytes are counted", n)
	}
}

// A StepMesh node that requests too much cannot be refused: its connection ends.
func TestOriginalOverBudget(t *testing.T) {
	h := newHostileWorld(t, false)
	var b [slotRequestLen]byte
	(&slotRequest{metaLen: 400, dataNum: 2, data: [4]uint64{8, 2<<30 - 1}, origin: 1, key: 6}).put(b[:])
	h.c.send(immSlotRequest, b[:])
	h.until("its connection has ended", func() bool { return len(h.s.incoming()) == 1 })
	h.ends(0)
}

// A peer that requests slots for control messages without using them gets some, and leaves some for others.
func TestUnusedOneShots(t *testing.T) {
	r := newRig(t)
	s, w := r.node(8, places(64)), r.node(9)
	r.link(w, s)
	p := newRaw(r, rawAddr, van.Node{ID: 11})
	c := p.dial(s, 2, func(q int) []byte { return p.privateData(true, 77, q, 2) })
	for i := range 100 {
		var b [slotRequestLen]byte
		(&slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{0, kindOneShot}, origin: uint64(i)}).put(b[:])
		c.send(immSlotRequest, b[:])
	}
	in := s.incomingOf(11)
	most := s.budget.slots.Room() / oneShotShare
	r.until("all have been seen", func() bool {
		in.mu.Lock()
		defer in.mu.Unlock()
		return len(in.slots.waiting[controlPriority]) == 100-most
	})
	if n := int(in.slots.oneShots.Load()); n != most {
		t.Errorf("it has %d slots for control messages, want %d", n, most)
	}
	w.must(control(s, 1))
	s.next().Release()
	hoard(w, s, 20, 3000)
	p.end()
}

// Invalid returns of slots are refused: those of other peers' slots, and of slots in use.
func TestHostileReturns(t *testing.T) {
	h := newHostileWorld(t, true)
	h.w.must(push(h.s, 1, 900, value(6000, 1)))
	h.s.wantValue(900, value(6000, 1))
	mine := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{1024, 0, 1024}, origin: 1})
	shot := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{0, kindOneShot}, origin: 2})
	n := uint64(0)
	say := func(what string, index int, refused bool) {
		t.Helper()
		var b [trailerLen]byte
		(&trailer{n: 1, credits: [maxCredits]uint16{uint16(index)}}).put(b[:])
		h.c.send(immReturn, b[:])
		if refused {
			n++
			h.seen(n, what)
		}
	}
	var others []*receiveSlot
	h.s.budget.slots.Each(func(l *receiveSlot) {
		if l.Owner.(*inbound).handshake.node != 11 {
			others = append(others, l)
		}
	})
	for _, l := range others {
		say("slot of another", int(l.Index()), true)
		if h.s.budget.slots.Get(l.Index()) != l {
			t.Error("the slot of another has ended")
		}
	}
	if len(others) == 0 {
		t.Error("no slot of another was tried")
	}
	say("slot for one message", int(shot.index), false)
	say("slot for one message that was returned", int(shot.index), true)
	say("no slot", h.s.budget.slots.Len()+5, true)
	say("no slot that can be", 1<<16-1, true)
	h.c.post(0, verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: mine.data, RKey: mine.dataKey}, value(1000, 9))
	h.c.notify(0, mine.index, mine.meta, mine.metaKey, encodeParts(h.rig, push(h.s, 6, 1, value(1000, 9)), []placement{{where: valueInSlot}}, nil, trailer{}))
	m := h.s.next()
	say("slot in use", int(mine.index), true)
	if string(m.Vals.Host()) != string(value(1000, 9)) {
		t.Error("the value has changed")
	}
	m.Release()
	in := h.s.incomingOf(11)
	in.mu.Lock()
	in.slots.reclaim.since = 1 // it was asked long ago
	in.mu.Unlock()
	say("mine", int(mine.index), false)
	h.until("it has come back", func() bool { return h.s.budget.slots.Get(mine.index) == nil })
	in.mu.Lock()
	if in.slots.reclaim.since != 0 {
		t.Error("it has returned the slots that it was asked for, and will be disconnected for not doing so")
	}
	in.mu.Unlock()
	h.c.send(immReturn, nil)
	n++
	h.seen(n, "no trailer")
	h.ends(n)
}

// A sender returns the slots that it is asked for, and refuses invalid requests.
func TestHostileReclaims(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	p := newRaw(r, rawAddr, van.Node{ID: 10})
	bad := &testNode{who: van.Node{ID: 10, Hostname: rawAddr.String(), Port: p.port}}
	w.connect(bad)
	c := p.accept(2, func(q int) []byte { return p.privateData(true, 0, q, 2) })
	w.wantUp(bad)
	w.must(push(bad, 1, 1, value(5000, 1)))
	var q slotRequest
	p.check(q.get(c.receive(immSlotRequest)))
	at := uint64(uintptr(unsafe.Pointer(&p.mem[len(p.mem)-16384])))
	var b [slotReplyLen]byte
	(&slotReply{origin: q.origin, index: 7, meta: at, metaKey: p.mr.RKey(), data: at + conn.CellSize, dataKey: p.mr.RKey()}).put(b[:])
	c.send(immSlotReply, b[:])
	for i, bad := range [][]byte{nil, make([]byte, reclaimRequestLen), make([]byte, reclaimRequestLen-1), make([]byte, slotRequestLen)} {
		c.send(immReclaim, bad)
		r.until("it is refused", func() bool { return w.Stats().Malformed == uint64(i+1) })
	}
	var ask [reclaimRequestLen]byte
	(&reclaimRequest{slots: 1<<32 - 1, bytes: 1<<64 - 1}).put(ask[:])
	c.send(immReclaim, ask[:])
	var credit [trailerLen]byte
	epoch := uint32(0)
	for _, x := range *w.tables.conns.Load() {
		if x.peer != nil {
			epoch = x.link.epoch
		}
	}
	(&trailer{epoch: epoch, n: 1, credits: [maxCredits]uint16{7}}).put(credit[:])
	c.send(immCredits, credit[:])
	var back trailer
	p.check(back.get(c.receive(immReturn)))
	if back.n != 1 || back.credits[0] != 7 {
		t.Errorf("slots %v come back, want 7", back.credits[:back.n])
	}
	w.must(push(bad, 1, 2, value(5000, 1)))
	p.check(q.get(c.receive(immSlotRequest))) // it requests a new slot
	w.Disconnect(10)
	p.end()
}

// Credits that arise while the loop sleeps are sent at once.
func TestCreditsWhileAsleep(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	for i := range 20 {
		w.must(push(s, 1, i, value(3000, i)))
		m := s.next()
		in := s.incomingOf(9)
		r.until("the receiver sleeps", in.device.sleeping.Load)
		m.Release()
		if n := in.owed.count.Load(); n != 0 && in.device.sleeping.Load() {
			t.Errorf("%d credits wait while the loop sleeps", n)
		}
	}
}
