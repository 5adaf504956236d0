package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns what a peer says on this node's connection to it, and the memory that its answers are put into.

// handleSlotReply takes the reply to a slot request. It tells whether it can be one.
func (p *peer) handleSlotReply(l *link, r *slotReply) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l || p.state.ended {
		return true
	}
	refused, why, ok := l.dialect.handleReply(p.sender, r)
	if refused != nil {
		p.dropQueued(refused, why)
	}
	p.pump()
	p.flush(false)
	return ok
}

// endPull ends a request: msg is the answer. It returns the memory that the answer's
// value was to be put into, if msg means it. A value that is not there yet is copied to it
// if it has its length: here, since with the lock goes the right to write, see Invalidate.
func (p *peer) endPull(msg *van.Meta, value []byte) (mem backend.Mem, copied bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !msg.Push {
		k := keyOf(msg)
		if x, ok := p.pulls[k]; ok {
			delete(p.pulls, k)
			if msg.Addr == x.mem.Addr() && int(msg.ValLen) == x.mem.Len() {
				mem = x.mem
				if copied = len(value) > 0 && len(value) == mem.Len() && mem.OnHost(); copied {
					copy(mem.Host(), value)
				}
			}
			x.region.Release()
		}
	}
	if l := p.link; l != nil && l.dialect.requestAnswered(p.sender, msg.Key, msg.Push) {
		p.pump()
		p.flush(false)
	}
	return mem, copied
}

// endPull tells the peer's side of an answer; see peer.answered.
func (v *node) endPull(node int, m *van.Meta, value []byte) (into backend.Mem, copied bool) {
	if p := (*v.tables.peers.Load())[node]; p != nil {
		return p.endPull(m, value)
	}
	return backend.Mem{}, false
}

// releasePulls gives up the memory that a StepMesh node, whose connection has
// ended, will not write to any more. again says that it has connected again: that one may
// have been sent already.
func (p *peer) releasePulls(again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, x := range p.pulls {
		if x.stepmesh && !(again && x.link == p.link) {
			delete(p.pulls, k)
			x.region.Release()
		}
	}
}

// takeCredits takes back the slots that the peer has given back.
func (p *peer) takeCredits(t *trailer) (ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil || p.link.epoch != t.epoch {
		return true // of an earlier connection
	}
	ok = true
	for _, i := range t.credits[:t.n] {
		ok = p.sender.Credit(uint32(i)) && ok
	}
	p.returnSlots()
	p.pump()
	p.flush(false)
	return ok
}

// handleCredits takes the credits that have come with a message.
func (v *node) handleCredits(in *inbound, t *trailer) {
	x := (*v.tables.conns.Load())[t.epoch-v.local.epoch]
	if x == nil || x.peer == nil {
		return // of an earlier connection
	}
	if int(x.peer.id.Load()) != in.handshake.node && in.handshake.node != van.Empty || !x.peer.takeCredits(t) {
		in.malformed(&van.FieldError{Field: "credits", Value: t.credits[:t.n], Want: "slots that are in use"})
	}
}

// handleReclaim takes the notice of a peer that wants slots back.
func (p *peer) handleReclaim(l *link, r *reclaimRequest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l || p.state.ended {
		return
	}
	p.sender.Reclaim(int(r.slots), int(min(r.bytes, maxReclaim)))
	p.returnSlots()
	p.pump()
	p.flush(false)
}

// handleSendCompletion takes the completion of a message's last part.
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
		} else if r := l.queue.Record(id); r != nil {
			l.markUncertain(&r.Note)
		}
		l.queue.Broken = true // what is posted now would only be flushed
		l.queue.MarkFailed(id)
		p.mu.Unlock()
		return // another queue pair may still read the memory; see abandon
	}
	f, last := l.queue.Complete(id)
	if r := l.queue.Record(id); !last && q == 0 && r != nil {
		r.Note.clearCredits() // the peer has them with the meta, whatever becomes of the parts on other queue pairs
	}
	if last && f.Note.control != nil {
		p.recycle(f.Note.control)
	}
	if last && p.link == l && p.waiting() {
		p.returnSlots()
		p.pump()
		p.flush(false)
	}
	p.mu.Unlock()
	if last {
		finishSent(&f)
	}
}

// handleSend takes what the peer says on this node's connection to it: answers to
// slot requests, and credits.
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
	default:
		err = &van.FieldError{Field: "SEND immediate", Value: c.Imm, Want: "1, 2 or 4"}
	}
	if err != nil {
		p.v.malformedFrom(p.name(), err)
	}
}
