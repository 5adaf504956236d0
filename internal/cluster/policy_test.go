package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// askScheduler asks the scheduler of c.
func askScheduler(t testing.TB, c *testcluster.Cluster, question string) ([]string, error) {
	t.Helper()
	cfg := config(func(x *postoffice.Config) { x.RootPort, x.Local = c.Port, c.Scheduler.Config().Local })
	return cluster.AskScheduler(within(t, time.Minute), cfg, nil, question)
}

// policies asks until the answers are these.
func policies(t testing.TB, c *testcluster.Cluster, question string, want ...string) {
	t.Helper()
	tick := time.NewTicker(100 * time.Millisecond) // it answers 32 in a second
	defer tick.Stop()
	for end := time.After(time.Minute); ; question = "list" {
		got, err := askScheduler(t, c, question)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Join(got, "; ") == strings.Join(want, "; ") {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("the policies are %q, want %q", got, want)
		}
	}
}

// stream is data of application 5 from a node to the first server, which counts its bytes.
type stream struct {
	from  cluster.App
	bytes atomic.Int64
	came  chan struct{} // one element for each message
	ts    int32
}

func newStream(t testing.TB, from, to *postoffice.Node) *stream {
	t.Helper()
	s := &stream{from: core(from).App(), came: make(chan struct{}, 1000)}
	for _, n := range []*postoffice.Node{from, to} {
		if _, err := core(n).App().AddCustomer(5, 5, func(m *van.Message) {
			s.bytes.Add(int64(m.Vals.Len()))
			s.came <- struct{}{}
		}); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// send sends count messages of size bytes and waits until all have arrived.
func (s *stream) send(t testing.TB, count, size int) (took time.Duration) {
	t.Helper()
	start := time.Now()
	for range count {
		m := &van.Message{}
		m.Reset()
		m.Receiver, m.Request, m.Push, m.AppID, m.CustomerID, m.Timestamp = van.ServerID(0), true, true, 5, 5, s.ts
		s.ts++
		m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8)), backend.Bytes(make([]byte, size))
		m.DataTypes, m.DataSize = []van.DataType{van.TypeUint64, van.TypeChar}, int32(8+size)
		if err := s.from.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	for range count {
		select {
		case <-s.came:
		case <-time.After(time.Minute):
			t.Fatalf("%d bytes came", s.bytes.Load())
		}
	}
	return time.Since(start)
}

// limited sends 2 MB, which must take the time of 1 MB in a second.
func (s *stream) limited(t testing.TB) {
	t.Helper()
	if took := s.send(t, 8, 250_000); took < 1500*time.Millisecond {
		t.Errorf("2 MB at 1 MB in a second took %v", took)
	}
}

// TestRatePolicy: a rate for a peer or an application holds from the time at which it is reported in force until it
// is cleared, over each transport.
func TestRatePolicy(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		s := newStream(t, c.Workers[0], c.Servers[0])
		policies(t, c, "list")
		policies(t, c, "set peer=8,rate=1000000", "peer=8,rate=1000000 in-force=9,11")
		s.limited(t)
		policies(t, c, "set app=5,rate=1000000", "peer=8,rate=1000000 in-force=9,11", "app=5,rate=1000000 in-force=9,8 pending=11")
		policies(t, c, "clear peer=8", "app=5,rate=1000000 in-force=9,8 pending=11")
		s.limited(t)
		if _, err := core(c.Workers[1]).App().AddCustomer(5, 5, func(*van.Message) {}); err != nil {
			t.Fatal(err)
		}
		policies(t, c, "list", "app=5,rate=1000000 in-force=9,11,8") // sent with a heartbeat
		policies(t, c, "clear all")
		s.send(t, 8, 250_000)
		c.Finalize(t)
	}, testcluster.TCP, testcluster.Unix, testcluster.SHM)
}

// TestClassPolicy: the connections to a peer get its class; where they cannot, the list reports it.
func TestClassPolicy(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		state := "in-force"
		if o.Over == testcluster.Unix {
			state = "unfit"
		}
		policies(t, c, "set peer=9,class=46", "peer=9,class=46 "+state+"=8")
		policies(t, c, "set peer=8,class=0", "peer=9,class=46 "+state+"=8", "peer=8,class=0 "+state+"=9")
		policies(t, c, "clear all")
		c.Finalize(t)
	}, testcluster.TCP, testcluster.Unix, testcluster.SHM)
}

