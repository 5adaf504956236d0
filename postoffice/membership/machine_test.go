package membership

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

func testConfig(role van.Role, workers, servers int, addr string, rank int) Config {
	cfg := Config{Role: role, NumWorkers: workers, NumServers: servers, GroupSize: 1,
		Scheduler: van.Node{Hostname: "10.0.0.99", Port: 8123}}
	if role != van.Scheduler {
		host, port, err := hostPort(addr)
		if err != nil {
			panic(err)
		}
		cfg.Self = van.Node{Hostname: host, Port: port, AuxID: rank}
	}
	return cfg
}

func TestConfigErrors(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"role", func(c *Config) { c.Role = van.Joint }, "role joint"},
		{"no workers", func(c *Config) { c.NumWorkers = 0 }, "DMLC_NUM_WORKER=0"},
		{"too many servers", func(c *Config) { c.NumServers = 16380 }, "DMLC_NUM_SERVER=16380: want 1 to 16379"},
		{"too many instances", func(c *Config) { c.NumServers, c.GroupSize, c.Self.AuxID = 8190, 4, 0 }, "DMLC_NUM_SERVER=8190: want 1 to 4094"},
		{"group size", func(c *Config) { c.GroupSize = -1 }, "DMLC_GROUP_SIZE=-1"},
		{"large group size", func(c *Config) { c.GroupSize = 16380 }, "DMLC_GROUP_SIZE=16380: want 1 to 16379"},
		{"own host", func(c *Config) { c.Self.Hostname = "" }, "own address"},
		{"long host", func(c *Config) { c.Self.Hostname = strings.Repeat("a", 64) }, "1 to 63 bytes"},
		{"host with a zero", func(c *Config) { c.Self.Hostname = "a\x00b" }, "printable"},
		{"own port", func(c *Config) { c.Self.Port = 0 }, "port 0"},
		{"scheduler", func(c *Config) { c.Scheduler.Port = 65536 }, "DMLC_PS_ROOT_PORT"},
		{"rank", func(c *Config) { c.Self.AuxID = 2 }, "want 0 to 1, or -1 for any (DMLC_NUM_WORKER=2 x DMLC_GROUP_SIZE=1)"},
		{"rank below -1", func(c *Config) { c.Self.AuxID = -2 }, "rank -2"},
		{"no rank in groups", func(c *Config) { c.Self.AuxID, c.GroupSize = -1, 2 }, "no preferred rank"},
		{"timeout", func(c *Config) { c.HeartbeatTimeout = -1 }, "HeartbeatTimeout"},
		{"hosts", func(c *Config) { c.OrderedHosts = []string{"a", "a:1"} }, "BYTEPS_ORDERED_HOSTS"},
	} {
		cfg := testConfig(van.Worker, 2, 2, "10.0.0.1:4000", 0)
		c.change(&cfg)
		m, err := New(cfg)
		if m != nil || !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want ErrInvalid with %q", c.name, err, c.want)
		}
	}
	if _, err := New(testConfig(van.Worker, 2, 2, "10.0.0.1:4000", 1)); err != nil {
		t.Error(err)
	}
	cfg := testConfig(van.Worker, 1, 1, "10.0.0.1:4000", 16378)
	cfg.GroupSize = 16379
	if _, err := New(cfg); err != nil {
		t.Errorf("as many as there can be in one group: %v", err)
	}
}

func TestBeforeStart(t *testing.T) {
	m, err := New(testConfig(van.Worker, 1, 1, "10.0.0.1:4000", 0))
	if err != nil {
		t.Fatal(err)
	}
	m.Tick(time.Hour)
	m.PeerLost(0, 1, nil)
	m.PeerBack(0, 1)
	m.CancelBarrier(1)
	if _, ok := m.NextTick(); ok {
		t.Error("a tick is wanted before Start")
	}
	var meta van.Meta
	meta.Reset()
	if err := m.Step(0, 1, &meta); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("Step: %v", err)
	}
	if _, err := m.Barrier(0, 0, van.AllNodes, true); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("Barrier: %v", err)
	}
	if out := m.Take(); len(out) != 0 {
		t.Errorf("output before Start: %v", out)
	}
	if m.ID() != van.Empty || m.Rank() != -1 || m.Ready() {
		t.Errorf("id %d rank %d ready %t", m.ID(), m.Rank(), m.Ready())
	}
	m.Start(0)
	if n := len(m.Take()); n != 2 {
		t.Errorf("%d outputs of Start, want Connect and Send", n)
	}
	m.Start(0)
	if n := len(m.Take()); n != 0 {
		t.Errorf("%d outputs of a second Start", n)
	}
}

