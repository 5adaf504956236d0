package local

// Later links. If the link to a peer cannot be made, its data goes over the van inside until a later try makes a link: see
// van/failback. The segment's flag behind says that marks precede the link; the receiver clears it.

import (
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/failback"
)

// markKind is the kind of the marks of links.
const markKind = "link"

func markOf(number [8]byte) failback.Mark { return failback.Mark{Kind: markKind, Number: number} }

// changes are the peers whose data goes over the van inside until a link to them can be made.
type changes struct {
	peers map[int]*inside // by node id; replaced, never changed
}

// inside is the lock of Sends to such a peer over the van inside.
type inside struct{ sync.RWMutex }

// changing returns the lock of Sends to a peer whose data may change from the van inside to a link, nil for the others.
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
	id := int(n.id.Load())
	if p.closed || p.nodes[id] != n {
		return
	}
	x := &inside{}
	p.setChangingLocked(id, x)
	p.wg.Go(func() {
		d.retryLink(n, x)
		p.mu.Lock()
		defer p.mu.Unlock()
		if id := int(n.id.Load()); p.changing(id) == x {
			p.setChangingLocked(id, nil)
		}
	})
}

// retryLink makes a link to n, and moves the data to n to that link. It returns when that is done, cannot succeed any more, or n has left.
func (d *dialer) retryLink(n *outPeer, x *inside) {
	p := d.peers
	known := func() (id int, ok bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		id = int(n.id.Load())
		return id, p.nodes[id] == n
	}
	d.retry.Run(p.ctx, known, func(id int) error {
		p.mu.Lock()
		losses := n.insideLosses
		p.mu.Unlock()
		l, err := d.dial(p.ctx, id, &n.token, true)
		if err != nil {
			d.failed(n, err)
			return err
		}
		err = failback.Change(&x.RWMutex, d.inner, id, markOf(l.number), func() error {
			p.mu.Lock()
			defer p.mu.Unlock()
			if n.insideLosses != losses {
				return errMarksLost
			}
			if !d.addLocked(n, l) {
				return van.ErrClosed
			}
			return nil
		})
		if err != nil {
			l.close(true)
		}
		return err
	})
}

// errMarksLost: marks of a link that was not installed yet may be lost.
var errMarksLost = errors.New("the connection that carried the data before has broken while the data was moved")

// marked consumes m, a message of the van inside, if it is a mark, and reports whether it is one.
func (p *peers) marked(m *van.Message) bool {
	mark, ok := failback.ReadMark(markKind, m)
	if !ok {
		return false
	}
	p.mu.Lock() // a link is unmapped only after it has left ins
	defer p.mu.Unlock()
	for _, l := range *p.ins.Load() {
		if l.from.id == m.Sender && l.marks.Arrived(mark, m) {
			l.seg.behind().Store(0)
			p.bell.wakeAll()
		}
	}
	return true
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
	p.mu.Lock()
	if n := p.nodes[id]; n != nil {
		n.insideLosses++
	}
	p.mu.Unlock()
	for _, l := range *p.ins.Load() {
		if l.from.id == id && l.marks.Missing() {
			p.endBehind(l, slog.LevelInfo)
		}
	}
	if l := p.link(id); l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		if !l.gone && l.seg.behind().Load() != 0 {
			_ = l.fail(errMarksLost)
		}
	}
}
