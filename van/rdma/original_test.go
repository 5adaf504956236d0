package rdma

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// grant grants the next slot request on c: messages for the slot with this number are written to the returned memory.
func (s *rawServer) grant(c *rawConn, index uint32) (meta []byte) {
	s.r.Helper()
	var q slotRequest
	s.check(q.get(c.receive(immSlotRequest)))
	room := s.mem[len(s.mem)-8192*int(index+1):][:8192]
	at := backend.Bytes(room).Addr()
	var b [slotReplyLen]byte
	(&slotReply{origin: q.origin, index: index, meta: at, metaKey: s.mr.RKey(), data: at + 2048, dataKey: s.mr.RKey()}).put(b[:])
	c.send(immSlotReply, b[:])
	return room
}

// message waits for a message in a slot, and returns the slot's number and the message's meta.
func (s *rawServer) message(c *rawConn, slots map[uint32][]byte) (index uint32, m van.Meta) {
	s.r.Helper()
	for limit := time.Now().Add(patience); time.Now().Before(limit); {
		var out [1]verbs.Completion
		n, err := c.dev.Poll(out[:], 0, time.Second)
		s.check(err)
		if n == 1 && out[0].Type == verbs.RecvWrite {
			s.check(van.DecodeMeta(slots[out[0].Imm][:out[0].Len], &m))
			return out[0].Imm, m
		}
	}
	s.r.Fatal("no message came")
	return 0, m
}

// A pull that is canceled before it is sent is not sent to a StepMesh node, which would still write its answer. The next pull uses its slot.
func TestInvalidatedPullIsNotSentToOriginal(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := newRawServer(r, w)
	c := s.take()
	gone, kept := make([]byte, 1000), make([]byte, 1000)
	w.must(pull(s.who, 5, 1, gone))
	w.must(pull(s.who, 5, 2, kept))
	w.Invalidate(backend.Bytes(gone))
	slots := map[uint32][]byte{3: s.grant(c, 3)}
	_, m := s.message(c, slots)
	if m.Timestamp != 2 || m.Addr != backend.Bytes(kept).Addr() || m.Option == 0 {
		t.Errorf("request %d comes with address %#x and key %d, want request 2 with %#x and a key", m.Timestamp, m.Addr, m.Option, backend.Bytes(kept).Addr())
	}
	p := (*w.tables.peers.Load())[s.who.who.ID]
	p.mu.Lock()
	var expected []int32
	for k := range p.pulls {
		expected = append(expected, k.ts)
	}
	p.mu.Unlock()
	if !slices.Equal(expected, []int32{2}) {
		t.Errorf("answers to requests %v are expected, want those to 2", expected)
	}
	s.end()
}

// If a key is pulled again before the answer arrives, into other memory, the first memory is released.
func TestDestinationThatIsReplaced(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	inUse := w.device0().regions.InUse
	for range 2 {
		w.must(pull(s, 5, 1, make([]byte, 64<<10)))
		s.next().Release()
	}
	if n := inUse(); n != 1 {
		t.Errorf("memory of %d pulls is held, want that of the second", n)
	}
	dst := make([]byte, 64<<10)
	w.must(pull(s, 5, 1, dst))
	q := s.next()
	s.must(answer(q, value(len(dst), 1)))
	q.Release()
	w.wantValue(1, value(len(dst), 1))
	if n := inUse(); n != 0 {
		t.Errorf("memory of %d pulls is held after the answer, want none", n)
	}
}

// Invalidated memory may be in one region with memory that a StepMesh node will still write to. The node would abort if the write were refused.
func TestInvalidateBesideAPullFromOriginal(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := newRawServer(r, w)
	c, back := s.take(), s.open()
	all := make([]byte, 2000)
	region, err := w.device0().regions.Get(backend.Bytes(all), verbs.LocalWrite|verbs.RemoteWrite)
	s.check(err)
	region.Release()
	w.must(pull(s.who, 5, 1, all[1000:]))
	_, m := s.message(c, map[uint32][]byte{3: s.grant(c, 3)})
	w.Invalidate(backend.Bytes(all[:1000]))
	slot := back.ask(slotRequest{metaLen: 400, dataNum: 2, data: [4]uint64{8, 1000}, origin: 2, key: 5})
	a := answer(pull(s.who, 5, 1, all[1000:]), value(1000, 1))
	back.post(0, verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: m.Addr, RKey: uint32(m.Option)}, value(1000, 1))
	back.notify(0, slot.index, slot.meta, slot.metaKey, encode(r, a, nil))
	w.wantValue(1, value(1000, 1))
	w.wantNoLoss()
	s.end()
}

