package membership

// Messages of a process that is not a member and knows no incarnation.

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// stranger_test.go has the messages that a non-member can send without knowing an incarnation.

// actions are the outputs of a machine that these tests check.
type actions struct {
	connects, dials []Connect // to nodes with an id, and without
	sends           []Send
	dead            []int
	replaced        []int
	ready           bool
	warnings        []string
}

func actionsOf(m *Machine) (o actions) {
	for _, x := range m.Take() {
		switch x := x.(type) {
		case Connect:
			if x.ID > 0 {
				o.connects = append(o.connects, x)
			} else {
				o.dials = append(o.dials, x)
			}
		case Send:
			o.sends = append(o.sends, x)
		case PeerDead:
			o.dead = append(o.dead, x.ID)
		case PeerReplaced:
			o.replaced = append(o.replaced, x.ID)
		case Ready:
			o.ready = true
		case Warning:
			o.warnings = append(o.warnings, x.Text)
		}
	}
	return o
}

func attackConfig(role van.Role, cluster uint32, port int) Config {
	cfg := testConfig(role, 1, 1, fmt.Sprintf("10.0.0.2:%d", port), -1)
	cfg.HeartbeatInterval, cfg.HeartbeatTimeout, cfg.ReplaceTimeout = time.Second, 10*time.Second, 30*time.Second
	cfg.NamedCluster, cfg.Nonce = cluster != 0, 77
	id := van.NodeExtension{Incarnation: uint32(100 + port), Cluster: cluster}
	if role == van.Scheduler && cluster == 0 {
		id.Cluster = 5
	}
	cfg.Self.Endpoint = id.Encode()
	return cfg
}

func started(t *testing.T, cfg Config) *Machine {
	t.Helper()
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	m.Start(0)
	m.Take()
	return m
}

func registrationMessage(r van.Node, body string) *van.Meta {
	var m van.Meta
	m.Reset()
	m.Control.Cmd, m.Control.Nodes, m.Body = van.AddNode, []van.Node{r}, []byte(body)
	return &m
}

func member(role van.Role, host string, port int, incarnation, cluster uint32) van.Node {
	r := rec(role, host, port, -1)
	if incarnation != 0 {
		r.Endpoint = (&van.NodeExtension{Incarnation: incarnation, Cluster: cluster}).Encode()
	}
	return r
}

// formed is a scheduler whose cluster has formed: server 8 at 10.0.0.1:4008, worker 9 at 10.0.0.1:4009, incarnations
// 208 and 209, which send heartbeats.
func formed(t *testing.T, cfg Config, cluster uint32) *Machine {
	t.Helper()
	m := started(t, cfg)
	for _, r := range []van.Node{member(van.Server, "10.0.0.1", 4008, 208, cluster), member(van.Worker, "10.0.0.1", 4009, 209, cluster)} {
		if err := m.Step(0, van.Empty, registrationMessage(r, "")); err != nil {
			t.Fatal(err)
		}
	}
	if o := actionsOf(m); !o.ready {
		t.Fatal("the cluster has not formed")
	}
	beats(t, m, 0)
	return m
}

// beats steps m with a heartbeat of each node of formed.
func beats(t *testing.T, m *Machine, now time.Duration) {
	t.Helper()
	for _, id := range []int{8, 9} {
		var h van.Meta
		h.Reset()
		h.Control.Cmd, h.Key = van.Heartbeat, heartbeatKey(m.table.tableGeneration, time.Second)
		h.Control.Nodes = []van.Node{*m.table.record(id)}
		h.SetIncarnations(uint32(200+id), m.table.own.Incarnation)
		if err := m.Step(now, id, &h); err != nil {
			t.Fatal(err)
		}
	}
	m.Tick(now)
	m.Take()
}

// tableOf is the node table that a scheduler of C++ StepMesh would send.
func tableOf(nodes ...van.Node) *van.Meta {
	var m van.Meta
	m.Reset()
	m.Control.Cmd, m.Control.Nodes = van.AddNode, nodes
	return &m
}

