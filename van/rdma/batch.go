package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
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

// queueBatch queues msg, a batch, and before it the values that do not fit behind the meta. all counts those that are not copied. It
// queues all or nothing. p.mu is held.
func queueBatch(p *peer, msg *van.Message, all *van.AllSent) error {
	o := newOutgoing(p)
	if err := o.fillMeta(msg); err != nil {
		p.recycle(o)
		return err
	}
	o.table.meta = len(o.meta)
	end := aligned(o.table.meta) + entryLen*len(msg.Parts)
	o.meta = append(o.meta, make([]byte, end-o.table.meta)...)
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
		o.table.parts = append(o.table.parts, part)
	}
	if n := len(o.meta) + trailerLen; n > maxMeta {
		p.recycle(o)
		return fmt.Errorf("%w: a batch of %d bytes without its long values, want at most %d", van.ErrInvalid, n, maxMeta)
	}
	for i := range msg.Parts {
		if kind := le.Uint32(o.entry(o.meta, i)[offKind:]); kind == entrySlot || kind == entryPlaced {
			queueValue(p, o, i, &msg.Parts[i], kind == entryPlaced, all)
		}
	}
	return submit(p, o)
}

// queueValue queues the value of part i of batch b. p.mu is held.
func queueValue(p *peer, b *outgoing, i int, x *van.Part, direct bool, all *van.AllSent) {
	o := newOutgoing(p)
	o.of.batch, o.of.part = b, i
	b.table.values++
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
		b.table.lends = true
	}
	_ = submit(p, o) // only StepMesh peers refuse
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
