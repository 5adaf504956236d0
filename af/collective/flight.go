package collective

// Calls in flight: their numbers, what other ranks ask before this one has made a call, and memory that is kept.

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// maxInFlight is how many calls of a communicator may be in flight, and so how many requests of
// a rank may wait for another one. A large AllReduce counts twice.
const maxInFlight = 64

// flight is the calls of a communicator. All but copies is guarded by base.mu.
type flight struct {
	b       *base
	next    uint32             // number of the next call
	window  [maxInFlight]*op   // by number
	asked   [][maxInFlight]ask // by rank and number: requests for calls that this rank has not made yet; others were answered
	free    []*op
	rooms   rooms         // memory for reductions
	sending int           // answers whose memory others may be reading
	quiet   chan struct{} // closed when sending has become 0; nil when nobody waits
	copies  copies
	made    func(*op) // told of new ones
}

// ask is a request for a part.
type ask struct {
	request
	epoch uint64
	seq   uint32
	call  call
	bytes int  // wanted
	kept  bool // it waits for this rank's call
}

// unref drops a reference to o.
func (l *flight) unref(o *op) {
	l.b.mu.Lock()
	defer l.b.mu.Unlock()
	if o.refs--; o.refs > 0 {
		return
	}
	clear(o.wants.into)
	clear(o.gives.parts)
	l.rooms.give(o.folding.room)
	o.result, o.folding.by, o.folding.room, o.folding.next = result{}, nil, nil, nil
	if len(l.free) < maxInFlight {
		l.free = append(l.free, o)
	}
}

// rooms is memory for reductions that is kept.
type rooms [][]uint64

// maxRooms is how many pieces of memory for reductions a communicator keeps for later ones: an
// AllReduce needs one at a time.
const maxRooms = 2

// take returns memory for n bytes, of elements of any type.
func (l *rooms) take(n int) []uint64 {
	n = (n + 7) / 8
	for i, room := range *l {
		if cap(room) >= n {
			*l = slices.Delete(*l, i, i+1)
			return room[:n]
		}
	}
	return make([]uint64, n)
}

// give takes back what nobody writes into any more, in place of the smallest.
func (l *rooms) give(room []uint64) {
	if room == nil {
		return
	}
	*l = append(*l, room)
	if len(*l) > maxRooms {
		slices.SortFunc(*l, func(a, b []uint64) int { return cmp.Compare(cap(b), cap(a)) })
		*l = slices.Delete(*l, maxRooms, len(*l))
	}
}

// takeAsked removes the kept requests that f picks. base.mu is held.
func (l *flight) takeAsked(f func(*ask) bool) (taken []ask) {
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

// keep keeps a until this rank makes the call. base.mu is held, and unlocked.
func (l *flight) keep(a *ask) error {
	old := &l.asked[a.rank][a.seq%maxInFlight]
	same, seq := old.kept && old.epoch == a.epoch && old.reply.ProcessEpoch == a.reply.ProcessEpoch, old.seq
	if !same {
		*old = *a
		old.kept = true
	}
	l.b.mu.Unlock()
	switch {
	case same && seq == a.seq:
		return fmt.Errorf("%w: asked twice for call %d", van.ErrMalformed, a.seq)
	case same:
		l.mismatch(&a.request, a.call.kind, fmt.Errorf("%w: asked for call %d and for call %d, no more than %d are in flight at once", ErrMismatch, a.seq, seq, maxInFlight))
	}
	return nil
}

// mismatch refuses a request for a part that does not go with the calls of this rank, of which
// no later one would.
func (l *flight) mismatch(q *request, k kind, err error) {
	l.b.fail(&van.Error{Op: kinds[k], Node: l.b.node.Name(), Peer: l.b.name(q.rank), Detail: fmt.Sprintf("communicator %d", l.b.id), Err: err})
	l.b.refuse(q, fmt.Errorf("rank %d: %w", l.b.self, err))
}

func (l *flight) full(name string) error {
	return &van.Error{Op: name, Node: l.b.node.Name(), Detail: fmt.Sprintf("communicator %d has %d calls in flight", l.b.id, maxInFlight),
		Hint: "wait for earlier ones", Err: van.ErrQueueFull}
}

// takenBack notes that a part is not lent any more. base.mu is held.
func (l *flight) takenBack() {
	if l.sending--; l.sending == 0 && l.quiet != nil {
		close(l.quiet)
		l.quiet = nil
	}
}

// await waits until nobody reads memory of this rank any more.
func (l *flight) await(ctx context.Context, op string) error {
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
			Elapsed: time.Duration(clock.Now() - begun), Limit: limit, Err: van.TimedOut(context.Cause(ctx))}
	}
}