// A StepMesh node whose slot request fails for lack of memory would wait forever: its connection ends.
func TestNoReceiveMemoryForOriginal(t *testing.T) {
	h := newHostileWorld(t, false)
	h.s.stack.Limit(h.s.stack.Registered() + 64<<10)
	var b [slotRequestLen]byte
	(&slotRequest{metaLen: 400, dataNum: 2, data: [4]uint64{8, 1 << 20}, origin: 1, key: 6}).put(b[:])
	h.c.send(immSlotRequest, b[:])
	h.until("its connection has ended", func() bool { return len(h.s.incoming()) == 1 })
	h.s.stack.Limit(1 << 40)
	h.ends(0)
}

// The slot of a request whose answer was lost with the connection of a StepMesh node is free again, since the request has failed. Otherwise later
// requests under the key would wait forever.
func TestSlotOfLostAnswerOfOriginal(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := newRawServer(r, w)
	c := s.take()
	s.open()
	w.must(push(s.who, 5, 1, value(1000, 1)))
	slots := map[uint32][]byte{3: s.grant(c, 3)}
	if _, m := s.message(c, slots); m.Timestamp != 1 {
		t.Fatalf("request %d came, want 1", m.Timestamp)
	}
	w.must(push(s.who, 5, 2, value(1000, 2))) // waits for the slot
	s.open()
	w.wantDown(s.who, "answers", "connected again")
	w.wantUp(s.who)
	if _, m := s.message(c, slots); m.Timestamp != 2 {
		t.Errorf("request %d came, want 2", m.Timestamp)
	}
	s.end()
}

// TestBatchToOriginalIsWhole: if a StepMesh node cannot receive one part of a batch, none is sent, and Send fails.
func TestBatchToOriginalIsWhole(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := newRawServer(r, w)
	s.take()
	m := batch(s.who, 1, 0, 100, 3000, 0)
	m.Done = w
	if err := w.Send(m); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("Send: %v, want %v: a push to a StepMesh node has a value", err, van.ErrInvalid)
	}
	p := (*w.tables.peers.Load())[s.who.who.ID]
	p.mu.Lock()
	if n := p.sender.Waiting(); n != 0 || p.unsent != 0 {
		t.Errorf("%d messages with %d bytes wait, want none", n, p.unsent)
	}
	p.mu.Unlock()
	if m.Done != van.Completion(w) || w.dones.Load() != 0 {
		t.Error("Done was called, or replaced")
	}
	s.end()
}

// TestBatchLeavesNoMessages: a peer holds no message of a batch longer than the queue does.
func TestBatchLeavesNoMessages(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := newRawServer(r, w)
	s.take()
	w.must(batch(s.who, 1, 0, 100, 3000))
	p := (*w.tables.peers.Load())[s.who.who.ID]
	p.mu.Lock()
	for _, o := range p.expanded.items[:cap(p.expanded.items)] {
		if o != nil {
			t.Error("the peer still holds a message")
		}
	}
	p.mu.Unlock()
	s.end()
}

// TestRefusedBatchSetsNoSize: a batch that was not sent says nothing about the size of a StepMesh node's buffers. The node would abort on a
// push that is longer than the first request of its key.
func TestRefusedBatchSetsNoSize(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := newRawServer(r, w)
	s.take()
	if err := w.Send(batch(s.who, 1, 0, 100, 3000, 0)); !errors.Is(err, van.ErrInvalid) {
		t.Fatalf("Send of a batch with an empty push: %v, want %v", err, van.ErrInvalid)
	}
	w.must(pull(s.who, 1, 4, make([]byte, 500))) // the node's buffer has 500 bytes
	if err := w.Send(push(s.who, 1, 5, value(2000, 0))); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("Send of 2000 bytes after a first request of 500: %v, want %v", err, van.ErrInvalid)
	}
	w.must(push(s.who, 1, 6, value(500, 0)))
	s.end()
}
