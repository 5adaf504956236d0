package cluster

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestLeaveOnce: a call that ends a node while it is leaving waits until it has left, and gets the result. Virtual
// time continues meanwhile, which it does not while a goroutine waits for a mutex.
func TestLeaveOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Node{lifetime: lifetime{left: make(chan struct{})}}
		want := errors.New("left with an error")
		begun := make(chan struct{})
		go n.lifetime.leaveOnce(func() error {
			close(begun)
			time.Sleep(time.Second)
			return want
		})
		<-begun
		start := time.Now()
		for range 2 {
			n.lifetime.leaveOnce(func() error {
				t.Error("left twice")
				return nil
			})
			if n.lifetime.finalErr != want {
				t.Errorf("the result is %v, want %v", n.lifetime.finalErr, want)
			}
			if d := time.Since(start); d != time.Second {
				t.Errorf("waited for %s, want 1s", d)
			}
		}
	})
}

// closing is a van that calls a function when it is closed.
type closing struct {
	van.Van // nil: an unexpected call panics
	during  func()
}

func (v closing) Close(context.Context) error {
	v.during()
	return nil
}

// TestLeaveWaitsForDeliveries: a node that leaves waits for the handlers that run outside of the transport: of requests that arrived
// before their customer was made or before their process was known, and of the node's own messages. It waits for lingerTime at most.
// A customer cannot be made meanwhile.
func TestLeaveWaitsForDeliveries(t *testing.T) {
	request := func(n *Node) *van.Message { return earlyRequest(n, 1, 8) }
	for name, deliver := range map[string]func(n *Node, add func()){
		"before its customer": func(n *Node, add func()) {
			known(n, 9, 2)
			n.receive(request(n))
			add()
		},
		"before its process": func(n *Node, add func()) {
			add()
			n.receive(request(n))
			known(n, 9, 2)
		},
		"to itself": func(n *Node, add func()) {
			add()
			msg := request(n)
			msg.Receiver = n.ID()
			if err := n.App().Send(msg); err != nil {
				t.Error(err)
			}
		},
	} {
		for _, runs := range []time.Duration{time.Second, 2 * lingerTime} {
			t.Run(name+", "+runs.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					cfg := env.Default()
					cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 1, 1, 1
					n := keptNode(cfg, slog.New(slog.DiscardHandler))
					n.transport.van = closing{during: func() {
						if _, err := n.App().AddCustomer(8, 8, nil); !errors.Is(err, van.ErrClosed) {
							t.Errorf("a customer that is made while the node leaves: %v, want %v", err, van.ErrClosed)
						}
					}}
					entered, returned := make(chan struct{}), make(chan struct{})
					deliver(n, func() {
						if _, err := n.App().AddCustomer(7, 7, func(*van.Message) {
							close(entered)
							<-n.App().Ended()
							<-time.After(runs) // its work; the clock is that of synctest
							close(returned)
						}); err != nil {
							t.Error(err)
						}
					})
					<-entered
					start := time.Now()
					if err := n.close(lingerTime); err != nil {
						t.Error(err)
					}
					d, early := time.Since(start), false
					select {
					case <-returned:
					default:
						early = true
					}
					if d != min(runs, lingerTime) || early != (runs > lingerTime) {
						t.Errorf("Close has returned after %s, before the handler: %t; the handler runs for %s, the limit is %s", d, early, runs, lingerTime)
					}
					<-returned
				})
			})
		}
	}
}
