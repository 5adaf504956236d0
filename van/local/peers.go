package local

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van/links"
)

// markKind is the kind of the marks of links.
const markKind = "link"

var errLinkBroke = errors.New("its link through shared memory broke")

// outPeer is a peer that this node sends data to. The name in its token, which its hello contains, identifies its process.
type outPeer = links.Node[outData, *outLink]

type outData struct {
	token
	tries  int          // attempts to replace a broken link
	inside atomic.Int32 // data messages of the inner transport with which the receiver is called now
}

// Close implements links.Link.
func (l *outLink) Close() (lost int) { return l.close(true) }

// insideLost ends l if marks that precede it may be lost.
func (p *peers) insideLost(l *outLink, _ error) {
	if awaitsMarks(l) {
		l.mu.Lock()
		defer l.mu.Unlock()
		_ = l.fail(links.ErrMarksLost)
	}
}

// awaitsMarks reports whether the receiver still waits for marks before it reads l, and this node has not closed l. The receiver clears
// the segment's flag when the marks have arrived.
func awaitsMarks(l *outLink) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.gone && l.seg.behind().Load() != 0
}

// peers are the nodes that this node knows, and the links to and from them.
type peers struct {
	links.Table[outData, *outLink, *inLink]
	bell       *doorbell
	returnTime time.Duration   // the constant, except in tests
	senders    map[int]*inPeer // Mu guards it
}

// link returns the link to node id, or nil.
func (p *peers) link(id int) *outLink {
	if n := p.Of(id); n != nil {
		return n.Link()
	}
	return nil
}

// sender returns the queue of a sender's messages.
func (p *peers) sender(id int) *inPeer {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	s := p.senders[id]
	if s == nil {
		s = &inPeer{id: id}
		s.lane.ID, s.lane.Undelivered = id, &s.inHand
		p.senders[id] = s
	}
	return s
}
