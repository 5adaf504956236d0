package rdma

import (
	"cmp"
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
	var done van.Completion // of values that were copied; not to be called while p.mu is held
	p.mu.Lock()
	err := whyRefused(p, msg)
	if err == nil {
		idle := p.sender.Waiting() == 0
		if msg.IsBatch() && !p.assembles(msg) {
			done, err = p.queueParts(msg)
		} else {
			done, err = p.queue(msg)
		}
		sendQueued(p, msg, idle)
	}
	p.mu.Unlock()
	if done != nil {
		done.Sent()
	}
	if err != nil {
		return v.sendError(msg, p, err)
	}
	v.stats.sent(msg.EncodedLen() + size)
	return nil
}

// queueParts passes the messages of ps-lite that stand for msg, a batch, to the rendezvous: all of them, or none. p.mu is held.
func (p *peer) queueParts(msg *van.Message) (done van.Completion, err error) {
	for i := range msg.Parts {
		if x := &msg.Parts[i]; x.Vals.Len() > maxData-frameAlign {
			return nil, fmt.Errorf("%w: %d bytes of payload of key %d, want at most %d", van.ErrInvalid, x.Vals.Len(), x.Key, maxData-frameAlign)
		}
	}
	items, all, err := p.expanded.expand(msg)
	if err != nil {
		return nil, err
	}
	for _, o := range items {
		p.sender.Submit(o, false)
	}
	clear(items)
	return all, nil
}

// requeue queues the messages of ps-lite for the parts of o, a batch for which the peer has no memory, in its place. Batches of its
// size are sent so from now on. p.mu is held.
func requeue(p *peer, o *outgoing) error {
	need := p.need(o)
	p.link.maxBatch = (need.Data + need.Meta) / 2
	m, err := o.message()
	if err != nil {
		return err
	}
	m.Done = o.done
	items, all, err := p.expanded.expand(m)
	if err != nil {
		return err
	}
	for _, x := range items {
		x.canceled = o.canceled
	}
	p.sender.Replace(items)
	clear(items)
	p.recycle(o)
	if all != nil {
		go all.Sent()
	}
	return nil
}

// partList collects the messages that stand for a batch.
type partList struct {
	peer  *peer
	items []*outgoing
	err   error
}

// expand makes the messages of ps-lite that stand for m, a batch: all of them, or none. The slice is valid until the next call. The caller
// clears the slice, and calls all.Sent when it holds no lock. The mu of the peer is held.
func (l *partList) expand(m *van.Message) (items []*outgoing, all *van.AllSent, err error) {
	done := m.Done
	l.items, l.err = l.items[:0], nil
	all = van.NewAllSent(done)
	m.Done = all.Add()
	err = cmp.Or(m.ExpandTo(l), l.err)
	if m.Done = done; err == nil {
		return l.items, all, nil
	}
	for _, o := range l.items {
		if l.peer.link != nil {
			l.peer.link.dialect.uncheck(o)
		}
		l.peer.recycle(o)
	}
	clear(l.items)
	all.Cancel()
	return nil, nil, err
}

// SendPart implements van.PartSender.
func (l *partList) SendPart(m *van.Message) error {
	o, done, err := outgoingFor(l.peer, m)
	if l.err = err; err != nil {
		return err
	}
	l.items = append(l.items, o)
	if done != nil {
		done.Sent()
	}
	return nil
}

// whyRefused returns the reason why p accepts no message like msg now, or nil. p.mu is held.
func whyRefused(p *peer, msg *van.Message) error {
	data := !msg.IsControl() && !msg.SimpleApp
	switch {
	case p.state.ended:
		return van.ErrClosed
	case p.state.oneWay && data:
		return fmt.Errorf("%w: it has not connected to this node again, and could not answer", van.ErrPeerLost)
	case p.state.lost && data:
		return fmt.Errorf("%w: its connection broke and has not been restored", van.ErrPeerLost)
	case data && p.sender.Waiting() > 0 && p.unsent >= p.v.cfg.SendBudget && p.v.cfg.SendBudget > 0 && !failpoint.On("send-budget"):
		if n := p.v.stats.refusedSends.Add(1); n&(n-1) == 0 {
			p.v.log.Warn("rdma: a message is refused: too many bytes are queued for its peer", "peer", p.name(), "queued bytes", p.unsent, "STEPAF_SEND_BUDGET", p.v.cfg.SendBudget, "refused so far", n)
		}
		return fmt.Errorf("%w: %d bytes wait, want less than %d (STEPAF_SEND_BUDGET)", van.ErrQueueFull, p.unsent, p.v.cfg.SendBudget)
	case p.sender.Waiting() >= p.v.cfg.RDMAMaxConcurrWR:
		return fmt.Errorf("%w: %d messages wait (BYTEPS_RDMA_MAX_CONCURR_WR)", van.ErrQueueFull, p.sender.Waiting())
	}
	return nil
}

