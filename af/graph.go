package af

// Exchanges that streams of the device start and wait for, also from graphs.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// QueueStart makes stream start a round of the exchange when it comes to this point, each
// time if it is being captured into a graph that is replayed. A goroutine of the worker
// sees it and does the rest, so the CPU is not waited for. Rows are the only option.
//
// Rounds of an exchange come one after the other: QueueWait follows before the next
// QueueStart, in the order in which the streams come there, too. A round that comes while
// one of Start is not waited for fails with ErrStarted. What fails is told by Check; the
// streams go on.
//
// The first QueueStart takes 128 bytes of pinned memory that are kept until the backend is
// closed, since a graph may be replayed after Close. Replays then do nothing; after the
// backend's Close they must not be.
func (x *Exchange) QueueStart(stream Stream, opts ...StartOption) error {
	o, err := with(x.defaults, opts)
	word := uint32(allRows)
	switch {
	case err != nil:
	case o.cut && (o.rows < 0 || int64(o.rows) > min(x.rows, mostRows)):
		err = x.tooMany(o.rows)
	case o.cut:
		word = uint32(o.rows+1) << 1
	}
	var r *replayed
	if err == nil {
		r, err = x.replayed()
	}
	if err == nil {
		err = r.queue(true, func() error { return r.g.device.WriteFlag(uintptr(stream), r.mem, word) })
	}
	return x.failed("queue a start of an exchange", err)
}

// QueueWait makes stream wait until the round of the last QueueStart is over: until the
// pull tensors are filled, or the round has failed, as a round does that takes longer than
// limit. A limit of 0 is that of Prepare, a negative one is none; it is for all rounds that
// begin from now on.
func (x *Exchange) QueueWait(stream Stream, limit time.Duration) error {
	r, err := x.words()
	if err == nil {
		err = r.queue(false, func() error { return r.g.device.WaitBits(uintptr(stream), r.mem, over) })
	}
	if err == nil {
		limit = cmp.Or(limit, x.defaults.limit)
		r.limit.Store(int64(limit))
		err = r.check() // the wait is queued all the same: a round may be under way
	}
	return x.failed("queue a wait for an exchange", err)
}

// Check returns, once, why rounds that streams have started have failed, or nil: the first
// of them, and how many more there were since the last Check. It may be called after Close,
// and does not wait. Start, QueueStart and QueueWait do the same first.
func (x *Exchange) Check() error {
	if r := x.byStream.Load(); r != nil {
		return r.check()
	}
	return nil
}

// failed is err as the exchange's, if it is not one of rounds that streams have started.
func (x *Exchange) failed(op string, err error) error {
	if _, told := errors.AsType[*roundError](err); err == nil || told {
		return err
	}
	return &van.Error{Op: op, Node: x.w.node.Name(), Err: err}
}

// roundError is the error of a round that a stream has started.
type roundError struct {
	node   string
	what   string
	number uint64 // the round, counted from 1
	later  int    // rounds that have failed after it
	err    error
}

// Error names the node, the round, and the peer if one is the reason.
func (e *roundError) Error() string {
	more := ""
	if e.later > 0 {
		more = fmt.Sprintf(" (and %d later rounds have failed)", e.later)
	}
	return fmt.Sprintf("%s: round %d that a stream has started, of an exchange of %s: %v%s", e.node, e.number, e.what, e.err, more)
}

// Unwrap returns the reason.
func (e *roundError) Unwrap() error { return e.err }

// A replayed exchange has a word of 8 bytes in pinned memory. A stream starts a round by
// writing the lower half, and waits until bit over is set in either half: in the lower one
// the round is over, in the upper one no rounds are made any more, which no replay takes
// back.
const (
	over    = uint64(1)<<32 | 1
	idle    = uint32(1) // the lower half between rounds, and the upper one at the end
	allRows = 0         // the lower half during a round: all rows, or n rows as n+1 times 2

	mostRows = math.MaxInt32 - 1

	wordStride = 128  // words share no cache lines, also where these are fetched in pairs
	wordPage   = 4096 // of pinned memory
)

// replayed is what streams need of an Exchange.
type replayed struct {
	x     *Exchange
	g     *graphs
	mem   backend.Mem
	round *atomic.Uint32 // the lower half
	ended *atomic.Uint32 // the upper half
	limit atomic.Int64   // of rounds that begin now, as Call's
	gone  atomic.Bool    // the exchange is closed, or let go
	freed atomic.Bool    // its streams were let go, see watch

	// Of the goroutine:
	call  Call
	begun uint64        // clock.Now
	most  time.Duration // what call may take; negative: no limit
	inUse bool          // call is not waited for

	flying atomic.Bool // a round is under way

	queueing sync.Mutex // not mu: the device's queue may be full until rounds go on
	queued   bool       // the last thing queued was a start

	mu     sync.Mutex
	number uint64     // of the last round that has begun
	failed roundError // number 0: none
}

