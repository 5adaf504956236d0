package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

var rawAddr = netip.MustParseAddr("10.77.2.1")

// hostileWorld is a worker and a server with traffic, and a process that connects to the server and sends what no node would send.
type hostileWorld struct {
	*rig
	w, s *testNode
	p    *raw
	c    *rawConn
	ours bool
}

func newHostileWorld(t *testing.T, ours bool) *hostileWorld {
	t.Helper()
	h := &hostileWorld{rig: newRig(t), ours: ours}
	h.w, h.s = h.pair()
	h.p = newRaw(h.rig, rawAddr, van.Node{ID: 11})
	h.c = h.p.dial(h.s, 2, func(q int) []byte { return h.p.privateData(ours, 77, q, 2) })
	return h
}

// ends checks that the server has counted at least n malformed messages, has delivered none of them, and still serves its worker.
func (h *hostileWorld) ends(n uint64) {
	h.Helper()
	h.until(fmt.Sprintf("%d malformed messages", n), func() bool { return h.s.Stats().Malformed >= n })
	for i := range 3 {
		v := value(6000, i)
		h.w.must(push(h.s, uint64(i), 1000+i, v))
		h.s.wantValue(1000+i, v)
	}
	h.p.end()
	if h.w.Stats().Malformed != 0 {
		h.Errorf("the worker counts malformed messages")
	}
}

// seen waits until the server has counted n malformed messages, and checks that there are no more, so that each case is judged separately.
func (h *hostileWorld) seen(n uint64, what string) {
	h.Helper()
	h.until(fmt.Sprintf("%s is refused", what), func() bool { return h.s.Stats().Malformed >= n })
	if got := h.s.Stats().Malformed; got != n {
		h.Fatalf("%d malformed messages after %s, want %d", got, what, n)
	}
}

const tooMuch = math.MaxUint64

// TestHostileSlotRequests requests impossible slots.
func TestHostileSlotRequests(t *testing.T) {
	for _, ours := range []bool{true, false} {
		t.Run(fmt.Sprintf("ours %t", ours), func(t *testing.T) {
			h := newHostileWorld(t, ours)
			good := slotRequest{metaLen: 300, dataNum: nativeSlotRequest, data: [4]uint64{1024, 0, 600}, origin: 5, key: 6}
			if !ours {
				good.dataNum, good.data = 2, [4]uint64{8, 600}
			}
			bad := []func(*slotRequest){
				func(s *slotRequest) { s.metaLen = 0 },
				func(s *slotRequest) { s.metaLen = rawMeta - 1 },
				func(s *slotRequest) { s.metaLen = maxMeta + 1 },
				func(s *slotRequest) { s.metaLen = tooMuch },
				func(s *slotRequest) { s.dataNum = 5 },
				func(s *slotRequest) { s.dataNum = tooMuch },
			}
			if ours {
				bad = append(bad, func(s *slotRequest) { s.data[0] = tooMuch }, func(s *slotRequest) { s.data[0] = roundedData + 1 },
					func(s *slotRequest) { s.dataNum = 2 })
			} else {
				bad = append(bad, func(s *slotRequest) { s.data[1] = tooMuch }, func(s *slotRequest) { s.data[1] = 1 << 31 })
			}
			for i, f := range bad {
				s := good
				s.origin = uint64(100 + i)
				f(&s)
				if ours { // a native peer learns that there will be no slot
					if r := h.c.ask(s); r.flags != replyRefused {
						t.Errorf("slot request %d is answered by %+v, want a refusal", i, r)
					}
					continue
				}
				var b [slotRequestLen]byte
				s.put(b[:])
				h.c.send(immSlotRequest, b[:])
			}
			h.c.send(immSlotRequest, make([]byte, slotRequestLen-1))
			h.c.send(immSlotRequest, nil)
			h.c.send(immSlotReply, make([]byte, slotReplyLen))
			h.c.send(immCredits, make([]byte, trailerLen))
			h.c.send(0xffffffff, make([]byte, 64))
			if h.c.send(immUp, nil); ours { // only once
				h.c.send(immUp, nil)
			}
			if r := h.c.ask(good); r.meta == 0 || r.data == 0 {
				t.Errorf("no slot after all: %+v", r)
			}
			h.ends(uint64(len(bad)) + 6)
		})
	}
}

