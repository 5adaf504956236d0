package rendezvous

// This file owns the queues of messages that wait for slots, and what is to be done next.

// Kind is what an Action is.
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
	remoteSlots
	connected bool
	origin    uint64     // of the last slot request
	lanes     [2]lane[T] // one-shots, others

	// extra is set when the first message of the second lane has waited for long: one more
	// slot is requested.
	extra bool
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
	s.wanted.slots, s.wanted.bytes, s.returns = 0, 0, s.returns[:0]
}

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
				l.q.push(waitingItem[T]{item: w.item})
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
	l.q.push(waitingItem[T]{item: item})
	return nil
}

func (s *Sender[T]) lane(need Need) *lane[T] {
	if need.OneShot {
		return &s.lanes[0]
	}
	return &s.lanes[1]
}

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

// Reply is the answer to a slot request: p, whose lengths need not be set. shared is the
// route that the slot belongs to instead of the requested one, if not nil. It
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

// UseShared is the reply that the requested route has no slots, and that there are
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
		if a.route.serves(a.need) { // a busy one is better than none
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
		return true // retired since, as far as is known here
	}
	if !p.busy || s.freedByAnswer {
		return false
	}
	s.Release(p)
	s.giveUp(p)
	return true
}

// Next returns what is to be done next. Call it when there is room to send a message, until
// ok is false.
func (s *Sender[T]) Next() (a Action[T], ok bool) {
	if !s.connected {
		return a, false
	}
	if s.freed {
		s.freed, s.lanes[1].changed = false, true
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
	case s.freedByAnswer:
		if err := s.growth(need); err != nil {
			return Action[T]{Kind: Drop, Item: s.popFirst(l), Err: err}, true
		}
	}
	// What it has requested may have gone to another, or be too small.
	w.requested = w.requested && (need.OneShot || s.openRequests(s.route(need.Route), need) > 0)
	return s.considerRequest(l, 0, need)
}

// First is the first message that waits and is no one-shot.
func (s *Sender[T]) First() (item T, ok bool) {
	l := &s.lanes[1]
	if !s.connected || l.q.len() == 0 {
		return item, false
	}
	return l.q.at(0).item, true
}

// TakeFirst takes First, which needs no slot of its own.
func (s *Sender[T]) TakeFirst() {
	l := &s.lanes[1]
	s.popFirst(l)
	l.changed = true
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
