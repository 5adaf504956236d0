package streams_test

// The end of an exchange, at nodes that have not been notified of it.

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
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

// TestNodeEnds: a node that ends cannot notify its peers, and its streams go on at once. Its earlier messages
// count no more.
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
		w.dev.Settle(t, stream)
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
	y.dev.Settle(t, stream)
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

// queueRound queues a round of worker 0, and returns a channel that is closed when its stream has gone on.
func (s *ends) queueRound(t *testing.T, p *pair) (went chan struct{}) {
	t.Helper()
	if err := errors.Join(p.x.QueueSend(stream), p.x.QueueReceive(stream)); err != nil {
		t.Fatal(err)
	}
	went = make(chan struct{})
	s.workers[0].dev.Queue(stream, func() { close(went) })
	return went
}

// TestStreamsPart: the streams of an exchange that is over do not go on before the other end has confirmed the
// end.
func TestStreamsPart(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	p := s.prepare(t, 10, 10)[0]
	went := s.queueRound(t, p)
	hear := s.servers[0].Deaf()
	var err error
	closed := make(chan struct{})
	go func() {
		err = p.x.Close()
		close(closed)
	}()
	select {
	case <-went:
		t.Error("the stream went on while the server took the exchange for whole")
	case <-closed:
		t.Error("Close has returned while the server took the exchange for whole")
	case <-time.After(100 * time.Millisecond):
	}
	hear()
	<-went
	<-closed
	if err != nil {
		t.Error(err)
	}
}

// TestCloseTwice: of two calls of Close at the same time, neither returns before the exchange has ended.
func TestCloseTwice(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	p := s.prepare(t, 10, 10)[0]
	hear := s.servers[0].Deaf()
	ended := make(chan bool, 2)
	for range 2 {
		go func() {
			_ = p.x.Close()
			ended <- p.x.Settled()
		}()
	}
	early := time.AfterFunc(100*time.Millisecond, hear)
	for range 2 {
		if !<-ended {
			t.Error("Close has returned before the exchange has ended")
		}
	}
	if early.Stop() {
		hear()
	}
}

// TestCloseBehindABlockedDriver: the end of a node, and Close, do not wait for a driver that does not return.
func TestCloseBehindABlockedDriver(t *testing.T) {
	for name, end := range map[string]func(w *end) error{
		"Close":       func(w *end) error { return w.Ends.Close() },
		"of the node": func(w *end) error { w.Node.Close(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, testcluster.Options{Workers: 1, Servers: 1})
			p := s.prepare(t, 10, 10)[0]
			unblock := s.workers[0].BlockDriver()
			t.Cleanup(unblock)
			done := make(chan error, 1)
			go func() { done <- end(s.workers[0]) }()
			select {
			case err := <-done:
				if err != nil {
					t.Error(err)
				}
				if p.x.Check() == nil {
					t.Error("the exchange has not ended")
				}
			case <-time.After(10 * time.Second):
				t.Error("it waits for the driver")
			}
			unblock()
			vantest.Eventually(t, 20*time.Second, "the exchange has ended", p.x.Settled)
		})
	}
}

// TestLostWithoutAWord: streams do not wait for the end of a peer that is lost without a message.
func TestLostWithoutAWord(t *testing.T) {
	hook := &hooks.Van{}
	s := start(t, testcluster.Options{Workers: 1, Servers: 2, Wrap: hook.Wrap("server", 1)})
	p := s.prepare(t, 10, 10)[0]
	went := s.queueRound(t, p)
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Lose })
	s.Servers[1].Close()
	if err := over(t, p.x); !errors.Is(err, van.ErrPeerLost) || !strings.Contains(err.Error(), "server 1") {
		t.Errorf("%v, want %v, of server 1", err, van.ErrPeerLost)
	}
	select {
	case <-went:
	case <-time.After(streams.PartLimit / 2):
		t.Error("the stream waits for the end of a server that is lost")
	}
}

// TestShortLimit: a limit that is shorter than the interval of polls ends no round that was answered.
func TestShortLimit(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	const limit = 20 * time.Millisecond
	p := s.prepare(t, 10, 10, streams.Limit(limit))[0]
	for end := time.Now().Add(20 * time.Second); ; {
		s.replay(t, p, 1, unchanged)
		if took, err := s.round(t, p); err != nil {
			t.Fatal(err)
		} else if took < limit {
			break
		} else if time.Now().After(end) {
			t.Fatalf("no round is answered within its limit of %s, the last after %s", limit, took)
		}
		p = s.again(t, p, streams.Limit(limit)) // that one may have been ended: it was late
	}
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

// TestInOrder: of exchanges with the same keys for which a server waits, the one that was begun first meets the
// worker's first.
func TestInOrder(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	w, y := s.workers[0], s.servers[0]
	const many = 8
	type made struct {
		x   *streams.Exchange
		err error
	}
	got, put := buffers(many, 1), buffers(many, 1)
	begin := func(e *end, b []byte) chan made {
		c := make(chan made, 1)
		list := e.list(t, 1, 1, b)
		ctx := limited(t, 20*time.Second)
		go func() {
			x, err := e.Prepare(ctx, nil, list, nil)
			c <- made{x, err}
		}()
		return c
	}
	var ys []chan made
	for i := range many {
		ys = append(ys, begin(y, got[i]))
		y.Waiting(t, i+1)
	}
	for i := range many {
		fill(put[i], byte(i+1))
		a := <-begin(w, put[i])
		b := <-ys[i]
		if err := errors.Join(a.err, b.err); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(a.x.QueueSend(stream), b.x.QueueReceive(stream)); err != nil {
			t.Fatal(err)
		}
		y.dev.Settle(t, stream)
		if got[i][0] != put[i][0] {
			t.Errorf("exchange %d received %d, want %d", i, got[i][0], put[i][0])
		}
		t.Cleanup(func() { _, _ = a.x.Close(), b.x.Close() })
	}
}

// TestTooManyOffers: if a server's table of offers is full, the worker gets an error at once.
func TestTooManyOffers(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	w := s.workers[0]
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	const room = 64
	failed := make(chan error, room+1)
	for i := range room + 1 {
		list := w.list(t, uint64(i), 1, make([]byte, 1))
		go func() {
			_, err := w.Prepare(ctx, nil, list, nil)
			failed <- err
		}()
	}
	if err := <-failed; !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "too many exchanges") {
		t.Errorf("%v, want %v with why", err, van.ErrClosed)
	}
	cancel()
	for range room {
		<-failed
	}
}
