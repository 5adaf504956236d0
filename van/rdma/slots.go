package rdma

import (
	"errors"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the replies to peers' slot requests.

// pendingRequest is a slot request that waits to be granted.
type pendingRequest struct {
	slotRequest
	since uint64
}

// handleSlotRequest handles a slot request. The feed is held.
func (in slotSet) handleSlotRequest(b []byte) {
	q := pendingRequest{since: clock.Now()}
	if err := q.get(b); err != nil {
		in.malformed(err)
		return
	}
	queue := &in.slots.waiting[q.priority()]
	in.mu.Lock()
	wait := len(*queue) > 0 // requests are granted in order
	in.mu.Unlock()
	var err error
	if !wait {
		if err = in.grant(&q); err == nil {
			return
		}
		in.reclaimFor(err, q.since, q.since)
	}
	in.countSlotWait(err)
	in.mu.Lock()
	full := len(*queue) >= maxIndex
	if !full && !in.closed {
		*queue = append(*queue, q)
		in.device.requests.Add(&in.requestsDue)
	}
	in.mu.Unlock()
	if full {
		in.fail(fmt.Errorf("%w: %d slot requests are open", van.ErrMalformed, maxIndex))
	}
}

// retryRequests tries the pending slot requests again.
func (in slotSet) retryRequests(now uint64) {
	for k := range in.slots.waiting {
		in.mu.Lock()
		all := in.slots.waiting[k]
		in.slots.waiting[k] = nil
		in.mu.Unlock()
		var pending []pendingRequest
		for i := range all {
			q := &all[i]
			err := in.grant(q)
			if err == nil {
				continue
			}
			if limit := in.v.times.slotWait(err); limit > 0 && time.Duration(now-q.since) > limit {
				in.refuseOverBudget(q, err)
				continue
			}
			pending = append(pending, *q)
			in.reclaimFor(err, q.since, now)
			if !errors.Is(err, errPeerBudget) { // otherwise a smaller request behind it may be granted
				pending = append(pending, all[i+1:]...)
				break
			}
		}
		if len(pending) > 0 {
			in.mu.Lock()
			if !in.closed {
				in.slots.waiting[k] = append(pending, in.slots.waiting[k]...)
				in.device.requests.Add(&in.requestsDue)
			}
			in.mu.Unlock()
		}
	}
}

// grant makes a slot, or refuses it, and replies to the peer. With an error the request has to wait: rendezvous.ErrNoSlot,
// errPeerBudget, errTotalBudget or errStalled.
func (in slotSet) grant(q *pendingRequest) error {
	v, s := in.v, &q.slotRequest
	need, err := in.dialect.need(s)
	if err != nil {
		in.malformed(err)
		in.dialect.refuse(s.origin, 0, err)
		return nil
	}
	if !need.OneShot && (in.stalled.Load() || in.process.unlisted.Load() || in.besidesEnding()) {
		return errStalled
	}
	if in.handshake.native && s.data[1]&kindPush != 0 && in.announceBuffer(s.key, int(min(s.data[2], maxData))) {
		in.noteDecoded()
		in.sendReply(&slotReply{origin: s.origin, flags: replyBuffer, index: in.order.decoded.Load()}, nil)
		return nil
	}
	switch err := in.withinBudget(s, need); {
	case errors.Is(err, errOverPeerBudget), errors.Is(err, errOverTotalBudget):
		in.refuseOverBudget(q, err)
		return nil
	case err != nil:
		return err
	}
	l, r, err := in.newSlot(s, need)
	if errors.Is(err, rendezvous.ErrNoSlot) {
		return err
	}
	r.origin = s.origin
	if err != nil {
		v.log.Error("rdma: no slot for a message of a peer", "peer", in.name(), "key", s.key, "bytes", need.Data, "err", err)
		in.dialect.refuse(s.origin, 0, err)
		return nil
	}
	in.sendReply(&r, l)
	return nil
}

// sendReply replies to a slot request. l is the granted slot, or nil.
func (in slotSet) sendReply(r *slotReply, l *receiveSlot) {
	var b [slotReplyLen]byte
	r.put(b[:])
	in.mu.Lock()
	defer in.mu.Unlock()
	if l != nil {
		in.recordSlot(l)
	}
	in.send(immSlotReply, b[:])
}

// newSlot makes the slot that a peer has requested.
func (in slotSet) newSlot(s *slotRequest, need rendezvous.Need) (*receiveSlot, slotReply, error) {
	v := in.v
	var r slotReply
	l := &receiveSlot{Owner: in.inbound, Route: need.Route, Data: need.Data, OneShot: need.OneShot}
	urgent := s.priority() == controlPriority
	if l.OneShot && int(in.slots.oneShots.Load()) >= max(2, v.budget.slots.Room()/oneShotShare) {
		return nil, r, rendezvous.ErrNoSlot // the peer does not use those that it has
	}
	// The index comes first: registering memory is expensive, and a pending request is tried often.
	if err := v.budget.slots.Add(l, urgent); err != nil {
		return nil, r, err
	}
	if l.OneShot {
		in.slots.oneShots.Add(1)
	}
	meta, err := in.slots.cells.Get(need.Meta)
	if err == nil {
		l.Memory.meta, l.Memory.bytes = meta, metaBytes(need.Meta)
		in.charge(l.Memory.bytes)
		r.meta, r.metaKey = meta.Addr, meta.RKey
		err = in.allocate(l, s, need, &r)
	}
	if err != nil {
		if v.budget.slots.End(l) {
			in.freeSlot(l)
		}
		return nil, r, err
	}
	r.index = l.Index()
	return l, r, nil
}

// allocate provides the memory for the value.
func (in slotSet) allocate(l *receiveSlot, s *slotRequest, need rendezvous.Need, r *slotReply) error {
	if need.Data == 0 {
		return nil
	}
	m := &l.Memory
	if dst, ok := in.registeredBuffer(s, need); ok {
		reg, err := in.device.regions.Get(dst, verbs.LocalWrite|verbs.RemoteWrite)
		if err != nil {
			return fmt.Errorf("registered receive buffer: %w", err)
		}
		m.data, m.region = dst, reg
		r.data, r.dataKey = dst.Addr(), reg.MR.RKey()
		return nil
	}
	a, err := in.dialect.valueArea(s, need)
	if err != nil {
		return err
	}
	m.area, m.data = a, a.Mem
	r.data, r.dataKey = a.Mem.Addr(), a.MR.RKey()
	return nil
}

// recordSlot records a granted slot. in.mu is held.
func (in slotSet) recordSlot(l *receiveSlot) {
	switch {
	case in.closed:
		if in.v.budget.slots.End(l) {
			in.freeSlot(l)
		}
	case in.handshake.native && !l.OneShot: // the slots of a StepMesh node are never returned
		in.slots.granted[l.Route] = append(in.slots.granted[l.Route], l)
	}
}