// TestTableOfAnUnknownPeer: a node that waits for its scheduler takes no table from a process that calls itself ps1 (A2).
func TestTableOfAnUnknownPeer(t *testing.T) {
	table := func(m *Machine) *van.Meta {
		own := m.table.self
		own.ID, own.Endpoint = 9, nil
		return tableOf(withID(rec(van.Server, "10.6.6.6", 666, -1), 8), own, withID(rec(van.Scheduler, "10.0.0.99", 8123, -1), 1))
	}
	hello := func(m *Machine) *van.Meta {
		var h van.Meta
		h.Reset()
		h.Control.Cmd, h.Body = van.Heartbeat, notice{verb: verbWaiting, text: "it has registered"}.body()
		h.SetIncarnations(55, m.table.own.Incarnation)
		return &h
	}
	for _, x := range []struct {
		name    string
		cluster uint32
		foreign bool
		steps   func(m *Machine) // then 3 s pass
		want    bool
	}{
		{"from another host", 0, false, func(m *Machine) { m.PeerBack(0, 1); m.StepFrom(2e9, 1, van.OriginOther, table(m)) }, false},
		{"from this host, before there is a scheduler", 0, false, func(m *Machine) { m.StepFrom(0, 1, van.OriginHost, table(m)) }, false},
		{"long before there is a scheduler", 0, false, func(m *Machine) {
			m.StepFrom(0, 1, van.OriginHost, table(m))
			m.Tick(1500 * time.Millisecond)
			m.PeerBack(1600*time.Millisecond, 1)
		}, false},
		{"before a scheduler of this library answers", 0, false, func(m *Machine) {
			m.PeerBack(0, 1)
			m.StepFrom(0, 1, van.OriginHost, table(m))
			m.StepFrom(1e6, 1, van.OriginDialed, hello(m))
		}, false},
		{"after a scheduler of this library has answered", 0, false, func(m *Machine) {
			m.PeerBack(0, 1)
			m.StepFrom(1e6, 1, van.OriginDialed, hello(m))
			m.StepFrom(2e9, 1, van.OriginHost, table(m))
		}, false},
		{"with a cluster id", 7, false, func(m *Machine) { m.PeerBack(0, 1); m.StepFrom(2e9, 1, van.OriginHost, table(m)) }, false},
		{"with a cluster id, of a transport that knows no hosts", 7, false, func(m *Machine) { m.PeerBack(0, 1); m.StepFrom(2e9, 1, van.OriginUnknown, table(m)) }, false},
		{"of a transport that knows no hosts, before there is a scheduler", 0, false, func(m *Machine) { m.StepFrom(0, 1, van.OriginUnknown, table(m)) }, false},
		{"of a transport that knows no hosts, before a scheduler of this library answers", 0, false, func(m *Machine) {
			m.PeerBack(0, 1)
			m.StepFrom(0, 1, van.OriginUnknown, table(m))
			m.StepFrom(1e6, 1, van.OriginDialed, hello(m))
		}, false},
		{"of a transport that knows no hosts, after a scheduler of this library has answered", 0, false, func(m *Machine) {
			m.PeerBack(0, 1)
			m.StepFrom(1e6, 1, van.OriginDialed, hello(m))
			m.StepFrom(2e9, 1, van.OriginUnknown, table(m))
		}, false},
		{"with STEPAF_FOREIGN, before there is a scheduler", 0, true, func(m *Machine) { m.StepFrom(0, 1, van.OriginOther, table(m)) }, false},
		{"for another process", 0, false, func(m *Machine) {
			x := table(m)
			x.SetIncarnations(55, 56)
			m.PeerBack(0, 1)
			m.StepFrom(2e9, 1, van.OriginHost, x)
		}, false},

		{"of the original's scheduler", 0, false, func(m *Machine) { m.PeerBack(0, 1); m.StepFrom(2e9, 1, van.OriginHost, table(m)) }, true},
		{"of the original's scheduler at once", 0, false, func(m *Machine) { m.PeerBack(0, 1); m.StepFrom(1e6, 1, van.OriginHost, table(m)) }, true},
		{"of the original's scheduler, before the transport says that it is there", 0, false, func(m *Machine) {
			m.StepFrom(0, 1, van.OriginHost, table(m))
			m.PeerBack(1e8, 1)
		}, true},
		{"of a transport that knows no hosts", 0, false, func(m *Machine) { m.PeerBack(0, 1); m.StepFrom(2e9, 1, van.OriginUnknown, table(m)) }, true},
		{"over the connection to the scheduler", 0, false, func(m *Machine) { m.StepFrom(0, 1, van.OriginDialed, table(m)) }, true},
		{"of the original's scheduler, with a cluster id and STEPAF_FOREIGN", 7, true, func(m *Machine) { m.PeerBack(0, 1); m.StepFrom(2e9, 1, van.OriginOther, table(m)) }, true},
	} {
		t.Run(x.name, func(t *testing.T) {
			cfg := attackConfig(van.Worker, x.cluster, 4009)
			cfg.Foreign = x.foreign
			m := started(t, cfg)
			x.steps(m)
			for now := 2 * time.Second; now <= 5*time.Second; now += time.Second / 4 {
				m.Tick(now)
			}
			if o := actionsOf(m); o.ready != x.want {
				t.Errorf("ready: %t, want %t; connected to %v", o.ready, x.want, o.connects)
			}
		})
	}
}

