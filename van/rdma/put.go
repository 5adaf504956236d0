package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the work requests of a message: slot requests, payload, meta and
// notification.

// put sends o to its slot: the value, and the meta behind it with the notification. The link
// has room. p.mu is held.
func (p *peer) put(o *outgoing, at *rendezvous.RemoteSlot) {
	l := p.link
	id, r, stage, _ := l.queue.Begin()
	if err := l.dialect.check(o); err != nil { // it was sent before there was a connection
		p.reject(id, o, at, err)
		return
	}
	if o.canceled || !l.dialect.mustSend(o) {
		p.sender.Release(at)
		l.finishUnsent(id, o)
		p.recycle(o)
		return
	}
	n, inMeta := l.dialect.layout(o)
	meta := stage[:min(n, len(stage))]
	room := metaRoom
	if len(o.copies) == 0 {
		room = len(stage)
	}
	if !inMeta && n > room {
		b, err := conn.NewBlock(l.queue.Device, n, 0)
		if err != nil {
			p.reject(id, o, at, fmt.Errorf("a meta of %d bytes: %w", n, err))
			return
		}
		r.Large, meta = b, b.Mem.Host()
	}
	copy(meta, o.meta)
	if err := p.registerFrames(l, r, o); err != nil {
		p.reject(id, o, at, err)
		return
	}
	if o.destination.Len() > 0 {
		if err := p.registerDestination(l, o, meta); err != nil {
			p.reject(id, o, at, err)
			return
		}
	}
	split := p.v.cfg.SplitQPLag && len(l.queue.QueuePairs) > 1 && !inMeta && o.singleKey && o.lens[1] >= minSplit && (o.direct || o.request && o.push)
	if split {
		l.splits++
		le.PutUint32(meta[metaSlaves:], uint32(len(l.queue.QueuePairs)-1))
		for i := range 2 {
			le.PutUint64(meta[metaCounter+8*i:], l.splits)
		}
	}
	late := false
	if t, ok := l.dialect.trailer(o, inMeta); ok {
		if o.control && l.numbered {
			t.numbered, t.lens[0], t.lens[1] = true, o.number&maxData, p.tag&maxData
		}
		if b := p.inbound.Load(); b != nil {
			b.takeCredits(&t, &r.Note)
		}
		t.put(meta[n-trailerLen:])
		if o.isZeroCopy() && !split { // a part on another queue pair may come after the trailer
			late = true
			r.Note.id, r.Note.flags = o.id, meta[n-trailerLen+offFlags:][:1]
		}
	}
	if inMeta {
		o.writeFrames(meta[aligned(len(o.meta)):])
	} else {
		p.addPayload(l, id, o, at, stage[metaRoom:], split)
	}
	wr := verbs.SendWR{Op: verbs.OpWriteImm, Flags: verbs.Signaled, Imm: at.Index, RemoteAddr: at.Meta, RKey: at.MetaKey}
	switch {
	case r.Large != nil:
		wr.LocalAddr, wr.Len, wr.LKey = backend.Bytes(meta).Addr(), uint32(len(meta)), r.Large.MR.LKey()
	case late:
		wr = l.queue.StagedByReference(wr, meta)
	default:
		wr = l.queue.Staged(wr, meta)
	}
	l.queue.Add(id, 0, wr)
	l.bundle = bundle{}
	if l.bundles && o.fitsBundle() {
		l.bundle = bundle{record: id, end: n, limit: min(at.MetaLen, len(stage))}
	}
	r.Note.done, r.Note.data = o.done, !o.control
	if o.control && l.numbered {
		l.seq++
		r.Note.control, r.Note.seq = o, l.seq
		p.unsent, o.unsent = p.unsent-o.unsent, 0
		return // it is recycled when it has arrived
	}
	if o.size >= flushSize {
		p.flush(false)
	}
	p.recycle(o)
}

// flushSize is the payload from which a message does not wait for more.
const flushSize = 32 << 10

// minSplit is the length from which a value is split over the queue pairs.
const minSplit = 8 << 10

// registerFrames makes the caller's memory known to the device.
func (p *peer) registerFrames(l *link, r *conn.Record[sentMessage], o *outgoing) error {
	for i := range o.frames {
		if o.data[i].Len() == 0 {
			continue
		}
		reg, err := l.device.regions.Get(o.data[i], 0)
		if err != nil {
			return fmt.Errorf("value of %d bytes: %w", o.data[i].Len(), err)
		}
		r.Regions[r.N] = reg
		r.N++
	}
	return nil
}

