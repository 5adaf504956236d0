package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns batches between native nodes. A batch is one message: its meta, whose body is the directory, a table with an entry for
// each part, the values that fit, and the trailer. The sender writes each other value before, to a slot of its own or to the pull tensor.
//
// The values before a batch are entries of the sender's queue, and so is the batch, which follows them. All are written on the first
// queue pair, so the values are complete when the receiver polls the notification of the batch.

// Layout of an entry of the table: u64 address of a pull tensor, u32 key, u32 kind. An answer repeats the address of its request.
const (
	entryLen = 16
	offKey   = 8
	offKind  = 12
)

// Kinds of entries.
const (
	entryNone   = iota // there is no value; the key, if not 0, is the remote key of a pull tensor, which the answer is written to
	entryInline        // the value follows the table; values are aligned
	entrySlot          // the value is in the slot that the key numbers
	entryPlaced        // the value was written to the pull tensor
)

// smallestSlot is the length up to which a value does not get a slot of its own if the meta needs memory of its own anyway.
const smallestSlot = 512

// keptParts is the capacity of parts, and of slots, that a pooled message keeps.
const keptParts = 256

// outPart is what a batch that is queued stores of a part.
type outPart struct {
	slot *rendezvous.RemoteSlot // that its value was written to
	into backend.Mem            // the pull tensor
	pull pullKey
}

// queueBatch queues msg, a batch, and before it the values that do not fit behind the meta. all counts those that are not copied. It
// queues all or nothing. p.mu is held.
func (p *peer) queueBatch(msg *van.Message, all *van.AllSent) error {
	o := p.newOutgoing()
	if err := o.fillMeta(msg); err != nil {
		p.recycle(o)
		return err
	}
	o.batchMeta = len(o.meta)
	end := aligned(o.batchMeta) + entryLen*len(msg.Parts)
	o.meta = append(o.meta, make([]byte, end-o.batchMeta)...)
	inCell := aligned(end)+trailerLen <= conn.CellSize
	for i := range msg.Parts {
		x, kind := &msg.Parts[i], entryNone
		part := outPart{pull: pullKey{x.Timestamp, int16(msg.AppID), int16(msg.CustomerID), x.Key}}
		addr, n := x.Addr, x.Vals.Len()
		switch at := aligned(len(o.meta)); {
		case !msg.HasValue(i):
			if x.Into.Len() == x.Len && x.Len > 0 {
				part.into, addr = x.Into, x.Into.Addr()
			}
		case n == 0:
		case n != x.Len:
			p.recycle(o)
			return fmt.Errorf("%w: a value of %d bytes of key %d, want %d", van.ErrInvalid, n, x.Key, x.Len)
		case x.Vals.OnHost() && n <= smallPayload && (inCell && at+n+trailerLen <= conn.CellSize || !inCell && n <= smallestSlot):
			kind = entryInline
			o.meta = append(append(o.meta, make([]byte, at-len(o.meta))...), x.Vals.Host()...)
			o.size += n
		case !msg.Request && x.Option != 0:
			kind = entryPlaced
		default:
			kind = entrySlot
		}
		e := o.entry(o.meta, i)
		le.PutUint64(e, addr)
		le.PutUint32(e[offKind:], uint32(kind))
		o.parts = append(o.parts, part)
	}
	if n := len(o.meta) + trailerLen; n > maxMeta {
		p.recycle(o)
		return fmt.Errorf("%w: a batch of %d bytes without its long values, want at most %d", van.ErrInvalid, n, maxMeta)
	}
	for i := range msg.Parts {
		if kind := le.Uint32(o.entry(o.meta, i)[offKind:]); kind == entrySlot || kind == entryPlaced {
			p.queueValue(o, i, &msg.Parts[i], kind == entryPlaced, all)
		}
	}
	return p.submit(o)
}

// entry returns the table's entry for part i in meta.
func (o *outgoing) entry(meta []byte, i int) []byte {
	return meta[aligned(o.batchMeta)+entryLen*i:][:entryLen]
}

// queueValue queues the value of part i of batch b. p.mu is held.
func (p *peer) queueValue(b *outgoing, i int, x *van.Part, direct bool, all *van.AllSent) {
	o := p.newOutgoing()
	o.batch, o.part = b, i
	b.values++
	o.request, o.push, o.key, o.singleKey = b.request, x.Push, x.Key, true
	o.frames, o.size, o.lens[1], o.id = 2, x.Vals.Len(), uint32(x.Vals.Len()), b.id
	if o.direct = direct; direct {
		o.addr, o.rkey = x.Addr, uint32(x.Option)
	}
	if x.Vals.OnHost() && o.size <= smallPayload {
		o.copies = append(o.copies, x.Vals.Host()...)
	} else {
		o.data[1], o.done = x.Vals, all.Add()
		x.Vals.Retain() // recycle releases it
		b.lends = true
	}
	_ = p.submit(o) // only StepMesh peers refuse
}

// putValue posts the work requests that write o, the value of a part, to its slot at. at is nil if o has the address. p.mu is held.
func (p *peer) putValue(id uint32, r *conn.Record[sentMessage], stage []byte, o *outgoing, at *rendezvous.RemoteSlot) {
	l, b := p.link, o.batch
	if err := l.registerFrames(r, o); err != nil {
		b.canceled = true
		p.reject(id, o, at, err)
		return
	}
	split := p.v.cfg.SplitQPLag && l.canSplit(o)
	if split {
		l.splits++
		b.split = true
	}
	index := uint32(0)
	if at != nil {
		index, b.parts[o.part].slot = at.Index, at
		l.dialect.pin(o, at)
	}
	l.addPayload(id, o, at, stage, index, verbs.Signaled, split)
	p.noteSent(r, o)
}

