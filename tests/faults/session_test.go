package faults

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// newRank is a rank with a function that says when it runs, and runs until the session ends.
func newRank(n *postoffice.Node, say func(string)) (*session.Rank, error) {
	r, err := session.NewRank(n, session.Options{})
	if err != nil {
		return nil, err
	}
	err = r.Register("run", func(ctx context.Context, _ []any) (any, error) {
		say("runs")
		<-ctx.Done()
		return nil, context.Cause(ctx)
	})
	if err != nil {
		return nil, err
	}
	return r, r.Register("rank", func(context.Context, []any) (any, error) { return n.Rank(), nil })
}

// serveSession is a rank that is a child; it says how its Serve has ended.
func serveSession(c *nodetest.Child) error {
	r, err := newRank(c.Node, c.Say)
	if err != nil {
		return err
	}
	c.Go(func(ctx context.Context) error {
		if err := r.Serve(ctx); err != nil && strings.Contains(err.Error(), "worker 0 (id 9)") {
			c.Say("has lost the controller")
		}
		return nil
	})
	return nil
}

// openSession is a controller that is a child.
func openSession(c *nodetest.Child) error {
	c.Go(func(ctx context.Context) error {
		s, err := session.Open(ctx, c.Node, session.Options{})
		if err != nil {
			return err
		}
		h, err := s.Call(ctx, "run")
		if err != nil {
			return err
		}
		c.Say("called")
		return h.Wait(ctx)
	})
	return nil
}

// TestSessionRankKilled: a rank that is killed in the middle of a call fails the session on
// the controller and ends the other ranks' Serve. The process in its place is not taken for it.
func TestSessionRankKilled(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var victim *nodetest.Process
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Servers: 3, Elsewhere: nodetest.Elsewhere(t, "server", 1, obeys, &victim)})
		victim.Ready()
		ctx := nodetest.Within(t, 30*time.Second)
		begin := func() (chan error, *session.Session) {
			ended := make(chan error, 2)
			for _, n := range []*postoffice.Node{c.Servers[0], c.Servers[2]} {
				r, err := newRank(n, func(string) {})
				if err != nil {
					t.Fatal(err)
				}
				go func() { ended <- r.Serve(context.Background()) }()
			}
			s, err := session.Open(ctx, c.Workers[0], session.Options{})
			if err != nil {
				t.Fatal(err)
			}
			return ended, s
		}
		ended, s := begin()
		h, err := s.Call(ctx, "run")
		if err != nil {
			t.Fatal(err)
		}
		victim.Expect("runs")
		killed, m := time.Now(), real.WatchMachine(t.Context())
		victim.Kill()
		vantest.Fails(t, h.Wait(ctx), van.ErrPeerLost, "server 1 (id 10) at 127.0.0.1:")
		for range 2 {
			if err := <-ended; err == nil || !strings.Contains(err.Error(), "server 1 (id 10)") {
				t.Errorf("Serve of another rank: %v, want that server 1 is lost", err)
			}
		}
		if d := time.Since(killed); d > soon+m.Late(killed) {
			t.Errorf("it took %s, want less than %s", d, soon)
		}
		var next *nodetest.Process
		testcluster.Lost(t, c.Scheduler, 10) // others may know earlier, and the scheduler refuses a replacement then
		nodetest.Returns(t, c.Workers, 10, func() { next = nodetest.Spawn(t, c, "server", 1, obeys) })
		next.Ready()
		_, err = s.Call(ctx, "rank")
		vantest.Fails(t, err, van.ErrPeerLost, "server 1 (id 10)")
		s.Close()

		ended, s = begin()
		if h, err = s.Call(ctx, "rank"); err != nil {
			t.Fatal(err)
		}
		if v, err := s.Get(ctx, h, 1); err != nil || v != int64(1) {
			t.Errorf("the new process has %v, %v", v, err)
		}
		if err := s.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	})
}

// TestSessionControllerKilled: Serve ends on all ranks, and the functions' contexts with it. The
// process in the controller's place can open a session of its own.
func TestSessionControllerKilled(t *testing.T) {
	overSockets(t, func(t *testing.T, o testcluster.Options) {
		var rank, controller *nodetest.Process
		c := testcluster.Start(t, testcluster.Options{Over: o.Over, Servers: 2, Elsewhere: func(c *testcluster.Cluster, role string, i int) bool {
			return nodetest.Elsewhere(t, "server", 1, obeys, &rank)(c, role, i) || nodetest.Elsewhere(t, "worker", 0, orders, &controller)(c, role, i)
		}})
		rank.Ready()
		runs, ends := make(chan string, 1), make(chan error, 1)
		r, err := newRank(c.Servers[0], func(s string) { runs <- s })
		if err != nil {
			t.Fatal(err)
		}
		serving, stop := context.WithCancel(context.Background())
		defer stop()
		serve := func() { ends <- r.Serve(serving) }
		go serve()
		<-runs
		rank.Expect("runs")
		killed, m := time.Now(), real.WatchMachine(t.Context())
		controller.Kill()
		vantest.Fails(t, <-ends, van.ErrPeerLost, "worker 0 (id 9) at 127.0.0.1:")
		rank.Expect("has lost the controller")
		if d := time.Since(killed); d > soon+m.Late(killed) {
			t.Errorf("it took %s, want less than %s", d, soon)
		}
		// One rank serves no more, so the next controller cannot begin, and gets an error in time.
		// The other rank waits for a controller that can.
		go serve()
		testcluster.Lost(t, c.Scheduler, van.WorkerID(0))
		n, err := c.Join(nodetest.Within(t, 20*time.Second), "worker", 0, nil)
		if err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err = session.Open(short, n, session.Options{})
		vantest.Fails(t, err, van.ErrTimeout, "rank 1 (server 1 (id 10)")
		stop()
		if err := <-ends; !errors.Is(err, context.Canceled) {
			t.Errorf("Serve: %v, want that it has waited for a controller until its context ended", err)
		}
	})
}
