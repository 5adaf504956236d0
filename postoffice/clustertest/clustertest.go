// Package clustertest runs a whole cluster inside one Go test: a scheduler and any numbers of workers and servers, which
// exchange messages in memory. No process is started and no port is opened. A node can be killed and replaced, as a crash and
// a restart would do it.
//
//	func TestMyServer(t *testing.T) {
//		c := clustertest.Start(t, clustertest.Options{Workers: 2, Servers: 1})
//		server, err := af.NewServer(c.Server(0), af.ServerOptions{})
//		worker, err := af.NewWorker(c.Worker(0), af.WorkerOptions{})
//		...
//		err = c.Kill(t.Context(), c.Server(0))
//		err = call.Wait(t.Context()) // it wraps postoffice.ErrPeerLost
//		n, err := c.Replace(t.Context(), c.Server(0)) // n, and c.Server(0), is another process
//	}
//
// The nodes leave when the test ends. Programs that need a cluster outside of a test use New.
package clustertest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/inproc"
)

// Options describe the cluster to start. The zero value is one worker and one server.
type Options struct {
	Workers, Servers int // 0 means 1

	// Node, if not nil, may change the options of each node before it starts, such as its Config or OnTrace.
	Node func(*postoffice.Options)

	// Log receives the logs of all nodes; nil discards them.
	Log *slog.Logger
}

// patience is how long all nodes together may take to start, or a loss to be noticed.
const patience = time.Minute

// port is the scheduler's in each network.
const port = 9000

// Cluster is the nodes of one cluster. All methods are safe for concurrent use.
type Cluster struct {
	o       Options
	network *inproc.Network

	mu               sync.Mutex // guards the fields below
	scheduler        *postoffice.Node
	servers, workers []*postoffice.Node
	killed           []*postoffice.Node
}

// TB is the part of testing.TB that Start and the methods of a Cluster need.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
	Cleanup(f func())
}

// Start starts a cluster and returns when all nodes have joined. It ends the test if they do not. The nodes are closed when
// the test ends.
func Start(t TB, o Options) *Cluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := New(ctx, o)
	if err != nil {
		t.Fatalf("start a cluster: %v", err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// New starts a cluster and returns when all nodes have joined. Close ends it.
func New(ctx context.Context, o Options) (*Cluster, error) {
	o.Workers, o.Servers = max(o.Workers, 1), max(o.Servers, 1)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	c := &Cluster{o: o, network: inproc.NewNetwork(), servers: make([]*postoffice.Node, o.Servers), workers: make([]*postoffice.Node, o.Workers)}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	var mu sync.Mutex
	var failed []error
	start := func(role string, rank int, n **postoffice.Node) {
		all.Go(func() {
			var err error
			if *n, err = c.start(ctx, role, rank); err != nil {
				mu.Lock()
				failed = append(failed, fmt.Errorf("%s %d: %w", role, rank, err))
				mu.Unlock()
				cancel(err) // the others wait for this node
			}
		})
	}
	start("scheduler", 0, &c.scheduler)
	for i := range c.servers {
		start("server", i, &c.servers[i])
	}
	for i := range c.workers {
		start("worker", i, &c.workers[i])
	}
	all.Wait()
	if err := errors.Join(failed...); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// start starts one node.
func (c *Cluster) start(ctx context.Context, role string, rank int) (*postoffice.Node, error) {
	cfg := postoffice.DefaultConfig()
	cfg.Role, cfg.NodeRank = role, rank
	cfg.NumWorkers, cfg.NumServers = c.o.Workers, c.o.Servers
	cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", port, "127.0.0.1"
	o := postoffice.Options{Config: cfg, Log: c.o.Log, Van: c.network.Factory()}
	if c.o.Node != nil {
		c.o.Node(&o)
	}
	return postoffice.Start(ctx, o)
}

// Scheduler returns the scheduler.
func (c *Cluster) Scheduler() *postoffice.Node { return c.scheduler }

// Server returns the server with the given rank: the latest process that has had the rank.
func (c *Cluster) Server(rank int) *postoffice.Node { return c.at(c.servers, rank) }

// Worker returns the worker with the given rank: the latest process that has had the rank.
func (c *Cluster) Worker(rank int) *postoffice.Node { return c.at(c.workers, rank) }

func (c *Cluster) at(nodes []*postoffice.Node, rank int) *postoffice.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return nodes[rank]
}

// Nodes returns all nodes that have not been killed: the scheduler, the servers by rank, the workers by rank.
func (c *Cluster) Nodes() []*postoffice.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := slices.Concat([]*postoffice.Node{c.scheduler}, c.servers, c.workers)
	return slices.DeleteFunc(all, func(n *postoffice.Node) bool { return n == nil || slices.Contains(c.killed, n) })
}

// Kill ends a server or a worker as a crash would: messages that wait for it are lost, and it sends nothing more. Calls of
// other nodes that it has not answered fail with postoffice.ErrPeerLost. Kill returns when the scheduler has noticed the
// loss, from when on the node can be replaced. It waits for a minute at most.
func (c *Cluster) Kill(ctx context.Context, n *postoffice.Node) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	self, _ := (*cluster.Node)(n).App().Addresses()
	c.network.Kill(fmt.Sprintf("127.0.0.1:%d", self[0]))
	c.mu.Lock()
	c.killed = append(c.killed, n)
	c.mu.Unlock()
	id := n.ID()
	n.Close()
	noticed := make(chan struct{}, 1)
	stop := c.scheduler.OnPeer(func(peer postoffice.NodeID, up bool, _ error) {
		if peer == id && !up {
			select {
			case noticed <- struct{}{}:
			default:
			}
		}
	})
	defer stop()
	for !slices.Contains((*cluster.Node)(c.scheduler).DeadNodes(0), int(id)) {
		select {
		case <-noticed:
		case <-ctx.Done():
			return fmt.Errorf("the scheduler has not noticed the loss of %s: %w", id, context.Cause(ctx))
		}
	}
	return nil
}

// Replace starts a replacement process of a killed one, with the same role, rank and id, and returns its node,
// which Server or Worker returns from then on. Make a new af.Server or af.Worker on it. Another node can learn of the
// replacement a moment later: its OnPeer reports when calls reach the replacement.
func (c *Cluster) Replace(ctx context.Context, killed *postoffice.Node) (*postoffice.Node, error) {
	role, nodes := "server", c.servers
	if killed.Role() == postoffice.Worker {
		role, nodes = "worker", c.workers
	}
	rank := killed.Rank()
	n, err := c.start(ctx, role, rank)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	nodes[rank] = n
	return n, nil
}

// Run runs program on all nodes that have not been killed, each on a goroutine of its own, and then has them leave the
// cluster together. It returns the errors of the programs and of Node.Shutdown.
func (c *Cluster) Run(ctx context.Context, program func(ctx context.Context, n *postoffice.Node) error) error {
	var all sync.WaitGroup
	nodes := c.Nodes()
	errs := make([]error, len(nodes))
	for i, n := range nodes {
		all.Go(func() {
			err := program(ctx, n)
			errs[i] = errors.Join(err, n.Shutdown(ctx))
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// Close closes all nodes at once and returns their errors. It may be called more than once.
func (c *Cluster) Close() error {
	var all sync.WaitGroup
	nodes := c.Nodes()
	errs := make([]error, len(nodes))
	for i, n := range nodes {
		all.Go(func() { errs[i] = n.Close() })
	}
	all.Wait()
	return errors.Join(errs...)
}
