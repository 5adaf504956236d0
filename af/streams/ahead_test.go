package streams_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// received waits until b is full of v, which stream writes.
func received(t *testing.T, d interface {
	Queue(uintptr, func())
	Settle(testing.TB, uintptr)
}, stream uintptr, b []byte, v byte) {
	t.Helper()
	vantest.Eventually(t, 20*time.Second, fmt.Sprintf("the tensor is full of %d", v), func() bool {
		same := true
		d.Queue(stream, func() {
			for _, x := range b {
				same = same && x == v
			}
		})
		d.Settle(t, stream)
		return same
	})
}

// answers queues a round of a server in stream, whose answer is the first push plus one.
func (s *ends) answers(t *testing.T, p *pair, stream af.Stream) {
	t.Helper()
	y := p.ys[0]
	err := y.QueueReceive(stream)
	s.servers[0].dev.Queue(uintptr(stream), func() { fill(p.out[0][0], p.got[0][0][0]+1) })
	if err := errors.Join(err, y.QueueSend(stream)); err != nil {
		t.Fatal(err)
	}
}

// TestReceivesAhead: after a send, a worker receives beside the work of its stream, in as many exchanges as there are streams of the library;
// the others receive in the caller's stream.
func TestReceivesAhead(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	w, y := s.workers[0], s.servers[0]
	const exchanges, ahead = 5, 3
	var pairs []*pair
	for range exchanges {
		pairs = append(pairs, s.prepare(t, 10, 10)[0])
	}
	for round := byte(1); round < 4; round++ {
		held := make(chan struct{})
		for i, p := range pairs {
			w.dev.Queue(stream, func() { fill(p.push[0], 10*round+byte(i)) })
			if err := p.x.QueueSend(stream); err != nil {
				t.Fatal(err)
			}
		}
		w.dev.Queue(stream, func() { <-held })
		for _, p := range pairs {
			s.answers(t, p, stream)
		}
		y.dev.Settle(t, stream)
		for i, p := range pairs[:ahead] { // the stream of the worker is held
			received(t, w.dev, p.x.AheadStream(), p.pull[0], 10*round+byte(i)+1)
		}
		for i, p := range pairs {
			if has := p.x.AheadStream() != 0; has != (i < ahead) {
				t.Errorf("exchange %d receives ahead: %t", i, has)
			}
			if p.ys[0].AheadStream() != 0 {
				t.Errorf("the server of exchange %d receives ahead", i)
			}
		}
		close(held)
		wrong := 0
		for i, p := range pairs {
			if err := p.x.QueueReceive(stream); err != nil {
				t.Fatal(err)
			}
			w.dev.Queue(stream, func() {
				if p.pull[0][9] != 10*round+byte(i)+1 {
					wrong++
				}
			})
		}
		w.dev.Settle(t, stream)
		if wrong > 0 {
			t.Errorf("round %d: %d exchanges have wrong answers", round, wrong)
		}
	}
}

// TestCapturedBeside: in a graph, an exchange receives beside the work that follows its send, unless there is none.
func TestCapturedBeside(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	s.captured = true
	w := s.workers[0]
	pairs := []*pair{s.prepare(t, 10, 10)[0], s.prepare(t, 10, 10)[0]}
	g := w.dev.Capture(stream)
	round, wrong := byte(0), 0
	w.dev.Queue(stream, func() { round++ })
	for layer := range byte(3) {
		for _, p := range pairs {
			w.dev.Queue(stream, func() { fill(p.push[0], round+layer) })
			if err := p.x.QueueSend(stream); err != nil {
				t.Fatal(err)
			}
		}
		for _, p := range pairs {
			if err := p.x.QueueReceive(stream); err != nil {
				t.Fatal(err)
			}
			w.dev.Queue(stream, func() {
				if p.pull[0][9] != round+layer+1 {
					wrong++
				}
			})
		}
	}
	g.End()
	if n := g.Rewound(); n != 6 {
		t.Errorf("%d receives are beside other work, want 6", n)
	}
	for range 4 {
		g.Replay(stream)
		for range 3 {
			for _, p := range pairs {
				s.answers(t, p, stream)
			}
		}
		w.dev.Settle(t, stream)
	}
	if wrong > 0 || round != 4 {
		t.Errorf("%d wrong answers in %d replays, want 4", wrong, round)
	}
}

// TestEndWhileReceivingAhead: the end of an exchange leaves the tensors of a receive that was queued ahead as they are; Close gives them and
// the stream back.
func TestEndWhileReceivingAhead(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	w := s.workers[0]
	for range 5 {
		p := s.prepare(t, 10, 10)[0]
		if err := p.x.QueueSend(stream); err != nil {
			t.Fatal(err)
		}
		ahead := p.x.AheadStream()
		if ahead == 0 {
			t.Fatal("the worker does not receive ahead")
		}
		fill(p.out[0][0], 99)
		fill(p.pull[0], 7)
		_ = p.ys[0].Close()
		if err := over(t, p.x); !errors.Is(err, van.ErrClosed) {
			t.Errorf("%v, want %v", err, van.ErrClosed)
		}
		_ = p.x.Close()
		w.dev.Settle(t, ahead)
		if got := p.pull[0][9]; got != 7 {
			t.Errorf("the tensor has %d after Close, want 7", got)
		}
	}
}
