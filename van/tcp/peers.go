package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/links"
)

// markKind is the kind of the marks of connections.
const markKind = "connection"

// markOf returns the mark of a connection whose hello has that number.
func markOf(number [numberLen]byte) links.Mark {
	return links.Mark{Kind: markKind, Number: [8]byte(number[:])}
}

// errBroke is the cause of a loss that the peer reports.
var errBroke = errors.New("its connection broke, and messages may be lost")

// processOf is the process with that incarnation.
func processOf(incarnation uint32) (p links.Process) {
	binary.LittleEndian.PutUint32(p[:], incarnation)
	return p
}

// peer is a node that data may be sent to. Data is the address of its data port; "": data goes over the van inside.
type peer = links.Node[string, *outConn]

// peers are the nodes that this node knows, and the connections to and from them.
type peers struct {
	links.Table[string, *outConn, *inConn]
	n       *common
	read    func(c *inConn) error // makes the source read c
	senders map[int]*sender       // Mu guards it
}

// unreachable is the error of data to n if there is no connection and no other path.
func (p *peers) unreachable(n *peer) error {
	if _, why := p.Status(n); why != nil {
		return fmt.Errorf("%w: %w", van.ErrPeerLost, why)
	}
	return fmt.Errorf("%w: there is no connection for data", van.ErrPeerLost)
}

// sender returns the order of a sender's messages.
func (p *peers) sender(id int) *sender {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return p.senderLocked(id)
}

func (p *peers) senderLocked(id int) *sender {
	s := p.senders[id]
	if s == nil {
		s = &sender{id: id}
		s.queue.ID, s.queue.Undelivered = id, &s.undelivered
		p.senders[id] = s
	}
	return s
}

// enter adds c, whose dialer has sent h. Reading begins at once, or when this node has admitted c's process.
func (p *peers) enter(c *inConn, h *hello) verdict {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	c.from, c.again = p.senderLocked(c.From), h.again
	if h.afterMarks {
		c.Marks.Await(markOf(h.number), func() { p.EndMarks(c, slog.LevelWarn) })
	}
	if err := p.EnterLocked(c); err != nil {
		p.forget(c)
		if errors.Is(err, van.ErrReplaced) {
			return verdictReplaced
		}
		return verdictClosed
	}
	if h.afterMarks {
		for _, x := range p.earlier(c) {
			if x.Marks.Missing() { // nothing was sent over it, or again is set
				p.EndLocked(x, false)
			}
		}
	}
	return verdictYes
}

// start begins to read c, a connection of an admitted process, unless an earlier connection has not been read to its end, or marks of c
// have not arrived. p.Mu is held.
func (p *peers) start(c *inConn) {
	n := p.Of(c.From)
	switch {
	case c.again && p.IsOfLocked(c, n):
		// The process has failed the requests that it sent before. This node must fail the requests that it has sent to the process, and
		// deliver new messages only after that.
		for _, x := range p.earlier(c) {
			p.EndLocked(x, true)
		}
		c.again, c.awaitsWatcher = false, true
		p.Losses.Broken(&n.Peer, errBroke, func() {
			p.Mu.Lock()
			defer p.Mu.Unlock()
			c.awaitsWatcher = false
			p.AdmitNextLocked(c)
		})
	case !c.awaitsWatcher && !c.Marks.Missing() && len(p.earlier(c)) == 0:
		c.Held.Store(false)
		c.from.known = true
		if err := p.read(c); err != nil {
			p.n.log.Error("a connection for data cannot be read", "peer", van.NodeName(c.From), "err", err)
			p.EndLocked(c, false)
		}
	}
}

// earlier returns the connections that c's process made before c, and that are still read. p.Mu is held.
func (p *peers) earlier(c *inConn) (l []*inConn) {
	for _, x := range p.Ins() {
		if x == c {
			break
		}
		if x.from == c.from && x.Process == c.Process && !x.fenced {
			l = append(l, x)
		}
	}
	return l
}

// end ends c. It reports whether nothing reads c; otherwise the source closes it. p.Mu is held.
func (p *peers) end(c *inConn, fence bool) (unread bool) {
	if fence {
		c.mu.Lock() // waits for a running read
		c.fenced = true
		c.mu.Unlock()
	}
	if !c.Held.Load() {
		_ = unix.Shutdown(c.fd, unix.SHUT_RDWR)
		return false
	}
	c.Held.Store(false)
	p.forget(c)
	_ = unix.Close(c.fd)
	return true
}

// forget removes the sender of c's id if only unknown processes have claimed that id and c is their last connection. p.Mu is held.
func (p *peers) forget(c *inConn) {
	if !c.from.known && !slices.ContainsFunc(p.Ins(), func(x *inConn) bool { return x != c && x.from == c.from }) {
		delete(p.senders, c.From)
	}
}

// leave removes c, which the source has closed. The next connection of its process is then read.
func (p *peers) leave(c *inConn) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.forget(c)
	p.RemoveLocked(c)
	p.AdmitNextLocked(c)
}
