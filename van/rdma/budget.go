package rdma

import (
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns what a peer may have registered for it.

// Why a slot request has to wait, besides ErrNoSlot.
var (
	// errBudget: the peer has as many bytes as one may have; some may come back.
	errPeerBudget = errors.New("the bytes registered for this peer are as many as STEPAF_RDMA_PEER_BUDGET allows")
	// errNever: it is more than one may have.
	errOverPeerBudget = errors.New("more than STEPAF_RDMA_PEER_BUDGET allows one peer")
	// errTotal: all peers together have as many as they may have.
	errTotalBudget = errors.New("the bytes registered for all peers are as many as STEPAF_RDMA_BUDGET allows")
	// errStalled: what it has sent is not taken, or the table does not name its process.
	errStalled = errors.New("its messages are not taken now")
)

// cost is the number of bytes that the requested slot would add to what is registered.
func (in slotSet) cost(s *slotRequest, need rendezvous.Need, kind uint64) int {
	n := metaBytes(need.Meta)
	if !in.dialect.needsData(need) {
		return n
	}
	if _, ok := in.registeredBuffer(s, need, kind); ok {
		return n
	}
	return n + in.dialect.dataCost(s, need, kind)
}

// withinBudget tells whether the bytes that a slot request wants are within the budgets. Control
// messages may have a quarter more than others.
func (in slotSet) withinBudget(s *slotRequest, need rendezvous.Need, kind uint64) error {
	v, n := in.v, int64(in.cost(s, need, kind))
	peer, total := v.budget.perPeer, v.budget.total
	if s.priority() == controlPriority {
		peer, total = peer+peer/4, total+total/4
	}
	switch {
	case peer > 0 && n > peer:
		return fmt.Errorf("%d bytes are %w, %d", n, errOverPeerBudget, peer)
	case peer > 0 && in.slots.registeredBytes.Load()+n > peer:
		in.order.overBudgetBy = in.slots.registeredBytes.Load() + n - peer
		return fmt.Errorf("%w, %d: it has %d and asks for %d", errPeerBudget, peer, in.slots.registeredBytes.Load(), n)
	case total > 0 && v.budget.registered.Load()+n > total:
		return fmt.Errorf("%w, %d: they have %d, and %d are asked for", errTotalBudget, total, v.budget.registered.Load(), n)
	}
	return nil
}
