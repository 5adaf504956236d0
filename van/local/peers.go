package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
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
}

// peers are the nodes that this node knows, and the links to and from them.
type peers struct {
	log   *slog.Logger
	bell  *doorbell
	dests *landing.Table

	links    atomic.Pointer[map[int]*outLink] // by node id
	outs     atomic.Pointer[[]*outLink]       // the same
	ending   atomic.Pointer[[]*outLink]       // links that takeLink has removed and end has not closed yet
	ins      atomic.Pointer[[]*inLink]
	changes  atomic.Pointer[changes]
	dialling atomic.Int32 // the number of peers whose settled is open

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
	nodes    map[int]*outPeer
	senders  map[int]*inPeer
	draining map[int]chan struct{} // closed when the sent messages are delivered
	replaced [][16]byte            // names of replaced processes
}

func newPeers(log *slog.Logger, bell *doorbell, dests *landing.Table) *peers {
	p := &peers{log: log, bell: bell, dests: dests, holdTime: holdTime, unknownTime: unknownTime, returnTime: returnTime,
		nodes: map[int]*outPeer{}, senders: map[int]*inPeer{}, draining: map[int]chan struct{}{}}
	p.losses.Current = func(x losses.Peer) bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		n := x.(*outPeer)
		return p.nodes[int(n.id.Load())] == n && !p.closed
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.ins.Store(&[]*inLink{})
	p.outs.Store(&[]*outLink{})
	p.ending.Store(&[]*outLink{})
	p.links.Store(&map[int]*outLink{})
	return p
}

// Process implements losses.Peer.
func (n *outPeer) Process() (id int, incarnation uint32) { return int(n.id.Load()), n.incarnation }

// Loss implements losses.Peer.
func (n *outPeer) Loss() *losses.State { return &n.loss }

// link returns the link to node id, or nil.
func (p *peers) link(id int) *outLink { return (*p.links.Load())[id] }

// settledLink returns the link to node id after it is known whether there is one. It waits for that, for
// linkTime and drainTime at most: a message must not overtake earlier messages.
func (p *peers) settledLink(id int) *outLink {
	if l := p.link(id); l != nil {
		return l
	}
	for p.dialling.Load() > 0 {
		p.mu.Lock()
		n := p.nodes[id]
		if n != nil {
			p.useLocked()
		}
		p.mu.Unlock()
		if n == nil {
			break
		}
		select {
		case <-n.settled:
			p.mu.Lock()
			same := p.nodes[id] == n
			p.mu.Unlock()
			if same {
				return p.link(id)
			}
		case <-p.ctx.Done():
			return nil
		}
	}
	return p.link(id) // the link may have been made meanwhile
}

// useLocked makes the links that Connect has not made, all at once. If they were made one after the other,
// the first message to all peers would wait for the sum of their handshakes. The caller holds p.mu.
func (p *peers) useLocked() {
	if p.used || p.closed {
		return
	}
	p.used = true
	for _, n := range p.nodes {
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

// unmakeLocked settles that n gets no link if makeLocked was not called for it: n is about to leave p.nodes. n may be nil. The
// caller holds p.mu.
func (p *peers) unmakeLocked(n *outPeer) {
	if n != nil && n.make != nil {
		n.make = nil
		p.settle(n)
	}
}

// whyNot returns why there is no link to peer id, and whether that is settled.
func (p *peers) whyNot(id int) (why string, settled bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[id]
	if n == nil || p.none != "" {
		return p.none, true
	}
	select {
	case <-n.settled:
		return n.why, true
	default:
		return "", false
	}
}

// settle records that it is known whether data to n goes over a link.
func (p *peers) settle(n *outPeer) {
	close(n.settled)
	p.dialling.Add(-1)
}

// setLink makes l, which may be nil, the link to id. The caller holds p.mu.
func (p *peers) setLink(id int, l *outLink) {
	links := maps.Clone(*p.links.Load())
	delete(links, id)
	if l != nil {
		links[id] = l
	}
	outs := slices.Collect(maps.Values(links))
	p.links.Store(&links)
	p.outs.Store(&outs)
}

// takeLink removes the link to id and returns it, if there is one. The caller passes it to end. Until then the link may
// send its messages, so Cancel must find it: it is added to ending before it is removed from outs. The caller holds p.mu.
func (p *peers) takeLink(id int) *outLink {
	l := p.link(id)
	if l == nil {
		return nil
	}
	ending := append(slices.Clone(*p.ending.Load()), l)
	p.ending.Store(&ending)
	p.setLink(id, nil)
	return l
}

// end closes a link that takeLink has returned.
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

// addIn starts to receive from l. It refuses a link of a replaced process.
func (p *peers) addIn(l *inLink) error {
	p.mu.Lock()
	if p.closed || slices.Contains(p.replaced, l.name) {
		defer p.mu.Unlock()
		if p.closed {
			return van.ErrClosed
		}
		return fmt.Errorf("%s: %w", van.NodeName(l.from.id), van.ErrReplaced)
	}
	ins := append(slices.Clone(*p.ins.Load()), l)
	p.ins.Store(&ins)
	same, n := p.isOf(l), p.nodes[l.from.id]
	switch {
	case n != nil && !same:
		p.hold(l, p.unknownTime)
	case n == nil || !n.admitted:
		p.hold(l, p.holdTime)
	}
	p.bell.wakeAll()
	p.mu.Unlock()
	if same {
		p.tell(n, l.from.id, true, nil)
	}
	return nil
}

// inLost records that the connection of l has ended. The receiver removes l when its ring is
// empty.
func (p *peers) inLost(l *inLink) {
	l.lost.Store(true)
	p.bell.wakeAll()
}

// removeIn removes a link that has ended. The caller holds the feed.
func (p *peers) removeIn(l *inLink) {
	p.mu.Lock()
	ins := slices.DeleteFunc(slices.Clone(*p.ins.Load()), func(x *inLink) bool { return x == l })
	p.ins.Store(&ins)
	same, n := p.isOf(l), p.nodes[l.from.id]
	again := slices.ContainsFunc(ins, func(x *inLink) bool { return x.from == l.from && x.name == l.name && !x.lost.Load() })
	p.mu.Unlock()
	cause := errLinkBroke
	if err := l.failure.cause.Load(); err != nil {
		cause = *err
	}
	inOrder := l.seg.bye().Load() != 0 && !l.failed()
	l.end()
	if !inOrder && same {
		p.tell(n, l.from.id, false, cause)
		if again { // the peer returned before this link's ring was empty
			p.tell(n, l.from.id, true, nil)
		} else {
			p.awaitReturn(n, l)
		}
	}
}

// returnTime is how long a peer may take to replace a broken link.
const returnTime = linkTime

// awaitReturn reports the return of n if its process outlives l by returnTime. Without another link, such a process sends
// over the van inside.
func (p *peers) awaitReturn(n *outPeer, l *inLink) {
	fd, err := unix.PidfdOpen(l.pid, 0)
	if err != nil {
		return // it has ended
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = unix.Close(fd)
		return
	}
	p.wg.Go(func() {
		defer unix.Close(fd)
		select {
		case <-time.After(p.returnTime):
		case <-p.ctx.Done():
			return
		}
		if !exited(uintptr(fd)) {
			p.tell(n, l.from.id, true, nil)
		}
	})
}
