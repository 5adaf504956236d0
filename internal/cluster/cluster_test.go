package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// vans runs test over every transport that needs no device.
func vans(t *testing.T, test func(t *testing.T, o testcluster.Options)) {
	testcluster.Over(t, test, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// within is a context that ends when the test must have failed.
func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// TestJoint starts both roles in one process.
func TestJoint(t *testing.T) {
	for _, port := range []int{0, testcluster.FreePort(t)} {
		t.Run(fmt.Sprintf("port %d", port), func(t *testing.T) {
			root := testcluster.FreePort(t)
			s := begin(t, nil, config(func(c *postoffice.Config) { c.Role, c.RootPort = "scheduler", root }))
			server, worker, err := postoffice.StartJoint(t.Context(), postoffice.Options{Log: drop,
				Config: config(func(c *postoffice.Config) { c.Role, c.RootPort, c.Port = "joint", root, port })})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = server.Close() })
			t.Cleanup(func() { _ = worker.Close() })
			r := <-s
			if r.err != nil {
				t.Fatal(r.err)
			}
			if server.Role() != van.Server || int(server.ID()) != van.ServerID(0) || worker.Role() != van.Worker || int(worker.ID()) != van.WorkerID(0) {
				t.Errorf("got %s and %s, want server 0 and worker 0", server.Name(), worker.Name())
			}
			if port != 0 {
				for i, n := range []*postoffice.Node{server, worker} {
					if want := fmt.Sprintf("%s at 127.0.0.1:%d", n.Name(), port+i); core(r.n).App().PeerName(int(n.ID())) != want {
						t.Errorf("%q, want %q", core(r.n).App().PeerName(int(n.ID())), want)
					}
				}
			}
			all := []*postoffice.Node{r.n, server, worker}
			together(t, all, func(n *postoffice.Node) error {
				return n.InstanceBarrier(within(t, 20*time.Second), 0, van.AllNodes)
			})
			together(t, all, func(n *postoffice.Node) error { return n.Shutdown(within(t, 20*time.Second)) })
		})
	}
}

// TestJointFails: an error of one of the two nodes ends both.
func TestJointFails(t *testing.T) {
	_, _, err := postoffice.StartJoint(t.Context(), postoffice.Options{})
	vantest.Fails(t, err, van.ErrInvalid, "no Config")
	port := testcluster.FreePort(t)
	_, _, err = postoffice.StartJoint(t.Context(), postoffice.Options{Log: drop,
		Config: config(func(c *postoffice.Config) { c.RootPort, c.StartTimeout = port, 200*time.Millisecond })})
	vantest.Fails(t, err, van.ErrTimeout, "worker at 127.0.0.1:", "server at 127.0.0.1:", fmt.Sprintf("the scheduler at 127.0.0.1:%d has not answered", port))
	_, _, err = postoffice.StartJoint(t.Context(), postoffice.Options{Log: drop,
		Config: config(func(c *postoffice.Config) { c.NumServers, c.NodeRank, c.RootPort = 2, 1, port })})
	vantest.Fails(t, err, van.ErrInvalid, "DMLC_NUM_WORKER 1") // the server would wait for a worker that cannot exist
}

// together calls f for all nodes at once.
func together(t testing.TB, nodes []*postoffice.Node, f func(n *postoffice.Node) error) {
	t.Helper()
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(func() {
			if err := f(n); err != nil {
				t.Errorf("%s: %v", n.Name(), err)
			}
		})
	}
	wg.Wait()
}

// members are the nodes of a group.
func members(c *testcluster.Cluster, group int) []*postoffice.Node {
	return slices.DeleteFunc(c.Nodes(), func(n *postoffice.Node) bool {
		return !slices.Contains(core(c.Scheduler).App().Members(group), int(n.ID()))
	})
}

// TestBarriers: over every group, a barrier of instances is released when all have called it; a barrier of groups
// counts a request for each group.
func TestBarriers(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Workers, o.Servers, o.Group = 2, 1, 2
		c := testcluster.Start(t, o)
		for group := 1; group <= van.AllNodes; group++ {
			nodes := members(c, group)
			var came atomic.Int32
			together(t, nodes, func(n *postoffice.Node) error {
				came.Add(1)
				err := n.InstanceBarrier(within(t, 20*time.Second), 0, postoffice.Group(group))
				if got := int(came.Load()); got != len(nodes) {
					t.Errorf("group %d: %s went on when %d of %d had come", group, n.Name(), got, len(nodes))
				}
				return err
			})
			first := slices.DeleteFunc(slices.Clone(nodes), func(n *postoffice.Node) bool { return n.Topology().Instance != 0 })
			together(t, first, func(n *postoffice.Node) error {
				return n.Barrier(within(t, 20*time.Second), 0, postoffice.Group(group))
			})
		}
		c.Finalize(t)
	})
}

