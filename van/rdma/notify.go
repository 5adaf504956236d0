package rdma

import (
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
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
	if v.watch != nil && !v.closed.Load() && (*v.peers.Load())[int(p.id.Load())] == p {
		v.watch(int(p.id.Load()), up, cause)
	}
}

// notifyFailure makes the requests fail that wait for p, while its connection l stands. The
// end of l makes them fail, too.
func (v *node) notifyFailure(p *peer, l *link, err error) {
	v.log.Error("rdma: a message could not be sent", "peer", p.name(), "err", err)
	p.notifying.Lock()
	defer p.notifying.Unlock()
	if !p.hasLink(l) {
		return
	}
	v.notify(p, false, asLost(err))
	p.mu.Lock()
	stands := p.link == l && (p.inboundDown == nil || !p.inboundDown.notified) // its end is notified after this
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
	if p.link == l && p.inboundDown == nil {
		p.inboundDown = &inboundDown{cause: cause, since: clock.Now()}
		time.AfterFunc(p.v.times.inboundDown, func() { p.v.notifyInboundDown(p) })
	}
	p.mu.Unlock()
	p.v.notifyInboundDown(p)
}

// notifyInboundDown makes the requests fail whose answers are lost. It does so when the peer has
// connected again, as one that leaves does not, or after halfTime.
func (v *node) notifyInboundDown(p *peer) {
	p.notifying.Lock()
	defer p.notifying.Unlock()
	p.mu.Lock()
	l, h := p.link, p.inboundDown
	if h == nil {
		p.mu.Unlock()
		return
	}
	back := p.inbound.Load()
	again := back != nil && !back.gone.Load() && (back.confirmed.Load() || !back.hello.native)
	down := !h.notified && (again || clock.Now()-h.since >= uint64(v.times.inboundDown))
	h.notified = h.notified || down
	if again {
		p.inboundDown = nil
	}
	p.mu.Unlock()
	if down {
		v.notify(p, false, fmt.Errorf("its connection to this node ended, answers on it are lost: %w", asLost(h.cause)))
	}
	if again && p.hasLink(l) {
		v.notify(p, true, nil)
	}
}
