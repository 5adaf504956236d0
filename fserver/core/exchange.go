package core

// Exchanges are prepared once and started many times. This file adapts them to Python.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Exchange is an af.Prepared for Python. It waits in slices. While the stream is being captured into a graph, its calls
// go into the graph.
type Exchange struct {
	*af.Prepared
	s       *Session
	graphs  backend.GraphFlagger // nil if the device has no graphs
	flying  atomic.Int64         // handler of the started call, or none
	servers []int                // group ranks; nil for all
}

// ErrCaptured is returned by a call that went into a graph.
var ErrCaptured = errors.New("captured into a graph")

// none is the handler of no call: handlers are not negative.
const none = -1

// Prepare is af.Worker.Prepare with servers in any order; the pulls are in the same order. nil means all servers.
func (s *Session) Prepare(servers []int, push, pull []af.KeyTensor) (*Exchange, error) {
	if s.worker == nil {
		return nil, wrongRole(s, "prepare", "worker")
	}
	servers, pull = ascending(servers, pull)
	parts, err := perServer(s.node, nil, servers, pull)
	if err != nil {
		return nil, err
	}
	x, err := s.worker.Prepare(push, parts, af.To(servers))
	if err != nil {
		return nil, err
	}
	e := &Exchange{Prepared: x, s: s, servers: servers}
	e.graphs, _ = s.Device().(backend.GraphFlagger)
	e.flying.Store(none)
	return e, nil
}

// AllRows is a number of rows for Start. It stands for all rows of the tensors.
const AllRows = -1

// Start is af.Prepared.Start; it returns the first timestamp of the call. current is the caller's stream on the device.
// If it is being captured, Start is af.Prepared.QueueStart, and returns ErrCaptured. For tensors on the host, current
// is Complete. event makes the send wait for the work that is in the stream.
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
	call, err := e.Prepared.Start(opts[:n+1]...)
	if err != nil {
		return 0, err
	}
	e.flying.Store(int64(call.Timestamp()))
	e.s.first.done(e.servers...)
	return call.Timestamp(), nil
}

// MayConnect reports whether Start may wait for a connection.
func (e *Exchange) MayConnect() bool { return MayConnect(e.s, e.servers) }

// capturing reports whether the caller's stream is being captured into a graph.
func (e *Exchange) capturing(current af.Stream) (bool, error) {
	if e.graphs == nil || current == af.Complete {
		return false, nil
	}
	return e.graphs.Capturing(uintptr(current))
}

// Wait waits until the call of the last Start is complete. limit counts from the Start; after slice Wait returns
// ErrPending. With a slice of 0 it does not wait. If two callers wait, one of them gets cluster.ErrOtherWaits. If there
// is no such call and current is being captured, Wait is af.Prepared.QueueWait, and returns ErrCaptured.
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
	var err error
	if slice <= 0 {
		err = e.s.customer().Try(int32(h))
	} else {
		err = e.s.customer().WaitSlice(context.Background(), int32(h), max(limit, time.Nanosecond), slice)
	}
	if err != ErrPending && !errors.Is(err, cluster.ErrOtherWaits) {
		e.flying.CompareAndSwap(h, none)
	}
	return err
}

// Drop closes an exchange that Python no longer uses.
func (e *Exchange) Drop() { _ = e.Close() }
