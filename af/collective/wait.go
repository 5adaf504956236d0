package collective

// Waiting for a call. The waiter receives messages and computes reductions.

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Op is a call in flight. It is a small value that may be copied.
type Op struct {
	o   *op
	gen uint32
}

// Done returns a channel that is closed when the call has ended, for use in a select statement. Wait must still be
// called; it then returns without waiting for other ranks. Programs that only wait should call Wait alone, which is
// faster: the waiting goroutine receives messages and computes reductions.
func (h Op) Done() <-chan struct{} {
	if h.o == nil {
		return endedOp
	}
	b := h.o.b
	b.mu.Lock()
	defer b.mu.Unlock()
	w := &h.o.waiter
	if h.o.gen != h.gen || w.told {
		return endedOp
	}
	if w.ended == nil {
		w.ended = make(chan struct{})
	}
	return w.ended
}

// endedOp is the channel of calls that have ended.
var endedOp = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Wait waits until the results are complete and all other ranks have received their parts from this rank. Call Wait
// once for each Op. Errors wrap postoffice.ErrPeerLost, postoffice.ErrTimeout, postoffice.ErrClosed, ErrMismatch, ErrAborted or ctx's
// error, and name the rank concerned; the communicator has then failed on all ranks.
func (h Op) Wait(ctx context.Context) error { return h.WaitSlice(ctx, 0) }

// WaitSlice is Wait for callers that have other work from time to time: when slice has passed, it returns
// postoffice.ErrPending and the call continues. With a slice of 0 it is Wait.
func (h Op) WaitSlice(ctx context.Context, slice time.Duration) error {
	o := h.o
	if o == nil {
		return &van.Error{Op: "wait", Err: postoffice.ErrUnknownHandler, Hint: "this Op was returned with an error, or never made"}
	}
	b := o.b
	b.mu.Lock()
	if o.gen != h.gen || o.waiter.waits {
		err := postoffice.ErrUnknownHandler
		if o.gen == h.gen {
			err = cluster.ErrOtherWaits
		}
		b.mu.Unlock()
		return &van.Error{Op: "wait", Node: b.node.Name(), Detail: fmt.Sprintf("communicator %d", b.id), Err: err,
			Hint: "wait once for each Op"}
	}
	o.waiter.waits = true
	b.mu.Unlock()
	err := o.wait(ctx, slice)
	if err == postoffice.ErrPending {
		b.mu.Lock()
		o.waiter.waits = false
		b.mu.Unlock()
		return err
	}
	err = o.endCopy(err)
	o.endUse()
	return err
}

// aliveEvery is how often a waiter checks that the node is still alive.
const aliveEvery = 500 * time.Millisecond

// wait waits until the call has ended. If slice is not 0, it returns postoffice.ErrPending when slice has passed.
func (o *op) wait(ctx context.Context, slice time.Duration) error {
	b := o.b
	limit := b.limit(ctx)
	left := func() time.Duration { return limit - clock.Since(o.start) }
	began := clock.Now()
	late := false
	next := func() time.Duration { // time until the next check
		d := aliveEvery
		if limit > 0 && !late {
			d = min(d, left())
		}
		if slice > 0 && !late {
			d = min(d, slice-clock.Since(began))
		}
		return max(d, 0)
	}
	if b.polls {
		o.poll(ctx, func() time.Duration { return max(next(), time.Nanosecond) })
	}
	for {
		select {
		case <-o.waiter.done:
			return o.err
		default:
		}
		o.device.copyIfDue()
		if o.waiter.timer == nil {
			o.waiter.timer = time.NewTimer(next())
		} else {
			o.waiter.timer.Reset(next())
		}
		select {
		case <-o.waiter.done:
			o.waiter.timer.Stop()
			return o.err
		case <-ctx.Done():
			o.waiter.timer.Stop()
			o.cancel(van.TimedOut(context.Cause(ctx)), 0)
			<-o.waiter.done
			return o.err
		case <-o.waiter.timer.C:
		}
		if err := b.node.Alive(); err != nil {
			b.fail(err)
		} else if limit > 0 && !late && left() <= 0 {
			o.cancel(van.ErrTimeout, limit)
			late = true
		} else if slice > 0 && !late && clock.Since(began) >= slice {
			return postoffice.ErrPending
		}
	}
}

// poll receives in place of the transport for a while, and computes reductions: no goroutine need be woken for that.
func (o *op) poll(ctx context.Context, left func() time.Duration) {
	b, w := o.b, &o.waiter
	for {
		b.mu.Lock()
		w.polls = !w.told
		b.mu.Unlock()
		b.node.PollFor(ctx, left(), w.isDone)
		b.mu.Lock()
		w.polls = false
		b.mu.Unlock()
		work := w.work.Swap(nil)
		if work == nil {
			return
		}
		work.reduce()
	}
}

// cancel ends o because the time limit or the context of its waiter has ended.
func (o *op) cancel(cause error, limit time.Duration) {
	b, x := o.b, o
	var takers, givers []string
	b.mu.Lock()
	if before := o.l.window[(o.seq-1)%maxInFlight]; !o.begun && before != nil && before.reduction.next == o {
		x = before // o waits for it
	}
	for r := range x.sends.to {
		if s := x.sends.to[r].state; s == awaited || s == sent {
			takers = append(takers, b.name(r))
		}
	}
	for i, id := range x.receives.from {
		if !x.receives.came[i] {
			givers = append(givers, b.name(slices.Index(b.ids, id)))
		}
	}
	begun := x.begun
	b.mu.Unlock()
	var missing []string
	if len(givers) > 0 {
		missing = append(missing, "nothing has arrived from "+strings.Join(givers, ", "))
	}
	if len(takers) > 0 {
		missing = append(missing, "not received by "+strings.Join(takers, ", "))
	}
	what := cmp.Or(strings.Join(missing, "; "), "it has not ended")
	if x.device.is && !begun {
		what = "the work before it in this rank's stream, or in that of an earlier call, is not done"
	}
	err := &van.Error{Op: kinds[o.call.kind], Node: b.node.Name(), Detail: o.String() + ": " + what,
		Elapsed: clock.Since(o.start), Limit: limit, Err: cause}
	b.fail(err)
	o.end(err)
}
