package local

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
)

// neighbour is a peer that data goes to.
type neighbour struct {
	id       int // Van.mu guards it
	token    token
	admitted bool          // not in place of another one, or Admit was called
	tries    int           // to make a lost link again
	down     bool          // told of as lost; losses.mu guards it
	settled  chan struct{} // closed when it is settled which way data takes
}

// WatchPeers implements van.PeerWatcher: a peer is also reported as lost when its
// link breaks.
func (v *Van) WatchPeers(f func(id int, up bool, cause error)) {
	v.losses.watch.Store(&f)
	if w, ok := van.As[van.PeerWatcher](v.inner); ok {
		w.WatchPeers(f)
	}
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
func (v *Van) addOut(n *neighbour, l *outLink) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	id := n.id
	if v.closed || v.nodes[id] != n {
		l.close(true)
		return false
	}
	l.id.Store(int32(id))
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
	v.tell(n, id, false, l.why())
	// Until it is settled what follows, Send finds the link, which says ErrPeerLost.
	again, err := v.dialAgain(id, &n.token)
	if n.tries++; again != nil && n.tries <= maxTries {
		if v.addOut(n, again) {
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
	if errors.Is(err, errReplaced) { // the van inside is not a way round that
		l.mu.Lock()
		l.cause = errReplaced
		l.mu.Unlock()
		v.log.Error("a peer does not hear this process any more", "peer", van.NodeName(id), "why", err)
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
		p.lane.ID, p.lane.Hand = id, &p.inHand
		v.peers[id] = p
	}
	return p
}

// addIn begins to receive from l. It refuses one of a process that was replaced.
func (v *Van) addIn(l *inLink) error {
	v.mu.Lock()
	if v.closed || v.wasReplacedLocked(l.name) {
		defer v.mu.Unlock()
		if v.closed {
			return van.ErrClosed
		}
		return fmt.Errorf("%s: %w", van.NodeName(l.from.id), errReplaced)
	}
	ins := append(slices.Clone(*v.ins.Load()), l)
	v.ins.Store(&ins)
	same, n := v.isOf(l), v.nodes[l.from.id]
	switch {
	case n == nil:
		l.held.Store(true)
		time.AfterFunc(holdTime, func() { v.unhold(l) })
	case !same:
		l.held.Store(true)
		time.AfterFunc(v.unknownTime, func() { v.unhold(l) })
	case !n.admitted:
		l.held.Store(true)
		time.AfterFunc(holdTime, func() { v.unhold(l) })
	}
	v.bell.wakeAll()
	v.mu.Unlock()
	if same {
		v.tell(n, l.from.id, true, nil)
	}
	return nil
}

// Admit implements van.Admitter.
func (v *Van) Admit(id int) {
	if a, ok := van.As[van.Admitter](v.inner); ok {
		a.Admit(id)
	}
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

// removeIn forgets a link that has ended. The feed is held.
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
		} else {
			v.awaitReturn(n, l)
		}
	}
}

// returnTime is how long a peer whose link broke has to make it again.
const returnTime = linkTime

// awaitReturn tells that n is there again if its process outlives l by returnTime and has
// not made another link: it sends over the van inside then.
func (v *Van) awaitReturn(n *neighbour, l *inLink) {
	fd, err := unix.PidfdOpen(l.pid, 0)
	if err != nil {
		return // it has ended
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		_ = unix.Close(fd)
		return
	}
	v.wg.Go(func() {
		defer unix.Close(fd)
		timer := time.NewTimer(v.returnTime)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-v.ctx.Done():
			return
		}
		if !exited(uintptr(fd)) {
			v.tell(n, l.from.id, true, nil)
		}
	})
}

// Rename implements van.Van.
func (v *Van) Rename(old, id int) error {
	if err := v.inner.Rename(old, id); err != nil || old == id {
		return err
	}
	v.mu.Lock()
	l, other := (*v.links.Load())[old], (*v.links.Load())[id]
	if n := v.nodes[old]; n != nil {
		v.nodes[id], n.id = n, id
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
