package local

import (
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// pin is the memory that a message pins in the sender until the receiver has read it.
type pin struct {
	of     request
	mems   [partCount]backend.Mem
	bytes  int64
	done   van.Completion
	busy   bool
	device bool   // the peer's device copies the value
	seq    uint64 // the message's number in outLink.offers, if its value lies in announced allocations
}

// pinOf lists and retains the memory that msg pins or streams. seq is the message's number in offers.
func pinOf(r *record, msg *van.Message, meta []byte, seq uint64) pin {
	var a pin
	if r.segments > 0 {
		a.seq = seq
	}
	for i := range present(r.frames) {
		switch {
		case r.parts[i].form == partInline:
		case i == 0:
			a.mems[0] = backend.Bytes(meta)
			a.bytes += int64(len(meta))
		default:
			a.mems[i] = msg.Frame(i - 1)
			a.mems[i].Retain()
			if a.mems[i].OnHost() { // device memory does not count for the budget
				a.bytes += int64(a.mems[i].Len())
			}
		}
	}
	a.of, a.done = requestOf(&msg.Meta), msg.Done
	return a
}

// end releases the memory and notifies the sender of the message.
func (a *pin) end() {
	done := a.done
	for i := range a.mems {
		a.mems[i].Release()
	}
	*a = pin{}
	if done != nil {
		done.Sent()
	}
}

// pins are the messages that the peer reads from this node's memory. Each has a slot until
// the peer has acknowledged it.
type pins struct {
	seg    *segment
	stats  *stats
	copies *copies

	slots []pin    // by slot, up to the highest slot that was ever used
	free  []uint32 // slots
	gen   uint32
	acked uint32
	bytes int64
}

// init makes all slots of seg free.
func (t *pins) init(seg *segment, c *outCommon) {
	t.seg, t.stats, t.copies = seg, c.stats, c.copies
	for i := range uint32(slotCount) {
		t.free = append(t.free, slotCount-1-i)
	}
}

// idle reports whether no message is pinned.
func (t *pins) idle() bool { return len(t.free) == slotCount }

// add assigns the record at b a slot for its pinned parts. A slot must be free.
func (t *pins) add(b []byte, a pin) {
	slot := t.free[len(t.free)-1]
	t.free = t.free[:len(t.free)-1]
	if t.gen++; t.gen == 0 {
		t.gen = 1
	}
	t.seg.gen(slot).Store(t.gen)
	setSlot(b, slot, t.gen)
	a.busy = true
	for int(slot) >= len(t.slots) {
		t.slots = append(t.slots, pin{})
	}
	t.slots[slot] = a
	t.bytes += a.bytes
	t.stats.pinned.Add(1)
}

// collect releases the slots that the peer has acknowledged.
func (t *pins) collect() error {
	acked := t.seg.acked().Load()
	if acked-t.acked > slotCount {
		return fmt.Errorf("%w: %d acknowledgements, %d have been seen", errProtocol, acked, t.acked)
	}
	for ; t.acked != acked; t.acked++ {
		slot := t.seg.ack(t.acked).Load()
		if int(slot) >= len(t.slots) || !t.slots[slot].busy {
			return fmt.Errorf("%w: slot %d acknowledged, which is not pinned", errProtocol, slot)
		}
		t.free = append(t.free, slot)
		t.release(slot)
	}
	return nil
}

// release frees a slot and releases its memory.
func (t *pins) release(slot uint32) {
	if t.slots[slot].device {
		t.copies.exported.Add(-1)
	}
	t.bytes -= t.slots[slot].bytes
	t.slots[slot].end()
	t.stats.pinned.Add(-1)
}

// recall releases the memory of the requests q. A receiver that still reads it sees the changed generation and drops
// the message.
func (t *pins) recall(q *van.Requests) {
	for i := range t.slots {
		if a := &t.slots[i]; a.busy && a.of.in(q) {
			t.seg.gen(uint32(i)).Store(0) // first: the reader checks it after it has read
			t.bytes -= a.bytes
			device, seq := a.device, a.seq
			a.end()
			a.busy, a.device, a.seq = true, device, seq // the slot stays in use until it is acknowledged
		}
	}
}

// close releases all slots and returns how many messages were pinned.
func (t *pins) close() (n int) {
	for i := range t.slots {
		if t.slots[i].busy {
			n++
			t.seg.gen(uint32(i)).Store(0) // first: the reader checks it after it has read
			t.release(uint32(i))
		}
	}
	return n
}

// since returns the number of the first pinned message that names allocations, or next.
func (t *pins) since(next uint64) uint64 {
	for i := range t.slots {
		if a := &t.slots[i]; a.busy && a.seq > 0 {
			next = min(next, a.seq)
		}
	}
	return next
}

// queued is a message that waits for free space in the ring.
type queued struct {
	rec   record
	bytes []byte
	pin   pin
}

// sendQueue is the FIFO queue of messages that wait for free space.
type sendQueue struct {
	list     []*queued
	requests requestCounts // of those with pinned parts
	bytes    int64
}

// queueLen is the maximum number of messages that wait for free space.
const queueLen = 65536

// put adds q.
func (s *sendQueue) put(q *queued) {
	if q.rec.pins() || q.rec.streams() {
		s.requests.add(q.pin.of)
	} else {
		q.pin.end()
	}
	s.list = append(s.list, q)
	s.bytes += q.size()
}

// size returns how many bytes q keeps in memory.
func (q *queued) size() int64 { return int64(len(q.bytes)) + q.pin.bytes }

// take removes the first message.
func (s *sendQueue) take() {
	q := s.list[0]
	s.list[0] = nil
	s.list = s.list[1:]
	s.bytes -= q.size()
	s.requests.remove(q.pin.of)
}

// recall drops the messages of the requests q. A batch whose first record is not dropped gets an end, so that the receiver does not wait
// for the others.
func (s *sendQueue) recall(q *van.Requests) {
	if !s.requests.have(q) {
		return
	}
	ended := uint64(0) // the number of the batch whose records are dropped
	s.list = slices.DeleteFunc(s.list, func(x *queued) bool {
		if !x.pin.of.in(q) || !x.rec.pins() && !x.rec.streams() {
			return false
		}
		s.bytes -= x.size()
		s.requests.remove(x.pin.of)
		x.pin.end()
		number := x.rec.batch >> 16
		if x.rec.kind != kindValue || number == ended {
			ended = number
			return true
		}
		ended = number
		x.rec = record{kind: kindValue, frames: 2, slot: noSlot}
		for i := range present(x.rec.frames) {
			x.rec.parts[i] = part{form: partInline, off: recordHead}
		}
		x.rec.forms = 1 << partInline
		x.bytes = x.bytes[:recordHead]
		x.rec.putHead(x.bytes, recordHead)
		s.bytes += x.size()
		return false
	})
}

// close drops all messages and returns their number.
func (s *sendQueue) close() (n int) {
	for _, q := range s.list {
		n++
		if q.rec.pins() || q.rec.streams() {
			q.pin.end()
		}
	}
	s.list, s.requests, s.bytes = nil, nil, 0
	return n
}
