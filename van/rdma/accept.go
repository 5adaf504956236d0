package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the connections that peers open to this node: the decision to accept one, its assignment to a process, and its end.

// acceptor handles connect requests.
type acceptor struct{ *rvan }

// accept handles a connect request.
func (v acceptor) accept(ev verbs.Event) {
	h, err := decodeHandshake(ev.Private)
	var req []byte
	var proves bool
	why := ""
	if err == nil && !v.closed.Load() {
		if req, proves, err = v.admit(&ev, &h); err != nil {
			why = auth.Explain(err)
		}
	}
	switch {
	case err != nil:
	case v.closed.Load():
		why = "the node is closing"
	case h.native && v.isReplaced(h.incarnation):
		v.rejectReplaced(ev, &h)
		return
	case v.misread(&h, h.node) != "":
		why = v.misread(&h, h.node)
	case h.native && h.qpCount != v.cfg.QPNum:
		why = fmt.Sprintf("STEPAF_QP_NUM is %d here and %d there", v.cfg.QPNum, h.qpCount)
	}
	if why != "" || err != nil {
		why = cmp.Or(why, fmt.Sprint(err))
		cause := cmp.Or(err, errors.New(why))
		if n, show := v.accepted.rejections.Next(logx.PeerKind(cause)); show {
			v.log.Warn("rdma: rejected a connection", "from", ev.Peer, "node", h.node, "why", cause, "so far", n)
		}
		code := uint32(0)
		if auth.IsUnproved(err) {
			code = codeUnproved
		}
		v.refuse(&ev, code, why)
		return
	}
	in, err := v.inboundFor(h, &ev, req, proves)
	if err == nil {
		err = in.addQueuePair(ev.New, h, req)
	}
	switch {
	case errors.Is(err, van.ErrReplaced): // replaced since the check above
		v.rejectReplaced(ev, &h)
	case err != nil:
		if n, show := v.accepted.rejections.Next(logx.Kind(err)); show {
			v.log.Warn("rdma: could not accept a connection", "from", ev.Peer, "node", h.node, "err", err, "so far", n)
		}
		v.refuse(&ev, 0, err.Error())
		if in != nil {
			in.fail(err)
		}
	}
}

// rejectReplaced rejects the connect request of a process that another one has replaced.
func (v acceptor) rejectReplaced(ev verbs.Event, h *handshake) {
	if n, show := v.accepted.rejections.Next("replaced"); show {
		v.log.Warn("rdma: rejected a process that has been replaced", "from", ev.Peer, "node", van.NodeName(h.node), "so far", n)
	}
	v.refuse(&ev, codeReplaced, van.NodeName(h.node)+" has been replaced by another process")
}

