package local

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// neighbour is a peer that data goes to.
type neighbour struct {
	token    token
	admitted bool // not in place of another one, or Admit was called
	tries    int  // to make a lost link again
	down     bool // told of as lost; losses.mu guards it
}

// WatchPeers implements van.PeerWatcher: a peer is also reported as lost when its
// link breaks.
func (v *Van) WatchPeers(f func(id int, up bool, cause error)) {
	v.losses.watch.Store(&f)
	if w, ok := van.As[van.PeerWatcher](v.inner); ok {
		w.WatchPeers(f)
	}
}

// Connect implements van.Van. It also makes the link to a peer within reach.
func (v *Van) Connect(ctx context.Context, id int, peer van.Node) error {
	if err := v.inner.Connect(ctx, id, peer); err != nil {
		return err
	}
	if id <= 0 || id == van.SchedulerID || v.role.Load() == int32(van.Scheduler) || v.id.Load() == van.Empty {
		return nil // no data goes there
	}
	v.mu.Lock()
	old := (*v.links.Load())[id]
	v.setLink(id, nil)
	n := &neighbour{}
	who, _ := peer.Identity()
	t, offers := parseToken(who.Local)
	n.token = t
	was := v.nodes[id]
	n.admitted = was == nil || was.admitted && was.token.name == t.name
	v.nodes[id] = n
	v.admitLocked(id)
	if was != nil {
		v.losses.replaced(id, was, n)
	}
	v.countLocked()
	on := !v.closed && v.listener != nil
	if on {
		v.wg.Add(1)
		defer v.wg.Done()
	}
	v.mu.Unlock()
	if old != nil {
		old.close(true)
	}
	if !on {
		return nil
	}
	if !offers {
		v.log.Debug("no shared memory with a peer", "peer", van.NodeName(id), "why", "it does not offer it")
		return nil
	}
	if why := v.token.reach(&t); why != "" {
		level := slog.LevelInfo
		if t.host != v.token.host {
			level = slog.LevelDebug // nobody would expect it
		}
		v.log.Log(ctx, level, "data goes over "+v.Type(), "peer", van.NodeName(id), "why", why)
		return nil
	}
	l, err := v.dial(ctx, id, &t)
	if err != nil {
		v.log.Warn("data goes over "+v.Type()+", not through shared memory", "peer", van.NodeName(id), "err", err)
		return nil
	}
	v.addOut(id, n, l)
	return nil
}

// setLink makes l, which may be nil, the link to id. v.mu is held.
func (v *Van) setLink(id int, l *outLink) {
	links := maps.Clone(*v.links.Load())
	delete(links, id)
	if l != nil {
		links[id] = l
	}
	outs := slices.Collect(maps.Values(links))
	v.links.Store(&links)
	v.outs.Store(&outs)
	v.countLocked()
}

// countLocked counts who is reached how, for Poll. v.mu is held.
func (v *Van) countLocked() {
	links := *v.links.Load()
	v.linked.Store(int32(len(links)))
	elsewhere := 0
	for id := range v.nodes {
		if links[id] == nil {
			elsewhere++
		}
	}
	v.elsewhere.Store(int32(elsewhere))
}

// addOut installs a new link to node n. It tells whether it is wanted.
func (v *Van) addOut(id int, n *neighbour, l *outLink) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed || v.nodes[id] != n {
		l.close(true)
		return false
	}
	v.setLink(id, l)
	v.wg.Go(func() {
		awaitEnd(l.conn)
		v.outLost(n, l)
	})
	return true
}

var errLinkBroke = errors.New("its link through shared memory broke")