// completeTable puts the slots and the remote keys of pull tensors into the table of batch o. p.mu is held.
func (p *peer) completeTable(o *outgoing, meta []byte) error {
	for i := range o.parts {
		switch x := &o.parts[i]; {
		case x.slot != nil:
			le.PutUint32(o.entry(meta, i)[offKey:], x.slot.Index)
		case x.into.Len() > 0:
			rkey, err := p.registerDestination(x.into, x.pull)
			if err != nil {
				return err
			}
			le.PutUint32(o.entry(meta, i)[offKey:], rkey)
		}
	}
	return nil
}

// releaseValues releases the slots of the values of o, if it is a batch that will not be sent. p.mu is held.
func (p *peer) releaseValues(o *outgoing) {
	for i := range o.parts {
		if s := o.parts[i].slot; s != nil {
			p.sender.Release(s)
			p.link.dialect.unpin()
		}
	}
}

// readParts sets the parts of rx, a batch, from its directory and from b, the table and the values behind it. It holds the slots of other
// values. Values that were written to pull tensors are left to endPulls.
func (rx *received) readParts(t *trailer, b []byte) error {
	m := &rx.msg
	if !t.batch || !m.IsBatch() {
		return &van.FieldError{Field: "trailer flags: batch", Value: t.batch, Want: "that of a batch, and in batches only"}
	}
	if _, err := m.ReadDirectory(); err != nil {
		return err
	}
	off := entryLen * len(m.Parts)
	if off > len(b) {
		return &van.FieldError{Field: "table", Value: fmt.Sprintf("%d bytes", len(b)), Want: fmt.Sprintf("%d for %d parts", off, len(m.Parts))}
	}
	for i := range m.Parts {
		x, e := &m.Parts[i], b[entryLen*i:]
		key, kind := le.Uint32(e[offKey:]), le.Uint32(e[offKind:])
		x.Addr = le.Uint64(e)
		bad := func(field string, value any, want string, a ...any) error {
			return &van.FieldError{Field: fmt.Sprintf("table[%d] (key %d) %s", i, x.Key, field), Value: value, Want: fmt.Sprintf(want, a...)}
		}
		if has := m.HasValue(i) && x.Len > 0; has != (kind != entryNone) {
			return bad("kind", kind, "0 without a value, 1 to 3 with one")
		}
		switch kind {
		case entryNone:
			x.Option = int32(key)
		case entryInline:
			from := aligned(off)
			if off = from + x.Len; off > len(b) {
				return bad("bytes", x.Len, "at most %d, what follows the table", max(len(b)-from, 0))
			}
			x.Vals, rx.usesCell = backend.Bytes(b[from:off]), true
		case entrySlot:
			s := rx.d.v.budget.slots.Get(key)
			if s == nil || s.Owner != rx.in || s.OneShot {
				return bad("slot", key, "one granted on this connection")
			}
			ok, over := s.Hold()
			if !ok {
				return bad("slot", key, "one that has not ended")
			}
			rx.slots = append(rx.slots, s) // Free releases it
			room := min(s.Data, s.Memory.data.Len())
			switch {
			case over:
				return bad("slot", key, "one that has been returned")
			case x.Len > room:
				return bad("bytes", x.Len, "at most %d, the length of slot %d", room, key)
			}
			x.Vals, x.Placed = s.Memory.data.Sub(0, x.Len), m.Request && s.Memory.region != nil
		case entryPlaced:
			if m.Request {
				return bad("kind", kind, "3, a value in a pull tensor, only in answers")
			}
			x.Placed = true
		default:
			return bad("kind", kind, "0 to 3")
		}
	}
	if off != len(b) {
		return &van.FieldError{Field: "bytes behind the table", Value: len(b), Want: fmt.Sprintf("%d, as the directory says", off)}
	}
	return nil
}

// endPulls ends the requests that m, a batch of answers from p, answers. It sets the values that were written to pull tensors, and copies
// short ones there. It reports whether a value is elsewhere. p is nil if this node has no such peer.
func (p *peer) endPulls(m *van.Message) (elsewhere bool) {
	if p != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
	}
	for i := range m.Parts {
		x := &m.Parts[i]
		var into backend.Mem
		copied := false
		if p != nil {
			var small []byte
			if x.Vals.Len() <= smallPayload && x.Vals.OnHost() {
				small = x.Vals.Host()
			}
			into, copied = p.endPullLocked(pullKey{x.Timestamp, int16(m.AppID), int16(m.CustomerID), x.Key}, x.Addr, x.Len, small)
		}
		switch {
		case copied, x.Placed && into.Len() == x.Len:
			x.Vals, x.Placed = into, true
		case x.Placed:
			x.Placed = false // the answer is late: no caller waits for it
		case x.Len > 0:
			elsewhere = true
		}
	}
	return elsewhere
}

// isCanceled reports whether o is not to be sent: it was canceled, or it is a value of a batch that was.
func (o *outgoing) isCanceled() bool { return o.canceled || o.batch != nil && o.batch.canceled }

// needsNoSlot reports whether o is put in its turn without a slot: the peer has named the memory of a value, or o is not sent.
func (o *outgoing) needsNoSlot() bool {
	return o.batch != nil && o.direct || (o.batch != nil || o.batchMeta > 0) && o.isCanceled()
}
