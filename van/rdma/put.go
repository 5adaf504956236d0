package rdma

import (
	"fmt"
	"slices"

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
	if o.canceled || o.invalidated && !l.native { // a native node drops a late answer, a StepMesh node would write it to the memory
		p.sender.Release(at)
		l.finishUnsent(id, o)
		p.recycle(o)
		return
	}
	meta, err := p.stageMeta(r, o, stage)
	if err != nil {
		p.reject(id, o, at, err)
		return
	}
	split := p.v.cfg.SplitQPLag && len(l.queue.QueuePairs) > 1 && slices.ContainsFunc(o.parts, func(x outPart) bool { return x.splits() })
	if split {
		l.announceParts(meta)
	}
	byReference := false
	var placements []byte
	if l.native {
		byReference = p.putTrailer(id, r, o, meta, split)
		if o.form != formPlain {
			placements = meta[aligned(len(o.meta)):]
		}
	}
	l.addParts(id, o, at, placements, stage[metaRoom:], split)
	l.addMeta(id, at, meta, byReference)
	p.noteSent(r, o)
}

// stageMeta puts the meta into the record's staging memory, or into memory of its own if it is too long. It registers the memory of the
// values, and of the destinations of answers.
func (p *peer) stageMeta(r *conn.Record[sentMessage], o *outgoing, stage []byte) ([]byte, error) {
	l := p.link
	n := l.dialect.layout(o)
	meta := stage[:min(n, len(stage))]
	room := len(stage)
	if !l.native && len(o.copies) > 0 {
		room = metaRoom
	}
	if n > room {
		b, err := l.queue.NewLarge(n)
		if err != nil {
			return nil, fmt.Errorf("a meta of %d bytes: %w", n, err)
		}
		r.Large, meta = b, b.Mem.Host()[:n]
	}
	copy(meta, o.meta)
	if err := l.registerValues(r, o); err != nil {
		return nil, err
	}
	for i := range o.parts {
		x := &o.parts[i]
		if x.into.Len() == 0 || l.native && p.v.cfg.Resend { // a repeated answer must not reach the memory before van/resend has recognized it
			continue
		}
		rkey, err := p.registerDestination(l, x.into, x.pull)
		if err != nil {
			for _, x := range o.parts[:i] { // their answers will not come
				if d, ok := p.pulls[x.pull]; ok && x.into.Len() > 0 {
					delete(p.pulls, x.pull)
					d.region.Release()
				}
			}
			return nil, err
		}
		if x.addr, x.rkey = x.into.Addr(), rkey; o.form == formKey {
			le.PutUint32(meta[metaOption:], rkey)
		}
	}
	return meta, nil
}

// announceParts says in the meta of a split message how many notifications of parts precede it.
func (l *link) announceParts(meta []byte) {
	l.splits++
	le.PutUint32(meta[metaSlaves:], uint32(len(l.queue.QueuePairs)-1))
	for i := range 2 {
		le.PutUint64(meta[metaCounter+8*i:], l.splits)
	}
}

// putTrailer puts the trailer at the end of meta. byReference reports that the device must read the meta when
// it sends it, not when it is posted: a Cancel may set a flag in the trailer until then.
func (p *peer) putTrailer(id uint32, r *conn.Record[sentMessage], o *outgoing, meta []byte, split bool) (byReference bool) {
	var t trailer
	if o.form != formPlain {
		t.metaLen = len(o.meta)
	}
	if o.form == formFrames {
		t.frames = o.frames
		for i := range o.parts {
			t.lens[i] = uint32(o.parts[i].len)
		}
	}
	if o.control && p.link.numbered {
		t.numbered, t.lens[0], t.lens[1] = true, o.number&maxData, p.tag&maxData
	}
	if in := p.inbound.Load(); in != nil {
		in.takeCredits(&t, &p.link.carried[id])
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
		l.queue.StagedByReference(&wr, meta)
	default:
		l.queue.Staged(&wr, meta)
	}
	l.queue.Add(id, 0, &wr)
}