func TestBarrierErrors(t *testing.T) {
	w := startWorld(t, 1, 2)
	for _, c := range []struct {
		node     string
		customer int
		group    int
		ok       bool
	}{{"w0", 0, 0, false}, {"w0", 0, -4, false}, {"w0", 0, 2, false}, {"w0", 0, 3, false}, {"w0", 0, 8, false},
		{"w0", 0, 13, false}, {"w0", -1, 6, false}, {"w0", 1 << 40, 6, false}, {"w0", 0, 9, true}, {"w0", 0, 4, true},
		{"s0", 0, 4, false}, {"s0", 0, 8, true}, {"sched", 0, 6, false}, {"sched", 0, 1, true}} {
		n := w.node(c.node)
		number, err := n.m.Barrier(w.now, c.customer, c.group, true)
		if c.ok != (err == nil) || err != nil && !errors.Is(err, van.ErrInvalid) {
			t.Errorf("%s group %d: %v", c.node, c.group, err)
		}
		out := n.m.Take()
		if c.ok && (len(out) != 1 || out[0] != BarrierDone{number}) || !c.ok && len(out) != 0 {
			t.Errorf("%s group %d: output %v", c.node, c.group, out)
		}
	}
}

// startWorld makes a complete cluster: sched, w0.., s0...
func startWorld(t testing.TB, workers, servers int) *world {
	t.Helper()
	return startWorldOf(t, workers, servers, func(c Config) Config { return c })
}

func startWorldOf(t testing.TB, workers, servers int, change func(Config) Config) *world {
	t.Helper()
	w := newWorld(t)
	w.log = func(string, ...any) {}
	must := func(name string, cfg Config) {
		cfg = change(cfg)
		if _, err := w.add(name, cfg); err != nil {
			t.Fatal(err)
		}
	}
	must("sched", testConfig(van.Scheduler, workers, servers, "", 0))
	for r := range workers {
		must(fmt.Sprintf("w%d", r), testConfig(van.Worker, workers, servers, fmt.Sprintf("10.1.0.1:%d", 1000+r), r))
	}
	for r := range servers {
		must(fmt.Sprintf("s%d", r), testConfig(van.Server, workers, servers, fmt.Sprintf("10.2.0.1:%d", 1000+r), r))
	}
	w.deliver(1<<30, nil)
	for _, n := range w.nodes {
		if !n.m.Ready() {
			t.Fatalf("%s is not ready: %s", n.name, n.m.Report(w.now))
		}
	}
	return w
}

func TestTimestampsLeaveOutEmpty(t *testing.T) {
	m, err := New(testConfig(van.Worker, 1, 1, "10.0.0.1:4000", 0))
	if err != nil {
		t.Fatal(err)
	}
	m.stamp = van.Empty - 1
	if a, b := m.outputs.nextStamp(), m.outputs.nextStamp(); a != van.Empty-1 || b != van.Empty+1 {
		t.Errorf("timestamps %d, %d; want 32766, 32768", a, b)
	}
	m.stamp = 1<<31 - 1
	if a, b := m.outputs.nextStamp(), m.outputs.nextStamp(); a != 1<<31-1 || b != 0 {
		t.Errorf("timestamps %d, %d; want the largest, then 0", a, b)
	}
}

// TestTwoCustomers registers one process twice, as a second customer of C++ StepMesh does: it fills two places, has
// one id, and gets one table and one release.
func TestTwoCustomers(t *testing.T) {
	m, err := New(testConfig(van.Scheduler, 2, 1, "", 0))
	if err != nil {
		t.Fatal(err)
	}
	m.Start(0)
	step := func(from int, cmd van.Command, customer int, nodes ...van.Node) {
		t.Helper()
		var meta van.Meta
		meta.Reset()
		meta.Timestamp, meta.Control.Cmd, meta.Control.Nodes = 0, cmd, nodes
		meta.Request, meta.CustomerID, meta.Control.BarrierGroup = cmd != van.AddNode, int32(customer), van.WorkerGroup
		if err := m.Step(0, from, &meta); err != nil {
			t.Fatal(err)
		}
	}
	a, b := rec(van.Worker, "a", 1, -1), rec(van.Worker, "a", 1, -1)
	b.CustomerID = 1
	step(van.Empty, van.AddNode, 0, a)
	step(van.Empty, van.AddNode, 0, b)
	step(van.Empty, van.AddNode, 0, rec(van.Server, "b", 1, -1))
	if got := sends(m); got != "9 8" {
		t.Errorf("tables to %s, want 9 8", got)
	}
	if got := fmt.Sprint(m.Members(van.WorkerGroup)); got != "[9]" {
		t.Errorf("workers %s, want [9]", got)
	}
	step(9, van.InstanceBarrier, 0)
	step(9, van.InstanceBarrier, 0)
	if got := sends(m); got != "" {
		t.Errorf("released to %s after one customer", got)
	}
	step(9, van.InstanceBarrier, 1)
	if got := sends(m); got != "9" {
		t.Errorf("released to %q, want 9", got)
	}
}

