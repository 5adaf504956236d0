package faults

import (
	"fmt"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// TestPartition: a node whose messages no longer reach the scheduler is dead for all nodes,
// and alive as soon as a message arrives again.
func TestPartition(t *testing.T) {
	network := inproc.NewNetwork()
	c := testcluster.Start(t, testcluster.Options{Network: network, Workers: 2, Servers: 2, Set: func(c *postoffice.Config) {
		c.HeartbeatInterval, c.HeartbeatTimeout = 500*time.Millisecond, 2*time.Second
	}})
	serveAll(t, c)
	ws := []*af.Worker{nodetest.Worker(t, c.Workers[0]), nodetest.Worker(t, c.Workers[1])}
	work(t, 2, ws...)
	scheduler := fmt.Sprintf("127.0.0.1:%d", c.Port)
	server := fmt.Sprintf("127.0.0.1:%d", portOf(t, c, c.Servers[1]))
	events := make(chan error, 16)
	defer c.Workers[0].OnPeer(func(id postoffice.NodeID, up bool, cause error) {
		if id == 10 {
			events <- cause // nil when it is back
		}
	})()
	next := func() error {
		t.Helper()
		select {
		case err := <-events:
			return err
		case <-nodetest.Within(t, 20*time.Second).Done():
			t.Fatal("nothing happened")
			return nil
		}
	}
	network.Partition(scheduler, server)
	vantest.Fails(t, next(), van.ErrPeerLost, "no heartbeat for", "PS_HEARTBEAT_TIMEOUT=2s")
	vantest.Eventually(t, 20*time.Second, "worker 1 is told as well that the server is silent", func() bool { return len(testcluster.Dead(c.Workers[1])) > 0 })
	for _, w := range ws {
		h, _, err := request(w, 2, []byte("x"))
		if err == nil {
			err = cluster.Call(h).Customer().Wait(t.Context(), h.Timestamp(), soon)
		}
		vantest.Fails(t, err, van.ErrPeerLost, "push_pull with server 1 (id 10) at "+server, "no heartbeat")
	}
	nodetest.Together(t, c.Workers, func(n *postoffice.Node) error {
		return n.InstanceBarrier(nodetest.Within(t, 20*time.Second), 0, van.WorkerGroup)
	})
	// The one that is cut off notices that the scheduler is silent.
	vantest.Fails(t, c.Servers[1].InstanceBarrier(nodetest.Within(t, 20*time.Second), 0, van.ServerGroup), van.ErrPeerLost, "scheduler (id 1) at "+scheduler, "no heartbeat")

	network.Heal(scheduler, server)
	if err := next(); err != nil {
		t.Fatalf("lost again: %v", err)
	}
	vantest.Eventually(t, 20*time.Second, "all notice that the partition is over", func() bool {
		return len(testcluster.Dead(c.Servers[1]))+len(testcluster.Dead(c.Workers[1])) == 0
	})
	work(t, 2, ws...)
	nodetest.Together(t, c.Nodes(), func(n *postoffice.Node) error {
		return n.InstanceBarrier(nodetest.Within(t, 20*time.Second), 0, van.AllNodes)
	})
	c.Finalize(t)
}

// TestCutOffWorker: requests lost in a partition between a worker and a server end with a
// timeout that names the server. Later requests are answered.
func TestCutOffWorker(t *testing.T) {
	network := inproc.NewNetwork()
	c := testcluster.Start(t, testcluster.Options{Network: network, Workers: 2})
	serveAll(t, c)
	cut, other := nodetest.Worker(t, c.Workers[0]), nodetest.Worker(t, c.Workers[1])
	a, b := fmt.Sprintf("127.0.0.1:%d", portOf(t, c, c.Workers[0])), fmt.Sprintf("127.0.0.1:%d", portOf(t, c, c.Servers[0]))
	network.Partition(a, b)
	for range 3 {
		h, _, err := request(cut, 1, []byte("x"))
		if err == nil {
			err = cluster.Call(h).Customer().Wait(t.Context(), h.Timestamp(), 50*time.Millisecond)
		}
		vantest.Fails(t, err, van.ErrTimeout, "server 0 (id 8) at "+b, "2 of 2 answers missing")
		work(t, 1, other)
	}
	network.Heal(a, b)
	work(t, 1, cut, other)
	c.Finalize(t)
}
