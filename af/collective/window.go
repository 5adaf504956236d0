package collective

// Calls in flight: their numbers, requests of other ranks for calls that this rank has not made yet, and scratch
// memory.

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// maxInFlight is the limit of calls in flight of a communicator, and therefore of requests of one rank that wait for
// another rank. A large AllReduce counts twice.
const maxInFlight = 64

// callWindow holds the calls in flight of a communicator. All fields but copies are guarded by base.mu.
type callWindow struct {
	b       *base
	next    uint32             // number of the next call
	window  [maxInFlight]*op   // by number
	asked   [][maxInFlight]ask // by rank and number: requests, queued or answered
	free    []*op
	scratch scratchPool
	sending int           // answers whose memory other ranks may still read
	quiet   chan struct{} // closed when sending becomes 0; nil if there is no waiter
	copies  copies
	made    func(*op) // called for each new op
}

// ask is a request for a part.
type ask struct {
	request
	epoch uint64
	seq   uint32
	call  call
	bytes int  // size of the part
	kept  bool // queued until this rank makes the call
}

// unref drops a reference to o.
func (l *callWindow) unref(o *op) {
	l.b.mu.Lock()
	defer l.b.mu.Unlock()
	if o.refs--; o.refs > 0 {
		return
	}
	clear(o.receives.into)
	clear(o.sends.parts)
	l.scratch.give(o.reduction.scratch)
	o.result, o.reduction.by, o.reduction.scratch, o.reduction.next = result{}, nil, nil, nil
	if len(l.free) < maxInFlight {
		l.free = append(l.free, o)
	}
}

// scratchPool is memory for reductions, kept for reuse.
type scratchPool [][]uint64

// maxScratch is the maximum length of a scratchPool. An AllReduce needs one buffer at a time.
const maxScratch = 2

// take returns a buffer of at least n bytes, for elements of any type.
func (l *scratchPool) take(n int) []uint64 {
	n = (n + 7) / 8
	for i, scratch := range *l {
		if cap(scratch) >= n {
			*l = slices.Delete(*l, i, i+1)
			return scratch[:n]
		}
	}
	return make([]uint64, n)
}

// give returns an unused buffer to the pool. A full pool drops its smallest buffer.
func (l *scratchPool) give(scratch []uint64) {
	if scratch == nil {
		return
	}
	*l = append(*l, scratch)
	if len(*l) > maxScratch {
		slices.SortFunc(*l, func(a, b []uint64) int { return cmp.Compare(cap(b), cap(a)) })
		*l = slices.Delete(*l, maxScratch, len(*l))
	}
}

// takeAsked removes the queued requests that f selects. base.mu is held.
func (l *callWindow) takeAsked(f func(*ask) bool) (taken []ask) {
	for r := range l.asked {
		for i := range l.asked[r] {
			if a := &l.asked[r][i]; a.kept && f(a) {
				taken = append(taken, *a)
				*a = ask{}
			}
		}
	}
	return taken
}

// keep queues a until this rank makes the call. The caller holds base.mu; keep unlocks it.
func (l *callWindow) keep(a *ask) error {
	old := &l.asked[a.rank][a.seq%maxInFlight]
	same, seq := old.kept && old.epoch == a.epoch && old.reply.ProcessEpoch == a.reply.ProcessEpoch, old.seq
	if !same {
		*old = *a
		old.kept = true
	}
	l.b.mu.Unlock()
	switch {
	case same && seq == a.seq:
		return fmt.Errorf("%w: second request for call %d", van.ErrMalformed, a.seq)
	case same:
		l.mismatch(&a.request, a.call.kind, fmt.Errorf("%w: requests for call %d and for call %d, at most %d calls are in flight at once", ErrMismatch, a.seq, seq, maxInFlight))
	}
	return nil
}

// mismatch refuses a request that does not match the calls of this rank, and fails the communicator: no later call
// would match either.
func (l *callWindow) mismatch(q *request, k kind, err error) {
	l.b.fail(&van.Error{Op: kinds[k], Node: l.b.node.Name(), Peer: l.b.name(q.rank), Detail: fmt.Sprintf("communicator %d", l.b.id), Err: err})
	l.b.refuse(q, fmt.Errorf("rank %d: %w", l.b.self, err))
}

func (l *callWindow) full(name string) error {
	return &van.Error{Op: name, Node: l.b.node.Name(), Detail: fmt.Sprintf("communicator %d has %d calls in flight", l.b.id, maxInFlight),
		Hint: "wait for earlier ones", Err: van.ErrQueueFull}
}

// sendDone records that a part is no longer read by its receiver. base.mu is held.
func (l *callWindow) sendDone() {
	if l.sending--; l.sending == 0 && l.quiet != nil {
		close(l.quiet)
		l.quiet = nil
	}
}

// await waits until no other rank reads memory of this rank.
func (l *callWindow) await(ctx context.Context, op string) error {
	l.b.mu.Lock()
	if l.sending == 0 {
		l.b.mu.Unlock()
		return nil
	}
	if l.quiet == nil {
		l.quiet = make(chan struct{})
	}
	quiet := l.quiet
	l.b.mu.Unlock()
	begun := clock.Now()
	ctx, limit, cancel := l.b.limited(ctx)
	defer cancel()
	select {
	case <-quiet:
		return nil
	case <-ctx.Done():
		return &van.Error{Op: op, Node: l.b.node.Name(), Detail: fmt.Sprintf("communicator %d: others are still reading memory of this rank", l.b.id),
			Elapsed: clock.Since(begun), Limit: limit, Err: van.TimedOut(context.Cause(ctx))}
	}
}
