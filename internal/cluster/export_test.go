package cluster

import (
	"math"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// AddPendingConnect counts Connect outputs for node id that are not performed yet.
func (n *Node) AddPendingConnect(id, more int) {
	n.control.mu.Lock()
	defer n.control.mu.Unlock()
	n.control.addPendingConnect(id, more)
}

// PeerChanged is called by the transport.
func (n *Node) PeerChanged(id int, up bool, cause error) { n.control.peerChanged(id, up, cause) }

// DataAddr returns the address of node id's data port, "" if it has none.
func (n *Node) DataAddr(id int) string {
	at, _ := n.peers.Load(id)
	addr, _ := at.(peerAddress)
	return addr.data
}

// Lost returns the reason why node id is considered dead, or nil.
func (n *Node) Lost(id int) error { return n.processes.lost(id) }

// SetNext makes ts the next timestamp of c.
func (c *Customer) SetNext(ts int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.base, c.next, c.wrapped = min(c.base, ts), ts, false
}

// TableSize is the size of c's table of requests in flight.
func (c *Customer) TableSize() int { return len(*c.table.Load()) }

// SetProcess enters the record of the process that has id, as if this node had a connection to it.
func (n *Node) SetProcess(id int, record *van.Node) {
	n.AddProcess(id, record)
	n.pending.connected(id, record)
}

// AddProcess enters the record of the process that has id. This node has no connection to it.
func (n *Node) AddProcess(id int, record *van.Node) { n.control.members.setProcess(id, record, true) }

// QueuedRequests counts the requests for applications that do not exist yet.
func (n *Node) QueuedRequests() int {
	n.apps.mu.Lock()
	defer n.apps.mu.Unlock()
	return n.apps.messages
}

// PendingMessages counts the messages of processes that the table does not have.
func (n *Node) PendingMessages() (count int) {
	n.pending.mu.Lock()
	defer n.pending.mu.Unlock()
	for _, v := range n.pending.senders {
		count += v.messages
	}
	return count
}

// PendingCancels counts the cancellations of processes that the table does not have.
func (n *Node) PendingCancels() int {
	n.pending.mu.Lock()
	defer n.pending.mu.Unlock()
	return len(n.pending.cancellations)
}

// EndingCall is the call in which this node's program waits at its end, "" if none.
func (n *Node) EndingCall() string {
	n.ending.mu.Lock()
	defer n.ending.mu.Unlock()
	return n.ending.call
}

// EndingCalls counts the calls in which it waits.
func (n *Node) EndingCalls() int {
	n.ending.mu.Lock()
	defer n.ending.mu.Unlock()
	return n.ending.waiting
}

// Refuses returns the call in which the node's program waits for its end, and because of which the node refuses requests for applications
// that it does not have. It is "" if the node refuses none.
func (n *Node) Refuses() string {
	n.apps.mu.Lock()
	defer n.apps.mu.Unlock()
	return n.apps.endingCall
}

// BeginEnding calls the function before, and then makes call wait as startEnding does. No other call can change the refusal meanwhile.
func (n *Node) BeginEnding(call string, before func()) {
	n.apps.mu.Lock()
	defer n.apps.mu.Unlock()
	before()
	n.ending.begin(call)
	n.apps.endingCall = call
}

// SetLost makes node id considered dead because of cause, or alive with nil.
func (n *Node) SetLost(id int, cause error) { n.processes.setLost(id, cause) }

// SetStartTimeout changes the time for which requests for applications that do not exist yet are queued.
func (n *Node) SetStartTimeout(d time.Duration) { n.cfg.StartTimeout = d }

// CancelAt notifies a server that a request is canceled.
func (n *Node) CancelAt(id, app int, w Canceled) { n.notices.cancel(id, app, w) }

// PendingQueues counts the senders of the messages that PendingMessages counts.
func (n *Node) PendingQueues() int {
	n.pending.mu.Lock()
	defer n.pending.mu.Unlock()
	return len(n.pending.senders)
}

// Receive is called by the transport with each message.
func (n *Node) Receive(m *van.Message) { n.receive(m) }

// Incarnation is that of this process; see van.NodeExtension.
func (n *Node) Incarnation() uint32 { return n.incarnation }

// Epoch counts the processes that have had node id, as far as n knows.
func (n *Node) Epoch(id int) uint32 { return n.processes.of(id).epoch }

// Answer passes an answer of node from to timestamp ts of c.
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

// ErrLate is the error of answers to requests that are not in flight.
var ErrLate = errLate

// FailPeer fails the request of ts if node id owes an answer to it.
func (c *Customer) FailPeer(id int, ts int32, cause error) {
	if r := c.lookup(ts); r != nil {
		r.failPeer(id, cause, math.MaxUint64)
	}
}

// InUse counts the timestamps and requests in flight, and the table's used slots.
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

// BindHint is the hint of an error of Bind.
var BindHint = bindHint
