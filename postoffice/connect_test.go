package postoffice_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/inproc"
)

// unconnectable is a van that cannot connect, as when a process has no more
// descriptors.
type unconnectable struct{ van.Van }

func (unconnectable) Connect(context.Context, int, van.Node) error {
	return &van.Error{Op: "connect", Err: syscall.EMFILE}
}

// TestCannotConnect: a node that cannot connect does not wait to start.
func TestCannotConnect(t *testing.T) {
	cfg := postoffice.DefaultConfig()
	cfg.Role, cfg.NumWorkers, cfg.NumServers = "worker", 1, 1
	cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", testcluster.FreePort(t), "127.0.0.1"
	f := inproc.NewNetwork().Factory()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	n, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Log: slog.New(slog.DiscardHandler), Van: func(o van.Options) (van.Van, error) {
		v, err := f(o)
		return unconnectable{v}, err
	}})
	if err == nil {
		n.Close()
	}
	if !errors.Is(err, syscall.EMFILE) || !strings.Contains(err.Error(), "too many open files") {
		t.Errorf("a node that cannot connect starts with %v, want %v", err, syscall.EMFILE)
	}
}

// TestCloseWhenAPeerIsLost: who is told of a loss may close the node, whoever
// noticed the loss.
func TestCloseWhenAPeerIsLost(t *testing.T) {
	for _, by := range []string{"connection", "heartbeats"} {
		for _, zmq := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s zmq %t", by, zmq), func(t *testing.T) {
				c := testcluster.Start(t, testcluster.Options{ZMQ: zmq, Set: func(c *postoffice.Config) {
					if by == "heartbeats" && c.Role != "worker" {
						c.HeartbeatTimeout = 300 * time.Millisecond // of beats that never come
					}
				}})
				done := make(chan struct{})
				n := c.Workers[0]
				if by == "heartbeats" {
					n = c.Scheduler
				}
				var once sync.Once
				n.OnPeer(func(_ int, up bool, _ error) {
					if !up {
						once.Do(func() {
							n.Close()
							close(done)
						})
					}
				})
				if by == "connection" {
					c.Servers[0].Close()
				}
				select {
				case <-done:
				case <-time.After(20 * time.Second):
					t.Fatal("Close does not return")
				}
			})
		}
	}
}
