package rdma

import (
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns batches between nodes of this library. A batch is one message in one slot:
//
//	meta with the directory | placement of each part | inline values | trailer
//
// Host values of up to inlineValue bytes are inline values. Each other value is written from where it lies: to the destination that the
// request names, to a receive buffer that the peer has announced, or to the slot's value memory. Each part of the layout and each value in
// the slot begins at a multiple of frameAlign.

const (
	// inlineValue is the length of the longest inline value. A longer one costs less as a write of its own than as a copy.
	inlineValue = smallPayload - van.MaxFrames*frameAlign
	// maxBatchBytes is the length of all values above which a batch is sent as the messages of ps-lite. The cost of a message does not
	// matter then, and a slot for all values would need as much memory at once. batchShare is the share of this node's own
	// STEPAF_RDMA_PEER_BUDGET, which the peer probably has, too, above which it is so.
	maxBatchBytes = 256 << 20
	batchShare    = 4
)

// outPart is a part of a batch to be sent.
type outPart struct {
	key    uint64
	len    int         // bytes of the value; 0: none
	mem    backend.Mem // registered memory of the caller; empty if the value was copied
	into   backend.Mem // of a pull: the destination of the answer
	pull   pullKey     // of a pull
	addr   uint64      // of an answer: the destination in the request; of a pull: that of into
	rkey   uint32      // of addr; 0: the peer may not write there
	placed bool        // the value is written to addr
}

// assembles reports whether msg, a batch, can be sent to p as one message. p.mu is held.
func (p *peer) assembles(msg *van.Message) bool {
	if p.link != nil && !p.link.native || p.link == nil && p.incarnation == 0 {
		return false // a node of the C++ library, or it may be one
	}
	n := aligned(msg.EncodedLen()) + aligned(placementLen*len(msg.Parts)) + trailerLen
	total, writes, most := 0, 1, maxBatchBytes
	if b := p.v.budget.perPeer; b > 0 {
		most = min(most, int(b)/batchShare)
	}
	for i := range msg.Parts {
		v := &msg.Parts[i].Vals
		total += aligned(v.Len())
		if isInline(v) {
			n += aligned(v.Len())
		} else {
			writes++
		}
	}
	return n <= maxMeta && total <= most && writes <= p.v.cm.SendDepth/2
}

func isInline(v *backend.Mem) bool { return v.Len() <= inlineValue && v.OnHost() }

// fillParts takes over the parts of msg, a batch.
func (o *outgoing) fillParts(msg *van.Message) {
	o.inMeta, o.inline = true, 0
	o.parts = slices.Grow(o.parts[:0], len(msg.Parts))[:len(msg.Parts)]
	for i := range msg.Parts {
		x, v := &msg.Parts[i], &o.parts[i]
		*v = outPart{key: x.Key, len: x.Vals.Len()}
		switch {
		case !msg.Request:
			v.addr, v.rkey = x.Addr, uint32(x.Option)
		case !x.Push && x.Into.Len() == x.Len && x.Into.Len() > 0:
			v.into, v.pull = x.Into, pullKey{x.Timestamp, int16(msg.AppID), int16(msg.CustomerID), x.Key}
		}
		switch {
		case isInline(&x.Vals):
			o.copies = append(o.copies, x.Vals.Host()...)
			o.inline += aligned(v.len)
		default:
			v.mem, o.zeroCopy, o.done = x.Vals, true, msg.Done
			v.mem.Retain() // recycle releases it
		}
	}
}

// writes returns the number of work requests that o may need on one queue pair.
func (o *outgoing) writes() int {
	n := 1
	for i := range o.parts {
		if o.parts[i].mem.Len() > 0 {
			n++
		}
	}
	return n
}

// isBatch reports whether o is a batch.
func (o *outgoing) isBatch() bool { return len(o.parts) > 0 }

// place decides where the values of o are written, and returns the bytes of those that are written to the slot.
func (d *nativeOut) place(o *outgoing) (slot int) {
	if !o.isBatch() {
		if b := d.buffers[o.key]; o.request && o.push && o.singleKey && o.data[1].Len() > 0 {
			if o.direct = b.len >= int(o.lens[1]); o.direct {
				o.addr, o.rkey = b.addr, b.rkey
				le.PutUint64(o.meta[metaAddr:], b.addr)
			}
		}
		if o.direct || o.inMeta || o.request && !o.push && o.singleKey {
			return 0
		}
		return o.packedLen()
	}
	for i := range o.parts {
		x := &o.parts[i]
		if x.mem.Len() == 0 {
			continue
		}
		if o.request {
			b := d.buffers[x.key]
			x.addr, x.rkey, x.placed = b.addr, b.rkey, b.len >= x.len
		} else {
			x.placed = x.rkey != 0
		}
		if !x.placed {
			slot = aligned(slot) + x.len
		}
	}
	return slot
}

// addParts writes the placements and the inline values of o, a batch, to b, and adds the writes of its other values.
func (l *link) addParts(id uint32, o *outgoing, at *rendezvous.RemoteSlot, b []byte, split bool) {
	regions := l.queue.Record(id).Regions
	last := -1 // the last value that is split
	for i := range o.parts {
		if split && o.parts[i].splits() {
			last = i
		}
	}
	inline, copies, slot := b[aligned(placementLen*len(o.parts)):], o.copies, 0
	for i := range o.parts {
		x := &o.parts[i]
		t := placement{addr: x.addr, rkey: x.rkey}
		switch {
		case x.len == 0:
		case x.mem.Len() == 0:
			copy(inline, copies[:x.len])
			inline, copies = inline[aligned(x.len):], copies[x.len:]
		default:
			wr := verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: x.addr, RKey: x.rkey, LocalAddr: x.mem.Addr(), Len: uint32(x.len), LKey: regions[0].MR.LKey()}
			regions = regions[1:]
			if t.where = valueInPlace; !x.placed {
				t.where, slot = valueInSlot, aligned(slot)
				wr.RemoteAddr, wr.RKey = at.Data+uint64(slot), at.DataKey
				slot += x.len
			}
			if split && x.splits() {
				l.addSplit(id, wr, at.Index, i == last)
			} else {
				l.queue.AddValue(id, wr)
			}
		}
		t.put(b[placementLen*i:])
	}
}