// TestRecordsAfterAPendingTable: a node that postpones its decision on the table of a C++ scheduler loses neither the
// table nor the records that the scheduler sends meanwhile about processes that replace others.
func TestRecordsAfterAPendingTable(t *testing.T) {
	sched := withID(rec(van.Scheduler, "10.0.0.99", 8123, -1), 1)
	replacement := func(host string) *van.Meta {
		r := withID(rec(van.Worker, host, 4010, -1), 9)
		r.IsRecovery = true
		return tableOf(r)
	}
	table := func(m *Machine, worker string) *van.Meta {
		own := m.table.self
		own.ID, own.Endpoint = 8, nil
		return tableOf(own, withID(rec(van.Worker, worker, 4009, -1), 9), sched)
	}
	for _, x := range []struct {
		name  string
		steps func(m *Machine, take func(at time.Duration, msg *van.Meta))
		want  string // address of worker 9; "" if the node is not ready
	}{
		{"a record", func(m *Machine, take func(time.Duration, *van.Meta)) {
			m.PeerBack(0, 1)
			take(1e6, table(m, "10.0.0.1"))
			take(2e6, replacement("10.0.0.3"))
			m.Tick(foreignDelay)
		}, "10.0.0.3:4010"},
		{"two records", func(m *Machine, take func(time.Duration, *van.Meta)) {
			m.PeerBack(0, 1)
			take(1e6, table(m, "10.0.0.1"))
			take(2e6, replacement("10.0.0.3"))
			take(3e6, replacement("10.0.0.4"))
			m.Tick(foreignDelay)
		}, "10.0.0.4:4010"},
		{"a record when the decision is due", func(m *Machine, take func(time.Duration, *van.Meta)) {
			m.PeerBack(0, 1)
			take(1e6, table(m, "10.0.0.1"))
			take(foreignDelay, replacement("10.0.0.3"))
		}, "10.0.0.3:4010"},
		{"before the transport reports the connection", func(m *Machine, take func(time.Duration, *van.Meta)) {
			take(0, table(m, "10.0.0.1"))
			take(1e6, replacement("10.0.0.3"))
			m.PeerBack(1e8, 1)
			m.Tick(1e8 + foreignDelay)
		}, "10.0.0.3:4010"},
		{"a later table", func(m *Machine, take func(time.Duration, *van.Meta)) {
			take(0, table(m, "10.6.6.6"))
			take(1e6, replacement("10.6.6.6"))
			m.PeerBack(5e8, 1)
			take(6e8, table(m, "10.0.0.1"))
			m.Tick(5e8 + foreignDelay)
		}, "10.0.0.1:4009"},
		{"a table long before the connection", func(m *Machine, take func(time.Duration, *van.Meta)) {
			take(0, table(m, "10.6.6.6"))
			take(9e8, replacement("10.6.6.6"))
			m.PeerBack(11e8, 1)
			m.Tick(11e8 + foreignDelay)
		}, ""},
	} {
		t.Run(x.name, func(t *testing.T) {
			m := started(t, attackConfig(van.Server, 0, 4008))
			x.steps(m, func(at time.Duration, msg *van.Meta) {
				if err := m.StepFrom(at, 1, van.OriginHost, msg); err != nil {
					t.Fatal(err)
				}
			})
			if m.Ready() != (x.want != "") {
				t.Fatalf("ready: %t, %v", m.Ready(), actionsOf(m).warnings)
			}
			if x.want == "" {
				return
			}
			if got := m.table.record(9).Addr(); got != x.want {
				t.Errorf("worker 0 is at %s, want %s", got, x.want)
			}
			if c := actionsOf(m).connects; len(c) == 0 || c[len(c)-1].ID != 1 && c[len(c)-1].Node.Addr() != x.want {
				t.Errorf("connected to %v, want %s", c, x.want)
			}
		})
	}
}

