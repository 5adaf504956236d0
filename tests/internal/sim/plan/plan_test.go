package plan

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

const small = `{"name": "x", "about": "x", "cluster": {"workers": 2, "servers": 1}, "transport": {},
 "phases": [{"name": "a", "for": "10s", "loads": [{"nodes": "workers", "every": "10ms"}],
  "events": [{"at": "1s", "do": "kill", "node": "worker 0"}], "expect": [{"nodes": "worker 1", "rounds": "all"}]}], "end": {}}`

func TestParse(t *testing.T) {
	p, err := Parse("x.json", []byte(small))
	if err != nil {
		t.Fatal(err)
	}
	if p.Length() != 10*time.Second || len(p.Cluster.All()) != 4 || p.Phases[0].Events[0].Do != Kill {
		t.Errorf("read %+v", p)
	}
	b, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	q, err := Parse("again", b)
	if err != nil || !reflect.DeepEqual(p, q) {
		t.Errorf("written and read again: %+v, %v; want %+v", q, err, p)
	}
}

// TestRefused: an error names the file, the field and the value.
func TestRefused(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{`"workers": 2`, `"workers": 0`, "cluster.workers is 0, want at least 1"},
		{`"workers": 2`, `"wrokers": 2`, `unknown field "wrokers"`},
		{`"workers": 2`, `"workers": 2, "api": "rust"`, `cluster.api is "rust", want one of`},
		{`"for": "10s"`, `"for": "10"`, `want a duration`},
		{`"for": "10s"`, `"for": 10`, `want a duration in quotes`},
		{`"for": "10s"`, `"for": "0s"`, `phases[0].for is 0s, want more than 0`},
		{`"do": "kill"`, `"do": "shoot"`, `phases[0].events[0].do is "shoot", want one of`},
		{`"do": "kill"`, `"do": "kill", "for": "1s"`, `phases[0].events[0].for is 1s, want none`},
		{`"do": "kill"`, `"do": "cut", "peer": "worker 0"`, `phases[0].events[0].peer is "worker 0", want another`},
		{`"at": "1s"`, `"at": "11s"`, `phases[0].events[0].at is 11s, want 0 to the length`},
		{`"node": "worker 0"`, `"node": "worker 2"`, `phases[0].events[0].node is "worker 2", want a node of the cluster`},
		{`"nodes": "worker 1"`, `"nodes": "everybody"`, `phases[0].expect[0].nodes is "everybody", want a node`},
		{`"rounds": "all"`, `"rounds": "most"`, `phases[0].expect[0].rounds is "most", want one of`},
		{`"transport": {}`, `"transport": {"loss": 0.1}`, `transport.loss is 0.1, want 0 without resend`},
		{`"end": {}`, `"end": {},`, "x.json:"},
	} {
		text := strings.Replace(small, c.old, c.new, 1)
		if _, err := Parse("x.json", []byte(text)); err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "x.json") {
			t.Errorf("%s: %v, want one with %q", c.new, err, c.want)
		}
	}
}

// TestSlower: for a machine that is three times as slow all times of a plan are three times as
// long, and the plan itself stays as it was.
func TestSlower(t *testing.T) {
	const text = `{"name": "x", "about": "x", "cluster": {"workers": 2, "servers": 1, "env": {"PS_HEARTBEAT_INTERVAL": "1"}}, "transport": {},
 "phases": [{"name": "a", "for": "10s", "loads": [{"nodes": "workers", "every": "10ms", "limit": "2s"}, {"nodes": "worker 0"}],
  "events": [{"at": "1s", "do": "stop", "node": "worker 0", "for": "2s"}], "expect": [{"nodes": "worker 1", "rounds": "all", "after": "4s", "within": "1s"}]}], "end": {}}`
	p, err := Parse("x.json", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	const s = Duration(time.Second)
	q := p.Slower(3)
	ph := q.Phases[0]
	for i, got := range []struct{ is, want Duration }{{ph.For, 30 * s}, {ph.Loads[0].Every, 30 * s / 1000}, {ph.Loads[0].Limit, 6 * s}, {ph.Loads[1].Limit, 15 * s},
		{ph.Events[0].At, 3 * s}, {ph.Events[0].For, 6 * s}, {ph.Expect[0].After, 12 * s}, {ph.Expect[0].Within, 3 * s}, {q.End.Settle, 90 * s}} {
		if got.is != got.want {
			t.Errorf("time %d is %s, want %s", i, got.is.D(), got.want.D())
		}
	}
	if want := map[string]string{"PS_HEARTBEAT_INTERVAL": "3", "STEPAF_REPLACE_TIMEOUT": "30"}; !reflect.DeepEqual(q.Cluster.Env, want) {
		t.Errorf("the variables are %v, want %v", q.Cluster.Env, want)
	}
	if again, _ := Parse("x.json", []byte(text)); !reflect.DeepEqual(p, again) {
		t.Errorf("the plan itself is %+v now, want %+v", p, again)
	}
	p.Cluster.Env = nil
	if want := map[string]string{"PS_HEARTBEAT_TIMEOUT": "30", "STEPAF_REPLACE_TIMEOUT": "30"}; !reflect.DeepEqual(p.Slower(3).Cluster.Env, want) {
		t.Errorf("without variables they are %v, want %v", p.Slower(3).Cluster.Env, want)
	}
}

// TestSlowerPromised: of a plan whose times are promised only the rate of the calls is another one on a slow machine,
// and the time for all to settle.
func TestSlowerPromised(t *testing.T) {
	const text = `{"name": "x", "about": "x", "promised": true, "cluster": {"workers": 2, "servers": 1, "env": {"PS_HEARTBEAT_INTERVAL": "1"}}, "transport": {},
 "phases": [{"name": "a", "for": "10s", "loads": [{"nodes": "workers", "every": "10ms", "limit": "2s"}, {"nodes": "worker 0"}],
  "events": [{"at": "1s", "do": "stop", "node": "worker 0", "for": "2s"}], "expect": [{"nodes": "worker 1", "rounds": "all", "after": "4s", "within": "1s"}]}], "end": {}}`
	p, err := Parse("x.json", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	want, _ := Parse("x.json", []byte(text))
	want.Phases[0].Loads[0].Every = Duration(30 * time.Millisecond)
	want.End.Settle = Duration(90 * time.Second)
	if q := p.Slower(3); !reflect.DeepEqual(q, want) {
		t.Errorf("three times as slow it is %+v, want %+v", q, want)
	}
	if again, _ := Parse("x.json", []byte(text)); !reflect.DeepEqual(p, again) {
		t.Errorf("the plan itself is %+v now, want %+v", p, again)
	}
}

// TestPlans: the plans of this repository are right.
func TestPlans(t *testing.T) {
	if _, err := ReadDir("../../../plans"); err != nil {
		t.Error(err)
	}
}

// TestRandom: plans from seeds are right, and the same ones each time.
func TestRandom(t *testing.T) {
	for seed := range uint64(500) {
		p := Random(seed)
		if err := p.Check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if !reflect.DeepEqual(p, Random(seed)) {
			t.Fatalf("seed %d gives two plans", seed)
		}
	}
}
