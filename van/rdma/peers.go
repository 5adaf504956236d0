package rdma

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the table of peers.

// Connect begins to connect to the peer. The new connection replaces an older one with the same id.
func (v *rvan) Connect(ctx context.Context, id int, node van.Node) error {
	addr, err := resolve(ctx, node)
	fail := func(err error) error {
		return &van.Error{Op: "connect", Node: van.NodeName(int(v.local.id.Load())), Peer: van.NodeName(id) + " at " + node.Addr(), Err: err}
	}
	if err != nil {
		return fail(err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed.Load() || v.cm.Channel == nil {
		return fail(van.ErrClosed)
	}
	old := (*v.tables.peers.Load())[id]
	incarnation := uint32(0)
	if identity, ok := node.Extension(); ok && id != van.SchedulerID { // a restarted scheduler keeps its id with another incarnation
		incarnation = identity.Incarnation
	}
	if old != nil && old.addr == addr && old.incarnation == incarnation && (connector{old}).reusableAs(int(v.local.id.Load())) {
		return nil
	}
	run, stop := context.WithCancel(context.Background())
	p := &peer{v: v.node, node: node, addr: addr, incarnation: incarnation, tag: v.serials.Add(1), state: connectState{stop: stop, stopped: make(chan struct{})}, pulls: map[pullKey]pullDestination{}}
	p.waitDue.Run, p.expanded.peer = p.tick, p
	p.id.Store(int32(id))
	p.sender = rendezvous.NewSender(p.need)
	v.replace(func(m map[int]*peer) { m[id] = p })
	if old != nil {
		v.fenceLocked(id, old, p)
	}
	v.markUnlistedLocked()
	v.linkInboundsLocked()
	if old != nil {
		v.closePeer(old, drainTime)
	}
	v.wg.Go(func() { connector{p}.keepConnected(run) })
	v.log.Info("connect", "peer", van.NodeName(id), "addr", addr.String())
	return nil
}

// replace changes the table of peers. v.mu is held.
func (v *node) replace(change func(map[int]*peer)) {
	m := maps.Clone(*v.tables.peers.Load())
	change(m)
	v.tables.peers.Store(&m)
}

// Rename makes the connection to old serve new instead.
func (v *rvan) Rename(old, new int) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := (*v.tables.peers.Load())[old]
	if p == nil {
		return &van.Error{Op: "rename", Peer: van.NodeName(old), Err: van.ErrUnknownPeer}
	}
	other := (*v.tables.peers.Load())[new]
	p.id.Store(int32(new))
	v.replace(func(m map[int]*peer) { delete(m, old); m[new] = p })
	v.markUnlistedLocked()
	v.linkInboundsLocked()
	if other != nil && other != p {
		v.closePeer(other, 0)
	}
	return nil
}

// drainTime is how long Disconnect waits for queued messages to be sent, once there is a connection.
const drainTime = 500 * time.Millisecond

// Disconnect ends the connection to id. If there was no connection yet, queued messages have as long as connecting may take: they may
// say why id is refused.
func (v *rvan) Disconnect(id int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := (*v.tables.peers.Load())[id]
	if p == nil {
		return
	}
	v.replace(func(m map[int]*peer) { delete(m, id) })
	limit := drainTime
	p.mu.Lock()
	if p.state.connectCount == 0 && p.sender.Waiting() > 0 {
		limit += v.times.connect
	}
	p.mu.Unlock()
	v.closePeer(p, limit)
}

// closePeer ends a peer that has left the table, after its messages have been sent or after limit. v.mu is held.
func (v *rvan) closePeer(p *peer, limit time.Duration) {
	v.closingPeers[p] = true
	p.mu.Lock()
	p.state.detached = true
	p.mu.Unlock()
	v.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		connector{p}.drainAndClose(ctx)
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.closingPeers, p)
	})
}

// allPeers returns the peers in the table and those that are closing.
func (v *rvan) allPeers() []*peer {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.AppendSeq(slices.Collect(maps.Values(*v.tables.peers.Load())), maps.Keys(v.closingPeers))
}
