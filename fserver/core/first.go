package core

// The first data message to each peer, which may wait for a connection.

import (
	"slices"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// firstSends records the peers to which this node has sent no data, or none since they were lost. The transports connect to a peer for
// the first message with data. That message waits for the connection, for seconds if the peer does not answer. The zero value has no peers.
type firstSends struct {
	left atomic.Int32  // the number of elements of sent that are false
	sent []atomic.Bool // by group rank
}

// watch adds the peers of a worker or a server. Other nodes send no data.
func (f *firstSends) watch(node *postoffice.Node) {
	top, peers := node.Topology(), van.Server
	switch node.Role() {
	case van.Worker:
		f.sent = make([]atomic.Bool, top.NumServers)
	case van.Server:
		f.sent, peers = make([]atomic.Bool, top.NumWorkers), van.Worker
	default:
		return
	}
	f.left.Store(int32(len(f.sent)))
	(*cluster.Node)(node).App().OnPeer(func(id int, up bool, _ error) {
		if rank := van.RankOf(id); !up && van.RoleOf(id) == peers && rank%top.GroupSize == top.Instance {
			f.lost(rank / top.GroupSize)
		}
	})
}

func (f *firstSends) lost(rank int) {
	if rank < len(f.sent) && f.sent[rank].CompareAndSwap(true, false) {
		f.left.Add(1)
	}
}

// pending reports whether there is a peer among ranks to which no data was sent. nil means all peers.
func (f *firstSends) pending(ranks ...int) bool {
	if f.left.Load() == 0 {
		return false
	}
	for _, rank := range ranks {
		if 0 <= rank && rank < len(f.sent) && !f.sent[rank].Load() {
			return true
		}
	}
	return ranks == nil
}

// done records that data was sent to the peers with those ranks. nil means all peers.
func (f *firstSends) done(ranks ...int) {
	if f.left.Load() == 0 {
		return
	}
	for rank := range f.sent {
		if (ranks == nil || slices.Contains(ranks, rank)) && f.sent[rank].CompareAndSwap(false, true) {
			f.left.Add(-1)
		}
	}
}

// MayConnect reports whether a PushPull to those servers may wait for a connection. nil means all servers.
func MayConnect(s *Session, servers []int) bool { return s.first.pending(servers...) }

// MayConnectTo reports whether an Answer of the batch with that id may wait for a connection.
func MayConnectTo(s *Session, id uint64) bool {
	rank, ok := workerOf(s, id)
	return ok && s.first.pending(rank)
}

// workerOf returns the group rank of the worker of a batch that has no answer yet. It returns false if the first message was sent to
// all workers.
func workerOf(s *Session, id uint64) (rank int, ok bool) {
	if s.queue == nil || s.first.left.Load() == 0 {
		return 0, false
	}
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	b, ok := s.queue.out[id]
	if !ok {
		return 0, false
	}
	return b.Worker(), true
}
