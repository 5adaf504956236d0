package postoffice

// Runs the membership machine: feeds it messages and time, carries out its outputs, and
// routes data messages.

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// step gives the machine an input and carries out its outputs in order. If outputs are
// being carried out already, by another goroutine or by a caller of step further up, the
// new ones are left to it.
func (n *Node) step(input func(time.Duration)) {
	n.mu.Lock()
	input(now())
	outs := n.machine.Take()
	n.noteProcesses(outs)
	n.noteLosses(outs)
	for _, o := range outs {
		if c, ok := o.(membership.Connect); ok {
			n.connectDue(c.ID, 1)
		}
	}
	n.outputs = append(n.outputs, outs...)
	if n.draining {
		n.mu.Unlock()
		return
	}
	n.draining = true
	for len(n.outputs) > 0 {
		outs := n.outputs
		n.outputs = nil
		n.mu.Unlock()
		for _, o := range outs {
			n.dispatch(o)
		}
		n.mu.Lock()
	}
	n.draining = false
	n.mu.Unlock()
	select {
	case n.rearm <- struct{}{}:
	default:
	}
}

// connectDue counts the Connect outputs that are not carried out yet. n.mu is held.
func (c *control) connectDue(id, more int) {
	if c.due == nil {
		c.due = map[int]int{}
	}
	if c.due[id] += more; c.due[id] == 0 {
		delete(c.due, id)
	}
}

// noteLosses updates the table of lost peers before the outputs are carried out, so that
// it always agrees with DeadNodes. n.mu is held.
func (t *peerTable) noteLosses(outs []membership.Output) {
	for _, o := range outs {
		switch o := o.(type) {
		case membership.PeerDead:
			t.setLost(o.ID, o.Cause)
		case membership.PeerAlive:
			t.setLost(o.ID, nil)
		} // PeerReplaced clears it when carried out: nothing can be sent before Connect
	}
}

// tick steps the machine at the times that it asks for.
func (n *Node) tick() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		n.mu.Lock()
		at, wanted := n.machine.NextTick()
		n.mu.Unlock()
		if wanted {
			timer.Reset(max(at-now(), 0))
		} else {
			timer.Stop()
		}
		select {
		case <-timer.C:
			n.step(n.machine.Tick)
		case <-n.rearm:
		case <-n.stop:
			return
		}
	}
}

// peerChanged is called by the transport.
func (n *Node) peerChanged(id int, up bool, cause error) {
	n.step(func(t time.Duration) {
		switch {
		case up:
			n.machine.PeerBack(t, id)
		case id == van.SchedulerID && !n.machine.Ready() && errors.Is(cause, syscall.ECONNREFUSED):
			// The scheduler does not listen yet. All other known peers listen.
		case n.due[id] > 0:
			// The lost connection is that of the process that had the id before: this
			// one's has not been made yet.
		default:
			n.machine.PeerLost(t, id, cause)
		}
	})
}