// noteSent records what the completion of o needs. A numbered control message is kept until it has arrived, any other is recycled.
func (p *peer) noteSent(r *conn.Record[sentMessage], o *outgoing) {
	l := p.link
	l.dialect.noteSent(o)
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

// registerValues registers the caller's memory with the device.
func (l *link) registerValues(r *conn.Record[sentMessage], o *outgoing) error {
	register := func(m backend.Mem) error {
		if m.Len() == 0 {
			return nil
		}
		reg, err := l.device.regions.Get(m, 0)
		if err != nil {
			return fmt.Errorf("value of %d bytes: %w", m.Len(), err)
		}
		r.Regions = append(r.Regions, reg)
		return nil
	}
	for i := range o.parts {
		if err := register(o.parts[i].mem); err != nil {
			return err
		}
	}
	return nil
}

// registerDestination registers mem, the destination of the answer to pull k, and returns the rkey.
func (p *peer) registerDestination(l *link, mem backend.Mem, k pullKey) (rkey uint32, err error) {
	reg, err := l.device.regions.Get(mem, verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		return 0, fmt.Errorf("memory for the answer, %d bytes: %w", mem.Len(), err)
	}
	if old, again := p.pulls[k]; again {
		old.region.Release()
	}
	p.pulls[k] = pullDestination{mem, reg, !l.native, l}
	return reg.MR.RKey(), nil
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

// addSplit adds the writes of a value's equal parts on all queue pairs. The message's last parts have a notification.
func (l *link) addSplit(id uint32, wr *verbs.SendWR, slot uint32, last bool) {
	part := wr.Len / uint32(len(l.queue.QueuePairs))
	first := *wr
	first.Len = wr.Len - part*uint32(len(l.queue.QueuePairs)-1)
	l.queue.Add(id, 0, &first)
	off := uint64(first.Len)
	for q := 1; q < len(l.queue.QueuePairs); q++ {
		x := *wr
		if last {
			x.Op, x.Flags, x.Imm = verbs.OpWriteImm, verbs.Signaled, slot|immSlave
		}
		x.LocalAddr, x.RemoteAddr, x.Len = wr.LocalAddr+off, wr.RemoteAddr+off, part
		l.queue.Add(id, q, &x)
		off += uint64(part)
	}
}

// requestSlot sends a slot request. The link can take it. p.mu is held.
func (p *peer) requestSlot(origin uint64, o *outgoing, need rendezvous.Need) {
	l := p.link
	id, _, stage, _ := l.queue.Begin()
	s := slotRequest{metaLen: uint64(need.Meta), origin: origin}
	l.dialect.completeRequest(&s, o, need)
	s.put(stage[:slotRequestLen])
	l.queue.Add(id, 0, l.queue.Staged(&verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immSlotRequest}, stage[:slotRequestLen]))
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
		l.queue.Add(id, 0, l.queue.Staged(&verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immReturn}, stage[:trailerLen]))
		p.sender.ReturnsSent(t.n)
	}
}

// addParts adds the writes of o's values. It writes the placements and the inline values to b, nil if there are none. A copied value
// for a StepMesh node is written from stage.
func (l *link) addParts(id uint32, o *outgoing, at *rendezvous.RemoteSlot, b, stage []byte, split bool) {
	regions := l.queue.Record(id).Regions
	last := -1 // the last value that is split
	for i := range o.parts {
		if split && o.parts[i].splits() {
			last = i
		}
	}
	copies, slot, inline := o.copies, 0, aligned(placementLen*len(o.parts))
	for i := range o.parts {
		x := &o.parts[i]
		t := placement{addr: x.addr, rkey: x.rkey}
		if b != nil && x.mem.Len() == 0 {
			copy(b[inline:], copies[:x.len])
			inline, copies = inline+aligned(x.len), copies[x.len:]
		} else if x.len > 0 {
			wr := verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: x.addr, RKey: x.rkey}
			if t.where = valueInPlace; !x.placed {
				t.where, slot = valueInSlot, aligned(slot)
				wr.RemoteAddr, wr.RKey = at.Data+uint64(slot), at.DataKey
				slot += x.len
			}
			if x.mem.Len() == 0 {
				l.queue.Add(id, 0, l.queue.Staged(&wr, stage[:copy(stage, copies)]))
				continue
			}
			wr.LocalAddr, wr.Len, wr.LKey = x.mem.Addr(), uint32(x.len), regions[0].MR.LKey()
			regions = regions[1:]
			if split && x.splits() {
				l.addSplit(id, &wr, at.Index, i == last)
			} else {
				l.queue.AddValue(id, &wr)
			}
		}
		if b != nil {
			t.put(b[placementLen*i:])
		}
	}
}

func (x *outPart) splits() bool { return x.mem.Len() >= minSplit }
