package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the work requests of a message: slot requests, payload, meta and notification.

// put posts the work requests that send o to its slot at. The link can take them. p.mu is held. In this order:
//  1. The value, on the first queue pair. If the value is split, the other queue pairs write their parts, each with a notification
//     of its own (immSlave), and the meta says how many parts there are.
//  2. The meta with its trailer, and the notification, on the first queue pair.
//
// A queue pair delivers in order: when the receiver polls the notification, an unsplit value is complete.
func (p *peer) put(o *outgoing, at *rendezvous.RemoteSlot) {
	l := p.link
	id, r, stage, _ := l.queue.Begin()
	if err := l.dialect.check(o); err != nil { // o was queued before there was a connection
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
	meta, err := p.stageMeta(r, o, stage, n, inMeta)
	if err != nil {
		p.reject(id, o, at, err)
		return
	}
	split := !inMeta && p.v.cfg.SplitQPLag && l.canSplit(o)
	if split {
		l.announceParts(meta)
	}
	byReference := p.putTrailer(r, o, meta, inMeta, split)
	if inMeta {
		o.writeFrames(meta[aligned(len(o.meta)):])
	} else {
		l.addPayload(id, o, at, stage[metaRoom:], split)
	}
	l.addMeta(id, at, meta, byReference)
	l.bundle = bundle{}
	if l.bundles && o.fitsBundle() {
		l.bundle = bundle{record: id, end: n, limit: min(at.MetaLen, len(stage))}
	}
	p.noteSent(r, o)
}

// stageMeta puts the meta of n bytes into the record's staging memory, or into memory of its own if it is too long. It registers the
// memory of the value, and of the answer's destination.
func (p *peer) stageMeta(r *conn.Record[sentMessage], o *outgoing, stage []byte, n int, inMeta bool) ([]byte, error) {
	l := p.link
	meta := stage[:min(n, len(stage))]
	room := metaRoom
	if len(o.copies) == 0 {
		room = len(stage)
	}
	if !inMeta && n > room {
		b, err := conn.NewBlock(l.queue.Device, n, 0)
		if err != nil {
			return nil, fmt.Errorf("a meta of %d bytes: %w", n, err)
		}
		r.Large, meta = b, b.Mem.Host()
	}
	copy(meta, o.meta)
	if err := l.registerFrames(r, o); err != nil {
		return nil, err
	}
	if o.destination.Len() > 0 {
		return meta, p.registerDestination(l, o, meta)
	}
	return meta, nil
}

// canSplit reports whether o's value can be split over the queue pairs, and is large enough.
func (l *link) canSplit(o *outgoing) bool {
	return len(l.queue.QueuePairs) > 1 && o.singleKey && o.lens[1] >= minSplit && (o.direct || o.request && o.push)
}

// announceParts says in the meta of a split message how many notifications of parts precede it.
func (l *link) announceParts(meta []byte) {
	l.splits++
	le.PutUint32(meta[metaSlaves:], uint32(len(l.queue.QueuePairs)-1))
	for i := range 2 {
		le.PutUint64(meta[metaCounter+8*i:], l.splits)
	}
}

// putTrailer puts the trailer, if the dialect has one, at the end of meta. byReference reports that the device must read the meta when
// it sends it, not when it is posted: a Cancel may set a flag in the trailer until then.
func (p *peer) putTrailer(r *conn.Record[sentMessage], o *outgoing, meta []byte, inMeta, split bool) (byReference bool) {
	l := p.link
	t, ok := l.dialect.trailer(o, inMeta)
	if !ok {
		return false
	}
	if o.control && l.numbered {
		t.numbered, t.lens[0], t.lens[1] = true, o.number&maxData, p.tag&maxData
	}
	if in := p.inbound.Load(); in != nil {
		in.takeCredits(&t, &r.Note)
	}
	b := meta[len(meta)-trailerLen:]
	t.put(b)
	if !o.isZeroCopy() || split { // a part on another queue pair may arrive after the trailer
		return false
	}
	r.Note.id, r.Note.flags = o.id, b[offFlags:][:1]
	return true
}

// addMeta adds the write of the meta with the notification.
func (l *link) addMeta(id uint32, at *rendezvous.RemoteSlot, meta []byte, byReference bool) {
	wr := verbs.SendWR{Op: verbs.OpWriteImm, Flags: verbs.Signaled, Imm: at.Index, RemoteAddr: at.Meta, RKey: at.MetaKey}
	switch large := l.queue.Record(id).Large; {
	case large != nil:
		wr.LocalAddr, wr.Len, wr.LKey = backend.Bytes(meta).Addr(), uint32(len(meta)), large.MR.LKey()
	case byReference:
		wr = l.queue.StagedByReference(wr, meta)
	default:
		wr = l.queue.Staged(wr, meta)
	}
	l.queue.Add(id, 0, wr)
}

// noteSent records what the completion of o needs. A numbered control message is kept until it has arrived, any other is recycled.
func (p *peer) noteSent(r *conn.Record[sentMessage], o *outgoing) {
	l := p.link
	r.Note.done, r.Note.data = o.done, !o.control
	if o.control && l.numbered {
		l.seq++
		r.Note.control, r.Note.seq = o, l.seq
		p.unsent, o.unsent = p.unsent-o.unsent, 0
		return
	}
	if o.size >= flushSize {
		p.flush()
	}
	p.recycle(o)
}

// flushSize is the payload size from which a message is posted at once, without waiting for more messages.
const flushSize = 32 << 10

// minSplit is the length from which a value is split over the queue pairs.
const minSplit = 8 << 10

// registerFrames registers the caller's memory with the device.
func (l *link) registerFrames(r *conn.Record[sentMessage], o *outgoing) error {
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

// registerDestination registers the memory of the answer's destination, and puts its key into the meta.
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

// finishUnsent ends record id, whose message is not sent.
func (l *link) finishUnsent(id uint32, o *outgoing) {
	f := l.queue.Finish(id)
	f.Note.done = o.done
	go finishSent(&f)
}

// reject drops a message that cannot be sent. The requests that wait for its answer fail. p.mu is held.
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
func (l *link) addPayload(id uint32, o *outgoing, at *rendezvous.RemoteSlot, stage []byte, split bool) {
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
	// Packed frames: one write for each.
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

// requestSlot sends a slot request. The link can take it. p.mu is held.
func (p *peer) requestSlot(origin uint64, o *outgoing, need rendezvous.Need) {
	l := p.link
	id, _, stage, _ := l.queue.Begin()
	s := slotRequest{metaLen: uint64(need.Meta), origin: origin}
	l.dialect.completeRequest(&s, o, need)
	s.put(stage[:slotRequestLen])
	l.queue.Add(id, 0, l.queue.Staged(verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immSlotRequest}, stage[:slotRequestLen]))
	p.flush()
}

// dropQueued drops a queued message, and fails the requests that wait for its answer. p.mu is held.
func (p *peer) dropQueued(o *outgoing, err error) {
	if o.done != nil {
		go o.done.Sent()
	}
	p.failMessage(o, err)
}

// returnSlots returns slots to the peer that this node does not need. p.mu is held.
func (p *peer) returnSlots() {
	for l := p.link; l != nil; {
		returned := p.sender.Returns()
		if len(returned) == 0 {
			return
		}
		id, _, stage, ok := l.queue.Begin()
		if !ok {
			return // the next tick tries again
		}
		t := trailer{epoch: l.epoch}
		for t.n < min(len(returned), maxCredits) {
			t.credits[t.n] = uint16(returned[t.n])
			t.n++
		}
		t.put(stage[:trailerLen])
		l.queue.Add(id, 0, l.queue.Staged(verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immReturn}, stage[:trailerLen]))
		p.sender.ReturnsSent(t.n)
	}
}