// queue sends msg if it has a slot, and otherwise passes it to the rendezvous. If its values have been copied, done is the message's
// Done. p.mu is held.
func (p *peer) queue(msg *van.Message) (done van.Completion, err error) {
	o, done, err := outgoingFor(p, msg)
	if err != nil {
		return nil, err
	}
	if l := p.link; l != nil && !o.oneShot && l.queue.CanBegin(o.writes()) {
		if at := p.sender.Direct(o); at != nil {
			p.put(o, at)
			return done, nil
		}
	}
	p.sender.Submit(o, o.oneShot)
	return done, nil
}

// outgoingFor makes the outgoing message for msg. If its values have been copied, done is the message's Done. p.mu is held.
func outgoingFor(p *peer, msg *van.Message) (o *outgoing, done van.Completion, err error) {
	size := msg.PayloadLen()
	if size > maxData {
		return nil, nil, fmt.Errorf("%w: %d bytes of payload, want at most %d", van.ErrInvalid, size, maxData)
	}
	if n := len(p.free); n > 0 {
		o, p.free = p.free[n-1], p.free[:n-1]
	} else {
		o = &outgoing{}
	}
	if err := o.fill(msg, size); err != nil {
		p.recycle(o)
		return nil, nil, err
	}
	if p.link != nil {
		err = p.link.dialect.check(o)
		if e := p.sender.Check(o); err == nil && e != nil {
			err = fmt.Errorf("%w: %w", van.ErrInvalid, e)
		}
		if err != nil {
			p.recycle(o)
			return nil, nil, err
		}
	}
	if o.control {
		p.lastNumber++
		o.number = p.lastNumber
	}
	o.unsent = size
	p.unsent += size
	if o.done == nil {
		done = msg.Done
	}
	return o, done, nil
}

// sendQueued starts the queued messages that can be sent now. The caller has queued msg, or the messages that stand for it. idle says that
// no message waited before. p.mu is held.
func sendQueued(p *peer, msg *van.Message, idle bool) {
	p.pump()
	p.flush()
	if data := !msg.IsControl() && !msg.SimpleApp; idle && data && p.link != nil && p.sender.Waiting() > 0 && p.link.device.sleeping.Load() {
		p.link.device.dev.Wake() // the loop's sleep is too long for tick, which flush has made due
	}
}

// sendError returns the error of a message to a peer.
func (v *node) sendError(msg *van.Message, p *peer, err error) error {
	e := &van.Error{Op: "send", Node: van.NodeName(int(v.local.id.Load())), Peer: van.NodeName(msg.Receiver), Detail: msg.Meta.String(), Err: err}
	if p != nil {
		e.Peer += " at " + p.addr.String()
	}
	return e
}

// pump carries out the rendezvous' decisions while the link can take work requests. p.mu is held.
func (p *peer) pump() {
	for l := p.link; l != nil && p.sender.Waiting() > 0; {
		writes := 1
		if o, ok := p.sender.First(); ok {
			writes = o.writes()
		}
		if !l.queue.CanBegin(writes) {
			return
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

// tick runs every few milliseconds while something waits.
func (p *peer) tick(now uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil || !p.waiting() {
		return
	}
	if time.Duration(now-p.tickedAt) >= tickTime { // a loop that spins calls tick often
		p.tickedAt = now
		p.returnSlots()
		p.sender.Tick()
		p.pump()
	}
	p.flush()
}
