package cluster

import (
	"context"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// DefaultTimeout is the limit of Call.Wait when neither its context nor the call's maker has one, counted from the
// call. The default of C++ StepMesh, 10 s, is shorter than the time in which the loss of a stopped process is
// noticed: the call would end with van.ErrTimeout before van.ErrPeerLost could give the reason. Where
// PS_HEARTBEAT_TIMEOUT asks for longer silences, the limit is that much longer, see App.Limit.
const DefaultTimeout = 15 * time.Second

// Limit is limit, or the default if it is 0: DefaultTimeout, or longer where a loss is noticed later than that.
func (a App) Limit(limit time.Duration) time.Duration {
	if limit != 0 {
		return limit
	}
	return max(DefaultTimeout, a.lossDetectionTime())
}

// Call is a request of this node in flight: a push_pull, a push, a pull. It is a small
// value that may be copied. All methods are safe for concurrent use.
type Call struct {
	c     *Customer
	first int32
	n     int32
	limit time.Duration
}

// Call returns r as its caller uses it. A limit of 0 is the default of App.Limit, a negative limit is none. Call it
// after Open.
func (r *Request) Call(limit time.Duration) Call { return Call{r.c, r.first, r.n, limit} }

// Expire ends r with van.ErrTimeout when limit, counted from Open, has passed and no Wait waits for r. limit is as in Call. Call it
// after Open.
func (r *Request) Expire(limit time.Duration) {
	if limit = (App{r.c.node}).Limit(limit); limit < 0 {
		return
	}
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.c.expire(r, limit)
}

// Wait waits until all receivers have answered, and forgets the call: its memory is the caller's again, also after an
// error. Without a deadline in ctx it waits for the limit of the call, counted from its start. Errors wrap
// van.ErrTimeout, van.ErrPeerLost, van.ErrClosed, van.ErrMalformed, van.ErrInvalid, ErrUnknownHandler (a second
// Wait), or ctx's error, and name the peers concerned.
func (c Call) Wait(ctx context.Context) error {
	if c.c == nil {
		return &van.Error{Op: "wait", Err: ErrUnknownHandler, Hint: "this Call was returned with an error, or never made"}
	}
	limit := App{c.c.node}.Limit(c.limit)
	if _, has := ctx.Deadline(); has || limit < 0 {
		limit = 0
	}
	return c.c.Wait(ctx, c.first, limit)
}

// Done returns a channel that is closed when the call is over: Wait then returns at once. The first use of a call makes the
// channel, and makes the call end at its limit unless a Wait waits for it. Done receives nothing by itself: where the goroutines that
// wait receive, as with STEPAF_BUSY_POLL_ENABLE, Wait is faster.
func (c Call) Done() <-chan struct{} {
	if c.c == nil {
		return closed
	}
	c.c.mu.Lock()
	defer c.c.mu.Unlock()
	r := c.c.lookup(c.first)
	if r == nil {
		return closed
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.first != c.first || r.over {
		return closed
	}
	if r.ended == nil {
		r.ended = make(chan struct{})
		if limit := (App{c.c.node}).Limit(c.limit); limit > 0 {
			c.c.expire(r, limit)
		}
	}
	return r.ended
}

// KeepSent keeps the sent request valid at its receivers if the call ends without an answer: no cancellation is sent. The
// caller must not use the memory of the request again, unless the transport has copied it.
func (c Call) KeepSent() {
	if c.c == nil {
		return
	}
	if r := c.c.lookup(c.first); r != nil {
		r.mu.Lock()
		r.keepSent = r.keepSent || r.first == c.first
		r.mu.Unlock()
	}
}

// closed is the channel of calls that are over.
var closed = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Customer is whose request the call is, nil for the zero Call.
func (c Call) Customer() *Customer { return c.c }

// Timestamp is the first of the call's consecutive timestamps, which errors and log lines
// call its handler.
func (c Call) Timestamp() int32 { return c.first }

// Len is the number of timestamps: a push_pull has one for each push tensor and one for
// each pull tensor of a server, other calls have one.
func (c Call) Len() int { return int(c.n) }

// Traces returns the stamps of the call's messages, one for each timestamp. With several
// servers they are those of the last answer. Traces of the last 4096 answered timestamps
// are kept; those of others, and of customers without KeepTraces, are zero.
func (c Call) Traces() []Trace {
	ts := make([]Trace, c.n)
	for i := range ts {
		if c.c != nil {
			ts[i], _ = c.c.Trace(c.first + int32(i))
		}
	}
	return ts
}
