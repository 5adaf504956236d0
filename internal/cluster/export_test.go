package cluster

import (
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// ConnectDue counts connections that are still to be made to node id.
func (n *Node) ConnectDue(id, more int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.addPendingConnect(id, more)
}

// PeerChanged is what the transport calls.
func (n *Node) PeerChanged(id int, up bool, cause error) { n.peerChanged(id, up, cause) }

// Lost is why node id is away, nil when it is not.
func (n *Node) Lost(id int) error { return n.processes.lost(id) }

// SetNext makes ts the next timestamp of c.
func (c *Customer) SetNext(ts int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.base, c.next, c.wrapped = min(c.base, ts), ts, false
}

// Places is the size of c's table of requests in flight.
func (c *Customer) Places() int { return len(*c.table.Load()) }

// NoteProcess notes that record's process has id.
func (n *Node) NoteProcess(id int, record *van.Node) { n.members.noteProcess(id, record, true) }

// Held counts the messages of processes that the table does not have.
func (n *Node) Held() (count int) {
	n.strangers.mu.Lock()
	defer n.strangers.mu.Unlock()
	for _, v := range n.strangers.held {
		count += len(v.queue)
	}
	return count
}

// HeldNotices counts what processes have given up that the table does not have.
func (n *Node) HeldNotices() int {
	n.strangers.mu.Lock()
	defer n.strangers.mu.Unlock()
	return len(n.strangers.givenUp)
}

// SetLost makes node id be considered dead because of cause, or not with nil.
func (n *Node) SetLost(id int, cause error) { n.processes.setLost(id, cause) }

// SetStartTimeout changes how long requests for applications that are not made are kept.
func (n *Node) SetStartTimeout(d time.Duration) { n.cfg.StartTimeout = d }

// Withdraw tells a server that a request is given up.
func (n *Node) Withdraw(id, app int, w Withdrawn) { n.notices.withdraw(id, app, w) }

// HeldQueues counts the senders of which Held counts messages.
func (n *Node) HeldQueues() int {
	n.strangers.mu.Lock()
	defer n.strangers.mu.Unlock()
	return len(n.strangers.held)
}

// Receive is what the transport calls with each message.
func (n *Node) Receive(m *van.Message) { n.receive(m) }

// Incarnation is that of this process; see van.NodeExtension.
func (n *Node) Incarnation() uint32 { return n.incarnation }

// Epoch counts the processes that have had node id, as far as n knows.
func (n *Node) Epoch(id int) uint32 { return n.processes.of(id).epoch }

// Answer is an answer of node from to timestamp ts of c.
func (c *Customer) Answer(from int, ts int32) error {
	msg := &van.Message{}
	msg.Reset()
	msg.Sender, msg.Timestamp = from, ts
	r := c.lookup(ts)
	if r == nil {
		return ErrLate
	}
	return r.answer(msg)
}

// ErrLate is what answers to requests get that are not in flight.
var ErrLate = errLate

// FailPeer fails the request of ts if node id owes an answer to it.
func (c *Customer) FailPeer(id int, ts int32, cause error) {
	if r := c.lookup(ts); r != nil {
		r.failPeer(id, cause)
	}
}

// InUse is what c counts as in flight.
func (c *Customer) InUse() (timestamps, requests, places int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range *c.table.Load() {
		if (*c.table.Load())[i].Load() != nil {
			places++
		}
	}
	return c.inUse, len(c.live), places
}

// Addr is the node's address.
func (n *Node) Addr() string { return n.self.Addr() }