// TestBarrierLimit: a barrier ends at its limit also on a node without other events until then, as without
// heartbeats.
func TestBarrierLimit(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Set: func(c *postoffice.Config) {
		c.HeartbeatInterval, c.HeartbeatTimeout, c.BarrierTimeout = 0, 0, 50*time.Millisecond
	}})
	var took time.Duration
	for range 3 { // a pause of this machine affects one of them
		begun := time.Now()
		vantest.Fails(t, c.Workers[0].InstanceBarrier(within(t, 20*time.Second), 0, van.WorkerGroup), van.ErrTimeout, "worker 0 (id 9)", "limit 50ms")
		if took = time.Since(begun); took < 2*time.Second {
			return
		}
	}
	t.Errorf("it took %s, and more than 2 s before, as until the scheduler's next news", took)
}

// TestLateExit: a function that is registered while the node leaves runs, too. A function that is removed meanwhile does not
// run.
func TestLateExit(t *testing.T) {
	n := core(testcluster.Start(t, testcluster.Options{}).Workers[0])
	var ran []string
	note := func(what string) func() { return func() { ran = append(ran, what) } }
	n.App().OnExit(note("first"))
	remove := n.App().OnExit(note("removed"))
	n.App().OnExit(func() {
		remove()
		n.App().OnExit(note("late"))
	})
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if want := []string{"late", "first"}; !slices.Equal(ran, want) {
		t.Errorf("%v ran, want %v", ran, want)
	}
}

// TestBarrierEndsInTime: a barrier that is over when its context ends, or its node is closed, has not failed: it is over for
// others, too.
func TestBarrierEndsInTime(t *testing.T) {
	w := testcluster.Start(t, testcluster.Options{}).Workers[0]
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 50 {
		if err := core(w).InstanceBarrier(ctx, 0, int(w.ID())); err != nil { // over at once
			t.Fatal(err)
		}
	}
	// Another goroutine performs the outputs of the machine, and has not reached that of the barrier.
	var once sync.Once
	busy, free := make(chan struct{}), make(chan struct{})
	core(w).OnPeer(func(int, bool, error) {
		once.Do(func() {
			close(busy)
			<-free
		})
	})
	go core(w).PeerChanged(van.ServerID(0), false, errors.New("connection reset"))
	<-busy
	err := core(w).InstanceBarrier(ctx, 0, int(w.ID()))
	close(free)
	if err != nil {
		t.Errorf("while another goroutine performs outputs: %v", err)
	}
}