// carryOut carries out one output of the machine.
func (n *Node) carryOut(o membership.Output) {
	switch o := o.(type) {
	case membership.Send:
		n.sendControl(o)
	case membership.Connect:
		n.mu.Lock()
		n.connectDue(o.ID, -1)
		n.mu.Unlock()
		n.peers.Store(o.ID, o.Node.Addr())
		if err := n.van.Connect(context.Background(), o.ID, o.Node); err != nil {
			if k, show := n.Rarely("connect: " + logx.Kind(err)); show {
				n.log.Error("connect failed", "peer", n.PeerName(o.ID), "err", err, "so far", k)
			}
			n.step(func(t time.Duration) { n.machine.ConnectFailed(t, o.ID, err) })
		}
	case membership.Disconnect:
		n.van.Disconnect(o.ID)
		n.peers.Delete(o.ID)
	case membership.Rename:
		if addr, ok := n.peers.LoadAndDelete(o.Old); ok {
			n.peers.Store(o.New, addr)
		}
		if err := n.van.Rename(o.Old, o.New); err != nil {
			n.log.Error("rename failed", "peer", n.PeerName(o.New), "err", err)
		}
	case membership.SetID:
		n.van.SetID(o.ID)
	case membership.Assigned:
		n.id.Store(int32(o.ID))
		n.setName(van.NodeName(o.ID))
		n.log.Info("joined", "as", van.NodeName(o.ID), "recovery", o.Recovery)
	case membership.Ready:
		n.stack.Enable()
		n.log.Info("all nodes are known")
		close(n.ready)
	case membership.Waiting:
		n.log.Warn("waiting to start: " + o.Report.String())
	case membership.BarrierDone:
		n.endBarrier(o.Ticket, nil)
	case membership.BarrierFailed:
		n.endBarrier(o.Ticket, o.Err)
	case membership.PeerDead:
		n.log.Warn("peer lost", "peer", n.PeerName(o.ID), "cause", o.Cause)
		n.apps.peerLost(o.ID, o.Cause)
		n.notify(o.ID, false, o.Cause)
	case membership.PeerAlive:
		n.log.Warn("peer is back", "peer", n.PeerName(o.ID))
		n.resendNotices(o.ID)
		n.notify(o.ID, true, nil)
		n.admit(o.ID)
	case membership.PeerReplaced:
		// The new process does not answer requests to the former one.
		cause := n.lost(o.ID)
		if cause == nil {
			cause = errReplaced
			n.apps.peerLost(o.ID, cause)
			n.notify(o.ID, false, cause)
		}
		n.mu.Lock()
		if !slices.Contains(n.machine.DeadNodes(now(), 0), o.ID) { // the new one may be lost already
			n.setLost(o.ID, nil)
		}
		n.mu.Unlock()
		n.log.Warn("peer replaced", "peer", n.PeerName(o.ID))
		n.notify(o.ID, true, nil)
		if a, ok := van.As[van.Admitter](n.van); ok {
			a.Admit(o.ID)
		}
		n.admit(o.ID)
	case membership.Failed:
		n.fail(o.Err)
	case membership.Warning:
		if k, show := n.Rarely("machine: " + logx.Kind(errors.New(o.Text))); show {
			n.log.Warn(o.Text, "so far", k)
		}
	}
}

func (n *Node) sendControl(o membership.Send) {
	if o.To == int(n.id.Load()) {
		n.step(func(t time.Duration) {
			if err := n.machine.Step(t, o.To, &o.Meta); err != nil {
				n.log.Error("own message refused", "err", err)
			}
		})
		return
	}
	msg := &van.Message{Meta: o.Meta, Sender: int(n.id.Load()), Receiver: o.To}
	n.logMessage("send", o.To, &msg.Meta)
	if err := n.van.Send(msg); err != nil {
		if k, show := n.Rarely("not sent: " + logx.Kind(err)); show {
			n.log.Warn("control message not sent", "err", err, "so far", k)
		}
	}
}

func (c *control) endBarrier(ticket int, err error) {
	c.mu.Lock()
	done := c.waiters[ticket]
	delete(c.waiters, ticket)
	c.mu.Unlock()
	if done != nil {
		done <- err
	}
}

// fail makes the node unusable, with err as the reason.
func (n *Node) fail(err error) {
	n.mu.Lock()
	select {
	case <-n.failed:
		n.mu.Unlock()
		return
	default:
	}
	n.err = err
	close(n.failed)
	n.mu.Unlock()
	n.log.Error("node failed", "err", err)
	n.apps.abort(err)
}

// lost returns why node id is considered dead, or nil.
func (t *peerTable) lost(id int) error { return t.processes.of(id).lost }

func (t *peerTable) setLost(id int, cause error) {
	t.lostMu.Lock()
	defer t.lostMu.Unlock()
	t.processes.change(id, func(p *process) { p.lost, p.lostEpoch = cause, p.epoch })
}

