package af

// Exchanges that streams of the device start and wait for, also in captured graphs: the goroutines of a worker that
// execute their rounds.

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
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// QueueStart makes stream start a round of the exchange when the stream reaches this point; in a captured graph, at
// each replay. A goroutine of the worker notices the start and executes the round, so the program's CPU thread does
// not wait. Rows are the only option.
//
// Rounds of an exchange are sequential: QueueWait follows before the next QueueStart, also in the order in which the
// streams execute them. A round that starts before a call of Start has been waited for fails with ErrStarted. Check
// returns errors of rounds; the streams continue.
//
// The first QueueStart allocates 128 bytes of pinned memory that are kept until the backend is closed, since a graph
// may be replayed after Close. Such replays have no effect; graphs must not be replayed after the backend's Close.
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

// QueueWait makes stream wait until the round of the last QueueStart has ended: the pull tensors are filled, or the
// round has failed. A round that takes longer than limit fails. A limit of 0 is the limit of Prepare, a negative one
// is none; it applies to all rounds that begin from now on.
func (x *Prepared) QueueWait(stream Stream, limit time.Duration) error {
	r, err := x.rounds()
	if err == nil {
		err = r.wait(stream)
	}
	if err == nil {
		limit = x.w.node.Limit(cmp.Or(limit, x.defaults.limit))
		r.limit.Store(int64(limit))
		err = r.check() // the wait is queued nevertheless, since a round may be under way
	}
	return x.failed("queue a wait for an exchange", err)
}

// failed returns err as an error of the exchange, unless it is the error of a round that a stream has started.
func (x *Prepared) failed(op string, err error) error {
	if _, told := errors.AsType[*roundError](err); err == nil || told {
		return err
	}
	return &van.Error{Op: op, Node: x.w.node.Name(), Err: err}
}

// rounds returns the rounds of the exchange, which the first call creates.
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

// replayed is an exchange whose rounds are executed by the goroutine of graphs. Only that goroutine uses it.
type replayed struct {
	x      *Prepared
	rounds *rounds
	call   Call
	begun  uint64        // clock.Now
	most   time.Duration // time limit of call; negative: no limit
	inUse  bool          // call has not been waited for
}

// begin starts a round, for which a stream has written word to the flag.
func (r *replayed) begin(word uint32) {
	o := options{stream: Complete, limit: r.rounds.next()}
	r.most = o.limit
	if word != allRows {
		o.rows, o.cut = Rows(word>>1)-1, true
	}
	b, err := r.x.next(o, r.rounds)
	if err == nil {
		r.call, err = b.start(false, o)
		r.begun = clock.Now()
		r.inUse = err == nil
	}
	if err != nil && r.rounds.flying.Load() { // otherwise the end was reported already
		r.rounds.finish(err)
	}
}