// TestPendingRecordsAreFew: records of unknown peers do not fill the memory of a node that postpones its decision.
func TestPendingRecordsAreFew(t *testing.T) {
	m := started(t, attackConfig(van.Worker, 0, 4009))
	var err error
	for i := range 2 * maxPendingMessages {
		err = m.StepFrom(0, 1, van.OriginHost, tableOf(withID(rec(van.Server, "10.6.6.6", 1+i, -1), 8)))
	}
	if n := len(m.node.pendingTables); n != maxPendingMessages || err == nil {
		t.Errorf("%d messages are pending, want %d; the last one: %v", n, maxPendingMessages, err)
	}
	own := m.table.self
	own.ID, own.Endpoint = 9, nil
	m.StepFrom(0, 1, van.OriginHost, tableOf(withID(rec(van.Server, "10.0.0.1", 4008, -1), 8), own, withID(rec(van.Scheduler, "10.0.0.99", 8123, -1), 1)))
	m.PeerBack(1, 1)
	m.Tick(1 + foreignDelay)
	if !m.Ready() {
		t.Error("the table behind them is lost")
	}
}

// TestNoticesOfAnUnknownPeer: no notice that a process on another host sends as a C++ scheduler reaches a node of its
// cluster.
func TestNoticesOfAnUnknownPeer(t *testing.T) {
	m := started(t, attackConfig(van.Worker, 0, 4009))
	own := m.table.self
	own.ID, own.Endpoint = 9, nil
	server := withID(rec(van.Server, "10.0.0.1", 4008, -1), 8)
	if err := m.Step(0, 1, tableOf(server, own, withID(rec(van.Scheduler, "10.0.0.99", 8123, -1), 1))); err != nil || !m.Ready() {
		t.Fatalf("ready: %t, %v", m.Ready(), err)
	}
	m.Take()
	moved := withID(rec(van.Server, "10.6.6.6", 666, -1), 8)
	moved.IsRecovery = true
	if err := m.StepFrom(1, 1, van.OriginOther, tableOf(moved)); err == nil {
		t.Error("a record from another host is taken")
	}
	if o := actionsOf(m); len(o.connects)+len(o.replaced) > 0 {
		t.Errorf("a stranger's record led to %+v", o)
	}
	if err := m.StepFrom(2, 1, van.OriginHost, tableOf(moved)); err != nil {
		t.Error(err)
	}
	if o := actionsOf(m); len(o.replaced) != 1 {
		t.Errorf("the scheduler's record led to %+v", o)
	}
}

// TestUnprovedNodesReturn: a waiting scheduler resumes no cluster that it knows from heartbeats only: a node must prove
// that it receives messages at its address (A3).
func TestUnprovedNodesReturn(t *testing.T) {
	m := started(t, attackConfig(van.Scheduler, 0, 8123))
	beat := func(now time.Duration, n van.Node, body string) actions {
		var h van.Meta
		h.Reset()
		h.Control.Cmd, h.Control.Nodes, h.Body = van.Heartbeat, []van.Node{n}, []byte(body)
		h.SetIncarnations(incarnationOf(&n), 1234)
		if err := m.Step(now, n.ID, &h); err != nil {
			t.Fatal(err)
		}
		m.Tick(now)
		return actionsOf(m)
	}
	nodes := []van.Node{withID(member(van.Server, "10.6.6.6", 1, 61, 666), 8), withID(member(van.Worker, "10.6.6.6", 2, 62, 666), 9)}
	var proof string
	for i := range 10 {
		for _, n := range nodes {
			o := beat(time.Duration(i)*time.Second, n, fmt.Sprintf("stepaf/1 rejoin %016x", i))
			if o.ready || len(o.dials) != 1 || o.dials[0].Node.Addr() != n.Addr() || len(o.sends) != 1 {
				t.Fatalf("heartbeat %d of %s: %+v; want one answer to its address", i, n.Addr(), o)
			}
			proof = string(o.sends[0].Meta.Body)
		}
	}
	if r := m.Report(10 * time.Second); r.Returned != "" {
		t.Errorf("the scheduler reports %q", r.Returned)
	}
	// The proof of one node is of no use to the other.
	if o := beat(11*time.Second, nodes[0], proof); o.ready || m.Report(11*time.Second).Returned != "" {
		t.Errorf("the proof of another node is taken: %+v", o)
	}
	for i, n := range nodes {
		if o := beat(12*time.Second, n, "stepaf/1 rejoin "+m.table.addressProof(&n)); o.ready != (i == 1) {
			t.Errorf("node %d with its proof: ready %t", i, o.ready)
		}
	}
}