// TestBarrierErrors: a barrier that cannot complete is an error, and the next one works.
func TestBarrierErrors(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Set: func(c *postoffice.Config) { c.ReplaceTimeout = time.Second }})
	w := c.Workers[0]
	vantest.Fails(t, w.Barrier(t.Context(), 0, van.ServerGroup), van.ErrInvalid, "worker 0 (id 9)", "this node is not in it")
	vantest.Fails(t, w.Barrier(t.Context(), 0, 8), van.ErrInvalid, "worker 0 (id 9)", "not in it")
	vantest.Fails(t, w.InstanceBarrier(t.Context(), 0, 0), van.ErrInvalid, "group 0: want 1 to 7")
	vantest.Fails(t, w.InstanceBarrier(t.Context(), -1, van.WorkerGroup), van.ErrInvalid, "customer -1: want 0 or more")

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	vantest.Fails(t, w.InstanceBarrier(ctx, 0, van.WorkerGroup), van.ErrTimeout, "worker 0 (id 9): instance barrier", "the scheduler's log names the missing nodes")
	// Its request no longer counts: the other node waits until both have called the barrier.
	came := make(chan error, 1)
	go func() { came <- c.Workers[1].InstanceBarrier(within(t, 20*time.Second), 0, van.WorkerGroup) }()
	if err := w.InstanceBarrier(within(t, 20*time.Second), 0, van.WorkerGroup); err != nil {
		t.Error(err)
	}
	if err := <-came; err != nil {
		t.Error(err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	vantest.Fails(t, w.InstanceBarrier(ctx, 0, van.ServerGroup|van.WorkerGroup), context.Canceled)
	together(t, c.Workers, func(n *postoffice.Node) error {
		return n.InstanceBarrier(within(t, 20*time.Second), 0, van.WorkerGroup)
	})

	// A member that is lost ends the barrier of the others.
	waiting := make(chan error)
	go func() { waiting <- w.InstanceBarrier(within(t, 20*time.Second), 0, van.WorkerGroup) }()
	c.Workers[1].Close()
	vantest.Fails(t, <-waiting, van.ErrPeerLost, "worker 0 (id 9)", "worker 1 (id 11) at 127.0.0.1:")
	vantest.Fails(t, c.Workers[1].Barrier(t.Context(), 0, van.WorkerGroup), van.ErrClosed)
	// Barriers that do not need it work.
	if err := c.Servers[0].InstanceBarrier(within(t, 20*time.Second), 0, van.ServerGroup); err != nil {
		t.Error(err)
	}
	// Finalize does, and names it.
	var wg sync.WaitGroup
	for _, n := range []*postoffice.Node{w, c.Servers[0], c.Scheduler} {
		wg.Go(func() {
			if err := n.Shutdown(within(t, 20*time.Second)); !errors.Is(err, van.ErrPeerLost) || !strings.Contains(err.Error(), n.Name()) ||
				!strings.Contains(err.Error(), "worker 1 (id 11)") {
				t.Errorf("%s: %v", n.Name(), err)
			}
		})
	}
	wg.Wait()
}

// TestFinalizeDeadline: a missing node is an error at the deadline.
func TestFinalizeDeadline(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Set = func(c *postoffice.Config) { c.StopTimeout = 3 * time.Second }
		c := testcluster.Start(t, o)
		err := c.Workers[0].Shutdown(t.Context())
		vantest.Fails(t, err, van.ErrTimeout, "worker 0 (id 9)", "limit 3s", "not from server 0 (id 8)", "scheduler (id 1)")
		if again := c.Workers[0].Shutdown(t.Context()); again != err {
			t.Errorf("a second call returned %v, want the same", again)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := c.Servers[0].Shutdown(ctx); err == nil {
			t.Error("the server finalized without the worker")
		}
	})
}

// TestClosedInFinalize: a node that is closed while it waits in Finalize does not keep the scheduler, which stays for
// the nodes that wait for their releases.
func TestClosedInFinalize(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		closed := make(chan error, 1)
		go func() { closed <- c.Workers[0].Shutdown(t.Context()) }()
		vantest.Eventually(t, 10*time.Second, "the request of worker 0 is counted", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			err := c.Scheduler.InstanceBarrier(ctx, 0, van.AllNodes)
			return err != nil && strings.Contains(err.Error(), "2 of 4 requests")
		})
		c.Workers[0].Close()
		vantest.Fails(t, <-closed, van.ErrClosed)
		left := make(chan error, 3)
		start := time.Now()
		for _, n := range []*postoffice.Node{c.Scheduler, c.Servers[0], c.Workers[1]} {
			go func() { left <- n.Shutdown(t.Context()) }()
		}
		for range 3 {
			if err := <-left; err != nil {
				t.Error(err)
			}
		}
		if d := time.Since(start); d > 8*time.Second {
			t.Errorf("the others left after %s: the scheduler has stayed for who was closed", d)
		}
	})
}

// TestOnExit: exit functions run once, in reverse order, when the node has left.
func TestOnExit(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	for _, name := range []string{"finalize", "close"} {
		n := c.Workers[0]
		if name == "close" {
			n = c.Servers[0]
		}
		var order []int
		for i := range 3 {
			core(n).App().OnExit(func() {
				order = append(order, i)
				if err := n.Barrier(t.Context(), 0, van.AllNodes); !errors.Is(err, van.ErrClosed) {
					t.Errorf("%s: barrier in an exit function: %v, want %v", name, err, van.ErrClosed)
				}
			})
		}
		if name == "close" {
			n.Close()
		} else {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := n.Shutdown(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("finalize: %v", err)
			}
		}
		n.Close()
		if !slices.Equal(order, []int{2, 1, 0}) {
			t.Errorf("%s: exit functions ran in order %v, want 2 1 0", name, order)
		}
	}
}

