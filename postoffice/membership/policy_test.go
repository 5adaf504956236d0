package membership

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

// TestPolicyText: a policy is parsed as it was written, and no other text is one.
func TestPolicyText(t *testing.T) {
	for _, s := range []string{"peer=8,rate=1000", "peer=32766,class=0", "peer=9,rate=1000000000000,class=63", "app=0,order=ring",
		"app=2147483647,rate=5000,order=rank", "app=7"} {
		if p, err := ParsePolicy(s); err != nil || p.String() != s {
			t.Errorf("%q reads as %q: %v", s, p.String(), err)
		}
	}
	for _, s := range []string{"", "peer", "peer=", "peer=7", "peer=32767", "peer=08", "peer=8,", "peer=8,rate", "peer=8,rate=+1000", "peer=8,rate=1e9",
		"peer=8,rate=999", "peer=8,rate=99999999999999999999", "peer=8,class=64", "peer=8,class=-1", "app=1,class=3", "peer=8,order=ring", "app=1,order=",
		"app=1,order=ring,order=ring", "app=2147483648", "rate=1000,peer=8", "peer=8,peer=8", "peer=8 rate=1000"} {
		if p, err := ParsePolicy(s); err == nil {
			t.Errorf("%q reads as %q", s, p.String())
		}
	}
}

