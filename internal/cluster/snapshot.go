package cluster

// The snapshot of a node: its applications, its peers, its queues, and its counters.

import (
	"cmp"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Stats is a snapshot of a node.
type Stats struct {
	Apps  []AppStats
	Peers []PeerStats

	QueuedRequests, QueuedBytes   int // for applications that do not exist yet
	PendingMessages, PendingBytes int // of unknown processes

	Transport van.Stats

	Counters
}

// AppStats describes one application of a node: a worker, a server, a SimpleApp, a communicator.
type AppStats struct {
	AppID, CustomerID int
	InFlight          int // requests to other nodes that are not finished, or not waited for
	Accepted          int // requests of other nodes that are neither answered nor refused
	Handlers          int // handlers that run
}

// PeerStats describes one peer.
type PeerStats struct {
	ID     int
	Lost   error         // nil while the peer is alive
	Silent time.Duration // since its last message; 0 if this node does not receive its heartbeats
	Path   van.Path      // of data; zero between the scheduler and the others, and without a connection
}

// Stats returns a snapshot. Each number is read by itself: others may change meanwhile.
func (n *Node) Stats() Stats {
	s := Stats{Counters: countersOf(n)}
	if m, ok := van.As[van.Meter](n.transport.van); ok {
		s.Transport = m.Stats()
		s.LateAnswers += s.Transport.LateAnswers
	}
	for _, c := range n.apps.customers() {
		if c.app != endingApp {
			s.Apps = append(s.Apps, c.stats())
		}
	}
	slices.SortFunc(s.Apps, func(a, b AppStats) int {
		return cmp.Or(cmp.Compare(a.AppID, b.AppID), cmp.Compare(a.CustomerID, b.CustomerID))
	})
	n.control.mu.Lock()
	for _, id := range n.control.machine.Members(van.AllNodes) {
		if id != n.ID() {
			s.Peers = append(s.Peers, PeerStats{ID: id, Lost: n.processes.lost(id), Silent: n.control.machine.Silence(now(), id)})
		}
	}
	n.control.mu.Unlock()
	for i := range s.Peers {
		s.Peers[i].Path = pathTo(n, s.Peers[i].ID)
	}
	n.apps.mu.Lock()
	s.QueuedRequests, s.QueuedBytes = n.apps.messages, n.apps.bytes
	n.apps.mu.Unlock()
	s.PendingMessages, s.PendingBytes = n.pending.size()
	return s
}

// pathTo returns the present path of data from n to node id; see PeerStats.Path.
func pathTo(n *Node, id int) van.Path {
	if _, connected := n.peers.Load(id); !connected || n.role == van.Scheduler || id == van.SchedulerID {
		return van.Path{}
	}
	return van.PathTo(n.transport.van, id, true)
}

// stats describes the customer and its requests.
func (c *Customer) stats() AppStats {
	s := AppStats{AppID: c.app, CustomerID: c.id, InFlight: c.InFlight()}
	s.Accepted, s.Handlers = c.inbound.size()
	return s
}

// size returns the number of requests that are neither answered nor refused, and of running handlers.
func (b *Inbound) size() (accepted, running int) {
	if by := b.by.Load(); by != nil {
		for _, s := range *by {
			s.mu.Lock()
			accepted += len(s.list)
			s.mu.Unlock()
			running += int(s.running.Load())
		}
	}
	return accepted, running
}

// size returns the number of messages, and of their bytes.
func (s *pendingMessages) size() (messages, bytes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.senders {
		messages += v.messages
	}
	return messages, s.bytes
}
