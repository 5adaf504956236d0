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
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// Why a slot request has to wait, besides ErrNoSlot.
var (
	// errBudget: the peer has as many bytes as one may have; some may come back.
	errPeerBudget = errors.New("the bytes registered for this peer are as many as STEPAF_RDMA_PEER_BUDGET allows")
	// errNever: it is more than one may have.
	errOverPeerBudget = errors.New("more than STEPAF_RDMA_PEER_BUDGET allows one peer")
	// errTotal: all peers together have as many as they may have.
	errTotalBudget = errors.New("the bytes registered for all peers are as many as STEPAF_RDMA_BUDGET allows")
	// errStalled: what it has sent is not taken, or the table does not name its process.
	errNotTaken = errors.New("its messages are not taken now")
)

// How slots are taken back. A peer that is asked gives up what it does not use at once, and
// the rest as it comes free.
const (
	reclaimPause  = 100 * time.Millisecond // between two requests to one peer
	slotScanPause = 10 * time.Millisecond  // between two looks at all slots
	reclaimTime   = 2 * time.Second        // a peer with free slots that gives none back is cut off
	oneShotShare  = 16                     // a peer may have 1/16 of all slots for control messages
)

// charge counts bytes that are registered for the peer.
func (in *inbound) charge(n int) {
	in.registeredBytes.Add(int64(n))
	in.v.leased.Add(int64(n))
}

// metaBytes is what a meta of n bytes costs. The usual ones, of which there cannot be more
// than slots, are not counted.
func metaBytes(n int) int {
	if n <= conn.CellSize {
		return 0
	}
	return (n + conn.PageSize - 1) &^ (conn.PageSize - 1)
}

// registeredBuffer is the buffer that the application has registered for the message, if it
// is large enough.
func (in *inbound) registeredBuffer(s *start, need rendezvous.Need) (backend.Mem, bool) {
	dst, ok := in.v.buffer(in.hello.node, s.key)
	return dst, ok && dst.Len() >= need.Exact
}

// cost is the number of bytes that the requested slot would add to what is registered.
func (in *inbound) cost(s *start, need rendezvous.Need, kind uint64) int {
	n := metaBytes(need.Meta)
	if !in.dialect.wantsData(need) {
		return n
	}
	if in.dialect.usesBuffer(kind) {
		if _, ok := in.registeredBuffer(s, need); ok {
			return n
		}
	}
	return n + in.dialect.dataCost(s, need, kind)
}

// withinBudget tells whether the bytes that a slot request wants are within the budgets. Control
// messages may have a quarter more than others.
func (in *inbound) withinBudget(s *start, need rendezvous.Need, kind uint64) error {
	v, n := in.v, int64(in.cost(s, need, kind))
	peer, total := v.peerBudget, v.totalBudget
	if s.lane() == controlLane {
		peer, total = peer+peer/4, total+total/4
	}
	switch {
	case peer > 0 && n > peer:
		return fmt.Errorf("%d bytes are %w, %d", n, errOverPeerBudget, peer)
	case peer > 0 && in.registeredBytes.Load()+n > peer:
		in.overBudgetBy = in.registeredBytes.Load() + n - peer
		return fmt.Errorf("%w, %d: it has %d and asks for %d", errPeerBudget, peer, in.registeredBytes.Load(), n)
	case total > 0 && v.leased.Load()+n > total:
		return fmt.Errorf("%w, %d: they have %d, and %d are asked for", errTotalBudget, total, v.leased.Load(), n)
	}
	return nil
}

// newArea makes registered memory for values of the peer.
func (in *inbound) newArea(n int, host bool) (*area, error) {
	a, err := in.host.newArea(n, host)
	if err == nil {
		a.of = in
		in.charge(a.Mem.Len())
	}
	return a, err
}

// overBudget refuses a slot request for good: its message fails at the sender.
func (in *inbound) overBudget(q *slotRequest, why error) {
	v := in.v
	if n := v.stats.overBudget.Add(1); n&(n-1) == 0 {
		v.log.Warn("rdma: a peer gets no more memory", "peer", in.name(), "key", q.key, "why", why, "refused so far", n)
	}
	in.dialect.refuse(q.origin, replyBudget, why)
}