// TestTwoCustomersOfAReplacement: a C++ StepMesh process with two customers replaces one with two. Each of its
// customers passes the barrier of start-up at once, is waited for in that of Finalize, and no record of the dead
// process is left.
func TestTwoCustomersOfAReplacement(t *testing.T) {
	cfg := testConfig(van.Scheduler, 2, 1, "", 0)
	cfg.ReplaceTimeout = 10 * time.Second
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	m.Start(0)
	stamp := int32(0)
	step := func(want string, from int, customer int, nodes ...van.Node) {
		t.Helper()
		var meta van.Meta
		meta.Reset()
		stamp++
		meta.Timestamp, meta.CustomerID, meta.Control.Nodes = stamp, int32(customer), nodes
		meta.Control.Cmd = van.AddNode
		if len(nodes) == 0 {
			meta.Control.Cmd, meta.Request, meta.Control.BarrierGroup = van.InstanceBarrier, true, van.AllNodes
		}
		if err := m.Step(0, from, &meta); err != nil {
			t.Fatal(err)
		}
		if got := sends(m); got != want {
			t.Errorf("messages to %q, want %q", got, want)
		}
	}
	customer := func(host string, customer int) van.Node {
		n := rec(van.Worker, host, 1, -1)
		n.CustomerID = customer
		return n
	}
	step("", van.Empty, 0, customer("a", 0))
	step("", van.Empty, 0, customer("a", 1))
	step("9 8", van.Empty, 0, rec(van.Server, "b", 1, -1))
	step("", 8, 0) // it waits in Finalize, and so does the scheduler
	step("", van.SchedulerID, 0)
	m.PeerLost(0, 9, errors.New("killed"))
	m.Take()
	step("9 8", van.Empty, 0, customer("c", 0))
	step("9", van.Empty, 0, customer("c", 1))
	for _, n := range m.table.nodes {
		if n.ID == 9 && n.Hostname != "c" {
			t.Errorf("the table has worker 0 at %s, want it at c only", n.Addr())
		}
	}
	step("9", 9, 0)
	step("9", 9, 1)
	step("", 9, 0)
	step("9 8 1", 9, 1)
}

func sends(m *Machine) string {
	var to []string
	for _, o := range m.Take() {
		if s, ok := o.(Send); ok {
			to = append(to, fmt.Sprint(s.To))
		}
	}
	return strings.Join(to, " ")
}

// TestOrderDoesNotMatter starts, synchronises and stops clusters whose messages
// arrive in any order that keeps each connection's.
func TestOrderDoesNotMatter(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t)
		done := map[string]int{}
		w.log = func(format string, args ...any) {
			line := fmt.Sprintf(format, args...)
			for _, bad := range []string{"BUG", "dropped", "FAILED", "WARNING", "DEAD"} {
				if strings.Contains(line, bad) {
					t.Errorf("seed %d: %s", seed, line)
				}
			}
			if node, rest, _ := strings.Cut(line, ": "); strings.HasPrefix(rest, "BARRIER DONE") {
				done[node]++
			}
		}
		cfgs := map[string]Config{"sched": testConfig(van.Scheduler, 2, 2, "", 0)}
		names := []string{"sched"}
		for i := range 2 {
			names = append(names, fmt.Sprintf("w%d", i), fmt.Sprintf("s%d", i))
			cfgs[names[2*i+1]] = testConfig(van.Worker, 2, 2, fmt.Sprintf("10.0.0.%d:4000", i), -1)
			cfgs[names[2*i+2]] = testConfig(van.Server, 2, 2, fmt.Sprintf("10.0.0.%d:4001", i), -1)
		}
		r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		calls := map[string]int{}
		for moves := 0; moves < 10000; moves++ {
			switch n := r.IntN(4); {
			case len(names) > 0 && n == 0:
				if _, err := w.add(names[0], cfgs[names[0]]); err != nil {
					t.Fatal(err)
				}
				names = names[1:]
			case len(w.nodes) > 0 && n == 1:
				node := w.nodes[r.IntN(len(w.nodes))]
				if !node.m.Ready() || calls[node.name] > done[node.name] || calls[node.name] == 4 {
					continue
				}
				var err error
				if calls[node.name] < 3 {
					_, err = node.m.Barrier(w.now, 0, van.AllNodes, calls[node.name] != 1)
				} else {
					_, err = node.m.Finalize(w.now, 0)
				}
				if err != nil {
					t.Fatal(err)
				}
				calls[node.name]++
				w.take(node)
			case len(w.queue) > 0:
				p := w.queue[r.IntN(len(w.queue))]
				w.deliver(1, func(q *packet) bool { return q.name == p.name && q.to == p.to })
			}
		}
		for _, n := range w.nodes {
			if done[n.name] != 4 {
				t.Errorf("seed %d: %s passed %d barriers, want 4: %s", seed, n.name, done[n.name], n.m.Report(w.now))
			}
		}
		if len(w.nodes) != 5 || t.Failed() {
			t.Fatalf("seed %d: %d nodes", seed, len(w.nodes))
		}
	}
}

