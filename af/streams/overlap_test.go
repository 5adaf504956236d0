package streams_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

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

// TestCapturedOverlap: in a graph, a receive overlaps the work that follows the send, unless there is none.
func TestCapturedOverlap(t *testing.T) {
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
		t.Errorf("%d receives overlap other work, want 6", n)
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

// TestEndCopiesNothing: a receive that the end of an exchange releases leaves its tensors as they are.
func TestEndCopiesNothing(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	p := s.prepare(t, 10, 10)[0]
	if err := errors.Join(p.x.QueueSend(stream), p.x.QueueReceive(stream)); err != nil {
		t.Fatal(err)
	}
	fill(p.out[0][0], 99)
	fill(p.pull[0], 7)
	_ = p.ys[0].Close()
	if err := over(t, p.x); !errors.Is(err, van.ErrClosed) {
		t.Errorf("%v, want %v", err, van.ErrClosed)
	}
	s.workers[0].dev.Settle(t, stream)
	if got := p.pull[0][9]; got != 7 {
		t.Errorf("the tensor has %d after the end, want 7", got)
	}
}

// TestGatesAreReleasedFirst: streams pass a gate only after it was released, so that they copy nothing: a lost peer has not closed it.
func TestGatesAreReleasedFirst(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 2})
	p := s.prepare(t, 10, 10)[0]
	words := s.workers[0].RecordWords()
	_ = p.x.Close()
	gates, flags := p.x.Releases()
	var released []uint64
	for want := slices.Concat(gates, flags); len(released) < len(want); {
		select {
		case w := <-words:
			if slices.Contains(want, w) {
				released = append(released, w)
			}
		default:
			t.Fatalf("%d words were released, want %d", len(released), len(want))
		}
	}
	if !slices.Equal(released, slices.Concat(gates, flags)) {
		t.Errorf("released %#x, want first the gates %#x, then the flags %#x", released, gates, flags)
	}
}
