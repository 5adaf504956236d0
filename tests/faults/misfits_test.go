package faults

import (
	"fmt"
	"log/slog"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// TestMisfits: nodes that cannot be part of a working cluster are refused with the reason, and
// the cluster does not notice.
func TestMisfits(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Workers: 2})
	serveAll(t, c)
	w0, w1 := nodetest.Worker(t, c.Workers[0]), nodetest.Worker(t, c.Workers[1])
	work(t, 1, w0, w1)
	for _, x := range []struct {
		name     string
		role     string
		rank     int
		set      func(*postoffice.Config)
		sentinel error
		texts    []string
	}{
		{"one more worker", "worker", 0, nil, postoffice.ErrRefused, []string{"worker at 127.0.0.1:", "all 2 places for a worker are taken", "DMLC_NUM_WORKER=2", "none of its nodes is dead"}},
		{"one more server", "server", 0, nil, postoffice.ErrRefused, []string{"server at 127.0.0.1:", "all 1 places for a server are taken", "DMLC_NUM_SERVER=1"}},
		{"more workers", "worker", 1, func(c *postoffice.Config) { c.NumWorkers = 5 }, postoffice.ErrRefused, []string{"worker at 127.0.0.1:", "its DMLC_NUM_WORKER x DMLC_GROUP_SIZE is 5, that of the scheduler at 127.0.0.1:", "is 2"}},
		{"more servers", "server", 0, func(c *postoffice.Config) { c.NumServers = 3 }, postoffice.ErrRefused, []string{"server at 127.0.0.1:", "its DMLC_NUM_SERVER x DMLC_GROUP_SIZE is 3, that of the scheduler at 127.0.0.1:", "is 1"}},
		{"another PS_RESEND", "worker", 1, func(c *postoffice.Config) { c.Resend = true }, postoffice.ErrRefused, []string{"worker at 127.0.0.1:", "its PS_RESEND is 1, that of the scheduler at 127.0.0.1:"}},
		{"a second scheduler", "scheduler", 0, nil, syscall.EADDRINUSE, []string{"scheduler", fmt.Sprint(c.Port), "another process listens there", "DMLC_PS_ROOT_PORT"}},
		{"a server that is no scheduler", "worker", 0, func(cfg *postoffice.Config) {
			cfg.RootPort, cfg.StartTimeout = portOf(t, c, c.Servers[0]), 300*time.Millisecond
		}, van.ErrTimeout, []string{"has not answered", "DMLC_PS_ROOT_PORT"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			_, err := c.Join(nodetest.Within(t, 15*time.Second), x.role, x.rank, x.set)
			vantest.Fails(t, err, x.sentinel, x.texts...)
			work(t, 1, w0, w1)
		})
	}
	c.Finalize(t)
}

// portOf is the port at which n listens.
func portOf(t testing.TB, c *testcluster.Cluster, n *postoffice.Node) int {
	t.Helper()
	if n == c.Scheduler {
		return c.Port
	}
	var port int
	if _, err := fmt.Sscanf((*cluster.Node)(c.Scheduler).App().PeerName(int(n.ID())), van.NodeName(int(n.ID()))+" at 127.0.0.1:%d", &port); err != nil {
		t.Fatalf("%s: %v", (*cluster.Node)(c.Scheduler).App().PeerName(int(n.ID())), err)
	}
	return port
}

// TestPortInUse: a worker or server whose DMLC_PORT is taken says so and takes
// another.
func TestPortInUse(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	l := &nodetest.Text{}
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Log: l.Logger(slog.LevelDebug), Set: func(c *postoffice.Config) { c.Port = port }})
	serveAll(t, c)
	for _, n := range []*postoffice.Node{c.Servers[0], c.Workers[0]} {
		took := portOf(t, c, n)
		if took == port {
			t.Errorf("%s says that it has port %d, which is taken", n.Name(), port)
		}
		l.Wait(t, "level=WARN", "DMLC_PORT is in use: another port is used", fmt.Sprintf("configured=%d used=%d", port, took))
	}
	work(t, 1, nodetest.Worker(t, c.Workers[0]))
	c.Finalize(t)
}

// TestMisfitsAtStart: a node without a place, and a node that leaves before the others have
// registered, do not keep a cluster from starting. Another process gets the place of the latter.
func TestMisfitsAtStart(t *testing.T) {
	var without, impatient error
	second := make(chan *postoffice.Node, 1)
	l := &nodetest.Text{}
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Workers: 2, Log: l.Logger(slog.LevelDebug), Elsewhere: func(c *testcluster.Cluster, role string, rank int) bool {
		if role == "server" { // the scheduler runs, and no other node yet
			_, without = c.Join(nodetest.Within(t, 15*time.Second), "worker", 0, func(c *postoffice.Config) { c.NumWorkers, c.NodeRank = 3, 2 })
			_, impatient = c.Join(nodetest.Within(t, 15*time.Second), "worker", 1, func(c *postoffice.Config) { c.StartTimeout = 2 * time.Second })
			go func() {
				n, err := c.Join(nodetest.Within(t, 15*time.Second), "worker", 1, nil)
				if err != nil {
					t.Errorf("the one in its place: %v", err)
				}
				second <- n
			}()
			// The scheduler checks whether it is still there when the next process wants its rank.
			l.Wait(t, "(rank 1) disconnected before the cluster was complete", "no connection could be made")
		}
		return role == "worker" && rank == 1
	}})
	vantest.Fails(t, without, postoffice.ErrRefused, "worker at 127.0.0.1:", "its DMLC_NUM_WORKER x DMLC_GROUP_SIZE is 3, that of the scheduler at 127.0.0.1:", "is 2")
	vantest.Fails(t, impatient, van.ErrTimeout, "worker at 127.0.0.1:", "limit 2s")
	c.Workers[1] = <-second
	if t.Failed() {
		return
	}
	serveAll(t, c)
	work(t, 1, nodetest.Worker(t, c.Workers[0]), nodetest.Worker(t, c.Workers[1]))
	c.Finalize(t)
}

// TestVanishedAtStart: when a node is gone by the time that the last one comes,
// the others learn it instead of being kept waiting.
func TestVanishedAtStart(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Over: testcluster.TCP})
	join := func(role string) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := c.Join(nodetest.Within(t, 15*time.Second), role, 0, nil)
			done <- err
		}()
		return done
	}
	scheduler := join("scheduler")
	// Long enough for it to be known to the scheduler, which starts at the same moment.
	_, err := c.Join(nodetest.Within(t, 15*time.Second), "worker", 0, func(c *postoffice.Config) { c.StartTimeout = 3 * time.Second })
	vantest.Fails(t, err, van.ErrTimeout)
	server := join("server")
	vantest.Fails(t, <-scheduler, van.ErrPeerLost, "scheduler (id 1)", "worker 0 (id 9) at 127.0.0.1:", "no connection could be made")
	vantest.Fails(t, <-server, van.ErrPeerLost, "server 0 (id 8)") // of the worker or of the scheduler
}
