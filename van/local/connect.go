package local

import (
	"context"
	"log/slog"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Connect implements van.Van. It also begins to make the link to a peer within reach. What
// is sent before that is settled waits: see linkTo.
func (v *Van) Connect(ctx context.Context, id int, peer van.Node) error {
	if err := v.inner.Connect(ctx, id, peer); err != nil {
		return err
	}
	if id <= 0 || id == van.SchedulerID || v.role.Load() == int32(van.Scheduler) || v.id.Load() == van.Empty {
		return nil // no data goes there
	}
	n := &neighbour{id: id, settled: make(chan struct{})}
	who, _ := peer.Identity()
	t, offers := parseToken(who.Local)
	n.token = t
	v.mu.Lock()
	v.dialling.Add(1) // before there is no link any more
	old := (*v.links.Load())[id]
	v.setLink(id, nil)
	was := v.nodes[id]
	n.admitted = was == nil || was.admitted && was.token.name == t.name
	v.nodes[id] = n
	if was != nil && was.token.name != t.name {
		v.fenceLocked(id, was)
	}
	v.admitLocked(id)
	if !n.admitted {
		time.AfterFunc(holdTime, func() { v.admitLate(n) })
	}
	if was != nil {
		v.losses.replaced(id, was, n)
	}
	v.countLocked()
	on := !v.closed && v.listener != nil
	if on && offers && v.token.reach(&t) == "" {
		left := v.leaving[id]
		v.wg.Go(func() {
			defer v.settle(n)
			if left != nil {
				<-left // what was sent before is to be there first
			}
			v.link(n, id)
		})
		v.mu.Unlock()
	} else {
		v.mu.Unlock()
		v.settle(n)
		if on {
			v.sayWhyNot(ctx, id, &t, offers)
		}
	}
	if old != nil {
		old.close(true)
	}
	return nil
}

// sayWhyNot logs why there is no link to a peer.
func (v *Van) sayWhyNot(ctx context.Context, id int, t *token, offers bool) {
	if !offers {
		v.log.Debug("no shared memory with a peer", "peer", van.NodeName(id), "why", "it does not offer it")
		return
	}
	level := slog.LevelInfo
	if t.host != v.token.host {
		level = slog.LevelDebug // nobody would expect it
	}
	v.log.Log(ctx, level, "data goes over "+v.Type(), "peer", van.NodeName(id), "why", v.token.reach(t))
}

// link makes the link to n, if it can be had.
func (v *Van) link(n *neighbour, id int) {
	v.admitted.Do(v.letRead)
	l, err := v.dial(v.ctx, id, &n.token)
	if err == nil {
		v.addOut(n, l)
	} else if v.ctx.Err() == nil {
		v.log.Warn("data goes over "+v.Type()+", not through shared memory", "peer", van.NodeName(id), "err", err)
	}
}

// letRead lets peers read what this process lends them. Where Yama asks for that it holds
// for every process of the user, and so only once there is a peer that shares memory.
func (v *Van) letRead() {
	if admitted, err := v.readers(); err != nil {
		v.log.Warn("peers may have to copy large values twice", "err", err)
	} else if admitted {
		v.log.Info("processes of the same user may read this one's memory", "why", yamaScope+" is 1")
	}
}

// settle says that it is settled which way data to n takes.
func (v *Van) settle(n *neighbour) {
	close(n.settled)
	v.dialling.Add(-1)
}

// linkTo returns the link to node id, or nil if data goes there over the van inside.
func (v *Van) linkTo(id int) *outLink {
	if l := (*v.links.Load())[id]; l != nil {
		return l
	}
	return v.linkToBe(id)
}

// linkToBe is linkTo for a node to which there is no link, perhaps not yet. It waits until
// that is settled, for linkTime and leaveTime at most: a message must not overtake those
// that were sent before.
func (v *Van) linkToBe(id int) *outLink {
	for v.dialling.Load() > 0 {
		v.mu.Lock()
		n := v.nodes[id]
		v.mu.Unlock()
		if n == nil {
			break
		}
		select {
		case <-n.settled:
			v.mu.Lock()
			same := v.nodes[id] == n
			v.mu.Unlock()
			if same {
				return (*v.links.Load())[id]
			}
		case <-v.ctx.Done():
			return nil
		}
	}
	return (*v.links.Load())[id] // again: it may have been made since
}

// leaveTime is how long Disconnect lets sent messages leave.
const leaveTime = 500 * time.Millisecond

// Disconnect implements van.Van. What has been sent leaves while the caller goes on.
func (v *Van) Disconnect(id int) {
	v.mu.Lock()
	l := (*v.links.Load())[id]
	delete(v.nodes, id)
	v.setLink(id, nil)
	if l != nil && !v.closed {
		before, left := v.leaving[id], make(chan struct{})
		v.leaving[id] = left
		v.wg.Go(func() {
			ctx, cancel := context.WithTimeout(v.late, v.leaveTime)
			defer cancel()
			l.linger(ctx)
			l.close(true)
			if before != nil {
				<-before
			}
			close(left)
			v.mu.Lock()
			defer v.mu.Unlock()
			if v.leaving[id] == left {
				delete(v.leaving, id)
			}
		})
	}
	v.mu.Unlock()
	v.inner.Disconnect(id)
	v.places.forget(id)
}
