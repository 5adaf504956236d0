package membership

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

func withID(n van.Node, id int) van.Node {
	n.ID = id
	return n
}

// TestTables feeds a worker tables that a C++ or a broken scheduler might send.
func TestTables(t *testing.T) {
	self := withID(rec(van.Worker, "a", 1, -1), 9)
	other := withID(rec(van.Worker, "a", 2, -1), 11)
	server := withID(rec(van.Server, "b", 1, -1), 8)
	sched := withID(rec(van.Scheduler, "10.0.0.99", 8123, -1), 1)
	for _, c := range []struct {
		name  string
		nodes []van.Node
		field string // of the error; "" if the table is good
		peers string
	}{
		{"good", []van.Node{self, other, server, sched}, "", "[8 1]"},
		{"without the scheduler", []van.Node{server, other, self}, "", "[8 1]"},
		{"scheduler under another name", []van.Node{self, other, server, withID(rec(van.Scheduler, "localhost", 1, -1), 1)}, "", "[8 1]"},
		{"two customers of one process", []van.Node{self, self, server, sched}, "", "[8 1]"},
		{"own record missing", []van.Node{other, other, server, sched}, "control.node", "[1]"},
		{"one id twice", []van.Node{self, withID(other, 9), server, sched}, "control.node[1].id", "[1]"},
		{"rank too large", []van.Node{self, withID(other, 13), server, sched}, "control.node[1].id", "[1]"},
		{"id of the other role", []van.Node{self, withID(other, 10), server, sched}, "control.node[1].id", "[1]"},
		{"scheduler with another id", []van.Node{self, other, server, withID(sched, 2)}, "control.node[3].id", "[1]"},
		{"no id", []van.Node{self, withID(other, van.Empty), server, sched}, "control.node[1].id", "[1]"},
		{"role", []van.Node{self, other, server, withID(rec(van.Joint, "x", 1, -1), 8)}, "control.node[3].role", "[1]"},
		{"port", []van.Node{self, withID(rec(van.Worker, "a", 0, -1), 11), server, sched}, "control.node[1].address", "[1]"},
	} {
		m, err := New(testConfig(van.Worker, 2, 1, "a:1", -1))
		if err != nil {
			t.Fatal(err)
		}
		m.Start(0)
		var meta van.Meta
		meta.Reset()
		meta.Control.Cmd, meta.Control.Nodes = van.AddNode, c.nodes
		err = m.Step(0, van.SchedulerID, &meta)
		var fe *van.FieldError
		switch {
		case c.field == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.field != "" && (!errors.As(err, &fe) || fe.Field != c.field || !strings.Contains(err.Error(), "scheduler (id 1)")):
			t.Errorf("%s: %v, want one about %s from the scheduler", c.name, err, c.field)
		}
		if m.Ready() != (c.field == "") {
			t.Errorf("%s: ready %t", c.name, m.Ready())
		}
		if got := fmt.Sprint(m.KnownPeers()); got != c.peers {
			t.Errorf("%s: peers %s, want %s", c.name, got, c.peers)
		}
		if c.field != "" { // nothing was changed
			meta.Control.Nodes = []van.Node{self, other, server, sched}
			if err := m.Step(0, van.SchedulerID, &meta); err != nil || !m.Ready() {
				t.Errorf("%s: the good table after it: %v", c.name, err)
			}
		}
	}
}

// TestRecordsAfterStart feeds a worker the records that a C++ scheduler sends in recoveries.
func TestRecordsAfterStart(t *testing.T) {
	server := func(port int, recovery bool) van.Node {
		n := withID(rec(van.Server, "10.2.0.1", port, 0), 8)
		n.IsRecovery = recovery
		return n
	}
	for _, c := range []struct {
		name string
		rec  van.Node
		down bool
		want string
	}{
		{"the same", server(1000, false), false, ""},
		{"the same of a dead one", server(1000, false), true, ""},
		{"restarted in place, unnoticed", server(1000, true), false, "connect 8 at 10.2.0.1:1000, PEER REPLACED 8 by 10.2.0.1:1000"},
		{"restarted in place", server(1000, true), true, "connect 8 at 10.2.0.1:1000, PEER REPLACED 8 by 10.2.0.1:1000"},
		{"moved", server(2000, true), true, "connect 8 at 10.2.0.1:2000, PEER REPLACED 8 by 10.2.0.1:2000"},
		{"moved, though alive", server(2000, false), false, "connect 8 at 10.2.0.1:2000, PEER REPLACED 8 by 10.2.0.1:2000"},
		{"another worker", withID(rec(van.Worker, "c", 1, 1), 11), false, "PEER REPLACED 11 by c:1"},
	} {
		m := startWorldOf(t, 2, 1, foreign).node("w0").m
		if c.down {
			m.PeerLost(0, 8, nil)
			m.Take()
		}
		for range 2 { // the second time it is known
			var meta van.Meta
			meta.Reset()
			meta.Control.Cmd, meta.Control.Nodes = van.AddNode, []van.Node{c.rec}
			if err := m.Step(0, van.SchedulerID, &meta); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			var got []string
			for _, o := range m.Take() {
				got = append(got, showOutput(o))
			}
			if s := strings.Join(got, ", "); s != c.want {
				t.Errorf("%s: %q, want %q", c.name, s, c.want)
			}
			c.want = ""
		}
	}
}

