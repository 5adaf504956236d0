package rdma

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns what is kept of a peer, and of the link to it.

// peer is the way to one node: messages that wait, and the connection while it
// stands.
type peer struct {
	v    *node
	id   atomic.Int32
	node van.Node
	addr netip.AddrPort
	// incarnation is that of the process that the table names; 0 when it does not.
	incarnation uint32
	tag         uint32 // with the number of a control message: of this peer

	inbound           atomic.Pointer[inbound] // the peer's connection to this node
	hasConnected      atomic.Bool             // there has been one
	notifying         sync.Mutex              // held while the watcher is notified of a connection that may end meanwhile
	remoteIncarnation atomic.Uint32           // the incarnation at the other end of link; 0: there is none, or it did not say

	mu              sync.Mutex
	sender          *rendezvous.Sender[*outgoing]
	link            *link        // nil while there is none
	ending          *link        // the one before, while the device may read for it
	inboundDown     *inboundDown // nil while both connections stand, or this node's does not
	confirmedSerial uint32       // serial of the last one of which notifyInbound has taken what it says
	free            []*outgoing
	unsent          int          // bytes of payload that wait
	lastNumber      uint32       // of the last control message
	tickedAt        uint64       // when Sender.Tick was last called
	waitDue         conn.DueItem // for messages, and returned slots, that wait
	pulls           map[pullKey]pullDestination
	state           connectState
}

// connector makes the connection of a peer, and makes it again, in one goroutine; see
// dial.go.
type connector struct{ *peer }

// connectState is what a connector keeps. The peer's mu guards what is no atomic.
type connectState struct {
	stop    context.CancelFunc
	stopped chan struct{} // closed when the goroutine has ended

	native            atomic.Bool // the last connection was to a native node
	lost              bool        // there was a connection, and it broke
	process           uint32      // the incarnation of the last one's other end; 0: it did not say
	oneWay            bool        // it was made again, but the peer's own, which its answers need, was not
	queueForReconnect bool        // the peer was named again since: messages wait for the next connection, as for the first
	connectCount      int         // connections there have been
	detached          bool        // the peer is not in the table any more: its connection is not made again
	connecting        bool        // connect requests are with the peer,
	connectingAs      int         // as those of this node id
	ended             bool
}

// link is one standing connection.
type link struct {
	queue   *conn.SendQueue[sentMessage]
	ids     []*conn.ID
	device  *device
	dialect outboundDialect
	native  bool // a native node
	// numbered: control messages have numbers, so that those that may have arrived can be
	// sent again.
	numbered    bool
	bundles     bool   // small messages that leave together go in one write
	bundle      bundle // the last of them
	connectedAs int    // the id that this node had when it connected
	process     uint32 // the incarnation with which the peer answered; 0: it did not say
	upProof     upProof
	class       int // the traffic class, or unset
	epoch       uint32
	probeDue    conn.DueItem
	splits      uint64 // split messages so far
	seq         uint64 // of control messages that have numbers
	failed      chan error
	uncertain   []*inbound // whose credits may have been lost with this link
	once        sync.Once
}

// fail says that the connection has broken. Only the first cause counts.
func (l *link) fail(err error) { l.once.Do(func() { l.failed <- err }) }

// pullDestination is where the answer to a pull request is to be put.
type pullDestination struct {
	mem      backend.Mem
	region   *conn.Region
	stepmesh bool // the peer is a StepMesh node
	link     *link
}

func (p *peer) recycle(o *outgoing) {
	p.unsent -= o.unsent
	o.unsent = 0
	o.done, o.destination, o.data = nil, backend.Mem{}, [van.MaxFrames]backend.Mem{}
	if len(p.free) < 256 && cap(o.meta) <= 4*metaRoom && cap(o.copies) <= 2*stageEach {
		p.free = append(p.free, o)
	}
}

// flush posts what waits, unless more follows at once. p.mu is held.
func (p *peer) flush(more bool) {
	l := p.link
	if l != nil && p.waiting() {
		l.device.active.Add(&p.waitDue)
	}
	if l == nil || l.queue.Unposted() == 0 || more && l.queue.Unposted() < maxUnposted {
		return
	}
	l.bundle = bundle{}
	if err := l.queue.Post(); err != nil {
		l.fail(asLost(err))
	}
}

// maxUnposted is how many work requests wait for each other at most.
const maxUnposted = 24

// probeLink probes l if nothing is under way on it: a node that waits for an answer sends nothing.
func (p *peer) probeLink(l *link, now uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l {
		return false
	}
	l.device.probes.Add(&l.probeDue)
	if l.queue.Idle() {
		if err := l.queue.Probe(); err != nil {
			l.fail(asLost(err))
		}
	}
	return false
}

// waiting tells whether something waits for room or for a slot. p.mu is held.
func (p *peer) waiting() bool { return p.sender.Waiting() > 0 || len(p.sender.Returns()) > 0 }

// name says whom p leads to.
func (p *peer) name() string { return van.NodeName(int(p.id.Load())) + " at " + p.node.Addr() }

// currentLink is p's connection, or nil. p may be nil.
func (p *peer) currentLink() *link {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link
}

// reusableAs tells whether p is to be kept when it is named again, by a node with this id: it
// has connected again, to a StepMesh node, under that id, or is about to. That one
// takes a second connection under the same name for more queue pairs of the first, and
// never hears it. What is sent from now on waits for the connection, as it would for a new
// one.
func (p connector) reusableAs(id int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil {
		keep := p.state.connecting && p.state.connectingAs == id
		p.state.lost, p.state.queueForReconnect = p.state.lost && !keep, p.state.queueForReconnect || keep
		return keep
	}
	return !p.link.native && p.link.connectedAs == id && p.state.connectCount > 1
}

// setConnecting says that connect requests are with the peer, sent as those of node id, or that
// there are none.
func (p connector) setConnecting(asks bool, id int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.connecting, p.state.connectingAs = asks, id
}