// TestHostileNotifications writes invalid data, inside and outside of slots.
func TestHostileNotifications(t *testing.T) {
	h := newHostileWorld(t, true)
	s := slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{1024, 0, 1024}, origin: 1, key: 6}
	r := h.c.ask(s)
	n := uint64(0)
	say := func(what string, imm uint32, b []byte) {
		t.Helper()
		h.c.notify(0, imm, r.meta, r.metaKey, b)
		n++
		h.seen(n, what) // otherwise the next write would overwrite it
	}
	// Slots of others: of another connection first.
	h.w.must(push(h.s, 1, 900, value(6000, 1)))
	h.s.wantValue(900, value(6000, 1))
	others := 0
	for i := range uint32(h.s.budget.slots.Len()) {
		if l := h.s.budget.slots.Get(i); l != nil && i != r.index {
			say("slot of another", i, encodeParts(h.rig, push(h.s, 6, 1, value(100, 1)), []placement{{}}, value(100, 1), trailer{}))
			others++
		}
	}
	if others == 0 {
		t.Error("the worker has no slot, so none of another connection was tried")
	}
	for _, imm := range []uint32{r.index + 1, uint32(h.s.budget.slots.Len()) + 5, maxIndex - 1, 1 << 16, 1 << 31} {
		say(fmt.Sprintf("slot %d", imm), imm, nil)
	}
	m := push(h.s, 6, 1, value(1000, 1))
	inSlot := placement{where: valueInSlot}
	good := trailer{frames: 2, lens: [van.MaxFrames]uint32{8, 1000}}
	enc := func(f func(*trailer)) []byte {
		x := good
		f(&x)
		return encodeParts(h.rig, m, []placement{inSlot, inSlot}, nil, x)
	}
	whole := enc(func(*trailer) {})
	for _, b := range [][]byte{nil, make([]byte, rawMeta-1), make([]byte, rawMeta), make([]byte, rawMeta+trailerLen), make([]byte, conn.CellSize),
		whole[:len(whole)-1]} {
		say(fmt.Sprintf("no meta, %d bytes", len(b)), r.index, b)
	}
	for _, off := range []int{0, 4, 8, 100, 200, 280} {
		b := append([]byte(nil), whole...)
		for i := range 4 {
			b[off+i] = 0xff
		}
		if van.DecodeMeta(b[:len(b)-trailerLen], new(van.Meta)) != nil {
			say(fmt.Sprintf("meta with 0xff from byte %d", off), r.index, b)
		}
	}
	for i, f := range []func(*trailer){
		func(t *trailer) { t.lens[1] = 1025 },
		func(t *trailer) { t.lens[0] = 960 },
		func(t *trailer) { t.lens[0], t.lens[1] = math.MaxInt32, math.MaxInt32 },
		func(t *trailer) { t.lens[1] = math.MaxUint32 },
		func(t *trailer) { t.lens[0], t.lens[1] = 8, 961 },
		func(t *trailer) { t.frames = 1 },
		func(t *trailer) { t.frames = 4 },
		func(t *trailer) { t.frames = 255 },
		func(t *trailer) { t.n = maxCredits + 1 },
		func(t *trailer) { t.n = 255 },
		func(t *trailer) { t.metaLen = 1 },
		func(t *trailer) { t.metaLen = rawMeta },
		func(t *trailer) { t.metaLen = m.EncodedLen() + 1000 },
		func(t *trailer) { t.metaLen = -1 },
	} {
		say(fmt.Sprintf("trailer %d", i), r.index, enc(f))
	}
	say("frames without placements", r.index, encode(h.rig, m, &good))
	say("too few placements", r.index, encodeParts(h.rig, m, []placement{inSlot}, nil, good))
	one := func(valLen int, where uint32) []byte { // a message with one key
		b := encodeParts(h.rig, m, []placement{{where: where}}, nil, trailer{})
		le.PutUint32(b[96:], uint32(valLen))
		return b
	}
	for _, n := range []int{-1, 1025, math.MaxInt32, math.MinInt32} {
		say(fmt.Sprintf("val_len %d", n), r.index, one(n, valueInSlot))
	}
	for where := range uint32(4) {
		if where != valueInSlot {
			say(fmt.Sprintf("place %d", where), r.index, one(1000, where))
		}
	}
	// The slot still works.
	h.c.post(0, verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: r.data, RKey: r.dataKey}, value(1000, 9))
	h.c.notify(0, r.index, r.meta, r.metaKey, one(1000, valueInSlot))
	got := h.s.next()
	if string(got.Vals.Host()) != string(value(1000, 9)) || got.Sender != 11 {
		t.Errorf("%d bytes from %d, want 1000 from 11", got.Vals.Len(), got.Sender)
	}
	// The slot is in use: a second message in it is not delivered.
	say("slot in use", r.index, one(1000, valueInSlot))
	got.Release()
	h.ends(n)
}

