package rdma

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// Connect begins to connect to the peer, in place of a connection that serves the
// same id.
func (v *rvan) Connect(ctx context.Context, id int, node van.Node) error {
	addr, err := resolve(ctx, node)
	fail := func(err error) error {
		return &van.Error{Op: "connect", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(id) + " at " + node.Addr(), Err: err}
	}
	if err != nil {
		return fail(err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed.Load() || v.cm.Channel == nil {
		return fail(van.ErrClosed)
	}
	old := (*v.peers.Load())[id]
	incarnation := uint32(0)
	if identity, ok := node.Identity(); ok && id != van.SchedulerID { // which may come back as another process
		incarnation = identity.Incarnation
	}
	if old != nil && old.addr == addr && old.incarnation == incarnation && old.keepFor(int(v.id.Load())) {
		return nil
	}
	run, stop := context.WithCancel(context.Background())
	p := &peer{v: v, node: node, addr: addr, incarnation: incarnation, tag: v.serials.Add(1), stop: stop, ends: make(chan struct{}), pulls: map[pullKey]pullDestination{}}
	p.waitDue.Run = p.tick
	p.id.Store(int32(id))
	p.sender = rendezvous.NewSender(p.need)
	v.replace(func(m map[int]*peer) { m[id] = p })
	if old != nil {
		v.fenceLocked(id, old, p)
	}
	v.markUnlistedLocked()
	v.linkInboundsLocked()
	if old != nil {
		v.leave(old, leaveTime)
	}
	v.wg.Go(func() { p.keepConnected(run) })
	v.log.Info("connect", "peer", van.NodeName(id), "addr", addr.String())
	return nil
}

// keepFor tells whether p is to be kept when it is named again, by a node with this id: it
// has connected again, to a StepMesh node, under that id, or is about to. That one
// takes a second connection under the same name for more queue pairs of the first, and
// never hears it. What is sent from now on waits for the connection, as it would for a new
// one.
func (p *peer) keepFor(id int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil {
		keep := p.connecting && p.connectingAs == id
		p.lost = p.lost && !keep
		return keep
	}
	return !p.link.native && p.link.connectedAs == id && p.connects > 1
}

// setConnecting says that connect requests are with the peer, sent as those of node id, or that
// there are none.
func (p *peer) setConnecting(asks bool, id int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.connecting, p.connectingAs = asks, id
}

// replace changes the table of peers. v.mu is held.
func (v *rvan) replace(change func(map[int]*peer)) {
	m := maps.Clone(*v.peers.Load())
	change(m)
	v.peers.Store(&m)
}

// linkInbounds tells each peer which connection it has opened to this node.
func (v *rvan) linkInbounds() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.linkInboundsLocked()
}

func (v *rvan) linkInboundsLocked() {
	for id, p := range *v.peers.Load() {
		var back *inbound
		for _, in := range v.inbounds {
			if in.hello.node == id && in.hello.port == p.node.Port && !in.gone.Load() && !in.unlisted.Load() && (back == nil || int32(in.serial-back.serial) > 0) {
				back = in // the latest: the end of others has not been noticed yet
			}
		}
		if back != nil && p.inbound.Swap(back) != back {
			go v.notifyInboundDown(p)
		}
	}
}

func (v *rvan) unlinkInbound(in *inbound) {
	for _, p := range *v.peers.Load() {
		p.inbound.CompareAndSwap(in, nil)
	}
}

// Rename makes the connection to old serve new instead.
func (v *rvan) Rename(old, new int) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := (*v.peers.Load())[old]
	if p == nil {
		return &van.Error{Op: "rename", Peer: van.NodeName(old), Err: van.ErrUnknownPeer}
	}
	other := (*v.peers.Load())[new]
	p.id.Store(int32(new))
	v.replace(func(m map[int]*peer) { delete(m, old); m[new] = p })
	v.markUnlistedLocked()
	v.linkInboundsLocked()
	if other != nil && other != p {
		v.leave(other, 0)
	}
	return nil
}

// leaveTime is how long Disconnect lets sent messages leave.
const leaveTime = 500 * time.Millisecond

// Disconnect ends the connection to id.
func (v *rvan) Disconnect(id int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := (*v.peers.Load())[id]
	if p == nil {
		return
	}
	v.replace(func(m map[int]*peer) { delete(m, id) })
	v.leave(p, leaveTime)
}

// leave ends a peer that is not in the table any more, when what was sent has left or
// the time is over. v.mu is held.
func (v *rvan) leave(p *peer, limit time.Duration) {
	v.leaving[p] = true
	p.mu.Lock()
	p.detached = true
	p.mu.Unlock()
	v.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		p.end(ctx)
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.leaving, p)
	})
}

// end lets what was sent leave until ctx ends, then ends the connection.
func (p *peer) end(ctx context.Context) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !p.drained() {
		select {
		case <-tick.C: // completions of the last messages have no signal of their own
			continue
		case <-ctx.Done():
		case <-p.v.eventsEnded:
		}
		break
	}
	p.mu.Lock()
	p.ended = true
	dropped := p.sender.Disconnect(func(*outgoing) bool { return false })
	expected := p.pulls
	p.pulls = map[pullKey]pullDestination{}
	p.mu.Unlock()
	p.endAll(p.dropMessages(dropped))
	for _, x := range expected {
		x.region.Release()
	}
	p.stop()
	<-p.ends
}

// drained tells whether everything has left.
func (p *peer) drained() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flush(false)
	if p.lost {
		return true // nobody to wait for
	}
	return p.sender.Waiting() == 0 && (p.link == nil || p.link.Idle())
}

// awaitSent waits for the last completions of a connection that has been broken: they say
// what the peer has not received.
func (p *peer) awaitSent(l *link) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(flushPause)
	defer limit.Stop()
	for {
		p.mu.Lock()
		done := l.Outstanding() <= 0
		p.mu.Unlock()
		if done {
			return
		}
		select {
		case <-tick.C:
		case <-limit.C:
			return
		case <-l.host.stopped:
			return
		}
	}
}

// endLink takes apart a connection of this node's, and returns what it held.
func (p *peer) endLink(l *link) []finished {
	v := p.v
	for _, id := range l.ids {
		_ = id.Disconnect()
	}
	p.awaitSent(l)
	for _, id := range l.ids {
		_ = id.Destroy()
		v.cm.Release(l.Device)
	}
	v.forgetConn(l.epoch - v.epoch)
	p.mu.Lock()
	l.Each(l.markUncertain)
	all, uncertain := l.Abandon(), l.uncertain
	p.mu.Unlock()
	_ = l.Close()
	for _, in := range uncertain { // a slot that is given back twice would be overwritten
		in.fail(fmt.Errorf("%w: the other connection broke, and with it messages that gave back slots of this one", van.ErrPeerLost))
	}
	return all
}

// allPeers is the peers, and those that are leaving.
func (v *rvan) allPeers() (all []*peer) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, p := range *v.peers.Load() {
		all = append(all, p)
	}
	for p := range v.leaving {
		all = append(all, p)
	}
	return all
}
