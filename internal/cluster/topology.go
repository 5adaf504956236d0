package cluster

import (
	"github.com/stepaf/stepaf-go/van"
)

// Topology is the shape of a cluster, and a node's place in it.
type Topology struct {
	NumWorkers int // groups of workers
	NumServers int // groups of servers
	GroupSize  int // instances in each group
	GroupRank  int // rank of this node's group
	Instance   int // this node's index in its group
}

// Topology is the shape of the cluster, and this node's place in it. It does not change
// once the node has started.
func (n *nodeInfo) Topology() Topology {
	size := n.cfg.GroupSize
	return Topology{n.cfg.NumWorkers, n.cfg.NumServers, size, n.Rank() / size, n.Rank() % size}
}

// NumWorkerInstances counts workers.
func (t Topology) NumWorkerInstances() int { return t.NumWorkers * t.GroupSize }

// ServerInstances are the ids of the servers that a worker talks to, by server
// group rank: in each group the instance with the worker's own index.
func (t Topology) ServerInstances() []int {
	ids := make([]int, t.NumServers)
	for r := range ids {
		ids[r] = van.ServerID(r*t.GroupSize + t.Instance)
	}
	return ids
}

// WorkerInstance is the id of the worker that a server talks to in the group of
// the given rank.
func (t Topology) WorkerInstance(groupRank int) int {
	return van.WorkerID(groupRank*t.GroupSize + t.Instance)
}