// TestHostileOneShot uses a one-shot slot twice.
func TestHostileOneShot(t *testing.T) {
	h := newHostileWorld(t, true)
	r := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{0, kindOneShot}, origin: 1})
	b := encode(h.rig, control(h.s, 5), &trailer{})
	for range 3 {
		h.c.notify(0, r.index, r.meta, r.metaKey, b)
	}
	m := h.s.next()
	if m.Timestamp != 5 || m.Sender != 11 {
		t.Errorf("timestamp %d from %d, want 5 from 11", m.Timestamp, m.Sender)
	}
	m.Release()
	h.ends(2)
}

// TestHostileOneShotWithValue: a one-shot slot also ends if it holds a value, which no message of a node does. A second message in it is not delivered, neither before
// nor after the value is released.
func TestHostileOneShotWithValue(t *testing.T) {
	h := newHostileWorld(t, true)
	r := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{0, kindOneShot}, origin: 1})
	m := push(h.s, 6, 1, value(100, 1))
	b := encodeParts(h.rig, m, []placement{{}}, value(100, 1), trailer{})
	h.c.notify(0, r.index, r.meta, r.metaKey, b)
	got := h.s.next()
	if string(got.Vals.Host()) != string(value(100, 1)) || got.Sender != 11 {
		t.Errorf("%d bytes from %d, want 100 from 11", got.Vals.Len(), got.Sender)
	}
	if h.s.budget.slots.Get(r.index) != nil {
		t.Error("the slot has not ended")
	}
	in := h.s.incomingOf(11)
	if n := in.slots.oneShots.Load(); n != 1 {
		t.Errorf("%d such slots have memory, want one that holds a value", n)
	}
	h.c.notify(0, r.index, r.meta, r.metaKey, b)
	h.seen(1, "its slot, which holds a value")
	got.Release()
	h.until("its memory is released", func() bool { return in.slots.oneShots.Load() == 0 })
	h.c.notify(0, r.index, r.meta, r.metaKey, b)
	h.ends(2)
}

// TestHostileParts announces parts of split messages that do not arrive.
func TestHostileParts(t *testing.T) {
	h := newHostileWorld(t, true)
	r := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{0, 0}, origin: 1})
	m := push(h.s, 1, 1, nil)
	m.Push = false
	m.SlaveQPNum, m.SlaveQPCounter = 1, [2]uint64{math.MaxUint64, math.MaxUint64}
	b := encode(h.rig, m, &trailer{})
	for range 100 {
		h.c.notify(0, r.index, r.meta, r.metaKey, b)
		h.c.notify(1, immSlave|r.index, 0, 0, nil)
	}
	in := h.s.incomingOf(11)
	h.until("all wait for their other parts", func() (all bool) {
		h.s.device0().exclusive(func() { all = len(in.order.incomplete) == 100 && in.order.splits == 100 })
		return all
	})
	h.ends(0)
	if n := h.s.Stats().Malformed; n != 0 {
		t.Errorf("%d malformed messages, want none", n)
	}
}

