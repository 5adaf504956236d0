package postoffice

// Requests in flight as programs see them.

import (
	"context"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
)

// DefaultTimeout, 15 s, is the limit of a call when neither the context of Call.Wait nor the call's maker has one, counted from
// the call. Where PS_HEARTBEAT_TIMEOUT asks for longer silences, the limit is that much longer, so that the loss of a peer is
// reported as ErrPeerLost and not as ErrTimeout.
const DefaultTimeout = cluster.DefaultTimeout

// Call is a request of this node in flight: a push_pull, a push, a pull. It is a small value that may be copied. All methods
// are safe for concurrent use.
type Call cluster.Call

// Wait waits until all nodes that were asked have answered, and forgets the call: its memory is the caller's again, also
// after an error. Without a deadline in ctx it waits for the limit of the call, counted from its start. When the wait ends
// first, the request is canceled. Errors wrap ErrTimeout, ErrPeerLost, ErrClosed, ErrMalformed, ErrInvalid,
// ErrRequestRefused, ErrUnknownHandler (a second Wait), or ctx's error, and name the peers concerned.
func (c Call) Wait(ctx context.Context) error { return cluster.Call(c).Wait(ctx) }

// Done returns a channel that is closed when the call is over, so that a program can select: Wait then returns at once, and is
// still to be called. If no Wait waits for the call at its limit, it ends with ErrTimeout. Programs that only wait call Wait alone,
// which is faster.
func (c Call) Done() <-chan struct{} { return cluster.Call(c).Done() }

// Timestamp is the first of the call's consecutive timestamps, which errors and log lines call its handler.
func (c Call) Timestamp() int32 { return cluster.Call(c).Timestamp() }

// Traces returns the times of the call's messages, one for each timestamp: a push_pull has one for each push tensor and one
// for each pull tensor of a server, other calls have one. Tensors of one message have the same times. With several servers
// the times are those of the last answer. The traces of the last 4096 answered timestamps are kept; others are zero.
func (c Call) Traces() []Trace {
	all := cluster.Call(c).Traces()
	ts := make([]Trace, len(all))
	for i, t := range all {
		ts[i] = Trace(t)
	}
	return ts
}

// Trace holds the times of a request and of its answer. A worker's are on this host's clock, a server's on the server's.
type Trace struct{ Request, Response van.Trace }
