package window

// Waiting for what a rank says.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// peer is what a window knows of a rank.
type peer struct {
	w        *Window
	rank, id int
	gone     atomic.Pointer[error] // it has closed its end

	// What is sent to it.
	send        sync.Mutex // held while a message gets its number and is sent
	out         van.Message
	next        atomic.Uint64 // number of the next message; changed with send held
	bytes       atomic.Uint64 // data in all messages before that
	said        bool          // that this end is closed; guarded by send
	puts        uint64        // number behind the last put or signal; guarded by send
	asked       uint64        // a verbTaken for all lower numbers was asked for; guarded by send
	lendings    [ring]lending // by number
	placed      atomic.Uint64 // messages that it has taken
	placedBytes atomic.Uint64 // data in those

	// What comes from it.
	recv       sync.Mutex    // held while a message of it is taken
	expected   atomic.Uint64 // number of the next message; changed with recv held
	takenBytes atomic.Uint64
	told       uint64 // what the last verbTaken said
	toldBytes  uint64
	tells      uint64             // number of those
	answer     van.Message        // for those
	early      [ring]*van.Message // came before messages with lower numbers
	signals    []atomic.Int64

	waiters  sync.Mutex // guards the lists
	waiting  []*waiter
	idle     []*waiter
	sleepers atomic.Int32 // len(waiting)
}

func newPeer(w *Window, rank, id int) *peer {
	p := &peer{w: w, rank: rank, id: id, signals: make([]atomic.Int64, w.signals)}
	for i := range p.lendings {
		p.lendings[i].p = p
	}
	return p
}

// awaited is what a call waits for.
type awaited uint8

const (
	waitRoom    awaited = iota // to send another message
	waitFlushed                // until all messages with lower numbers have been taken
	waitSignal                 // of a number
)

// waiter is a call that waits. They are kept, with what they need, so that waiting allocates
// nothing.
type waiter struct {
	p     *peer
	what  awaited
	n     uint64
	wake  chan struct{} // one token when something may have changed
	timer *time.Timer
	ready func() bool
}

// aliveEvery is how often who waits looks whether the node still is.
const aliveEvery = 500 * time.Millisecond

// WaitSignal waits until a rank has signalled, and takes one: each Signal and PutSignal adds one to
// the signal of that number which the rank has here, each WaitSignal takes one away. What the rank put here before
// is in this rank's memory then. When it fails it has taken none, and may be called again, unless the
// error says that the rank is lost or has closed the window.
//
// In a window on devices with a stream it is the stream that waits, without a limit, and the call returns at once. When the
// window is over the stream goes on all the same: see Check. Streams take the signals of one number in the order of the calls; a call without
// a stream takes one that has come and that no stream waits for, also if it began to wait before the stream.
func (w *Window) WaitSignal(ctx context.Context, rank, signal int, on ...af.Stream) error {
	const op = "wait for a signal"
	stream, err := w.oneStream(op, on, af.Complete)
	if err != nil {
		return err
	}
	switch {
	case rank < 0 || rank >= len(w.peers):
		return w.badRank(op, rank)
	case signal < 0 || signal >= w.signals:
		return w.bad(op, w.noSuch(signal))
	}
	switch {
	case w.dev != nil && stream == uintptr(af.Complete):
		return w.dev.await(ctx, op, rank, signal)
	case w.dev != nil:
		return w.dev.wait(op, rank, signal, stream)
	}
	p := w.peers[rank]
	if p.take(signal) {
		return nil
	}
	return p.await(ctx, op, waitSignal, uint64(signal))
}

// take takes one of a signal, if there is one.
func (p *peer) take(signal int) bool {
	s := &p.signals[signal]
	for n := s.Load(); n > 0; n = s.Load() {
		if s.CompareAndSwap(n, n-1) {
			return true
		}
	}
	return false
}

// count adds one to a signal.
func (p *peer) count(signal uint16) {
	if signal != noSignal {
		p.signals[signal].Add(1)
		p.wakeAll()
	}
}

// wakeAll makes those who wait look again.
func (p *peer) wakeAll() {
	if p.sleepers.Load() == 0 {
		return
	}
	p.waiters.Lock()
	defer p.waiters.Unlock()
	for _, x := range p.waiting {
		select {
		case x.wake <- struct{}{}:
		default:
		}
	}
}

