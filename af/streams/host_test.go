package streams_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// serveHost answers so many rounds of each server, whose tensors stream makes if it is not af.Complete.
func (s *ends) serveHost(t *testing.T, p *pair, rounds int, on af.Stream) (wait func()) {
	t.Helper()
	var all sync.WaitGroup
	for i, y := range s.servers {
		all.Go(func() {
			for range rounds {
				if err := p.ys[i].Receive(t.Context()); err != nil {
					t.Errorf("server %d: %v", i, err)
					return
				}
				compute := func() {
					for w := range s.workers {
						fill(p.out[i][w], answer(i, w, p.got[i][2*w][0], p.got[i][2*w+1][0]))
					}
				}
				if on == af.Complete {
					compute()
				} else {
					y.dev.Queue(uintptr(on), compute)
				}
				if err := p.ys[i].Send(on); err != nil {
					t.Errorf("server %d: %v", i, err)
				}
			}
		})
	}
	return all.Wait
}

// TestHostRounds: two workers and two servers whose processors make the rounds, with complete tensors and with
// tensors that a stream computes meanwhile, also in memory that cannot be shared directly.
func TestHostRounds(t *testing.T) {
	for _, private := range []bool{false, true} {
		for name, on := range map[string]af.Stream{"complete": af.Complete, "made by a stream": stream} {
			t.Run(fmt.Sprintf("private=%t %s", private, name), func(t *testing.T) {
				s := start(t, testcluster.Options{Workers: 2, Servers: 2})
				if private {
					for _, d := range s.device {
						d.PrivateMem(true)
					}
				}
				pairs := s.prepare(t, 1000, 300, streams.ByHost{})
				const rounds = 200
				served := s.serveHost(t, pairs[0], rounds, on)
				var all sync.WaitGroup
				for i, w := range s.workers {
					p := pairs[i]
					all.Go(func() {
						for round := range rounds {
							compute := func() {
								fill(p.push[0], byte(round+i))
								fill(p.push[1], byte(2*round))
							}
							if on == af.Complete {
								compute()
							} else {
								w.dev.Queue(uintptr(on), compute)
							}
							if err := errors.Join(p.x.Send(on), p.x.Receive(t.Context())); err != nil {
								t.Error(err)
								return
							}
							for k := range s.servers {
								want := bytes.Repeat([]byte{answer(k, i, byte(round+i), byte(2*round))}, 300)
								if !bytes.Equal(p.pull[k], want) {
									t.Errorf("worker %d, round %d: %d of server %d, want %d", i, round, p.pull[k][:3], k, want[0])
									return
								}
							}
						}
					})
				}
				all.Wait()
				served()
			})
		}
	}
}

// TestHostMisuse: operations of the other kind of exchange, by hosts or in streams, and operations out of turn.
func TestHostMisuse(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	p, q := s.prepare(t, 10, 10, streams.ByHost{})[0], s.prepare(t, 10, 10)[0]
	s.captured = false
	g := s.workers[0].dev.Capture(stream)
	captured := p.x.Send(stream)
	g.End()
	for _, c := range []struct {
		what      string
		err, want error
	}{
		{"a send into a stream, by hosts", p.x.QueueSend(stream), van.ErrInvalid},
		{"a receive in a stream, by hosts", p.x.QueueReceive(stream), van.ErrInvalid},
		{"a send by the host, in streams", q.x.Send(stream), van.ErrInvalid},
		{"a receive by the host, in streams", q.x.Receive(t.Context()), van.ErrInvalid},
		{"a worker that receives first", p.x.Receive(t.Context()), af.ErrStarted},
		{"a server that sends first", p.ys[0].Send(af.Complete), af.ErrStarted},
		{"a send in a graph", captured, backend.ErrUnsupported},
		{"a send", p.x.Send(af.Complete), nil},
		{"a second one", p.x.Send(af.Complete), af.ErrStarted},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v, want %v", c.what, c.err, c.want)
		}
	}
	if err := errors.Join(p.x.Check(), q.x.Check()); err != nil {
		t.Error(err)
	}
}

// TestHostWays: if the two ends are prepared in different ways, both get an error.
func TestHostWays(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	w, y := s.workers[0], s.servers[0]
	theirs := make(chan error, 1)
	go func() {
		_, err := y.Prepare(t.Context(), nil, y.list(t, pushKey, 1, buffers(1, 10)...), nil)
		theirs <- err
	}()
	_, err := w.Prepare(t.Context(), nil, w.list(t, pushKey, 1, buffers(1, 10)...), nil, streams.ByHost{})
	for _, err := range []error{err, <-theirs} {
		if err == nil || !strings.Contains(err.Error(), "by hosts") || !strings.Contains(err.Error(), "in streams") {
			t.Errorf("%v, want one that names both ways", err)
		}
	}
}

