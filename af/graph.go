package af

// Exchanges that streams of the device start and wait for, also from graphs: the goroutines
// of a worker that make their rounds.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
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
func (x *Prepared) QueueStart(stream Stream, opts ...StartOption) error {
	o, err := with(x.defaults, opts)
	word := uint32(allRows)
	switch {
	case err != nil:
	case o.cut && (o.rows < 0 || int64(o.rows) > min(x.rows, mostRows)):
		err = x.tooMany(o.rows)
	case o.cut:
		word = uint32(o.rows+1) << 1
	}
	var r *rounds
	if err == nil {
		r, err = x.rounds()
	}
	if err == nil {
		err = r.check()
	}
	if err == nil {
		err = r.start(stream, word)
	}
	return x.failed("queue a start of an exchange", err)
}

// QueueWait makes stream wait until the round of the last QueueStart is over: until the
// pull tensors are filled, or the round has failed, as a round does that takes longer than
// limit. A limit of 0 is that of Prepare, a negative one is none; it is for all rounds that
// begin from now on.
func (x *Prepared) QueueWait(stream Stream, limit time.Duration) error {
	r, err := x.rounds()
	if err == nil {
		err = r.wait(stream)
	}
	if err == nil {
		limit = cmp.Or(limit, x.defaults.limit)
		r.limit.Store(int64(limit))
		err = r.check() // the wait is queued all the same: a round may be under way
	}
	return x.failed("queue a wait for an exchange", err)
}

// failed is err as the exchange's, if it is not one of rounds that streams have started.
func (x *Prepared) failed(op string, err error) error {
	if _, told := errors.AsType[*roundError](err); err == nil || told {
		return err
	}
	return &van.Error{Op: op, Node: x.w.node.Name(), Err: err}
}

// rounds returns those of the exchange, made at the first call.
func (x *Prepared) rounds() (*rounds, error) {
	r := x.byStream.Load()
	if r == nil {
		var err error
		if r, err = x.w.graphs.add(x); err != nil {
			return nil, err
		}
	}
	if r.gone.Load() || x.w.graphs.closing.Load() {
		return nil, fmt.Errorf("exchange of %s: %w", x.tensors(), van.ErrClosed)
	}
	return r, nil
}

// replayed is an exchange whose rounds the goroutine of graphs makes, which alone uses it.
type replayed struct {
	x      *Prepared
	rounds *rounds
	call   Call
	begun  uint64        // clock.Now
	most   time.Duration // what call may take; negative: no limit
	inUse  bool          // call is not waited for
}

// begin starts a round, for which a stream has written word.
func (r *replayed) begin(word uint32) {
	o := options{stream: Complete, limit: r.rounds.next()}
	r.most = cmp.Or(o.limit, postoffice.DefaultTimeout)
	if word != allRows {
		o.rows, o.cut = Rows(word>>1)-1, true
	}
	b, err := r.x.next(o, r.rounds)
	if err == nil {
		r.call, err = b.start(false, o)
		r.begun = clock.Now()
		r.inUse = err == nil
	}
	if err != nil && r.rounds.flying.Load() { // else it was told already
		r.rounds.finish(err)
	}
}

// step does what there is to do, and tells whether there was anything.
func (r *replayed) step(ctx context.Context) bool {
	freed := r.rounds.freed.Load()
	if freed {
		ctx = noTime
	}
	if r.inUse && (!r.rounds.flying.Load() || r.late() || freed) {
		_ = r.call.Wait(ctx) // over, or given up by this; finish has been told
		r.inUse = false
		return true
	}
	if word := r.rounds.round.Load(); word != idle && !r.inUse && !freed {
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
	node    cluster.App
	spin    time.Duration
	closing atomic.Bool
	turn    atomic.Uint64 // clock.Now when the goroutine last went round

	mu    sync.Mutex                  // of what follows, to change it; before that of a Prepared
	all   atomic.Pointer[[]*replayed] // replaced, not changed
	page  backend.Mem                 // what is left of the last one
	ended chan struct{}               // nil before the first one
}

// add makes x a replayed exchange.
func (g *graphs) add(x *Prepared) (*rounds, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r := x.byStream.Load(); r != nil {
		return r, nil
	}
	if g.closing.Load() {
		return nil, van.ErrClosed
	}
	b := g.node.Backend()
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
	r := newRounds(g.node.Name(), x.tensors(), device, g.page.Sub(0, 8), x.defaults.limit)
	g.page = g.page.Sub(wordStride, g.page.Len()-wordStride)
	x.mu.Lock()
	closed := x.closed
	if !closed {
		x.byStream.Store(r)
	}
	x.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("exchange of %s: %w", x.tensors(), van.ErrClosed)
	}
	all := append(slices.Clone(g.exchanges()), &replayed{x: x, rounds: r})
	g.all.Store(&all)
	if g.ended == nil {
		g.ended = make(chan struct{})
		g.turn.Store(clock.Now())
		go g.run()
		go g.watch(g.ended)
	}
	return r, nil
}

// exchanges are those that are replayed now.
func (g *graphs) exchanges() []*replayed {
	if all := g.all.Load(); all != nil {
		return *all
	}
	return nil
}

// drop ends the rounds of r, whose exchange is closed and has none under way.
func (g *graphs) drop(r *replayed) {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(g.exchanges()), func(x *replayed) bool { return x == r })
	g.all.Store(&all)
	r.rounds.ended.Store(idle)
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
		for _, r := range g.exchanges() {
			for r.step(ctx) {
				found = true
			}
			flying = flying || r.inUse
			if r.rounds.gone.Load() && !r.inUse {
				g.drop(r)
			}
		}
		if found {
			last = clock.Now()
			continue
		}
		if flying {
			g.node.Poll(something) // in place of the transport, as who waits for a call does
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
	for _, r := range g.exchanges() {
		if r.inUse {
			_ = r.call.Wait(noTime) // what fills its tensors is over before streams go on
		}
	}
}

// watchEvery is how often watch looks; closeLimit is how long a worker that is closed waits
// for the rounds under way.
const (
	watchEvery = 100 * time.Millisecond
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
		for _, r := range g.exchanges() {
			if r.rounds.round.Load() != idle {
				r.rounds.release(still)
			}
		}
	}
}

// something tells whether a step of any would do something, apart from its limit.
func (g *graphs) something() bool {
	if g.closing.Load() {
		return true
	}
	for _, r := range g.exchanges() {
		if r.inUse != r.rounds.flying.Load() || !r.inUse && r.rounds.round.Load() != idle {
			return true
		}
	}
	return false
}

// close ends all rounds for good, and with them the waits of streams. The requests of the
// customer have been failed before. It tells whether the goroutine that looks after them has ended.
func (g *graphs) close() (done bool) {
	g.mu.Lock()
	g.closing.Store(true)
	ended := g.ended
	g.mu.Unlock()
	if ended == nil {
		return true
	}
	select {
	case <-ended:
		done = true
	case <-time.After(closeLimit): // it waits for the driver, or this is called by what it has delivered
	}
	for _, r := range g.exchanges() {
		r.rounds.ended.Store(idle)
	}
	return done
}
