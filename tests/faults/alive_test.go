package faults

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// finalizes starts Finalize of nodes, as programs do that have nothing else to do, and
// returns a function that waits for all.
func finalizes(t *testing.T, nodes ...*postoffice.Node) (wait func()) {
	errs := make(chan error, len(nodes))
	for _, n := range nodes {
		go func() {
			if err := n.Shutdown(t.Context()); err != nil {
				errs <- fmt.Errorf("finalize %s: %w", n.Name(), err)
				return
			}
			errs <- nil
		}()
	}
	return func() {
		t.Helper()
		limit := time.After(60 * time.Second)
		for range nodes {
			select {
			case err := <-errs:
				if err != nil {
					t.Error(err)
				}
			case <-limit:
				t.Fatal("Finalize does not end")
			}
		}
	}
}

// TestWorkerKilledDuringFinalize: the scheduler and the server are in Finalize from the
// first second. One of two workers is killed: none of the other's next 1,000 rounds fails,
// a replacement joins, and all nodes leave in order.
func TestWorkerKilledDuringFinalize(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Workers: 2, Elsewhere: nodetest.Elsewhere(t, "worker", 1, works, &victim)})
		serveAll(t, c)
		w := nodetest.Worker(t, c.Workers[0])
		victim.Ready()
		others := finalizes(t, c.Scheduler, c.Servers[0])
		work(t, 1, w)
		victim.Kill()
		for i := range 1000 {
			if err := roundTrip(t.Context(), w, 1, fmt.Appendf(nil, "round %d", i)); err != nil {
				t.Fatalf("round %d after the death of the other worker: %v", i, err)
			}
		}
		testcluster.Lost(t, c.Scheduler, 11)
		next := nodetest.Spawn(t, c, "worker", 1, works)
		next.Ready()
		work(t, 1, w)
		last := finalizes(t, c.Workers[0])
		next.Leave()
		last()
		others()
	})
}

// TestSchedulerRestarted: the scheduler is killed and started again at its address. Data
// never stops; barriers work again within 5 s, and a node that dies can be replaced.
// Finalize, in which the server is from the first second, is not disturbed.
func TestSchedulerRestarted(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var scheduler, victim *nodetest.Process
		first, second := nodetest.Elsewhere(t, "scheduler", 0, rules, &scheduler), nodetest.Elsewhere(t, "worker", 1, works, &victim)
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Workers: 3, Elsewhere: func(c *testcluster.Cluster, role string, rank int) bool {
			return first(c, role, rank) || second(c, role, rank)
		}})
		serveAll(t, c)
		a, b := c.Workers[0], c.Workers[2]
		w := nodetest.Worker(t, a)
		scheduler.Ready()
		victim.Ready()
		server := finalizes(t, c.Servers[0])
		work(t, 1, w)
		open := make(chan error, 1)
		go func() { open <- a.InstanceBarrier(t.Context(), 0, van.WorkerGroup) }()
		scheduler.Kill()
		work(t, 1, w)
		began, m := time.Now(), real.WatchMachine(t.Context())
		scheduler = nodetest.Spawn(t, c, "scheduler", 0, rules)
		select {
		case err := <-open:
			if err == nil {
				t.Error("a barrier that two of three have not come to is over")
			}
		case <-time.After(20 * time.Second):
			t.Fatal("the barrier that was open hangs")
		}
		work(t, 1, w)
		if err := a.Barrier(nodetest.Within(t, 20*time.Second), 0, postoffice.Group(a.ID())); err != nil { // alone
			t.Error(err)
		}
		scheduler.Ready()
		if d := time.Since(began); d > 5*time.Second+slack+m.Late(began) {
			t.Errorf("the scheduler needed %s to know its cluster again, want at most 5s", d)
		}
		nodetest.Returns(t, []*postoffice.Node{a, b}, 11, func() {
			victim.Kill()
			testcluster.Lost(t, a, 11)
			victim = nodetest.Spawn(t, c, "worker", 1, works)
		})
		victim.Ready()
		work(t, 1, w)
		workers := finalizes(t, a, b)
		victim.Leave()
		scheduler.Leave()
		workers()
		server()
	})
}

