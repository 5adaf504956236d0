package streams

// Exchanges that the processors of the ends make: they look at each other's lines, see lines.go, and have their own devices copy.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// ByHost is the option with which the processors of the ends make the rounds instead of streams: Send and Receive take the place of QueueSend and
// QueueReceive. All ends of an exchange must have it. A round takes less time then, and both processors, and cannot be captured into a graph.
//
// Each end has a line in host memory that the processes of its peers have mapped to read it. Send writes there how many rounds this end has sent. Receive
// looks at the lines of the peers, and has the node's device copy what they have sent. When the exchange is over its end says so in its line, before the
// tensors are the caller's again, and a Receive looks at that when it has copied. So nothing that was changed meanwhile is taken for what was sent.
//
// A worker's Limit is looked at in Receive. What peers had mapped is unmapped at Close, unless streams of the device may wait; each exchange keeps 128 bytes of
// pinned host memory, and each 512 a file descriptor, until the backend is closed.
type ByHost struct{}

func (ByHost) apply(x *Exchange) { x.host = &host{} }

// Send tells the peers that the tensors for them are ready once stream has come to this point, af.Complete if they are.
// It does not wait. A worker sends first, a server receives first, and then both take turns.
func (x *Exchange) Send(stream af.Stream) error {
	if err := x.begin("send", true); err != nil {
		return err
	}
	defer x.queueing.Unlock()
	h := x.host
	n := h.round
	if !x.first {
		n-- // that which was received
	}
	if err := x.words.sendByHost(h, stream, n); err != nil {
		if !errors.Is(err, backend.ErrUnsupported) {
			x.fail(err) // a part may be in the stream
		}
		return x.wrong("send", err)
	}
	h.since, x.sendNext = clock.Now(), false
	return nil
}

// Receive waits until all peers have sent, and copies what they have into the tensors of this end, which hold it when Receive
// returns nil. It waits for as long as ctx lasts, a worker for its Limit at most, from Send: then the exchange is over. When ctx
// has ended tensors may still change, until a later Receive goes on and returns nil, or Close.
func (x *Exchange) Receive(ctx context.Context) error {
	if err := x.begin("receive", false); err != nil {
		return err
	}
	defer x.queueing.Unlock()
	r := receipt{x, x.host}
	err := r.arrive(ctx)
	if err == nil {
		err = r.finish(ctx)
	}
	if err != nil {
		return err
	}
	h := r.h
	clear(h.came)
	h.left, x.sendNext = len(h.far), true
	h.round++
	h.wait = waiting{}
	return nil
}

// begin takes queueing for a Send or a Receive, or says why that is not the caller's to do now: two at once are a mistake, and the second one could wait
// for as long as the first.
func (x *Exchange) begin(op string, send bool) error {
	if x.host == nil {
		return x.wrong(op, fmt.Errorf("%w: it is made by streams, want QueueSend and QueueReceive", van.ErrInvalid))
	}
	if !x.queueing.TryLock() {
		if err := x.Check(); err != nil {
			return err
		}
		return x.wrong(op, fmt.Errorf("%w: another Send or Receive is under way", af.ErrStarted))
	}
	err := x.turn(op, send)
	if err != nil {
		if x.failed.Load() != nil {
			x.host.settle() // what a Receive has left under way that has given up
		}
		x.queueing.Unlock()
	}
	return err
}

// receipt is a Receive of an exchange. queueing is held.
type receipt struct {
	x *Exchange
	h *host
}

// arrive waits until all peers have sent the round. What has come is queued to be copied.
func (r receipt) arrive(ctx context.Context) error {
	x, h := r.x, r.h
	for all := false; ; all = h.wait.pass(x) {
		for i := range h.far {
			if h.came[i] || h.far[i].sent() != h.round {
				continue
			}
			memfd.Read()
			h.came[i] = true
			h.left--
			if err := x.words.copyFrom(h, i); err != nil {
				x.fail(err)
				return r.ended()
			}
		}
		if h.left == 0 {
			return nil
		}
		if all || x.failed.Load() != nil {
			if err := r.cannotCome(ctx); err != nil {
				return err
			}
		}
	}
}

// cannotCome is why Receive returns without what is awaited.
func (r receipt) cannotCome(ctx context.Context) error {
	x, h := r.x, r.h
	if x.failed.Load() != nil {
		return r.ended()
	}
	for i, l := range h.far {
		if l.over() {
			return r.endedThere(ctx, i)
		}
		if n := l.sent(); !h.came[i] && n != h.round && n != h.round-1 {
			x.fail(&van.Error{Op: "exchange", Peer: x.dir.node.PeerName(x.peers[i].id), Err: fmt.Errorf("%w: it says that it has sent round %d in round %d", van.ErrMalformed, n, h.round)})
			return r.ended()
		}
	}
	if took, late := r.late(); late {
		x.fail(x.timing.late(took, r.missing()))
		return r.ended()
	}
	if ctx.Err() != nil {
		return &van.Error{Op: "receive", Node: x.dir.node.Name(), Peer: r.missing(), Detail: x.String() + ": round " + fmt.Sprint(h.round), Err: van.TimedOut(context.Cause(ctx))}
	}
	return nil
}

// late tells how long a worker's round has taken, and whether that is too long. It is asked all the while, and allocates nothing.
func (r receipt) late() (took time.Duration, late bool) {
	limit := r.x.timing.limit
	took = time.Duration(clock.Now() - r.h.since)
	return took, r.x.first && limit > 0 && took >= limit
}

// missing names the peers that have not sent.
func (r receipt) missing() string {
	var peers []*peer
	for i, p := range r.x.peers {
		if !r.h.came[i] {
			peers = append(peers, p)
		}
	}
	return r.x.dir.names(peers)
}

// finish waits until the copies of the round are done, and tells whether they are of what was sent: a peer whose end is over may have changed that.
func (r receipt) finish(ctx context.Context) error {
	x, h := r.x, r.h
	h.wait = waiting{}
	for all := false; h.copying; all = h.wait.pass(x) {
		done, err := h.event.Query()
		if all && !done && err == nil {
			if ctx.Err() != nil {
				return &van.Error{Op: "receive", Node: x.dir.node.Name(), Detail: x.String() + ": copies of the device", Err: van.TimedOut(context.Cause(ctx))}
			}
			if x.failed.Load() != nil {
				return r.ended()
			}
			if took, late := r.late(); late {
				err = x.timing.late(took, "copies of the device")
			} else {
				err = h.wait.health(x)
			}
		}
		if err != nil {
			x.fail(err)
			return r.ended()
		}
		h.copying = !done
	}
	if i := slices.IndexFunc(h.far, line.over); i >= 0 {
		return r.endedThere(ctx, i)
	}
	if x.failed.Load() != nil {
		return r.ended()
	}
	return nil
}

// endedThere ends the exchange as peer i has ended it. What the peer says of it comes as a message.
func (r receipt) endedThere(ctx context.Context, i int) error {
	x := r.x
	for begun := clock.Now(); x.failed.Load() == nil && ctx.Err() == nil && time.Duration(clock.Now()-begun) < silence; {
		clock.Sleep(maxPause)
	}
	x.left(x.peers[i].id, "its end is over")
	return r.ended()
}

// ended is why the exchange is over, when nothing is copied to tensors of this end any more, unless the device does not answer.
func (r receipt) ended() error {
	r.h.settle()
	return r.x.Check()
}
