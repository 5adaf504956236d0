package rdma

import (
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file passes messages from the caller to the rendezvous, and carries out the rendezvous' decisions.

// Send implements van.Van.
func (v *rvan) Send(msg *van.Message) error {
	p := (*v.tables.peers.Load())[msg.Receiver]
	if p == nil {
		if v.closed.Load() {
			return v.sendError(msg, nil, van.ErrClosed)
		}
		return v.sendError(msg, nil, van.ErrUnknownPeer)
	}
	now := clock.Now()
	if msg.Request || msg.IsControl() {
		msg.RequestTrace.PostSend = now
	} else {
		msg.ResponseTrace.PostSend = now
	}
	if err := msg.Validate(); err != nil {
		return v.sendError(msg, p, err)
	}
	size := msg.PayloadLen()
	if size > maxData {
		return v.sendError(msg, p, fmt.Errorf("%w: %d bytes of payload, want at most %d", van.ErrInvalid, size, maxData))
	}
	p.mu.Lock()
	done, err := p.send(msg, size)
	p.mu.Unlock()
	if err != nil {
		return v.sendError(msg, p, err)
	}
	if done {
		msg.Done.Sent()
	}
	v.stats.sent(msg.EncodedLen() + size)
	return nil
}

// send passes msg to the rendezvous. done reports that its frames have been copied. p.mu is held.
func (p *peer) send(msg *van.Message, size int) (done bool, err error) {
	data := !msg.IsControl() && !msg.SimpleApp
	switch {
	case p.state.ended:
		return false, van.ErrClosed
	case p.state.oneWay && data:
		return false, fmt.Errorf("%w: it has not connected to this node again, and could not answer", van.ErrPeerLost)
	case p.state.lost && data:
		return false, fmt.Errorf("%w: its connection broke and has not been restored", van.ErrPeerLost)
	case msg.Continues: // accepted with the first message of the request
	case data && p.sender.Waiting() > 0 && p.unsent >= p.v.cfg.SendBudget && p.v.cfg.SendBudget > 0 && !failpoint.On("send-budget"):
		if n := p.v.stats.refusedSends.Add(1); n&(n-1) == 0 {
			p.v.log.Warn("rdma: a message is refused: too many bytes are queued for its peer", "peer", p.name(), "queued bytes", p.unsent, "STEPAF_SEND_BUDGET", p.v.cfg.SendBudget, "refused so far", n)
		}
		return false, fmt.Errorf("%w: %d bytes wait, want less than %d (STEPAF_SEND_BUDGET)", van.ErrQueueFull, p.unsent, p.v.cfg.SendBudget)
	case p.sender.Waiting() >= p.v.cfg.RDMAMaxConcurrWR:
		return false, fmt.Errorf("%w: %d messages wait (BYTEPS_RDMA_MAX_CONCURR_WR)", van.ErrQueueFull, p.sender.Waiting())
	}
	var o *outgoing
	if n := len(p.free); n > 0 {
		o, p.free = p.free[n-1], p.free[:n-1]
	} else {
		o = &outgoing{}
	}
	if err := o.fill(msg, size); err != nil {
		p.recycle(o)
		return false, err
	}
	if p.link != nil {
		if err := p.link.dialect.check(o); err != nil {
			p.recycle(o)
			return false, err
		}
	}
	if o.control {
		p.lastNumber++
		o.number = p.lastNumber
	}
	o.unsent = size
	p.unsent += size
	done = msg.Done != nil && o.done == nil
	idle := p.sender.Waiting() == 0
	err = p.sender.Submit(o)
	if err != nil {
		p.recycle(o)
		return false, fmt.Errorf("%w: %w", van.ErrInvalid, err)
	}
	p.pump()
	p.flush(msg.More)
	if idle && data && p.link != nil && p.sender.Waiting() > 0 && p.link.device.sleeping.Load() {
		p.link.device.dev.Wake() // the loop's sleep is too long for tick, which flush has made due
	}
	return done, nil
}

// sendError returns the error of a message to a peer.
func (v *node) sendError(msg *van.Message, p *peer, err error) error {
	e := &van.Error{Op: "send", Node: van.NodeName(int(v.local.id.Load())), Peer: van.NodeName(msg.Receiver), Detail: msg.Meta.String(), Err: err}
	if p != nil {
		v.Flush(msg.Receiver) // messages sent with More have waited for msg
		e.Peer += " at " + p.addr.String()
	}
	return e
}

// Flush implements van.Flusher.
func (v *node) Flush(id int) {
	if p := (*v.tables.peers.Load())[id]; p != nil {
		p.mu.Lock()
		p.flush(false)
		p.mu.Unlock()
	}
}

// pump carries out the rendezvous' decisions while the link can take work requests. p.mu is held.
func (p *peer) pump() {
	for l := p.link; l != nil && l.queue.CanBegin(); {
		if o, ok := p.sender.First(); ok && l.bundle.fits(l, o) {
			p.sender.TakeFirst()
			l.bundle.add(p, o)
			continue
		}
		a, ok := p.sender.Next()
		if !ok {
			return
		}
		switch a.Kind {
		case rendezvous.Put:
			p.put(a.Item, a.Slot)
		case rendezvous.Request:
			p.requestSlot(a.Origin, a.Item, a.Need)
		case rendezvous.Drop:
			p.dropQueued(a.Item, a.Err)
		}
	}
}

// need returns what o needs at its receiver. p.mu is held.
func (p *peer) need(o *outgoing) rendezvous.Need {
	if p.link == nil {
		return rendezvous.Need{OneShot: o.oneShot, Meta: len(o.meta)}
	}
	return p.link.dialect.need(o)
}

// tick runs every few milliseconds while something waits. It reports whether something still does.
func (p *peer) tick(now uint64, _ bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil || !p.waiting() {
		return false
	}
	if time.Duration(now-p.tickedAt) >= tickTime { // a loop that spins calls tick often
		p.tickedAt = now
		p.returnSlots()
		p.sender.Tick()
		p.pump()
	}
	p.flush(false)
	return p.waiting()
}
