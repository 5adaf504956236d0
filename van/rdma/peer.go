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

// This file owns the state of a peer, and of the link to it.

// peer is the sending side towards one node: queued messages, and the connection while there is one.
type peer struct {
	v    *node
	id   atomic.Int32
	node van.Node
	addr netip.AddrPort
	// incarnation is that of the process in the node table; 0 if the table does not say.
	incarnation uint32
	tag         uint32 // identifies this peer object; its control messages carry it with their number

	inbound           atomic.Pointer[inbound] // the peer's own connection to this node
	hasConnected      atomic.Bool             // inbound was set before
	notifying         sync.Mutex              // held while the watcher is notified, so that notifications of one connection stay in order
	remoteIncarnation atomic.Uint32           // of the process at the other end of link; 0: no link, or not known

	mu              sync.Mutex
	sender          *rendezvous.Sender[*outgoing]
	link            *link        // nil: no connection
	ending          *link        // the previous link, while the device may still read for it
	inboundDown     *inboundDown // nil if both connections are up, or if link is nil
	confirmedSerial uint32       // serial number of the latest inbound connection whose immUp notifyInbound has handled
	free            []*outgoing
	expanded        partList     // used while a batch is expanded
	unsent          int          // bytes of queued payload
	lastNumber      uint32       // of the last control message
	tickedAt        uint64       // when Sender.Tick was last called
	waitDue         conn.DueItem // for queued messages, and for slots to be returned
	pulls           map[pullKey]pullDestination
	state           connectState
}

// connector connects and reconnects a peer, in one goroutine; see dial.go.
type connector struct{ *peer }

// connectState is the state of a connector. The peer's mu guards all fields but atomics.
type connectState struct {
	stop    context.CancelFunc
	stopped chan struct{} // closed when the goroutine has ended

	native            atomic.Bool // the last connection was to a native node
	lost              bool        // a connection was made and has broken
	process           uint32      // incarnation at the other end of the last connection; 0: not known
	oneWay            bool        // link was restored, but the peer's own connection, on which its answers come, was not
	queueForReconnect bool        // Connect was called again: messages are queued for the next connection, as for the first
	connectCount      int         // number of connections so far
	detached          bool        // the peer has left the table: do not reconnect
	connecting        bool        // connect requests have been sent,
	connectingAs      int         // under this node id
	ended             bool
}

// link is one connection to a peer.
type link struct {
	queue   *conn.SendQueue[sentMessage]
	ids     []*conn.ID
	device  *device
	dialect outboundDialect
	native  bool // the peer is a native node
	// numbered: control messages have numbers, so that the uncertain ones can be sent again after a break.
	numbered    bool
	connectedAs int    // this node's id when it connected
	process     uint32 // incarnation in the peer's answer; 0: not known
	upProof     upProof
	class       int // the traffic class, or unset
	epoch       uint32
	probeDue    conn.DueItem
	splits      uint64 // number of split messages so far
	maxBatch    int    // bytes of the longest batch for which the peer may have memory; 0: it has refused none
	seq         uint64 // number of numbered control messages so far
	failed      chan error
	carried     []carriedCredits // indexed by record of queue
	uncertain   []*inbound       // connections whose credits may have been lost with this link
	once        sync.Once
}

// fail reports that the connection has broken. Only the first cause counts.
func (l *link) fail(err error) { l.once.Do(func() { l.failed <- err }) }

// pullDestination is the memory for the answer to a pull request.
type pullDestination struct {
	mem      backend.Mem
	region   *conn.Region
	stepmesh bool // the peer is a StepMesh node
	link     *link
}

// keptParts is the capacity of parts that a pooled message keeps.
const keptParts = 32

func (p *peer) recycle(o *outgoing) {
	p.unsent -= o.unsent
	o.unsent = 0
	for i := range o.parts {
		o.parts[i].mem.Release() // the region itself retains memory that the device reads
	}
	clear(o.parts)
	o.done, o.parts = nil, o.parts[:0]
	if len(p.free) < 256 && cap(o.meta) <= 4*metaRoom && cap(o.copies) <= 2*stageEach && cap(o.parts) <= keptParts {
		p.free = append(p.free, o)
	}
}

// flush posts the unposted work requests. p.mu is held.
func (p *peer) flush() {
	l := p.link
	if l != nil && p.waiting() {
		l.device.active.Add(&p.waitDue)
	}
	if l == nil || l.queue.Unposted() == 0 {
		return
	}
	if err := l.queue.Post(); err != nil {
		l.fail(asLost(err))
	}
}

// probeLink probes l if it is idle: a node that waits for an answer sends nothing, so it would not notice a broken connection.
func (p *peer) probeLink(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l {
		return
	}
	l.device.probes.Add(&l.probeDue)
	if l.queue.Idle() {
		if err := l.queue.Probe(); err != nil {
			l.fail(asLost(err))
		}
	}
}

// waiting reports whether messages wait for a slot or for the link, or slots are to be returned. p.mu is held.
func (p *peer) waiting() bool { return p.sender.Waiting() > 0 || len(p.sender.Returns()) > 0 }

// name returns the peer's node name and address.
func (p *peer) name() string { return van.NodeName(int(p.id.Load())) + " at " + p.node.Addr() }

// currentLink returns p's connection, or nil. p may be nil.
func (p *peer) currentLink() *link {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link
}

// reusableAs reports whether Connect keeps p, called by a node that now has this id. That is the case for a StepMesh peer if p has
// reconnected, or is connecting, under this id. A StepMesh node would take a second connection under the same name for more queue pairs
// of the first, and never read it. Messages are then queued for the connection, as for a new one.
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

// setConnecting records whether connect requests have been sent, and under which node id.
func (p connector) setConnecting(asks bool, id int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.connecting, p.state.connectingAs = asks, id
}