// step makes progress if it can, and reports whether it did.
func (r *replayed) step(ctx context.Context) bool {
	freed := r.rounds.freed.Load()
	if freed {
		ctx = noTime
	}
	if r.inUse && (!r.rounds.flying.Load() || r.late() || freed) {
		_ = r.call.Wait(ctx) // the call has ended, or this cancels it; finish has been called
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

// late reports whether the round under way exceeds its limit.
func (r *replayed) late() bool {
	return r.most > 0 && clock.Since(r.begun) > r.most
}

// graphs are the replayed exchanges of a worker. One goroutine, which starts with the first exchange, polls their
// flags; another one watches the first.
type graphs struct {
	node    cluster.App
	spin    time.Duration
	closing atomic.Bool
	turn    atomic.Uint64 // clock.Now of the goroutine's last pass; 0 before the first exchange

	all   atomic.Pointer[[]*replayed] // replaced, never modified
	ended chan struct{}               // closed when run has returned

	adding sync.Mutex   // held while an exchange is added, also while the driver blocks; locked before the mu of a Prepared
	page   gpusync.Page // of pinned memory, for flags
}

func (g *graphs) init(node cluster.App) {
	g.node, g.spin, g.ended = node, node.Config().BusyPoll.Spin(), make(chan struct{})
	g.all.Store(&[]*replayed{})
}

// add makes x a replayed exchange.
func (g *graphs) add(x *Prepared) (*rounds, error) {
	g.adding.Lock()
	defer g.adding.Unlock()
	if r := x.byStream.Load(); r != nil {
		return r, nil
	}
	if g.closing.Load() {
		return nil, van.ErrClosed
	}
	device, err := backend.FlagDeviceOf(g.node.Backend())
	if err != nil {
		return nil, err
	}
	flag, err := g.page.TakePinned(device)
	if err != nil {
		return nil, err
	}
	r := newRounds(g.node.Name(), x.tensors(), device, gpusync.Flag{Mem: flag.Sub(0, gpusync.FlagLen)}, g.node.Limit(x.defaults.limit))
	x.mu.Lock()
	closed := x.closed
	if !closed {
		x.byStream.Store(r)
	}
	x.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("exchange of %s: %w", x.tensors(), van.ErrClosed)
	}
	g.change(func(all []*replayed) []*replayed { return append(all, &replayed{x: x, rounds: r}) })
	if g.turn.CompareAndSwap(0, clock.Now()) {
		go g.run()
		go g.watch()
	}
	if g.closing.Load() { // close may have read the list without r, which another goroutine may already use
		r.ended.Store(idle)
		return nil, van.ErrClosed
	}
	return r, nil
}

// exchanges returns the present replayed exchanges.
func (g *graphs) exchanges() []*replayed { return *g.all.Load() }

// change replaces the exchanges by the result of f, which gets a copy of the list.
func (g *graphs) change(f func([]*replayed) []*replayed) {
	for {
		old := g.all.Load()
		if all := f(slices.Clone(*old)); g.all.CompareAndSwap(old, &all) {
			return
		}
	}
}

// drop ends the rounds of r, whose exchange is closed and has no round under way.
func (g *graphs) drop(r *replayed) {
	g.change(func(all []*replayed) []*replayed {
		return slices.DeleteFunc(all, func(x *replayed) bool { return x == r })
	})
	r.rounds.ended.Store(idle)
}

// Pauses of the goroutine between two polls: a fraction of the time since the last event, so that events are delayed
// by that fraction only.
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
			g.node.Poll(something) // in place of the transport, as a waiting call does
		}
		if g.something() {
			continue
		}
		quiet := clock.Since(last)
		if g.spin < 0 || quiet < g.spin {
			runtime.Gosched()
			continue
		}
		clock.Sleep(min(max(quiet/napPart, leastNap), mostNap))
	}
	for _, r := range g.exchanges() {
		if r.inUse {
			_ = r.call.Wait(noTime) // messages that fill its tensors have ended before streams continue
		}
	}
}

// watch releases streams if the goroutine makes no progress within the limit of a round, until the goroutine has
// ended. That happens if a call of the driver blocks until a stream continues that itself waits for a round, for
// example because the driver's queue is full of replays. watch does not call the driver.
func (g *graphs) watch() {
	gpusync.Watch(func() {
		still := clock.Since(g.turn.Load())
		for _, r := range g.exchanges() {
			if r.rounds.round.Load() != idle {
				r.rounds.release(still)
			}
		}
	}, g.ended, nil)
}

// something reports whether a step of any exchange would make progress, apart from its limit.
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

// close ends all rounds permanently, and thereby the waits of streams. The requests of the customer were failed
// before. It reports whether the goroutine has ended.
func (g *graphs) close() (done bool) {
	g.closing.Store(true)
	if g.turn.Load() == 0 { // add ends an exchange that it is adding
		return true
	}
	done = gpusync.AwaitClose(g.ended) // not if the goroutine waits for the driver, or the caller is a callback of it
	for _, r := range g.exchanges() {
		r.rounds.ended.Store(idle)
	}
	return done
}
