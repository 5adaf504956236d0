package processes

import (
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// attempt is one run of a test that judges how long something takes.
type attempt struct {
	last  bool // it is not repeated
	again bool // it is to be repeated
}

// attempts is how often a test is run at most whose times a machine that was starved has spoiled.
const attempts = 3

// starved is a lateness of the machine from which on a missed limit proves nothing: a node that was held up
// gives the others time anew.
const starved = time.Second

// timed runs a test on each leg, and again if the machine was starved.
func timed(t *testing.T, test func(t *testing.T, leg real.Leg, a *attempt)) {
	onLegs(t, func(t *testing.T, leg real.Leg) {
		t.Parallel()
		for i := 1; ; i++ {
			a := &attempt{last: i == attempts}
			if test(t, leg, a); !a.again || t.Failed() {
				return
			}
		}
	})
}

// within checks how long something took. The limit is the promised time plus the time by which this machine was late.
func (a *attempt) within(t *testing.T, m *real.Machine, since time.Time, limit time.Duration, what string) {
	t.Helper()
	took, late := time.Since(since), m.Late(since)
	t.Logf("%s: %s (limit %s, the machine was late by %s)", what, took.Round(time.Millisecond), limit, late.Round(time.Millisecond))
	switch {
	case took <= limit+late:
	case late >= starved && !a.last:
		t.Logf("%s took %s, want at most %s: it is tried again", what, took, limit+late)
		a.again = true
	default:
		t.Errorf("%s took %s, want at most %s", what, took, limit+late)
	}
}

// joins starts a process in the place of another, and waits until it takes part. It is refused while the scheduler does
// not know that the other one is dead, which others may know before: then it is started again.
func joins(t *testing.T, c *real.Cluster, role string, rank int) {
	t.Helper()
	for began := time.Now(); ; {
		p, err := c.Spawn(role, rank)
		try(t, err)
		try(t, p.Await(soon, "it joins or is refused", func(s real.State) bool { return s.Started || s.Ended }))
		if p.State().Started {
			return
		}
		if time.Since(began) > soon {
			t.Fatalf("the place is not free: %s", p.State())
		}
		<-time.After(200 * time.Millisecond)
	}
}

// result receives from a channel within a limit.
func result(t *testing.T, c <-chan error, limit time.Duration, what string) error {
	t.Helper()
	select {
	case err := <-c:
		return err
	case <-time.After(limit):
		t.Fatalf("not within %s: %s", limit, what)
		return nil
	}
}

// settings are the defaults, and heartbeats of one second.
var settings = []struct {
	name  string
	env   []string
	limit time.Duration
}{
	{"defaults", nil, 15 * time.Second},
	{"heartbeats each second", []string{"PS_HEARTBEAT_INTERVAL=1"}, 4 * time.Second},
}

// patient is a load whose calls end because something has happened, not because the time
// is up.
var patient = []plan.Load{{Nodes: "workers", Every: ms, Size: 3000, Limit: 60_000 * ms}}

// TestWorkerStopped: others do not wait for a stopped worker. Their calls fail or succeed, and another process may replace
// the worker. When the stopped process continues, no node accepts its messages, and it gets a notice.
func TestWorkerStopped(t *testing.T) {
	for _, s := range settings {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			timed(t, func(t *testing.T, leg real.Leg, a *attempt) {
				c := start(t, real.Options{Workers: 2, Leg: leg, Env: s.env})
				try(t, c.Works(20, soon))
				other, victim := c.Get("worker", 0), c.Get("worker", 1)
				stopped, m := time.Now(), real.WatchMachine(t.Context())
				try(t, victim.Stop())
				barrier := other.Barrier(van.WorkerGroup, time.Minute)
				err := result(t, barrier, 40*time.Second, "a barrier with a worker that stands still ends")
				a.within(t, m, stopped, s.limit, "the barrier")
				if err == nil || !strings.Contains(err.Error(), "worker 1 (id 11)") {
					t.Errorf("the barrier: %v, want an error that names worker 1", err)
				}
				try(t, c.Works(20, soon))
				joins(t, c, "worker", 1)
				try(t, c.Works(20, soon))
				woken := time.Now()
				try(t, victim.Continue())
				try(t, victim.Await(soon, "it is told", func(s real.State) bool { return s.Fenced != "" || s.Ended }))
				a.within(t, m, woken, time.Second, "the process that was replaced learns it")
				try(t, c.Works(50, soon))
				try(t, c.Finish(soon))
			})
		})
	}
}

// usual is a load whose calls have the default limit.
var usual = []plan.Load{{Nodes: "workers", Every: ms, Size: 3000, Limit: plan.Duration(postoffice.DefaultTimeout)}}