// TestManyPolicies: the list takes as many policies as fit into a message, which nodes can parse.
func TestManyPolicies(t *testing.T) {
	m, err := New(Config{Role: van.Scheduler, NumWorkers: 1, NumServers: 1, Scheduler: van.Node{Hostname: "10.0.0.1", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	m.life.phase = ready
	n := 0
	for ; n < 10000 && err == nil; n++ {
		err = m.sched.policies.set(Policy{App: int32(2_000_000_000 + n), Rate: MaxRate, Order: "ring"})
	}
	if err == nil || !strings.Contains(err.Error(), "want fewer") || n < 50 {
		t.Fatalf("%d policies: %v", n, err)
	}
	body := notice{verb: verbPolicies, text: m.sched.policies.text()}.body()
	read, err := parseNotice(body)
	if err != nil {
		t.Fatal(err)
	}
	if _, list, err := parsePolicies(read.text); err != nil || len(list) != n-1 {
		t.Errorf("%d of %d policies: %v", len(list), n-1, err)
	}
}

// TestLyingAnswers: states that a node reports for policies that it was not sent are ignored.
func TestLyingAnswers(t *testing.T) {
	m, err := New(Config{Role: van.Scheduler, NumWorkers: 1, NumServers: 1, Scheduler: van.Node{Hostname: "10.0.0.1", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	m.life.phase, m.table.incs[9] = ready, 7
	m.peers[9] = &peerHealth{}
	m.table.fill([]van.Node{{ID: 9}})
	if err := m.sched.policies.set(Policy{App: 5, Rate: 5000}); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"", "1", "1 ", "1 yy", "2 y", "x y", "-1 y", "4294967297 y"} {
		m.sched.policies.recordStates(9, notice{verb: verbHave, text: text})
		if len(m.sched.policies.states) > 0 {
			t.Errorf("%q is believed", text)
		}
	}
	m.sched.policies.recordStates(11, notice{verb: verbHave, text: "1 y"}) // C++ StepMesh
	m.sched.policies.recordStates(9, notice{verb: verbHave, text: "1 ?"})  // a state that this version does not know
	for _, l := range m.sched.policies.lines() {
		if strings.Contains(l, "in-force") {
			t.Error(l)
		}
	}
}

// TestLyingLists: a scheduler adopts lists from nodes only when it has resumed the cluster of an earlier one, and no
// version after which it could not count on. States that nodes have reported for another list of the same version do
// no harm.
func TestLyingLists(t *testing.T) {
	for _, recovered := range []bool{false, true} {
		m, err := New(Config{Role: van.Scheduler, NumWorkers: 1, NumServers: 1, Scheduler: van.Node{Hostname: "10.0.0.1", Port: 8123}})
		if err != nil {
			t.Fatal(err)
		}
		m.life.phase, m.table.incs[9], m.life.recovered = ready, 7, recovered
		m.peers[9] = &peerHealth{}
		m.table.fill([]van.Node{{ID: 9}})
		for _, x := range []struct {
			text    string
			version uint32 // of a scheduler that has resumed
		}{{"1 app=1,rate=1000", 1}, {"4294967295", 1}, {"2147483648", 1}, {"7 app=1,rate=1000 app=2,rate=1000", 7}} {
			_ = m.sched.policies.adopt(9, &van.Meta{}, notice{verb: verbPolicies, text: x.text})
			m.sched.policies.recordStates(9, notice{verb: verbHave, text: "1 y"})
			if !recovered {
				x.version = 0
			}
			if m.sched.policies.version != x.version {
				t.Errorf("recovered %t: after %q it has version %d, want %d", recovered, x.text, m.sched.policies.version, x.version)
			}
			m.sched.policies.lines()
		}
		m.sched.policies.states = map[int]nodeStates{9: {incarnation: 7, version: m.sched.policies.version, states: ""}}
		m.sched.policies.list = []Policy{{App: 1, Rate: 1000}}
		if l := m.sched.policies.lines(); !strings.Contains(l[0], " asked=9") {
			t.Errorf("recovered %t: %q", recovered, l)
		}
		// Nor any once it has changed its own.
		if err := m.sched.policies.set(Policy{App: 5, Rate: 5000}); err != nil {
			t.Fatal(err)
		}
		own := m.sched.policies.version
		_ = m.sched.policies.adopt(9, &van.Meta{}, notice{verb: verbPolicies, text: "100 app=1,rate=1000"})
		if v := m.sched.policies.version; v != own {
			t.Errorf("recovered %t: its own list, version %d, has become version %d", recovered, own, v)
		}
	}
}

// TestAnswerOfAReplacedProcess: the answer of a process about its policies does not apply to the process that has replaced it. The
// scheduler sends that process the list at its first heartbeat.
func TestAnswerOfAReplacedProcess(t *testing.T) {
	m, err := New(Config{Role: van.Scheduler, NumWorkers: 1, NumServers: 1, Scheduler: van.Node{Hostname: "10.0.0.1", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	m.life.phase, m.table.incs[9] = ready, 7
	m.peers[9] = &peerHealth{}
	m.sched.policies.out.conns[9] = true
	m.table.fill([]van.Node{{ID: 9}})
	p := &m.sched.policies
	if err := p.set(Policy{App: 5, Rate: 5000}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what        string
		incarnation uint32
		says        string
		want        string
		sent        int // lists with a heartbeat
	}{
		{"the process has not answered", 7, "", "app=5,rate=5000 asked=9 original=8", 1},
		{"it has", 7, "1 y", "app=5,rate=5000 in-force=9 original=8", 0},
		{"another process has its place", 8, "", "app=5,rate=5000 asked=9 original=8", 1},
		{"that one has answered", 8, "1 p", "app=5,rate=5000 pending=9 original=8", 0},
	} {
		m.table.incs[9] = c.incarnation
		if c.says != "" {
			p.recordStates(9, notice{verb: verbHave, text: c.says})
		}
		if l := p.lines(); len(l) != 1 || l[0] != c.want {
			t.Errorf("%s: %q, want %q", c.what, l, c.want)
		}
		m.Take()
		p.heartbeat(9)
		if sent := len(m.Take()); sent != c.sent {
			t.Errorf("%s: %d messages to a node that beats, want %d", c.what, sent, c.sent)
		}
	}
}

// TestWordlessAnswers: an answer without text is not an answer.
func TestWordlessAnswers(t *testing.T) {
	for body, want := range map[string]bool{"answer 0": false, "answer 0 ": false, "answer 0   ": false, "answer x end": false, "answer 0 end": true} {
		if _, text, ok := Answer([]byte(noticePrefix + body)); ok != want {
			t.Errorf("%q: %q, %t, want %t", body, text, ok, want)
		}
	}
}

// TestZones: the scheduler connects to no address with a zone, which may be any text.
func TestZones(t *testing.T) {
	m, err := New(Config{Role: van.Scheduler, NumWorkers: 1, NumServers: 1, Scheduler: van.Node{Hostname: "10.0.0.1", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	m.life.phase = ready
	for _, host := range []string{"fe80::1%eth0", "fe80::1%../../x"} {
		err := m.sched.policies.ask(0, van.Empty, &van.Meta{}, notice{verb: verbAsk, text: "7 [" + host + "]:80 list"}, m.Report)
		if err == nil || !strings.Contains(err.Error(), "numeric address") {
			t.Errorf("%s: %v", host, err)
		}
		m.sched.refusals.refuse(0, &van.Node{Hostname: host, Port: 80}, "test", "")
	}
	for _, o := range m.Take() {
		if c, ok := o.(Connect); ok {
			t.Errorf("it connects to %q", c.Node.Hostname)
		}
	}
}

// TestLongAnswers: answers about more nodes than fit into one message name all of them.
func TestLongAnswers(t *testing.T) {
	m, err := New(Config{Role: van.Scheduler, NumWorkers: 3000, NumServers: 1000, Scheduler: van.Node{Hostname: "10.0.0.1", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	m.life.phase = ready
	for i, id := range m.Members(van.WorkerGroup | van.ServerGroup) {
		if i%2 == 0 {
			m.table.incs[id] = 7
		}
	}
	for _, p := range []Policy{{App: 5, Rate: 5000}, {App: 6, Rate: 5000, Order: "ring"}} {
		if err := m.sched.policies.set(p); err != nil {
			t.Fatal(err)
		}
	}
	listed := map[string]int{}
	for i, l := range m.sched.policies.lines() {
		_, text, ok := Answer(notice{verb: verbAnswer, text: strconv.Itoa(i) + " " + l}.body())
		if !ok || text != l {
			t.Fatalf("%d of %d bytes arrive", len(text), len(l))
		}
		words := strings.Split(l, " ")
		for _, w := range words[1:] {
			state, ids, _ := strings.Cut(w, "=")
			for _, id := range strings.Split(ids, ",") {
				listed[words[0]+" "+state+" "+id]++
			}
		}
	}
	for i, id := range m.Members(van.WorkerGroup | van.ServerGroup) {
		for _, p := range m.sched.policies.list {
			if n := listed[p.String()+" "+[]string{"asked", "original"}[i%2]+" "+strconv.Itoa(id)]; n != 1 {
				t.Fatalf("%s: node %d is listed %d times", p.String(), id, n)
			}
		}
	}
	if len(listed) != 2*4000 {
		t.Errorf("%d are listed", len(listed))
	}
}

// TestQuestions: the questions that a process that is not a node can ask, and the answers to invalid ones.
func TestQuestions(t *testing.T) {
	m, err := New(Config{Role: van.Scheduler, NumWorkers: 1, NumServers: 1, Scheduler: van.Node{Hostname: "10.0.0.1", Port: 8123}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.sched.policies.execute("list", m.Report); err == nil {
		t.Error("an answer before the cluster has formed")
	}
	m.life.phase = ready
	for _, c := range []struct {
		question string
		left     int // policies, then
		ok       bool
	}{
		{"set app=5,rate=5000", 1, true}, {"set app=6,rate=5000", 2, true}, {"set app=7", 2, false}, {"set app=7,rate=1", 2, false},
		{"clear app=6", 1, true}, {"clear app=8", 1, true}, {"list", 1, true}, {"list all", 1, false}, {"drop", 1, false},
		{"set app=6,rate=5000", 2, true}, {"clear all", 0, true},
	} {
		if _, err := m.sched.policies.execute(c.question, m.Report); err == nil != c.ok || len(m.sched.policies.list) != c.left {
			t.Errorf("%q: %v, and there are %d policies, want %d", c.question, err, len(m.sched.policies.list), c.left)
		}
	}
	if err := m.sched.policies.ask(0, van.Empty, &van.Meta{}, notice{verb: verbAsk, text: "7 10.0.0.2:80"}, m.Report); err == nil {
		t.Error("a question without words is answered")
	}
}
