package postoffice

// What a node tells about itself and the cluster: names, ids, ranks, groups, key ranges,
// and the abilities of its transport.

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Name says who this node is: "worker 0 (id 9)".
func (n *Node) Name() string { return *n.name.Load() }

func (n *Node) setName(s string) { n.name.Store(&s) }

// PeerName names node id and its address: "server 1 (id 10) at 10.0.0.7:4021".
func (n *Node) PeerName(id int) string {
	if addr, ok := n.peers.Load(id); ok {
		return fmt.Sprintf("%s at %s", van.NodeName(id), addr)
	}
	return van.NodeName(id)
}

// Log is the node's logger; its lines carry role, rank and id.
func (n *Node) Log() *slog.Logger { return n.log }

// Config is what the node was started with. Do not change it.
func (n *Node) Config() *Config { return n.cfg }

// Backend is the memory of the node's device.
func (n *Node) Backend() backend.Backend { return n.back }

// Van is the node's transports, whose optional abilities van.As finds, and van.PathTo the
// path to a peer. To send and to leave use the node's own methods.
func (n *Node) Van() van.Van { return n.van }

// Stats returns the transport's counters.
func (n *Node) Stats() van.Stats {
	if m, ok := van.As[van.Meter](n.van); ok {
		return m.Stats()
	}
	return van.Stats{}
}

// Addresses returns the port at which this node listens and the addresses of the peers
// that it is connected to, as "host:port".
func (n *Node) Addresses() (port int, peers []string) {
	n.peers.Range(func(_, addr any) bool {
		peers = append(peers, addr.(string))
		return true
	})
	return n.self.Port, peers
}

// Role is the node's role: worker, server or scheduler.
func (n *Node) Role() van.Role { return n.role }

// ID is the node's id.
func (n *Node) ID() int { return int(n.id.Load()) }

// Rank is the instance rank.
func (n *Node) Rank() int { return van.RankOf(n.ID()) }

// GroupRank is the rank of the node's group.
func (n *Node) GroupRank() int { return n.Rank() / n.cfg.GroupSize }

// Instance is the node's index in its group.
func (n *Node) Instance() int { return n.Rank() % n.cfg.GroupSize }

// GroupSize is the number of instances in a group.
func (n *Node) GroupSize() int { return n.cfg.GroupSize }

// NumWorkers and NumServers count groups.
func (n *Node) NumWorkers() int { return n.cfg.NumWorkers }

// NumServers counts server groups.
func (n *Node) NumServers() int { return n.cfg.NumServers }

// NumWorkerInstances counts workers.
func (n *Node) NumWorkerInstances() int { return n.cfg.NumWorkers * n.cfg.GroupSize }

// IsRecovery tells whether this node replaces a dead one.
func (n *Node) IsRecovery() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.machine.IsRecovery()
}

// ServerInstances are the ids of the servers that a worker talks to, by server
// group rank: in each group the instance with the worker's own index.
func (n *Node) ServerInstances() []int {
	ids := make([]int, n.cfg.NumServers)
	for r := range ids {
		ids[r] = van.ServerID(r*n.cfg.GroupSize + n.Instance())
	}
	return ids
}

// WorkerInstance is the id of the worker that a server talks to in the group of
// the given rank.
func (n *Node) WorkerInstance(groupRank int) int {
	return van.WorkerID(groupRank*n.cfg.GroupSize + n.Instance())
}

// Members lists the node ids of a group (a sum of van.SchedulerID, ServerGroup,
// WorkerGroup, or a node id): workers by rank, then servers, then the scheduler.
func (n *Node) Members(group int) []int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.machine.Members(group)
}

// DeadNodes lists the nodes that have been silent for longer than t, or are known to be
// lost. The scheduler hears all nodes, the others only the scheduler.
func (n *Node) DeadNodes(t time.Duration) []int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.machine.DeadNodes(now(), t)
}

// KeyRange is a half-open range of keys, except that the last server's includes
// the largest key.
type KeyRange struct{ Begin, End uint64 }

// ServerKeyRanges divides the keys among the servers as ps-lite does: server i of S
// begins at (2^64-1)/S*i, and the last one also has the remainder.
func (n *Node) ServerKeyRanges() []KeyRange {
	s := uint64(n.cfg.NumServers)
	step := ^uint64(0) / s
	rs := make([]KeyRange, s)
	for i := range rs {
		rs[i] = KeyRange{step * uint64(i), step * uint64(i+1)}
	}
	rs[s-1].End = ^uint64(0)
	return rs
}

// Native tells whether the node with that id is one of this library, as far as is known.
func (n *Node) Native(id int) bool { return n.processes.of(id).incarnation != 0 }
