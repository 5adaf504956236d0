package postoffice

// Customer: the timestamps of requests in flight, waiting for them, and the delivery of
// messages to an application.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// ErrUnknownHandler: the timestamp was never given out, has been waited for
// already, or belongs to a request that finished too long ago to be remembered.
var ErrUnknownHandler = errors.New("unknown handler")

// ErrPending: WaitSlice ended before the request did. Wait again.
var ErrPending = errors.New("not finished yet")

// errLate marks an answer to a request that has ended.
var errLate = errors.New("late or unknown answer")

// keepFinished is the number of finished requests without a Wait that a customer
// remembers. Older ones are forgotten, so that the memory of an application that only
// uses callbacks does not grow.
const keepFinished = 4096

// Customer is an application object's end at a node: its requests in flight, and the
// messages for it. It is safe for concurrent use.
type Customer struct {
	node    *Node
	app, id int
	handle  func(*van.Message)
	traces  *traces // nil unless they are kept

	mu       sync.Mutex
	closed   bool
	base     int32 // the first timestamp
	wrapped  bool  // timestamps have passed the largest and begun from 0
	next     int32
	table    atomic.Pointer[[]atomic.Pointer[Request]] // by timestamp; the length is a power of two
	live     map[*Request]struct{}
	inUse    int                    // timestamps of the requests in live
	finished [keepFinished]*Request // a ring of requests that finished without a Wait
	newest   int                    // index of the next one; never wraps, used modulo keepFinished
	timers   []*time.Timer
	late     atomic.Uint64

	behind atomic.Bool      // early is not empty
	early  map[int]*backlog // by sender, messages that came before the customer was made, and later ones
	room   sync.Cond        // of mu: a backlog has shrunk, or ended is set
	ended  bool             // the node leaves

	withdrawals withdrawals
	onWithdrawn atomic.Pointer[func(Withdrawn)]
}

func newCustomer(n *Node, app, id int, handle func(*van.Message)) *Customer {
	c := &Customer{node: n, app: app, id: id, handle: handle, live: map[*Request]struct{}{}}
	c.room.L = &c.mu
	if !failpoint.On("incarnation") {
		// A replacement must not use the timestamps of the former process: answers to
		// those may still come.
		c.base = int32(n.rand() % (1 << 30))
	}
	c.next = c.base
	table := make([]atomic.Pointer[Request], 1024)
	c.table.Store(&table)
	return c
}

// AppID is the application id that the customer's messages carry.
func (c *Customer) AppID() int { return c.app }

// ID is the customer id that the customer's messages carry.
func (c *Customer) ID() int { return c.id }

// Open reserves n consecutive timestamps in r, for each of which every one of
// receivers (node ids, without repeats) owes an answer. op names the operation in
// errors. Send the messages afterwards, with r.First() and following; if a send
// fails, call Abort.
//
// With no receivers the request is finished at once.
func (c *Customer) Open(r *Request, op string, sink Sink, n int, receivers []int) error {
	if n <= 0 {
		return fmt.Errorf("%s: %w: %d timestamps, want at least 1", op, van.ErrInvalid, n)
	}
	if err := c.node.Alive(); err != nil {
		return &van.Error{Op: op, Node: c.node.Name(), Err: err}
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return &van.Error{Op: op, Node: c.node.Name(), Err: van.ErrClosed}
	}
	first, err := c.reserve(n)
	if err != nil {
		c.mu.Unlock()
		return &van.Error{Op: op, Node: c.node.Name(), Err: err}
	}
	c.wrapped = c.wrapped || first < c.next
	c.next = first + int32(n)
	c.inUse += n
	r.mu.Lock()
	r.reset(c, op, sink, first, n, receivers)
	r.mu.Unlock()
	table := *c.table.Load()
	for ts := first; ts < first+int32(n); ts++ {
		table[int(ts)&(len(table)-1)].Store(r)
	}
	c.live[r] = struct{}{}
	c.mu.Unlock()

	// A peer that was lost before the request was in the table has not failed it, so it
	// is checked here; a later loss finds the request in the table. The same holds for
	// the end of this node.
	if err := c.node.Alive(); err != nil {
		r.fail(&van.Error{Op: op, Node: c.node.Name(), Err: err})
		return nil
	}
	for _, id := range receivers {
		if cause := c.node.lost(id); cause != nil {
			r.mu.Lock()
			r.unsent = true
			r.mu.Unlock()
			r.failPeer(id, cause)
			return nil
		}
	}
	if len(receivers) == 0 {
		r.mu.Lock()
		r.settle()
	}
	return nil
}