// TestHostWaits: if the context of a Receive ends, its error names the peer it waits for, and a later Receive goes
// on. A worker's Receive ends the exchange at the limit.
func TestHostWaits(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 2, Servers: 1})
	pairs := s.prepare(t, 10, 10, streams.ByHost{}, streams.Limit(500*time.Millisecond))
	y := pairs[0].ys[0]
	fill(pairs[0].push[0], 5)
	if err := pairs[0].x.Send(af.Complete); err != nil {
		t.Fatal(err)
	}
	err := y.Receive(limited(t, 30*time.Millisecond))
	if !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "worker 1") || strings.Contains(err.Error(), "worker 0") {
		t.Errorf("%v, want %v, of worker 1", err, van.ErrTimeout)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := y.Receive(canceled); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
	fill(pairs[1].push[1], 6)
	if err := errors.Join(pairs[1].x.Send(af.Complete), y.Receive(t.Context())); err != nil {
		t.Fatal(err)
	}
	if a, b := pairs[0].got[0][0][9], pairs[0].got[0][3][9]; a != 5 || b != 6 {
		t.Errorf("got %d and %d, want 5 and 6", a, b)
	}
	err = pairs[0].x.Receive(t.Context())
	if !errors.Is(err, van.ErrTimeout) || !errors.Is(err, streams.ErrOver) || !strings.Contains(err.Error(), "server 0") {
		t.Errorf("%v, want %v and %v, of server 0", err, van.ErrTimeout, streams.ErrOver)
	}
	if err := over(t, y); !errors.Is(err, van.ErrClosed) {
		t.Errorf("the server: %v, want %v", err, van.ErrClosed)
	}
}

// TestHostEnds: if a node ends or is lost, the nodes that wait for it return an error at once.
func TestHostEnds(t *testing.T) {
	for name, end := range map[string]func(s *ends, p *pair){
		"server closes its end": func(_ *ends, p *pair) { _ = p.ys[1].Close() },
		"server's node closes":  func(s *ends, _ *pair) { s.Servers[1].Close() },
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, testcluster.Options{Workers: 1, Servers: 2})
			p := s.prepare(t, 10, 10, streams.ByHost{})[0]
			if err := p.x.Send(af.Complete); err != nil {
				t.Fatal(err)
			}
			other := make(chan error, 1)
			go func() {
				err := p.ys[0].Receive(t.Context())
				if err == nil {
					err = p.ys[0].Send(af.Complete)
				}
				if err == nil {
					err = p.ys[0].Receive(t.Context())
				}
				other <- err
			}()
			worker := make(chan error, 1)
			go func() { worker <- p.x.Receive(t.Context()) }()
			end(s, p)
			if err := <-worker; !gone(err) || !errors.Is(err, streams.ErrOver) || !strings.Contains(err.Error(), "server 1") {
				t.Errorf("the worker: %v, want that server 1 is gone", err)
			}
			if err := <-other; !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "worker 0") {
				t.Errorf("the other server: %v, want %v, of worker 0", err, van.ErrClosed)
			}
		})
	}
}

// TestHostSourceChanged: if a peer ends its exchange and changes its tensors during the copy, the copied contents
// are not taken for the peer's message.
func TestHostSourceChanged(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	p := s.prepare(t, 10, 10, streams.ByHost{})[0]
	hold := make(chan struct{})
	s.servers[0].dev.Queue(p.ys[0].HostStream(), func() { <-hold })
	if err := p.x.Send(af.Complete); err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() { got <- p.ys[0].Receive(t.Context()) }()
	vantest.Eventually(t, 10*time.Second, "copies wait behind what holds the stream", func() bool { return s.servers[0].dev.Queued(p.ys[0].HostStream()) > 1 })
	hear := s.servers[0].Deaf() // the node receives messages later than it reads flags
	_ = p.x.Close()
	fill(p.push[0], 99)
	close(hold)
	select {
	case err := <-got:
		hear()
		t.Fatalf("%v, though only the peer's line has told of its end", err)
	case <-time.After(100 * time.Millisecond): // Receive waits for the peer's message
	}
	hear()
	if err := <-got; !errors.Is(err, streams.ErrOver) {
		t.Errorf("%v, want %v", err, streams.ErrOver)
	}
}