// makeRoom takes slots back, so that the slot request that err has made wait can be answered. The
// receiving role is held.
func (in *inbound) makeRoom(err error, now uint64) {
	v := in.v
	if errors.Is(err, errNotTaken) {
		return
	}
	if n := v.stats.slotWaits.Add(1); n&(n-1) == 0 && !errors.Is(err, errPeerBudget) {
		v.log.Warn("rdma: a peer waits for a slot", "peer", in.name(), "why", err, "slots", v.slots.Len(), "BYTEPS_ADDRESS_POOL_SIZE", v.cfg.AddressPoolSize)
	}
	if errors.Is(err, errPeerBudget) {
		in.requestReclaim(0, int(in.overBudgetBy), now)
		return
	}
	if last := v.slotsScannedAt.Load(); now-last < uint64(slotScanPause) || !v.slotsScannedAt.CompareAndSwap(last, now) {
		return
	}
	shares := map[*inbound]*slotShare{in: {}}
	var all slotShare
	v.slots.Each(func(l *receiveSlot) {
		of := l.Owner.(*inbound)
		if l.OneShot || !of.hello.native {
			return
		}
		x := shares[of]
		if x == nil {
			x = &slotShare{}
			shares[of] = x
		}
		x.places++
		all.places++
	})
	fair := v.slots.Room() / len(shares)
	over := false
	order := slices.SortedFunc(maps.Keys(shares), func(x, y *inbound) int { return cmp.Compare(x.serial, y.serial) })
	for _, of := range order {
		x := shares[of]
		x.bytes = int(of.registeredBytes.Load())
		all.bytes += x.bytes
		if of != in && x.places > fair && !errors.Is(err, errTotalBudget) {
			over = true
			of.requestReclaim(x.places-fair, 0, now)
		}
	}
	if errors.Is(err, errTotalBudget) {
		fair = all.bytes / len(shares)
		for _, of := range order {
			if x := shares[of]; of != in && x.bytes > fair {
				over = true
				of.requestReclaim(0, x.bytes-fair, now)
			}
		}
	}
	if !over { // it has had its share, in slots of other sizes
		in.requestReclaim(8, 0, now)
	}
}

// slotShare is what one peer has.
type slotShare struct{ places, bytes int }

// requestReclaim asks the peer to give slots back. One that has free slots, and does not answer,
// is cut off: it connects again when it needs to.
func (in *inbound) requestReclaim(places, bytes int, now uint64) {
	if !in.hello.native || failpoint.On("rdma-reclaim") {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	w := &in.reclaim
	if in.closed || now-w.at < uint64(reclaimPause) {
		return
	}
	if w.since != 0 && now-w.since > uint64(reclaimTime) && in.dialect.hasFreeSlots() {
		in.fail(fmt.Errorf("%w: it has slots that it does not use, and has not given them back within %s", van.ErrPeerLost, reclaimTime))
		return
	}
	w.at = now
	if w.since == 0 {
		w.since = now
	}
	var b [reclaimLen]byte
	(&reclaim{places: uint32(places), bytes: uint64(bytes)}).put(b[:])
	in.send(immReclaim, b[:])
}

// slotsReturned takes slots back that the peer has given up. What it had written there before
// has come.
func (in *inbound) slotsReturned(t *trailer) {
	in.mu.Lock()
	in.reclaim.since = 0
	ok := true
	for _, i := range t.credits[:t.n] {
		l := in.v.slots.Get(uint32(i))
		if l == nil || l.Owner != in || l.OneShot || l.Held() {
			ok = false
			continue
		}
		in.dropSlot(l)
	}
	in.mu.Unlock()
	if !ok {
		in.v.malformed(in, &van.FieldError{Field: "slots that are given back", Value: t.credits[:t.n], Want: "those of this connection, without a message"})
	}
}

// returnSlots tells the peer which slots are its own again. p.mu is held.
func (p *peer) returnSlots() {
	for l := p.link; l != nil; {
		back := p.sender.Returns()
		if len(back) == 0 {
			return
		}
		id, _, stage, ok := l.Begin()
		if !ok {
			return // tick tries again
		}
		t := trailer{epoch: l.epoch}
		for t.n < min(len(back), maxCredits) {
			t.credits[t.n] = uint16(back[t.n])
			t.n++
		}
		t.put(stage[:trailerLen])
		l.Add(id, 0, l.Staged(verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immReturn}, stage[:trailerLen]))
		p.sender.ReturnsSent(t.n)
	}
}

// reclaimRequested is told by the peer that it wants slots back.
func (p *peer) reclaimRequested(l *link, r *reclaim) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l || p.ended {
		return
	}
	p.sender.Reclaim(int(r.places), int(min(r.bytes, maxReclaim)))
	p.returnSlots()
	p.pump()
	p.flush(false)
}
