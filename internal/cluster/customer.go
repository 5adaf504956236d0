package cluster

// Customer: opens requests, waits for them, and delivers messages to an application.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// ErrUnknownHandler: the timestamp was never issued, has been waited for already, or belongs to a request that
// finished too long ago to be remembered.
var ErrUnknownHandler = errors.New("unknown handler")

// ErrOtherWaits: another goroutine waits for the handler, and gets the result. It matches ErrUnknownHandler, too.
var ErrOtherWaits = fmt.Errorf("%w, now", ErrUnknownHandler)

// ErrPending: WaitSlice ended before the request did. Wait again.
var ErrPending = errors.New("not finished yet")

// errLate: an answer belongs to a request that has ended.
var errLate = errors.New("late or unknown answer")

// Customer is the part of an application object at a node: its requests in flight, and the messages for it. It is
// safe for concurrent use.
type Customer struct {
	node    *Node
	app, id int
	handle  func(*van.Message)
	serves  bool    // it accepts requests, see App.AddServer
	traces  *traces // nil unless they are kept

	requests
	backlogs backlogs

	inbound    *Inbound
	onCanceled atomic.Pointer[func(Canceled)]
}

func newCustomer(n *Node, app, id int, first int32, in *Inbound, handle func(*van.Message)) *Customer {
	in.self, in.processes = &n.nodeInfo, &n.processes
	c := &Customer{node: n, app: app, id: id, inbound: in, handle: handle}
	c.backlogs.init(&n.nodeInfo, &n.apps.overfull, func(msg *van.Message) {
		if msg.Request && c.serves {
			n.notices.refuse(msg.Sender, msg.ProcessEpoch, msg.AppID, msg.CustomerID, msg.Timestamp,
				fmt.Errorf("%w: %s has closed application %d", van.ErrFinished, n.Name(), app))
		}
	})
	c.requests.init(first)
	return c
}

// AppID is the application id that the customer's messages carry.
func (c *Customer) AppID() int { return c.app }

// ID is the customer id that the customer's messages carry.
func (c *Customer) ID() int { return c.id }

// Open reserves n consecutive timestamps in r. Each of receivers (node ids, without repeats) owes an answer to each
// of them. op names the operation in errors. Send the messages afterwards, with r.First() and following; if a send
// fails, call Abort.
//
// Without receivers the request is finished at once.
func (c *Customer) Open(r *Request, op string, sink Sink, n int, receivers []int) error {
	if n <= 0 {
		return fmt.Errorf("%s: %w: %d timestamps, want at least 1", op, van.ErrInvalid, n)
	}
	if err := c.node.lifetime.Alive(); err != nil {
		return &van.Error{Op: op, Node: c.node.Name(), Err: err}
	}
	c.mu.Lock()
	first, err := c.reserve(n)
	if err != nil {
		c.mu.Unlock()
		return &van.Error{Op: op, Node: c.node.Name(), Err: err}
	}
	r.mu.Lock()
	r.reset(c, op, sink, first, n, receivers)
	r.mu.Unlock()
	c.enter(r)
	c.mu.Unlock()

	// A peer that was lost before the request was in the table has not failed it and is checked here. A later loss
	// finds the request in the table. The same holds for the end of this node.
	if err := c.node.lifetime.Alive(); err != nil {
		r.fail(&van.Error{Op: op, Node: c.node.Name(), Err: err})
		return nil
	}
	for _, id := range receivers {
		if cause := c.node.processes.lost(id); cause != nil {
			r.mu.Lock()
			r.unsent = true
			r.mu.Unlock()
			r.failPeer(id, cause, math.MaxUint64)
			return nil
		}
	}
	if len(receivers) == 0 {
		r.mu.Lock()
		r.finishIfDone()
	}
	return nil
}

// Skip issues n timestamps, for messages that belong to no Request, and returns the first. After the largest
// timestamp follows 0.
func (c *Customer) Skip(n int32) (first int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first = c.next
	c.next = (first + n) & math.MaxInt32
	return first
}

// Abort fails a request whose messages could not all be sent.
func (c *Customer) Abort(r *Request, err error) { r.fail(err) }

// Wait waits until the request with handler ts is finished, and forgets it. limit counts from Open; 0 means that only
// ctx ends the wait. When the wait ends before the request does, the request is canceled and the error names the
// peers that have not answered.
func (c *Customer) Wait(ctx context.Context, ts int32, limit time.Duration) error {
	return c.WaitSlice(ctx, ts, limit, 0)
}