// TestHostPrivateSource: Close returns after the library's stream has copied the memory that cannot be shared. The
// buffer is then used for the next exchange.
func TestHostPrivateSource(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	w := s.workers[0]
	w.dev.PrivateMem(true)
	p := s.prepare(t, 10, 10, streams.ByHost{})[0]
	hold := make(chan struct{})
	w.dev.Queue(p.x.HostStream(), func() { <-hold })
	if err := p.x.Send(af.Complete); err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{})
	go func() { _ = p.x.Close(); close(closed) }()
	if err := over(t, p.x); !errors.Is(err, van.ErrClosed) {
		t.Error(err)
	}
	select {
	case <-closed:
		t.Error("Close has returned, and the library's stream still has to copy the tensors")
	case <-time.After(50 * time.Millisecond): // it is about what does not happen in this time
	}
	close(hold)
	<-closed
}

// TestHostSilentDevice: a worker's Receive ends at the limit of the round, and Close returns, also while copies do not end; the tensors are
// kept then.
func TestHostSilentDevice(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	s.captured, s.silent = true, true
	p := s.prepare(t, 10, 10, streams.ByHost{}, streams.Limit(200*time.Millisecond))[0]
	hold := make(chan struct{})
	defer close(hold)
	s.workers[0].dev.Queue(p.x.HostStream(), func() { <-hold })
	if err := errors.Join(p.x.Send(af.Complete), p.ys[0].Receive(t.Context()), p.ys[0].Send(af.Complete)); err != nil {
		t.Fatal(err)
	}
	err := p.x.Receive(limited(t, 20*time.Second))
	if !errors.Is(err, van.ErrTimeout) || !errors.Is(err, streams.ErrOver) || !strings.Contains(err.Error(), "copies of the device") {
		t.Errorf("%v, want %v and %v, of copies", err, van.ErrTimeout, streams.ErrOver)
	}
	_ = p.x.Close()
}

// TestHostNothingAfterTheEnd: after Receive has reported the end of the exchange, nothing is copied to its tensors
// any more, not even by an earlier Receive that timed out.
func TestHostNothingAfterTheEnd(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	p := s.prepare(t, 10, 10, streams.ByHost{})[0]
	y, hold := s.servers[0], make(chan struct{})
	y.dev.Queue(p.ys[0].HostStream(), func() { <-hold })
	if err := p.x.Send(af.Complete); err != nil {
		t.Fatal(err)
	}
	if err := p.ys[0].Receive(limited(t, 30*time.Millisecond)); !errors.Is(err, van.ErrTimeout) || errors.Is(err, streams.ErrOver) {
		t.Errorf("%v, want %v", err, van.ErrTimeout)
	}
	_ = p.x.Close()
	if err := over(t, p.ys[0]); !gone(err) {
		t.Error(err)
	}
	got := make(chan error, 1)
	go func() { got <- p.ys[0].Receive(t.Context()) }()
	select {
	case err := <-got:
		t.Errorf("it says %v while copies are queued", err)
	case <-time.After(50 * time.Millisecond): // as above
	}
	close(hold)
	if err := <-got; !errors.Is(err, streams.ErrOver) || y.dev.Queued(p.ys[0].HostStream()) > 0 {
		t.Errorf("%v, want %v, and %d pieces of work are left", err, streams.ErrOver, y.dev.Queued(p.ys[0].HostStream()))
	}
}

// TestHostTwoAtOnce: calls during a Receive are refused, they do not wait for it.
func TestHostTwoAtOnce(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	p := s.prepare(t, 10, 10, streams.ByHost{})[0]
	got := make(chan error, 1)
	go func() {
		err := af.ErrStarted
		for errors.Is(err, af.ErrStarted) { // Busy may have been there first
			err = p.ys[0].Receive(t.Context())
		}
		got <- err
	}()
	vantest.Eventually(t, 10*time.Second, "it waits", p.ys[0].Busy)
	if err := p.ys[0].QueueReceive(stream); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("QueueReceive: %v, want %v", err, van.ErrInvalid)
	}
	if a, b := p.ys[0].Receive(t.Context()), p.ys[0].Send(af.Complete); !errors.Is(a, af.ErrStarted) || !errors.Is(b, af.ErrStarted) {
		t.Errorf("%v, %v, want %v", a, b, af.ErrStarted)
	}
	_ = p.x.Close()
	if err := <-got; !gone(err) {
		t.Errorf("%v, want that worker 0 is gone", err)
	}
}

// TestBuffersFull: if memory cannot be shared and exceeds the limit of buffers, Prepare fails.
func TestBuffersFull(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	w := s.workers[0]
	w.dev.PrivateMem(true)
	if err := w.BuffersAtMost(w.dev, 3000); err != nil {
		t.Fatal(err)
	}
	_, err := w.Prepare(t.Context(), nil, w.list(t, pushKey, 3, buffers(3, 1000)...), nil)
	if !errors.Is(err, backend.ErrNoMemory) || !strings.Contains(err.Error(), "key 10") {
		t.Errorf("%v, want %v, of a tensor", err, backend.ErrNoMemory)
	}
}