// TestRecordsWithoutIdentity: with a cluster id a record without a cluster is refused, unless C++ StepMesh nodes are
// expected (A1, A4).
func TestRecordsWithoutIdentity(t *testing.T) {
	for _, x := range []struct {
		cluster          uint32
		foreign, formed_ bool
		want             bool
	}{{0, false, false, true}, {7, false, false, false}, {7, true, false, true}, {0, false, true, true}, {7, false, true, false}, {7, true, true, true}} {
		cfg := attackConfig(van.Scheduler, x.cluster, 8123)
		cfg.Foreign = x.foreign
		var m *Machine
		if x.formed_ {
			m = formed(t, cfg, x.cluster)
			m.PeerLost(1e9, 9, nil)
		} else {
			m = started(t, cfg)
			if err := m.Step(0, van.Empty, registrationMessage(member(van.Server, "10.0.0.1", 4008, 208, x.cluster), "")); err != nil {
				t.Fatal(err)
			}
		}
		m.Take()
		if err := m.Step(2e9, van.Empty, registrationMessage(rec(van.Worker, "10.6.6.6", 666, -1), "")); err != nil {
			t.Fatal(err)
		}
		o := actionsOf(m)
		if got := o.ready || len(o.replaced) > 0; got != x.want {
			t.Errorf("%+v: accepted %t", x, got)
		}
		if !x.want && (len(o.warnings) != 1 || !strings.Contains(o.warnings[0], "STEPAF_FOREIGN=1")) {
			t.Errorf("%+v: warnings %q", x, o.warnings)
		}
	}
}