// inboundFor returns the inbound connection that the queue pair of a connect request belongs to, and makes it for the first one. If
// proves is true, the opener must prove itself, and req is the request's private data.
func (v acceptor) inboundFor(h handshake, ev *verbs.Event, req []byte, proves bool) (*inbound, error) {
	id, from := ev.New, ev.Peer
	key := h.key() + " from " + from.Addr().String() // the host name may be truncated
	v.mu.Lock()
	old := v.accepted.inbounds[key]
	v.mu.Unlock()
	if old != nil && !old.failed.Load() && len(old.accept.ids) < v.cfg.QPNum {
		return old, nil // connect requests may arrive out of order
	}
	if old != nil {
		if h.native { // the key includes the connection's epoch
			return nil, fmt.Errorf("queue pair %d: %w: the connection has ended, or is complete", h.qp, van.ErrPeerLost)
		}
		// The peer connects again, and the end of its old connection has not been noticed. Ending the old one notifies the watcher, so
		// that happens after the new connection is known.
		defer old.fail(fmt.Errorf("%w: it has connected again", van.ErrPeerLost))
	}
	dev, err := id.Device()
	if err != nil {
		return nil, err
	}
	host, err := v.device(dev)
	if err != nil {
		return nil, err
	}
	in := &inbound{v: v.node, serial: v.serials.Add(1), handshake: h, key: key, from: from, device: host, drain: drainState{drained: make(chan struct{})},
		slots: slotState{cells: conn.Cells{Device: dev}, granted: map[rendezvous.Route][]*receiveSlot{}, areas: map[uint64]*area{}}}
	in.dialect = stepmeshIn{slotSet{in}}
	if h.native {
		in.dialect = nativeIn{slotSet{in}}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed.Load() {
		return nil, van.ErrClosed
	}
	if h.native && v.fences.isReplacedLocked(h.incarnation) {
		return nil, van.ErrReplaced
	}
	if proves {
		v.awaitProofLocked(in, req)
	} else {
		v.openedLocked(in)
	}
	in.activeDue.Run, in.requestsDue.Run, in.probeDue.Run = in.tick, slotSet{in}.retryRequests, in.probe
	if h.native && !failpoint.On("rdma-reclaim") {
		host.probes.Add(&in.probeDue)
	}
	v.accepted.inbounds[key] = in
	v.markUnlistedLocked()
	v.addConnLocked(in.serial, &connection{in: in})
	return in, nil
}

// opened assigns in to its process after its opener has proved itself.
func (v *rvan) opened(in *inbound) {
	v.mu.Lock()
	defer v.mu.Unlock()
	acceptor{v}.openedLocked(in)
	v.linkInboundsLocked()
}

// supersededTime is how long an old connection stays open after its process has opened a newer one.
const supersededTime = 2 * time.Second

// destroyInbound ends a connection that a peer has opened. p is the peer whose own connection it is, or nil.
//  1. Disconnect: the peer can write no more. Wait until the receive requests are flushed, that is, all notifications are handled.
//  2. Release messages that wait for parts on other queue pairs; they are incomplete.
//  3. Destroy the queue pairs and remove the connection from the tables.
//  4. Release the slots and their memory. Memory of messages that the application still holds stays until it releases them.
func (v *rvan) destroyInbound(in *inbound, p *peer, cause error) {
	if cause != nil && !v.closed.Load() {
		v.log.Info("rdma: a peer's connection ended", "peer", in.name(), "why", cause)
	}
	if l := p.currentLink(); l != nil {
		defer p.noteInboundDown(l, cause)
	}
	in.mu.Lock()
	ids, accepted := in.accept.ids, in.accept.accepted
	if in.accept.timer != nil {
		in.accept.timer.Stop()
	}
	in.mu.Unlock()
	for _, id := range ids {
		_ = id.Disconnect()
	}
	if accepted > 0 {
		in.device.awaitFlush(in)
	}
	if in.process.unproved.Load() && !v.closed.Load() {
		in.failUnproved(fmt.Errorf("%w: its connection has ended before its proof", auth.ErrNoSecret))
	}
	in.device.dropIncomplete(in)
	in.mu.Lock()
	in.closed = true
	areas, sends := in.slots.areas, in.sends
	in.slots.granted, in.slots.areas, in.slots.waiting, in.owed.credits = nil, nil, [2][]pendingRequest{}, nil
	in.owed.count.Store(0)
	in.mu.Unlock()
	for _, id := range ids {
		_ = id.Destroy()
		v.cm.Release(in.device.dev)
	}
	v.removeConn(in.serial)
	v.mu.Lock()
	if v.accepted.inbounds[in.key] == in {
		delete(v.accepted.inbounds, in.key)
	}
	v.accepted.unproved = slices.DeleteFunc(v.accepted.unproved, func(x *inbound) bool { return x == in })
	connected := false
	for _, x := range v.accepted.inbounds {
		connected = connected || x.handshake.node == in.handshake.node && !x.failed.Load()
	}
	v.mu.Unlock()
	for _, p := range *v.tables.peers.Load() {
		p.inbound.CompareAndSwap(in, nil)
	}
	if p := (*v.tables.peers.Load())[in.handshake.node]; p != nil && !in.handshake.native {
		openPulls{p}.release(connected)
	}
	in.device.exclusive(func() {
		v.budget.slots.Each(func(l *receiveSlot) {
			if l.Owner == in && v.budget.slots.End(l) {
				slotSet{in}.freeSlot(l)
			}
		})
		for _, b := range in.slots.buffers {
			if b.region != nil {
				b.region.Release()
			}
		}
		in.slots.buffers = nil
	})
	in.device.dropIncomplete(in) // messages that were added after the first call
	for _, a := range areas {
		a.put()
	}
	if err := in.slots.cells.Close(); err != nil {
		v.log.Error("rdma: memory for metas stays registered", "peer", in.name(), "err", err)
	}
	if sends != nil {
		in.mu.Lock()
		all := sends.FinishAll()
		in.mu.Unlock()
		for i := range all {
			all[i].End()
		}
		_ = sends.Close()
	}
}

// linkInbounds assigns to each peer the connection that it has opened to this node.
func (v *rvan) linkInbounds() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.linkInboundsLocked()
}

