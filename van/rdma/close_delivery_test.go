package rdma

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// A delivery may close the van, in the loop or in a Poll, and whether the Poll has received the message from the device or from another of its sources.
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
	closeBy := func(turn *engine.Deliverer) {
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
	p.server.delivery.recv = func(m *van.Message) {
		connected.Store(true)
		overlap.Store(overlap.Load() || !elsewhere && inside.Load())
		if !elsewhere {
			closeBy(m.Deliverer)
		}
	}
	if elsewhere {
		f := engine.NewFeed(p.server.delivery.engine, other, engine.FeedOptions{Polls: true, Spins: true})
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
				p.server.delivery.engine.Poll(stop.Load)
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

// bellSource is a source with an occasional message.
type bellSource struct {
	any     atomic.Bool
	lane    engine.PeerQueue[int]
	bell    chan struct{}
	deliver func(*engine.Deliverer)
}

func (s *bellSource) Take(time.Duration, bool) (int, *engine.PeerQueue[int], engine.PollResult) {
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
func (s *bellSource) Deliver(_ int, turn *engine.Deliverer) { s.deliver(turn) }
func (s *bellSource) Discard(int)                           {}

// TestCloseBesideADoneThatBlocks: a Done function that does not return blocks a Poll, which keeps received messages. Close does not wait for it forever, and
// returns an error that says so.
func TestCloseBesideADoneThatBlocks(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	p.until("connection", func() bool { return len(*p.worker.tables.devices.Load()) > 0 })
	inside, leave := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var stop atomic.Bool
	polled := make(chan struct{})
	go func() {
		defer close(polled)
		for !stop.Load() {
			p.worker.delivery.engine.Poll(stop.Load)
		}
	}()
	sent := func() {
		if bytes.Contains(debug.Stack(), []byte("Engine).Poll(")) {
			once.Do(func() {
				close(inside)
				<-leave
			})
		}
	}
	for i := 0; ; i++ {
		m := tensor(serverID, i, 1, true, true, make([]byte, 64<<10))
		m.Done = doneFunc(sent)
		if err := p.worker.Send(m); err != nil {
			t.Fatal(err)
		}
		select {
		case <-inside:
		case m := <-p.atServer:
			m.Release()
			continue
		case <-time.After(testTime):
			t.Fatal("no message")
		}
		break
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	closed := make(chan error, 1)
	go func() { closed <- p.worker.Close(ctx) }()
	select {
	case err := <-closed:
		var e *van.Error
		if !errors.As(err, &e) || !errors.Is(err, van.ErrTimeout) || e.Node != van.NodeName(workerID) || !strings.Contains(e.Detail, "Done") {
			t.Errorf("Close: %v", err)
		}
	case <-time.After(testTime):
		t.Error("Close waits for a Done function that does not return")
	}
	stop.Store(true)
	close(leave)
	<-polled
	p.until("end of the devices", func() bool { // the network finds whatever is left then
		select {
		case <-p.worker.eventsEnded:
			return true
		default:
			return false
		}
	})
}

// TestCloseBesideAHandlerThatBlocks: connections end although a handler does not return, and Close then returns an error that says so. The devices, and the memory
// of received messages, stay until the handler has returned.
func TestCloseBesideAHandlerThatBlocks(t *testing.T) {
	for name, poll := range map[string]bool{"in the loop": false, "in a Poll": true} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, nil)
			inside, leave := make(chan struct{}), make(chan struct{})
			var once sync.Once
			var stop atomic.Bool
			p.server.delivery.recv = func(*van.Message) {
				if bytes.Contains(debug.Stack(), []byte("Engine).Poll(")) == poll {
					once.Do(func() {
						close(inside)
						<-leave
					})
				}
			}
			p.both()
			var all sync.WaitGroup
			if poll {
				all.Go(func() {
					for !stop.Load() {
						p.server.delivery.engine.Poll(stop.Load)
					}
				})
			}
			for i, in := 0, false; !in; i++ {
				if err := p.worker.Send(tensor(serverID, i, 1, true, true, make([]byte, 100))); err != nil {
					t.Fatal(err)
				}
				select {
				case <-inside:
					in = true
				case <-time.After(time.Millisecond): // the other goroutine has it
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			err := p.server.Close(ctx)
			var e *van.Error
			if !errors.As(err, &e) || !errors.Is(err, van.ErrTimeout) || e.Node != van.NodeName(serverID) || e.Limit == 0 || !strings.Contains(e.Detail, "handler") {
				t.Errorf("Close: %v", err)
			}
			select {
			case <-p.server.eventsEnded:
				t.Error("the devices are closed beside a handler")
			default:
			}
			stop.Store(true)
			close(leave)
			all.Wait()
			p.until("end of the devices", func() bool {
				select {
				case <-p.server.eventsEnded:
					return true
				default:
					return false
				}
			})
		})
	}
}