// TestPolicyOfReplacement: a replacement process has the policies, and policies about a peer apply to its replacement
// process.
func TestPolicyOfReplacement(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP})
	policies(t, c, "set peer=8,rate=1000000", "peer=8,rate=1000000 in-force=9")
	c.Workers[0].Close()
	testcluster.Lost(t, c.Scheduler, 9)
	policies(t, c, "list", "peer=8,rate=1000000 dead=9")
	worker, err := c.Join(within(t, time.Minute), "worker", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	policies(t, c, "list", "peer=8,rate=1000000 in-force=9")
	newStream(t, worker, c.Servers[0]).limited(t)
	c.Servers[0].Close()
	testcluster.Lost(t, worker, 8)
	server, err := c.Join(within(t, time.Minute), "server", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.Workers[0], c.Servers[0] = worker, server
	policies(t, c, "list", "peer=8,rate=1000000 in-force=9")
	came := make(chan struct{}, 1000)
	if _, err := core(server).App().AddCustomer(5, 5, func(*van.Message) { came <- struct{}{} }); err != nil {
		t.Fatal(err)
	}
	s := &stream{from: core(worker).App(), came: came, ts: 100}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(time.Minute); ; { // until the worker knows the new process
		m := &van.Message{}
		m.Reset()
		m.Receiver, m.Request, m.AppID, m.CustomerID, m.Timestamp = 8, true, 5, 5, 99
		if err := s.from.Send(m); err == nil {
			break
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatal("the worker does not know the new server")
		}
	}
	<-came
	s.limited(t)
	c.Finalize(t)
}

// TestPolicyOfRestartedScheduler: a new process at the scheduler's address takes the policies from the nodes.
func TestPolicyOfRestartedScheduler(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Set: func(c *postoffice.Config) { c.HeartbeatInterval = time.Second }})
	policies(t, c, "set peer=8,rate=1000000", "peer=8,rate=1000000 in-force=9")
	c.Scheduler.Close()
	for _, n := range []*postoffice.Node{c.Workers[0], c.Servers[0]} {
		testcluster.Lost(t, n, van.SchedulerID)
	}
	s, err := c.Join(within(t, time.Minute), "scheduler", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.Scheduler = s
	policies(t, c, "list", "peer=8,rate=1000000 in-force=9")
	newStream(t, c.Workers[0], c.Servers[0]).limited(t)
	policies(t, c, "clear all")
	c.Finalize(t)
}

// TestBadQuestions: the scheduler answers invalid questions with the reason. A question to a missing scheduler, or to
// one of C++ StepMesh, which ignores it, ends at its limit.
func TestBadQuestions(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP})
	for question, want := range map[string]string{
		"set peer=11,rate=5000":          `peer "worker 1 (id 11)": want a node of this cluster, which has 1 workers and 1 servers`,
		"set peer=1,rate=5000":           `peer "1": want the id of a worker or server`,
		"set peer=9":                     `policy "peer=9": want a rate, a class or an order as well`,
		"set peer=9,rate=-5":             `rate "-5": want 1000 to 1000000000000 bytes in a second`,
		"set peer=9,rate=999":            `rate "999": want 1000 to`,
		"set peer=9,rate=2000000000000":  `rate "2000000000000": want 1000 to`,
		"set peer=9,rate=5000,rate=6000": `rate "6000": want rate, class of a peer, or order of a communicator, each once`,
		"set peer=9,class=64":            `class "64": want 0 to 63 (DSCP)`,
		"set app=5,class=46":             `class "46": want none: applications share the connection to a peer`,
		"set peer=9,order=ring":          `order "ring": want rate, class of a peer`,
		"set app=5,order=odd":            `order "odd": want ring or rank`,
		"set app=-5,rate=5000":           `app "-5": want an application id, 0 to 2147483647`,
		"set node=9,rate=5000":           `target "node=9": want peer=ID or app=ID`,
		"set peer=9,rate=5000,app=5":     `app "5": want rate, class of a peer`,
		"what":                           `question "what": want list, set POLICY`,
	} {
		_, err := askScheduler(t, c, question)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", question, err, want)
		}
	}
	cfg := config(func(x *postoffice.Config) { x.RootPort = testcluster.FreePort(t) })
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := cluster.AskScheduler(ctx, cfg, nil, "list")
	vantest.Fails(t, err, van.ErrTimeout, "no answer: it does not run", "C++ StepMesh")
	if errors.Is(err, van.ErrPeerLost) {
		t.Error(err)
	}
}

