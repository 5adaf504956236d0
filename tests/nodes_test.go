package tests

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/van/inproc"
)

// nodes is a cluster whose nodes live in this process.
type nodes struct {
	t                       testing.TB
	workers, servers, group int
	port                    int
	network                 *inproc.Network // nil: ZMQ over the loopback
	set                     func(*postoffice.Config)
	log                     *nodetest.Text

	scheduler *postoffice.Node
	server    []*postoffice.Node
	worker    []*postoffice.Node
}

func newNodes(t testing.TB, workers, servers, group int) *nodes {
	return &nodes{t: t, workers: workers, servers: servers, group: group, log: &nodetest.Text{}, port: freePort(t),
		server: make([]*postoffice.Node, servers*group), worker: make([]*postoffice.Node, workers*group)}
}

// config is the configuration of one node.
func (c *nodes) config(role string, rank int) *postoffice.Config {
	cfg := postoffice.DefaultConfig()
	cfg.Role, cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = role, c.workers, c.servers, c.group
	cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", c.port, "127.0.0.1"
	cfg.NodeRank, cfg.GPU, cfg.Backend = rank/c.group, rank%c.group, "CPU"
	cfg.StartTimeout, cfg.StopTimeout = 20*time.Second, 20*time.Second
	if c.set != nil {
		c.set(cfg)
	}
	return cfg
}

// startNode starts one node.
func (c *nodes) startNode(ctx context.Context, role string, rank int) (*postoffice.Node, error) {
	o := postoffice.Options{Config: c.config(role, rank), Log: c.log.Logger(slog.LevelInfo).With("node", fmt.Sprintf("%s %d", role, rank))}
	if c.network != nil {
		o.Van = c.network.Factory()
	}
	return postoffice.Start(ctx, o)
}

// start starts all nodes. They are closed at the end of the test.
func (c *nodes) start() *nodes {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 30*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	run := func(role string, rank int, n **postoffice.Node) {
		wg.Go(func() {
			var err error
			if *n, err = c.startNode(ctx, role, rank); err != nil {
				c.t.Errorf("%s %d: %v", role, rank, err)
			}
		})
	}
	run("scheduler", 0, &c.scheduler)
	for i := range c.server {
		run("server", i, &c.server[i])
	}
	for i := range c.worker {
		run("worker", i, &c.worker[i])
	}
	wg.Wait()
	c.t.Cleanup(func() {
		for _, n := range c.all() {
			if n != nil {
				n.Close()
			}
		}
		if c.t.Failed() {
			c.t.Logf("log:\n%s", c.log)
		}
	})
	if c.t.Failed() {
		c.t.FailNow()
	}
	return c
}

func (c *nodes) all() []*postoffice.Node {
	return append(append([]*postoffice.Node{c.scheduler}, c.server...), c.worker...)
}

// finalize leaves in good order.
func (c *nodes) finalize() {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for _, n := range c.all() {
		wg.Go(func() {
			if err := n.Finalize(ctx); err != nil {
				c.t.Errorf("finalize: %v", err)
			}
		})
	}
	wg.Wait()
}

// serve makes n a tensor server.
func (c *nodes) serve(n *postoffice.Node, h af.Handler) *af.TensorServer {
	c.t.Helper()
	s, err := af.NewTensorServer(n, af.Options{})
	if err == nil {
		err = s.SetRequestHandle(h)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

// serveAll makes every server one that h answers for.
func (c *nodes) serveAll(h af.Handler) {
	c.t.Helper()
	for _, n := range c.server {
		c.serve(n, h)
	}
}

// tensorWorker makes worker i a tensor worker.
func (c *nodes) tensorWorker(i int) *af.TensorWorker {
	c.t.Helper()
	w, err := af.NewTensorWorker(c.worker[i], af.Options{})
	if err != nil {
		c.t.Fatal(err)
	}
	return w
}

// echo is a handler that answers each pull with the first push.
func (c *nodes) echo(b af.Batch) {
	out := make([]af.KeyTensor, len(b.Pulls()))
	for i, p := range b.Pulls() {
		out[i] = af.KeyTensor{Key: p.Key, Val: b.Pushes()[0].Val}
	}
	if err := b.Response(out, nil); err != nil {
		c.t.Errorf("response: %v", err)
	}
}

// roundTrip pushes x to all servers, whose handler is echo, and compares.
func (c *nodes) roundTrip(w *af.TensorWorker, x []byte) error {
	h, pulls, err := c.request(w, x)
	if err != nil {
		return err
	}
	if err := w.Wait(c.t.Context(), h); err != nil {
		return err
	}
	for s := range pulls {
		if !bytes.Equal(pulls[s], x) {
			return fmt.Errorf("server %d returned other bytes", s)
		}
	}
	return nil
}

// request pushes x under key 1 and pulls as much from each server under key 2.
func (c *nodes) request(w *af.TensorWorker, x []byte) (handler int32, pulls [][]byte, err error) {
	pull := make([]af.KeyTensor, c.servers)
	pulls = make([][]byte, c.servers)
	for s := range pull {
		pulls[s] = make([]byte, len(x))
		pull[s] = af.KeyTensor{Key: 2, Val: tensor(c.t, pulls[s])}
	}
	handler, err = w.ZBatchPushPull([]af.KeyTensor{{Key: 1, Val: tensor(c.t, x)}}, pull)
	return handler, pulls, err
}

func tensor(t testing.TB, b []byte) af.Tensor {
	t.Helper()
	x, err := af.FromSlice(b)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// heap is the memory in use after a collection.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// dial connects to a node of this host.
func dial(t testing.TB, port int) net.Conn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}