func (v *rvan) linkInboundsLocked() {
	for id, p := range *v.tables.peers.Load() {
		var latest *inbound
		for _, in := range v.accepted.inbounds {
			if in.handshake.node == id && in.handshake.port == p.node.Port && !in.failed.Load() && !in.process.unlisted.Load() && !in.process.unproved.Load() && (latest == nil || int32(in.serial-latest.serial) > 0) {
				latest = in // the latest one: the end of an older one may not have been noticed yet
			}
		}
		if latest != nil && p.inbound.Swap(latest) != latest {
			p.hasConnected.Store(true)
			go v.notifyInbound(p, latest)
		}
	}
}

// fenceLocked ends the inbound connections of old's process, since p's process now has the node id. Later writes of the old process
// fail, and its slots are released. v.mu is held.
func (v *rvan) fenceLocked(id int, old, p *peer) {
	if failpoint.On("fencing") {
		return
	}
	if x := old.incarnation; x != 0 && p.incarnation != x {
		if p.incarnation != 0 && !slices.Contains(v.fences.replaced, x) {
			if len(v.fences.replaced) >= maxReplaced {
				v.fences.replaced = slices.Delete(v.fences.replaced, 0, maxReplaced/2)
			}
			v.fences.replaced = append(v.fences.replaced, x)
		}
	}
	// p's process may have been replaced before and has returned, possibly under another id.
	v.fences.replaced = slices.DeleteFunc(v.fences.replaced, func(x uint32) bool { return x == p.incarnation })
	for _, in := range v.accepted.inbounds {
		h := &in.handshake
		var fenced bool
		if h.incarnation != 0 {
			fenced = slices.Contains(v.fences.replaced, h.incarnation)
		} else {
			fenced = h.node == id && old.addr != p.addr && h.port == old.node.Port && (h.port != p.node.Port || in.from.Addr() != p.addr.Addr())
		}
		if fenced {
			in.fail(fmt.Errorf("%w: %s has been replaced by another process", van.ErrPeerLost, van.NodeName(id)))
		}
	}
}

// markUnlistedLocked marks the connections of processes that the node table does not name. Such a process may send control messages,
// which is how a replacement process registers. Its data gets no slot until it is in the table, so the data stays queued at the sender.
// Data that it writes to a slot granted before is dropped and counted. v.mu is held.
func (v *rvan) markUnlistedLocked() {
	for _, in := range v.accepted.inbounds {
		p := (*v.tables.peers.Load())[in.handshake.node]
		in.process.unlisted.Store(p != nil && p.incarnation != 0 && in.handshake.incarnation != 0 && p.incarnation != in.handshake.incarnation && !failpoint.On("fencing"))
	}
}