// reserve finds n consecutive timestamps, from c.next on, whose table slots are free. It
// grows the table when it is half full, and skips slots of requests that have been in
// flight for long. c.mu is held.
func (c *Customer) reserve(n int) (first int32, err error) {
	for c.inUse+n > len(*c.table.Load())/2 {
		if len(*c.table.Load()) >= maxTable {
			return 0, fmt.Errorf("%w: %d timestamps in flight, want at most %d with these %d: Wait for some", van.ErrQueueFull, c.inUse, maxTable/2, n)
		}
		c.grow()
	}
	table := *c.table.Load()
	first = c.next
	for free, tried := 0, 0; free < n; tried++ {
		if first > math.MaxInt32-int32(n) {
			first, free = 0, 0 // a request's timestamps must not wrap
		}
		if tried == 2*len(table) { // half of the slots are free, but scattered
			if len(table) >= maxTable {
				return 0, fmt.Errorf("%w: no %d consecutive timestamps are free: Wait for some", van.ErrQueueFull, n)
			}
			c.grow()
			table, free, tried = *c.table.Load(), 0, 0
			first = c.next
			continue
		}
		if table[(int(first)+free)&(len(table)-1)].Load() == nil {
			free++
			continue
		}
		first, free = first+int32(free)+1, 0
	}
	return first, nil
}

// grow doubles the table. c.mu is held.
func (c *Customer) grow() {
	bigger := make([]atomic.Pointer[Request], 2*len(*c.table.Load()))
	for r := range c.live {
		for ts := r.first; ts < r.first+r.n; ts++ {
			bigger[int(ts)&(len(bigger)-1)].Store(r)
		}
	}
	c.table.Store(&bigger)
}

// maxTable bounds the table; half of its slots may be in use.
const maxTable = 1 << 23

// lookup finds the request that ts belongs to, which may have been recycled.
func (c *Customer) lookup(ts int32) *Request {
	if ts < 0 {
		return nil
	}
	table := *c.table.Load()
	return table[int(ts)&(len(table)-1)].Load()
}

// Abort fails a request whose messages could not all be sent.
func (c *Customer) Abort(r *Request, err error) { r.fail(err) }

// Wait waits until the request with handler ts is finished, and forgets it. limit
// counts from Open; 0 means that only ctx ends the wait. When the wait ends before
// the request does, the request is given up and the error names the peers that have not
// answered.
func (c *Customer) Wait(ctx context.Context, ts int32, limit time.Duration) error {
	return c.WaitSlice(ctx, ts, limit, 0)
}

// WaitSlice is Wait for callers that have other work from time to time: when slice passes
// first, it returns ErrPending and the request goes on. A slice of 0 is Wait.
func (c *Customer) WaitSlice(ctx context.Context, ts int32, limit, slice time.Duration) error {
	c.mu.Lock()
	r := c.lookup(ts)
	if r == nil || r.first != ts || r.waiting {
		waiting := r != nil && r.first == ts && r.waiting
		base, next, given := c.base, c.next, c.given(ts)
		c.mu.Unlock()
		if !given {
			return c.never(ts, base, next)
		}
		return c.unknown(ts, waiting, r)
	}
	r.mu.Lock()
	r.waiting = true
	r.mu.Unlock()
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
		done, gen := r.state == finished, r.gen
		r.mu.Unlock()
		c.mu.Unlock()
		if done { // settle has left it to this waiter
			c.completed(r, gen)
		}
		return err
	}
	c.forget(r)
	c.mu.Unlock()
	c.recycle(r)
	return err
}

// Batch returns the handler of the request in flight that timestamp ts belongs to, and
// whether all answers to ts have come; ok is false when there is no such request.
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

// Elapsed is how long ago the request in flight that timestamp ts belongs to was
// opened, 0 when there is none.
func (c *Customer) Elapsed(ts int32) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.lookup(ts)
	if r == nil || ts < r.first || ts >= r.first+r.n {
		return 0
	}
	return time.Duration(clock.Now() - r.start)
}

