package faults

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// soon is well below the limit of a request, and above what a busy machine needs
// to notice that a process is gone.
const soon = 5 * time.Second

// slack is for processes that start, or wake, and compete for few processors.
const slack = 3 * time.Second

// overSockets runs a test with data over TCP, and with data over shared memory: the loss
// of a process shows in other ways there.
func overSockets(t *testing.T, test func(t *testing.T, o testcluster.Options)) {
	testcluster.Over(t, test, testcluster.TCP, testcluster.SHM)
}

// TestServerKilled: when a server is killed, its unanswered requests fail, and so do
// later ones, until another process replaces it.
func TestServerKilled(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Workers: 2, Servers: 2, Elsewhere: nodetest.Elsewhere(t, "server", 1, mute, &victim)})
		serveAll(t, c)
		ws := []*af.Worker{nodetest.Worker(t, c.Workers[0]), nodetest.Worker(t, c.Workers[1])}
		victim.Ready()
		h, _, err := request(ws[0], 2, []byte("x"))
		if err != nil {
			t.Fatal(err)
		}
		victim.Expect("got a batch")
		killed, m := time.Now(), real.WatchMachine(t.Context())
		victim.Kill()
		vantest.Fails(t, h.Wait(t.Context()), van.ErrPeerLost, "worker 0 (id 9): push_pull with server 1 (id 10) at 127.0.0.1:", fmt.Sprintf("handler %d", h.Timestamp()))
		if d := time.Since(killed); d > soon+m.Late(killed) {
			t.Errorf("it took %s to notice the death of a server, want less than %s", d, soon)
		}
		// The other worker learns it as well, and the others go on without.
		vantest.Eventually(t, soon, "worker 1 notices the death of the server", func() bool { return len(testcluster.Dead(c.Workers[1])) > 0 })
		for _, w := range ws {
			vantest.Fails(t, roundTrip(t.Context(), w, 2, []byte("x")), van.ErrPeerLost, "push_pull with server 1 (id 10)")
		}
		nodetest.Together(t, c.Workers, func(n *postoffice.Node) error {
			return n.InstanceBarrier(nodetest.Within(t, 20*time.Second), 0, van.WorkerGroup)
		})

		var next *nodetest.Process
		testcluster.Lost(t, c.Scheduler, 10) // others may know earlier, and the scheduler refuses a replacement then
		nodetest.Returns(t, c.Workers, 10, func() { next = nodetest.Spawn(t, c, "server", 1, echo) })
		next.Ready()
		work(t, 2, ws...)
	})
}

// TestIdleServerKilled: a server that is killed before any message of a worker has no connection to the workers. They learn of its death
// from the scheduler, as soon as from a connection of their own, and work with its replacement process.
func TestIdleServerKilled(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Workers: 2, Servers: 2, Elsewhere: nodetest.Elsewhere(t, "server", 1, echo, &victim)})
		serveAll(t, c)
		ws := []*af.Worker{nodetest.Worker(t, c.Workers[0]), nodetest.Worker(t, c.Workers[1])}
		victim.Ready()
		killed, m := time.Now(), real.WatchMachine(t.Context())
		victim.Kill()
		testcluster.Lost(t, c.Workers[0], 10)
		testcluster.Lost(t, c.Workers[1], 10)
		if d := time.Since(killed); d > time.Second+m.Late(killed) {
			t.Errorf("it took %s to notice the death of a server, want less than a second", d)
		}
		vantest.Fails(t, roundTrip(t.Context(), ws[0], 2, []byte("x")), van.ErrPeerLost, "push_pull with server 1 (id 10)")
		var next *nodetest.Process
		nodetest.Returns(t, c.Workers, 10, func() { next = nodetest.Spawn(t, c, "server", 1, echo) })
		next.Ready()
		work(t, 2, ws...)
	})
}

// TestServerInstanceKilled: the instances of other groups' members do not notice
// that one was killed.
func TestServerInstanceKilled(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Group: 2, Elsewhere: nodetest.Elsewhere(t, "server", 1, mute, &victim)})
		serveAll(t, c)
		untouched, w := nodetest.Worker(t, c.Workers[0]), nodetest.Worker(t, c.Workers[1])
		stop := nodetest.Repeat(t, "instance 0", func(i int) error { return roundTrip(t.Context(), untouched, 1, fmt.Append(nil, i)) })
		victim.Ready()
		h, _, err := request(w, 1, []byte("x"))
		if err != nil {
			t.Fatal(err)
		}
		victim.Expect("got a batch")
		victim.Kill()
		vantest.Fails(t, h.Wait(t.Context()), van.ErrPeerLost, "worker 1 (id 11): push_pull with server 1 (id 10) at 127.0.0.1:")
		var next *nodetest.Process
		testcluster.Lost(t, c.Scheduler, 10) // others may know earlier, and the scheduler refuses a replacement then
		nodetest.Returns(t, c.Workers[1:], 10, func() { next = nodetest.Spawn(t, c, "server", 1, echo) })
		next.Ready()
		work(t, 1, w)
		stop()
	})
}