// TestHostileOriginal is a StepMesh node that writes more than it has requested.
func TestHostileOriginal(t *testing.T) {
	h := newHostileWorld(t, false)
	r := h.c.ask(slotRequest{metaLen: 400, dataNum: 2, data: [4]uint64{8, 600}, origin: 1, key: 6})
	n := uint64(0)
	for _, valLen := range []int32{601, -1, math.MaxInt32, math.MinInt32} {
		b := encode(h.rig, push(h.s, 6, 1, value(600, 1)), nil)
		le.PutUint32(b[96:], uint32(valLen))
		h.c.notify(0, r.index, r.meta, r.metaKey, b)
		n++
		h.seen(n, fmt.Sprintf("val_len %d", valLen))
	}
	h.c.notify(0, r.index, r.meta, r.metaKey, bytes.Repeat([]byte{0xff}, 400))
	n++
	h.seen(n, "0xff")
	// An answer to no request is delivered without a value.
	m := push(h.s, 6, 7, value(600, 1))
	m.Request, m.Push, m.Addr, m.Option = false, false, 4096, 1
	h.c.notify(0, r.index, r.meta, r.metaKey, encode(h.rig, m, nil))
	got := h.s.next()
	if got.Vals.Len() != 0 {
		t.Errorf("an answer to nothing has %d bytes", got.Vals.Len())
	}
	got.Release()
	h.ends(n)
}

// TestHostileHandshake connects with private data that no node sends.
func TestHostileHandshake(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	for name, private := range map[string][]byte{
		"none":              nil,
		"node 0":            (&handshake{node: 0, host: "x", qpCount: 2}).encode(),
		"node too large":    (&handshake{node: 1 << 20, host: "x", qpCount: 2}).encode(),
		"no queue pairs":    (&handshake{node: 9, host: "x"}).encode(),
		"queue pair 7 of 2": (&handshake{node: 9, host: "x", qp: 7, qpCount: 2}).encode(),
		"queue pair 2 of 2": (&handshake{node: 9, host: "x", qp: 2, qpCount: 2}).encode(),
	} {
		t.Run(name, func(t *testing.T) {
			p := newRaw(r, rawAddr, van.Node{ID: 11})
			defer p.end()
			id, err := p.ch.NewID(1)
			p.check(err)
			p.check(id.ResolveAddr(p.addr, netip.AddrPortFrom(s.addr, uint16(s.who.Port)), patience))
			p.event(verbs.AddrResolved)
			p.check(id.ResolveRoute(patience))
			p.event(verbs.RouteResolved)
			p.use(id)
			p.check(id.Connect(verbs.ConnParam{Private: private}))
			if ev, err := p.ch.Next(); err != nil || ev.Type != verbs.Rejected {
				t.Errorf("event %v, error %v; want %v", ev.Type, err, verbs.Rejected)
			}
		})
	}
	w.must(push(s, 1, 1, value(2000, 1)))
	s.wantValue(1, value(2000, 1))
}

// TestHostileServer accepts a worker's connection and sends invalid replies.
func TestHostileServer(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	p := newRaw(r, rawAddr, van.Node{ID: 10})
	bad := &testNode{who: van.Node{ID: 10, Hostname: rawAddr.String(), Port: p.port}}
	w.connect(bad)
	c := p.accept(1, func(q int) []byte { return p.privateData(true, 0, q, 2) })
	// Before the connection is established.
	c.send(immCredits, make([]byte, trailerLen))
	c.send(immSlotReply, make([]byte, slotReplyLen))
	c2 := p.accept(1, func(q int) []byte { return p.privateData(true, 0, 1, 2) })
	c2.mem = c2.mem[1<<19:]
	w.wantUp(bad)
	epoch := w.local.epoch
	for x := range *w.tables.conns.Load() {
		if cn := (*w.tables.conns.Load())[x]; cn.peer != nil && int(cn.peer.id.Load()) == 10 {
			epoch = w.local.epoch + x
		}
	}
	// The worker sends to the bad server, which gets the slot request.
	m := push(bad, 1, 1, value(5000, 1))
	m.Done = w
	w.must(m)
	var q slotRequest
	p.check(q.get(c.receive(immSlotRequest)))
	before := w.Stats().Malformed
	n := uint64(0)
	sendReply := func(x slotReply) {
		var b [slotReplyLen]byte
		x.put(b[:])
		c.send(immSlotReply, b[:])
		n++
	}
	addr, key := uint64(0x1000), p.mr.RKey()
	sendReply(slotReply{origin: q.origin + 1, index: 1, meta: addr, metaKey: key})
	sendReply(slotReply{origin: 0})
	sendReply(slotReply{origin: q.origin, index: maxIndex, meta: addr, metaKey: key})
	sendReply(slotReply{origin: q.origin, index: math.MaxUint32, meta: addr, metaKey: key})
	for _, t := range []trailer{{n: 1}, {n: maxCredits + 1}, {frames: 1}} {
		var b [trailerLen]byte
		t.epoch = epoch
		t.put(b[:])
		c.send(immCredits, b[:])
	}
	n += 2 // a credit for an unknown slot counts as one for a retired slot
	c.send(immCredits, nil)
	c.send(immSlotReply, nil)
	c.send(immSlotRequest, make([]byte, slotRequestLen))
	c.send(77, nil)
	c.notify(0, 3, 0, 0, nil)
	n += 5
	r.until("all are counted", func() bool { return w.Stats().Malformed >= before+n })
	// Refused twice: the message fails once.
	sendReply(slotReply{origin: q.origin, flags: replyRefused})
	w.wantDown(bad, "no memory for")
	w.wantUp(bad)
	r.until("Done", func() bool { return w.dones.Load() == 1 })
	// A slot that does not exist breaks the connection, but nothing else.
	w.must(push(bad, 1, 2, value(5000, 1)))
	p.check(q.get(c.receive(immSlotRequest)))
	sendReply(slotReply{origin: q.origin, index: 1, meta: addr, metaKey: 12345, data: addr, dataKey: 12345})
	w.wantDown(bad, "remote access error")
	w.must(push(s, 1, 3, value(2000, 1)))
	s.wantValue(3, value(2000, 1))
	w.Disconnect(10)
	p.end()
}

