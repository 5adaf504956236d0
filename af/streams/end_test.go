package streams_test

// The end of an exchange, at nodes that have not heard of it.

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// TestLateEnd: a worker whose round took too long goes on, and changes what it has pushed. A server that was late
// takes that for no push, nor the worker for an answer what a server has changed that another worker's end made go on.
func TestLateEnd(t *testing.T) {
	const good, bad = 1, 2
	s := start(t, testcluster.Options{Workers: 2, Servers: 1})
	y := s.servers[0]
	for range 8 {
		pairs := s.prepare(t, 1<<10, 1<<10, streams.Limit(20*time.Millisecond))
		y0 := pairs[0].ys[0]
		late := make(chan struct{})
		served := make(chan error, 1)
		y.dev.Queue(stream, func() { <-late })
		if err := y0.QueueReceive(stream); err != nil {
			t.Fatal(err)
		}
		y.dev.Queue(stream, func() {
			wrong := false
			for _, b := range pairs[0].got[0] {
				wrong = wrong || bytes.IndexByte(b, bad) >= 0
			}
			if err := y0.Check(); err == nil && wrong {
				served <- errors.New("the server received what the worker wrote after its round, and Check says nothing")
			} else {
				served <- nil
			}
		})
		open := make(chan struct{}, 2)
		for i, w := range s.workers {
			p := pairs[i]
			for _, b := range p.push {
				fill(b, good)
			}
			if err := errors.Join(p.x.QueueSend(stream), p.x.QueueReceive(stream)); err != nil {
				t.Fatal(err)
			}
			w.dev.Queue(stream, func() {
				for _, b := range p.push {
					fill(b, bad)
				}
				open <- struct{}{}
			})
		}
		<-open
		<-open
		close(late)
		if err := <-served; err != nil {
			t.Fatal(err)
		}
		for _, p := range pairs {
			_ = p.x.Close()
		}
		_ = y0.Close()
	}
}

// TestNodeEnds: a node that ends can tell nobody, and its streams go on at once. What it had sent counts no more.
func TestNodeEnds(t *testing.T) {
	const good, bad = 1, 2
	s := start(t, testcluster.Options{Workers: 2, Servers: 1})
	y := s.servers[0]
	pairs := s.prepare(t, 1<<10, 1<<10)
	y0 := pairs[0].ys[0]
	late := make(chan struct{})
	y.dev.Queue(stream, func() { <-late })
	if err := y0.QueueReceive(stream); err != nil {
		t.Fatal(err)
	}
	var said error
	y.dev.Queue(stream, func() { said = y0.Check() })
	changed := make(chan struct{})
	for i, w := range s.workers {
		p := pairs[i]
		for _, b := range p.push {
			fill(b, good)
		}
		if err := p.x.QueueSend(stream); err != nil {
			t.Fatal(err)
		}
		w.settle(t, stream)
		if err := p.x.QueueReceive(stream); err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			w.dev.Queue(stream, func() {
				for _, b := range p.push {
					fill(b, bad)
				}
				close(changed)
			})
		}
	}
	hear := y.Deaf()
	left := make(chan struct{})
	go func() { s.Workers[1].Close(); close(left) }()
	<-changed
	done := make(chan struct{})
	y.dev.Queue(stream, func() { close(done) })
	close(late)
	select {
	case <-done:
	case <-time.After(100 * time.Millisecond): // the stream waits, as it should
	}
	hear()
	y.settle(t, stream)
	<-left
	for _, b := range pairs[0].got[0] {
		if said == nil && bytes.IndexByte(b, bad) >= 0 {
			t.Fatal("the server received what the worker wrote after the end of its node, and Check says nothing")
		}
	}
	if err := over(t, y0); !gone(err) {
		t.Errorf("%v, want %v or %v", err, van.ErrPeerLost, van.ErrClosed)
	}
}

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
