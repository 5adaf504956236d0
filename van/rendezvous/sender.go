package rendezvous

import "github.com/stepaf/stepaf-go/internal/fifo"

// This file owns the queues of messages that wait for slots, and the choice of the next action.

// Kind is the kind of an Action.
type Kind int

// The kinds of actions.
const (
	// Put: send Item to Slot.
	Put Kind = iota
	// Request: send a slot request for Item with Origin and Need. Its reply is passed to Reply,
	// NotNeeded or Refused with the same origin.
	Request
	// Drop: Item cannot be put and is removed. Err wraps ErrGrown.
	Drop
)

// Action is the next step of the caller. Each needs the capacity to send one message.
type Action[T any] struct {
	Kind   Kind
	Item   T
	Slot   *RemoteSlot
	Origin uint64
	Need   Need
	Err    error
}

// Sender is the sending side of one connection. Its methods report events, and
// Next returns the resulting actions. It is not safe for concurrent use.
type Sender[T any] struct {
	need func(T) Need
	remoteSlots
	connected bool
	origin    uint64         // of the last slot request
	queues    [2]outQueue[T] // one-shots, others

	// extra is set when the first message of the second queue has waited for long. Then one more
	// slot is requested.
	extra bool
}

// outQueue is a FIFO queue of messages that have not been put. One-shots have their own, so that neither
// kind waits for the other.
type outQueue[T any] struct {
	q      fifo.Queue[waitingItem[T]]
	head   uint64 // number of q's first entry
	ticked uint64 // head+1 at an earlier Tick; 0: none
	// changed is set when q's first entry may be put, or may need a slot request.
	changed bool
	// scanned is the number of the first entry that may not have been considered for a slot
	// request of its own.
	scanned uint64
	removed int // position of the entry that was refused last
}

func (l *outQueue[T]) at(i int) *waitingItem[T] { return &l.q.All()[i] }

type waitingItem[T any] struct {
	item       T
	requested  bool
	considered bool        // for a slot request of its own
	slot       *RemoteSlot // of a one-shot
	route      *route      // that counts it as queued
}

// NewSender makes a Sender without a connection: submitted messages wait for Connect. need
// returns the need of an item, which may change while the item waits.
func NewSender[T any](need func(T) Need) *Sender[T] {
	s := &Sender[T]{need: need}
	s.reset()
	return s
}

func (s *Sender[T]) reset() {
	s.last = nil
	s.routes, s.granted, s.requests = map[Route]*route{}, map[uint32]*RemoteSlot{}, map[uint64]*request{}
	s.wanted.slots, s.wanted.bytes, s.returns = 0, 0, s.returns[:0]
}

// Connect begins a connection. freedByAnswer is set for a StepMesh peer. Slots of an
// earlier connection are discarded.
func (s *Sender[T]) Connect(freedByAnswer bool) {
	s.reset()
	s.connected, s.freedByAnswer = true, freedByAnswer
	for i := range s.queues {
		l := &s.queues[i]
		l.changed, l.scanned = true, l.head
	}
}

// Disconnect ends the connection. It returns the messages that had not been put and for which keep
// is false. The others wait for the next connection.
func (s *Sender[T]) Disconnect(keep func(T) bool) (dropped []T) {
	s.reset()
	s.connected, s.extra = false, false
	for i := range s.queues {
		l := &s.queues[i]
		for range l.q.Len() {
			w := l.q.Take()
			l.head++
			if keep(w.item) {
				l.q.Put(waitingItem[T]{item: w.item})
			} else {
				dropped = append(dropped, w.item)
			}
		}
		l.head = 0
	}
	return dropped
}

// Resubmit queues one-shots for the next connection, before those that are queued already. Call it
// between Disconnect and Connect.
func (s *Sender[T]) Resubmit(items []T) {
	if len(items) == 0 {
		return
	}
	l := &s.queues[0]
	n := l.q.Len()
	for _, x := range items {
		l.q.Put(waitingItem[T]{item: x})
	}
	for range n {
		l.q.Put(l.q.Take())
	}
}

// Waiting returns the number of messages that have not been put.
func (s *Sender[T]) Waiting() int { return s.queues[0].q.Len() + s.queues[1].q.Len() }

// Each calls f for each message that has not been put.
func (s *Sender[T]) Each(f func(T)) {
	for i := range s.queues {
		for k := range s.queues[i].q.Len() {
			f(s.queues[i].at(k).item)
		}
	}
}

