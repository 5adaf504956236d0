package rendezvous

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
)

// This file owns what a Sender knows of its receiver's slots, and the slot requests that are
// open.

// ErrGrown: the peer is a StepMesh node, which cannot receive more under a
// key than the first time.
var ErrGrown = errors.New("larger than the first message of its key")

// Route is what a slot is remembered by.
type Route struct {
	Key           uint64 // 0 when Class is used
	Push, Request bool
	Class         int8 // of the size, for slots shared by all keys; 0 for one key's
	// Host is set for slots in ordinary memory, whatever the receiver's device.
	Host bool
}

// Need is what a message needs at its receiver.
type Need struct {
	Route Route
	// OneShot is set for messages whose slot is used once: control messages.
	OneShot    bool
	Meta, Data int // bytes
	// Exact is Data without rounding: what a slot of one key has.
	Exact int
}

// RemoteSlot is memory at the receiver, as it has described it.
type RemoteSlot struct {
	Meta, Data       uint64 // addresses; Data is 0 when there is none
	MetaKey, DataKey uint32
	MetaLen, DataLen int
	Index            uint32 // names the slot in notifications and credits

	route *route
	busy  bool
}

// size is what a slot of the route must have.
func (n *Need) size() int {
	if n.Route.Class == 0 {
		return n.Exact
	}
	return n.Data
}

func (p *RemoteSlot) fits(n *Need) bool { return p.MetaLen >= n.Meta && p.DataLen >= n.size() }

// Class returns the size class of n bytes, from 1, and the size of its slots: powers
// of two from 512 bytes, and 0 for class 1.
func Class(n int) (class int8, size int) {
	if n <= 0 {
		return 1, 0
	}
	b := max(bits.Len(uint(n-1)), 9)
	return int8(b), 1 << b
}

// Eager is how many slots of a route, of data bytes each, are requested without
// hesitation: 64 MiB in all, but at least 4 and at most 64. Beyond it the credits of
// others are awaited for a while; see Tick.
func Eager(data int) int { return min(max(64<<20/max(data, 1), 4), 64) }

// remoteSlots is the slots of one connection's receiver.
type remoteSlots struct {
	// freedByAnswer is set for StepMesh peers: a request's slot is free when it has been
	// answered, an answer's always.
	freedByAnswer bool

	routes   map[Route]*route
	granted  map[uint32]*RemoteSlot
	requests map[uint64]*request
	freed    bool // a slot has become free since Next

	// What the receiver wants back, and has not got yet.
	wanted  struct{ slots, bytes int }
	returns []uint32 // slots that are given up; see Returns
}

type route struct {
	Route
	slots    []*RemoteSlot
	free     int
	requests int
	queued   int // waiting for a slot of this route, roughly
	cooldown int // Ticks before another slot is requested, as one was refused
}

// request is a slot request that has not been answered.
type request struct {
	route   *route
	need    Need
	seq     uint64 // of the one-shot that it is for
	retired bool   // a larger one has been requested since
}

// growth refuses what would make a StepMesh node abort.
func (s *remoteSlots) growth(need Need) error {
	r := s.routes[need.Route]
	if r == nil || need.OneShot {
		return nil
	}
	have := -1
	for _, p := range r.slots {
		have = max(have, p.DataLen)
	}
	for _, a := range s.requests {
		if a.route == r {
			have = max(have, a.need.Exact)
		}
	}
	if have >= 0 && need.Exact > have {
		return fmt.Errorf("%w: key %d has %d bytes, the peer, a node of the C++ library, has room for the %d of the first time",
			ErrGrown, need.Route.Key, need.Exact, have)
	}
	return nil
}

func (s *remoteSlots) route(r Route) *route {
	if t := s.routes[r]; t != nil {
		return t
	}
	t := &route{Route: r}
	s.routes[r] = t
	return t
}

// take finds a free slot that is large enough, and marks it.
func (s *remoteSlots) take(need Need) *RemoteSlot {
	r := s.routes[need.Route]
	if r == nil || r.free == 0 {
		return nil
	}
	for _, p := range r.slots {
		if !p.busy && p.fits(&need) {
			if s.freedByAnswer && !need.Route.Request {
				return p
			}
			p.busy = true
			r.free--
			return p
		}
	}
	return nil
}

// Release takes back a slot that is not used, as that of a Put whose message was dropped.
func (s *remoteSlots) Release(p *RemoteSlot) {
	if p.busy {
		p.busy = false
		p.route.free++
		s.freed = true
	}
}

