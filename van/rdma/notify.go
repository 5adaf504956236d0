package rdma

import (
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// This file owns what the watcher of peers is told, and when.

// inboundDown is what is left when a peer's connection to this node has ended.
type inboundDown struct {
	cause    error
	since    uint64
	notified bool // that the peer is lost
}

// notify reports a change of p's connection to the watcher.
func (v *node) notify(p *peer, up bool, cause error) {
	if v.watch != nil && !v.closed.Load() && (*v.tables.peers.Load())[int(p.id.Load())] == p {
		v.watch(int(p.id.Load()), up, cause)
	}
}

// notifyFailure makes the requests fail that wait for p, while its connection l stands. The
// end of l makes them fail, too.
func (v *node) notifyFailure(p *peer, l *link, err error) {
	v.log.Error("rdma: a message could not be sent", "peer", p.name(), "err", err)
	p.notifying.Lock()
	defer p.notifying.Unlock()
	if p.currentLink() != l {
		return
	}
	v.notify(p, false, asLost(err))
	p.mu.Lock()
	stands := p.link == l && !p.state.oneWay && (p.inboundDown == nil || !p.inboundDown.notified) // its end is notified after this
	p.mu.Unlock()
	if stands {
		v.notify(p, true, nil)
	}
}

// inboundDownTime is how long a peer may be without its own connection to this node. One that
// leaves is without it for as long as its last messages to others take.
const inboundDownTime = maxLinger + time.Second

// noteInboundDown notes that the peer's own connection to this node has ended, while l was this
// node's to it: the answers on it are lost.
func (p *peer) noteInboundDown(l *link, cause error) {
	p.mu.Lock()
	if p.link == l && p.inboundDown == nil && !(l.native && established(p.inbound.Load())) { // else notifyInbound has told
		p.inboundDown = &inboundDown{cause: cause, since: clock.Now()}
		time.AfterFunc(p.v.times.inboundDown, func() { p.v.notifyInbound(p, nil) })
	}
	p.mu.Unlock()
	p.v.notifyInbound(p, nil)
}

// notifyInbound makes the requests fail whose answers are lost, when the peer has connected to this
// node again or, as one that leaves does not, after inboundDownTime. Requests that follow are not
// touched. Whether something is lost a native peer says: then it has dropped what it owed this node. A
// node that only answers the peer waits for nothing from it, and what the peer has given up it says
// itself. in is the connection that has come, or nil.
func (v *node) notifyInbound(p *peer, in *inbound) {
	p.notifying.Lock()
	defer p.notifying.Unlock()
	p.mu.Lock()
	l, h, oneWay, now := p.link, p.inboundDown, p.state.oneWay, p.inbound.Load()
	told, again := h != nil && h.notified, established(now)
	var cause error
	switch {
	case in != nil && in.handshake.native && in.confirmed.Load() != 0 && int32(in.serial-p.confirmedSerial) > 0 && !in.process.unlisted.Load():
		p.confirmedSerial = in.serial
		if in.confirmed.Load() == upAfterLoss && !p.state.lost && !p.isMyWorker() { // while p is lost nothing is sent
			cause = fmt.Errorf("%w: it took this node for lost", van.ErrPeerLost)
		}
	case h == nil:
	case again && !now.handshake.native, !again && clock.Now()-h.since >= uint64(v.times.inboundDown):
		cause = asLost(h.cause)
	}
	if again {
		p.inboundDown, p.state.oneWay, p.state.lost = nil, false, p.state.lost && !oneWay
	} else if h != nil {
		h.notified = told || cause != nil
	} else if cause != nil && l != nil { // the connection that has come later is not confirmed yet
		p.inboundDown = &inboundDown{cause: cause, since: clock.Now(), notified: true}
	}
	down := cause != nil && !told
	p.state.lost = p.state.lost || down && l == nil
	p.mu.Unlock()
	if down {
		v.notify(p, false, fmt.Errorf("its connection to this node ended, answers on it are lost: %w", cause))
		p.mu.Lock()
		if l != nil && p.link == l && !l.native {
			p.sender.AnswersLost() // else who sends under their keys again would wait for ever; tick sends what waits
		}
		p.mu.Unlock()
	}
	if again && (down || told || oneWay) && l != nil && p.currentLink() == l {
		v.notify(p, true, nil)
	}
}

// established tells whether a peer's own connection to this node stands.
func established(in *inbound) bool {
	return in != nil && !in.failed.Load() && (in.confirmed.Load() != 0 || !in.handshake.native)
}

// isMyServer tells whether this node sends requests to p, and p none to it.
func (p *peer) isMyServer() bool {
	return van.RoleOf(int(p.v.local.id.Load())) == van.Worker && van.RoleOf(int(p.id.Load())) == van.Server
}

// isMyWorker tells whether p sends requests to this node, and this node none to it.
func (p *peer) isMyWorker() bool {
	return van.RoleOf(int(p.v.local.id.Load())) == van.Server && van.RoleOf(int(p.id.Load())) == van.Worker
}
