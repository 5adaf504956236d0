package postoffice

// Who a node is, which all its parts need to know: role, id, place in the cluster, names,
// configuration and log.

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// identity is who a node is.
type identity struct {
	cfg         *Config
	role        van.Role
	incarnation uint32 // of this process, see van.Identity
	rand        func() uint64
	id          atomic.Int32
	name        atomic.Pointer[string]
	peers       sync.Map // node id to "host:port"
	log         *slog.Logger
	debug       bool // log every message
	causes      logx.Causes
}

// Name says who this node is: "worker 0 (id 9)".
func (n *identity) Name() string { return *n.name.Load() }

func (n *identity) setName(s string) { n.name.Store(&s) }

// PeerName names node id and its address: "server 1 (id 10) at 10.0.0.7:4021".
func (n *identity) PeerName(id int) string {
	if addr, ok := n.peers.Load(id); ok {
		return fmt.Sprintf("%s at %s", van.NodeName(id), addr)
	}
	return van.NodeName(id)
}

// Log is the node's logger; its lines carry role, rank and id.
func (n *identity) Log() *slog.Logger { return n.log }

// Config is what the node was started with. Do not change it.
func (n *identity) Config() *Config { return n.cfg }

// Role is the node's role: worker, server or scheduler.
func (n *identity) Role() van.Role { return n.role }

// ID is the node's id.
func (n *identity) ID() int { return int(n.id.Load()) }

// Rank is the instance rank.
func (n *identity) Rank() int { return van.RankOf(n.ID()) }

// GroupRank is the rank of the node's group.
func (n *identity) GroupRank() int { return n.Rank() / n.cfg.GroupSize }

// Instance is the node's index in its group.
func (n *identity) Instance() int { return n.Rank() % n.cfg.GroupSize }

// GroupSize is the number of instances in a group.
func (n *identity) GroupSize() int { return n.cfg.GroupSize }

// NumWorkers and NumServers count groups.
func (n *identity) NumWorkers() int { return n.cfg.NumWorkers }

// NumServers counts server groups.
func (n *identity) NumServers() int { return n.cfg.NumServers }

// NumWorkerInstances counts workers.
func (n *identity) NumWorkerInstances() int { return n.cfg.NumWorkers * n.cfg.GroupSize }

// ServerInstances are the ids of the servers that a worker talks to, by server
// group rank: in each group the instance with the worker's own index.
func (n *identity) ServerInstances() []int {
	ids := make([]int, n.cfg.NumServers)
	for r := range ids {
		ids[r] = van.ServerID(r*n.cfg.GroupSize + n.Instance())
	}
	return ids
}

// WorkerInstance is the id of the worker that a server talks to in the group of
// the given rank.
func (n *identity) WorkerInstance(groupRank int) int {
	return van.WorkerID(groupRank*n.cfg.GroupSize + n.Instance())
}

// KeyRange is a half-open range of keys, except that the last server's includes
// the largest key.
type KeyRange struct{ Begin, End uint64 }

// ServerKeyRanges divides the keys among the servers as ps-lite does: server i of S
// begins at (2^64-1)/S*i, and the last one also has the remainder.
func (n *identity) ServerKeyRanges() []KeyRange {
	s := uint64(n.cfg.NumServers)
	step := ^uint64(0) / s
	rs := make([]KeyRange, s)
	for i := range rs {
		rs[i] = KeyRange{step * uint64(i), step * uint64(i+1)}
	}
	rs[s-1].End = ^uint64(0)
	return rs
}

// mayJoin tells whether a cluster of this size has a node with that id.
func (n *identity) mayJoin(id int) bool {
	switch {
	case id == van.SchedulerID:
		return true
	case id <= van.AllNodes || id >= van.Empty:
		return false
	case van.RoleOf(id) == van.Worker:
		return van.RankOf(id) < n.cfg.NumWorkers*n.cfg.GroupSize
	default:
		return van.RankOf(id) < n.cfg.NumServers*n.cfg.GroupSize
	}
}

// Rarely limits log lines about what peers send, of which there may be a flood: it counts
// one more event of a cause, and returns the count and whether to log this one. Errors of
// one cause have the same logx.Kind.
func (n *identity) Rarely(cause string) (count uint64, show bool) { return n.causes.Next(cause) }

// logMessage writes a line for one message at PS_VERBOSE=2.
func (n *identity) logMessage(way string, peer int, m *van.Meta) {
	if !n.debug {
		return
	}
	n.log.LogAttrs(context.Background(), slog.LevelDebug, way, slog.String("peer", van.NodeName(peer)), slog.String("message", m.String()))
}

// nodeRank and nodeID make log lines show the rank and id as soon as they are known.
type nodeRank struct{ n *identity }

func (r nodeRank) LogValue() slog.Value {
	if id := r.n.id.Load(); id != van.Empty {
		return slog.IntValue(van.RankOf(int(id)))
	}
	return slog.StringValue("-")
}

type nodeID struct{ n *identity }

func (i nodeID) LogValue() slog.Value {
	if id := i.n.id.Load(); id != van.Empty {
		return slog.IntValue(int(id))
	}
	return slog.StringValue("-")
}
