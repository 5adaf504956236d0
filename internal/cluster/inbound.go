package cluster

// This file owns the requests that an application has accepted and not answered yet: their contexts, their cancellations, and the
// shutdown of a server, which waits for their answers.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/van"
)

// Inbound has, for each sender, the accepted requests and the recent cancellations of an application. Senders share no lock. Inbound is
// safe for concurrent use.
type Inbound struct {
	self      *nodeInfo
	processes *processes

	draining atomic.Bool           // Refuse or Drain was called
	over     atomic.Pointer[error] // the reason why all contexts have ended; nil before
	closed   atomic.Bool           // the customer was closed, or its node has ended
	idle     chan struct{}         // contains a token when Drain must check again

	mu sync.Mutex // guards changes of by
	by atomic.Pointer[map[int]*inboundSender]
}

// inboundSender lists the requests of one sender, and the ones that it has canceled.
type inboundSender struct {
	running  atomic.Int32 // number of running handlers
	canceled atomic.Int32 // number of cancellations; usually 0, which saves the lock

	mu            sync.Mutex // guards the lists, and the fields of the requests
	list          []*Accepted
	cancellations []cancellation // recent ones, oldest first
}

// Accepted is one accepted request. It is part of the application's state of the request. That state may be reused after Leave. The
// zero value is ready for Accept.
type Accepted struct {
	from         *inboundSender // set by Accept
	epoch        uint32
	lostAt       uint64 // process.lostAt of the sender; it is another one after a loss
	customer, ts int32
	at           int // 1 + the index in from.list; 0: not in the list

	ctx context.Context // nil until Context is called
	end context.CancelCauseFunc
}

// ErrAnswered: a request or batch was answered or refused before.
var ErrAnswered = errors.New("answered already")

// Causes of the end of a context.
var (
	errAnswered   = fmt.Errorf("%w: the request was %w", context.Canceled, ErrAnswered)
	errUnwanted   = fmt.Errorf("%w: the sender of the request no longer waits for an answer", context.Canceled)
	errCanceledBy = fmt.Errorf("%w: the sender has canceled the request", context.Canceled)
)

// NewInbound returns an Inbound for App.AddServer.
func NewInbound() *Inbound { return &Inbound{idle: make(chan struct{}, 1)} }

// known returns the entry of a sender, or nil if it has sent neither a request nor a cancellation.
func (b *Inbound) known(sender int) *inboundSender {
	if by := b.by.Load(); by != nil {
		return (*by)[sender]
	}
	return nil
}

