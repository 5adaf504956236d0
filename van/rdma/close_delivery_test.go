package rdma

import (
	"bytes"
	"context"
	"errors"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

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