// WaitSlice is Wait for callers that have other work from time to time: when slice passes
// first, it returns ErrPending and the request goes on. A slice of 0 is Wait.
func (c *Customer) WaitSlice(ctx context.Context, ts int32, limit, slice time.Duration) error {
	c.mu.Lock()
	r := c.lookup(ts)
	if r == nil || r.first != ts || r.waiting {
		defer c.mu.Unlock()
		return c.cannotWait(ts, r)
	}
	c.claim(r)
	var timer *time.Timer
	if limit > 0 || slice > 0 {
		if k := len(c.timers); k > 0 {
			timer, c.timers = c.timers[k-1], c.timers[:k-1]
		} else {
			timer = time.NewTimer(time.Hour)
		}
	}
	c.mu.Unlock()

	err := r.wait(ctx, limit, slice, timer)

	c.mu.Lock()
	if timer != nil {
		c.timers = append(c.timers, timer)
	}
	if err == ErrPending {
		r.mu.Lock()
		r.waiting = false
		done, gen := r.over, r.gen
		r.mu.Unlock()
		c.mu.Unlock()
		if done { // finishIfDone has left it to this waiter
			c.addFinished(r, gen)
		}
		return err
	}
	c.remove(r)
	c.mu.Unlock()
	c.recycle(r)
	return err
}

// Try is Wait without waiting: it returns ErrPending while the request is in flight, or another goroutine waits for it.
func (c *Customer) Try(ts int32) error {
	c.mu.Lock()
	r := c.lookup(ts)
	if r == nil || r.first != ts {
		defer c.mu.Unlock()
		return c.cannotWait(ts, r)
	}
	r.mu.Lock()
	over, err := r.over && !r.waiting, r.err
	r.mu.Unlock()
	if !over {
		c.mu.Unlock()
		return ErrPending
	}
	c.remove(r)
	c.mu.Unlock()
	c.recycle(r)
	return err
}

// OnUnreported makes the customer call f with the number of finished requests whose result no Wait or Try has returned. The customer
// calls f at once, and whenever that number changes. f must neither block nor call c.
func (c *Customer) OnUnreported(f func(n int)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onUnreported = f
	f(c.unreported)
}

// Batch returns the handler of the request in flight that timestamp ts belongs to, and whether all answers to ts have
// arrived; ok is false when there is no such request.
func (c *Customer) Batch(ts int32) (handler int32, answered, ok bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.lookup(ts)
	if r == nil || ts < r.first || ts >= r.first+r.n {
		return 0, false, false, nil
	}
	answered, err = r.answered(ts)
	return r.first, answered, true, err
}

// Outcome is the result of a request that has ended, ts being one of its timestamps: nil if it was answered, else an
// error that wraps its own error or that of an adjacent request that failed for the same reason. It is
// ErrUnknownHandler for a request that is in flight, was never opened, or failed so long ago that it may be
// forgotten.
func (c *Customer) Outcome(ts int32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.issued(ts) {
		return c.neverIssued(ts, c.base, c.next)
	}
	if r := c.lookup(ts); r != nil && ts >= r.first && ts < r.first+r.n {
		return &van.Error{Op: "wait", Node: c.node.Name(), Detail: fmt.Sprintf("handler %d", ts), Err: ErrUnknownHandler, Hint: "it has not been waited for"}
	}
	err, known := c.failures.find(ts, c.next)
	if !known {
		return &van.Error{Op: "wait", Node: c.node.Name(), Detail: fmt.Sprintf("handler %d", ts), Err: ErrUnknownHandler,
			Hint: "more requests have failed since than are remembered, and it may have failed, too; wait for each handler in time"}
	}
	if err != nil {
		err = &van.Error{Op: "wait", Node: c.node.Name(), Detail: fmt.Sprintf("handler %d has failed", ts), Err: err}
	}
	return err
}

// Elapsed is the time since the request in flight that timestamp ts belongs to was opened, 0 when there is none.
func (c *Customer) Elapsed(ts int32) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.lookup(ts)
	if r == nil || ts < r.first || ts >= r.first+r.n {
		return 0
	}
	return time.Duration(clock.Now() - r.start)
}

// Given reports whether ts has been issued.
func (c *Customer) Given(ts int32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.issued(ts)
}

// neverIssued is the error of a handler that was not issued.
func (c *Customer) neverIssued(ts, base, next int32) error {
	hint := "none has been issued"
	if base != next {
		hint = fmt.Sprintf("handlers from %d to %d have been issued", base, next-1)
	}
	return &van.Error{Op: "wait", Node: c.node.Name(), Detail: fmt.Sprintf("handler %d", ts), Err: ErrUnknownHandler, Hint: hint}
}