// TestRefusalsNameNoMember: a refusal has no address of a member, nor the name of the cluster (A1).
func TestRefusalsNameNoMember(t *testing.T) {
	const cluster = 0xabcdef12
	told := func(t *testing.T, m *Machine) string {
		m.Tick(m.life.started + time.Minute)
		var all strings.Builder
		o := actionsOf(m)
		for _, s := range o.sends {
			if slices.ContainsFunc(o.dials, func(c Connect) bool { return c.ID == s.To && c.Node.Hostname == "10.6.6.6" }) {
				all.Write(s.Meta.Body)
				for _, n := range s.Meta.Control.Nodes {
					fmt.Fprintf(&all, "%s %x", n.Addr(), n.Endpoint)
				}
			}
		}
		text := all.String()
		if text == "" {
			t.Error("the stranger is told nothing")
		}
		for _, secret := range []string{"10.0.0.1", "abcdef12", "12efcdab"} {
			if strings.Contains(text, secret) {
				t.Errorf("the stranger is told %q", text)
			}
		}
		return text
	}
	question := func(q string) *van.Meta {
		var m van.Meta
		m.Reset()
		m.Control.Cmd, m.Body = van.Heartbeat, Question(66, "10.6.6.6:666", q)
		return &m
	}
	ask := func(m *Machine, msgs ...*van.Meta) {
		for _, x := range msgs {
			_ = m.Step(30*time.Second, van.Empty, x)
		}
	}
	ranked := func(aux int) van.Node {
		n := member(van.Worker, "10.6.6.6", 666, 66, cluster)
		n.AuxID = aux
		return n
	}
	for name, msgs := range map[string][]*van.Meta{
		"a place":       {registrationMessage(ranked(-1), "")},
		"a rank":        {registrationMessage(ranked(0), "")},
		"another rank":  {registrationMessage(ranked(5), "")},
		"another name":  {registrationMessage(member(van.Worker, "10.6.6.6", 666, 66, 3), "")},
		"a scheduler":   {registrationMessage(member(van.Scheduler, "10.6.6.6", 666, 66, cluster), "")},
		"the policies":  {question("list")},
		"a policy":      {question("set peer=8,rate=1000000")},
		"nonsense":      {question("what")},
		"a wrong state": {question("set x")},
	} {
		t.Run("formed/"+name, func(t *testing.T) {
			m := formed(t, attackConfig(van.Scheduler, cluster, 8123), cluster)
			ask(m, msgs...)
			told(t, m)
		})
		if strings.HasPrefix(name, "another rank") || name == "a place" || name == "a rank" {
			continue // while nodes are missing these are accepted, or have no rival
		}
		t.Run("waiting/"+name, func(t *testing.T) {
			m := started(t, attackConfig(van.Scheduler, cluster, 8123))
			if err := m.Step(0, van.Empty, registrationMessage(member(van.Worker, "10.0.0.1", 4009, 209, cluster), "")); err != nil {
				t.Fatal(err)
			}
			m.Take()
			ask(m, msgs...)
			told(t, m)
		})
	}
	t.Run("waiting/is accepted", func(t *testing.T) { // all notices to it until the scheduler times out
		cfg := attackConfig(van.Scheduler, cluster, 8123)
		cfg.NumWorkers, cfg.StartTimeout, cfg.CanProbe = 4, 30*time.Second, true
		m := started(t, cfg)
		register := func(now time.Duration, r van.Node) {
			if err := m.Step(now, van.Empty, registrationMessage(r, "")); err != nil {
				t.Fatal(err)
			}
		}
		register(0, member(van.Worker, "10.0.0.1", 4009, 209, cluster))
		vanishes := member(van.Worker, "10.0.0.1", 4010, 210, cluster)
		register(0, vanishes)
		register(0, member(van.Worker, "10.0.0.1", 4011, 211, 3)) // is refused
		register(0, ranked(-1))
		seen := func(o Output) (text string) {
			switch o := o.(type) {
			case Connect:
				if o.Node.Addr() == vanishes.Addr() {
					m.PeerLost(6*time.Second, o.ID, van.ErrPeerLost)
				}
			case Probe:
				m.Probed(6*time.Second, &o.Node, "10.0.0.99", syscall.ETIMEDOUT)
			case Reply:
				if o.Incarnation == 66 {
					text = string(o.Meta.Body)
				}
			case Send:
				text = string(o.Meta.Body) // all waiting processes receive the same text
			}
			return text
		}
		heard := map[string]bool{} // the verbs of its notices
		for now := time.Duration(0); now <= 31*time.Second; now += time.Second / 2 {
			m.Tick(now)
			for _, o := range m.Take() {
				text := seen(o)
				if strings.Contains(text, "10.0.0.1:") && !strings.HasPrefix(text, "stepaf/1 error worker 10.0.0.1:4011") { // the refusal has the refused process's own address
					t.Errorf("%s: the stranger is told %q", now, text)
				}
				for _, want := range []string{"has registered; ", "error start-up timed out on the scheduler", "present: worker", "disconnected: 1", "refused: 1", "not reached: "} {
					heard[want] = heard[want] || strings.Contains(text, want)
				}
			}
		}
		for want, is := range heard {
			if !is {
				t.Errorf("the stranger is not told %q", want)
			}
		}
	})
	t.Run("heartbeat of another cluster", func(t *testing.T) {
		m := formed(t, attackConfig(van.Scheduler, cluster, 8123), cluster)
		var h van.Meta
		h.Reset()
		h.Control.Cmd, h.Control.Nodes = van.Heartbeat, []van.Node{withID(member(van.Worker, "10.6.6.6", 666, 66, 3), 9)}
		h.SetIncarnations(66, 1)
		_ = m.Step(30*time.Second, 9, &h)
		told(t, m)
	})
}