// peerEvent is a call of a function given to OnPeer.
type peerEvent struct {
	id    int
	up    bool
	cause error
}

// events collects the events of peer id at n.
func events(n *postoffice.Node, id int) (<-chan peerEvent, func()) {
	ch := make(chan peerEvent, 64)
	return ch, n.OnPeer(func(i postoffice.NodeID, up bool, cause error) {
		if int(i) == id {
			ch <- peerEvent{id, up, cause}
		}
	})
}

// TestReplacement: the loss of a node is announced, its requests fail, and its replacement process gets its id. Then
// all calls work as before, twice. Log lines report both.
func TestReplacement(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		var logged vantest.Log
		o.Workers, o.Servers, o.Log = 2, 2, logged.Logger()
		c := testcluster.Start(t, o)
		for round := range 2 {
			for _, role := range []string{"server", "worker"} {
				lost, watcher := &c.Servers[1], c.Workers[0]
				if role == "worker" {
					lost, watcher = &c.Workers[1], c.Servers[0]
				}
				id := int((*lost).ID())
				got, stop := events(watcher, id)
				(*lost).Close()
				e := <-got
				if e.id != id || e.up {
					t.Fatalf("round %d: %s heard %+v, want the loss of %s", round, watcher.Name(), e, van.NodeName(id))
				}
				vantest.Fails(t, e.cause, van.ErrPeerLost)
				testcluster.Lost(t, c.Scheduler, id) // it notices without a notice
				if dead := testcluster.Dead(watcher); !slices.Contains(dead, postoffice.NodeID(id)) {
					t.Errorf("dead nodes are %v, want %d among them", dead, id)
				}
				n, err := c.Join(within(t, 20*time.Second), role, 1, nil)
				if err != nil {
					t.Fatal(err)
				}
				*lost = n
				if int(n.ID()) != id || !n.IsRecovery() {
					t.Errorf("the replacement is %s (recovery %t), want %s", n.Name(), n.IsRecovery(), van.NodeName(id))
				}
				if e := <-got; e.id != id || !e.up || e.cause != nil {
					t.Errorf("%s heard %+v, want the return of %s", watcher.Name(), e, van.NodeName(id))
				}
				stop()
				if dead := testcluster.Dead(watcher); slices.Contains(dead, postoffice.NodeID(id)) {
					t.Errorf("dead nodes are %v, though %d is back", dead, id)
				}
			}
		}
		for _, line := range []string{"peer lost", "peer replaced"} {
			if !strings.Contains(logged.String(), line) {
				t.Errorf("the log does not say %q", line)
			}
		}
		for _, n := range []*postoffice.Node{c.Servers[0], c.Workers[0], c.Scheduler} {
			if n.IsRecovery() {
				t.Errorf("%s replaced nobody", n.Name())
			}
		}
		together(t, c.Nodes(), func(n *postoffice.Node) error { return n.InstanceBarrier(within(t, 20*time.Second), 0, van.AllNodes) })
		for _, n := range c.Nodes() { // a node may apply the table of nodes after the release of the barrier
			vantest.Eventually(t, 10*time.Second, n.Name()+" to know no dead node", func() bool { return len(testcluster.Dead(n)) == 0 })
		}
		c.Finalize(t)
	})
}

// TestServerKeyRanges: for any number of servers, their ranges cover all keys without a gap, and the largest key is
// the last server's.
func TestServerKeyRanges(t *testing.T) {
	for servers := 1; servers <= 8; servers++ {
		c := testcluster.Start(t, testcluster.Options{Servers: servers})
		rs := c.Workers[0].Topology().ServerKeyRanges()
		if len(rs) != servers {
			t.Fatalf("%d ranges for %d servers", len(rs), servers)
		}
		const all = 1<<64 - 1
		next := uint64(0)
		for i, r := range rs {
			if want := all / uint64(servers) * uint64(i); r.Begin != next || r.Begin != want || r.End <= r.Begin {
				t.Errorf("%d servers: range %d is %#x to %#x, want it to begin at %#x", servers, i, r.Begin, r.End, want)
			}
			next = r.End
		}
		if next != all {
			t.Errorf("%d servers: the last range ends at %#x, want %#x", servers, next, uint64(all))
		}
		c.Finalize(t)
	}
}

// core is n as the packages of this library use it.
func core(n *postoffice.Node) *cluster.Node { return (*cluster.Node)(n) }
