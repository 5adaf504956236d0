package streams_test

// The end of an exchange, at nodes that have not heard of it.

import (
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/internal/testcluster"
)

// TestShortLimit: a limit that is shorter than the time between two looks ends no round that was answered.
func TestShortLimit(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	p := s.prepare(t, 10, 10, streams.Limit(20*time.Millisecond))[0]
	s.serve(t, p, 1)
	if err := errors.Join(p.x.QueueSend(stream), p.x.QueueReceive(stream)); err != nil {
		t.Fatal(err)
	}
	s.workers[0].settle(t, stream)
	select {
	case <-time.After(time.Second): // it is about what happens in this time
	case <-t.Context().Done():
	}
	if err := p.x.Check(); err != nil {
		t.Errorf("a round that was answered: %v", err)
	}
}

// TestBuffersAgain: the buffers of exchanges that were closed, of memory that cannot be shared, are used again.
func TestBuffersAgain(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	for _, d := range s.device {
		d.PrivateMem(true)
	}
	first := 0
	for i := range 5 {
		p := s.prepare(t, 1000, 300)[0]
		if err := p.x.Close(); err != nil {
			t.Fatal(err)
		}
		_ = p.ys[0].Close()
		if n := s.workers[0].dev.Allocs(); i == 0 {
			first = n
		} else if n > first {
			t.Fatalf("after %d exchanges %d allocations, after the first %d", i+1, n, first)
		}
	}
}