// TestPlaceOfAStalledMember: a registration under the address of a member that stalls replaces it only after the
// heartbeat timeout, or if the process proves that it listens there (A6). Another spelling of the address does not
// help (A12).
func TestPlaceOfAStalledMember(t *testing.T) {
	for _, host := range []string{"10.0.0.1", "::ffff:10.0.0.1"} {
		for _, incarnation := range []uint32{0, 66} {
			t.Run(fmt.Sprintf("%s/%d", host, incarnation), func(t *testing.T) {
				m := formed(t, attackConfig(van.Scheduler, 0, 8123), 0)
				s := member(van.Worker, host, 4009, incarnation, 0)
				for now := 3 * time.Second; now < 10*time.Second; now += time.Second / 4 { // the member stalls from 0 on
					if now == 4*time.Second || now == 8*time.Second {
						if err := m.Step(now, van.Empty, registrationMessage(s, "stepaf/1 register 0123456789abcdef")); err != nil {
							t.Fatal(err)
						}
					}
					m.Tick(now)
					if o := actionsOf(m); len(o.dead)+len(o.replaced) > 0 {
						t.Fatalf("after %s: %+v", now, o)
					}
				}
				beats(t, m, 9900*time.Millisecond)
				m.Tick(10 * time.Second)
				if o := actionsOf(m); len(o.dead)+len(o.replaced) > 0 {
					t.Errorf("the member was heard: %+v", o)
				}
			})
		}
	}
	t.Run("with the proof", func(t *testing.T) { // a restart that no node has noticed
		m := formed(t, attackConfig(van.Scheduler, 0, 8123), 0)
		s := member(van.Worker, "10.0.0.1", 4009, 66, 0)
		_ = m.Step(4*time.Second, van.Empty, registrationMessage(s, ""))
		o := actionsOf(m)
		if len(o.dials) != 1 || o.dials[0].Node.Addr() != "10.0.0.1:4009" || len(o.sends) != 1 || len(o.replaced) > 0 {
			t.Fatalf("%+v: want the proof sent to the address", o)
		}
		_ = m.Step(4*time.Second, van.Empty, registrationMessage(s, string(o.sends[0].Meta.Body)))
		if o := actionsOf(m); len(o.replaced) != 1 {
			t.Errorf("with its proof: %+v", o)
		}
		// The replaced process is notified, if it still runs.
		var h van.Meta
		h.Reset()
		h.Control.Cmd, h.Control.Nodes = van.Heartbeat, []van.Node{withID(member(van.Worker, "10.0.0.1", 4009, 209, 5), 9)}
		h.SetIncarnations(209, m.table.own.Incarnation)
		_ = m.Step(5*time.Second, 9, &h)
		if o := actionsOf(m); len(o.dials) != 1 || incarnationOf(&o.dials[0].Node) != 209 || len(o.sends) != 1 || !strings.Contains(string(o.sends[0].Meta.Body), "declared dead") {
			t.Errorf("the process that was replaced is told: %+v", o)
		}
	})
	t.Run("without heartbeats", func(t *testing.T) {
		cfg := attackConfig(van.Scheduler, 0, 8123)
		cfg.HeartbeatInterval, cfg.HeartbeatTimeout = 0, 0
		m := formed(t, cfg, 0)
		_ = m.Step(4*time.Second, van.Empty, registrationMessage(rec(van.Worker, "10.0.0.1", 4009, -1), ""))
		m.Tick(4 * time.Second)
		if o := actionsOf(m); len(o.dead)+len(o.replaced) > 0 {
			t.Errorf("at once: %+v", o)
		}
		m.Tick(40 * time.Second)
		if o := actionsOf(m); len(o.dead)+len(o.replaced) > 0 || len(o.warnings) != 1 || !strings.Contains(o.warnings[0], "the connection to it stands") {
			t.Errorf("while the connection stands: %+v", o)
		}
	})
}

// TestPlaceOfADeadMember: a process that does not exist replaces no dead member.
func TestPlaceOfADeadMember(t *testing.T) {
	for _, addr := range []string{"10.6.6.6", "10.0.0.1"} {
		m := formed(t, attackConfig(van.Scheduler, 0, 8123), 0)
		m.PeerLost(1e9, 9, nil)
		m.Take()
		s := member(van.Worker, addr, 4009, 66, 0)
		for i := range 5 {
			_ = m.Step(time.Duration(2+i)*time.Second, van.Empty, registrationMessage(s, "stepaf/1 register 0123456789abcdef"))
			m.Tick(time.Duration(2+i) * time.Second)
			if o := actionsOf(m); len(o.replaced) > 0 || len(o.dials) != 1 || o.dials[0].Node.Hostname != addr {
				t.Fatalf("registration %d: %+v; want the proof sent to its address", i, o)
			}
		}
		_ = m.Step(8*time.Second, van.Empty, registrationMessage(s, "stepaf/1 register "+m.table.addressProof(&s)))
		if o := actionsOf(m); len(o.replaced) != 1 {
			t.Errorf("with its proof: %+v", o)
		}
	}
}

