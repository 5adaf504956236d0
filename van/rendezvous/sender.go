package rendezvous

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
)

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

// size is what a slot of the route must have.
func (n *Need) size() int {
	if n.Route.Class == 0 {
		return n.Exact
	}
	return n.Data
}

func (p *RemoteSlot) fits(n *Need) bool { return p.MetaLen >= n.Meta && p.DataLen >= n.size() }

// RemoteSlot is memory at the receiver, as it has described it.
type RemoteSlot struct {
	Meta, Data       uint64 // addresses; Data is 0 when there is none
	MetaKey, DataKey uint32
	MetaLen, DataLen int
	Index            uint32 // names the slot in notifications and credits

	route *route
	busy  bool
}

// Kind is what an Action asks for.
type Kind int

// The kinds of actions.
const (
	// Put: send Item to Slot.
	Put Kind = iota
	// Request: send a slot request with Origin, for Need; the reply is given to Reply,
	// UseShared or Refused with the same origin. Item is the message that it is for.
	Request
	// Drop: Item cannot be put, and is forgotten. Err wraps ErrGrown.
	Drop
)

// Action is what is to be done next. Each needs room to send one message.
type Action[T any] struct {
	Kind   Kind
	Item   T
	Slot   *RemoteSlot
	Origin uint64
	Need   Need
	Err    error
}

