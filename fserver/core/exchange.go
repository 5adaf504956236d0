package core

// Exchanges, which are prepared once and started again and again, as Python uses them.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Exchange is an af.Exchange as Python uses it: waits are in slices, and what is called while
// the stream is captured into a graph goes into the graph.
type Exchange struct {
	*af.Exchange
	s      *Session
	graphs backend.GraphFlagger // nil if the device has no graphs
	flying atomic.Int64         // handler of the call that is to be waited for, or none
}

// ErrCaptured is returned by calls that have gone into a graph.
var ErrCaptured = errors.New("captured into a graph")

// none instead of a handler: handlers are not negative.
const none = -1

// Prepare is af.Worker.Prepare, with servers in any order, in which their pulls are; nil
// means all.
func (s *Session) Prepare(servers []int, push, pull []af.KeyTensor) (*Exchange, error) {
	if s.worker == nil {
		return nil, s.wrongRole("prepare", "worker")
	}
	servers, pull = ascending(servers, pull)
	x, err := s.worker.Prepare(push, pull, af.To(servers))
	if err != nil {
		return nil, err
	}
	e := &Exchange{Exchange: x, s: s}
	e.graphs, _ = s.Device().(backend.GraphFlagger)
	e.flying.Store(none)
	return e, nil
}

// AllRows instead of a number of rows for Start: all that the tensors have.
const AllRows = -1

// Start is af.Exchange.Start; it returns the first timestamp of the call. If current, the
// caller's stream on the device, is being captured, it is af.Exchange.QueueStart, and
// returns ErrCaptured. Complete instead of a stream is for tensors on the host. event says
// whether the tensors wait for what is in the stream.
func (e *Exchange) Start(current af.Stream, event bool, rows int) (int32, error) {
	var opts [2]af.StartOption
	n := 0
	if rows != AllRows {
		opts[0], n = af.Rows(rows), 1
	}
	captured, err := e.capturing(current)
	if err != nil {
		return 0, err
	}
	if captured {
		if e.flying.Load() != none {
			return 0, fmt.Errorf("%s: start: %w: wait() for the last round first, it is not of a graph", e.s.Name(), af.ErrStarted)
		}
		return 0, cmp.Or(e.QueueStart(current, opts[:n]...), ErrCaptured)
	}
	if opts[n] = current; !event {
		opts[n] = af.Complete
	}
	call, err := e.Exchange.Start(opts[:n+1]...)
	if err != nil {
		return 0, err
	}
	e.flying.Store(int64(call.Timestamp()))
	return call.Timestamp(), nil
}

// capturing tells whether the caller's stream is being captured into a graph.
func (e *Exchange) capturing(current af.Stream) (bool, error) {
	if e.graphs == nil || current == af.Complete {
		return false, nil
	}
	return e.graphs.Capturing(uintptr(current))
}

// Wait waits until the call of the last Start is complete, for limit counted from the
// Start, but not longer than slice at a time: then it returns ErrPending. Of two that wait
// at once, one gets postoffice.ErrOtherWaits. If there is no such call and current is being
// captured, it is af.Exchange.QueueWait, and returns ErrCaptured.
func (e *Exchange) Wait(current af.Stream, limit, slice time.Duration) error {
	h := e.flying.Load()
	if h == none {
		captured, err := e.capturing(current)
		switch {
		case err != nil:
			return err
		case captured:
			return cmp.Or(e.QueueWait(current, max(limit, time.Nanosecond)), ErrCaptured)
		}
		if err := e.Check(); err != nil {
			return err
		}
		return fmt.Errorf("%s: wait: %w: this exchange is not started: call start() first", e.s.Name(), ErrMisuse)
	}
	err := e.s.worker.Customer().WaitSlice(context.Background(), int32(h), max(limit, time.Nanosecond), slice)
	if err != ErrPending && !errors.Is(err, postoffice.ErrOtherWaits) {
		e.flying.CompareAndSwap(h, none)
	}
	return err
}