// outLost cleans up after a link that has ended. If it was not ended here, the
// peer is lost, or the two must begin anew.
func (v *Van) outLost(n *neighbour, l *outLink) {
	l.close(false)
	v.mu.Lock()
	id := int(l.id.Load())
	current := !v.closed && (*v.links.Load())[id] == l
	v.mu.Unlock()
	if !current {
		return
	}
	cause := errLinkBroke
	if l.cause != nil {
		cause = l.cause
	}
	v.tell(n, id, false, cause)
	// Until it is settled what follows, Send finds the link, which says ErrPeerLost.
	again, err := v.dialAgain(id, &n.token)
	if n.tries++; again != nil && n.tries <= maxTries {
		if v.addOut(id, n, again) {
			v.tell(n, id, true, nil)
		}
		return
	}
	if again != nil {
		again.close(true) // it was only to see whether the peer is there
	}
	if v.ctx.Err() != nil {
		return
	}
	// If it is gone, the van inside says when it is there again.
	gone := errors.Is(err, errDead)
	if !gone {
		v.log.Warn("data goes over "+v.Type()+" from now on", "peer", van.NodeName(id), "links lost", n.tries, "err", err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if (*v.links.Load())[id] == l {
		v.setLink(id, nil)
	}
	if !gone {
		v.tell(n, id, true, nil)
	}
}

// dialAgain is dial for a peer that may be about to die. Such a process still has its
// socket for a moment, on which nobody answers: that is no sign of life.
func (v *Van) dialAgain(id int, t *token) (l *outLink, err error) {
	ctx, cancel := context.WithTimeout(v.ctx, linkTime)
	defer cancel()
	for pause := time.Millisecond; ; pause *= 2 {
		l, err = v.dial(ctx, id, t)
		if err == nil || !hungUp(err) {
			return l, err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, err
		}
	}
}

// maxTries is how often a link to the same peer is made again.
const maxTries = 3

// tell reports that n, peer id, is lost or there again. v.mu may be held.
func (v *Van) tell(n *neighbour, id int, up bool, cause error) {
	if !up {
		v.places.forget(id)
	}
	v.losses.tell(n, id, up, cause)
}

// peerOf returns the order of a sender's messages.
func (v *Van) peerOf(id int) *peer {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.peers[id]
	if p == nil {
		p = &peer{id: id}
		v.peers[id] = p
	}
	return p
}

// addIn begins to receive from l. It tells whether the van is open.
func (v *Van) addIn(l *inLink) bool {
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		return false
	}
	ins := append(slices.Clone(*v.ins.Load()), l)
	v.ins.Store(&ins)
	same, n := v.isOf(l), v.nodes[l.from.id]
	if !same || !n.admitted {
		l.held.Store(true)
		time.AfterFunc(holdTime, func() { v.unhold(l) })
	}
	v.bell.wakeAll()
	v.mu.Unlock()
	if same {
		v.tell(n, l.from.id, true, nil)
	}
	return true
}

// holdTime is the longest that messages of a peer wait until this node knows it:
// the scheduler tells both at the same time.
const holdTime = time.Second

// unhold begins to take messages from l.
func (v *Van) unhold(l *inLink) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if l.held.Swap(false) && v.bell != nil {
		v.bell.wakeAll()
	}
}

// Admit implements van.Admitter.
func (v *Van) Admit(id int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if n := v.nodes[id]; n != nil {
		n.admitted = true
		v.admitLocked(id)
	}
}

// admitLocked begins to take messages from peer id, if it may. v.mu is held.
func (v *Van) admitLocked(id int) {
	if !v.nodes[id].admitted || v.bell == nil {
		return
	}
	for _, l := range *v.ins.Load() {
		if l.from.id == id && v.isOf(l) && l.held.Swap(false) {
			v.bell.wakeAll()
		}
	}
}

// isOf tells whether l comes from the node that Connect has named, and not from one
// that has had, or will have, its id. v.mu is held.
func (v *Van) isOf(l *inLink) bool {
	n := v.nodes[l.from.id]
	return n != nil && n.token.name == l.name
}

// inLost is told that the connection of l has ended. Who receives removes it when
// the ring is empty.
func (v *Van) inLost(l *inLink) {
	l.lost.Store(true)
	v.mu.Lock()
	if v.bell != nil {
		v.bell.wakeAll()
	}
	v.mu.Unlock()
}

// removeIn forgets a link that has ended. v.rx is held.
func (v *Van) removeIn(l *inLink) {
	v.mu.Lock()
	ins := slices.DeleteFunc(slices.Clone(*v.ins.Load()), func(x *inLink) bool { return x == l })
	v.ins.Store(&ins)
	same, n := v.isOf(l), v.nodes[l.from.id]
	again := slices.ContainsFunc(ins, func(x *inLink) bool { return x.from == l.from && x.name == l.name && !x.lost.Load() })
	v.mu.Unlock()
	if l.stream != nil {
		v.release(l.stream)
		l.stream = nil
	}
	if l.dev != nil {
		l.dev.drop()
	}
	cause := errLinkBroke
	if err := l.cause.Load(); err != nil {
		cause = *err
	}
	inOrder := l.seg.bye().Load() != 0 && !l.failed()
	l.unref()
	if !inOrder && same {
		v.tell(n, l.from.id, false, cause)
		if again { // it has come back before this link's ring was empty
			v.tell(n, l.from.id, true, nil)
		}
	}
}

// Rename implements van.Van.
func (v *Van) Rename(old, id int) error {
	if err := v.inner.Rename(old, id); err != nil || old == id {
		return err
	}
	v.mu.Lock()
	l, other := (*v.links.Load())[old], (*v.links.Load())[id]
	if n := v.nodes[old]; n != nil {
		v.nodes[id] = n
		delete(v.nodes, old)
	}
	if l != nil {
		l.id.Store(int32(id))
	}
	v.setLink(old, nil)
	v.setLink(id, l)
	v.mu.Unlock()
	if other != nil {
		other.close(true)
	}
	return nil
}

// leaveTime is how long Disconnect lets sent messages leave.
const leaveTime = 500 * time.Millisecond

// Disconnect implements van.Van.
func (v *Van) Disconnect(id int) {
	v.mu.Lock()
	l := (*v.links.Load())[id]
	delete(v.nodes, id)
	v.setLink(id, nil)
	v.mu.Unlock()
	if l != nil {
		ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
		l.linger(ctx)
		cancel()
		l.close(true)
	}
	v.inner.Disconnect(id)
	v.places.forget(id)
}
