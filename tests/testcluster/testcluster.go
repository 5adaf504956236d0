// Package testcluster runs all nodes of a cluster in one process, for tests.
package testcluster

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Options say what cluster to start.
type Options struct {
	Workers, Servers int // groups; 0 means 1
	Group            int // instances of each; 0 means 1

	Over    Transport       // the transport; InProc unless set
	Network *inproc.Network // of the in-process van; nil makes one

	// Set, if not nil, may change the configuration of each node.
	Set func(*postoffice.Config)

	// Wrap, if not nil, is wrapped around the van of the node with that role and
	// instance rank.
	Wrap func(role string, rank int, f van.Factory) van.Factory

	// Backend, if not nil, is the device of the node with that role and instance rank,
	// or nil for the one that its configuration names.
	Backend func(role string, rank int) backend.Backend

	// Elsewhere, if not nil, is called for each node, and returns true for those
	// that it starts itself, in other processes.
	Elsewhere func(c *Cluster, role string, rank int) bool

	// Rand is the nodes' source of random numbers, nil for the system's. With Zero
	// timestamps begin at 0.
	Rand func() uint64

	// Log takes the logs of all nodes; nil discards them.
	Log *slog.Logger
}

// Zero is for Options.Rand.
func Zero() uint64 { return 0 }

// Cluster is the running nodes, by instance rank. Nodes that run elsewhere are
// nil.
type Cluster struct {
	Scheduler        *postoffice.Node
	Servers, Workers []*postoffice.Node
	Port             int // the scheduler's

	o    Options
	mu   sync.Mutex
	more []*postoffice.Node
}

// patience is how long all nodes together may take to start, or to leave. It ends hangs only: 129 nodes
// have taken more than 20 s on two processors that had ten times as much to do.
const patience = time.Minute

// Start starts a cluster and ends the test if it does not come up. The nodes are
// closed when the test ends.
func Start(t testing.TB, o Options) *Cluster {
	t.Helper()
	c := New(t, o)
	o = c.o
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	run := func(role string, rank int, n **postoffice.Node) {
		if o.Elsewhere != nil && o.Elsewhere(c, role, rank) {
			return
		}
		wg.Go(func() {
			var err error
			if *n, err = c.start(ctx, role, rank, nil); err != nil {
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
	if !t.Failed() {
		c.check(t)
	}
	if t.Failed() {
		t.FailNow()
	}
	return c
}

// New makes a cluster without nodes, for Join.
func New(t testing.TB, o Options) *Cluster {
	t.Helper()
	o.Workers, o.Servers, o.Group = max(o.Workers, 1), max(o.Servers, 1), max(o.Group, 1)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	o.Network = cmp.Or(o.Network, inproc.NewNetwork())
	c := &Cluster{Servers: make([]*postoffice.Node, o.Servers*o.Group), Workers: make([]*postoffice.Node, o.Workers*o.Group), Port: 9000, o: o}
	if o.Over.sockets() {
		c.Port = FreePort(t)
	}
	begun()
	t.Cleanup(func() { over(t) })
	t.Cleanup(c.close)
	return c
}

// Join starts one more node, as a replacement of a lost one is. set, which may be
// nil, may change its configuration. It is closed when the test ends.
func (c *Cluster) Join(ctx context.Context, role string, rank int, set func(*postoffice.Config)) (*postoffice.Node, error) {
	n, err := c.start(ctx, role, rank, set)
	if err == nil {
		c.mu.Lock()
		c.more = append(c.more, n)
		c.mu.Unlock()
	}
	return n, err
}

// Lost waits until n counts peer id among the dead. A node that is to take its place is
// refused as long as the scheduler does not.
func Lost[ID ~int](t testing.TB, n *postoffice.Node, id ID) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(30 * time.Second); !slices.Contains(Dead(n), postoffice.NodeID(id)); {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("%s does not notice that node %d is gone", n.Name(), id)
		}
	}
}

func (c *Cluster) start(ctx context.Context, role string, rank int, set func(*postoffice.Config)) (*postoffice.Node, error) {
	cfg := postoffice.DefaultConfig()
	cfg.Role, cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = role, c.o.Workers, c.o.Servers, c.o.Group
	cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", c.Port, "127.0.0.1"
	cfg.NodeRank, cfg.GPU = rank/c.o.Group, rank%c.o.Group
	c.o.Over.apply(cfg)
	if c.o.Set != nil {
		c.o.Set(cfg)
	}
	if set != nil {
		set(cfg)
	}
	po := postoffice.Options{Config: cfg, Log: c.o.Log, Rand: c.o.Rand}
	if !c.o.Over.sockets() {
		po.Van = c.o.Network.Factory()
	}
	if c.o.Wrap != nil {
		po.Van = c.o.Wrap(role, rank, c.wrapped(role))
	}
	if c.o.Backend != nil {
		po.Backend = c.o.Backend(role, rank)
	}
	return postoffice.Start(ctx, po)
}

// Environ is the environment for another process that runs a node of the cluster, which
// must be one over sockets.
func (c *Cluster) Environ(role string, rank int) []string {
	return append([]string{
		"DMLC_ROLE=" + role,
		fmt.Sprintf("DMLC_NUM_WORKER=%d", c.o.Workers), fmt.Sprintf("DMLC_NUM_SERVER=%d", c.o.Servers), fmt.Sprintf("DMLC_GROUP_SIZE=%d", c.o.Group),
		"DMLC_PS_ROOT_URI=127.0.0.1", fmt.Sprintf("DMLC_PS_ROOT_PORT=%d", c.Port), "DMLC_NODE_HOST=127.0.0.1",
		fmt.Sprintf("DMLC_NODE_RANK=%d", rank/c.o.Group), fmt.Sprintf("STEPMESH_GPU=%d", rank%c.o.Group),
	}, c.o.Over.environ()...)
}

// PerServer divides a flat list of pull tensors, as many for each server, into a list for each.
func PerServer[T any](flat []T, servers int) (lists [][]T) {
	for n := max(len(flat)/servers, 1); len(flat) > 0; flat = flat[min(n, len(flat)):] {
		lists = append(lists, flat[:min(n, len(flat))])
	}
	return lists
}

// FreePort is freeport.Find for a test.
func FreePort(t testing.TB) int {
	t.Helper()
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// Nodes are all nodes, the scheduler first.
func (c *Cluster) Nodes() []*postoffice.Node {
	return append(append([]*postoffice.Node{c.Scheduler}, c.Servers...), c.Workers...)
}

// Finalize makes all nodes leave together and reports those that fail.
func (c *Cluster) Finalize(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for _, n := range c.Nodes() {
		if n == nil {
			continue
		}
		wg.Go(func() {
			if err := n.Shutdown(ctx); err != nil {
				t.Errorf("finalize %s: %v", n.Name(), err)
			}
		})
	}
	wg.Wait()
}

// close closes the nodes that a test has left open. Closing a node that was finalized does
// nothing.
func (c *Cluster) close() {
	c.mu.Lock()
	nodes := append(c.Nodes(), c.more...)
	c.mu.Unlock()
	var wg sync.WaitGroup
	for _, n := range nodes {
		if n != nil {
			wg.Go(func() { _ = n.Close() })
		}
	}
	wg.Wait()
}
