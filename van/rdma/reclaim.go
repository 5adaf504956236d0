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
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// Why a question for a place has to wait, besides ErrNoLease.
var (
	// errBudget: the peer has as many bytes as one may have; some may come back.
	errBudget = errors.New("the bytes registered for this peer are as many as STEPAF_RDMA_PEER_BUDGET allows")
	// errNever: it is more than one may have.
	errNever = errors.New("more than STEPAF_RDMA_PEER_BUDGET allows one peer")
	// errTotal: all peers together have as many as they may have.
	errTotal = errors.New("the bytes registered for all peers are as many as STEPAF_RDMA_BUDGET allows")
	// errStalled: what it has sent is not taken, or the table does not name its process.
	errStalled = errors.New("its messages are not taken now")
)

// How places are taken back. A peer that is asked gives up what it does not use at once, and
// the rest as it comes free.
const (
	askAgain     = 100 * time.Millisecond // between two requests to one peer
	scanPause    = 10 * time.Millisecond  // between two looks at all places
	giveBackTime = 2 * time.Second        // a peer with free places that gives none back is cut off
	oneShotShare = 16                     // a peer may have 1/16 of all places for control messages
)

// charge counts bytes that are registered for the peer.
func (in *incoming) charge(n int) {
	in.bytes.Add(int64(n))
	in.v.leased.Add(int64(n))
}

// metaBytes is what a meta of n bytes costs. The usual ones, of which there cannot be more
// than places, are not counted.
func metaBytes(n int) int {
	if n <= cellSize {
		return 0
	}
	return (n + pageSize - 1) &^ (pageSize - 1)
}

// registered is the buffer that the application has registered for the message, if it
// is large enough.
func (in *incoming) registered(s *start, need rendezvous.Need) (backend.Mem, bool) {
	dst, ok := in.v.buffer(in.hello.node, s.key)
	return dst, ok && dst.Len() >= need.Exact
}

// cost is what a place costs that is asked for: see place.
func (in *incoming) cost(s *start, need rendezvous.Need, kind uint64) int {
	n := metaBytes(need.Meta)
	if need.Data == 0 || !in.hello.ours && in.v.self.Role != van.Server {
		return n
	}
	keyed := kind&kindKeyed != 0
	if !in.hello.ours || keyed {
		if _, ok := in.registered(s, need); ok {
			return n
		}
	}
	if !in.hello.ours {
		in.mu.Lock()
		defer in.mu.Unlock()
		if a := in.areas[s.key]; a != nil && a.mem.Len() >= need.Data {
			return n
		}
		return n + need.Data
	}
	if keyed {
		_, size := rendezvous.Class(need.Data)
		return n + size
	}
	return n + need.Data
}

// affords tells whether the bytes that a question wants are within the budgets. Control
// messages may have a quarter more than others.
func (in *incoming) affords(s *start, need rendezvous.Need, kind uint64) error {
	v, n := in.v, int64(in.cost(s, need, kind))
	peer, total := v.peerBudget, v.totalBudget
	if s.lane() == urgentLane {
		peer, total = peer+peer/4, total+total/4
	}
	switch {
	case peer > 0 && n > peer:
		return fmt.Errorf("%d bytes are %w, %d", n, errNever, peer)
	case peer > 0 && in.bytes.Load()+n > peer:
		in.over = in.bytes.Load() + n - peer
		return fmt.Errorf("%w, %d: it has %d and asks for %d", errBudget, peer, in.bytes.Load(), n)
	case total > 0 && v.leased.Load()+n > total:
		return fmt.Errorf("%w, %d: they have %d, and %d are asked for", errTotal, total, v.leased.Load(), n)
	}
	return nil
}

// newArea makes registered memory for values of the peer.
func (in *incoming) newArea(n int, host bool) (*area, error) {
	a, err := in.host.newArea(n, host)
	if err == nil {
		a.of = in
		in.charge(a.mem.Len())
	}
	return a, err
}

// overBudget refuses a question for good: its message fails at the sender.
func (in *incoming) overBudget(q *question, why error) {
	v := in.v
	if n := v.stats.overBudget.Add(1); n&(n-1) == 0 {
		v.log.Warn("rdma: a peer gets no more memory", "peer", in.name(), "key", q.key, "why", why, "refused so far", n)
	}
	if !in.hello.ours { // its protocol has no word for it, and it would wait for ever
		in.fail(why)
		return
	}
	in.reply(&reply{origin: q.origin, flags: replyRefused | replyBudget}, nil)
}

