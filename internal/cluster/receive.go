package cluster

// The messages of a node, in and out.

import (
	"errors"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// receive handles every message from the van.
func (n *Node) receive(msg *van.Message) {
	n.logMessage("recv", msg.Sender, &msg.Meta)
	if msg.IsControl() {
		if !n.pending.handleCancel(msg) && !n.apps.refused(msg) {
			n.control.receive(msg)
		}
		return
	}
	p := n.processes.of(msg.Sender)
	if p.lost != nil && p.original() {
		// The machine is notified before the application gets the message: the application may answer at once, and
		// the process waits for the answer.
		n.control.step(func(t time.Duration) { n.control.machine.DataFrom(t, msg.Sender) })
		p = n.processes.of(msg.Sender)
	}
	switch n.processes.check(msg, p) {
	case drop:
		n.processes.logDropped(msg, p)
		return
	case postpone:
		if p = n.pending.enqueue(msg); p == nil {
			return
		}
	}
	n.apps.receive(msg, p)
}

// resendFailed is called with a message that was resent without an acknowledgement until its limit.
func (n *Node) resendFailed(peer int, meta *van.Meta, err error) {
	n.rarely("a message was not acknowledged").Warn("a message was not acknowledged", "peer", n.peerName(peer), "message", meta, "err", err)
	if !meta.IsControl() && meta.Request {
		n.apps.failRequest(meta, peer, err)
	}
}

// Send stamps and sends a data message. Errors name the peer. An answer to a process that
// has been replaced fails with van.ErrPeerLost.
func (a App) Send(msg *van.Message) error {
	n := a.Node
	t := clock.Now()
	if msg.Request {
		msg.RequestTrace = van.Trace{Start: t}
	} else {
		msg.ResponseTrace.Start = t
	}
	n.logMessage("send", msg.Receiver, &msg.Meta)
	if msg.Receiver == int(n.id.Load()) {
		n.apps.deliverToSelf(msg)
		return nil
	}
	p := n.processes.of(msg.Receiver)
	refuse := func(cause error) error {
		return &van.Error{Op: "send", Node: n.Name(), Peer: n.peerName(msg.Receiver), Detail: msg.Meta.String(), Err: cause}
	}
	if p.lost != nil && (msg.Request || !p.original()) {
		return refuse(p.lost)
	}
	if cause := n.processes.checkAnswer(msg, p); cause != nil {
		return refuse(cause)
	}
	n.processes.tag(&msg.Meta, p)
	err := n.transport.van.Send(msg)
	if err != nil && p.lost != nil { // the message is an answer to a C++ StepMesh process; if that was only paused, it waits for the answer
		return refuse(errors.Join(p.lost, err))
	}
	return err
}
