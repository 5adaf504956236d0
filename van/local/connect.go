package local

import (
	"context"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Connect implements van.Van. Links to reachable peers are made when this node sends its first data message to one
// of them: a node that sends no data shares no memory. Messages wait until the result is known: see peers.settledLink.
func (v *Van) Connect(ctx context.Context, id int, peer van.Node) error {
	if err := v.inner.Connect(ctx, id, peer); err != nil {
		return err
	}
	if id <= 0 || id == van.SchedulerID || v.role.Load() == int32(van.Scheduler) || v.own.id.Load() == van.Empty {
		return nil // this node sends no data to that peer
	}
	n := &outPeer{settled: make(chan struct{})}
	n.id.Store(int32(id))
	who, _ := peer.Extension()
	t, offers := parseToken(who.Local)
	n.token, n.incarnation = t, who.Incarnation
	p := v.peers
	p.mu.Lock()
	was := p.of(id)
	old := p.leavingLocked(was)
	n.admitted = was == nil || was.admitted && was.token.name == t.name
	p.changeLocked(func(all map[int]*outPeer) { all[id] = n })
	p.unmakeLocked(was)
	if was != nil && was.token.name != t.name {
		p.fenceLocked(id, was)
	}
	p.admitLocked(id)
	if !n.admitted {
		time.AfterFunc(p.holdTime, func() { p.admitLate(n) })
	}
	if was != nil {
		p.losses.Replaced(was, n)
	}
	on := !p.closed && v.acceptor.listener != nil
	if on && offers && v.own.token.reach(&t) == "" {
		left := p.draining[id]
		n.make = func() {
			defer close(n.settled)
			if left != nil {
				<-left // earlier messages must arrive first
			}
			v.dialer.link(n)
		}
		if p.used {
			p.makeLocked(n)
		}
		p.mu.Unlock()
	} else {
		if on {
			n.why = v.dialer.whyNot(id, &t, offers)
		}
		p.mu.Unlock()
		close(n.settled)
	}
	if old != nil {
		p.end(old)
	}
	return nil
}

// drainTime is how long a link may still deliver sent messages after Disconnect.
const drainTime = 500 * time.Millisecond

// Disconnect implements van.Van. It does not wait until the sent messages are delivered.
func (v *Van) Disconnect(id int) {
	p := v.peers
	p.mu.Lock()
	n := p.of(id)
	l := p.leavingLocked(n)
	p.changeLocked(func(all map[int]*outPeer) { delete(all, id) })
	p.unmakeLocked(n)
	if l != nil && !p.closed {
		before, left := p.draining[id], make(chan struct{})
		p.draining[id] = left
		p.wg.Go(func() {
			ctx, cancel := context.WithTimeout(v.drain, v.drainTime)
			defer cancel()
			l.linger(ctx)
			p.end(l)
			if before != nil {
				<-before
			}
			close(left)
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.draining[id] == left {
				delete(p.draining, id)
			}
		})
	}
	p.mu.Unlock()
	v.inner.Disconnect(id)
	v.dests.Forget(id)
}

// Rename implements van.Van.
func (v *Van) Rename(old, id int) error {
	if err := v.inner.Rename(old, id); err != nil || old == id {
		return err
	}
	p := v.peers
	p.mu.Lock()
	n, other := p.of(old), p.of(id)
	if n == nil {
		p.mu.Unlock()
		return nil
	}
	former := p.leavingLocked(other)
	n.id.Store(int32(id))
	if l := n.link.Load(); l != nil {
		l.id.Store(int32(id))
	}
	p.changeLocked(func(all map[int]*outPeer) { delete(all, old); all[id] = n })
	p.unmakeLocked(other)
	p.mu.Unlock()
	if former != nil {
		p.end(former)
	}
	return nil
}

// Admit implements van.Admitter.
func (v *Van) Admit(id int) {
	if a, ok := van.As[van.Admitter](v.inner); ok {
		a.Admit(id)
	}
	v.peers.admit(id)
}

// WatchPeers implements van.PeerWatcher. It also reports a peer as lost when its link
// breaks.
func (v *Van) WatchPeers(f func(id int, up bool, cause error)) {
	v.peers.losses.Watch(f)
	if w, ok := van.As[van.PeerWatcher](v.inner); ok {
		w.WatchPeers(func(id int, up bool, cause error) {
			if !up {
				v.peers.lostInside(id)
			}
			f(id, up, cause)
		})
	}
}