// TestReplacedSelf: a node that was replaced must not go on.
func TestReplacedSelf(t *testing.T) {
	m := startWorldOf(t, 1, 1, foreign).node("w0").m
	number, err := m.Barrier(0, 0, van.AllNodes, true)
	if err != nil {
		t.Fatal(err)
	}
	m.Take()
	var meta van.Meta
	meta.Reset()
	meta.Control.Cmd, meta.Control.Nodes = van.AddNode, []van.Node{withID(rec(van.Worker, "x", 1, 0), 9)}
	if err := m.Step(0, van.SchedulerID, &meta); err != nil {
		t.Fatal(err)
	}
	out := m.Take()
	if len(out) != 2 {
		t.Fatalf("output %v, want BarrierFailed and Failed", out)
	}
	bf, ok1 := out[0].(BarrierFailed)
	f, ok2 := out[1].(Failed)
	if !ok1 || !ok2 || bf.Barrier != number || !errors.Is(bf.Err, ErrRefused) || !errors.Is(f.Err, ErrRefused) {
		t.Errorf("output %v", out)
	}
	if m.Ready() {
		t.Error("still ready")
	}
}

// TestRefusalsAreBounded: a flood of registrations makes the scheduler open few connections, and none to a name that
// would have to be looked up.
func TestRefusalsAreBounded(t *testing.T) {
	w := startWorld(t, 1, 1)
	m := w.node("sched").m
	connects := func(host func(i int) string) (n int) {
		for i := range 5000 {
			var meta van.Meta
			meta.Reset()
			meta.Control.Cmd, meta.Timestamp = van.AddNode, 0
			meta.Control.Nodes = []van.Node{rec(van.Worker, host(i), 1+i%60000, -1)}
			if err := m.Step(w.now, van.Empty, &meta); err != nil {
				t.Fatal(err)
			}
			for _, o := range m.Take() {
				if _, ok := o.(Connect); ok {
					n++
				}
			}
		}
		return n
	}
	if n := connects(func(i int) string { return fmt.Sprintf("10.9.%d.%d", i/250, i%250) }); n != maxRefusalsSent {
		t.Errorf("%d connections to strangers at once, want %d", n, maxRefusalsSent)
	}
	total := 0
	w.seen = func(_ *testNode, o Output) {
		if _, ok := o.(Connect); ok {
			total++
		}
	}
	w.pass(60*time.Second, false)
	if total > maxRefusalsQueued+maxQueued {
		t.Errorf("%d connections to strangers later, want at most %d", total, maxRefusalsQueued+maxQueued)
	}
	if n := connects(func(i int) string { return fmt.Sprintf("stranger-%d.example", i) }); n != 0 {
		t.Errorf("%d connections to names", n)
	}
}

// TestBrokenRegistrationsAreBounded: processes register, and end before the cluster forms. The scheduler keeps at most maxLostRegistrations of
// their records and connections.
func TestBrokenRegistrationsAreBounded(t *testing.T) {
	s := probingMachine(t, van.Scheduler, 1, 1)
	open := 0
	for i := range 3 * maxLostRegistrations {
		meta := controlAt(int32(i), van.AddNode)
		meta.Control.Nodes = []van.Node{rec(van.Worker, fmt.Sprintf("10.9.%d.%d", i/250, 1+i%250), 4001, -1)}
		if err := s.Step(0, van.Empty, &meta); err != nil {
			t.Fatal(err)
		}
		for _, o := range s.Take() {
			switch o := o.(type) {
			case Connect: // to the process before, which has the place
				open++
				s.PeerLost(0, o.ID, syscall.ECONNREFUSED)
			case Disconnect:
				open--
			}
		}
	}
	if n := len(s.sched.registrations.list); n > maxLostRegistrations+1 || open > maxLostRegistrations+1 {
		t.Errorf("%d records and %d connections, want at most %d of disconnected processes", n, open, maxLostRegistrations)
	}
	if len(s.Report(0).Present) != 1 {
		t.Errorf("present: %v, want the last process", s.Report(0).Present)
	}
}

