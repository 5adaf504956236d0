package fakeverbs

// This file owns the operations of IDs from Connect to Destroy.

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

func padded(private []byte, n int) []byte {
	p := make([]byte, n)
	copy(p, private)
	return p
}

// ready checks the requirements of Connect and Accept.
func (id *connID) ready(op string, p verbs.ConnParam, private int) error {
	switch {
	case id.qp == nil:
		return id.fault(op, syscall.EINVAL, "it has no queue pair")
	case len(p.Private) > private:
		return id.fault(op, syscall.EINVAL, fmt.Sprintf("%d bytes of private data, want up to %d", len(p.Private), private))
	case p.RetryCount < 0 || p.RetryCount > 7 || p.RNRRetryCount < 0 || p.RNRRetryCount > 7:
		return id.fault(op, syscall.EINVAL, fmt.Sprintf("retry counts %d and %d, want 0 to 7", p.RetryCount, p.RNRRetryCount))
	}
	return nil
}

func (id *connID) Connect(p verbs.ConnParam) error {
	err := id.begin(Op{Kind: OpConnect}, routeResolved)
	n := id.net
	defer n.mu.Unlock()
	if status, ok := err.(EventError); ok {
		if status > 0 {
			id.rejected(int(status), nil)
		} else {
			id.fail(verbs.Unreachable, int(status))
		}
		return nil
	}
	if err != nil {
		return err
	}
	if err := id.ready("connect", p, verbs.MaxConnectData); err != nil {
		return err
	}
	p.Private = slices.Clone(p.Private)
	id.param, id.active, id.state = p, true, connecting
	n.trace.cm(id, EventConnect, &p)
	id.stack.toPeers(func() {
		switch {
		case id.removed || id.state != connecting:
		case n.cuts.has(id.local.Addr(), id.remote.Addr()):
			id.failAfterTimeout(connecting)
		default:
			id.request()
		}
	})
	return nil
}

// failAfterTimeout makes id fail with Unreachable after Config.Unreachable if it is still in state at.
func (id *connID) failAfterTimeout(at idState) {
	id.net.schedule.after(id.net.cfg.Unreachable, func() {
		if id.state == at && !id.removed {
			id.fail(verbs.Unreachable, timedOut)
		}
	})
}

// request delivers id's connect request to its listener.
func (id *connID) request() {
	n := id.net
	h := n.hosts[id.remote.Addr()]
	l := h.ports[id.remote.Port()]
	switch {
	case n.rejects > 0:
		n.rejects--
		id.rejected(n.reason, nil)
		return
	case l == nil || l.state != listening || h.absent || l.ch.ended():
		id.rejected(statusNoListener, nil)
		return
	case l.waiting >= l.backlog:
		id.rejected(statusConsumer, nil)
		return
	}
	d, err := l.ch.device(h)
	if err != nil {
		id.rejected(statusNoListener, nil)
		return
	}
	to := l.ch.newID(0)
	to.state, to.local, to.remote, to.dev = requested, id.remote, id.local, d
	to.peer, id.peer = id, to
	to.unread = true
	l.waiting++
	l.ch.push(l, verbs.Event{Type: verbs.ConnectRequest, New: to, Private: padded(id.param.Private, verbs.MaxConnectData),
		Peer: id.local}, func() { to.unread = false; l.waiting-- }, func() { to.destroy(!l.stack.dead) })
}

func (id *connID) rejected(status int, private []byte) {
	id.state = failed
	id.ch.push(id, verbs.Event{Type: verbs.Rejected, Status: status, Private: padded(private, verbs.MaxRejectData)}, nil, nil)
}

func (id *connID) Accept(p verbs.ConnParam) error {
	err := id.begin(Op{Kind: OpAccept}, requested)
	n := id.net
	defer n.mu.Unlock()
	if err != nil {
		return err
	}
	if err := id.ready("accept", p, verbs.MaxAcceptData); err != nil {
		return err
	}
	p.Private = slices.Clone(p.Private)
	to := id.peer
	id.param, id.state = p, accepting
	n.trace.cm(id, EventAccept, &p)
	// The retry counts of one side are the parameters of the other.
	id.qp.start(to.qp, to.param)
	id.stack.toPeers(func() {
		if n.cuts.has(id.local.Addr(), id.remote.Addr()) {
			id.failAfterTimeout(accepting)
			to.failAfterTimeout(connecting)
			return
		}
		to.ch.push(to, verbs.Event{Type: verbs.Established, Private: padded(p.Private, verbs.MaxAcceptData)}, func() { to.establish(id) }, nil)
	})
	return nil
}