// TestHostileRejection connects in the name of the scheduler and rejects the answer as the scheduler rejects a replaced process. A node believes that only of a
// connection that it has requested.
func TestHostileRejection(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(van.SchedulerID)
	w.times.inboundDown = time.Millisecond
	r.link(w, s)
	p := newRaw(r, rawAddr, s.who)
	defer p.end()
	p.port = s.who.Port
	var ids []verbs.ID
	for q := range 2 {
		id, err := p.ch.NewID(uint64(q + 1))
		p.check(err)
		p.check(id.ResolveAddr(p.addr, netip.AddrPortFrom(w.addr, uint16(w.who.Port)), patience))
		p.event(verbs.AddrResolved)
		p.check(id.ResolveRoute(patience))
		p.event(verbs.RouteResolved)
		p.use(id)
		p.check(id.Connect(verbs.ConnParam{Private: p.privateData(false, 0, q, 2)}))
		ids = append(ids, id)
	}
	peer := (*w.tables.peers.Load())[van.SchedulerID]
	r.until("it is taken for the scheduler's", func() bool {
		in := peer.inbound.Load()
		return in != nil && !in.handshake.native
	})
	p.check(ids[0].Reject(refusal(codeReplaced, "another process")))
	if c := w.wantDown(s, "answers"); errors.Is(c.cause, van.ErrReplaced) {
		t.Errorf("a connection of somebody else ended the node: %v", c.cause)
	}
}

// TestHostileFrameLengths: memory for copies of keys and lengths is allocated for frames that have been located, not for any length in
// the trailer. A frame of an answer is not in place: no request names its destination.
func TestHostileFrameLengths(t *testing.T) {
	h := newHostileWorld(t, true)
	r := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{1024, 0, 1024}, origin: 1, key: 6})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	m := push(h.s, 6, 1, value(100, 1))
	inSlot, inPlace := placement{where: valueInSlot}, placement{where: valueInPlace}
	h.c.notify(0, r.index, r.meta, r.metaKey, encodeParts(h.rig, m, []placement{inSlot, inSlot}, nil, trailer{frames: 2, lens: [van.MaxFrames]uint32{8, 100, maxData}}))
	h.s.next().Release()
	m.Request, m.Push = false, false
	h.c.receive(immCredits)
	h.c.notify(0, r.index, r.meta, r.metaKey, encodeParts(h.rig, m, []placement{inPlace, inSlot, inSlot}, nil, trailer{frames: 3, lens: [van.MaxFrames]uint32{maxData, 100, 4}}))
	h.seen(1, "a frame in place")
	if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 1<<30 {
		t.Errorf("%d bytes were allocated", after.TotalAlloc-before.TotalAlloc)
	}
	h.ends(1)
}
