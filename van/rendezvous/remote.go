package rendezvous

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
)

// This file owns a Sender's knowledge of its receiver's slots, and the open slot requests.

// ErrGrown: the peer is a StepMesh node, which cannot receive more under a
// key than the first time.
var ErrGrown = errors.New("larger than the first message of its key")

// Route is the kind of messages that a slot is for.
type Route struct {
	Key           uint64 // 0 when Class is used
	Push, Request bool
	Class         int8 // the size class, for slots shared by all keys; 0 for slots of one key
	// Host is set for slots in ordinary memory, whatever the receiver's device.
	Host bool
}

// Need describes the slot that a message needs at its receiver.
type Need struct {
	Route Route
	// OneShot is set for messages whose slot is used once: control messages.
	OneShot    bool
	Meta, Data int // bytes
}

// RemoteSlot is memory at the receiver, as the receiver has described it.
type RemoteSlot struct {
	Meta, Data       uint64 // addresses; Data is 0 when there is none
	MetaKey, DataKey uint32
	MetaLen, DataLen int
	Index            uint32 // names the slot in notifications and credits

	route *route
	busy  bool
}

func (p *RemoteSlot) fits(n *Need) bool { return p.MetaLen >= n.Meta && p.DataLen >= n.Data }

// Class returns the size class of n bytes, from 1, and the size of its slots: powers
// of two from 512 bytes, and 0 for class 1.
func Class(n int) (class int8, size int) {
	if n <= 0 {
		return 1, 0
	}
	b := max(bits.Len(uint(n-1)), 9)
	return int8(b), 1 << b
}

// Eager returns how many slots of a route, of n bytes each with their metas, are requested at once:
// 64 MiB in all, but at least 4 and at most 64. Beyond that, messages first wait for
// credits; see Tick.
func Eager(n int) int { return min(max(64<<20/max(n, 1), 4), 64) }

// remoteSlots is the slots of one connection's receiver.
type remoteSlots struct {
	// freedByAnswer is set for StepMesh peers: a request's slot is free when it has been
	// answered, an answer's always.
	freedByAnswer bool

	routes   map[Route]*route
	last     *route // the route of the last call of take, or nil
	granted  map[uint32]*RemoteSlot
	requests map[uint64]*request
	freed    bool // a slot has become free since Next

	// The slots and bytes that the receiver wants back and has not got yet.
	wanted  struct{ slots, bytes int }
	returns []uint32 // slots to give back; see Returns
}

type route struct {
	Route
	slots    []*RemoteSlot
	free     int
	requests int
	queued   int // approximate number of messages that wait for a slot of this route
	cooldown int // Ticks before another slot is requested, after a refusal
}

// request is a slot request that has not been answered.
type request struct {
	route   *route
	need    Need
	seq     uint64 // of the one-shot that it is for
	retired bool   // a larger one has been requested since
}

// growth refuses a message that would make a StepMesh node abort.
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
			have = max(have, a.need.Data)
		}
	}
	if have >= 0 && need.Data > have {
		return fmt.Errorf("%w: key %d has %d bytes, the peer, a node of the C++ library, has room for the %d of the first time",
			ErrGrown, need.Route.Key, need.Data, have)
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

// take returns a free slot that is large enough, and marks it busy.
func (s *remoteSlots) take(need Need) *RemoteSlot {
	r := s.last
	if r == nil || r.Route != need.Route {
		r = s.routes[need.Route]
		s.last = r
	}
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

// Release frees a slot without use, such as that of a Put whose message was dropped. The slot of a one-shot is returned: no other message
// uses it.
func (s *remoteSlots) Release(p *RemoteSlot) {
	switch {
	case p.busy:
		p.busy = false
		p.route.free++
		s.freed = true
	case p.route == nil && !s.freedByAnswer:
		s.returns = append(s.returns, p.Index)
	}
}

// openRequests counts the open slot requests whose answers will be large enough.
func (s *remoteSlots) openRequests(r *route, need Need) (n int) {
	if r.requests == 0 {
		return 0
	}
	for _, a := range s.requests {
		if a.route == r && !a.retired && a.need.Meta >= need.Meta && a.need.Data >= need.Data {
			n++
		}
	}
	return n
}

// retire removes the slots of a StepMesh node's key that are smaller than need.
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
		if a.route == r && (a.need.Meta < need.Meta || a.need.Data < need.Data) {
			a.retired = true
		}
	}
}

// removeIfEmpty removes r if it has neither slots nor requests.
func (s *remoteSlots) removeIfEmpty(r *route) {
	if len(r.slots) == 0 && r.requests == 0 && s.routes[r.Route] == r {
		delete(s.routes, r.Route)
		s.last = nil
	}
}

func (r *route) serves(n Need) bool {
	return r != nil && slices.ContainsFunc(r.slots, func(p *RemoteSlot) bool { return p.fits(&n) })
}

// expects reports whether a message with this need can get a slot of r that is free, or one that has been requested.
func (s *remoteSlots) expects(r *route, n Need) bool {
	return r.free > 0 && slices.ContainsFunc(r.slots, func(p *RemoteSlot) bool { return !p.busy && p.fits(&n) }) || s.openRequests(r, n) > 0
}

// Reclaim reports that the receiver wants a number of slots back, and a number of bytes in all. Free
// slots are given back now, others when they become free. The call replaces earlier ones.
// It does nothing for a StepMesh node.
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
		return cmp.Or(cmp.Compare(min(x.route.queued, 1), min(y.route.queued, 1)), // first slots for which no message waits
			-cmp.Compare(x.DataLen, y.DataLen), cmp.Compare(x.Index, y.Index))
	})
	for _, p := range free {
		s.returnSlot(p)
	}
}

// returnSlot returns a free slot to the receiver, if the receiver wants slots.
func (s *remoteSlots) returnSlot(p *RemoteSlot) {
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
		s.removeIfEmpty(r)
	}
}

// Returns returns the slots to give back of which the receiver has not been
// notified yet; see ReturnsSent.
func (s *remoteSlots) Returns() []uint32 { return s.returns }

// ReturnsSent reports that the receiver has been notified of the first n of Returns.
func (s *remoteSlots) ReturnsSent(n int) { s.returns = s.returns[:copy(s.returns, s.returns[n:])] }

// Answered reports that a StepMesh node has answered the request with this key.
func (s *remoteSlots) Answered(key uint64, push bool) {
	if r := s.routes[Route{Key: key, Push: push, Request: true}]; r != nil {
		for _, p := range r.slots {
			s.Release(p)
		}
	}
}

// AnswersLost reports that sent requests will not be answered, since the connection for the answers of
// the receiver, a StepMesh node, has ended. It frees their slots.
func (s *remoteSlots) AnswersLost() {
	for _, r := range s.routes {
		if s.freedByAnswer {
			for _, p := range r.slots {
				s.Release(p)
			}
		}
	}
}