// TestChallengesAreFew: however many processes register, few proofs are sent in each second.
func TestChallengesAreFew(t *testing.T) {
	m := formed(t, attackConfig(van.Scheduler, 0, 8123), 0)
	m.PeerLost(1e9, 9, nil)
	m.Take()
	for _, now := range []time.Duration{2e9, 3e9, 60e9} {
		for i := range 1000 {
			_ = m.Step(now, van.Empty, registrationMessage(member(van.Worker, "10.6.6.6", 1+i, uint32(1000+i), 0), ""))
		}
		if o := actionsOf(m); len(o.dials) != 2+extraChallenges || len(o.replaced) > 0 {
			t.Errorf("at %s: %d connections, want %d", now, len(o.dials), 2+extraChallenges)
		}
	}
}

// TestPlaceOfAWaitingNode: before the cluster has formed, such a registration does not displace a registered node
// either.
func TestPlaceOfAWaitingNode(t *testing.T) {
	m := started(t, attackConfig(van.Scheduler, 0, 8123))
	_ = m.Step(0, van.Empty, registrationMessage(member(van.Worker, "10.0.0.1", 4009, 209, 0), ""))
	_ = m.Step(1, van.Empty, registrationMessage(member(van.Worker, "10.0.0.1", 4009, 66, 0), ""))
	if r := m.Report(1); len(r.Present) != 1 || incarnationOf(&r.Present[0]) != 209 {
		t.Errorf("present: %+v", r.Present)
	}
	n := member(van.Worker, "10.0.0.1", 4009, 66, 0)
	_ = m.Step(2, van.Empty, registrationMessage(n, "stepaf/1 register "+m.table.addressProof(&n)))
	if r := m.Report(2); len(r.Present) != 1 || incarnationOf(&r.Present[0]) != 66 {
		t.Errorf("present, after the proof: %+v", r.Present)
	}
}

// TestAddressesOfNoHost: an address that is not that of one host is refused, in a record and in a question (A12).
func TestAddressesOfNoHost(t *testing.T) {
	for _, host := range []string{"0.0.0.0", "::", "::ffff:0.0.0.0", "127.1", "0x0a000001", "255.255.255.255", "224.0.0.1"} {
		m := formed(t, attackConfig(van.Scheduler, 0, 8123), 0)
		for what, msg := range map[string]*van.Meta{
			"a registration": registrationMessage(member(van.Worker, host, 4009, 66, 0), ""),
			"a question":     {Body: Question(66, "["+host+"]:4009", "list")},
		} {
			if what == "a question" {
				msg.Control.Cmd = van.Heartbeat
			}
			if err := m.Step(1e9, van.Empty, msg); err == nil {
				t.Errorf("%s with %s: no error", what, host)
			}
			if o := actionsOf(m); len(o.dials)+len(o.connects)+len(o.sends)+len(o.dead) > 0 {
				t.Errorf("%s with %s: %+v", what, host, o)
			}
		}
	}
	m := formed(t, attackConfig(van.Scheduler, 0, 8123), 0) // a name, whose address could not be proved
	m.PeerLost(1e9, 9, nil)
	m.Take()
	if err := m.Step(2e9, van.Empty, registrationMessage(member(van.Worker, "somewhere", 4009, 66, 0), "")); err == nil {
		t.Error("a registration with a name: no error")
	}
	if o := actionsOf(m); len(o.replaced) > 0 {
		t.Errorf("a registration with a name: %+v", o)
	}
	cfg := attackConfig(van.Worker, 0, 4009)
	cfg.Self.Hostname = "0.0.0.0"
	if _, err := New(cfg); err == nil {
		t.Error("a node that advertises 0.0.0.0 starts")
	}
}

// TestClaimOnASilentMember: a registration under the address of a member that has been silent for too long does not
// keep the member from returning (found by the simulation's attacker, seed 229).
func TestClaimOnASilentMember(t *testing.T) {
	m := formed(t, attackConfig(van.Scheduler, 0, 8123), 0)
	m.Tick(3 * time.Second)
	_ = m.Step(5*time.Second, van.Empty, registrationMessage(member(van.Worker, "10.0.0.1", 4009, 66, 0), ""))
	for now := 5 * time.Second; now <= 12*time.Second; now += time.Second / 4 {
		m.Tick(now)
	}
	if !m.isDead(9) {
		t.Fatal("the member is not dead yet")
	}
	beats(t, m, 13*time.Second)
	if m.isDead(9) || m.isDead(8) {
		t.Error("the member sends heartbeats, and is dead")
	}
}