// OnPeer makes the node call f when a peer is lost (up false, with the cause) and when
// it or its replacement is back (up true). f must not block, but may close the node. The
// returned function removes f.
func (n *Node) OnPeer(f func(id int, up bool, cause error)) (stop func()) {
	w := &watcher{f}
	n.lostMu.Lock()
	defer n.lostMu.Unlock()
	n.watchers = append(append([]*watcher(nil), n.watchers...), w)
	return func() {
		n.lostMu.Lock()
		defer n.lostMu.Unlock()
		var rest []*watcher
		for _, x := range n.watchers {
			if x != w {
				rest = append(rest, x)
			}
		}
		n.watchers = rest
	}
}

func (t *peerTable) notify(id int, up bool, cause error) {
	t.lostMu.Lock()
	watchers := t.watchers
	t.lostMu.Unlock()
	for _, w := range watchers {
		w.f(id, up, cause)
	}
}

// receive handles every message from the van.
func (n *Node) receive(msg *van.Message) {
	n.logMessage("recv", msg.Sender, &msg.Meta)
	if msg.IsControl() {
		n.receiveControl(msg)
		return
	}
	p := n.processes.of(msg.Sender)
	switch n.judge(msg, p) {
	case discard:
		n.dropStale(msg, p)
		return
	case holdBack:
		if n.hold(msg) {
			return
		}
		p = n.processes.of(msg.Sender)
	}
	n.deliver(msg, p)
}

func (n *Node) receiveControl(msg *van.Message) {
	if n.withdrawn(msg) {
		return
	}
	n.step(func(t time.Duration) {
		if err := n.machine.Step(t, msg.Sender, &msg.Meta); err != nil {
			if k, show := n.Rarely("control: " + logx.Kind(err)); show {
				n.log.Warn("dropped a control message", "err", err, "so far", k)
			}
		}
	})
}

// deliver hands a data message of p to its application.
func (n *Node) deliver(msg *van.Message, p *process) {
	msg.Epoch = p.epoch
	if p.incarnation != 0 {
		msg.RequestTrace.PreStart = 0 // it holds the incarnations, not a time
	}
	n.profile.received(&msg.Meta)
	n.apps.deliver(n, msg)
}

// Send stamps and sends a data message. Errors name the peer. An answer to a process that
// has been replaced fails with van.ErrPeerLost.
func (n *Node) Send(msg *van.Message) error {
	t := clock.Now()
	if msg.Request {
		msg.RequestTrace = van.Trace{Start: t}
	} else {
		msg.ResponseTrace.Start = t
	}
	n.logMessage("send", msg.Receiver, &msg.Meta)
	if msg.Receiver == int(n.id.Load()) {
		n.apps.loop(n, msg)
		return nil
	}
	p := n.processes.of(msg.Receiver)
	cause := p.lost
	if cause == nil {
		cause = n.answerTo(msg, p)
	}
	if cause != nil {
		return &van.Error{Op: "send", Node: n.Name(), Peer: n.PeerName(msg.Receiver), Detail: msg.Meta.String(), Err: cause}
	}
	n.stamp(&msg.Meta, p)
	return n.van.Send(msg)
}

// Poll receives on the caller's goroutine, if the van can, until done returns true or
// nothing has come for a short time. Handlers run on it, too, so they must never block.
func (n *Node) Poll(done func() bool) { n.stack.Poll(done) }

// Flush sends messages to node id that the van holds because of More.
func (n *Node) Flush(id int) {
	if n.flusher != nil {
		n.flusher.Flush(id)
	}
}

// logMessage writes a line for one message at PS_VERBOSE=2.
func (n *Node) logMessage(way string, peer int, m *van.Meta) {
	if !n.debug {
		return
	}
	n.log.LogAttrs(context.Background(), slog.LevelDebug, way, slog.String("peer", van.NodeName(peer)), slog.String("message", m.String()))
}