// replayed returns what streams need, unless a round has failed.
func (x *Exchange) replayed() (*replayed, error) {
	r, err := x.words()
	if err == nil {
		err = r.check()
	}
	return r, err
}

// words returns what streams need, made at the first call.
func (x *Exchange) words() (*replayed, error) {
	r := x.byStream.Load()
	if r == nil {
		var err error
		if r, err = x.w.graphs.add(x); err != nil {
			return nil, err
		}
	}
	if r.gone.Load() || r.g.closing.Load() {
		return nil, fmt.Errorf("exchange of %s: %w", x.tensors(), van.ErrClosed)
	}
	return r, nil
}

// queue queues a start or a wait, which must take turns.
func (r *replayed) queue(start bool, f func() error) error {
	r.queueing.Lock()
	defer r.queueing.Unlock()
	if start && r.queued {
		r.queued = false // what was begun may have been given up
		return fmt.Errorf("%w: exchange of %s: queue the wait for its last start first; if that start was in a capture that was given up, start again", ErrStarted, r.x.tensors())
	}
	err := f()
	if err == nil {
		r.queued = start
	}
	return err
}

// fail keeps the error of the round under way.
func (r *replayed) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed.number > 0 {
		r.failed.later++
		return
	}
	r.failed = roundError{node: r.x.w.node.Name(), what: r.x.tensors(), number: max(r.number, 1), err: err}
}

func (r *replayed) check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed.number == 0 && r.ended.Load() == idle && r.round.Swap(idle) != idle {
		number := r.number
		if !r.flying.Load() {
			number++ // it has not begun
		}
		return &roundError{node: r.x.w.node.Name(), what: r.x.tensors(), number: number, err: van.ErrClosed}
	}
	if r.failed.number == 0 {
		return nil
	}
	err := r.failed
	r.failed = roundError{}
	return &err
}

// finish ends the round under way: the streams that wait for it go on.
func (r *replayed) finish(err error) {
	if err != nil {
		r.fail(err)
	}
	r.flying.Store(false)
	r.round.Store(idle)
}

// begin starts a round, for which a stream has written word.
func (r *replayed) begin(word uint32) {
	r.mu.Lock()
	r.number++
	r.mu.Unlock()
	o := options{stream: Complete, limit: time.Duration(r.limit.Load())}
	if r.most = o.limit; r.most == 0 {
		r.most = postoffice.DefaultTimeout
	}
	if word != allRows {
		o.rows, o.cut = Rows(word>>1)-1, true
	}
	r.flying.Store(true)
	b, err := r.x.next(o, r)
	if err == nil {
		r.call, err = b.start(false, o)
		r.begun = clock.Now()
		r.inUse = err == nil
	}
	if err != nil && r.flying.Load() { // else it was told already
		r.finish(err)
	}
}

// step does what there is to do, and tells whether there was anything.
func (r *replayed) step(ctx context.Context) bool {
	freed := r.freed.Load()
	if freed {
		ctx = noTime
	}
	if r.inUse && (!r.flying.Load() || r.late() || freed) {
		_ = r.call.Wait(ctx) // over, or given up by this; finish has been told
		r.inUse = false
		return true
	}
	if word := r.round.Load(); word != idle && !r.inUse && !freed {
		r.begin(word)
		return true
	}
	return false
}

// noTime is a context that has ended.
var noTime = func() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(van.ErrTimeout)
	return ctx
}()

// late tells whether the time of the round under way is over.
func (r *replayed) late() bool {
	return r.most > 0 && time.Duration(clock.Now()-r.begun) > r.most
}

// graphs are the replayed exchanges of a worker. A goroutine, which begins with the first
// one, looks at their words, and another one at the first.
type graphs struct {
	w       *Worker
	device  backend.GraphFlagger
	spin    time.Duration
	closing atomic.Bool
	turn    atomic.Uint64 // clock.Now when the goroutine last went round

	mu    sync.Mutex
	all   atomic.Pointer[[]*replayed] // replaced, not changed
	page  backend.Mem                 // what is left of the last one
	ended chan struct{}               // nil before the first one
}