// TestStoppedWorkerIsReplaced: a worker is stopped. With a heartbeat of 1 s the other nodes
// know after 4 s. Another process replaces it. When the stopped process continues, the errors
// of its calls report that within a second.
func TestStoppedWorkerIsReplaced(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		beat := func(c *postoffice.Config) { c.HeartbeatInterval = time.Second }
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Workers: 2, Set: beat, Elsewhere: func(c *testcluster.Cluster, role string, rank int) bool {
			return nodetest.Elsewhere(t, "worker", 1, learns, &victim, nodetest.Set("PS_HEARTBEAT_INTERVAL=1"))(c, role, rank)
		}})
		serveAll(t, c)
		w := nodetest.Worker(t, c.Workers[0])
		victim.Ready()
		if err := victim.Stop(); err != nil {
			t.Fatal(err)
		}
		stopped, m := time.Now(), real.WatchMachine(t.Context())
		testcluster.Lost(t, c.Servers[0], 11)
		if d := time.Since(stopped); d > 4*time.Second+slack+m.Late(stopped) {
			t.Errorf("the server learned after %s that a worker stands still, want at most 4s", d)
		}
		testcluster.Lost(t, c.Scheduler, 11)
		next := nodetest.Spawn(t, c, "worker", 1, works, nodetest.Set("PS_HEARTBEAT_INTERVAL=1"))
		next.Ready()
		work(t, 1, w)
		woken := time.Now()
		if err := victim.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		victim.Expect("refused")
		if d := time.Since(woken); d > time.Second+slack+m.Late(woken) {
			t.Errorf("the worker that was replaced learned it %s after it woke, want at most a second", d)
		}
		work(t, 1, w)
		if err := errors.Join(c.Workers[0].Alive(), c.Servers[0].Alive()); err != nil || strings.Contains(fmt.Sprint(testcluster.Dead(c.Servers[0])), "11") {
			t.Errorf("%v; dead for the server: %v", err, testcluster.Dead(c.Servers[0]))
		}
	})
}

// TestStoppedAtFirstMessage: a server that is stopped when a worker first sends it data gets that data over ZeroMQ. Soon after it continues, the
// worker's data goes over TCP, as the log says once.
func TestStoppedAtFirstMessage(t *testing.T) {
	var victim *nodetest.Process
	l := &nodetest.Text{}
	// The check of another transport would make the connection.
	o := testcluster.Options{Over: testcluster.AsSet, Log: l.Logger(slog.LevelInfo), Set: func(c *postoffice.Config) { c.EnableIPC = 0 },
		Elsewhere: nodetest.Elsewhere(t, "server", 0, echo, &victim, nodetest.Set("BYTEPS_ENABLE_IPC=0"))}
	c := testcluster.Start(t, o)
	w := nodetest.Worker(t, c.Workers[0])
	victim.Ready()
	if err := victim.Stop(); err != nil {
		t.Fatal(err)
	}
	h, _, err := request(w, 1, []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	l.Wait(t, "data goes over zmq, not over tcp", "server 0 (id 8)", "next try in")
	if path := c.Workers[0].PathTo(8); path.Over != "zmq" {
		t.Errorf("data goes over %s, want zmq", path.Over)
	}
	if err := victim.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	vantest.Eventually(t, 30*time.Second, "data goes over tcp", func() bool {
		work(t, 1, w)
		return c.Workers[0].PathTo(8).Over == "tcp"
	})
	work(t, 1, w)
	l.Wait(t, "data goes over tcp from now on, no longer over zmq", "server 0 (id 8)")
	if n := strings.Count(l.String(), "from now on, no longer over zmq"); n != 1 {
		t.Errorf("the log says %d times that the path has changed, want once:\n%s", n, l)
	}
}
