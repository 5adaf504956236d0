package tcp

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/failback"
	"github.com/stepaf/stepaf-go/van/losses"
)

const (
	// unknownTime is how long a connection of a process that this node does not know waits unread: the scheduler tells both ends of each
	// other, one before the other.
	unknownTime = 10 * time.Second
	// holdTime is how long the connection of a replacement process then waits for Admit.
	holdTime = time.Second
	// maxHeld bounds the connections that wait. If there are more, the oldest one ends: any process that knows this node's incarnation can
	// open one, unless the cluster has a secret.
	maxHeld = 1024
	// maxReplaced bounds the replaced processes that are remembered.
	maxReplaced = 1024
)

// markKind is the kind of the marks of connections.
const markKind = "connection"

// markOf returns the mark of a connection whose hello has that number.
func markOf(number [numberLen]byte) failback.Mark {
	return failback.Mark{Kind: markKind, Number: [8]byte(number[:])}
}

// peer is a node that data may be sent to.
type peer struct {
	id          atomic.Int32
	incarnation uint32
	addr        string // of its data port; "": data goes over the van inside

	conn    atomic.Pointer[outConn]
	settled chan struct{} // closed when it is settled whether there is a connection
	over    atomic.Bool   // settled: data goes over the van inside until there is a connection
	inside  sync.RWMutex  // held for reading by a Send over the van inside, and for writing while the data moves to a connection

	loss losses.State

	// peers.mu guards what follows.
	why          error  // why the latest attempt to make a connection has failed, or nil
	insideLosses uint64 // how often the van inside has lost the peer
	begun        bool   // the connection is being made
	admitted     bool   // the process is not a replacement, or Admit was called
}

// name is the node name of n.
func (n *peer) name() string { return van.NodeName(int(n.id.Load())) }

// peers are the nodes that this node knows, and the connections to and from them.
type peers struct {
	n      *common
	all    atomic.Pointer[map[int]*peer] // by node id
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	read   func(c *inConn) error // makes the source read c
	losses losses.Queue

	mu       sync.Mutex
	closed   bool
	senders  map[int]*sender
	ins      []*inConn
	draining map[uint32]chan struct{} // by incarnation: closed when all messages sent before have left
	leaving  map[*outConn]struct{}    // connections without a peer that have not ended
	replaced []uint32                 // incarnations of processes whose place others have taken
}

func newPeers(n *common) *peers {
	p := &peers{n: n, senders: map[int]*sender{}, draining: map[uint32]chan struct{}{}, leaving: map[*outConn]struct{}{}}
	p.all.Store(&map[int]*peer{})
	p.losses.Current = func(x losses.Peer) bool { return p.current(x.(*peer)) }
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// of returns peer id, nil if this node does not know it.
func (p *peers) of(id int) *peer { return (*p.all.Load())[id] }

// whyNot returns the error of the latest failed attempt to make a connection to n, nil if none has failed.
func (p *peers) whyNot(n *peer) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return n.why
}

// unreachable is the error of data to n if there is no connection and no other path.
func (p *peers) unreachable(n *peer) error {
	if why := p.whyNot(n); why != nil {
		return fmt.Errorf("%w: %w", van.ErrPeerLost, why)
	}
	return fmt.Errorf("%w: there is no connection for data", van.ErrPeerLost)
}

// failed records that an attempt to make a connection to n has failed.
func (p *peers) failed(n *peer, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n.why = err
}

// change replaces the table of peers. p.mu is held.
func (p *peers) change(f func(map[int]*peer)) {
	all := maps.Clone(*p.all.Load())
	f(all)
	p.all.Store(&all)
}

// sender returns the order of a sender's messages.
func (p *peers) sender(id int) *sender {
	p.mu.Lock()
	defer p.mu.Unlock()
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

// outs returns the connections over which this node sends, including connections without a peer that still write their queues.
func (p *peers) outs() (l []*outConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, n := range *p.all.Load() {
		if c := n.conn.Load(); c != nil {
			l = append(l, c)
		}
	}
	return slices.AppendSeq(l, maps.Keys(p.leaving))
}

// left removes c, which has ended, from leaving.
func (p *peers) left(c *outConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.leaving, c)
}

// enter adds c, whose dialer has sent h. Reading begins at once, or when this node has admitted c's process.
func (p *peers) enter(c *inConn, h *hello) verdict {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return verdictClosed
	case slices.Contains(p.replaced, c.incarnation):
		return verdictReplaced
	}
	p.ins = append(p.ins, c)
	c.from = p.senderLocked(c.from.id) // the end of another connection of an unknown process may have removed the sender
	c.held, c.again = true, h.again
	if h.afterMarks {
		for _, x := range p.earlierLocked(c) {
			if x.awaits.marks.Missing() { // nothing was sent over it, or again is set
				p.endLocked(x)
			}
		}
		c.awaits.marks.Await(markOf(h.number), func() { p.endMarks(c, slog.LevelWarn) })
	}
	n := p.of(c.from.id)
	switch {
	case n == nil || n.incarnation != c.incarnation:
		p.hold(c, unknownTime)
	case !n.admitted:
		p.hold(c, holdTime)
	default:
		p.startLocked(n, c)
	}
	return verdictYes
}

// startLocked begins to read c, a connection of n's process, unless an earlier connection has not been read to its end, or marks of c have
// not arrived. p.mu is held.
func (p *peers) startLocked(n *peer, c *inConn) {
	switch {
	case c.again:
		// The process has failed the requests that it sent before. This node must fail the requests that it has sent to the process, and
		// deliver new messages only after that.
		for _, x := range p.earlierLocked(c) {
			p.fence(x)
		}
		c.again, c.awaits.watcher = false, true
		p.losses.Broken(n, errBroke, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			c.awaits.watcher = false
			if c.held && !p.closed {
				p.startLocked(n, c)
			}
		})
	case !c.awaits.watcher && !c.awaits.marks.Missing() && len(p.earlierLocked(c)) == 0:
		p.joinLocked(c)
	}
}