// TestManyNodes starts, synchronises and stops 64 workers and 64 servers.
func TestManyNodes(t *testing.T) {
	begin := time.Now()
	w := startWorld(t, 64, 64)
	done, count := 0, 0
	w.log = func(format string, args ...any) {
		if strings.Contains(fmt.Sprintf(format, args...), ": BARRIER DONE") {
			done++
		}
	}
	for _, final := range []bool{false, true} {
		for _, n := range w.nodes {
			var err error
			if final {
				_, err = n.m.Finalize(w.now, 0)
			} else {
				_, err = n.m.Barrier(w.now, 0, van.AllNodes, true)
			}
			if err != nil {
				t.Fatal(err)
			}
			count++
			w.take(n)
		}
		w.deliver(1<<30, nil)
	}
	if done != count {
		t.Errorf("%d of %d barrier calls are done", done, count)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("%d nodes and %d barrier calls took %s", len(w.nodes), count, d)
	} else {
		t.Logf("%d nodes and %d barrier calls took %s", len(w.nodes), count, d)
	}
}

// TestNoTickWhenIdle: a cluster without heartbeats needs no polling.
func TestNoTickWhenIdle(t *testing.T) {
	for _, n := range startWorld(t, 1, 1).nodes {
		if at, ok := n.m.NextTick(); ok {
			t.Errorf("%s wants a tick at %s", n.name, at)
		}
	}
}

// TestMemberIDs: ids below 8 belong to groups and the scheduler, Empty is none, and even ones are servers.
func TestMemberIDs(t *testing.T) {
	m, err := New(testConfig(van.Worker, 1, 1, "10.0.0.2:4000", -1))
	if err != nil {
		t.Fatal(err)
	}
	for id := -9; id <= van.Empty+2; id++ {
		for _, role := range []van.Role{van.Server, van.Worker, van.Scheduler} {
			n := van.Node{ID: id, Role: role, Hostname: "10.0.0.3", Port: 4000}
			member := id >= 8 && id < van.Empty && (role == van.Server && id%2 == 0 || role == van.Worker && id%2 == 1)
			if got := isMember(&n); got != member {
				t.Fatalf("%s %d is a member: %t", role, id, got)
			}
			if id > 20 && id < van.Empty-2 {
				continue
			}
			msg := van.Meta{Control: van.Control{Cmd: van.AddNode, Nodes: []van.Node{n}}}
			if err := m.table.checkRecords(&msg); (err == nil) != (member || role == van.Scheduler && id == van.SchedulerID) {
				t.Errorf("a record of %s %d: %v", role, id, err)
			}
		}
	}
}

