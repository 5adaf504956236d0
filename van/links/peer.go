package links

import (
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// Process identifies a process among all that have had a node id. The zero value is that of a process without a link.
type Process [16]byte

// State is what becomes of data to a peer. See docs/pictures/link-states.svg.
type State int32

const (
	Unused     State = iota // no link was tried: the next Send starts that
	Connecting              // the first link is being made: Sends wait
	Linked                  // data goes over the link
	Broken                  // the link has broken, and the next one is being made: Sends fail
	Fallback                // data goes over the van inside until a later try has made a link
	Unlinked                // data goes over the van inside
	Refused                 // the peer takes no data of this process: Sends fail
)

// Node is a peer, and the link to it.
type Node[D any, L Link] struct {
	Peer
	Data  D // the transport's part, for making a link
	link  atomic.Pointer[L]
	sends sync.RWMutex // held for reading by a Send over the van inside in the state Fallback, and for writing while the data moves to a link
}

// Link returns the link to n, zero if there is none.
func (n *Node[D, L]) Link() (l L) {
	if x := n.link.Load(); x != nil {
		l = *x
	}
	return l
}

// Peer is a process that data may be sent to.
type Peer struct {
	id          atomic.Int32
	incarnation uint32
	process     Process
	state       atomic.Int32
	settled     chan struct{} // closed when the state is neither Unused nor Connecting any more

	loss lossState

	// Table.Mu guards these.
	why          error  // why there is no link, nil if no attempt has failed
	insideLosses uint64 // how often the van inside has lost the peer
	Admitted     bool   // the process has replaced no other one, or Admit was called
}

// Init sets what a new peer is.
func (n *Peer) Init(id int, process Process, incarnation uint32) {
	n.id.Store(int32(id))
	n.process, n.incarnation, n.settled = process, incarnation, make(chan struct{})
}

// Unlink makes n, which is not in a table, a peer that has no link because of why.
func (n *Peer) Unlink(why error) {
	n.why = why
	n.state.Store(int32(Unlinked))
	close(n.settled)
}

// ID is the peer's node id.
func (n *Peer) ID() int { return int(n.id.Load()) }

// Name is the peer's node name.
func (n *Peer) Name() string { return van.NodeName(n.ID()) }

// Incarnation is that of the peer's process.
func (n *Peer) Incarnation() uint32 { return n.incarnation }

// State is the peer's state.
func (n *Peer) State() State { return State(n.state.Load()) }

// Settled is closed when the first link is made or has failed.
func (n *Peer) Settled() <-chan struct{} { return n.settled }
