package tests

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// nodes is a cluster whose nodes live in this process.
type nodes struct {
	*testcluster.Cluster // nil before start
	t                    testing.TB
	o                    testcluster.Options
	set                  func(*postoffice.Config) // may be nil
	log                  *nodetest.Text
}

// newNodes makes a cluster over the loopback.
func newNodes(t testing.TB, workers, servers, group int) *nodes {
	c := &nodes{t: t, log: &nodetest.Text{}}
	c.o = testcluster.Options{Workers: workers, Servers: servers, Group: group, Over: testcluster.TCP, Log: c.log.Logger(slog.LevelInfo), Set: func(cfg *postoffice.Config) {
		cfg.Backend, cfg.StartTimeout, cfg.StopTimeout = "CPU", 20*time.Second, 20*time.Second
		if c.set != nil {
			c.set(cfg)
		}
	}}
	return c
}

// inProcess starts one over the in-process van, with servers that echo.
func inProcess(t testing.TB, workers, servers, group int) *nodes {
	t.Helper()
	c := newNodes(t, workers, servers, group)
	c.o.Over = testcluster.InProc
	c.start()
	c.serveAll(c.echo)
	return c
}

// start starts all nodes. They are closed at the end of the test.
func (c *nodes) start() *nodes {
	c.t.Helper()
	c.t.Cleanup(func() {
		if c.t.Failed() {
			c.t.Logf("log:\n%s", c.log)
		}
	})
	c.Cluster = testcluster.Start(c.t, c.o)
	return c
}

// serveAll makes every server one that h answers for.
func (c *nodes) serveAll(h af.Handler) {
	c.t.Helper()
	for _, n := range c.Servers {
		nodetest.Server(c.t, n, h)
	}
}

// tensorWorker makes worker i a tensor worker.
func (c *nodes) tensorWorker(i int) *af.Worker {
	c.t.Helper()
	return nodetest.Worker(c.t, c.Workers[i])
}

// echo is a handler that answers each pull with the first push.
func (c *nodes) echo(b af.Batch) { nodetest.Echoes(c.t)(b) }

// roundTrip pushes x to all servers, whose handler is echo, and compares.
func (c *nodes) roundTrip(w *af.Worker, x []byte) error {
	h, pulls, err := c.request(w, x)
	if err != nil {
		return err
	}
	if err := h.Wait(c.t.Context()); err != nil {
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
func (c *nodes) request(w *af.Worker, x []byte) (call af.Call, pulls [][]byte, err error) {
	pull := make([]af.KeyTensor, c.o.Servers)
	pulls = make([][]byte, c.o.Servers)
	for s := range pull {
		pulls[s] = make([]byte, len(x))
		pull[s] = af.KeyTensor{Key: 2, Val: tensor(c.t, pulls[s])}
	}
	call, err = w.PushPull([]af.KeyTensor{{Key: 1, Val: tensor(c.t, x)}}, testcluster.PerServer(pull, len(pull)))
	return call, pulls, err
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