// of returns the entry of a sender. Ids that no member can have share an entry.
func (b *Inbound) of(sender int) *inboundSender {
	if s := b.known(sender); s != nil {
		return s
	}
	if !b.self.mayJoin(sender) {
		sender = van.Empty
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	by := map[int]*inboundSender{}
	if old := b.by.Load(); old != nil {
		if s := (*old)[sender]; s != nil {
			return s
		}
		by = maps.Clone(*old)
	}
	s := &inboundSender{}
	by[sender] = s
	b.by.Store(&by)
	return s
}

// addCancellation remembers w, of the process that had the sender's id at that epoch.
func (b *Inbound) addCancellation(w Canceled, epoch uint32) {
	s := b.of(w.Sender)
	s.mu.Lock()
	defer s.mu.Unlock()
	now := clock.Now()
	s.expire(now, maxCancellations-1)
	s.cancellations = append(s.cancellations, cancellation{w, epoch, now})
	s.canceled.Store(int32(len(s.cancellations)))
}

// wasCanceled reports whether the process that had the sender's id at that epoch has canceled the request.
func (b *Inbound) wasCanceled(sender int, epoch uint32, customer, ts int32) bool {
	s := b.known(sender)
	if s == nil || s.canceled.Load() == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expire(clock.Now(), maxCancellations)
	return slices.ContainsFunc(s.cancellations, func(w cancellation) bool { return w.epoch == epoch && w.Has(customer, ts) })
}

// Accept records an accepted request in r. The other arguments are fields of the request's first message. After Refuse or Drain,
// Accept returns an error that wraps van.ErrFinished, and the caller refuses the request with that error.
func (b *Inbound) Accept(r *Accepted, sender int, epoch uint32, customer, ts int32) error {
	s, lostAt := b.of(sender), b.processes.of(sender).lostAt
	s.mu.Lock()
	if b.draining.Load() {
		s.mu.Unlock()
		return b.refusal()
	}
	r.from, r.epoch, r.lostAt, r.customer, r.ts = s, epoch, lostAt, customer, ts
	r.ctx, r.end = nil, nil
	s.list = append(s.list, r)
	r.at = len(s.list)
	s.mu.Unlock()
	// From here on, a cancellation or the loss of the sender finds r in the list. The check covers earlier ones.
	if !b.isAwaited(sender, epoch, customer, ts) || b.processes.of(sender).lostAt != lostAt {
		b.leave(r, errUnwanted)
	}
	return nil
}

// Refuse makes Accept refuse all further requests.
func (b *Inbound) Refuse() { b.draining.Store(true) }

// Draining returns the error with which new requests are refused, nil before Refuse and Drain.
func (b *Inbound) Draining() error {
	if !b.draining.Load() {
		return nil
	}
	return b.refusal()
}

func (b *Inbound) refusal() error {
	return fmt.Errorf("%w: the server shuts down and accepts no more requests", van.ErrFinished)
}

// Enter and Exit enclose the acceptance of a request of sender and the call of its handler.
func (b *Inbound) Enter(sender int) { b.of(sender).running.Add(1) }

// Exit records that the handler has returned, see Enter.
func (b *Inbound) Exit(sender int) {
	if b.of(sender).running.Add(-1) == 0 {
		b.changed()
	}
}

// Leave records that r was answered or refused, or will not be answered. It has no effect on a request that has left, or was
// never accepted. The context of r ends.
func (b *Inbound) Leave(r *Accepted) { b.leave(r, errAnswered) }

func (b *Inbound) leave(r *Accepted, cause error) {
	s := r.from
	if s == nil {
		return
	}
	s.mu.Lock()
	end := s.remove(r)
	s.mu.Unlock()
	if end != nil {
		end(cause)
	}
	b.changed()
}

// remove removes r from the list, and returns the function that ends its context, nil if there is none. s.mu is held.
func (s *inboundSender) remove(r *Accepted) context.CancelCauseFunc {
	if r.at == 0 {
		return nil
	}
	last := len(s.list) - 1
	moved := s.list[last]
	s.list[r.at-1], moved.at = moved, r.at
	s.list[last], s.list = nil, s.list[:last]
	r.at = 0
	return r.end
}

// changed makes Drain check again.
func (b *Inbound) changed() {
	if b.draining.Load() {
		wake.Put(b.idle)
	}
}

// Context returns the context of r, a request of sender. isCurrent reports whether the caller's handle of the request still
// belongs to r. If it does not, the request has been answered.
func (b *Inbound) Context(r *Accepted, sender int, isCurrent func() bool) context.Context {
	s := b.of(sender)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !isCurrent() || r.from != s:
		return ended(errAnswered)
	case r.ctx != nil:
		return r.ctx
	case r.at == 0:
		return ended(errUnwanted)
	}
	r.ctx, r.end = context.WithCancelCause(context.Background())
	if why := b.over.Load(); why != nil {
		r.end(*why)
	}
	return r.ctx
}

// ended returns a context that has ended.
func ended(cause error) context.Context {
	ctx, end := context.WithCancelCause(context.Background())
	end(cause)
	return ctx
}

// drop removes the requests of sender that gone selects, and ends their contexts with cause.
func (b *Inbound) drop(sender int, cause error, gone func(*Accepted) bool) {
	s := b.known(sender)
	if s == nil {
		return
	}
	var ends []context.CancelCauseFunc
	s.mu.Lock()
	for _, r := range slices.Clone(s.list) {
		if gone(r) {
			if end := s.remove(r); end != nil {
				ends = append(ends, end)
			}
		}
	}
	s.mu.Unlock()
	for _, end := range ends {
		end(cause)
	}
	b.changed()
}

