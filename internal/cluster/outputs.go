package cluster

// Performs the outputs of the membership machine.

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// perform performs one output of the machine.
func (n *Node) perform(o membership.Output) {
	switch o := o.(type) {
	case membership.Send:
		n.sendControl(o)
	case membership.Connect:
		n.control.mu.Lock()
		n.control.addPendingConnect(o.ID, -1)
		n.control.mu.Unlock()
		n.peers.Store(o.ID, addressOf(&o.Node))
		n.peersChanged()
		if err := limits.Explain(n.transport.van.Connect(context.Background(), o.ID, o.Node)); err != nil {
			n.rarely("connect: "+logx.Kind(err)).Error("connect failed", "peer", n.peerName(o.ID), "err", err)
			n.control.step(func(t time.Duration) {
				if n.control.pendingConnects[o.ID] == 0 { // otherwise another process has the id now
					n.control.machine.ConnectFailed(t, o.ID, err)
				}
			})
		}
		n.pending.connected(o.ID, &o.Node)
	case membership.Disconnect:
		n.transport.van.Disconnect(o.ID)
		n.peers.Delete(o.ID)
		n.peersChanged()
	case membership.Rename:
		if addr, ok := n.peers.LoadAndDelete(o.Old); ok {
			n.peers.Store(o.New, addr)
		}
		if err := n.transport.van.Rename(o.Old, o.New); err != nil {
			n.log.Error("rename failed", "peer", n.peerName(o.New), "err", err)
		}
		n.pending.connected(o.New, nil)
	case membership.Probe:
		go n.probes.probe(o.Node, n.self.Hostname, func(from string, err error) {
			n.control.step(func(t time.Duration) { n.control.machine.Probed(t, &o.Node, from, err) })
		})
	case membership.Reply:
		n.probes.reply(o, int(n.id.Load()))
	case membership.SetID:
		n.transport.van.SetID(o.ID)
	case membership.Assigned:
		n.id.Store(int32(o.ID))
		n.setName(van.NodeName(o.ID))
		n.log.Info("joined", "as", van.NodeName(o.ID), "recovery", o.Recovery)
	case membership.Ready:
		n.transport.stack.Enable()
		n.log.Info("all nodes are known")
		close(n.lifetime.ready)
	case membership.Waiting:
		n.log.Warn("waiting to start: " + o.Report.String())
	case membership.BarrierDone:
		n.control.barrierEnded(o.Barrier, nil)
	case membership.BarrierFailed:
		n.control.barrierEnded(o.Barrier, o.Err)
	case membership.PeerDead:
		n.log.Warn("peer lost", "peer", n.peerName(o.ID), "cause", o.Cause)
		n.apps.peerLost(o.ID, o.Cause, n.processes.of(o.ID).lostAt) // if the peer is back already, later requests do not fail
		n.watchers.notify(o.ID, false, o.Cause)
	case membership.PeerAlive:
		n.log.Warn("peer is back", "peer", n.peerName(o.ID))
		n.notices.resend(o.ID)
		if n.ending.concerns(o.ID) {
			go n.notifyServers([]int{o.ID})
		}
		n.watchers.notify(o.ID, true, nil)
		n.pending.alive(o.ID)
	case membership.PeerReplaced:
		n.peerReplaced(o.ID, &o.Node)
	case membership.Policies:
		states := n.applyPolicies(o.List)
		n.control.step(func(t time.Duration) { n.control.machine.PoliciesAre(t, o.Version, states) })
	case membership.Failed:
		n.fail(o.Err)
	case membership.Warning:
		n.rarely("machine: " + logx.PeerKind(errors.New(o.Text))).Warn(o.Text)
	}
}

// peerReplaced handles a new process of a peer, whose record is record: requests to the earlier process fail, and messages of
// the new one are delivered.
func (n *Node) peerReplaced(id int, record *van.Node) {
	// The new process does not answer requests to the earlier one.
	if n.processes.lost(id) == nil {
		n.apps.peerLost(id, errReplaced, math.MaxUint64)
		n.watchers.notify(id, false, errReplaced)
	}
	if !n.processes.has(id, record) { // a later PeerReplaced follows
		return
	}
	n.control.mu.Lock()
	if !slices.Contains(n.control.machine.DeadNodes(now(), 0), id) { // the new process may be lost already
		n.processes.setLost(id, nil)
	}
	n.control.mu.Unlock()
	n.log.Warn("peer replaced", "peer", n.peerName(id))
	n.watchers.notify(id, true, nil)
	if a, ok := van.As[van.Admitter](n.transport.van); ok {
		a.Admit(id)
	}
	n.pending.deliverPending(id)
}

func (n *Node) sendControl(o membership.Send) {
	if o.To == int(n.id.Load()) {
		n.control.step(func(t time.Duration) {
			if err := n.control.machine.Step(t, o.To, &o.Meta); err != nil {
				n.log.Error("own message refused", "err", err)
			}
		})
		return
	}
	msg := &van.Message{Meta: o.Meta, Sender: int(n.id.Load()), Receiver: o.To}
	n.logMessage("send", o.To, &msg.Meta)
	if err := n.transport.van.Send(msg); err != nil {
		n.rarely("not sent: "+logx.Kind(err)).Warn("control message not sent", "err", err)
	}
}

// fail makes the node unusable, with err as the reason.
func (n *Node) fail(err error) {
	n.control.mu.Lock()
	usable := n.lifetime.end(err)
	n.control.mu.Unlock()
	if usable {
		n.log.Error("node failed", "err", err)
		n.apps.failAll(err)
	}
}