// establish is called when the connector has read the Established event: its queue pair works from then on, and the acceptor is notified.
func (id *connID) establish(to *connID) {
	if id.state == connecting {
		id.state = connected
	}
	if id.qp.state == qpInit {
		p := to.param
		p.RetryCount = id.param.RetryCount
		id.qp.start(to.qp, p)
	}
	if to.state == accepting && !to.removed {
		if id.net.cuts.has(id.local.Addr(), to.local.Addr()) {
			to.failAfterTimeout(accepting)
		} else {
			to.state = connected
			to.ch.push(to, verbs.Event{Type: verbs.Established}, nil, nil)
		}
	}
	to.qp.run()
}

// Reject rejects a connect request or, called by the connector, an acceptance.
func (id *connID) Reject(private []byte) error {
	err := id.begin(Op{Kind: OpReject}, requested, connecting)
	n := id.net
	defer n.mu.Unlock()
	if err != nil {
		return err
	}
	if id.state == connecting && (id.peer == nil || id.peer.state != accepting) {
		return id.fault("reject", syscall.EINVAL, "its state, want an answer to it")
	}
	if len(private) > verbs.MaxRejectData {
		return id.fault("reject", syscall.EINVAL, fmt.Sprintf("%d bytes of private data, want up to %d", len(private), verbs.MaxRejectData))
	}
	id.state = failed
	n.trace.cm(id, EventReject, &verbs.ConnParam{Private: private})
	id.stack.toPeers(func() {
		if n.cuts.has(id.local.Addr(), id.remote.Addr()) {
			id.peer.failAfterTimeout(id.peer.state)
		} else {
			id.peer.rejected(statusConsumer, private)
		}
	})
	return nil
}

func (id *connID) Disconnect() error {
	err := id.begin(Op{Kind: OpDisconnect})
	n := id.net
	defer n.mu.Unlock()
	if err != nil {
		return err
	}
	if id.qp != nil {
		id.qp.breakDown()
	}
	switch id.state {
	case accepting, connected, disconnected:
	default:
		return id.fault("disconnect", syscall.EINVAL, "its state, want a connection")
	}
	n.trace.cm(id, EventDisconnect, nil)
	id.disconnect(true)
	return nil
}

// disconnect notifies the peer if tell is set and the peer can be reached. A peer that is disconnecting itself is notified that it has ended.
// If the peer does not answer, id is notified after Config.Unreachable.
func (id *connID) disconnect(tell bool) {
	n := id.net
	id.state = disconnected
	id.stack.toPeers(func() {
		p := id.peer
		reached := !p.removed && !p.ch.ended() && !n.cuts.has(id.local.Addr(), id.remote.Addr())
		if !reached || p.stack.stopped {
			n.schedule.after(n.cfg.Unreachable, func() { id.notifyDisconnected() })
		}
		if tell && reached {
			p.notifyDisconnected()
		}
	})
}

func (id *connID) notifyDisconnected() {
	if !id.notified {
		id.notified = true
		id.state = disconnected
		id.ch.push(id, verbs.Event{Type: verbs.Disconnected}, nil, nil)
	}
}

func (id *connID) Destroy() error {
	n := id.net
	if err := id.stack.hook(Op{Kind: OpDestroy}); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if id.stack.ended() {
		id.removed = true
		return nil
	}
	if id.removed {
		return id.fault("destroy", verbs.ErrClosed, "its use")
	}
	id.destroy(true)
	return nil
}

// destroy ends id. If tell is set, its peer gets the notifications that the kernel would send.
func (id *connID) destroy(tell bool) {
	if id.removed {
		return
	}
	switch id.state {
	case listening:
		for _, q := range id.ch.queue.All() {
			if q.id == id && q.Type == verbs.ConnectRequest {
				q.New.(*connID).destroy(tell)
			}
		}
	case connecting, requested, accepting, connected, disconnected:
		state := id.state
		id.stack.toPeers(func() { id.destroyed(state, tell) })
	}
	id.removed = true
	for _, h := range id.at {
		if h.ports[id.local.Port()] == id {
			delete(h.ports, id.local.Port())
		}
	}
	delete(id.ch.ids, id)
	if q := id.qp; q != nil {
		q.end()
	}
}

// destroyed notifies the peer of id, which was in this state when it was destroyed.
func (id *connID) destroyed(state idState, tell bool) {
	p := id.peer
	tell = tell && (p == nil || !id.net.cuts.has(id.local.Addr(), id.remote.Addr()))
	switch state {
	case connecting:
		switch {
		case p == nil || p.removed:
		case p.state == accepting && tell:
			p.rejected(statusConsumer, nil)
		case p.state == accepting:
			p.failAfterTimeout(accepting)
		case p.state == requested && tell:
			p.rejected(statusTimeout, nil)
		}
	case requested:
		if !p.removed && p.state == connecting {
			if tell {
				p.rejected(statusConsumer, nil)
			} else {
				p.failAfterTimeout(connecting)
			}
		}
	default:
		id.disconnect(tell)
	}
}