// cancel handles a cancellation.
func (b *Inbound) cancel(w Canceled, epoch uint32) {
	b.addCancellation(w, epoch)
	b.drop(w.Sender, errCanceledBy, func(r *Accepted) bool { return r.epoch == epoch && w.Has(r.customer, r.ts) })
}

// peerLost handles the loss of a node, or its replacement. If the node is back already, it drops the requests from before the loss.
func (b *Inbound) peerLost(id int, cause error) {
	lostAt := b.processes.of(id).lostAt
	b.drop(id, cause, func(r *Accepted) bool { return r.lostAt != lostAt || !b.processes.waits(id, r.epoch) })
}

// isAwaited implements Customer.IsAwaited.
func (b *Inbound) isAwaited(sender int, epoch uint32, customer, ts int32) bool {
	return b.processes.waits(sender, epoch) && !b.wasCanceled(sender, epoch, customer, ts)
}

// maySendRest implements Customer.MaySendRest.
func (b *Inbound) maySendRest(sender int, epoch uint32, customer, ts int32) bool {
	return b.processes.maySendRest(sender, epoch) && !b.wasCanceled(sender, epoch, customer, ts)
}

// close ends all contexts permanently: the customer or its node is closed, or has failed.
func (b *Inbound) close(cause error) {
	b.closed.Store(true)
	b.endAll(cause)
	b.changed()
}

// endAll ends all contexts, also of requests that are accepted later.
func (b *Inbound) endAll(cause error) {
	if !b.over.CompareAndSwap(nil, &cause) {
		return
	}
	by := b.by.Load()
	if by == nil {
		return
	}
	var ends []context.CancelCauseFunc
	for _, s := range *by {
		s.mu.Lock()
		for _, r := range s.list {
			if r.end != nil {
				ends = append(ends, r.end)
			}
		}
		s.mu.Unlock()
	}
	for _, end := range ends {
		end(cause)
	}
}

// Drain calls Refuse, and waits until all accepted requests have left and no handler runs. If ctx ends
// first, the contexts of the requests end, and the error names the senders that wait. If the customer is closed first, the
// error wraps van.ErrClosed. Drain may be called again, and by several goroutines.
func (b *Inbound) Drain(ctx context.Context) error {
	begun := clock.Now()
	b.Refuse()
	defer wake.Put(b.idle) // wakes another Drain
	for {
		waiting := b.waiting()
		if waiting == "" {
			return nil
		}
		fail := func(err error) error {
			return &van.Error{Op: "shutdown", Node: b.self.Name(), Detail: "not answered: " + waiting, Elapsed: time.Duration(clock.Now() - begun), Err: err}
		}
		if b.closed.Load() {
			return fail(van.ErrClosed)
		}
		select {
		case <-b.idle:
		case <-ctx.Done():
			why := van.TimedOut(context.Cause(ctx))
			b.endAll(fmt.Errorf("%s shuts down: %w", b.self.Name(), why))
			return fail(why)
		}
	}
}

// waiting lists the senders with requests or running handlers, for errors; "" if there are none.
func (b *Inbound) waiting() string {
	by := b.by.Load()
	if by == nil {
		return ""
	}
	var names []string
	more := 0
	for _, id := range slices.Sorted(maps.Keys(*by)) {
		s := (*by)[id]
		s.mu.Lock()
		n := len(s.list)
		s.mu.Unlock()
		running := s.running.Load() // read after the list: a request that has left the list had entered its handler before
		switch {
		case n == 0 && running == 0:
		case len(names) == maxNames:
			more++
		case n == 0:
			names = append(names, fmt.Sprintf("%s (running handlers: %d)", b.self.peerName(id), running))
		default:
			names = append(names, fmt.Sprintf("%s (requests: %d)", b.self.peerName(id), n))
		}
	}
	if more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, ", ")
}

// maxNames is the number of peers that an error names.
const maxNames = 8