// openRequests counts the open slot requests whose answers will be large enough.
func (s *remoteSlots) openRequests(r *route, need Need) (n int) {
	if r.requests == 0 {
		return 0
	}
	for _, a := range s.requests {
		if a.route == r && !a.retired && a.need.Meta >= need.Meta && a.need.size() >= need.size() {
			n++
		}
	}
	return n
}

// retire forgets the slots of one key that are smaller than need. The receiver does
// so when a larger one is requested; all messages to them have been sent before.
func (s *remoteSlots) retire(r *route, need Need) {
	kept := r.slots[:0]
	for _, p := range r.slots {
		if p.fits(&need) {
			kept = append(kept, p)
			continue
		}
		delete(s.granted, p.Index)
		if !p.busy {
			r.free--
		}
		p.route = nil
	}
	clear(r.slots[len(kept):])
	r.slots = kept
	for _, a := range s.requests {
		if a.route == r && (a.need.Meta < need.Meta || a.need.size() < need.size()) {
			a.retired = true
		}
	}
}

// forgetIfEmpty forgets r when it has nothing.
func (s *remoteSlots) forgetIfEmpty(r *route) {
	if len(r.slots) == 0 && r.requests == 0 && s.routes[r.Route] == r {
		delete(s.routes, r.Route)
	}
}

// Shared tells whether n, of one key, fits in a slot that all keys of its size class
// share, and in none of its key.
func (s *remoteSlots) Shared(n Need) bool {
	return !n.OneShot && n.Route.Class == 0 && !s.routes[n.Route].serves(n) && s.shared(n) != nil
}

// shared returns the route that Shared means, or nil.
func (s *remoteSlots) shared(n Need) *route {
	n.Route = Route{}
	n.Route.Class, n.Data = Class(n.Exact)
	if r := s.routes[n.Route]; r.serves(n) {
		return r
	}
	return nil
}

func (r *route) serves(n Need) bool {
	return r != nil && slices.ContainsFunc(r.slots, func(p *RemoteSlot) bool { return p.fits(&n) })
}

// Reclaim says that the receiver wants so many slots back, of so many bytes in all. Those
// that are free are given up now, the others as they become so. What it has wanted before
// is replaced. Slots of a StepMesh node do not come back.
func (s *remoteSlots) Reclaim(places, bytes int) {
	if s.freedByAnswer {
		return
	}
	s.wanted.slots, s.wanted.bytes = places, bytes
	var free []*RemoteSlot
	for _, p := range s.granted {
		if !p.busy {
			free = append(free, p)
		}
	}
	slices.SortFunc(free, func(x, y *RemoteSlot) int {
		return cmp.Or(cmp.Compare(min(x.route.queued, 1), min(y.route.queued, 1)), // first those that nobody waits for
			-cmp.Compare(x.DataLen, y.DataLen), cmp.Compare(x.Index, y.Index))
	})
	for _, p := range free {
		s.giveUp(p)
	}
}

// giveUp gives up a slot that is free, if the receiver wants any.
func (s *remoteSlots) giveUp(p *RemoteSlot) {
	if s.wanted.slots <= 0 && s.wanted.bytes <= 0 {
		return
	}
	s.wanted.slots--
	s.wanted.bytes -= p.DataLen + p.MetaLen
	r := p.route
	r.slots = slices.DeleteFunc(r.slots, func(x *RemoteSlot) bool { return x == p })
	r.free--
	p.route = nil
	delete(s.granted, p.Index)
	s.returns = append(s.returns, p.Index)
	if r.queued == 0 {
		s.forgetIfEmpty(r)
	}
}

// Returns is the slots that have been given up and of which the receiver has not been
// notified; see ReturnsSent.
func (s *remoteSlots) Returns() []uint32 { return s.returns }

// ReturnsSent says that the receiver has been notified of the first n of Returns.
func (s *remoteSlots) ReturnsSent(n int) { s.returns = s.returns[:copy(s.returns, s.returns[n:])] }

// Answered says that the request with this key has been answered, by a node of the
// original.
func (s *remoteSlots) Answered(key uint64, push bool) {
	if r := s.routes[Route{Key: key, Push: push, Request: true}]; r != nil {
		for _, p := range r.slots {
			s.Release(p)
		}
	}
}

// AnswersLost says that requests that have been sent will not be answered: the connection
// of the receiver, a node of the original, has ended on which the answers would come. Their
// slots are free.
func (s *remoteSlots) AnswersLost() {
	for _, r := range s.routes {
		if s.freedByAnswer {
			for _, p := range r.slots {
				s.Release(p)
			}
		}
	}
}

// Requested returns what an open slot request is for.
func (s *remoteSlots) Requested(origin uint64) (Need, bool) {
	a := s.requests[origin]
	if a == nil {
		return Need{}, false
	}
	return a.need, true
}
