package core

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
)

// Exchange is an af.Exchange as Python uses it: waits are in slices.
type Exchange struct {
	s      *Session
	x      *af.Exchange
	flying atomic.Int64 // handler of the call that is to be waited for, or none
}

// none instead of a handler: handlers are not negative.
const none = -1

// Prepare is af.Worker.Prepare, with servers in any order, in which their pulls are; nil
// means all.
func (s *Session) Prepare(servers []int, push, pull []af.KeyTensor) (*Exchange, error) {
	if s.worker == nil {
		return nil, s.wrongRole("prepare", "worker")
	}
	var x *af.Exchange
	var err error
	if servers == nil {
		x, err = s.worker.Prepare(push, pull)
	} else {
		servers, pull = ascending(servers, pull)
		x, err = s.worker.Prepare(push, pull, af.To(servers))
	}
	if err != nil {
		return nil, err
	}
	e := &Exchange{s: s, x: x}
	e.flying.Store(none)
	return e, nil
}

// AllRows instead of a number of rows for Start: all that the tensors have.
const AllRows = -1

// Start is af.Exchange.Start; it returns the first timestamp of the call.
func (e *Exchange) Start(stream af.Stream, rows int) (int32, error) {
	var call af.Call
	var err error
	if rows == AllRows {
		call, err = e.x.Start(stream)
	} else {
		call, err = e.x.Start(stream, af.Rows(rows))
	}
	if err != nil {
		return 0, err
	}
	e.flying.Store(int64(call.Timestamp()))
	return call.Timestamp(), nil
}

// Wait waits until the call of the last Start is complete, for limit counted from the
// Start, but not longer than slice at a time: then it returns ErrPending. Of two that wait
// at once, one gets postoffice.ErrOtherWaits.
func (e *Exchange) Wait(limit, slice time.Duration) error {
	h := e.flying.Load()
	if h == none {
		return fmt.Errorf("%s: wait: %w: this exchange is not started: call start() first", e.s.Name(), ErrMisuse)
	}
	err := e.s.worker.Customer().WaitSlice(context.Background(), int32(h), max(limit, time.Nanosecond), slice)
	if err != ErrPending && !errors.Is(err, postoffice.ErrOtherWaits) {
		e.flying.CompareAndSwap(h, none)
	}
	return err
}

// Close gives the memory of the tensors back, see af.Exchange.Close.
func (e *Exchange) Close() { e.x.Close() }
