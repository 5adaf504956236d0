package faults

import (
	"fmt"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/inproc"
)

// TestPartition: a node that the scheduler no longer hears is dead for everybody,
// and alive as soon as it is heard again.
func TestPartition(t *testing.T) {
	network := inproc.NewNetwork()
	c := testcluster.Start(t, testcluster.Options{Network: network, Workers: 2, Servers: 2, Set: func(c *postoffice.Config) {
		c.HeartbeatInterval, c.HeartbeatTimeout = time.Second, 2*time.Second
	}})
	serveAll(t, c)
	ws := []*af.TensorWorker{worker(t, c.Workers[0]), worker(t, c.Workers[1])}
	work(t, 2, ws...)
	scheduler := fmt.Sprintf("127.0.0.1:%d", c.Port)
	server := fmt.Sprintf("127.0.0.1:%d", portOf(t, c, c.Servers[1]))
	events := make(chan error, 16)
	defer c.Workers[0].OnPeer(func(id int, up bool, cause error) {
		if id == 10 {
			events <- cause // nil when it is back
		}
	})()
	next := func() error {
		t.Helper()
		select {
		case err := <-events:
			return err
		case <-within(t, 20*time.Second).Done():
			t.Fatal("nothing happened")
			return nil
		}
	}
	network.Partition(scheduler, server)
	fails(t, next(), van.ErrPeerLost, "no heartbeat for", "PS_HEARTBEAT_TIMEOUT=2s")
	for limit := within(t, 20*time.Second); len(c.Workers[1].DeadNodes(0)) == 0; { // it is told as well
		if limit.Err() != nil {
			t.Fatal("worker 1 did not learn that the server is silent")
		}
	}
	for _, w := range ws {
		h, _, err := request(w, 2, []byte("x"))
		if err == nil {
			err = w.WaitFor(t.Context(), h, soon)
		}
		fails(t, err, van.ErrPeerLost, "push_pull with server 1 (id 10) at "+server, "no heartbeat")
	}
	together(t, c.Workers, func(n *postoffice.Node) error {
		return n.InstanceBarrier(within(t, 20*time.Second), 0, van.WorkerGroup)
	})
	// The one that is cut off notices that the scheduler is silent.
	fails(t, c.Servers[1].InstanceBarrier(within(t, 20*time.Second), 0, van.ServerGroup), van.ErrPeerLost, "scheduler (id 1) at "+scheduler, "no heartbeat")

	network.Heal(scheduler, server)
	if err := next(); err != nil {
		t.Fatalf("lost again: %v", err)
	}
	for limit := within(t, 20*time.Second); len(c.Servers[1].DeadNodes(0))+len(c.Workers[1].DeadNodes(0)) > 0; {
		if limit.Err() != nil {
			t.Fatal("not all have noticed that the partition is over")
		}
	}
	work(t, 2, ws...)
	together(t, c.Nodes(), func(n *postoffice.Node) error { return n.InstanceBarrier(within(t, 20*time.Second), 0, van.AllNodes) })
	c.Finalize(t)
}

// TestCutOffWorker: what a partition between a worker and a server swallows is a
// timeout that names the server; what is sent afterwards is answered.
func TestCutOffWorker(t *testing.T) {
	network := inproc.NewNetwork()
	c := testcluster.Start(t, testcluster.Options{Network: network, Workers: 2})
	serveAll(t, c)
	cut, other := worker(t, c.Workers[0]), worker(t, c.Workers[1])
	a, b := fmt.Sprintf("127.0.0.1:%d", portOf(t, c, c.Workers[0])), fmt.Sprintf("127.0.0.1:%d", portOf(t, c, c.Servers[0]))
	network.Partition(a, b)
	for range 3 {
		h, _, err := request(cut, 1, []byte("x"))
		if err == nil {
			err = cut.WaitFor(t.Context(), h, 50*time.Millisecond)
		}
		fails(t, err, van.ErrTimeout, "server 0 (id 8) at "+b, "2 of 2 answers missing")
		work(t, 1, other)
	}
	network.Heal(a, b)
	work(t, 1, cut, other)
	c.Finalize(t)
}