// add makes x a replayed exchange.
func (g *graphs) add(x *Exchange) (*replayed, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r := x.byStream.Load(); r != nil {
		return r, nil
	}
	if g.closing.Load() {
		return nil, van.ErrClosed
	}
	b := g.w.node.Backend()
	device, can := b.(backend.GraphFlagger)
	pinner, pins := b.(backend.HostPinner)
	if !can || !pins {
		return nil, fmt.Errorf("%w: this node's backend is %s (STEPMESH_BAKCEND), want one of a GPU", backend.ErrUnavailable, b.Name())
	}
	if g.page.Len() < wordStride {
		page, err := pinner.AllocPinned(wordPage)
		if err != nil {
			return nil, err
		}
		g.page = page
	}
	r := &replayed{x: x, g: g, mem: g.page.Sub(0, 8)}
	g.page = g.page.Sub(wordStride, g.page.Len()-wordStride)
	half := (*[2]atomic.Uint32)(r.mem.Ptr())
	r.round, r.ended = &half[0], &half[1]
	r.round.Store(idle)
	r.ended.Store(0)
	r.limit.Store(int64(x.defaults.limit))
	x.mu.Lock()
	closed := x.closed
	if !closed {
		x.byStream.Store(r)
	}
	x.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("exchange of %s: %w", x.tensors(), van.ErrClosed)
	}
	g.device = device
	var all []*replayed
	if old := g.all.Load(); old != nil {
		all = slices.Clone(*old)
	}
	all = append(all, r)
	g.all.Store(&all)
	if g.ended == nil {
		g.ended = make(chan struct{})
		g.turn.Store(clock.Now())
		go g.run()
		go g.watch(g.ended)
	}
	return r, nil
}

// drop ends the rounds of r, whose exchange is closed and has none under way.
func (g *graphs) drop(r *replayed) {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(*g.all.Load()), func(x *replayed) bool { return x == r })
	g.all.Store(&all)
	r.ended.Store(idle)
}

// How long the goroutine sleeps between two looks: a part of the time in which nothing has
// come, so that what comes is late by that part only.
const (
	leastNap = 20 * time.Microsecond
	mostNap  = time.Millisecond
	napPart  = 16
)

func (g *graphs) run() {
	defer close(g.ended)
	ctx := context.Background()
	something := func() bool { return g.something() }
	for last := clock.Now(); !g.closing.Load(); {
		found, flying := false, false
		g.turn.Store(clock.Now())
		for _, r := range *g.all.Load() {
			for r.step(ctx) {
				found = true
			}
			flying = flying || r.inUse
			if r.gone.Load() && !r.inUse {
				g.drop(r)
			}
		}
		if found {
			last = clock.Now()
			continue
		}
		if flying {
			g.w.node.Poll(something) // in place of the transport, as who waits for a call does
		}
		if g.something() {
			continue
		}
		quiet := time.Duration(clock.Now() - last)
		if g.spin < 0 || quiet < g.spin {
			runtime.Gosched()
			continue
		}
		clock.Sleep(min(max(quiet/napPart, leastNap), mostNap))
	}
	for _, r := range *g.all.Load() {
		if r.inUse {
			_ = r.call.Wait(noTime) // what fills its tensors is over before streams go on
		}
	}
}

// watchEvery is how often watch looks; stillLimit is how long the goroutine may do nothing at least, which may
// just not have run on a busy machine; closeLimit is how long a worker that is closed waits for the rounds
// under way.
const (
	watchEvery = 100 * time.Millisecond
	stillLimit = time.Second
	closeLimit = time.Second
)

// watch lets streams go for which the goroutine can do nothing within the limit of a round,
// until it has ended. That happens when the driver lets nobody in before a stream goes on
// which waits for a round, as when its queue is full of replays. Nothing here calls the driver.
func (g *graphs) watch(over <-chan struct{}) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-over:
			return
		case <-tick.C:
		}
		still := time.Duration(clock.Now() - g.turn.Load())
		for _, r := range *g.all.Load() {
			if r.round.Load() != idle {
				r.release(still)
			}
		}
	}
}

// release ends the rounds of r for good if nothing was done for longer than one may take, and for stillLimit.
func (r *replayed) release(still time.Duration) {
	limit := cmp.Or(time.Duration(r.limit.Load()), postoffice.DefaultTimeout)
	if limit < 0 {
		return
	}
	limit = max(limit, stillLimit)
	if still < limit || r.freed.Swap(true) {
		return
	}
	r.fail(&van.Error{Op: "exchange", Node: r.x.w.node.Name(), Detail: "the library could do nothing, and streams make no rounds of it any more",
		Elapsed: still, Limit: limit, Hint: "queue fewer replays ahead; prepare the exchange anew", Err: van.ErrTimeout})
	r.gone.Store(true)
	r.ended.Store(idle)
}

// something tells whether a step of any would do something, apart from its limit.
func (g *graphs) something() bool {
	if g.closing.Load() {
		return true
	}
	for _, r := range *g.all.Load() {
		if r.inUse != r.flying.Load() || !r.inUse && r.round.Load() != idle {
			return true
		}
	}
	return false
}

// close ends all rounds for good, and with them the waits of streams. The requests of the
// customer have been failed before.
func (g *graphs) close() {
	g.mu.Lock()
	g.closing.Store(true)
	ended := g.ended
	g.mu.Unlock()
	if ended == nil {
		return
	}
	patience := time.NewTimer(closeLimit)
	defer patience.Stop()
	select {
	case <-ended:
	case <-patience.C: // it waits for the driver, or this is called by what it has delivered
	}
	for _, r := range *g.all.Load() {
		r.ended.Store(idle)
	}
}