// TestListsAreBounded: a scheduler remembers only the latest refused and replaced processes, and a node only the
// latest earlier schedulers.
func TestListsAreBounded(t *testing.T) {
	m, err := New(Config{Role: van.Scheduler, NumWorkers: 1, NumServers: 1, Scheduler: van.Node{Hostname: "10.0.0.1", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for i := range 40 {
		appendRecent(&list, fmt.Sprint(i))
		appendRecent(&list, fmt.Sprint(i))
	}
	if len(list) != maxRefusalTexts || list[0] != fmt.Sprint(40-maxRefusalTexts) || list[maxRefusalTexts-1] != "39" {
		t.Errorf("remembered: %v", list)
	}
	for i := range maxReplaced + 50 {
		id := van.NodeExtension{Incarnation: uint32(i + 1)}
		m.sched.replacements.recordReplaced(&van.Node{ID: 9, Role: van.Worker, Endpoint: id.Encode()})
	}
	if f := m.sched.replacements.replaced; len(f) != maxReplaced || incarnationOf(&f[0]) != 51 || incarnationOf(&f[maxReplaced-1]) != maxReplaced+50 {
		t.Errorf("%d former processes, from %d to %d", len(f), incarnationOf(&f[0]), incarnationOf(&f[len(f)-1]))
	}

	m, err = New(testConfig(van.Worker, 1, 1, "10.0.0.2:4000", -1))
	if err != nil {
		t.Fatal(err)
	}
	m.peers[van.SchedulerID] = &peerHealth{}
	for i := range maxReplaced + 50 {
		id := van.NodeExtension{Incarnation: uint32(i + 1), Cluster: 1}
		if !m.node.schedulerChanged(0, &van.Node{ID: van.SchedulerID, Role: van.Scheduler, Endpoint: id.Encode()}) {
			t.Fatal("the scheduler has not changed")
		}
	}
	if f := m.node.formerSchedulers; len(f) != maxReplaced || f[0] != 50 || f[maxReplaced-1] != maxReplaced+49 {
		t.Errorf("%d former schedulers, from %d to %d", len(f), f[0], f[len(f)-1])
	}
	if m.node.schedulerChanged(0, &van.Node{ID: van.SchedulerID, Role: van.Scheduler}) {
		t.Error("a scheduler of the original has taken the place of another")
	}
}

// TestRefusalsAtOneAddress: C++ StepMesh nodes have no incarnation. A process that is refused right after another one
// at its address is notified when refusalTime is over; of several processes, only the last. Refusals queued after it
// do not wait for it.
func TestRefusalsAtOneAddress(t *testing.T) {
	m, err := New(Config{Role: van.Scheduler, NumWorkers: 1, NumServers: 1, Scheduler: van.Node{Hostname: "10.0.0.1", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	told := func() (texts []string) {
		for _, o := range m.Take() {
			if s, ok := o.(Send); ok {
				texts = append(texts, string(s.Meta.Body))
			}
		}
		return texts
	}
	said := func(want ...string) {
		t.Helper()
		got := told()
		ok := len(got) == len(want)
		for i := range want {
			ok = ok && strings.HasSuffix(got[i], want[i])
		}
		if !ok {
			t.Fatalf("told: %q, want %q", got, want)
		}
	}
	told()
	at := func(port int) *van.Node { return &van.Node{Role: van.Worker, Hostname: "10.0.0.2", Port: port} }
	m.sched.refusals.refuse(0, at(1), "first", "")
	said("first")
	m.sched.refusals.refuse(1, at(1), "second", "")
	m.sched.refusals.refuse(2, at(1), "third", "")
	said()
	for i := range maxRefusalsSent - 1 { // as many as may be sent in a second
		m.sched.refusals.refuse(3, at(2+i), "other", "")
	}
	m.sched.refusals.refuse(4, at(100), "behind", "")
	told()
	m.sched.refusals.tick(refusalTime - 1)
	said()
	m.sched.refusals.recent[0].sentAt = 10 // sent again meanwhile
	m.sched.refusals.tick(refusalTime + 5)
	said("behind")
	m.sched.refusals.tick(refusalTime + 10)
	said("third")
}

// TestFirstOfSeveral: the machine is ticked when the first of several events is due: claims, probes, deferred losses,
// and barriers that wait for a replacement.
func TestFirstOfSeveral(t *testing.T) {
	l := &lifecycle{}
	b := core{cfg: &Config{ReplaceTimeout: 10 * time.Second}, life: l, alive: &liveness{life: l, peers: map[int]*peerHealth{van.SchedulerID: {}}}}
	claims := &replacements{core: b, claims: map[int]*registration{}}
	tries := &probes{core: b}
	pending := &pendingBarriers{core: b, deferred: deferredLosses{}}
	open := &barriers{core: b, open: map[barrierKey]*barrier{}}
	for i, at := range []time.Duration{5, 3, 2, 7, 4, 9, 6} {
		at *= time.Second
		claims.alive.peers[8+i], claims.claims[8+i] = &peerHealth{}, &registration{since: at}
		tries.list = append(tries.list, &probe{at: at})
		pending.deferred[8+i] = deferredLoss{at: at}
		open.open[barrierKey{group: 1 + i}] = &barrier{onlyDeadMissing: true, stuckSince: at}
	}
	for range 100 { // the order of a map is random
		for what, x := range map[string]struct{ got, want time.Duration }{
			"claim": {claims.next(), 12 * time.Second}, "trial": {tries.next(), 2 * time.Second},
			"loss": {pending.next(), 2*time.Second + leaveGrace}, "barrier": {open.next(), 12 * time.Second},
		} {
			if x.got != x.want {
				t.Fatalf("%s: the next tick is at %s, want %s", what, x.got, x.want)
			}
		}
	}
}
