package rdma

import (
	"errors"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the limits of memory that is registered for peers.

// Reasons why a slot request waits or is refused, besides rendezvous.ErrNoSlot.
var (
	// errPeerBudget: the peer's share is used up. The request waits, since the peer may return slots.
	errPeerBudget = errors.New("the bytes registered for this peer are as many as STEPAF_RDMA_PEER_BUDGET allows")
	// errOverPeerBudget: the request alone exceeds a peer's share. It is refused.
	errOverPeerBudget = errors.New("more than STEPAF_RDMA_PEER_BUDGET allows one peer")
	// errOverTotalBudget: the request alone exceeds what all peers may have. It is refused.
	errOverTotalBudget = errors.New("more than STEPAF_RDMA_BUDGET allows all peers")
	// errTotalBudget: the shares of all peers together are used up. The request waits, since a peer may return slots.
	errTotalBudget = errors.New("the bytes registered for all peers are as many as STEPAF_RDMA_BUDGET allows")
	// errStalled: the peer's messages wait for a slow handler, the node table does not name its process, or its earlier connection, on
	// which values could still be written to receive buffers, is being closed. The request waits.
	errStalled = errors.New("its messages wait for a slow handler, the node table does not name its process, or its earlier connection is being closed")
)

// slotWait returns how long a slot request may wait because of err, or 0 for no limit. Within the limit of errTotalBudget, all peers are
// asked for their unused slots, and the connection of a peer that does not return them ends.
func (t *times) slotWait(err error) time.Duration {
	switch {
	case errors.Is(err, errPeerBudget):
		return t.budgetWait
	case errors.Is(err, errTotalBudget):
		return 2 * t.reclaim
	}
	return 0
}

// cost returns the number of bytes that would be registered for the requested slot.
func (in slotSet) cost(s *slotRequest, need rendezvous.Need) int {
	n := metaBytes(need.Meta)
	if _, ok := in.registeredBuffer(s, need); ok || need.Data == 0 {
		return n
	}
	return n + in.dialect.dataCost(s, need)
}

// withinBudget returns nil if the bytes of a slot request are within the budgets, else the reason. Control messages may exceed the
// budgets by a quarter.
func (in slotSet) withinBudget(s *slotRequest, need rendezvous.Need) error {
	v, n := in.v, int64(in.cost(s, need))
	perPeer, total := v.budget.perPeer, v.budget.total
	if s.priority() == controlPriority {
		perPeer, total = perPeer+perPeer/4, total+total/4
	}
	switch {
	case perPeer > 0 && n > perPeer:
		return fmt.Errorf("%d bytes are %w, %d", n, errOverPeerBudget, perPeer)
	case total > 0 && n > total:
		return fmt.Errorf("%d bytes are %w, %d", n, errOverTotalBudget, total)
	case perPeer > 0 && in.slots.registeredBytes.Load()+n > perPeer:
		in.order.overBudgetBy = in.slots.registeredBytes.Load() + n - perPeer
		return fmt.Errorf("%w, %d: it has %d and asks for %d", errPeerBudget, perPeer, in.slots.registeredBytes.Load(), n)
	case total > 0 && v.budget.registered.Load()+n > total:
		return fmt.Errorf("%w, %d: they have %d, and %d are asked for", errTotalBudget, total, v.budget.registered.Load(), n)
	}
	return nil
}
