package rdma

import (
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// incomingOf returns the connection that node id has opened to n.
func (n *testNode) incomingOf(id int) *inbound {
	n.r.Helper()
	for _, c := range *n.tables.conns.Load() {
		if c.in != nil && c.in.handshake.node == id && !c.in.failed.Load() {
			return c.in
		}
	}
	n.r.Fatalf("%s has no connection to %s", van.NodeName(id), van.NodeName(n.who.ID))
	return nil
}

// Owed credits of a slot end with the slot: when they arrive, its index may belong to another one.
func TestCreditOfEndedSlot(t *testing.T) {
	h := newHostileWorld(t, true)
	small := h.s.budget.slots.Get(h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{1024}, origin: 1}).index)
	in := h.s.incomingOf(11)
	in.mu.Lock()
	in.owed.credits = append(in.owed.credits, uint16(small.Index()))
	in.owed.count.Store(1)
	in.mu.Unlock()
	in.device.exclusive(func() {
		(slotSet{in}).handleReturnedSlots(&trailer{n: 1, credits: [maxCredits]uint16{uint16(small.Index())}})
	})
	in.mu.Lock()
	owed, credits := in.owed.count.Load(), slices.Clone(in.owed.credits)
	in.mu.Unlock()
	if h.s.budget.slots.Get(small.Index()) == small {
		t.Error("the slot has not ended")
	}
	if owed != 0 || len(credits) != 0 {
		t.Errorf("%d credits are owed, of slots %v; want none of a slot that has ended", owed, credits)
	}
	h.ends(0)
}

// Credits of an earlier connection are ignored, although a slot has the same index now.
func TestCreditOfEarlierConnection(t *testing.T) {
	p := &peer{v: NewOn(nil, van.Options{Config: env.Default()}).(*rvan).node, pulls: map[pullKey]pullDestination{}}
	put := 0
	p.sender = rendezvous.NewSender(func(*outgoing) rendezvous.Need {
		return rendezvous.Need{Route: rendezvous.Route{Class: 1}, Meta: conn.CellSize}
	})
	puts := func() int {
		for a, ok := p.sender.Next(); ok; a, ok = p.sender.Next() {
			if a.Kind == rendezvous.Put {
				put++
			}
		}
		return put
	}
	p.sender.Connect(false)
	p.link = &link{queue: &conn.SendQueue[sentMessage]{}, device: &device{}, dialect: &nativeOut{}, native: true, epoch: 7}
	o := &outgoing{}
	p.sender.Submit(o, o.oneShot)
	if puts(); !p.sender.Reply(1, rendezvous.RemoteSlot{Index: 3}) || puts() != 1 {
		t.Fatalf("%d messages were put, want 1", put)
	}
	p.sender.Submit(o, o.oneShot) // it waits for the slot
	for _, c := range []struct {
		epoch uint32
		puts  int
	}{{6, 1}, {8, 1}, {7, 2}} {
		if ok := p.takeCredits(&trailer{epoch: c.epoch, n: 1, credits: [maxCredits]uint16{3}}); !ok || puts() != c.puts {
			t.Errorf("credit with epoch %d: taken as good %t, %d messages were put, want %d", c.epoch, ok, put, c.puts)
		}
	}
}

// A StepMesh node that answers with another length than requested, to the right address, has not placed the value: the application must not get the tensor as
// one.
func TestOriginalAnswersShort(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := newRawServer(r, w)
	c := s.take()
	back := s.open()
	dst := value(600, 3)
	w.must(pull(s.who, 6, 6, dst))
	var q slotRequest
	s.check(q.get(c.receive(immSlotRequest)))
	at := s.mem[len(s.mem)-4096:]
	var b [slotReplyLen]byte
	(&slotReply{origin: q.origin, index: 1, meta: backend.Bytes(at).Addr(), metaKey: s.mr.RKey()}).put(b[:])
	c.send(immSlotReply, b[:])
	r.until("the request has been sent", func() bool { return slices.Contains(s.expected(), 6) })
	place := back.ask(slotRequest{metaLen: 400, dataNum: 2, data: [4]uint64{8, 600}, origin: 2, key: 6})
	a := answer(pull(s.who, 6, 6, dst), value(100, 1))
	a.Addr, a.Option = backend.Bytes(dst).Addr(), 1
	back.notify(0, place.index, place.meta, place.metaKey, encode(r, a, nil))
	got := w.next()
	if got.Vals.Len() != 0 {
		t.Errorf("an answer of 100 bytes to a pull of 600 is handed up with %d bytes, want none", got.Vals.Len())
	}
	got.Release()
	s.end()
}

// A slot request that is answered while its connection ends keeps no memory.
func TestSlotOfEndedConnection(t *testing.T) {
	h := newHostileWorld(t, true)
	in := h.s.incomingOf(11)
	ended := func(yes bool) {
		in.mu.Lock()
		defer in.mu.Unlock()
		in.closed = yes
	}
	slots, leased := h.s.budget.slots.Len(), h.s.budget.registered.Load()
	ended(true)
	for i := range uint64(4) {
		q := pendingRequest{slotRequest: slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{6000, 0, 6000}, origin: i, key: 6 + i}}
		if err := (slotSet{in}).grant(&q); err != nil {
			t.Fatal(err)
		}
	}
	if n, b := h.s.budget.slots.Len(), h.s.budget.registered.Load(); n != slots || b != leased {
		t.Errorf("%d slots with %d bytes, want %d with %d as before", n, b, slots, leased)
	}
	ended(false)
	h.ends(0)
}
