package af

// Options of calls.

import (
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/streamqueue"
	"github.com/stepaf/stepaf-go/van"
)

// CallOption changes one PushPull, or all calls of a Prepared one: a Stream, To, Within. It
// costs no allocation.
type CallOption interface{ callOption() }

// StartOption changes one Start of a Prepared PushPull: a Stream, Rows. It costs no allocation.
type StartOption interface{ startOption() }

// RespondOption changes one Respond: a Stream, ByKey, OnSent. It costs no allocation.
type RespondOption interface{ respondOption() }

// StreamOption is the option of calls whose only option is a Stream. Of several, the last one counts. It costs no allocation.
type StreamOption interface{ streamOption() }

// Stream is a queue of work on the node's device: the driver's handle (CUstream, cudaStream_t). As an option it names
// the stream whose present work writes the device tensors to be sent, or uses the tensors to be filled. The call does
// not wait for that work: a goroutine of the library waits, and then sends. Host tensors must be complete at the
// call.
type Stream uintptr

const (
	// DefaultStream is the device's default stream, the default of calls without a Stream.
	DefaultStream Stream = 0
	// Complete means that no work is to be waited for: the caller guarantees that the tensors are complete and, if
	// they are to be filled, not in use.
	Complete = Stream(streamqueue.Complete)
)

func (Stream) callOption()    {}
func (Stream) streamOption()  {}
func (Stream) startOption()   {}
func (Stream) respondOption() {}

// To sends a PushPull only to the servers with these group ranks, in ascending order. The call then has one list of pull tensors
// for each of these servers. The servers answer each batch by
// itself. C++ StepMesh servers hand out batches only when every worker has sent one to each of
// them, so a call to some servers is refused in a cluster with such a server.
type To []int

func (To) callOption() {}

// Within is how long Wait waits for a PushPull, counted from it, when Wait's context has
// no deadline. It replaces WorkerOptions.Timeout; negative means no limit.
type Within time.Duration

func (Within) callOption() {}

// Rows cuts each tensor of a Prepared PushPull, pushed or pulled, to its first rows for one Start: a
// row is what one index of the first dimension selects. No rows is fine, more than one of
// the tensors has is an error.
type Rows int

func (Rows) startOption() {}

// Order determines which tensor of a Respond answers which pull.
type Order uint8

// ByKey answers each pull with the first tensor that has its key. Without it tensor i answers pull i, regardless of its key.
const ByKey Order = 1

func (Order) respondOption() {}

type onSent struct{ done van.Completion }

// OnSent calls done once for each pull when its answer has been sent and the tensor is the caller's again, from any
// goroutine; done must neither block nor send. Canceled answers are reported in the same way. After an error of
// Respond, done is called only if the batch counts as answered, see Batch.Answered.
func OnSent(done van.Completion) RespondOption { return onSent{done} }

func (onSent) respondOption() {}

// options are the options of a PushPull, a Start or a Respond; each accepts some of them.
type options struct {
	stream Stream
	to     To
	limit  time.Duration
	order  Order
	done   van.Completion
	rows   Rows
	cut    bool // to rows
}

// with returns o with opts, which are CallOptions, StartOptions or RespondOptions. It works on values, not through a pointer: the compiler would
// take what opts refer to for stored, and allocate it.
func with[Option any](o options, opts []Option) (options, error) {
	for i, opt := range opts {
		switch opt := any(opt).(type) {
		case Stream:
			o.stream = opt
		case To:
			o.to = opt
		case Within:
			o.limit = time.Duration(opt)
		case Order:
			o.order = opt
		case onSent:
			o.done = opt.done
		case Rows:
			o.rows, o.cut = opt, true
		default:
			return o, fmt.Errorf("%w: option %d is nil", van.ErrInvalid, i)
		}
	}
	return o, nil
}

// check returns an error unless t lists ranks of n servers.
func (t To) check(n int) error {
	for i, r := range t {
		why := ""
		switch {
		case r < 0 || r >= n:
			why = fmt.Sprintf("there is no server %d", r)
		case slices.Contains(t[:i], r):
			why = fmt.Sprintf("server %d is there twice", r)
		case i > 0 && r < t[i-1]:
			why = "they are not ascending"
		default:
			continue
		}
		return fmt.Errorf("%w: to servers %v, want ranks from 0 to %d, each once: %s", van.ErrInvalid, append([]int(nil), t...), n-1, why)
	}
	return nil
}
