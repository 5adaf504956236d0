package resend

import (
	"context"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van/engine"
)

// TestCloseByPoll: if a delivery of a Poll closes the van, Close still receives the
// acknowledgements that it waits for.
func TestCloseByPoll(t *testing.T) {
	f := newFixture(t, Options{CloseWait: 10 * time.Second})
	if err := f.Send(request(8, 5)); err != nil {
		t.Fatal(err)
	}
	e := engine.New(50 * time.Microsecond)
	acks := &source{ch: make(chan func(*engine.Deliverer), 1), wake: make(chan struct{}, 1)}
	others := &source{ch: make(chan func(*engine.Deliverer), 1), wake: make(chan struct{}, 1)}
	began := time.Now()
	others.ch <- func(turn *engine.Deliverer) {
		acks.ch <- func(*engine.Deliverer) { f.p.recv(ack(8, 0x000009080000000b)) }
		acks.Wake(engine.ByLoop)
		if err := f.Close(engine.Within(context.Background(), turn)); err != nil {
			t.Error(err)
		}
	}
	for _, s := range []*source{acks, others} {
		feed := engine.NewFeed(e, s, engine.FeedOptions{Polls: true})
		e.Add(feed)
		if s == acks {
			feed.Start()
		}
		defer func() { _ = feed.Stop(context.Background()) }()
	}
	e.Poll(func() bool { return len(others.ch) == 0 })
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("Close took %s, though the acknowledgement had come", d)
	}
}

// source is a source whose items are deliveries.
type source struct {
	ch   chan func(*engine.Deliverer)
	wake chan struct{}
	lane engine.PeerQueue[func(*engine.Deliverer)]
}

func (s *source) Take(time.Duration, bool) (func(*engine.Deliverer), *engine.PeerQueue[func(*engine.Deliverer)], engine.PollResult) {
	select {
	case f := <-s.ch:
		return f, &s.lane, engine.Message
	default:
		return nil, nil, engine.Nothing
	}
}
func (s *source) Arm(engine.Sleeper) bool { return len(s.ch) > 0 }
func (s *source) Disarm()                 {}
func (s *source) Sleep(_ engine.Sleeper, arm func() bool, _ time.Duration) {
	if !arm() {
		<-s.wake
	}
}
func (s *source) Wake(engine.Sleeper) {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}
func (s *source) Deliver(f func(*engine.Deliverer), turn *engine.Deliverer) { f(turn) }
func (s *source) Discard(func(*engine.Deliverer))                           {}
