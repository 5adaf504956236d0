package core

// Prepared GPU exchanges (af/streams) for Python.

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// StreamExchange is a streams.Exchange. It may be used after the task that creates it has ended without an error.
type StreamExchange struct {
	*streams.Exchange
	made *Task

	receiving sync.Mutex
	slice     slice // of the caller that holds receiving
}

// Streams are the prepared GPU exchanges of a node. All methods are safe for concurrent use.
type Streams struct {
	node *postoffice.Node

	mu   sync.Mutex
	ends *streams.Ends // see open; guarded by mu
}

// open returns the node's streams.Ends, which the first call creates.
func (s *Streams) open() (*streams.Ends, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ends == nil {
		ends, err := streams.New(s.node)
		if err != nil {
			return nil, err
		}
		s.ends = ends
	}
	return s.ends, nil
}

// Prepare begins to prepare an exchange with those peers; nil means all. See streams.Ends.Prepare. limit is the limit
// of the preparation, round the limit of a worker's round. host means streams.ByHost.
func (s *Streams) Prepare(peers []int, push, pull []af.KeyTensor, limit, round time.Duration, host bool) (*StreamExchange, *Task, error) {
	ends, err := s.open()
	if err != nil {
		return nil, nil, err
	}
	if limit < 0 { // without a limit, Prepare uses its own
		limit = forever
	}
	opts := []streams.Option{streams.Limit(round)}
	if host {
		opts = append(opts, streams.ByHost{})
	}
	push, pull = retained(push), retained(pull)
	x := &StreamExchange{}
	x.made = newTask(limit, func(ctx context.Context) (err error) {
		defer releaseAll(push)
		defer releaseAll(pull)
		x.Exchange, err = ends.Prepare(ctx, peers, push, pull, opts...)
		return err
	})
	return x, x.made, nil
}

// forever is longer than any program runs.
const forever = 100 * 365 * 24 * time.Hour

// retained returns a copy of a list. The memory of its tensors is retained until releaseAll.
func retained(list []af.KeyTensor) []af.KeyTensor {
	list = append([]af.KeyTensor(nil), list...)
	for i := range list {
		list[i].Val.Mem().Retain()
	}
	return list
}

func releaseAll(list []af.KeyTensor) {
	for i := range list {
		list[i].Val.Mem().Release()
	}
}

// Queue puts a send or a receive into a stream.
func (e *StreamExchange) Queue(send bool, stream af.Stream) error {
	if send {
		return e.QueueSend(stream)
	}
	return e.QueueReceive(stream)
}

// slice is a context that ends at a time. It needs no allocation for each wait.
type slice struct {
	context.Context
	until uint64 // clock.Now
}

func (s *slice) Err() error {
	if clock.Now() < s.until {
		return nil
	}
	return context.DeadlineExceeded
}

// ReceiveWithin is Receive with a limit. After limit it returns ErrPending, or if last is true, the error of Receive.
func (e *StreamExchange) ReceiveWithin(limit time.Duration, last bool) error {
	e.receiving.Lock()
	defer e.receiving.Unlock()
	e.slice = slice{context.Background(), clock.Now() + uint64(limit)}
	err := e.Receive(&e.slice)
	if err != nil && !last && errors.Is(err, van.ErrTimeout) && !errors.Is(err, streams.ErrOver) {
		return ErrPending
	}
	return err
}

// Drop closes an exchange that Python no longer uses. Its preparation may still be under way.
func (e *StreamExchange) Drop() {
	e.made.discard(func() error { return e.Close() })
}
