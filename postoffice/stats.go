package postoffice

// The snapshot of a node.

import (
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Stats is a snapshot of a node. Its counters begin when the node is made. A dropped or refused message is counted once. Bytes
// are those that count against budgets: of values and bodies, and 512 for each message.
type Stats struct {
	Apps  []AppStats  // by AppID and CustomerID
	Peers []PeerStats // workers by rank, servers by rank, the scheduler

	QueuedRequests, QueuedBytes   int // for applications that this node has not made yet
	PendingMessages, PendingBytes int // of unknown processes, which may become members

	Transport van.Stats // messages, bytes, pauses and refusals of all transports together

	StrangerMessages, StrangerBytes uint64 // of unknown processes, dropped: STEPAF_STRANGER_BUDGET, or no member after 10 s
	EarlyRequests, EarlyBytes       uint64 // for applications that are not made, dropped: STEPAF_RECV_BUDGET, STEPAF_STRANGER_BUDGET, STEPAF_START_TIMEOUT
	RefusedRequests                 uint64 // refused by their application with ErrQueueFull, such as batches that do not end: STEPAF_RECV_BUDGET_PEER
	InvalidRequests                 uint64 // refused by their application with ErrInvalid, such as batches that are too long: STEPAF_RECV_BUDGET
	PausedReads                     uint64 // times that a peer was not read until its application had taken some messages: STEPAF_RECV_BUDGET_PEER
	FencedMessages                  uint64 // dropped: from or for a process that was replaced
	LateAnswers                     uint64 // dropped: to requests that had ended, second ones, or malformed ones; includes Transport.LateAnswers
}

// AppStats describes one application of a node: a worker or server of af or kv, a SimpleApp, a communicator, a session.
type AppStats struct {
	AppID, CustomerID int
	InFlight          int // requests to other nodes that are not finished, or not waited for; of those without a Wait, the latest 4096 count
	Accepted          int // requests of other nodes that are neither answered nor refused
	Handlers          int // handlers that run at present
}

// PeerStats describes one other node of the cluster.
type PeerStats struct {
	ID     NodeID
	Lost   error         // why the peer is considered lost; nil while it is alive
	Silent time.Duration // since its last message; 0 on nodes that its heartbeats do not go to: they go to the scheduler, and the scheduler's to all
	Path   Path          // of data, as it is now: see Path.Why; zero between the scheduler and the others, and between nodes without a connection, such as two workers
}

// Stats returns a snapshot of the node, for monitoring. Each number is read by itself: others may change meanwhile. Stats
// takes locks and allocates; once a second is often enough.
func (n *Node) Stats() Stats {
	c := n.core().Stats()
	s := Stats{
		QueuedRequests: c.QueuedRequests, QueuedBytes: c.QueuedBytes, PendingMessages: c.PendingMessages, PendingBytes: c.PendingBytes,
		Transport:        c.Transport,
		StrangerMessages: c.StrangerMessages, StrangerBytes: c.StrangerBytes, EarlyRequests: c.EarlyRequests, EarlyBytes: c.EarlyBytes,
		RefusedRequests: c.RefusedRequests, InvalidRequests: c.InvalidRequests, PausedReads: c.PausedReads,
		FencedMessages: c.FencedMessages, LateAnswers: c.LateAnswers,
	}
	for _, a := range c.Apps {
		s.Apps = append(s.Apps, AppStats(a))
	}
	for _, p := range c.Peers {
		s.Peers = append(s.Peers, PeerStats{ID: NodeID(p.ID), Lost: p.Lost, Silent: p.Silent, Path: p.Path})
	}
	return s
}