// Check refuses an item that the receiver, a StepMesh node, cannot receive. The error wraps ErrGrown.
func (s *Sender[T]) Check(item T) error {
	if !s.connected || !s.freedByAnswer {
		return nil
	}
	return s.growth(s.need(item))
}

// Direct returns the slot for an item that need not be queued: no other item waits, and a slot for it is free.
func (s *Sender[T]) Direct(item T) *RemoteSlot {
	if !s.connected || s.Waiting() > 0 {
		return nil
	}
	return s.take(s.need(item))
}

// Submit queues item, which Check accepts.
func (s *Sender[T]) Submit(item T, oneShot bool) {
	l := s.queue(oneShot)
	if l.q.Len() == 0 {
		l.changed = true
	}
	l.q.Put(waitingItem[T]{item: item})
}

func (s *Sender[T]) queue(oneShot bool) *outQueue[T] {
	if oneShot {
		return &s.queues[0]
	}
	return &s.queues[1]
}

// considerRequest returns the slot request for entry i of l, unless enough are open.
func (s *Sender[T]) considerRequest(l *outQueue[T], i int, need Need) (a Action[T], ok bool) {
	w := l.at(i)
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
		limit = Eager(need.Data + need.Meta)
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

// Reply reports the reply to a slot request: p, whose lengths need not be set. It returns false if there is no such request.
func (s *Sender[T]) Reply(origin uint64, p RemoteSlot) bool {
	a := s.requests[origin]
	if a == nil {
		return false
	}
	delete(s.requests, origin)
	place := &p
	place.MetaLen, place.DataLen = a.need.Meta, a.need.Data
	if a.need.OneShot {
		l := &s.queues[0]
		if i := a.seq - l.head; i < uint64(l.q.Len()) {
			l.at(int(i)).slot = place
			l.changed = true
		}
		return true
	}
	s.queues[1].changed = true
	a.route.requests--
	r := a.route
	if a.retired {
		return true
	}
	place.route, place.busy = r, false
	r.slots = append(r.slots, place)
	r.free++
	s.granted[place.Index] = place
	return true
}

// refusedCooldown is about a second.
const refusedCooldown = 500

// Refused reports the reply that there will be no slot. It removes and returns a message that
// needs as much as was requested. It returns false if there is none, since that message has found
// another slot meanwhile, waits for an existing one, or needs another one now. Messages that counted
// on the request then request slots of their own.
func (s *Sender[T]) Refused(origin uint64) (item T, need Need, ok bool) {
	a := s.requests[origin]
	if a == nil {
		return item, need, false
	}
	delete(s.requests, origin)
	l := s.queue(a.need.OneShot)
	l.changed = true
	if a.route != nil {
		a.route.requests--
		s.removeIfEmpty(a.route)
		if a.route.serves(a.need) { // a busy slot is better than none
			a.route.cooldown = refusedCooldown
			return item, need, false
		}
	}
	for i := range l.q.Len() {
		w := l.at(i)
		if a.need.OneShot && l.head+uint64(i) == a.seq || !a.need.OneShot && w.route == a.route && s.need(w.item) == a.need {
			return s.removeRefused(l, i, a), a.need, true
		}
	}
	s.NeedsChanged()
	return item, need, false
}

// removeRefused removes entry i of l, whose slot request a was refused, and returns its message.
func (s *Sender[T]) removeRefused(l *outQueue[T], i int, a *request) T {
	w := l.at(i)
	item := w.item
	if w.route != nil {
		w.route.queued--
	}
	all := l.q.All()
	copy(all[1:i+1], all[:i])
	l.q.Take()
	l.removed = i
	if l.scanned > l.head+uint64(i) {
		l.scanned--
	}
	for _, o := range s.requests {
		if o.need.OneShot && a.need.OneShot && o.seq > a.seq {
			o.seq--
		}
	}
	return item
}

// Replace queues items in place of the message that Refused has just returned, which was no one-shot.
func (s *Sender[T]) Replace(items []T) {
	l := &s.queues[1]
	rotate := func(n int) {
		for range n {
			l.q.Put(l.q.Take())
		}
	}
	behind := l.q.Len() - l.removed
	rotate(l.removed)
	for _, x := range items {
		l.q.Put(waitingItem[T]{item: x})
	}
	rotate(behind)
	l.changed, l.scanned = true, min(l.scanned, l.head+uint64(l.removed))
}

// NotNeeded reports the reply that the message of the request does not need that slot: need returns another one from now on. It returns
// false if there is no such request.
func (s *Sender[T]) NotNeeded(origin uint64) bool {
	a := s.requests[origin]
	if a == nil || a.route == nil {
		return false
	}
	delete(s.requests, origin)
	a.route.requests--
	s.removeIfEmpty(a.route)
	s.NeedsChanged()
	return true
}

// NeedsChanged considers all queued messages for slot requests again: their needs have changed, or what they counted on.
func (s *Sender[T]) NeedsChanged() {
	l := &s.queues[1]
	for i := range l.q.Len() {
		w := l.at(i)
		w.requested, w.considered = false, false
	}
	l.changed, l.scanned = true, l.head
}

// Credit reports that the slot with this index is free again. It returns false if
// the slot was not in use.
func (s *Sender[T]) Credit(index uint32) bool {
	p := s.granted[index]
	if p == nil {
		return true // it may have been retired since
	}
	if !p.busy || s.freedByAnswer {
		return false
	}
	s.Release(p)
	s.returnSlot(p)
	return true
}

// Next returns the next action. Call it while there is capacity to send a message, until
// ok is false.
func (s *Sender[T]) Next() (a Action[T], ok bool) {
	if !s.connected {
		return a, false
	}
	if s.freed {
		s.freed, s.queues[1].changed = false, true
	}
	for i := range s.queues {
		l := &s.queues[i]
		for l.changed {
			if a, ok = s.nextOf(l); ok {
				return a, true
			}
			l.changed = false
		}
	}
	for i := range s.queues {
		if a, ok = s.nextRequest(&s.queues[i]); ok {
			return a, true
		}
	}
	return s.extraRequest()
}

// nextOf returns the action for l's first message.
func (s *Sender[T]) nextOf(l *outQueue[T]) (a Action[T], ok bool) {
	if l.q.Len() == 0 {
		return a, false
	}
	w := l.at(0)
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
	// Its requested slot may be in use by another message, or be too small.
	w.requested = w.requested && (need.OneShot || s.openRequests(s.route(need.Route), need) > 0)
	return s.considerRequest(l, 0, need)
}

// First returns the first queued message that is no one-shot.
func (s *Sender[T]) First() (item T, ok bool) {
	l := &s.queues[1]
	if !s.connected || l.q.Len() == 0 {
		return item, false
	}
	return l.at(0).item, true
}

func (s *Sender[T]) popFirst(l *outQueue[T]) T {
	w := l.q.Take()
	l.head++
	if w.route != nil {
		w.route.queued--
	}
	return w.item
}

// nextRequest returns the slot request of an entry of l that has not been considered. Each one-shot
// requests a slot in advance.
func (s *Sender[T]) nextRequest(l *outQueue[T]) (a Action[T], ok bool) {
	l.scanned = max(l.scanned, l.head)
	for l.scanned < l.head+uint64(l.q.Len()) {
		i := int(l.scanned - l.head)
		l.scanned++
		w := l.at(i)
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

// extraRequest returns the additional slot request that Tick has decided on.
func (s *Sender[T]) extraRequest() (a Action[T], ok bool) {
	l := &s.queues[1]
	if !s.extra || l.q.Len() == 0 {
		s.extra = false
		return a, false
	}
	s.extra = false
	w := l.at(0)
	need := s.need(w.item)
	r := s.route(need.Route)
	if s.expects(r, need) {
		return a, false
	}
	return s.newRequest(w, r, need), true
}

// Tick must be called every few milliseconds. If the first message has waited since the
// last Tick for one of many slots, Next will request one more: the slots that fit may hold
// messages that in turn wait for the first one.
func (s *Sender[T]) Tick() {
	l := &s.queues[1]
	if !s.connected || s.freedByAnswer || l.q.Len() == 0 {
		l.ticked = 0
		return
	}
	w := l.at(0)
	need := s.need(w.item)
	r := s.route(need.Route)
	if r.cooldown > 0 {
		if r.cooldown--; r.cooldown > 0 {
			return
		}
	}
	if stamp := l.head + 1; l.ticked != stamp {
		l.ticked = stamp
		return
	}
	s.extra = !s.expects(r, need)
	l.changed = l.changed || !s.extra // its need may have changed since Next considered it
}
