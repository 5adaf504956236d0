package membership

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// probingMachine is a machine whose transport probes addresses.
func probingMachine(t *testing.T, role van.Role, incarnation uint32, workers int) *Machine {
	t.Helper()
	id := van.NodeExtension{Incarnation: incarnation, Cluster: 0}
	if role == van.Scheduler {
		id.Cluster = 7
	}
	m, err := New(Config{Role: role, NumWorkers: workers, NumServers: 1, GroupSize: 1, CanProbe: true, StartTimeout: time.Minute,
		Self:      van.Node{Role: role, ID: van.Empty, Hostname: fmt.Sprintf("10.77.0.%d", incarnation), Port: 20000, AuxID: -1, Endpoint: id.Encode()},
		Scheduler: van.Node{Hostname: "10.77.0.1", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	m.Start(0)
	return m
}

// registrationOf is the first message of a node.
func registrationOf(t *testing.T, n *Machine) *van.Meta {
	t.Helper()
	for _, o := range n.Take() {
		if s, ok := o.(Send); ok && s.Meta.Control.Cmd == van.AddNode {
			return &s.Meta
		}
	}
	t.Fatal("no registration")
	return nil
}

// collected has the outputs of a machine by kind.
type collected struct {
	probes   []van.Node
	replies  []Reply
	warnings []string
	waiting  []string
	connects int
}

func take(m *Machine) (all collected) {
	for _, o := range m.Take() {
		switch o := o.(type) {
		case Probe:
			all.probes = append(all.probes, o.Node)
		case Reply:
			all.replies = append(all.replies, o)
		case Warning:
			all.warnings = append(all.warnings, o.Text)
		case Waiting:
			all.waiting = append(all.waiting, o.Report.String())
		case Connect:
			all.connects++
		}
	}
	return all
}

const cannot = "worker 10.77.0.2:20000 (no preferred rank) has registered, but 10.77.0.2:20000 cannot be reached from 10.77.0.1 (connection timed out): a firewall"

// TestRegisteredNodeKnows: a registered node gets a notice of that at once, on the connection that it has made. It never reports
// that the scheduler does not run.
func TestRegisteredNodeKnows(t *testing.T) {
	s, w := probingMachine(t, van.Scheduler, 1, 1), probingMachine(t, van.Worker, 2, 1)
	if err := s.Step(0, van.Empty, registrationOf(t, w)); err != nil {
		t.Fatal(err)
	}
	got := take(s)
	if len(got.replies) != 1 || got.replies[0].Incarnation != 2 || got.connects != 0 {
		t.Fatalf("replies %v and %d connections, want one reply to incarnation 2 and no connection", got.replies, got.connects)
	}
	if err := w.Step(0, van.SchedulerID, &got.replies[0].Meta); err != nil {
		t.Fatal(err)
	}
	if early := take(w).waiting; len(early) > 0 {
		t.Errorf("reported at once: %q", early)
	}
	w.Tick(5 * time.Second)
	report := strings.Join(take(w).waiting, "\n")
	if !strings.Contains(report, "has registered") || !strings.Contains(report, "waiting for 1 of 1 servers") || strings.Contains(report, "does not run") {
		t.Errorf("the report is %q, want that it has registered and who is missing", report)
	}
}

// TestUnreachableNode: if a registered node cannot be reached, the scheduler and the node report it within 5 s, with
// the address, the address of the prober, and the cause. Each report is made once. When the node is reached, that is
// reported too.
func TestUnreachableNode(t *testing.T) {
	for _, formed := range []bool{false, true} {
		t.Run(fmt.Sprintf("formed=%t", formed), func(t *testing.T) {
			s, w := probingMachine(t, van.Scheduler, 1, 1), probingMachine(t, van.Worker, 2, 1)
			if err := s.Step(0, van.Empty, registrationOf(t, w)); err != nil {
				t.Fatal(err)
			}
			if formed {
				other := probingMachine(t, van.Server, 3, 1)
				if err := s.Step(0, van.Empty, registrationOf(t, other)); err != nil {
					t.Fatal(err)
				}
				if !s.Ready() {
					t.Fatal("the cluster has not formed")
				}
				s.PeerLost(0, 9, syscall.ECONNREFUSED) // also where the connection fails at once
			}
			take(s)
			s.Tick(probeDelay)
			tries := take(s).probes
			if len(tries) == 0 || tries[0].Addr() != "10.77.0.2:20000" {
				t.Fatalf("tries %v, want the worker's address", tries)
			}
			s.Probed(3*time.Second, &tries[0], "10.77.0.1", syscall.ETIMEDOUT)
			got := take(s)
			if len(got.warnings) != 1 || !strings.Contains(got.warnings[0], cannot) || !strings.Contains(got.warnings[0], "DMLC_NODE_HOST or DMLC_INTERFACE") {
				t.Errorf("the scheduler warns %q, want %q", got.warnings, cannot)
			}
			if len(got.replies) != 1 {
				t.Fatalf("replies %v, want one", got.replies)
			}
			if err := w.Step(3*time.Second, van.SchedulerID, &got.replies[0].Meta); err != nil {
				t.Fatal(err)
			}
			if said := take(w).waiting; len(said) != 1 || !strings.Contains(said[0], cannot) {
				t.Errorf("the worker says %q, want %q at once", said, cannot)
			}
			if r := s.Report(4 * time.Second).String(); !strings.Contains(r, "not reached: "+cannot) {
				t.Errorf("the report is %q", r)
			}
			s.Tick(probeDelay + probePause)
			if again := take(s).probes; len(again) == 0 {
				t.Error("it is not tried again")
			}
			s.Probed(7*time.Second, &tries[0], "10.77.0.1", syscall.ETIMEDOUT)
			if again := take(s).warnings; len(again) != 0 {
				t.Errorf("said again: %q", again)
			}
			s.Probed(8*time.Second, &tries[0], "10.77.0.1", nil)
			if said := take(s).warnings; len(said) != 1 || !strings.Contains(said[0], "can be reached now") {
				t.Errorf("the scheduler says %q, want that it can be reached now", said)
			}
			if r := s.Report(9 * time.Second).String(); strings.Contains(r, "not reached") {
				t.Errorf("the report is still %q", r)
			}
		})
	}
}

// TestBarrierNamesUnreachable: if a barrier waits for a node that cannot be reached, the waiting nodes and the error of
// the barrier have the reason, with the variables to set.
func TestBarrierNamesUnreachable(t *testing.T) {
	s, w, server := probingMachine(t, van.Scheduler, 1, 1), probingMachine(t, van.Worker, 2, 1), probingMachine(t, van.Server, 3, 1)
	for _, n := range []*Machine{w, server} {
		if err := s.Step(0, van.Empty, registrationOf(t, n)); err != nil {
			t.Fatal(err)
		}
	}
	own, err := s.StartBarrier(0, van.AllNodes, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	request := van.Meta{Request: true, Timestamp: 5, Key: startRequest, Control: van.Control{Cmd: van.InstanceBarrier, BarrierGroup: van.AllNodes}}
	request.SetIncarnations(3, 1)
	if err := s.Step(0, 8, &request); err != nil {
		t.Fatal(err)
	}
	s.Tick(probeDelay)
	tries := take(s).probes
	if len(tries) == 0 || tries[0].Role != van.Worker {
		t.Fatalf("tries %v, want the worker's address", tries)
	}
	s.Probed(3*time.Second, &tries[0], "10.77.0.1", syscall.ETIMEDOUT)
	if who, _ := s.Missing(own); !strings.Contains(who, "not from worker 0 (id 9)") || !strings.Contains(who, cannot) {
		t.Errorf("missing is %q, want %q in it", who, cannot)
	}
	s.Take()
	var said []string
	for _, at := range []time.Duration{4 * time.Second, 10 * time.Second} {
		s.Tick(at)
		for _, o := range s.Take() {
			if m, ok := o.(Send); ok && m.To == 8 && strings.Contains(string(m.Meta.Body), "barrier") {
				said = append(said, string(m.Meta.Body))
			}
		}
	}
	if len(said) < 2 { // a notice of the missing node, and the end of the barrier
		t.Errorf("the server received %q", said)
	}
	for _, text := range said {
		if !strings.Contains(text, cannot) || !strings.Contains(text, "DMLC_NODE_HOST or DMLC_INTERFACE") {
			t.Errorf("the server received %q, want %q in it", text, cannot)
		}
	}
}

// TestProbesAreFew: only processes that have registered and count are probed, at numeric addresses, at most maxProbes
// in a second. A process is not probed after it has sent a message. A timeout of a probe is not reported.
func TestProbesAreFew(t *testing.T) {
	s := probingMachine(t, van.Scheduler, 1, 3*maxProbes)
	rec := func(i int) *van.Meta {
		w := probingMachine(t, van.Worker, 2, 3*maxProbes)
		meta := registrationOf(t, w)
		id := van.NodeExtension{Incarnation: uint32(100 + i)}
		meta.Control.Nodes[0].Port, meta.Control.Nodes[0].Endpoint = 1000+i, id.Encode()
		return meta
	}
	for i := range 2 * maxProbes {
		if err := s.Step(0, van.Empty, rec(i)); err != nil {
			t.Fatal(err)
		}
	}
	named := rec(2 * maxProbes)
	named.Control.Nodes[0].Hostname, named.Control.Nodes[0].Endpoint = "name.example", nil // of C++ StepMesh: other nodes have addresses
	misfit := rec(2*maxProbes + 1)
	misfit.Control.Nodes[0].AuxID = 1 << 10
	for _, m := range []*van.Meta{named, misfit} {
		if err := s.Step(0, van.Empty, m); err != nil {
			t.Fatal(err)
		}
	}
	take(s)
	tried := map[string]int{}
	at := probeDelay
	for _, want := range []int{maxProbes, 2 * maxProbes, 2 * maxProbes} {
		s.Tick(at)
		s.Tick(at + probePeriod/2)
		for _, n := range take(s).probes {
			tried[n.Addr()]++
			if n.Hostname == "name.example" || n.Port > 1000+2*maxProbes {
				t.Errorf("tried %s", n.Addr())
			}
		}
		if len(tried) != want {
			t.Errorf("%d addresses are tried after %s, want %d", len(tried), at, want)
		}
		at += probePeriod
	}
	for addr, n := range tried {
		if n != 1 {
			t.Errorf("%s is tried %d times", addr, n)
		}
	}
	some := rec(0).Control.Nodes[0]
	s.Probed(at, &some, "10.77.0.1", fmt.Errorf("%w: silent", van.ErrTimeout))
	stranger := rec(9999).Control.Nodes[0]
	s.Probed(at, &stranger, "10.77.0.1", syscall.ECONNREFUSED)
	if got := take(s); len(got.warnings) > 0 || len(got.replies) > 0 {
		t.Errorf("warnings %q and replies %v after trials that show nothing", got.warnings, got.replies)
	}
	for at < time.Minute { // later probes stay within the limit as well
		s.Tick(at)
		if n := len(take(s).probes); n > maxProbes {
			t.Errorf("%d trials at %s", n, at)
		}
		at += probePeriod
	}
}

// TestReachedNodeIsNotProbed: a node that has sent a message under its id is reached.
func TestReachedNodeIsNotProbed(t *testing.T) {
	s, w, o := probingMachine(t, van.Scheduler, 1, 1), probingMachine(t, van.Worker, 2, 1), probingMachine(t, van.Server, 3, 1)
	for _, n := range []*Machine{w, o} {
		if err := s.Step(0, van.Empty, registrationOf(t, n)); err != nil {
			t.Fatal(err)
		}
	}
	beat := controlAt(5, van.Heartbeat)
	beat.Control.Nodes = []van.Node{*s.table.record(9)}
	beat.SetIncarnations(2, 1)
	if err := s.Step(time.Millisecond, 9, &beat); err != nil {
		t.Fatal(err)
	}
	s.Tick(probeDelay)
	if tries := take(s).probes; len(tries) != 1 || tries[0].Addr() != "10.77.0.3:20000" {
		t.Errorf("tries %v, want the server only, which has not been heard", tries)
	}
}

// TestEnded: the reports have the cause of a process's end once, with a bounded length.
func TestEnded(t *testing.T) {
	s := probingMachine(t, van.Scheduler, 1, 1)
	for i := range 3 * maxRefusalTexts {
		meta := controlAt(0, van.Heartbeat)
		meta.Body = Ended(fmt.Sprintf("worker of rank %d on h: %s", i/2, strings.Repeat("too few files ", 100)))
		if err := s.Step(0, van.Empty, &meta); err != nil {
			t.Fatal(err)
		}
	}
	r := s.Report(0)
	if n := len(r.Ended); n != maxRefusalTexts || !strings.HasPrefix(r.Ended[n-1], "worker of rank 23 on h: too few files") {
		t.Errorf("the report has %d that ended: %q", n, r.Ended)
	}
	if n := len(r.String()); n > 2*maxRefusalTexts*maxEndedText {
		t.Errorf("the report has %d bytes", n)
	}
}

// TestEndedIsOneCause: the log counts all texts of ended processes as one cause. Otherwise unknown processes could send so many
// causes that later warnings are hidden.
func TestEndedIsOneCause(t *testing.T) {
	s := probingMachine(t, van.Scheduler, 1, 1)
	causes := map[string]bool{}
	for _, text := range []string{"worker", `of "no`, `\`, "rank: at 10.0.0.1:1"} {
		meta := controlAt(0, van.Heartbeat)
		meta.Body = Ended(text)
		if err := s.Step(0, van.Empty, &meta); err != nil {
			t.Fatal(err)
		}
		for _, o := range s.Take() {
			if w, ok := o.(Warning); ok {
				causes[logx.PeerKind(errors.New(w.Text))] = true
			}
		}
	}
	if len(causes) != 1 {
		t.Errorf("causes %v, want one", causes)
	}
}

// TestRefusedHostIsOneCause: the log counts all refusals of hosts that are not in BYTEPS_ORDERED_HOSTS as one cause. Otherwise unknown
// processes could hide later warnings: they choose the names.
func TestRefusedHostIsOneCause(t *testing.T) {
	s, err := New(Config{Role: van.Scheduler, NumWorkers: 1, NumServers: 1, GroupSize: 1, OrderedHosts: []string{"10.0.0.1"},
		Scheduler: van.Node{Hostname: "10.0.0.99", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	s.Start(0)
	causes := map[string]bool{}
	for i, host := range []string{"alpha", "beta", "gamma.example", `x"y`, `z"`} {
		meta := controlAt(int32(i), van.AddNode)
		meta.Control.Nodes = []van.Node{rec(van.Worker, host, 4001, -1)}
		if err := s.Step(0, van.Empty, &meta); err != nil {
			causes[logx.PeerKind(err)] = true
		}
		for _, o := range s.Take() {
			if w, ok := o.(Warning); ok {
				causes[logx.PeerKind(errors.New(w.Text))] = true
			}
		}
	}
	if len(causes) != 2 { // one for names that cannot be printed
		t.Errorf("causes %q, want two", slices.Collect(maps.Keys(causes)))
	}
}

// TestSchedulerUnreached: a node reports within 5 s why it cannot reach its scheduler. It reports nothing if the
// scheduler may only not have started yet.
func TestSchedulerUnreached(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{syscall.ECONNREFUSED, "cannot be reached from 10.77.0.2 (connection refused): it does not run there"},
		{syscall.ETIMEDOUT, "cannot be reached from 10.77.0.2 (connection timed out): check DMLC_PS_ROOT_URI, the route and firewalls"},
		{syscall.EHOSTUNREACH, "no route to host"},
		{fmt.Errorf("%w greeting", van.ErrMalformed), "another program listens there"},
		{fmt.Errorf("%w: silent", van.ErrTimeout), "another program listens there"},
		{nil, "has not answered"},
	} {
		w := probingMachine(t, van.Worker, 2, 1)
		take(w)
		w.Tick(probeDelay)
		got := take(w)
		if len(got.probes) != 1 || got.probes[0].Addr() != "10.77.0.1:8123" {
			t.Fatalf("tries %v, want the scheduler's address", got.probes)
		}
		w.Probed(2*time.Second, &got.probes[0], "10.77.0.2", c.err)
		if said := take(w).waiting; len(said) > 0 {
			t.Errorf("%v: said at once: %q", c.err, said)
		}
		w.Tick(5*time.Second - time.Millisecond)
		if said := take(w).waiting; len(said) != 1 || !strings.Contains(said[0], c.want) {
			t.Errorf("%v: says %q within 5 s, want %q", c.err, said, c.want)
		}
	}
	w := probingMachine(t, van.Worker, 2, 1)
	w.PeerBack(0, van.SchedulerID) // the node is connected to the scheduler
	w.Tick(5*time.Second - time.Millisecond)
	got := take(w)
	if len(got.probes) != 0 || len(got.waiting) != 1 || strings.Contains(got.waiting[0], "does not run") || !strings.Contains(got.waiting[0], "is connected, and has not answered") {
		t.Errorf("a scheduler that is connected is tried (%v), and the node says %q", got.probes, got.waiting)
	}
}
