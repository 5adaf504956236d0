package rdma

import (
	"bytes"
	"context"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// A delivery may close the van, whether the loop makes it or a Poll, and whether a Poll has
// received the message from the device or from another of its sources.
func TestCloseByDelivery(t *testing.T) {
	for name, x := range map[string]struct{ poll, elsewhere bool }{"in the loop": {}, "in a Poll": {poll: true}, "in a Poll, of another source": {true, true}} {
		t.Run(name, func(t *testing.T) { testCloseByDelivery(t, x.poll, x.elsewhere) })
	}
}

func testCloseByDelivery(t *testing.T, poll, elsewhere bool) {
	p := newPair(t, nil)
	closed := make(chan error, 1)
	var once sync.Once
	var closes, overlap, inside, connected atomic.Bool
	closeBy := func(turn *engine.Turn) {
		if bytes.Contains(debug.Stack(), []byte("Engine).Poll(")) != poll {
			return
		}
		once.Do(func() {
			inside.Store(true)
			defer inside.Store(false)
			ctx, cancel := context.WithTimeout(engine.Within(context.Background(), turn), 5*time.Second)
			defer cancel()
			closes.Store(true)
			closed <- p.server.Close(ctx)
		})
	}
	other := &bellSource{deliver: closeBy, bell: make(chan struct{}, 1)}
	p.server.recv = func(m *van.Message) {
		connected.Store(true)
		overlap.Store(overlap.Load() || !elsewhere && inside.Load())
		if !elsewhere {
			closeBy(m.Turn)
		}
	}
	if elsewhere {
		f := engine.NewFeed(p.server.engine, other, engine.FeedOptions{Polls: true, Spins: true})
		f.Start()
		defer func() {
			if err := f.Stop(t.Context()); err != nil {
				t.Error(err)
			}
		}()
	}
	p.both()
	var stop atomic.Bool
	var all sync.WaitGroup
	all.Go(func() {
		for i := 0; !stop.Load(); i++ {
			if closes.Load() && !inside.Load() {
				return
			}
			_ = p.worker.Send(tensor(serverID, i, 1, true, true, make([]byte, 100)))
			other.any.Store(elsewhere && connected.Load())
			runtime.Gosched()
		}
	})
	if poll {
		all.Go(func() {
			for !stop.Load() {
				p.server.engine.Poll(stop.Load)
			}
		})
	}
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(testTime):
		t.Fatalf("Close by a delivery does not return; it was called: %t", closes.Load())
	}
	stop.Store(true)
	all.Wait()
	if overlap.Load() {
		t.Error("deliveries of one peer overlap")
	}
}

// bellSource is a source with a message now and then.
type bellSource struct {
	any     atomic.Bool
	lane    engine.Lane[int]
	bell    chan struct{}
	deliver func(*engine.Turn)
}

func (s *bellSource) Take(time.Duration, bool) (int, *engine.Lane[int], engine.Found) {
	if s.any.Swap(false) {
		return 1, &s.lane, engine.Message
	}
	return 0, nil, engine.Nothing
}
func (s *bellSource) Arm(engine.Sleeper) bool { return s.any.Load() }
func (s *bellSource) Disarm()                 {}
func (s *bellSource) Sleep(_ engine.Sleeper, arm func() bool, _ time.Duration) {
	if !arm() {
		<-s.bell
	}
}
func (s *bellSource) Wake(engine.Sleeper) {
	select {
	case s.bell <- struct{}{}:
	default:
	}
}
func (s *bellSource) Deliver(_ int, turn *engine.Turn) { s.deliver(turn) }
func (s *bellSource) Discard(int)                      {}
