package rdma

import (
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// This file decides when the watcher of peers is notified, and of what.

// inboundDown records that a peer's connection to this node has ended.
type inboundDown struct {
	cause    error
	since    uint64
	notified bool // the watcher knows that the peer is lost
}

// notify notifies the watcher of a change of p's connection.
func (v *node) notify(p *peer, up bool, cause error) {
	if v.watch == nil || v.closed.Load() || (*v.tables.peers.Load())[int(p.id.Load())] != p {
		return
	}
	if cause != nil {
		cause = &van.ConnectionError{Incarnation: p.incarnation, Err: cause}
	}
	v.watch(int(p.id.Load()), up, cause)
}

// notifyFailure fails the requests that wait for p, although its connection l is still up. If l ends, they fail for that reason.
func (v *node) notifyFailure(p *peer, l *link, err error) {
	v.log.Error("rdma: a message could not be sent", "peer", p.name(), "err", err)
	p.notifying.Lock()
	defer p.notifying.Unlock()
	if p.currentLink() != l {
		return
	}
	v.notify(p, false, asLost(err))
	p.mu.Lock()
	up := p.link == l && !p.state.oneWay && (p.inboundDown == nil || !p.inboundDown.notified) // the end of the inbound connection is notified after this
	p.mu.Unlock()
	if up {
		v.notify(p, true, nil)
	}
}

// inboundDownTime is how long a peer may be without its own connection to this node. A peer that is shutting down closes that
// connection first and may then need up to maxLinger to send its last messages to others.
const inboundDownTime = maxLinger + time.Second

// noteInboundDown records that the peer's own connection to this node has ended while l, this node's connection, is up. Answers on the
// ended connection are lost.
func (p *peer) noteInboundDown(l *link, cause error) {
	p.mu.Lock()
	if p.link == l && p.inboundDown == nil && !(l.native && established(p.inbound.Load())) { // otherwise notifyInbound has notified it
		p.inboundDown = &inboundDown{cause: cause, since: clock.Now()}
		time.AfterFunc(p.v.times.inboundDown, func() { p.v.notifyInbound(p, nil) })
	}
	p.mu.Unlock()
	p.v.notifyInbound(p, nil)
}

// notifyInbound fails the requests whose answers are lost. in is the peer's new connection to this node, or nil. The requests fail
//  1. when the peer connects to this node again. A native peer then says in immUp whether it has dropped answers;
//  2. inboundDownTime after the end of the peer's connection if it does not connect again, as a peer that shuts down.
//
// Later requests are not affected. A node that only answers the peer expects nothing from it: there the peer itself cancels requests.
func (v *node) notifyInbound(p *peer, in *inbound) {
	p.notifying.Lock()
	defer p.notifying.Unlock()
	p.mu.Lock()
	l, h, oneWay, current := p.link, p.inboundDown, p.state.oneWay, p.inbound.Load()
	notified, restored := h != nil && h.notified, established(current)
	var cause error
	switch {
	case in != nil && in.handshake.native && in.confirmed.Load() != 0 && int32(in.serial-p.confirmedSerial) > 0 && !in.process.unlisted.Load():
		p.confirmedSerial = in.serial
		if in.confirmed.Load() == upAfterLoss && !p.state.lost && !p.isMyWorker() { // while p is lost, no request is sent
			cause = fmt.Errorf("%w: it had declared this node lost", van.ErrPeerLost)
		}
	case h == nil:
	case restored && !current.handshake.native, !restored && clock.Now()-h.since >= uint64(v.times.inboundDown):
		cause = asLost(h.cause)
	}
	if restored {
		p.inboundDown, p.state.oneWay, p.state.lost = nil, false, p.state.lost && !oneWay
	} else if h != nil {
		h.notified = notified || cause != nil
	} else if cause != nil && l != nil { // the newer connection is not confirmed yet
		p.inboundDown = &inboundDown{cause: cause, since: clock.Now(), notified: true}
	}
	down := cause != nil && !notified
	p.state.lost = p.state.lost || down && l == nil
	p.mu.Unlock()
	if down {
		v.notify(p, false, fmt.Errorf("its connection to this node ended, answers on it are lost: %w", cause))
		p.mu.Lock()
		if l != nil && p.link == l && !l.native {
			p.sender.AnswersLost() // senders under the same keys would otherwise wait forever; tick sends what is queued
		}
		p.mu.Unlock()
	}
	if restored && (down || notified || oneWay) && l != nil && p.currentLink() == l {
		v.notify(p, true, nil)
	}
}

// established reports whether a peer's own connection to this node is up.
func established(in *inbound) bool {
	return in != nil && !in.failed.Load() && (in.confirmed.Load() != 0 || !in.handshake.native)
}

// isMyServer reports whether this node sends requests to p, and p none to it.
func (p *peer) isMyServer() bool {
	return van.RoleOf(int(p.v.local.id.Load())) == van.Worker && van.RoleOf(int(p.id.Load())) == van.Server
}

// isMyWorker reports whether p sends requests to this node, and this node none to it.
func (p *peer) isMyWorker() bool {
	return van.RoleOf(int(p.v.local.id.Load())) == van.Server && van.RoleOf(int(p.id.Load())) == van.Worker
}
