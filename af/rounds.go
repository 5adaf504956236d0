package af

// Rounds of an exchange as its streams and the library see them: the flag by which they synchronize, and errors.
// Nothing here makes a call.

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// A replayed exchange has a flag in pinned memory. A stream starts a round by writing the lower half, and waits until
// either half is set: in the lower half the round has ended, in the upper half rounds have ended permanently, which no
// replay can reset.
const (
	idle    = uint32(gpusync.Set) // the lower half between rounds, and the upper one at the end
	allRows = 0                   // the lower half during a round: all rows, or n rows as n+1 times 2

	mostRows = math.MaxInt32 - 1
)

// rounds are the rounds of a Prepared. Streams write and wait for the flag, the worker's goroutine executes the
// rounds, and its watcher may end them.
type rounds struct {
	node, what string // for errors: the node, and the exchange's tensors
	device     backend.GraphFlagger
	flag       gpusync.Flag
	round      *atomic.Uint32 // its lower half
	ended      *atomic.Uint32 // its upper half

	limit  atomic.Int64 // of rounds that begin now; negative: none
	gone   atomic.Bool  // the exchange is closed, or released
	freed  atomic.Bool  // its streams were released, see release
	flying atomic.Bool  // a round is under way

	queueing sync.Mutex // guards queued. It is not mu, since the device's queue may be full until rounds continue
	queued   bool       // the last thing queued was a start

	mu     sync.Mutex // guards the fields below
	number uint64     // of the last round that has begun
	failed roundError // number 0: none
}

// newRounds returns rounds with no round under way, with that flag.
func newRounds(node, what string, device backend.GraphFlagger, flag gpusync.Flag, limit time.Duration) *rounds {
	r := &rounds{node: node, what: what, device: device, flag: flag, round: gpusync.OnHost(flag.Lower()), ended: gpusync.OnHost(flag.Upper())}
	r.round.Store(idle)
	r.ended.Store(0)
	r.limit.Store(int64(limit))
	return r
}

// start queues the start of a round in stream; wait queues the wait for its end. They must alternate.
func (r *rounds) start(stream Stream, word uint32) error {
	r.queueing.Lock()
	defer r.queueing.Unlock()
	if r.queued {
		r.queued = false // the start may belong to a canceled capture
		return fmt.Errorf("%w: exchange of %s: queue the wait for its last start first; if that start was in a capture that was canceled, start again", ErrStarted, r.what)
	}
	err := r.device.WriteFlag(uintptr(stream), r.flag.Lower(), word)
	r.queued = err == nil
	return err
}

func (r *rounds) wait(stream Stream) error {
	r.queueing.Lock()
	defer r.queueing.Unlock()
	err := r.device.WaitBits(uintptr(stream), r.flag.Mem, gpusync.Either)
	if err == nil {
		r.queued = false
	}
	return err
}

// next begins a round, and returns how long it may take.
func (r *rounds) next() (limit time.Duration) {
	r.mu.Lock()
	r.number++
	r.mu.Unlock()
	r.flying.Store(true)
	return time.Duration(r.limit.Load())
}

// finish ends the round under way: the streams that wait for it continue.
func (r *rounds) finish(err error) {
	if err != nil {
		r.fail(err)
	}
	r.flying.Store(false)
	r.round.Store(idle)
}

// fail records the error of the round under way.
func (r *rounds) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed.number > 0 {
		r.failed.later++
		return
	}
	r.failed = roundError{node: r.node, what: r.what, number: max(r.number, 1), err: err}
}

// check returns, once, the recorded error.
func (r *rounds) check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed.number == 0 && r.ended.Load() == idle && r.round.Swap(idle) != idle {
		number := r.number
		if !r.flying.Load() {
			number++ // the round has not begun
		}
		return &roundError{node: r.node, what: r.what, number: number, err: van.ErrClosed}
	}
	if r.failed.number == 0 {
		return nil
	}
	err := r.failed
	r.failed = roundError{}
	return &err
}

// stillLimit is the minimum time without progress before release ends rounds: on a busy machine the goroutine may not
// have run.
const stillLimit = time.Second

// release ends the rounds of r permanently if there was no progress for longer than a round may take, and for
// stillLimit.
func (r *rounds) release(still time.Duration) {
	limit := time.Duration(r.limit.Load())
	if limit < 0 {
		return
	}
	limit = max(limit, stillLimit)
	if still < limit || r.freed.Swap(true) {
		return
	}
	r.fail(&van.Error{Op: "exchange", Node: r.node, Detail: "the library could not run, and streams make no further rounds of the exchange",
		Elapsed: still, Limit: limit, Hint: "queue fewer replays ahead; prepare the exchange anew", Err: van.ErrTimeout})
	r.gone.Store(true)
	r.ended.Store(idle)
}

// roundError is the error of a round that a stream has started.
type roundError struct {
	node   string
	what   string
	number uint64 // the round, counted from 1
	later  int    // rounds that have failed after it
	err    error
}

// Error names the node, the round, and the peer that caused it, if any.
func (e *roundError) Error() string {
	more := ""
	if e.later > 0 {
		more = fmt.Sprintf(" (and %d later rounds have failed)", e.later)
	}
	return fmt.Sprintf("%s: round %d that a stream has started, of an exchange of %s: %v%s", e.node, e.number, e.what, e.err, more)
}

// Unwrap returns the reason.
func (e *roundError) Unwrap() error { return e.err }