// Sender is the sending side of one connection: its methods take what has happened, and
// Next returns what is to be done about it. It is not safe for concurrent use.
type Sender[T any] struct {
	need func(T) Need
	// freedByAnswer is set for peers of StepMesh: a request's slot is free when it has
	// been answered, an answer's always.
	freedByAnswer bool
	connected     bool

	routes   map[Route]*route
	granted  map[uint32]*RemoteSlot
	requests map[uint64]*request
	origin   uint64
	lanes    [2]lane[T] // one-shots, others

	// extra is set when the first message of the second lane has waited for long: one more
	// slot is requested.
	extra bool

	// What the receiver wants back, and has not got yet.
	wanted  struct{ places, bytes int }
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

// lane is a queue. One-shots do not wait for the others, and the others not for them.
type lane[T any] struct {
	q    fifo[waitingItem[T]]
	head uint64 // number of the first in q
	// changed is set when the first of q may be put, or may need a slot request.
	changed bool
	// scanned is the number of the first entry that may not have been considered for a slot
	// request of its own.
	scanned uint64
}

type waitingItem[T any] struct {
	item       T
	requested  bool
	considered bool        // for a slot request of its own
	slot       *RemoteSlot // of a one-shot
	route      *route      // that counts it as queued
}

// NewSender makes a Sender without a connection: what is submitted waits for Connect. need
// says what an item needs, which may change while it waits.
func NewSender[T any](need func(T) Need) *Sender[T] {
	s := &Sender[T]{need: need}
	s.forget()
	return s
}

func (s *Sender[T]) forget() {
	s.routes, s.granted, s.requests = map[Route]*route{}, map[uint32]*RemoteSlot{}, map[uint64]*request{}
	s.wanted.places, s.wanted.bytes, s.returns = 0, 0, s.returns[:0]
}

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

// Connect begins a connection. freedByAnswer is set for a StepMesh peer. Slots of an
// earlier connection are forgotten.
func (s *Sender[T]) Connect(freedByAnswer bool) {
	s.forget()
	s.connected, s.freedByAnswer = true, freedByAnswer
	for i := range s.lanes {
		l := &s.lanes[i]
		l.changed, l.scanned = true, l.head
	}
}

// Disconnect ends the connection. It returns what had not been put of those for which keep
// is false; the others wait for the next connection.
func (s *Sender[T]) Disconnect(keep func(T) bool) (dropped []T) {
	s.forget()
	s.connected, s.extra = false, false
	for i := range s.lanes {
		l := &s.lanes[i]
		for range l.q.len() {
			w := l.q.pop()
			l.head++
			if keep(w.item) {
				l.q.push(waitingItem[T]{item: w.item, considered: i == 1})
			} else {
				dropped = append(dropped, w.item)
			}
		}
		l.head = 0
	}
	return dropped
}

// Resubmit lets one-shots wait for the next connection, before those that do already. It
// is for use between Down and Up.
func (s *Sender[T]) Resubmit(items []T) {
	if len(items) == 0 {
		return
	}
	l := &s.lanes[0]
	n := l.q.len()
	for _, x := range items {
		l.q.push(waitingItem[T]{item: x})
	}
	for range n {
		l.q.push(l.q.pop())
	}
}

// Waiting is the number of messages that have not been put.
func (s *Sender[T]) Waiting() int { return s.lanes[0].q.len() + s.lanes[1].q.len() }

// Each calls f for what has not been put.
func (s *Sender[T]) Each(f func(T)) {
	for i := range s.lanes {
		for k := range s.lanes[i].q.len() {
			f(s.lanes[i].q.at(k).item)
		}
	}
}

// Submit adds item to those that wait. The error wraps ErrGrown; item is not added then.
func (s *Sender[T]) Submit(item T) error {
	need := s.need(item)
	l := s.lane(need)
	if s.connected && s.freedByAnswer {
		if err := s.growth(need); err != nil {
			return err
		}
	}
	if l.q.len() == 0 {
		l.changed = true
	}
	l.q.push(waitingItem[T]{item: item, considered: !s.connected && !need.OneShot})
	return nil
}

func (s *Sender[T]) lane(need Need) *lane[T] {
	if need.OneShot {
		return &s.lanes[0]
	}
	return &s.lanes[1]
}

// growth refuses what would make a StepMesh node abort.
func (s *Sender[T]) growth(need Need) error {
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

func (s *Sender[T]) route(r Route) *route {
	if t := s.routes[r]; t != nil {
		return t
	}
	t := &route{Route: r}
	s.routes[r] = t
	return t
}

// take finds a free slot that is large enough, and marks it.
func (s *Sender[T]) take(need Need) *RemoteSlot {
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

func (s *Sender[T]) release(p *RemoteSlot) {
	if p.busy {
		p.busy = false
		p.route.free++
		s.lanes[1].changed = true
	}
}

// Release takes back the slot of a Put whose message was dropped.
func (s *Sender[T]) Release(p *RemoteSlot) { s.release(p) }

// considerRequest returns the slot request for entry i of l, unless enough are open.
func (s *Sender[T]) considerRequest(l *lane[T], i int, need Need) (a Action[T], ok bool) {
	w := l.q.at(i)
	if w.requested || w.slot != nil {
		return a, false
	}
	if need.OneShot {
		s.origin++
		w.requested = true
		s.requests[s.origin] = &request{need: need, seq: l.head + uint64(i)}
		return Action[T]{Kind: Request, Item: w.item, Origin: s.origin, Need: need}, true
	}
	r := s.route(need.Route)
	if w.route != r {
		if w.route != nil {
			w.route.queued--
		}
		w.route = r
		r.queued++
	}
	limit := 1
	if !s.freedByAnswer {
		limit = Eager(need.Data)
	}
	fits, sized := 0, 0
	for _, p := range r.slots {
		if p.fits(&need) {
			fits++
			if !p.busy {
				sized++
			}
		}
	}
	if s.freedByAnswer && (r.free < len(r.slots) || s.growth(need) != nil) {
		return a, false // one request of a key at a time
	}
	if r.cooldown > 0 && fits > 0 {
		return a, false
	}
	if n := s.openRequests(r, need); sized+n >= r.queued || fits+n >= limit {
		return a, false
	}
	return s.newRequest(w, r, need), true
}

// openRequests counts the open slot requests whose answers will be large enough.
func (s *Sender[T]) openRequests(r *route, need Need) (n int) {
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

func (s *Sender[T]) newRequest(w *waitingItem[T], r *route, need Need) Action[T] {
	s.origin++
	w.requested = true
	r.requests++
	if r.Class == 0 {
		s.retire(r, need)
	}
	s.requests[s.origin] = &request{route: r, need: need}
	return Action[T]{Kind: Request, Item: w.item, Origin: s.origin, Need: need}
}

// retire forgets the slots of one key that are smaller than need. The receiver does
// so when it is asked for a larger one; all messages to them have been sent before.
func (s *Sender[T]) retire(r *route, need Need) {
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

// Requested returns what an open slot request is for.
func (s *Sender[T]) Requested(origin uint64) (Need, bool) {
	a := s.requests[origin]
	if a == nil {
		return Need{}, false
	}
	return a.need, true
}

// Reply is the answer to a slot request: p, whose lengths need not be set. shared is the
// route that the slot belongs to instead of the one asked for, if not nil. It
// reports false for an answer to nothing.
func (s *Sender[T]) Reply(origin uint64, p RemoteSlot, shared *Route) bool {
	a := s.requests[origin]
	if a == nil {
		return false
	}
	delete(s.requests, origin)
	place := &p
	place.MetaLen, place.DataLen = a.need.Meta, a.need.Exact
	if !a.need.OneShot && (shared != nil || a.need.Route.Class != 0) {
		_, place.DataLen = Class(a.need.Data)
	}
	if a.need.OneShot {
		l := &s.lanes[0]
		if i := a.seq - l.head; i < uint64(l.q.len()) {
			l.q.at(int(i)).slot = place
			l.changed = true
		}
		return true
	}
	s.lanes[1].changed = true
	a.route.requests--
	r := a.route
	if shared != nil && *shared != r.Route {
		s.forgetIfEmpty(r)
		r = s.route(*shared)
	} else if a.retired {
		return true
	}
	place.route, place.busy = r, false
	r.slots = append(r.slots, place)
	r.free++
	s.granted[place.Index] = place
	return true
}

// UseShared is the answer that the route asked for has no slots, and that there are
// enough of the route that Need names from now on. It reports false for an answer to
// nothing.
func (s *Sender[T]) UseShared(origin uint64) bool {
	a := s.requests[origin]
	if a == nil || a.route == nil {
		return false
	}
	delete(s.requests, origin)
	a.route.requests--
	s.forgetIfEmpty(a.route)
	l := &s.lanes[1]
	for i := range l.q.len() {
		if w := l.q.at(i); w.route == a.route {
			w.requested, w.considered = false, false
		}
	}
	l.changed, l.scanned = true, l.head
	return true
}

// forgetIfEmpty forgets r when it has nothing.
func (s *Sender[T]) forgetIfEmpty(r *route) {
	if len(r.slots) == 0 && r.requests == 0 && s.routes[r.Route] == r {
		delete(s.routes, r.Route)
	}
}

// Shared tells whether n, of one key, fits in a slot that all keys of its size class
// share, and in none of its key.
func (s *Sender[T]) Shared(n Need) bool {
	return !n.OneShot && n.Route.Class == 0 && !s.serves(s.routes[n.Route], n) && s.shared(n) != nil
}

// shared returns the route that Shared means, or nil.
func (s *Sender[T]) shared(n Need) *route {
	n.Route = Route{}
	n.Route.Class, n.Data = Class(n.Exact)
	if r := s.routes[n.Route]; s.serves(r, n) {
		return r
	}
	return nil
}

func (s *Sender[T]) serves(r *route, n Need) bool {
	return r != nil && slices.ContainsFunc(r.slots, func(p *RemoteSlot) bool { return p.fits(&n) })
}

// refusedCooldown is about a second.
const refusedCooldown = 500

// Refused is the answer that there will be no slot. It returns what the slot request was
// asked for, or false when it has found another slot meanwhile, or waits for one that
// there is. Where Shared is true, Need names the shared route from now on.
func (s *Sender[T]) Refused(origin uint64) (item T, need Need, ok bool) {
	a := s.requests[origin]
	if a == nil {
		return item, need, false
	}
	if s.Shared(a.need) {
		s.shared(a.need).cooldown = refusedCooldown
		s.UseShared(origin)
		return item, need, false
	}
	delete(s.requests, origin)
	l := s.lane(a.need)
	if a.route != nil {
		a.route.requests--
		s.forgetIfEmpty(a.route)
		if s.serves(a.route, a.need) { // a busy one is better than none
			a.route.cooldown = refusedCooldown
			l.changed = true
			return item, need, false
		}
	}
	for i := range l.q.len() {
		w := l.q.at(i)
		if a.need.OneShot && l.head+uint64(i) == a.seq || !a.need.OneShot && w.route == a.route {
			item, need, ok = w.item, a.need, true
			if w.route != nil {
				w.route.queued--
			}
			l.q.remove(i)
			if l.scanned > l.head+uint64(i) {
				l.scanned--
			}
			for _, o := range s.requests {
				if o.need.OneShot && a.need.OneShot && o.seq > a.seq {
					o.seq--
				}
			}
			break
		}
	}
	l.changed = true
	return item, need, ok
}

// Credit says that the slot with this index is free again. It reports false when
// that cannot be.
func (s *Sender[T]) Credit(index uint32) bool {
	p := s.granted[index]
	if p == nil {
		return true // retired since, as far as can be told
	}
	if !p.busy || s.freedByAnswer {
		return false
	}
	s.release(p)
	s.giveUp(p)
	return true
}

// Reclaim says that the receiver wants so many slots back, of so many bytes in all. Those
// that are free are given up now, the others as they become so. What it has wanted before
// is replaced. Slots of a StepMesh node do not come back.
func (s *Sender[T]) Reclaim(places, bytes int) {
	if s.freedByAnswer {
		return
	}
	s.wanted.places, s.wanted.bytes = places, bytes
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
func (s *Sender[T]) giveUp(p *RemoteSlot) {
	if s.wanted.places <= 0 && s.wanted.bytes <= 0 {
		return
	}
	s.wanted.places--
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
// told; see ReturnsSent.
func (s *Sender[T]) Returns() []uint32 { return s.returns }

// ReturnsSent says that the receiver has been told of the first n of Returns.
func (s *Sender[T]) ReturnsSent(n int) { s.returns = s.returns[:copy(s.returns, s.returns[n:])] }

// Answered says that the request with this key has been answered, by a node of the
// original.
func (s *Sender[T]) Answered(key uint64, push bool) {
	if r := s.routes[Route{Key: key, Push: push, Request: true}]; r != nil {
		for _, p := range r.slots {
			s.release(p)
		}
	}
}

// Next returns what is to be done next. Call it when there is room to send a message, until
// ok is false.
func (s *Sender[T]) Next() (a Action[T], ok bool) {
	if !s.connected {
		return a, false
	}
	for i := range s.lanes {
		l := &s.lanes[i]
		for l.changed {
			if a, ok = s.nextOf(l); ok {
				return a, true
			}
			l.changed = false
		}
	}
	for i := range s.lanes {
		if a, ok = s.nextRequest(&s.lanes[i]); ok {
			return a, true
		}
	}
	return s.extraRequest()
}

// nextOf is what is to be done for the first of l.
func (s *Sender[T]) nextOf(l *lane[T]) (a Action[T], ok bool) {
	if l.q.len() == 0 {
		return a, false
	}
	w := l.q.at(0)
	need := s.need(w.item)
	p := w.slot
	if !need.OneShot {
		p = s.take(need)
	}
	switch {
	case p != nil:
		return Action[T]{Kind: Put, Item: s.popFirst(l), Slot: p}, true
	case s.freedByAnswer && !need.OneShot:
		if err := s.growth(need); err != nil {
			return Action[T]{Kind: Drop, Item: s.popFirst(l), Err: err}, true
		}
	}
	// What it has requested may have gone to another, or be too small.
	w.requested = w.requested && (need.OneShot || s.openRequests(s.route(need.Route), need) > 0)
	return s.considerRequest(l, 0, need)
}

func (s *Sender[T]) popFirst(l *lane[T]) T {
	w := l.q.pop()
	l.head++
	if w.route != nil {
		w.route.queued--
	}
	return w.item
}

// nextRequest is the slot request of an entry of l that has not been considered. One-shots
// request their slots ahead, each for itself.
func (s *Sender[T]) nextRequest(l *lane[T]) (a Action[T], ok bool) {
	l.scanned = max(l.scanned, l.head)
	for l.scanned < l.head+uint64(l.q.len()) {
		i := int(l.scanned - l.head)
		l.scanned++
		w := l.q.at(i)
		if w.considered {
			continue
		}
		w.considered = true
		if a, ok = s.considerRequest(l, i, s.need(w.item)); ok {
			return a, true
		}
	}
	return a, false
}

// extraRequest is the slot request that Tick has found to be needed.
func (s *Sender[T]) extraRequest() (a Action[T], ok bool) {
	l := &s.lanes[1]
	if !s.extra || l.q.len() == 0 {
		s.extra = false
		return a, false
	}
	s.extra = false
	w := l.q.at(0)
	need := s.need(w.item)
	r := s.route(need.Route)
	if r.requests > 0 || r.free > 0 {
		return a, false
	}
	return s.newRequest(w, r, need), true
}

// Tick is called every few milliseconds. Where the first message has waited since the
// last Tick for one of many slots, which may be held by messages that wait for it in
// turn, Next will request one more.
func (s *Sender[T]) Tick() {
	l := &s.lanes[1]
	if !s.connected || s.freedByAnswer || l.q.len() == 0 {
		l.q.mark = 0
		return
	}
	w := l.q.at(0)
	need := s.need(w.item)
	r := s.route(need.Route)
	if r.cooldown > 0 {
		if r.cooldown--; r.cooldown > 0 {
			return
		}
	}
	if stamp := l.head + 1; l.q.mark != stamp {
		l.q.mark = stamp
		return
	}
	s.extra = r.requests == 0 && r.free == 0
}

// fifo is a queue in a ring.
type fifo[T any] struct {
	ring []T
	from int
	n    int
	mark uint64
}

func (f *fifo[T]) len() int { return f.n }

func (f *fifo[T]) at(i int) *T { return &f.ring[(f.from+i)&(len(f.ring)-1)] }

func (f *fifo[T]) push(v T) {
	if f.n == len(f.ring) {
		ring := make([]T, max(16, 2*f.n))
		for i := range f.n {
			ring[i] = *f.at(i)
		}
		f.ring, f.from = ring, 0
	}
	f.n++
	*f.at(f.n - 1) = v
}

func (f *fifo[T]) pop() T {
	var zero T
	p := f.at(0)
	v := *p
	*p = zero
	f.from = (f.from + 1) & (len(f.ring) - 1)
	f.n--
	return v
}

func (f *fifo[T]) remove(i int) {
	var zero T
	for ; i < f.n-1; i++ {
		*f.at(i) = *f.at(i + 1)
	}
	*f.at(f.n - 1) = zero
	f.n--
}
