package rdma

import (
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the replies of a peer on this node's connection to it, and the memory that its answers are written to.

// handleSlotReply handles the reply to a slot request. It returns false if the reply is invalid.
func (p *peer) handleSlotReply(l *link, r *slotReply) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l || p.state.ended {
		return true
	}
	refused, why, ok := l.dialect.handleReply(p.sender, r)
	if refused != nil && !(refused.isBatch() && errors.Is(why, van.ErrQueueFull) && requeue(p, refused) == nil) {
		p.dropQueued(refused, why)
	}
	p.pump()
	p.flush()
	return ok
}

// openPulls is the view of a peer on its pull requests that have not been answered.
type openPulls struct{ *peer }

// take removes pull k. It returns the destination if addr and n are its address and length. If value, the answer's, has n bytes, it is
// copied there. p.mu is held, also during the copy: later, Invalidate may have given the memory back to the caller.
func (p openPulls) take(k pullKey, addr uint64, n int, value []byte) (mem backend.Mem, copied bool) {
	x, ok := p.pulls[k]
	if !ok {
		return mem, false
	}
	delete(p.pulls, k)
	if addr == x.mem.Addr() && n == x.mem.Len() {
		mem = x.mem
		if copied = len(value) > 0 && len(value) == mem.Len() && mem.OnHost(); copied {
			copy(mem.Host(), value)
		}
	}
	x.region.Release()
	return mem, copied
}

// endRequest ends the request that m, a message of a StepMesh node, answers. It returns the destination of a pull if m refers to it.
func (v *node) endRequest(node int, m *van.Meta) (into backend.Mem) {
	p := (*v.tables.peers.Load())[node]
	if p == nil {
		return into
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !m.Push {
		into, _ = openPulls{p}.take(keyOf(m), m.Addr, int(m.ValLen), nil)
	}
	if l := p.link; l != nil && !l.native {
		p.sender.Answered(m.Key, m.Push)
		p.pump()
		p.flush()
	}
	return into
}

// release releases the destinations that a StepMesh node will no longer write to, since its connection has ended. again says that
// it has connected again: answers to requests on p.link may then still be sent.
func (p openPulls) release(again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, x := range p.pulls {
		if x.stepmesh && !(again && x.link == p.link) {
			delete(p.pulls, k)
			x.region.Release()
		}
	}
}

// takeCredits adds the slots that the peer has returned.
func (p *peer) takeCredits(t *trailer) (ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil || p.link.epoch != t.epoch {
		return true // of an earlier connection
	}
	if t.decoded > 0 {
		p.link.dialect.noteDecoded(t.decoded)
	}
	if t.n == 0 {
		return true
	}
	ok = true
	for _, i := range t.credits[:t.n] {
		ok = p.sender.Credit(uint32(i)) && ok
	}
	p.returnSlots()
	p.pump()
	p.flush()
	return ok
}

// handleCredits handles the credits in the trailer of a message.
func (v *node) handleCredits(in *inbound, t *trailer) {
	x := (*v.tables.conns.Load())[t.epoch-v.local.epoch]
	if x == nil || x.peer == nil {
		return // of an earlier connection
	}
	if int(x.peer.id.Load()) != in.handshake.node && in.handshake.node != van.Empty || !x.peer.takeCredits(t) {
		in.malformed(&van.FieldError{Field: "credits", Value: t.credits[:t.n], Want: "slots that are in use"})
	}
}

// handleReclaim handles a peer's request to return slots.
func (p *peer) handleReclaim(l *link, r *reclaimRequest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l || p.state.ended {
		return
	}
	p.sender.Reclaim(int(r.slots), int(min(r.bytes, maxReclaim)))
	p.returnSlots()
	p.pump()
	p.flush()
}

// handleSendCompletion handles the completion of the last part of a message.
func (p *peer) handleSendCompletion(l *link, c *verbs.Completion) {
	q, id := conn.RecordOf(c.ID)
	if c.Status != verbs.StatusOK {
		why := van.ErrPeerLost
		if c.Status == verbs.StatusRetryExceeded {
			why = errUnacknowledged
		}
		l.fail(fmt.Errorf("%w: queue pair %d (number %d): %s", why, q, l.queue.QueuePairs[q].Num(), c.Status))
	}
	p.mu.Lock()
	if c.Status != verbs.StatusOK {
		if q == 0 && peerRefused(c.Status) {
			l.restoreCredits()
		} else if id < uint32(len(l.carried)) {
			l.markUncertain(&l.carried[id])
		}
		l.queue.Broken = true // anything posted now would only be flushed
		l.queue.MarkFailed(id)
		p.mu.Unlock()
		return // another queue pair may still read the memory until FinishAll
	}
	f, last := l.queue.Complete(id)
	if q == 0 && id < uint32(len(l.carried)) {
		l.carried[id].clear() // the credits arrive with the meta, even if a part on another queue pair is lost
	}
	if last && f.Note.control != nil {
		p.recycle(f.Note.control)
	}
	if last && p.link == l && p.waiting() {
		p.returnSlots()
		p.pump()
		p.flush()
	}
	p.mu.Unlock()
	if last {
		finishSent(&f)
	}
}

// handleSend handles a SEND of the peer on this node's connection to it: a reply to a slot request, credits, or a reclaim request.
func (p *peer) handleSend(d *device, l *link, c *verbs.Completion) {
	b := recvData(c)
	var err error
	switch c.Imm {
	case immSlotReply:
		var r slotReply
		if err = r.get(b); err == nil && !p.handleSlotReply(l, &r) {
			err = &van.FieldError{Field: "rendezvous reply: origin", Value: r.origin, Want: "that of an open slot request"}
		}
	case immCredits:
		t := &d.trailer
		if err = t.get(b); err == nil && !p.takeCredits(t) {
			err = &van.FieldError{Field: "credits", Value: t.credits[:t.n], Want: "slots that are in use"}
		}
	case immReclaim:
		var r reclaimRequest
		if err = r.get(b); err == nil {
			p.handleReclaim(l, &r)
		}
	case immBuffer:
		var r remoteBuffer
		if err = r.get(b); err == nil {
			p.mu.Lock()
			if p.link == l { // otherwise it may not be established yet, and has no dialect
				l.dialect.noteBuffer(r)
				p.sender.NeedsChanged()
				p.pump()
				p.flush()
			}
			p.mu.Unlock()
		}
	default:
		err = &van.FieldError{Field: "SEND immediate", Value: c.Imm, Want: "1, 2, 4 or 6"}
	}
	if err != nil {
		p.v.malformedFrom(p.name(), err)
	}
}