func (x *outPart) splits() bool { return x.mem.Len() >= minSplit }

// parts reads the directory of a batch and locates its values. Each placement is read once: the peer may change it meanwhile.
func (d nativeIn) parts(rx *received, l *receiveSlot, t *trailer, behind []byte) error {
	m := &rx.msg
	if !t.inMeta || t.frames > 0 {
		return &van.FieldError{Field: "trailer of a batch", Value: fmt.Sprintf("%d frames, placements %t", t.frames, t.inMeta), Want: "no frames, and placements"}
	}
	if _, err := m.ReadDirectory(); err != nil {
		return err
	}
	if n := placementLen * len(m.Parts); len(behind) < n {
		return &van.FieldError{Field: "placements", Value: fmt.Sprintf("%d bytes", len(behind)), Want: fmt.Sprint(n)}
	}
	inline := valueReader{mem: backend.Bytes(behind), used: placementLen * len(m.Parts)}
	slot := valueReader{mem: l.Memory.data.Sub(0, min(l.Data, l.Memory.data.Len()))}
	var p *peer
	if !m.Request {
		if p = (*d.v.tables.peers.Load())[d.handshake.node]; p != nil {
			p.mu.Lock()
			defer p.mu.Unlock()
		}
	}
	for i := range m.Parts {
		x := &m.Parts[i]
		var at placement
		at.get(behind[placementLen*i:])
		x.Addr, x.Option = at.addr, int32(at.rkey)
		var small []byte
		var err error
		switch {
		case !m.HasValue(i) || x.Len == 0:
		case at.where == valueInMeta:
			if x.Vals, err = inline.next(x); err == nil {
				small = x.Vals.Host()
			}
		case at.where == valueInSlot:
			if x.Vals, err = slot.next(x); err == nil && m.Request {
				d.announceBuffer(x.Key, x.Len)
			}
		case at.where == valueInPlace && m.Request:
			x.Vals, err = d.announced(x.Key, x.Len, at.addr)
			x.Placed = true
		case at.where != valueInPlace:
			err = &van.FieldError{Field: fmt.Sprintf("placement of key %d", x.Key), Value: at.where, Want: "0, 1 or 2"}
		}
		if err != nil {
			return err
		}
		if p != nil {
			into, copied := p.takePull(pullKey{x.Timestamp, int16(m.AppID), int16(m.CustomerID), x.Key}, x.Addr, x.Len, small)
			if copied || at.where == valueInPlace {
				x.Vals, x.Placed = into, into.Len() > 0 // otherwise the answer is late: no caller waits for it
			}
		}
		if x.Vals.Len() > 0 && !x.Placed {
			rx.slot = l
		}
	}
	return nil
}

// valueReader locates the values in memory that a peer has written.
type valueReader struct {
	mem  backend.Mem
	used int
}

// next returns the next value, that of x.
func (r *valueReader) next(x *van.Part) (v backend.Mem, err error) {
	r.used = aligned(r.used)
	if n := r.mem.Len() - r.used; x.Len > n {
		return v, &van.FieldError{Field: fmt.Sprintf("bytes of key %d", x.Key), Value: x.Len, Want: fmt.Sprintf("at most %d", max(n, 0))}
	}
	v = r.mem.Sub(r.used, x.Len)
	r.used += x.Len
	return v, nil
}