// TestAskProof: a process with another secret than the scheduler's gets an error that names it, long before its
// limit, and no answer.
func TestAskProof(t *testing.T) {
	testcluster.Over(t, askProof, testcluster.TCP, testcluster.Unix)
}

func askProof(t *testing.T, o testcluster.Options) {
	const own, other = "correct horse battery staple", "tr0ub4dor&3 tr0ub4dor&3"
	for _, c := range []struct {
		cluster, asker func(*postoffice.Config)
		want           string // of the error; "" for an answer
	}{
		{withSecret(own, "a"), withSecret(own, "a"), ""},
		{withSecret(own, "a"), withSecret(other, "a"), "its secret (STEPAF_SECRET_FILE)"}, // the asker may see no more than the end of the handshake
		{withSecret(own, "a"), withSecret(own, "b"), "STEPAF_CLUSTER_ID"},
		{withSecret(own, "a"), withSecret("", "a"), "it requires the cluster's secret, which this node does not have (STEPAF_SECRET_FILE)"},
		{withSecret("", "a"), withSecret(own, "a"), " secret"}, // the scheduler may end the handshake before the other end knows why
		{withSecret("", "a"), withSecret("", "a"), ""},
	} {
		o.Set = c.cluster
		cl := testcluster.Start(t, o)
		cfg := config(func(x *postoffice.Config) { x.RootPort, x.Local = cl.Port, cl.Scheduler.Config().Local; c.asker(x) })
		answers, err := cluster.AskScheduler(within(t, time.Minute), cfg, nil, "list")
		switch {
		case c.want == "" && (err != nil || len(answers) > 0):
			t.Errorf("%v: %q", err, answers)
		case c.want != "":
			vantest.Fails(t, err, van.ErrUnauthenticated, c.want, fmt.Sprintf("scheduler at 127.0.0.1:%d", cl.Port))
			if strings.Contains(fmt.Sprint(err), own) || strings.Contains(fmt.Sprint(err), other) {
				t.Errorf("the error shows the secret: %v", err)
			}
		}
		cl.Finalize(t)
	}
}

// TestWarnedOf: with STEPAF_AUTH=warn, nodes that have the secret are not taken for nodes without; a node that
// lacks it is.
func TestWarnedOf(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers, o.Servers = 2, 2
		o.Set = func(c *postoffice.Config) { c.Secret, c.Auth = "correct horse battery staple", env.AuthWarn }
		c := testcluster.Start(t, o)
		for _, n := range c.Nodes() {
			if s := testcluster.Stats(n); s.Unauthenticated != 0 {
				t.Errorf("%s counts %d nodes without proof, want 0", n.Name(), s.Unauthenticated)
			}
		}
		c.Workers[1].Close()
		testcluster.Lost(t, c.Scheduler, c.Workers[1].ID())
		w, err := c.Join(within(t, time.Minute), "worker", 1, func(c *postoffice.Config) { c.Secret, c.Auth = "", "" })
		if err != nil {
			t.Fatal(err)
		}
		c.Workers[1] = w
		if s := testcluster.Stats(c.Scheduler); s.Unauthenticated == 0 {
			t.Error("the scheduler has not counted a worker without the secret")
		}
		c.Finalize(t)
	}, testcluster.TCP, testcluster.SHM)
}

func withSecret(secret, cluster string) func(*postoffice.Config) {
	return func(c *postoffice.Config) { c.Secret, c.ClusterID = env.Secret(secret), cluster }
}