// cannotWait returns the error of a Wait for a handler that has no result. r is the request at ts's place in the table, or nil. The caller
// holds mu.
func (c *Customer) cannotWait(ts int32, r *Request) error {
	if !c.issued(ts) {
		return c.neverIssued(ts, c.base, c.next)
	}
	e := &van.Error{Op: "wait", Node: c.node.Name(), Detail: fmt.Sprintf("handler %d", ts), Err: ErrUnknownHandler}
	switch {
	case r != nil && r.first == ts && r.waiting:
		e.Err = ErrOtherWaits
		e.Hint = "another goroutine waits for it already; wait once for each handler"
	case r != nil && ts >= r.first && ts < r.first+r.n:
		e.Hint = fmt.Sprintf("it is inside the batch of handler %d; wait for that one", r.first)
	default:
		e.Hint = fmt.Sprintf("it has been waited for already, or finished more than %d requests ago; wait once for each handler", keepFinished)
	}
	return e
}

// deliver handles a message for this customer.
func (c *Customer) deliver(msg *van.Message) {
	now := clock.Now()
	if msg.Request {
		if c.inbound.wasCanceled(msg.Sender, msg.ProcessEpoch, msg.CustomerID, msg.Timestamp) {
			return // the sender has canceled the request
		}
		msg.RequestTrace.Process = now
		c.handle(msg)
		return
	}
	msg.ResponseTrace.Process = now
	err := errLate
	if r := c.lookup(msg.Timestamp); r != nil {
		err = r.answer(msg)
	}
	if err == nil {
		return
	}
	n := c.node.counts.late.Add(1)
	if _, show := c.node.causes.Next("answer: " + logx.Kind(err)); show {
		c.node.log.Info("dropped an answer", "err", err, "from", van.NodeName(msg.Sender), "handler", msg.Timestamp, "late so far", n)
	}
}

// deliverBacklog delivers the messages that were queued for c, before c gets any other.
func (c *Customer) deliverBacklog(kept []queuedRequest) {
	for _, sender := range c.backlogs.fill(kept) {
		c.node.apps.deliveries.Go(func() { c.deliverFrom(sender) })
	}
}

// deliverFrom delivers the backlog of one sender. Each sender has a goroutine, so that a handler that blocks delays
// that sender only.
func (c *Customer) deliverFrom(sender int) {
	for msg := c.backlogs.next(sender); msg != nil; msg = c.backlogs.next(sender) {
		c.deliver(msg)
		msg.Release()
	}
}

// deliverOnBacklog delivers a request that a Poll has received. Its handler may block, and the caller of the Poll waits for something
// else, so the handler runs on the goroutine of its sender's backlog.
func (c *Customer) deliverOnBacklog(msg *van.Message) {
	sender := msg.Sender
	c.backlogs.enqueueOrStart(msg, func() {
		c.node.apps.deliveries.Go(func() { c.deliverFrom(sender) })
	})
}

// peerLost fails the requests that node id has not answered, if they were opened up to openedUntil, and ends the contexts of the
// requests that node id has sent.
func (c *Customer) peerLost(id int, cause error, openedUntil uint64) {
	c.inbound.peerLost(id, cause)
	for _, r := range c.list() {
		r.failPeer(id, cause, openedUntil)
	}
}

// abortAll fails all requests in flight, and ends the contexts of the requests that the application has accepted.
func (c *Customer) abortAll(err error) {
	c.inbound.close(err)
	for _, r := range c.list() {
		r.fail(err)
	}
	c.stopExpiry()
}

// IsAwaited reports whether the sender of a request still waits for its answer: it has not canceled the request, is
// not lost, and has not been replaced. epoch is that of the request's message.
func (c *Customer) IsAwaited(sender int, epoch uint32, customer, ts int32) bool {
	return c.inbound.isAwaited(sender, epoch, customer, ts)
}

// MaySendRest reports whether the sender of the beginning of a request may send the rest: IsAwaited, or a C++ StepMesh
// process that is lost, which may only be paused.
func (c *Customer) MaySendRest(sender int, epoch uint32, customer, ts int32) bool {
	return c.inbound.maySendRest(sender, epoch, customer, ts)
}

// OnCanceled makes the customer call f with the cancellations of senders, after IsAwaited has begun to return false
// for them. f must not block.
func (c *Customer) OnCanceled(f func(Canceled)) { c.onCanceled.Store(&f) }

// Timestamps is the number of timestamps of the request with the given handler, 0
// when it is not in flight.
func (c *Customer) Timestamps(handler int32) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.lookup(handler); r != nil && r.first == handler {
		return int(r.n)
	}
	return 0
}

// InFlight is the number of requests that are not finished, or not waited for yet.
func (c *Customer) InFlight() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.live)
}

// Close fails the requests in flight and removes the customer from its node. Open fails
// from then on.
func (c *Customer) Close() {
	c.mu.Lock()
	c.closed = true
	next := c.requests.next
	c.mu.Unlock()
	c.backlogs.end() // before remove: failAll ends only the backlogs of customers that are in the table
	c.node.apps.remove(c, next)
	c.abortAll(&van.Error{Op: "close", Node: c.node.Name(), Err: van.ErrClosed})
}