// earlierLocked returns the connections that c's process made before c, and that are still read. p.mu is held.
func (p *peers) earlierLocked(c *inConn) (l []*inConn) {
	for _, x := range p.ins { // in the order of their arrival
		if x == c {
			break
		}
		if x.from == c.from && x.incarnation == c.incarnation && !x.fenced {
			l = append(l, x)
		}
	}
	return l
}

// joinLocked begins to read c. p.mu is held.
func (p *peers) joinLocked(c *inConn) {
	c.held, c.joined, c.from.known = false, true, true
	if err := p.read(c); err != nil {
		p.n.log.Error("a connection for data cannot be read", "peer", van.NodeName(c.from.id), "err", err)
		p.endLocked(c)
	}
}

// hold reads nothing from c until its process is admitted, for limit at most. p.mu is held.
func (p *peers) hold(c *inConn, limit time.Duration) {
	var oldest *inConn
	held := 0
	for _, x := range p.ins { // in the order of their arrival
		if !x.held {
			continue
		}
		if held++; oldest == nil {
			oldest = x
		}
	}
	if held > maxHeld {
		p.n.rarely("held").Warn("a connection for data of an unknown process ends: too many wait", "peer", van.NodeName(oldest.from.id), "at most", maxHeld)
		p.endLocked(oldest)
	}
	time.AfterFunc(limit, func() { p.endHold(c) })
}

// endHold ends the wait of c. If this node knows c's process, admitted or not, reading begins; otherwise c ends.
func (p *peers) endHold(c *inConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !c.held || p.closed {
		return
	}
	switch n := p.of(c.from.id); {
	case n != nil && n.incarnation == c.incarnation:
		p.startLocked(n, c)
	case failpoint.On("fencing"):
		p.joinLocked(c)
	default:
		p.n.log.Info("a connection for data ends: its process is not the one that is known under its id", "peer", van.NodeName(c.from.id))
		p.endLocked(c)
	}
}

// endLocked ends c. p.mu is held. The source closes a connection that it reads.
func (p *peers) endLocked(c *inConn) {
	if c.joined {
		_ = unix.Shutdown(c.fd, unix.SHUT_RDWR)
		return
	}
	c.held = false
	p.removeLocked(c)
	_ = unix.Close(c.fd)
}

// removeLocked removes c from the list. It also removes the sender of c's id if only unknown processes have claimed that id and c was
// their last connection. p.mu is held.
func (p *peers) removeLocked(c *inConn) {
	p.ins = slices.DeleteFunc(p.ins, func(x *inConn) bool { return x == c })
	if !c.from.known && !slices.ContainsFunc(p.ins, func(x *inConn) bool { return x.from == c.from }) {
		delete(p.senders, c.from.id)
	}
}

// leave removes c, which the source has closed. The next connection of its process is then read.
func (p *peers) leave(c *inConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c.joined = false
	p.removeLocked(c)
	p.admitKnownLocked(c)
}

// admitKnownLocked begins to read the connections of c's process, if it may. p.mu is held.
func (p *peers) admitKnownLocked(c *inConn) {
	if n := p.of(c.from.id); n != nil && n.incarnation == c.incarnation {
		p.admitLocked(c.from.id, n)
	}
}

// admitLocked begins to read the connections of n, peer id, if it may. p.mu is held.
func (p *peers) admitLocked(id int, n *peer) {
	if !n.admitted {
		return
	}
	for _, c := range slices.Backward(slices.Clone(p.ins)) { // a later connection may end earlier ones, which then must not be read
		if c.from.id == id && c.incarnation == n.incarnation && c.held {
			p.startLocked(n, c)
		}
	}
}

// admit begins to read the connections of n.
func (p *peers) admit(n *peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if id := int(n.id.Load()); p.of(id) == n {
		n.admitted = true
		p.admitLocked(id, n)
	}
}

// fenceLocked ends the connections of was, the process that n has replaced as peer id. was may be nil. p.mu is held.
func (p *peers) fenceLocked(id int, was, n *peer) {
	if failpoint.On("fencing") {
		return
	}
	if was != nil && was.incarnation != 0 {
		if len(p.replaced) == maxReplaced {
			p.replaced = slices.Delete(p.replaced, 0, 1)
		}
		p.replaced = append(p.replaced, was.incarnation)
	}
	for _, c := range slices.Clone(p.ins) {
		if c.from.id == id && c.incarnation != n.incarnation && (c.joined || was != nil && c.incarnation == was.incarnation) {
			p.fence(c)
		}
	}
}

// fence ends c. From then on, no message that has arrived over c is delivered. p.mu is held.
func (p *peers) fence(c *inConn) {
	c.mu.Lock() // waits for a running read
	c.fenced = true
	c.mu.Unlock()
	p.endLocked(c)
}

// endMarks ends c, whose marks are lost.
func (p *peers) endMarks(c *inConn, level slog.Level) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || !c.awaits.marks.Missing() || !slices.Contains(p.ins, c) {
		return
	}
	p.n.log.Log(p.ctx, level, "a connection for data ends: data that was sent before it has not arrived", "peer", van.NodeName(c.from.id))
	p.endLocked(c)
	p.admitKnownLocked(c)
}

// current reports whether n still is the peer that has its id.
func (p *peers) current(n *peer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.closed && p.of(int(n.id.Load())) == n
}
