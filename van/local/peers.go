package local

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van/landing"
	"github.com/stepaf/stepaf-go/van/losses"
)

// outPeer is a peer that this node sends data to.
type outPeer struct {
	id           atomic.Int32
	token        token
	incarnation  uint32 // 0: unknown
	admitted     bool   // it replaces no other process, or Admit was called
	insideLosses uint64 // how often the van inside has lost the peer; peers.mu guards it
	why          string // why there is no link, "" if it is not known; peers.mu guards it
	tries        int    // attempts to replace a broken link
	loss         losses.State
	settled      chan struct{} // closed when it is known whether there is a link
	make         func()        // makes the link and closes settled; nil once it runs; peers.mu guards it

	link   atomic.Pointer[outLink] // nil: there is none
	over   atomic.Bool             // the first link could not be made or has broken: data goes over the van inside until a later try makes one
	inside sync.RWMutex            // if over is set: held for reading by a Send over the van inside, and for writing while the data moves to a link
}

// peers are the nodes that this node knows, and the links to and from them.
type peers struct {
	log   *slog.Logger
	bell  *doorbell
	dests *landing.Table

	all    atomic.Pointer[map[int]*outPeer] // by node id
	outs   atomic.Pointer[[]*outLink]       // the links to these peers
	ending atomic.Pointer[[]*outLink]       // links to peers that have left all, until the function end has closed them
	ins    atomic.Pointer[[]*inLink]        // the links from peers

	holdTime    time.Duration // the constant, except in tests
	unknownTime time.Duration // the constant, except in tests
	returnTime  time.Duration // the constant, except in tests

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	losses losses.Queue

	mu       sync.Mutex // guards changes of the fields above, and all fields below
	closed   bool
	used     bool   // this node has data to send, so it makes links
	none     string // why this node makes no links; "" if it does
	senders  map[int]*inPeer
	draining map[int]chan struct{} // closed when the sent messages are delivered
	replaced [][16]byte            // names of replaced processes
}

func newPeers(log *slog.Logger, bell *doorbell, dests *landing.Table) *peers {
	p := &peers{log: log, bell: bell, dests: dests, holdTime: holdTime, unknownTime: unknownTime, returnTime: returnTime,
		senders: map[int]*inPeer{}, draining: map[int]chan struct{}{}}
	p.losses.Current = func(x losses.Peer) bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		n := x.(*outPeer)
		return p.of(int(n.id.Load())) == n && !p.closed
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.ins.Store(&[]*inLink{})
	p.outs.Store(&[]*outLink{})
	p.ending.Store(&[]*outLink{})
	p.all.Store(&map[int]*outPeer{})
	return p
}

// Process implements losses.Peer.
func (n *outPeer) Process() (id int, incarnation uint32) { return int(n.id.Load()), n.incarnation }

// Loss implements losses.Peer.
func (n *outPeer) Loss() *losses.State { return &n.loss }

// of returns peer id, nil if this node does not know it.
func (p *peers) of(id int) *outPeer { return (*p.all.Load())[id] }

// link returns the link to node id, or nil.
func (p *peers) link(id int) *outLink {
	if n := p.of(id); n != nil {
		return n.link.Load()
	}
	return nil
}

// isOf reports whether l comes from the process that Connect has named, and not from a former or future
// process with the same id. The caller holds p.mu.
func (p *peers) isOf(l *inLink) bool {
	n := p.of(l.from.id)
	return n != nil && n.token.name == l.name
}

// settledLink returns the link to node id after it is known whether there is one. It waits for that, for
// linkTime and drainTime at most: a message must not overtake earlier messages.
func (p *peers) settledLink(id int) *outLink {
	for n := p.of(id); n != nil; n = p.of(id) {
		settled := n.isSettled() // before the link is read: it may be made meanwhile
		if l := n.link.Load(); l != nil || settled {
			return l
		}
		p.use()
		select {
		case <-n.settled:
		case <-p.ctx.Done():
			return nil
		}
	}
	return nil
}

// isSettled reports whether it is known whether there is a link to n.
func (n *outPeer) isSettled() bool {
	select {
	case <-n.settled:
		return true
	default:
		return false
	}
}

// use makes the links that Connect has not made, all at once. If they were made one after the other,
// the first message to all peers would wait for the sum of their handshakes.
func (p *peers) use() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.used || p.closed {
		return
	}
	p.used = true
	for _, n := range *p.all.Load() {
		p.makeLocked(n)
	}
}

// makeLocked starts to make the link to n. The caller holds p.mu.
func (p *peers) makeLocked(n *outPeer) {
	if n.make != nil && !p.closed {
		p.wg.Go(n.make)
		n.make = nil
	}
}

// unmakeLocked closes n.settled if makeLocked was not called for n: n has left p.all, so no link to it is made. Sends that wait for n find the
// next peer of its id. n may be nil. The caller holds p.mu.
func (p *peers) unmakeLocked(n *outPeer) {
	if n != nil && n.make != nil {
		n.make = nil
		close(n.settled)
	}
}

// whyNot returns why there is no link to peer id, and whether that is settled.
func (p *peers) whyNot(id int) (why string, settled bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.of(id)
	switch {
	case n == nil || p.none != "":
		return p.none, true
	case n.isSettled():
		return n.why, true
	}
	return "", false
}

// changeLocked replaces the table of peers. The links of peers that leave it must be passed to leavingLocked before. The caller holds p.mu.
func (p *peers) changeLocked(f func(map[int]*outPeer)) {
	all := maps.Clone(*p.all.Load())
	f(all)
	p.all.Store(&all)
	p.listLocked()
}

// setLink makes l, which may be nil, the link to n. The caller holds p.mu.
func (p *peers) setLink(n *outPeer, l *outLink) {
	n.link.Store(l)
	p.listLocked()
}

// listLocked lists the links of all peers. The caller holds p.mu.
func (p *peers) listLocked() {
	var outs []*outLink
	for _, n := range *p.all.Load() {
		if l := n.link.Load(); l != nil {
			outs = append(outs, l)
		}
	}
	p.outs.Store(&outs)
}

// leavingLocked returns the link of n, which is about to leave p.all, or nil if n is nil or has no link. The caller holds p.mu, and passes the
// link to end later. The link sends its queued messages until then, so Cancel must find it: leavingLocked adds it to ending before changeLocked
// removes it from outs.
func (p *peers) leavingLocked(n *outPeer) *outLink {
	if n == nil {
		return nil
	}
	l := n.link.Load()
	if l != nil {
		ending := append(slices.Clone(*p.ending.Load()), l)
		p.ending.Store(&ending)
	}
	return l
}

// end closes a link that leavingLocked has returned.
func (p *peers) end(l *outLink) {
	l.close(true)
	p.mu.Lock()
	defer p.mu.Unlock()
	ending := slices.DeleteFunc(slices.Clone(*p.ending.Load()), func(x *outLink) bool { return x == l })
	p.ending.Store(&ending)
}

var errLinkBroke = errors.New("its link through shared memory broke")

// tell reports that n, peer id, is lost or has returned. The caller may hold p.mu.
func (p *peers) tell(n *outPeer, id int, up bool, cause error) {
	if !up {
		p.dests.Forget(id)
	}
	p.losses.Tell(n, up, cause)
}

// sender returns the queue of a sender's messages.
func (p *peers) sender(id int) *inPeer {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.senders[id]
	if s == nil {
		s = &inPeer{id: id}
		s.lane.ID, s.lane.Undelivered = id, &s.inHand
		p.senders[id] = s
	}
	return s
}
