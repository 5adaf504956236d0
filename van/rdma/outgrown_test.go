package rdma

import (
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// ownSlots returns the number of slots that n has granted for this key alone.
func (n *testNode) ownSlots(key uint64) (own int) {
	n.budget.slots.Each(func(l *receiveSlot) {
		if !l.OneShot && l.Route.Class == 0 && l.Route.Key == key {
			own++
		}
	})
	return own
}

// Slots of a key that its sender has outgrown, and will not use again, end whatever replaces them: a larger slot of the key, a slot that keys share
// because the registered buffer is too small, or none.
func TestOutgrownSlotsEnd(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(peerBudget(1 << 20))
	for key := range uint64(3) {
		if err := s.RegisterRecvBuffer(9, key, backend.Bytes(make([]byte, 4096))); err != nil {
			t.Fatal(err)
		}
		w.must(push(s, key, 1, value(3000, 1)))
		s.wantValue(1, value(3000, 1))
		if n := s.ownSlots(key); n == 0 {
			t.Fatalf("key %d has no slot of its own", key)
		}
	}
	w.must(push(s, 1, 2, value(10000, 2)))
	s.wantValue(2, value(10000, 2))
	// Slots end after the request has been answered: the answer does not wait for that.
	r.until("the slot of a key that uses shared ones now has ended", func() bool { return s.ownSlots(1) == 0 })
	w.must(push(s, 2, 3, value(2<<20, 3)))
	w.wantDown(s, "STEPAF_RDMA_PEER_BUDGET")
	w.wantUp(s)
	r.until("the slot of a key for which more was asked and refused has ended", func() bool { return s.ownSlots(2) == 0 })
	for key := range uint64(3) {
		w.must(push(s, key, 4, value(3000, 4)))
		s.wantValue(4, value(3000, 4))
	}
	// There may be a second slot: the worker requests one if it does not know yet that the first is free again.
	if n := s.ownSlots(0); n == 0 {
		t.Error("the slot of a key that has not grown has ended")
	}
	if n := s.Stats().Malformed + w.Stats().Malformed; n != 0 {
		t.Errorf("%d malformed messages", n)
	}
}

// A slot that was requested after a larger one of the same key stays valid although the larger one, which had to wait, is granted later. The check
// also works on a connection that has ended meanwhile.
func TestSlotBesideALaterLargerOne(t *testing.T) {
	h := newHostileWorld(t, true)
	if err := h.s.RegisterRecvBuffer(11, 6, backend.Bytes(make([]byte, 8192))); err != nil {
		t.Fatal(err)
	}
	want := func(origin, n uint64) slotRequest {
		return slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{n, kindPush | kindRequest | kindKeyed, n}, origin: origin, key: 6}
	}
	first, later := h.c.ask(want(1, 500)), h.c.ask(want(3, 1000))
	in := h.s.incomingOf(11)
	grant := func() {
		q := pendingRequest{slotRequest: want(2, 2000)}
		in.device.exclusive(func() { h.p.check((slotSet{in}).grant(&q)) })
	}
	grant()
	if h.s.budget.slots.Get(first.index) != nil {
		t.Error("the slot that was asked for before the larger one has not ended")
	}
	if l := h.s.budget.slots.Get(later.index); l == nil || l.Data != 1000 {
		t.Error("the slot that was asked for after the larger one has ended")
	}
	in.fail(van.ErrPeerLost)
	h.until("the connection has ended", func() bool {
		in.mu.Lock()
		defer in.mu.Unlock()
		return in.closed
	})
	grant()
	h.ends(0)
}

// TestRegisteredBufferServesItsKey: the slot of a key is the buffer that is registered for it, even if shared slots would do. A slot that is not for
// a key never uses the buffer: two messages would be written there.
func TestRegisteredBufferServesItsKey(t *testing.T) {
	h := newHostileWorld(t, true)
	buffer := backend.Bytes(make([]byte, 4096))
	if err := h.s.RegisterRecvBuffer(11, 6, buffer); err != nil {
		t.Fatal(err)
	}
	ask := func(key, origin, kind uint64) slotReply {
		return h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{3000, kind, 3000}, origin: origin, key: key})
	}
	const keyed, shared = kindPush | kindRequest | kindKeyed, kindPush | kindRequest
	origin := uint64(1)
	for ; ; origin++ {
		if r := ask(100+origin, origin, keyed); r.flags&replyNone != 0 {
			break // there are enough shared slots
		} else if r.flags != replyShared || origin > 200 {
			t.Fatalf("slot %d of a key without a buffer is %+v", origin, r)
		}
	}
	in := func(r slotReply) bool { return r.data >= uint64(buffer.Addr()) && r.data < uint64(buffer.Addr())+4096 }
	if r := ask(6, origin+1, shared); in(r) || r.flags&replyRefused != 0 {
		t.Errorf("a slot that is not of the key is %+v, in the buffer at %#x", r, buffer.Addr())
	}
	if r := ask(6, origin+2, keyed); !in(r) || r.flags != 0 {
		t.Errorf("the slot of the key is %+v, want the buffer at %#x", r, buffer.Addr())
	}
	h.ends(0)
}
