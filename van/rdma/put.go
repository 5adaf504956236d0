package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// put sends o to its slot: the value, and the meta behind it with the notification. The link
// has room. p.mu is held.
func (p *peer) put(o *outgoing, at *rendezvous.RemoteSlot) {
	l := p.link
	id, r, stage, _ := l.begin()
	if err := p.check(o); err != nil { // it was sent before there was a connection
		p.reject(id, o, at, err)
		return
	}
	if o.revoked && !l.native { // StepMesh would write to the memory all the same
		p.sender.Release(at)
		f := l.finish(id)
		f.done = o.done
		go f.end()
		p.recycle(o)
		return
	}
	whole := o.inMeta && l.native
	n := len(o.meta)
	switch {
	case whole:
		n = aligned(n) + o.packedLen() + trailerLen
	case l.native:
		n += trailerLen
	}
	meta := stage[:min(n, len(stage))]
	lkey := uint32(0)
	room := metaRoom
	if len(o.copies) == 0 {
		room = len(stage)
	}
	if !whole && n > room {
		b, err := newBlock(l.dev, n, 0)
		if err != nil {
			p.reject(id, o, at, fmt.Errorf("a meta of %d bytes: %w", n, err))
			return
		}
		r.large, meta, lkey = b, b.mem.Host(), b.mr.LKey()
	}
	copy(meta, o.meta)
	if err := p.pin(l, r, o); err != nil {
		p.reject(id, o, at, err)
		return
	}
	if o.into.Len() > 0 {
		if err := p.exposeDestination(l, o, meta); err != nil {
			p.reject(id, o, at, err)
			return
		}
	}
	split := p.v.cfg.SplitQPLag && len(l.qps) > 1 && !whole && o.singleKey && o.lens[1] >= minSplit && (o.direct || o.request && o.push)
	if split {
		l.splits++
		le.PutUint32(meta[metaSlaves:], uint32(len(l.qps)-1))
		for i := range 2 {
			le.PutUint64(meta[metaCounter+8*i:], l.splits)
		}
	}
	if l.native {
		t := trailer{packed: !o.singleKey, placed: o.direct && !whole, frames: o.frames, lens: o.lens, inMeta: whole, metaLen: len(o.meta)}
		if o.control && l.numbered {
			t.numbered, t.lens[0], t.lens[1] = true, o.number&maxData, p.tag&maxData
		}
		if b := p.inbound.Load(); b != nil {
			b.takeCredits(&t, r)
		}
		t.put(meta[n-trailerLen:])
	}
	if whole {
		o.behind(meta[aligned(len(o.meta)):])
	} else {
		p.addPayload(l, id, o, at, stage[metaRoom:], split)
	}
	wr := verbs.SendWR{Op: verbs.OpWriteImm, Flags: verbs.Signaled, Imm: at.Index, RemoteAddr: at.Meta, RKey: at.MetaKey}
	if lkey != 0 || r.large != nil {
		wr.LocalAddr, wr.Len, wr.LKey = backend.Bytes(meta).Addr(), uint32(len(meta)), lkey
	} else {
		wr = l.staged(wr, meta)
	}
	l.add(id, 0, wr)
	r.done = o.done
	r.data = !o.control
	if o.control && l.numbered {
		l.seq++
		r.control, r.seq = o, l.seq
		p.unsent, o.unsent = p.unsent-o.unsent, 0
		return // it is recycled when it has arrived
	}
	if o.size >= maxHold {
		p.flush(false)
	}
	p.recycle(o)
}

// behind writes the frames, packed, behind the meta.
func (o *outgoing) behind(b []byte) {
	if o.singleKey {
		copy(b, o.copies)
		return
	}
	off, copied := 0, 0
	for _, n := range o.lens[:o.frames] {
		off = aligned(off)
		copied += copy(b[off:off+int(n)], o.copies[copied:])
		off += int(n)
	}
}