// is tells whether what x waits for is there.
func (x *waiter) is() bool {
	switch p := x.p; x.what {
	case waitRoom:
		return p.room()
	case waitFlushed:
		return p.flushed(x.n)
	default:
		return p.signals[x.n].Load() > 0
	}
}

// await waits for something of a rank, and takes the signal if it is one.
func (p *peer) await(ctx context.Context, op string, what awaited, n uint64) error {
	w, begun, limit := p.w, clock.Now(), p.w.layer.Limit(ctx)
	p.waiters.Lock()
	var x *waiter
	if k := len(p.idle); k > 0 {
		x, p.idle = p.idle[k-1], p.idle[:k-1]
	} else {
		x = &waiter{p: p, wake: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
		x.ready = func() bool { return x.is() || x.p.over() != nil || x.p.w.app.Alive() != nil }
	}
	x.what, x.n = what, n
	p.waiters.Unlock()

	w.app.PollFor(ctx, limit, x.ready)
	done, err := x.look()
	if !done {
		x.enter()
		err = x.sleep(ctx, op, begun, limit)
	}
	if err == errOver {
		err = p.failure(op)
	}
	x.exit(!done)
	return err
}

// errOver stands for what failure says.
var errOver = errors.New("over")

// look tells whether the wait is over. It takes a signal that is waited for.
func (x *waiter) look() (done bool, err error) {
	p := x.p
	over := p.over() // before the look: what has come before the failure counts
	switch {
	case x.what == waitSignal && p.take(int(x.n)), x.what != waitSignal && x.is():
		return true, nil
	case x.what == waitFlushed && p.w.over.Load() == nil && p.placed.Load() >= x.n:
		return false, nil // it has closed, and taken everything before: the transport will let go
	case over != nil:
		return true, errOver
	}
	return false, nil
}

// sleep waits until look says that the wait is over, or its time is.
func (x *waiter) sleep(ctx context.Context, op string, begun uint64, limit time.Duration) error {
	for {
		if done, err := x.look(); done {
			return err
		}
		if err := x.p.w.app.Alive(); err != nil {
			x.p.w.fail(err)
			return errOver
		}
		pause := aliveEvery
		if limit > 0 {
			left := limit - elapsed(begun)
			if left <= 0 {
				return x.late(op, begun, limit, van.ErrTimeout)
			}
			pause = min(pause, left)
		}
		x.timer.Reset(pause)
		select {
		case <-x.wake:
		case <-ctx.Done():
			return x.late(op, begun, 0, timeout(context.Cause(ctx)))
		case <-x.timer.C:
		}
	}
}

// late is the error of a wait whose time is over.
func (x *waiter) late(op string, begun uint64, limit time.Duration, cause error) error {
	p, what := x.p, ""
	switch x.what {
	case waitRoom:
		what = fmt.Sprintf("%d messages of %d bytes have not been taken", p.next.Load()-p.placed.Load(), p.bytes.Load()-p.placedBytes.Load())
	case waitFlushed:
		what = fmt.Sprintf("%d messages have not been taken", max(x.n, p.placed.Load())-p.placed.Load())
	default:
		what = fmt.Sprintf("signal %d has not come", x.n)
	}
	return &van.Error{Op: op, Node: p.w.app.Name(), Peer: p.w.layer.Name(p.rank), Detail: p.w.String() + ": " + what,
		Elapsed: elapsed(begun), Limit: limit, Err: cause}
}

// enter makes wakeAll reach x.
func (x *waiter) enter() {
	x.p.waiters.Lock()
	defer x.p.waiters.Unlock()
	x.p.waiting = append(x.p.waiting, x)
	x.p.sleepers.Add(1)
}

// exit puts x away, which has entered.
func (x *waiter) exit(entered bool) {
	p := x.p
	p.waiters.Lock()
	defer p.waiters.Unlock()
	if entered {
		x.timer.Stop()
		p.waiting = slices.DeleteFunc(p.waiting, func(y *waiter) bool { return y == x })
		p.sleepers.Add(-1)
	}
	p.idle = append(p.idle, x)
}