// Given tells whether ts has been given out.
func (c *Customer) Given(ts int32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.given(ts)
}

// given is Given. c.mu is held.
func (c *Customer) given(ts int32) bool {
	if c.wrapped {
		return ts >= 0 && (ts < c.next || ts >= c.base)
	}
	return ts >= c.base && ts < c.next
}

// never is the error of a handler that was not given out.
func (c *Customer) never(ts, base, next int32) error {
	hint := "none has been given out"
	if base != next {
		hint = fmt.Sprintf("handlers from %d to %d have been given out", base, next-1)
	}
	return &van.Error{Op: "wait", Node: c.node.Name(), Detail: fmt.Sprintf("handler %d", ts), Err: ErrUnknownHandler, Hint: hint}
}

// unknown is the error of a handler that was given out and cannot be waited for.
func (c *Customer) unknown(ts int32, waiting bool, r *Request) error {
	e := &van.Error{Op: "wait", Node: c.node.Name(), Detail: fmt.Sprintf("handler %d", ts), Err: ErrUnknownHandler}
	switch {
	case waiting:
		e.Hint = "another goroutine waits for it already; wait once for each handler"
	case r != nil && ts >= r.first && ts < r.first+r.n:
		e.Hint = fmt.Sprintf("it is inside the batch of handler %d; wait for that one", r.first)
	default:
		e.Hint = fmt.Sprintf("it has been waited for already, or finished more than %d requests ago; wait once for each handler", keepFinished)
	}
	return e
}

// completed puts r, which has finished without a waiter, into the ring. The request that
// it displaces is forgotten.
func (c *Customer) completed(r *Request, gen uint64) {
	c.mu.Lock()
	if _, ok := c.live[r]; !ok || r.waiting || r.gen != gen || r.ringIndex >= 0 {
		c.mu.Unlock()
		return
	}
	slot := &c.finished[c.newest%keepFinished]
	old := *slot
	if old != nil {
		c.forget(old)
	}
	*slot = r
	r.ringIndex = c.newest
	c.newest++
	c.mu.Unlock()
	if old != nil {
		c.recycle(old)
	}
}

// forget takes r out of the table. c.mu is held.
func (c *Customer) forget(r *Request) {
	table := *c.table.Load()
	for ts := r.first; ts < r.first+r.n; ts++ {
		table[int(ts)&(len(table)-1)].CompareAndSwap(r, nil)
	}
	delete(c.live, r)
	c.inUse -= int(r.n)
	if r.ringIndex >= 0 {
		c.finished[r.ringIndex%keepFinished] = nil
		r.ringIndex = -1
	}
}

// recycle gives r back to its owner. The goroutine of a late answer may still hold a
// pointer to r; answer then finds that the timestamp is not r's.
func (c *Customer) recycle(r *Request) {
	r.mu.Lock()
	sink := r.sink
	r.state, r.sink, r.n = unused, nil, 0
	r.mu.Unlock()
	sink.Recycle()
}

// deliver handles a message for this customer.
func (c *Customer) deliver(msg *van.Message) {
	now := clock.Now()
	if msg.Request {
		if c.withdrawals.has(msg.Sender, msg.Epoch, msg.CustomerID, msg.Timestamp) {
			return // the sender has given the request up
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
	n := c.late.Add(1)
	if _, show := c.node.Rarely("answer: " + logx.Kind(err)); show {
		c.node.log.Info("dropped an answer", "err", err, "from", van.NodeName(msg.Sender), "handler", msg.Timestamp, "late so far", n)
	}
}

// peerLost fails the requests that node id has not answered.
func (c *Customer) peerLost(id int, cause error) {
	for _, r := range c.requests() {
		r.failPeer(id, cause)
	}
}

// abortAll fails everything in flight.
func (c *Customer) abortAll(err error) {
	for _, r := range c.requests() {
		r.fail(err)
	}
}

func (c *Customer) requests() []*Request {
	c.mu.Lock()
	defer c.mu.Unlock()
	rs := make([]*Request, 0, len(c.live))
	for r := range c.live {
		rs = append(rs, r)
	}
	return rs
}

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
	c.mu.Unlock()
	c.node.removeCustomer(c)
	c.endEarly()
	c.abortAll(&van.Error{Op: "close", Node: c.node.Name(), Err: van.ErrClosed})
}
