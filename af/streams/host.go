package streams

// Exchanges by hosts: CPU threads of the ends poll each other's flags, see hostflags.go, and have their devices copy.

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
)

// ByHost is the option that makes CPU threads, not streams, perform the rounds, by Send and Receive instead of
// QueueSend and QueueReceive. All ends of an exchange must have it. A round takes less time, but occupies a CPU
// thread on both sides, and cannot be captured into a graph.
//
// Each end has flags in host memory that its peers map for reading. Send writes the number of rounds that this end
// has sent. Receive polls the flags of the peers, and has the node's device copy the data that they have sent. When
// the exchange ends, its end says so in a flag before the tensors are the caller's again; Receive checks this flag
// after its copies. Data that was changed meanwhile is therefore never taken for sent data.
//
// Receive checks a worker's Limit. Memory of peers is unmapped at Close, unless streams of the device may wait. Each
// exchange keeps 128 bytes of pinned host memory, and every 512 exchanges a file descriptor, until the backend is
// closed.
type ByHost struct{}

func (ByHost) apply(x *Exchange) { x.host = &host{} }

// Send notifies the peers that the tensors for them are ready once stream has reached this point; with af.Complete
// they are ready now. It does not wait. A worker sends first and a server receives first, and then sends and receives
// alternate.
func (x *Exchange) Send(stream af.Stream) error {
	if err := x.begin("send", true); err != nil {
		return err
	}
	defer x.queueing.Unlock()
	h := x.host
	n := h.round
	if !x.first {
		n-- // the round that was received
	}
	stream, err := x.mem.unlessIdle(stream)
	if err != nil {
		return x.wrong("send", err)
	}
	if err := x.mem.sendByHost(h, stream, n); err != nil {
		x.fail(err) // some of the work may be in the stream
		return x.wrong("send", err)
	}
	h.since, x.sendNext = clock.Now(), false
	return nil
}

// Receive waits until all peers have sent, and copies their data into the tensors of this end, which are complete
// when Receive returns nil. It waits until ctx ends. On a worker it waits for at most the Limit, counted from Send;
// the exchange then ends. After ctx has ended tensors may still change, until a later Receive resumes the wait and
// returns nil, or until Close.
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
	clear(h.arrived)
	h.left, x.sendNext = len(h.remote), true
	h.round++
	h.wait = waiting{}
	return nil
}

// begin locks queueing for a Send or a Receive, or returns an error. Concurrent calls are refused: the second one
// could wait as long as the first.
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
	err := x.turn(op, send, false)
	if err != nil {
		if x.failed.Load() != nil {
			x.host.settle() // copies of a Receive that was canceled
		}
		x.queueing.Unlock()
	}
	return err
}

// receipt is a Receive of an exchange in progress. queueing is held.
type receipt struct {
	x *Exchange
	h *host
}

// arrive waits until all peers have sent the round. It queues the copies of each peer's data as soon as the peer has
// sent.
func (r receipt) arrive(ctx context.Context) error {
	x, h := r.x, r.h
	for all := false; ; all = h.wait.pass(x) {
		for i := range h.remote {
			if h.arrived[i] || h.remote[i].sent() != h.round {
				continue
			}
			memfd.Read()
			h.arrived[i] = true
			h.left--
			if err := x.mem.copyFrom(h, i); err != nil {
				x.fail(err)
				return r.ended()
			}
		}
		if h.left == 0 {
			return nil
		}
		if all || x.failed.Load() != nil {
			if err := r.cannotArrive(ctx); err != nil {
				return err
			}
		}
	}
}

// cannotArrive returns why Receive must return without the data, or nil.
func (r receipt) cannotArrive(ctx context.Context) error {
	x, h := r.x, r.h
	if x.failed.Load() != nil {
		return r.ended()
	}
	for i, l := range h.remote {
		if l.over() {
			return r.endedThere(ctx, i)
		}
		if n := l.sent(); !h.arrived[i] && n != h.round && n != h.round-1 {
			x.fail(&van.Error{Op: "exchange", Peer: x.ends.node.PeerName(x.peers[i].id), Err: fmt.Errorf("%w: it reports round %d as sent in round %d", van.ErrMalformed, n, h.round)})
			return r.ended()
		}
	}
	if took, late := r.late(); late {
		x.fail(x.timing.late(took, r.missing()))
		return r.ended()
	}
	if ctx.Err() != nil {
		return &van.Error{Op: "receive", Node: x.ends.node.Name(), Peer: r.missing(), Detail: x.describe() + ": round " + fmt.Sprint(h.round), Err: van.TimedOut(context.Cause(ctx))}
	}
	return nil
}

// late reports how long a worker's round has taken, and whether that exceeds the limit. It is called while polling,
// and does not allocate.
func (r receipt) late() (took time.Duration, late bool) {
	limit := r.x.timing.limit
	took = clock.Since(r.h.since)
	return took, r.x.first && limit > 0 && took >= limit
}

// missing lists the peers that have not sent.
func (r receipt) missing() string {
	var peers []*peer
	for i, p := range r.x.peers {
		if !r.h.arrived[i] {
			peers = append(peers, p)
		}
	}
	return r.x.ends.names(peers)
}

// finish waits until the copies of the round are done, and checks that they are valid: a peer whose end is over may
// have changed its tensors.
func (r receipt) finish(ctx context.Context) error {
	x, h := r.x, r.h
	h.wait = waiting{}
	for i := range h.copies {
		if err := r.await(ctx, &h.copies[i]); err != nil {
			return err
		}
	}
	if i := slices.IndexFunc(h.remote, hostFlags.over); i >= 0 {
		return r.endedThere(ctx, i)
	}
	if x.failed.Load() != nil {
		return r.ended()
	}
	return nil
}

// await waits until copies are done.
func (r receipt) await(ctx context.Context, c *hostCopies) error {
	x, h := r.x, r.h
	for all := false; c.queued; all = h.wait.pass(x) {
		done, err := c.event.Query()
		if all && !done && err == nil {
			if ctx.Err() != nil {
				return &van.Error{Op: "receive", Node: x.ends.node.Name(), Detail: x.describe() + ": copies of the device", Err: van.TimedOut(context.Cause(ctx))}
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
		c.queued = !done
	}
	return nil
}

// endedThere ends the exchange after peer i has ended it. It waits a moment for the peer's message, which contains
// the reason.
func (r receipt) endedThere(ctx context.Context, i int) error {
	x := r.x
	for begun := clock.Now(); x.failed.Load() == nil && ctx.Err() == nil && clock.Since(begun) < silence; {
		clock.Sleep(maxPause)
	}
	x.left(x.peers[i].id, "its end is over")
	return r.ended()
}

// ended returns why the exchange is over. It first waits until no copy writes to tensors of this end, unless the
// device does not answer.
func (r receipt) ended() error {
	r.h.settle()
	return r.x.Check()
}
