package core

// Exchanges in streams as Python uses them.

import (
	"context"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/postoffice"
)

// StreamExchange is a streams.Exchange, which may be used when the task that makes it has ended
// without an error.
type StreamExchange struct {
	*streams.Exchange
	made *Task
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
// streams.Ends.Prepare: within limit, and with that limit of a round of a worker.
func (s *Streams) Prepare(peers []int, push, pull []af.KeyTensor, limit, round time.Duration) (*StreamExchange, *Task, error) {
	ends, err := s.open()
	if err != nil {
		return nil, nil, err
	}
	if limit < 0 { // Prepare has a limit of its own without one
		limit = forever
	}
	push, pull = held(push), held(pull)
	x := &StreamExchange{}
	x.made = newTask(limit, func(ctx context.Context) (err error) {
		defer letGo(push)
		defer letGo(pull)
		x.Exchange, err = ends.Prepare(ctx, peers, push, pull, streams.Limit(round))
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

// Drop closes an exchange that Python has let go of, also one that is still being made.
func (e *StreamExchange) Drop() {
	e.made.abandon(func() error { return e.Close() })
}
