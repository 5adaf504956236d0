package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// This file owns how slots are taken back from peers:
//  1. A slot request finds too few slots or bytes.
//  2. The receiver sends immReclaim to the peers that have more than a fair share, and after times.budgetWait to all others, too.
//  3. Such a peer returns unused slots at once with immReturn, and others as they come free.
//  4. The receiver ends the slots, and grants the waiting request. A peer that returns nothing for times.reclaim, although it has free
//     slots, is disconnected.

// Times and limits.
const (
	reclaimPause  = 100 * time.Millisecond // between two requests to one peer
	slotScanPause = 10 * time.Millisecond  // between two scans of all slots
	oneShotShare  = 16                     // a peer may have 1/16 of all slots for control messages
)

// refuseOverBudget refuses a slot request: its message fails at the sender.
func (in slotSet) refuseOverBudget(q *pendingRequest, why error) {
	v := in.v
	if n := v.stats.refusedSlots.Add(1); n&(n-1) == 0 {
		v.log.Warn("rdma: a peer gets no more memory", "peer", in.name(), "key", q.key, "why", why, "refused so far", n)
	}
	in.dialect.refuse(q.origin, replyBudget, why)
}

// countSlotWait counts and logs a slot request that has to wait, because of err or, if err is nil, behind earlier requests. There is no
// log line if a peer waits for slots of its own.
func (in slotSet) countSlotWait(err error) {
	v := in.v
	if errors.Is(err, errStalled) {
		return
	}
	v.stats.slotWaits.Add(1)
	if err == nil || errors.Is(err, errPeerBudget) {
		return
	}
	if n, show := v.budget.slotWaitLog.Next(); show {
		v.log.Warn("rdma: a peer waits for a slot", "peer", in.name(), "why", err, "slots", v.budget.slots.Len(), "BYTEPS_ADDRESS_POOL_SIZE", v.cfg.AddressPoolSize, "so far", n)
	}
}

// reclaimFor asks peers to return slots for a slot request that waits because of err, since the time since. The feed is held.
func (in slotSet) reclaimFor(err error, since, now uint64) {
	v := in.v
	if errors.Is(err, errStalled) {
		return
	}
	if errors.Is(err, errPeerBudget) {
		in.requestReclaim(0, int(in.order.overBudgetBy), now)
		return
	}
	if last := v.budget.slotsScannedAt.Load(); time.Duration(now-last) < slotScanPause || !v.budget.slotsScannedAt.CompareAndSwap(last, now) {
		return
	}
	shares := map[*inbound]int{in.inbound: 0} // number of slots of each peer
	v.budget.slots.Each(func(l *receiveSlot) {
		if owner := l.Owner.(*inbound); !l.OneShot && owner.handshake.native {
			shares[owner]++
		}
	})
	all := v.budget.slots.Room()
	ofBytes := errors.Is(err, errTotalBudget)
	if ofBytes {
		all = 0
		for owner := range shares {
			shares[owner] = int(owner.slots.registeredBytes.Load())
			all += shares[owner]
		}
	}
	fair, over := all/len(shares), false
	if time.Duration(now-since) > v.times.budgetWait {
		fair = 0 // ask the peers below their share, too: those above it use all they have
	}
	for _, owner := range slices.SortedFunc(maps.Keys(shares), func(x, y *inbound) int { return cmp.Compare(x.serial, y.serial) }) {
		switch more := shares[owner] - fair; {
		case owner == in.inbound || more <= 0:
			continue
		case ofBytes:
			slotSet{owner}.requestReclaim(0, more, now)
		default:
			slotSet{owner}.requestReclaim(more, 0, now)
		}
		over = true
	}
	if !over { // the peer itself has its share, in slots of other sizes
		in.requestReclaim(8, 0, now)
	}
}

// requestReclaim asks the peer to return slots. A peer that has free slots and does not return them is disconnected; it reconnects when it
// needs to.
func (in slotSet) requestReclaim(slots, bytes int, now uint64) {
	if !in.handshake.native || failpoint.On("rdma-reclaim") {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	last := &in.slots.reclaim
	if in.closed || time.Duration(now-last.at) < reclaimPause {
		return
	}
	// Another goroutine may have set since after now was read: the difference is then negative.
	if last.since != 0 && time.Duration(now-last.since) > in.v.times.reclaim && in.hasFreeSlots() {
		in.fail(fmt.Errorf("%w: it has unused slots, and has returned none within %s", van.ErrPeerLost, in.v.times.reclaim))
		return
	}
	last.at = now
	if last.since == 0 {
		last.since = now
	}
	var b [reclaimRequestLen]byte
	(&reclaimRequest{slots: uint32(slots), bytes: uint64(bytes)}).put(b[:])
	in.send(immReclaim, b[:])
}

// hasFreeSlots reports whether the peer, a native node, has a slot without a message. in.mu is held.
func (in slotSet) hasFreeSlots() bool {
	for _, all := range in.slots.granted {
		if slices.ContainsFunc(all, func(l *receiveSlot) bool { return !l.Held() }) {
			return true
		}
	}
	return false
}

// handleReturnedSlots ends slots that the peer returns. All its earlier writes to them have arrived.
func (in slotSet) handleReturnedSlots(t *trailer) {
	in.mu.Lock()
	in.slots.reclaim.since = 0
	ok := true
	for _, i := range t.credits[:t.n] {
		l := in.v.budget.slots.Get(uint32(i))
		if l == nil || l.Owner != in.inbound || l.Held() {
			ok = false
			continue
		}
		in.dropSlot(l)
	}
	in.mu.Unlock()
	if !ok {
		in.malformed(&van.FieldError{Field: "returned slots", Value: t.credits[:t.n], Want: "those of this connection, without a message"})
	}
}
