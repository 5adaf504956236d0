package streams_test

import (
	"errors"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// eager makes a round of p that no graph contains.
func (s *ends) eager(t *testing.T, p *pair) {
	t.Helper()
	y := p.ys[0]
	if err := errors.Join(p.x.QueueSend(stream), y.QueueReceive(stream), y.QueueSend(stream), p.x.QueueReceive(stream)); err != nil {
		t.Fatal(err)
	}
	s.workers[0].dev.Settle(t, stream)
	if err := errors.Join(p.x.Check(), y.Check()); err != nil {
		t.Error(err)
	}
}

// TestInvalidCapture: a capture that the driver has invalidated ends no exchange: nothing of it is executed.
func TestInvalidCapture(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	s.captured = true
	p := s.prepare(t, 10, 10)[0]
	g := s.workers[0].dev.Capture(stream)
	g.Invalidate()
	if err := p.x.QueueSend(stream); err == nil {
		t.Error("a send was captured in an invalid capture")
	}
	g.End()
	s.eager(t, p)
}

// TestHalfCaptured: both halves of a round are captured, or neither is. After a canceled capture the round begins again.
func TestHalfCaptured(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	s.captured = true
	p := s.prepare(t, 10, 10)[0]
	x, y := p.x, p.ys[0]
	for _, c := range []struct {
		name        string
		first, then func(af.Stream) error
		dev         interface{ End() }
	}{
		{"a worker", x.QueueSend, x.QueueReceive, s.workers[0].dev.Capture(stream)},
		{"a server", y.QueueReceive, y.QueueSend, s.servers[0].dev.Capture(stream)},
	} {
		if err := c.first(stream); err != nil {
			t.Fatal(err)
		}
		c.dev.End() // without a replay
		if err := c.then(stream); !errors.Is(err, af.ErrStarted) {
			t.Errorf("%s: the other half of a canceled capture: %v, want %v", c.name, err, af.ErrStarted)
		}
	}
	s.eager(t, p)
	if err := x.QueueSend(stream); err != nil {
		t.Fatal(err)
	}
	g := s.workers[0].dev.Capture(stream)
	if err := x.QueueReceive(stream); !errors.Is(err, af.ErrStarted) {
		t.Errorf("the other half in a graph: %v, want %v", err, af.ErrStarted)
	}
	g.End()
	if err := errors.Join(y.QueueReceive(stream), y.QueueSend(stream), x.QueueReceive(stream), x.Check(), y.Check()); err != nil {
		t.Error(err)
	}
}
