// Package testcluster runs all nodes of a cluster in one process, for tests.
package testcluster

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/inproc"
)

// Options say what cluster to start.
type Options struct {
	Workers, Servers int // groups; 0 means 1
	Group            int // instances of each; 0 means 1

	ZMQ bool // ZeroMQ over loopback instead of the in-process van

	// Set, if not nil, may change the configuration of each node.
	Set func(*postoffice.Config)

	// Wrap, if not nil, is wrapped around the van of the node with that role and
	// instance rank.
	Wrap func(role string, rank int, f van.Factory) van.Factory

	// Log takes the logs of all nodes; nil discards them.
	Log *slog.Logger
}

// Cluster is the running nodes, by instance rank.
type Cluster struct {
	Scheduler        *postoffice.Node
	Servers, Workers []*postoffice.Node
}

// Start starts a cluster and ends the test if it does not come up. The nodes are
// closed when the test ends.
func Start(t testing.TB, o Options) *Cluster {
	t.Helper()
	o.Workers, o.Servers, o.Group = max(o.Workers, 1), max(o.Servers, 1), max(o.Group, 1)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	port, network := 9000, inproc.NewNetwork()
	if o.ZMQ {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port = l.Addr().(*net.TCPAddr).Port
		l.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c := &Cluster{Servers: make([]*postoffice.Node, o.Servers*o.Group), Workers: make([]*postoffice.Node, o.Workers*o.Group)}
	t.Cleanup(c.close)
	var wg sync.WaitGroup
	run := func(role string, rank int, n **postoffice.Node) {
		wg.Go(func() {
			cfg := postoffice.DefaultConfig()
			cfg.Role, cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = role, o.Workers, o.Servers, o.Group
			cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", port, "127.0.0.1"
			cfg.NodeRank, cfg.GPU = rank/o.Group, rank%o.Group
			if o.Set != nil {
				o.Set(cfg)
			}
			po := postoffice.Options{Config: cfg, Log: o.Log}
			if !o.ZMQ {
				po.Van = network.Factory()
			}
			if o.Wrap != nil {
				if po.Van == nil {
					po.Van = van.New
				}
				po.Van = o.Wrap(role, rank, po.Van)
			}
			var err error
			if *n, err = postoffice.Start(ctx, po); err != nil {
				t.Errorf("start %s %d: %v", role, rank, err)
			}
		})
	}
	run("scheduler", 0, &c.Scheduler)
	for i := range c.Servers {
		run("server", i, &c.Servers[i])
	}
	for i := range c.Workers {
		run("worker", i, &c.Workers[i])
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return c
}

// Nodes are all nodes, the scheduler first.
func (c *Cluster) Nodes() []*postoffice.Node {
	return append(append([]*postoffice.Node{c.Scheduler}, c.Servers...), c.Workers...)
}

// Finalize makes all nodes leave together and reports those that fail.
func (c *Cluster) Finalize(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for _, n := range c.Nodes() {
		wg.Go(func() {
			if err := n.Finalize(ctx); err != nil {
				t.Errorf("finalize %s: %v", n.Name(), err)
			}
		})
	}
	wg.Wait()
}

// close ends what a test has left behind. Closing a node that was finalized does
// nothing.
func (c *Cluster) close() {
	var wg sync.WaitGroup
	for _, n := range c.Nodes() {
		if n != nil {
			wg.Go(n.Close)
		}
	}
	wg.Wait()
}