// TestServerStopped: so does a server. A call with the default limit ends with the loss of the server, not with a
// timeout.
func TestServerStopped(t *testing.T) {
	for _, s := range settings {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			timed(t, func(t *testing.T, leg real.Leg, a *attempt) {
				c := start(t, real.Options{Servers: 2, Leg: leg, Env: s.env, Loads: usual})
				try(t, c.Works(20, soon))
				w, victim := c.Get("worker", 0), c.Get("server", 1)
				stopped, m := time.Now(), real.WatchMachine(t.Context())
				try(t, victim.Stop())
				try(t, w.Await(40*time.Second, "a call fails", func(s real.State) bool { return s.Stats.Failed > 0 }))
				a.within(t, m, stopped, s.limit, "the call")
				text := w.State().Stats.Last
				if !strings.Contains(text, "server 1 (id 10)") {
					t.Errorf("the error does not name server 1: %s", text)
				}
				if strings.Contains(text, van.ErrTimeout.Error()) && m.Late(stopped) < starved {
					t.Errorf("the error is not that the server is lost: %s", text)
				}
				joins(t, c, "server", 1)
				try(t, c.Works(20, soon))
				woken := time.Now()
				try(t, victim.Continue())
				try(t, victim.Await(soon, "it is told", func(s real.State) bool { return s.Fenced != "" || s.Ended }))
				a.within(t, m, woken, time.Second, "the process that was replaced learns it")
				try(t, victim.Await(soon, "it ends", func(s real.State) bool { return s.Ended }))
				try(t, c.Works(50, soon))
				try(t, c.Finish(soon))
			})
		})
	}
}

// TestKilledWithFork: a child that holds the sockets of a killed process does not keep it
// alive, neither for the scheduler nor for its peers.
func TestKilledWithFork(t *testing.T) {
	for _, role := range []string{"worker", "server"} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			timed(t, func(t *testing.T, leg real.Leg, a *attempt) {
				c := start(t, real.Options{Workers: 2, Servers: 2, Leg: leg, Env: []string{"PS_HEARTBEAT_INTERVAL=1"}, Loads: patient})
				try(t, c.Works(20, soon))
				victim, w := c.Get(role, 1), c.Get("worker", 0)
				try(t, victim.Fork())
				killed, m := time.Now(), real.WatchMachine(t.Context())
				victim.Kill()
				if role == "server" {
					try(t, w.Await(soon, "a call fails", func(s real.State) bool { return s.Stats.Failed > 0 }))
					a.within(t, m, killed, 4*time.Second, "the worker's call")
				}
				joins(t, c, role, 1)
				a.within(t, m, killed, 6*time.Second, "the place is free and taken")
				try(t, c.Works(50, soon))
				try(t, c.Finish(soon))
			})
		})
	}
}

// mib is a mebibyte.
const mib = 1 << 20

// memory is how much n bytes may take with the race detector, which records accesses to them.
func memory(n int) int {
	if vantest.Race {
		return 6 * n
	}
	return n
}

// TestHandlerBlocked: a server whose handler is blocked holds at most the budget.
func TestHandlerBlocked(t *testing.T) {
	onLegs(t, func(t *testing.T, leg real.Leg) {
		// All are to leave the worker, so that nothing but the server's own budget bounds it.
		c := start(t, real.Options{Workers: 2, Leg: leg, Env: []string{"PS_HEARTBEAT_INTERVAL=0", "STEPAF_SEND_BUDGET=8G"}})
		try(t, c.Works(20, soon))
		s, w := c.Get("server", 0), c.Get("worker", 0)
		for i := range 2 {
			try(t, c.Get("worker", i).Loads())
		}
		before := s.Resident()
		try(t, s.Block(true))
		n, err := w.Flood(1500, mib, 2*soon)
		if n != 1500 || err != nil {
			t.Errorf("%d of 1500 pushes: %v", n, err)
		}
		most := grows(s, before, memory(320*mib))
		t.Logf("the server has grown by %d MiB", most/mib)
		if most > memory(320*mib) {
			t.Errorf("the server has grown by %d MiB, want at most the 256 of STEPAF_RECV_BUDGET_PEER and 64", most/mib)
		}
		try(t, s.Block(false))
		try(t, w.Drain(soon))
		for i := range 2 {
			try(t, c.Get("worker", i).Loads(load))
		}
		try(t, c.Works(20, 2*soon))
	})
}

// grows is by how many bytes a process has grown when it does not any more, or has grown
// by too much.
func grows(p *real.Process, before, tooMuch int) int {
	most := 0
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for quiet := 0; quiet < 20 && most <= tooMuch; quiet++ {
		<-tick.C
		if now := p.Resident() - before; now > most+mib {
			most, quiet = now, 0
		}
	}
	return most
}

// TestServerStoppedQueue: the output queue for a stopped server is bounded; when it is full, the error says so.
func TestServerStoppedQueue(t *testing.T) {
	onLegs(t, func(t *testing.T, leg real.Leg) {
		c := start(t, real.Options{Leg: leg, Env: []string{"PS_HEARTBEAT_INTERVAL=0"}})
		try(t, c.Works(20, soon))
		s, w := c.Get("server", 0), c.Get("worker", 0)
		try(t, w.Loads())
		try(t, s.Stop())
		before := w.Resident()
		n, err := w.Flood(400_000, 1024, 3*soon)
		grown := w.Resident() - before
		t.Logf("%d pushes, the worker has grown by %d MiB: %v", n, grown/mib, err)
		if err == nil || !strings.Contains(err.Error(), van.ErrQueueFull.Error()) || !strings.Contains(err.Error(), "server 0 (id 8)") {
			t.Errorf("%v, want %q that names server 0", err, van.ErrQueueFull)
		}
		// The worker's records of a request take about as much again in Go's heap, which may be twice the memory in use.
		if grown > memory(3*256*mib) {
			t.Errorf("the worker has grown by %d MiB, want at most three times the 256 of STEPAF_SEND_BUDGET", grown/mib)
		}
		try(t, s.Continue())
		try(t, w.Drain(soon)) // each call of a load has a limit of its own
		try(t, w.Loads(load))
		try(t, c.Works(20, 2*soon))
	})
}