// maxHold is the payload from which a message does not wait for more.
const maxHold = 32 << 10

// minSplit is the length from which a value is split over the queue pairs.
const minSplit = 8 << 10

// pin makes the caller's memory known to the device.
func (p *peer) pin(l *link, r *record, o *outgoing) error {
	for i := range o.frames {
		if o.data[i].Len() == 0 {
			continue
		}
		reg, err := l.host.regions.get(o.data[i], 0)
		if err != nil {
			return fmt.Errorf("value of %d bytes: %w", o.data[i].Len(), err)
		}
		r.regions[r.n] = reg
		r.n++
	}
	return nil
}

// exposeDestination makes the memory that the answer is to be put into known to the peer.
func (p *peer) exposeDestination(l *link, o *outgoing, meta []byte) error {
	reg, err := l.host.regions.get(o.into, verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		return fmt.Errorf("memory for the answer, %d bytes: %w", o.into.Len(), err)
	}
	if old, again := p.pulls[o.pullKey]; again {
		old.region.release()
	}
	p.pulls[o.pullKey] = pullDestination{o.into, reg, !l.native, l}
	le.PutUint32(meta[metaOption:], reg.mr.RKey())
	return nil
}

// reject drops a message that turns out to be impossible. The requests that wait for
// its answer fail. p.mu is held.
func (p *peer) reject(id uint32, o *outgoing, at *rendezvous.RemoteSlot, err error) {
	p.sender.Release(at)
	f := p.link.finish(id)
	f.done = o.done
	go f.end()
	p.failMessage(o, err)
}

func (p *peer) failMessage(o *outgoing, err error) {
	p.recycle(o)
	go p.v.notifyFailure(p, p.link, err)
}

// addPayload adds the writes of the payload.
func (p *peer) addPayload(l *link, id uint32, o *outgoing, at *rendezvous.RemoteSlot, stage []byte, split bool) {
	r := &l.recs[id]
	to, rkey := at.Data, at.DataKey
	if o.direct {
		to, rkey = o.addr, o.rkey
	}
	if o.singleKey {
		if o.request && !o.push || o.frames == 0 || o.lens[1] == 0 {
			return
		}
		wr := verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: to, RKey: rkey}
		if o.data[1].Len() == 0 {
			l.add(id, 0, l.staged(wr, stage[:copy(stage, o.copies)]))
			return
		}
		wr.LocalAddr, wr.Len, wr.LKey = o.data[1].Addr(), o.lens[1], r.regions[0].mr.LKey()
		if !split {
			l.addValue(id, wr)
			return
		}
		part := wr.Len / uint32(len(l.qps))
		first := wr
		first.Len = wr.Len - part*uint32(len(l.qps)-1)
		l.add(id, 0, first)
		off := uint64(first.Len)
		for q := 1; q < len(l.qps); q++ {
			x := wr
			x.Op, x.Flags, x.Imm = verbs.OpWriteImm, verbs.Signaled, at.Index|immSlave
			x.LocalAddr, x.RemoteAddr, x.Len = wr.LocalAddr+off, wr.RemoteAddr+off, part
			l.add(id, q, x)
			off += uint64(part)
		}
		return
	}
	// Packed: runs of copied frames in one write each.
	off, copied, reg := 0, 0, 0
	for i := range o.frames {
		off = aligned(off)
		n := int(o.lens[i])
		if n == 0 {
			continue
		}
		wr := verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: to + uint64(off), RKey: rkey}
		if o.data[i].Len() == 0 {
			b := stage[:copy(stage, o.copies[copied:copied+n])]
			stage = stage[aligned(n):]
			copied += n
			l.add(id, 0, l.staged(wr, b))
		} else {
			wr.LocalAddr, wr.Len, wr.LKey = o.data[i].Addr(), o.lens[i], r.regions[reg].mr.LKey()
			reg++
			l.addValue(id, wr)
		}
		off += n
	}
}
