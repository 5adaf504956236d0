package window

// Waiting on the host for events of a rank.

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// awaited is the kind of event that a call waits for.
type awaited uint8

const (
	waitRoom    awaited = iota // another message may be sent
	waitFlushed                // all messages with lower numbers were processed
	waitSignal                 // a signal has arrived
)

// waiter is a waiting call. Waiters are reused, so that waiting does not allocate.
type waiter struct {
	p     *peer
	what  awaited
	n     uint64
	wake  chan struct{} // one token when something may have changed
	timer *time.Timer
	ready func() bool
}

// aliveEvery is how often a waiter checks that the node is still alive.
const aliveEvery = 500 * time.Millisecond

// is reports whether the awaited event has happened.
func (x *waiter) is() bool {
	switch p := x.p; x.what {
	case waitRoom:
		return p.out.room()
	case waitFlushed:
		return p.out.flushed(x.n)
	default:
		return p.in.signals[x.n].Load() > 0
	}
}

// await waits for an event of a rank. It consumes an awaited signal.
func (p *peer) await(ctx context.Context, op string, what awaited, n uint64) error {
	w, begun, limit := p.w, clock.Now(), p.w.layer.Limit(ctx)
	l := &p.sleepers
	l.mu.Lock()
	var x *waiter
	if k := len(l.idle); k > 0 {
		x, l.idle = l.idle[k-1], l.idle[:k-1]
	} else {
		x = &waiter{p: p, wake: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
		x.ready = func() bool { return x.is() || x.p.end() != nil || x.p.w.app.Alive() != nil }
	}
	x.what, x.n = what, n
	l.mu.Unlock()

	w.app.PollFor(ctx, limit, x.ready)
	done, err := x.poll()
	if !done {
		l.enter(x)
		err = x.sleep(ctx, op, begun, limit)
	}
	if err == errOver {
		err = p.failure(op)
	}
	l.exit(x, !done)
	return err
}

// errOver stands for the result of failure.
var errOver = errors.New("over")

// poll reports whether the wait is over. It consumes an awaited signal.
func (x *waiter) poll() (done bool, err error) {
	p := x.p
	over := p.end() // read first: events before the failure count
	switch {
	case x.what == waitSignal && p.in.take(int(x.n)), x.what != waitSignal && x.is():
		return true, nil
	case x.what == waitFlushed && p.w.over.Load() == nil && p.out.placed.Load() >= x.n:
		return false, nil // the rank has closed, and has processed everything; the transport will release the memory
	case over != nil:
		return true, errOver
	}
	return false, nil
}

// sleep waits until poll reports the end of the wait, or a limit passes.
func (x *waiter) sleep(ctx context.Context, op string, begun uint64, limit time.Duration) error {
	for {
		if done, err := x.poll(); done {
			return err
		}
		if err := x.p.w.app.Alive(); err != nil {
			x.p.w.fail(err)
			return errOver
		}
		pause := x.p.w.aliveEvery
		if limit > 0 {
			left := limit - clock.Since(begun)
			if left <= 0 {
				return x.late(op, begun, limit, van.ErrTimeout)
			}
			pause = min(pause, left)
		}
		x.timer.Reset(pause)
		select {
		case <-x.wake:
		case <-ctx.Done():
			return x.late(op, begun, 0, van.TimedOut(context.Cause(ctx)))
		case <-x.timer.C:
		}
	}
}

// late returns the error of a wait that has timed out.
func (x *waiter) late(op string, begun uint64, limit time.Duration, cause error) error {
	p, what := x.p, ""
	switch x.what {
	case waitRoom:
		what = fmt.Sprintf("%d messages of %d bytes are not processed", p.out.next.Load()-p.out.placed.Load(), p.out.bytes.Load()-p.out.placedBytes.Load())
	case waitFlushed:
		what = fmt.Sprintf("%d messages are not processed", max(x.n, p.out.placed.Load())-p.out.placed.Load())
	default:
		what = fmt.Sprintf("signal %d has not arrived", x.n)
	}
	return &van.Error{Op: op, Node: p.w.app.Name(), Peer: p.w.layer.Name(p.rank), Detail: p.w.String() + ": " + what,
		Elapsed: clock.Since(begun), Limit: limit, Err: cause}
}