// TestDeadNodesBySilence: with t > 0 a node that is silent for longer than t counts, before it is declared dead.
func TestDeadNodesBySilence(t *testing.T) {
	w := startWorld(t, 1, 1)
	m := w.node("sched").m
	heard := w.now
	if dead := m.DeadNodes(heard+4*time.Second, 5*time.Second); len(dead) > 0 {
		t.Errorf("%v are dead after 4s of silence, and 5s count", dead)
	}
	if dead := m.DeadNodes(heard+6*time.Second, 5*time.Second); len(dead) != 2 {
		t.Errorf("%v are dead after 6s of silence, want worker 0 and server 0", dead)
	}
	if dead := m.DeadNodes(heard+6*time.Second, 0); len(dead) > 0 {
		t.Errorf("%v are dead, though silence does not count", dead)
	}
}

// TestLostAfterTheTimeout: the connection to a node breaks when its timeout has passed and before the scheduler has
// checked it. The node was silent for long enough, as if the scheduler had checked first, and barriers fail at once.
// If the scheduler has not checked for long, messages may have arrived that it has not handled: only the connection
// is lost.
func TestLostAfterTheTimeout(t *testing.T) {
	for _, c := range []struct {
		name  string
		looks bool
		want  string
	}{{"in time", true, "no heartbeat for"}, {"overslept", false, "connection lost"}} {
		t.Run(c.name, func(t *testing.T) {
			w := startWorldOf(t, 1, 1, func(c Config) Config {
				c.HeartbeatInterval, c.HeartbeatTimeout = 2*time.Second, 10*time.Second
				return c
			})
			m := w.node("sched").m
			at := w.now + 10*time.Second
			if c.looks {
				for next, ok := m.NextTick(); ok && next < at; next, ok = m.NextTick() {
					m.Tick(next)
				}
			}
			m.Take()
			m.PeerLost(at, 9, syscall.ECONNRESET)
			for _, o := range m.Take() {
				if dead, ok := o.(PeerDead); ok && strings.Contains(dead.Cause.Error(), c.want) {
					return
				}
			}
			t.Errorf("no death for %q", c.want)
		})
	}
}

// TestReturnsOnce: a node that returns to a restarted scheduler tags its messages for the earlier scheduler process
// until it has the table. Each heartbeat is answered with the table, and the connection to the node is made once,
// unless it breaks.
func TestReturnsOnce(t *testing.T) {
	const cluster, former = 7, 99
	cfg := testConfig(van.Scheduler, 1, 1, "", -1)
	cfg.NamedCluster = true
	cfg.Self.Endpoint = (&van.NodeExtension{Incarnation: 100, Cluster: cluster}).Encode()
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	m.Start(0)
	member := func(role van.Role, id int) van.Node {
		r := withID(rec(role, "10.0.0.1", 4000+id, -1), id)
		r.Endpoint = (&van.NodeExtension{Incarnation: uint32(200 + id), Cluster: cluster}).Encode()
		return r
	}
	server, worker := member(van.Server, 8), member(van.Worker, 9)
	beat := func(at time.Duration, from int, nodes ...van.Node) (connects, tables int) {
		t.Helper()
		var meta van.Meta
		meta.Reset()
		meta.Control.Cmd, meta.Control.Nodes = van.Heartbeat, nodes
		meta.Body = notice{verb: verbRejoin, text: m.table.addressProof(&nodes[0])}.body()
		meta.SetIncarnations(uint32(200+from), former)
		if err := m.Step(at, from, &meta); err != nil {
			t.Fatal(err)
		}
		m.Tick(at)
		for _, o := range m.Take() {
			switch o := o.(type) {
			case Connect:
				connects++
			case Send:
				if o.Meta.Control.Cmd == van.AddNode && o.To == from {
					tables++
				}
			}
		}
		return connects, tables
	}
	beat(0, 9, worker, server)
	if beat(4*time.Second, 9, worker, server); !m.Ready() || !m.isDead(8) || m.isDead(9) {
		t.Fatalf("ready %t, server lost %t, worker lost %t: want a cluster without its server", m.Ready(), m.isDead(8), m.isDead(9))
	}
	for i, x := range []struct {
		node   van.Node
		breaks bool
		want   int
	}{{worker, false, 0}, {server, false, 1}, {server, false, 0}, {server, true, 1}} {
		at := time.Duration(5+i) * time.Second
		if x.breaks {
			m.PeerLost(at, x.node.ID, nil)
		}
		if connects, tables := beat(at, x.node.ID, x.node); connects != x.want || tables != 1 {
			t.Errorf("heartbeat %d, of %d: %d connections and %d tables, want %d and 1", i, x.node.ID, connects, tables, x.want)
		}
	}
}