// TestHandlerPanics: a panic in an application's handler ends its process, as it
// would anywhere, and is the loss of a peer for the others.
func TestHandlerPanics(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Elsewhere: nodetest.Elsewhere(t, "server", 0, panics, &victim)})
		w := nodetest.Worker(t, c.Workers[0])
		victim.Ready()
		vantest.Fails(t, roundTrip(t.Context(), w, 1, []byte("x")), van.ErrPeerLost, "server 0 (id 8) at 127.0.0.1:")
		if status := victim.Ended(); status != 2 {
			t.Errorf("the process ended with status %d, want 2", status)
		}
		var next *nodetest.Process
		testcluster.Lost(t, c.Scheduler, 8)
		nodetest.Returns(t, c.Workers, 8, func() { next = nodetest.Spawn(t, c, "server", 0, echo) })
		next.Ready()
		work(t, 1, w)
	})
}

// TestWorkerKilledInBatch: the open batch of a killed worker is canceled. The server
// serves the other workers, and the replacement process.
func TestWorkerKilledInBatch(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		l := &nodetest.Text{}
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Workers: 2, Log: l.Logger(slog.LevelDebug), Elsewhere: nodetest.Elsewhere(t, "worker", 1, begins, &victim)})
		serveAll(t, c)
		w := nodetest.Worker(t, c.Workers[0])
		victim.Ready()
		l.Wait(t, "msg=recv", `peer="worker 1 (id 11)"`, "head=1")
		work(t, 1, w)
		victim.Kill()
		l.Wait(t, "rank=0 id=8", "dropped unfinished batches", "worker 1 (id 11)", "batches=1")
		work(t, 1, w)

		testcluster.Lost(t, c.Scheduler, 11)
		next := nodetest.Spawn(t, c, "worker", 1, works) // begins at timestamp 0 as the first one did
		next.Ready()
		work(t, 1, w)
		if dead := testcluster.Dead(c.Scheduler); len(dead) > 0 {
			t.Errorf("dead nodes are %v, want none: the new worker has the place of the old one", dead)
		}
		next.End()
		next.Left()
	})
}

// TestWorkerKilledBeforeAnswer: an answer to a killed worker is an error, and no
// trouble to others.
func TestWorkerKilledBeforeAnswer(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Workers: 2, Elsewhere: nodetest.Elsewhere(t, "worker", 1, asks, &victim)})
		arrived := make(chan af.Batch, 1)
		nodetest.Server(t, c.Servers[0], func(b af.Batch) {
			if b.Worker() == 1 {
				arrived <- b
				return
			}
			nodetest.Echoes(t)(b)
		})
		w := nodetest.Worker(t, c.Workers[0])
		b := <-arrived
		gone := make(chan struct{}, 16)
		defer c.Servers[0].OnPeer(func(id postoffice.NodeID, up bool, _ error) {
			if id == 11 && !up {
				gone <- struct{}{}
			}
		})()
		victim.Kill()
		<-gone
		vantest.Fails(t, nodetest.Echo(b), van.ErrPeerLost, "server 0 (id 8): send with worker 1 (id 11) at 127.0.0.1:")
		vantest.Fails(t, nodetest.Echo(b), postoffice.ErrAnswered)
		work(t, 1, w)
		if n := testcluster.Stats(c.Servers[0]).LentValues; n > 0 {
			t.Errorf("%d values are still held for the dead worker", n)
		}
	})
}

// TestSchedulerKilled: without a scheduler, barriers, Start and Finalize fail with an error
// that says so. Requests between workers and servers go on.
func TestSchedulerKilled(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Elsewhere: nodetest.Elsewhere(t, "scheduler", 0, rules, &victim),
			Set: func(c *postoffice.Config) { c.StopTimeout, c.ReplaceTimeout = 5*time.Second, time.Second }})
		serveAll(t, c)
		w := nodetest.Worker(t, c.Workers[0])
		victim.Ready()
		work(t, 1, w)
		waiting := make(chan error)
		go func() { waiting <- c.Workers[0].InstanceBarrier(t.Context(), 0, van.WorkerGroup|van.ServerGroup) }()
		killed, m := time.Now(), real.WatchMachine(t.Context())
		victim.Kill()
		scheduler := fmt.Sprintf("scheduler (id 1) at 127.0.0.1:%d", c.Port)
		vantest.Fails(t, <-waiting, van.ErrPeerLost, "worker 0 (id 9)", "instance barrier", scheduler)
		if d := time.Since(killed); d > soon+m.Late(killed) {
			t.Errorf("it took %s to notice the death of the scheduler, want less than %s", d, soon)
		}
		work(t, 1, w)
		vantest.Fails(t, c.Workers[0].Barrier(t.Context(), 0, van.WorkerGroup|van.ServerGroup), van.ErrPeerLost, scheduler)
		work(t, 1, w)

		_, err := c.Join(t.Context(), "worker", 0, func(c *postoffice.Config) { c.StartTimeout = 200 * time.Millisecond })
		vantest.Fails(t, err, van.ErrTimeout, fmt.Sprintf("the scheduler at 127.0.0.1:%d has not answered", c.Port))
		work(t, 1, w)
		// The server stays as long as there is a worker.
		for _, n := range []*postoffice.Node{c.Workers[0], c.Servers[0]} {
			vantest.Fails(t, n.Shutdown(nodetest.Within(t, 20*time.Second)), van.ErrPeerLost, n.Name(), scheduler)
		}
	})
}
