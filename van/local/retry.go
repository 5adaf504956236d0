package local

// Later links. If the link to a peer cannot be made, its data goes over the van inside until a later try makes a link: see
// van/failback. The segment's flag behind says that marks precede the link; the receiver clears it.

import (
	"errors"
	"log/slog"
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/failback"
)

// markKind is the kind of the marks of links.
const markKind = "link"

func markOf(number [8]byte) failback.Mark { return failback.Mark{Kind: markKind, Number: number} }

// sendInside sends msg over inner if data to its receiver goes there, and reports false if there is a link by now.
func (p *peers) sendInside(inner van.Van, msg *van.Message) (sent bool, err error) {
	if n := p.of(msg.Receiver); n != nil && n.over.Load() {
		n.inside.RLock()
		defer n.inside.RUnlock()
	}
	if p.link(msg.Receiver) != nil {
		return false, nil
	}
	return true, inner.Send(msg)
}

// laterLocked starts the later tries to make a link to n. The caller holds peers.mu, and no data to n goes over the van inside yet.
func (d *dialer) laterLocked(n *outPeer) {
	p := d.peers
	if !p.closed && p.of(int(n.id.Load())) == n {
		n.over.Store(true)
		p.wg.Go(func() { d.retryLink(n) })
	}
}

// retryLink makes a link to n, and moves the data to n to that link. It returns when that is done, cannot succeed any more, or n has left.
func (d *dialer) retryLink(n *outPeer) {
	p := d.peers
	known := func() (id int, ok bool) {
		p.mu.Lock() // against Rename
		defer p.mu.Unlock()
		id = int(n.id.Load())
		return id, p.of(id) == n
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
		err = failback.Change(&n.inside, d.inner, id, markOf(l.number), func() error {
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
	if n := p.of(id); n != nil {
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