// registerDestination makes the memory that the answer is to be put into known to the peer.
func (p *peer) registerDestination(l *link, o *outgoing, meta []byte) error {
	reg, err := l.device.regions.Get(o.destination, verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		return fmt.Errorf("memory for the answer, %d bytes: %w", o.destination.Len(), err)
	}
	if old, again := p.pulls[o.pullKey]; again {
		old.region.Release()
	}
	p.pulls[o.pullKey] = pullDestination{o.destination, reg, !l.native, l}
	le.PutUint32(meta[metaOption:], reg.MR.RKey())
	return nil
}

// finishUnsent ends record id, of a message that is not sent.
func (l *link) finishUnsent(id uint32, o *outgoing) {
	f := l.queue.Finish(id)
	f.Note.done = o.done
	go finishSent(&f)
}

// reject drops a message that turns out to be impossible. The requests that wait for
// its answer fail. p.mu is held.
func (p *peer) reject(id uint32, o *outgoing, at *rendezvous.RemoteSlot, err error) {
	p.sender.Release(at)
	p.link.finishUnsent(id, o)
	p.failMessage(o, err)
}

func (p *peer) failMessage(o *outgoing, err error) {
	p.recycle(o)
	go p.v.notifyFailure(p, p.link, err)
}

// addPayload adds the writes of the payload.
func (p *peer) addPayload(l *link, id uint32, o *outgoing, at *rendezvous.RemoteSlot, stage []byte, split bool) {
	r := l.queue.Record(id)
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
			l.queue.Add(id, 0, l.queue.Staged(wr, stage[:copy(stage, o.copies)]))
			return
		}
		wr.LocalAddr, wr.Len, wr.LKey = o.data[1].Addr(), o.lens[1], r.Regions[0].MR.LKey()
		if !split {
			l.queue.AddValue(id, wr)
			return
		}
		part := wr.Len / uint32(len(l.queue.QueuePairs))
		first := wr
		first.Len = wr.Len - part*uint32(len(l.queue.QueuePairs)-1)
		l.queue.Add(id, 0, first)
		off := uint64(first.Len)
		for q := 1; q < len(l.queue.QueuePairs); q++ {
			x := wr
			x.Op, x.Flags, x.Imm = verbs.OpWriteImm, verbs.Signaled, at.Index|immSlave
			x.LocalAddr, x.RemoteAddr, x.Len = wr.LocalAddr+off, wr.RemoteAddr+off, part
			l.queue.Add(id, q, x)
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
			l.queue.Add(id, 0, l.queue.Staged(wr, b))
		} else {
			wr.LocalAddr, wr.Len, wr.LKey = o.data[i].Addr(), o.lens[i], r.Regions[reg].MR.LKey()
			reg++
			l.queue.AddValue(id, wr)
		}
		off += n
	}
}

// requestSlot sends a slot request. The link has room. p.mu is held.
func (p *peer) requestSlot(origin uint64, o *outgoing, need rendezvous.Need) {
	l := p.link
	id, _, stage, _ := l.queue.Begin()
	s := slotRequest{metaLen: uint64(need.Meta), origin: origin}
	l.dialect.completeRequest(&s, o, need)
	s.put(stage[:slotRequestLen])
	l.queue.Add(id, 0, l.queue.Staged(verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immSlotRequest}, stage[:slotRequestLen]))
	p.flush(false)
}

// dropQueued drops a message that waits, and fails the requests that wait for its answer.
// p.mu is held.
func (p *peer) dropQueued(o *outgoing, err error) {
	if o.done != nil {
		go o.done.Sent()
	}
	p.failMessage(o, err)
}

// returnSlots tells the peer which slots are its own again. p.mu is held.
func (p *peer) returnSlots() {
	for l := p.link; l != nil; {
		back := p.sender.Returns()
		if len(back) == 0 {
			return
		}
		id, _, stage, ok := l.queue.Begin()
		if !ok {
			return // tick tries again
		}
		t := trailer{epoch: l.epoch}
		for t.n < min(len(back), maxCredits) {
			t.credits[t.n] = uint16(back[t.n])
			t.n++
		}
		t.put(stage[:trailerLen])
		l.queue.Add(id, 0, l.queue.Staged(verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immReturn}, stage[:trailerLen]))
		p.sender.ReturnsSent(t.n)
	}
}
