package local

// Later links. If the link to a peer cannot be made, its data goes over the van inside until a later try makes a link.
//
// Data on the new link must not overtake earlier data on the van inside. The change to the link is therefore made as follows:
//
//  1. The sender makes a link whose segment has the flag behind. The receiver does not consume records of that link yet.
//  2. The sender blocks Sends to the peer over the van inside (outPeer.inside). It sends two marks there, one in the order of
//     requests and one in the order of answers. Then it installs the link.
//  3. The receiver delivers the messages before the marks, receives the marks, and begins to consume records of the link.
//
// If the van inside loses the peer meanwhile, the marks may be lost. The link then ends as a broken link does.

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// Pauses before a link is tried again. They double.
const (
	firstRetry = time.Second
	lastRetry  = time.Minute
)

// behindTime is the longest time that a link waits for its marks. It covers the time of the receiver's application for the messages before them.
const behindTime = time.Minute

// markText begins the body of a mark. The number of its link follows.
const markText = "stepaf/1 link "

// changes are the peers whose data goes over the van inside until a link to them can be made.
type changes struct {
	peers map[int]*inside // by node id; replaced, never changed
}

// inside is the lock of Sends to such a peer.
type inside struct{ sync.RWMutex }

// changing returns the lock of a peer whose data may change from the van inside to a link, nil for the others.
func (p *peers) changing(id int) *inside {
	if c := p.changes.Load(); c != nil {
		return c.peers[id]
	}
	return nil
}

// setChangingLocked records that data to peer id may change to a link; a nil x ends that. The caller holds p.mu.
func (p *peers) setChangingLocked(id int, x *inside) {
	c := &changes{peers: map[int]*inside{}}
	if old := p.changes.Load(); old != nil {
		maps.Copy(c.peers, old.peers)
	}
	if delete(c.peers, id); x != nil {
		c.peers[id] = x
	}
	if len(c.peers) == 0 {
		c = nil
	}
	p.changes.Store(c)
}

// sendInside sends msg over inner if data to its receiver goes there, and reports false if there is a link by now.
func (p *peers) sendInside(inner van.Van, msg *van.Message) (sent bool, err error) {
	x := p.changing(msg.Receiver)
	if x == nil {
		if p.link(msg.Receiver) != nil { // it was installed before the change ended
			return false, nil
		}
		return true, inner.Send(msg)
	}
	x.RLock()
	defer x.RUnlock()
	if p.link(msg.Receiver) != nil {
		return false, nil
	}
	return true, inner.Send(msg)
}

// laterLocked starts the later tries to make a link to n. The caller holds peers.mu, and no data to n goes over the van inside yet.
func (d *dialer) laterLocked(n *outPeer) {
	p := d.peers
	if p.closed || p.nodes[n.id] != n {
		return
	}
	x := &inside{}
	p.setChangingLocked(n.id, x)
	p.wg.Go(func() {
		d.retry(n, x)
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.changing(n.id) == x {
			p.setChangingLocked(n.id, nil)
		}
	})
}

// retry makes a link to n, and moves the data to n to that link. It returns when that is done, cannot succeed any more, or n has left.
func (d *dialer) retry(n *outPeer, x *inside) {
	p := d.peers
	var failed logx.Sparse
	for pause := d.firstRetry; ; pause = min(2*pause, lastRetry) {
		select {
		case <-time.After(pause):
		case <-p.ctx.Done():
			return
		}
		p.mu.Lock()
		id, known := n.id, p.nodes[n.id] == n
		p.mu.Unlock()
		if !known {
			return
		}
		l, err := d.dial(p.ctx, id, &n.token, true)
		if err == nil {
			if err = d.change(n, l, id, x); err == nil {
				return
			}
		}
		switch k, speak := failed.Next(); {
		case p.ctx.Err() != nil:
			return
		case hopeless(err):
			d.log.Warn("data goes over "+d.over()+" for as long as both processes run", "peer", van.NodeName(id), "err", err)
			return
		case speak:
			d.log.Info("data still goes over "+d.over()+", not through shared memory", "peer", van.NodeName(id), "err", err,
				"next try in", min(2*pause, lastRetry), "tries", k)
		}
	}
}

// change moves the data to n from the van inside to l.
func (d *dialer) change(n *outPeer, l *outLink, id int, x *inside) error {
	x.Lock()
	defer x.Unlock()
	for _, request := range []bool{true, false} {
		if err := d.inner.Send(l.mark(id, request)); err != nil {
			l.close(true)
			return fmt.Errorf("mark over %s: %w", d.over(), err)
		}
	}
	if !d.add(n, l) {
		return van.ErrClosed
	}
	d.log.Info("data goes through shared memory from now on, no longer over "+d.over(), "peer", van.NodeName(id))
	return nil
}

// mark makes the mark of l.
func (l *outLink) mark(id int, request bool) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push = id, request, true
	m.Body = append([]byte(markText), l.number[:]...)
	return m
}

// marked consumes m, a message of the van inside, if it is a mark, and reports whether it is one.
func (p *peers) marked(m *van.Message) bool {
	if len(m.Body) != len(markText)+8 || !bytes.HasPrefix(m.Body, []byte(markText)) {
		return false
	}
	number, bit := [8]byte(m.Body[len(markText):]), uint32(1)
	if m.Request {
		bit = 2
	}
	for _, l := range *p.ins.Load() {
		if l.from.id == m.Sender && l.number == number && l.behind.Load()&bit != 0 && l.behind.And(^bit) == bit {
			l.seg.behind().Store(0)
			p.bell.wakeAll()
		}
	}
	return true
}

// awaitMarks makes l wait for its marks. It is called before the receiver knows l.
func (p *peers) awaitMarks(l *inLink) {
	l.behind.Store(1 | 2)
	time.AfterFunc(behindTime, func() {
		if l.behind.Load() != 0 {
			p.endBehind(l, slog.LevelWarn)
		}
	})
}

// endBehind ends a link whose marks are lost.
func (p *peers) endBehind(l *inLink, level slog.Level) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || !slices.Contains(*p.ins.Load(), l) {
		return
	}
	p.log.Log(p.ctx, level, "a link through shared memory ends: data that was sent before it has not arrived", "peer", van.NodeName(l.from.id))
	p.fenceLinkLocked(l)
}

// lostInside ends the links to and from peer id that wait for marks: the van inside has lost the peer, and perhaps the marks.
func (p *peers) lostInside(id int) {
	for _, l := range *p.ins.Load() {
		if l.from.id == id && l.behind.Load() != 0 {
			p.endBehind(l, slog.LevelInfo)
		}
	}
	if l := p.link(id); l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		if !l.gone && l.seg.behind().Load() != 0 {
			_ = l.fail(errors.New("the connection that carried the data before has broken"))
		}
	}
}
