package core

// Exchanges in streams as Python uses them.

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

// StreamExchange is a streams.Exchange, which may be used when the task that makes it has ended
// without an error.
type StreamExchange struct {
	*streams.Exchange
	made *Task

	receiving sync.Mutex
	slice     slice // of who holds receiving
}

// Streams are the exchanges in streams of a node. All methods are safe for concurrent use.
type Streams struct {
	node *postoffice.Node

	mu   sync.Mutex
	ends *streams.Ends // see open; under mu
}

// open returns what the node has for exchanges in streams, made at the first call.
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

// Prepare begins to make an exchange in streams with those peers, nil for all, see
// streams.Ends.Prepare: within limit, and with that limit of a round of a worker. host means streams.ByHost.
func (s *Streams) Prepare(peers []int, push, pull []af.KeyTensor, limit, round time.Duration, host bool) (*StreamExchange, *Task, error) {
	ends, err := s.open()
	if err != nil {
		return nil, nil, err
	}
	if limit < 0 { // Prepare has a limit of its own without one
		limit = forever
	}
	opts := []streams.Option{streams.Limit(round)}
	if host {
		opts = append(opts, streams.ByHost{})
	}
	push, pull = held(push), held(pull)
	x := &StreamExchange{}
	x.made = newTask(limit, func(ctx context.Context) (err error) {
		defer letGo(push)
		defer letGo(pull)
		x.Exchange, err = ends.Prepare(ctx, peers, push, pull, opts...)
		return err
	})
	return x, x.made, nil
}

// forever is as good as no limit.
const forever = 100 * 365 * 24 * time.Hour

// held is a copy of a list whose memory is held until letGo.
func held(list []af.KeyTensor) []af.KeyTensor {
	list = append([]af.KeyTensor(nil), list...)
	for i := range list {
		list[i].Val.Mem().Retain()
	}
	return list
}

func letGo(list []af.KeyTensor) {
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

// slice is a context that ends at a time, made without an allocation for each wait.
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

// ReceiveWithin is Receive for limit at most: then it returns ErrPending, unless this was the last attempt.
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

// Drop closes an exchange that Python has let go of, also one that is still being made.
func (e *StreamExchange) Drop() {
	e.made.abandon(func() error { return e.Close() })
}