// wants takes places back, so that the question that err has made wait can be answered. The
// receiving role is held.
func (in *incoming) wants(err error, now uint64) {
	v := in.v
	if errors.Is(err, errStalled) {
		return
	}
	if n := v.stats.placesShort.Add(1); n&(n-1) == 0 && !errors.Is(err, errBudget) {
		v.log.Warn("rdma: a peer waits for a place", "peer", in.name(), "why", err, "places", v.table.Len(), "BYTEPS_ADDRESS_POOL_SIZE", v.cfg.AddressPoolSize)
	}
	if errors.Is(err, errBudget) {
		in.askBack(0, int(in.over), now)
		return
	}
	if last := v.scanned.Load(); now-last < uint64(scanPause) || !v.scanned.CompareAndSwap(last, now) {
		return
	}
	shares := map[*incoming]*share{in: {}}
	var all share
	v.table.Each(func(l *lease) {
		of := l.Owner.(*incoming)
		if l.OneShot || !of.hello.ours {
			return
		}
		x := shares[of]
		if x == nil {
			x = &share{}
			shares[of] = x
		}
		x.places++
		all.places++
	})
	fair := v.table.Room() / len(shares)
	over := false
	order := slices.SortedFunc(maps.Keys(shares), func(x, y *incoming) int { return cmp.Compare(x.serial, y.serial) })
	for _, of := range order {
		x := shares[of]
		x.bytes = int(of.bytes.Load())
		all.bytes += x.bytes
		if of != in && x.places > fair && !errors.Is(err, errTotal) {
			over = true
			of.askBack(x.places-fair, 0, now)
		}
	}
	if errors.Is(err, errTotal) {
		fair = all.bytes / len(shares)
		for _, of := range order {
			if x := shares[of]; of != in && x.bytes > fair {
				over = true
				of.askBack(0, x.bytes-fair, now)
			}
		}
	}
	if !over { // it has had its share, in places of other sizes
		in.askBack(8, 0, now)
	}
}

// share is what one peer has.
type share struct{ places, bytes int }

// askBack asks the peer to give places back. One that has free places, and does not answer,
// is cut off: it connects again when it needs to.
func (in *incoming) askBack(places, bytes int, now uint64) {
	if !in.hello.ours || failpoint.On("rdma-reclaim") {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	w := &in.wanted
	if in.closed || now-w.at < uint64(askAgain) {
		return
	}
	if w.since != 0 && now-w.since > uint64(giveBackTime) && in.hoards() {
		in.fail(fmt.Errorf("%w: it has places that it does not use, and has not given them back within %s", van.ErrPeerLost, giveBackTime))
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

// hoards tells whether the peer has a place in which no message lies. in.mu is held.
func (in *incoming) hoards() bool {
	for _, all := range in.leases {
		for _, l := range all {
			if !l.Held() {
				return true
			}
		}
	}
	return false
}

// returned takes places back that the peer has given up. What it had written there before
// has come.
func (in *incoming) returned(t *trailer) {
	in.mu.Lock()
	in.wanted.since = 0
	ok := true
	for _, i := range t.credits[:t.n] {
		l := in.v.table.Get(uint32(i))
		if l == nil || l.Owner != in || l.OneShot || l.Held() {
			ok = false
			continue
		}
		in.drop(l)
	}
	in.mu.Unlock()
	if !ok {
		in.v.malformed(in, &van.FieldError{Field: "places that are given back", Value: t.credits[:t.n], Want: "those of this connection, without a message"})
	}
}

// giveBack tells the peer which places are its own again. p.mu is held.
func (p *peer) giveBack() {
	for l := p.link; l != nil; {
		back := p.snd.Returning()
		if len(back) == 0 {
			return
		}
		id, _, stage, ok := l.begin()
		if !ok {
			return // tick tries again
		}
		t := trailer{epoch: l.epoch}
		for t.n < min(len(back), maxCredits) {
			t.credits[t.n] = uint16(back[t.n])
			t.n++
		}
		t.put(stage[:trailerLen])
		l.add(id, 0, l.staged(verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immReturn}, stage[:trailerLen]))
		p.snd.Returned(t.n)
	}
}

// reclaimed is told by the peer that it wants places back.
func (p *peer) reclaimed(l *link, r *reclaim) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l || p.ended {
		return
	}
	p.snd.Reclaim(int(r.places), int(min(r.bytes, maxReclaim)))
	p.giveBack()
	p.snd.Pump()
	p.flush(false)
}
