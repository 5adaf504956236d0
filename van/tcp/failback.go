package tcp

// Later connections. If the first connection to a peer cannot be made, its data goes over the van inside until a later try makes one: see
// van/failback. Marks also precede the next connections, until the first marks must have arrived: if a connection breaks, data sent
// before it over the van inside may still be on its way.

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/failback"
)

// errMarksLost: marks of a connection that was not installed yet may be lost.
var errMarksLost = errors.New("the connection that carried the data before has broken while the data was moved")

// hopeless reports whether a connection that failed with err will never be made.
func hopeless(err error) bool {
	return errors.Is(err, errRefused) || auth.IsUnproved(err) || errors.Is(err, van.ErrClosed)
}

// sendInside sends msg over the van inside if data to n goes there. It reports false if there is a connection by now, or n has refused
// one.
func (v *Van) sendInside(n *peer, msg *van.Message) (sent bool, err error) {
	n.inside.RLock()
	defer n.inside.RUnlock()
	if n.conn.Load() != nil || !n.over.Load() {
		return false, nil
	}
	return true, v.inner.Send(msg)
}

// mayWait reports whether the receiver of c may not have begun to read it, because marks have not arrived.
func (c *outConn) mayWait() bool { return c.afterMarks && time.Since(c.made) < 2*failback.MarkTime }

// marked consumes m, a message of the van inside, if it is a mark, and reports whether it is one.
func (p *peers) marked(m *van.Message) bool {
	mark, ok := failback.ReadMark(markKind, m)
	if !ok {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.ins {
		if c.from.id == m.Sender && c.awaits.marks.Arrived(mark, m) {
			p.admitKnownLocked(c)
			break
		}
	}
	return true
}

// lostInside ends the connections to and from peer id that may wait for marks: the van inside has lost the peer, and perhaps the marks.
func (p *peers) lostInside(id int, cause error) {
	if errors.Is(cause, syscall.ECONNREFUSED) {
		return // an attempt to connect failed: messages that wait for the connection are not lost
	}
	p.mu.Lock()
	ins := slices.Clone(p.ins)
	n := p.of(id)
	if n != nil {
		n.insideLosses++
	}
	p.mu.Unlock()
	for _, c := range ins {
		if c.from.id == id {
			p.endMarks(c, slog.LevelInfo)
		}
	}
	if n == nil {
		return
	}
	if c := n.conn.Load(); c != nil && c.mayWait() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.fail(fmt.Errorf("the connection that carried the data before has broken: %w", cause))
	}
}
