package postoffice

// The shape of a cluster.

import "github.com/stepaf/stepaf-go/internal/cluster"

// Topology is the shape of a cluster, and a node's place in it.
type Topology struct {
	NumWorkers int // groups of workers
	NumServers int // groups of servers
	GroupSize  int // instances in each group
	GroupRank  int // rank of this node's group
	Instance   int // this node's index in its group
}

// NumWorkerInstances counts workers.
func (t Topology) NumWorkerInstances() int { return cluster.Topology(t).NumWorkerInstances() }

// ServerInstances returns the ids of the servers that a worker talks to, by server group rank: in each group the instance
// with the worker's own index.
func (t Topology) ServerInstances() []NodeID {
	ids := make([]NodeID, t.NumServers)
	for r, id := range cluster.Topology(t).ServerInstances() {
		ids[r] = NodeID(id)
	}
	return ids
}

// WorkerInstance returns the id of the worker that a server talks to in the group of the given rank.
func (t Topology) WorkerInstance(groupRank int) NodeID {
	return NodeID(cluster.Topology(t).WorkerInstance(groupRank))
}

// KeyRange is a half-open range of keys, except that the last server's includes the largest key.
type KeyRange struct{ Begin, End uint64 }

// ServerKeyRanges divides the keys among the servers as ps-lite does: server i of S begins at (2^64-1)/S*i, and the last one
// also has the remainder.
func (t Topology) ServerKeyRanges() []KeyRange {
	s := uint64(t.NumServers)
	step := ^uint64(0) / s
	rs := make([]KeyRange, s)
	for i := range rs {
		rs[i] = KeyRange{step * uint64(i), step * uint64(i+1)}
	}
	rs[s-1].End = ^uint64(0)
	return rs
}
