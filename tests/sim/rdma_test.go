package sim

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/tests/internal/sim"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

const rdmaPlan = `{"name": "x", "about": "x", "cluster": {"workers": 1, "servers": 1%s}, "transport": {"kind": "rdma"%s},
	"phases": [{"name": "x", "for": "1s", "loads": [{"nodes": "workers", "every": "10ms", "size": 4096}], "events": [%s]}], "end": {"settle": "1s"}}`

func parse(t *testing.T, cluster, transport, event string) *plan.Plan {
	t.Helper()
	p, err := plan.Parse("x.json", []byte(fmt.Sprintf(rdmaPlan, cluster, transport, event)))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestRDMA: the messages of a plan over RDMA use its devices.
func TestRDMA(t *testing.T) {
	r := sim.Run(t, parse(t, "", "", ""), 1)
	for _, v := range r.Violations {
		t.Error(v)
	}
	// A request and its answer, each a value and a meta at least.
	if r.Calls < 50 || r.Failed != 0 || r.Posted < 4*r.Calls {
		t.Errorf("%d calls, %d failed, %d work requests; want 50 calls, none failed, and 4 work requests each", r.Calls, r.Failed, r.Posted)
	}
}

// TestRDMARefuses: a plan is refused, with the field, if it asks for something that devices in memory cannot do.
func TestRDMARefuses(t *testing.T) {
	for _, x := range []struct{ cluster, transport, event, want string }{
		{"", "", `{"at": "0s", "do": "break", "node": "worker 0"}`, "phases[0].events[0].do: break"},
		{"", "", `{"at": "0s", "do": "slow-link", "node": "worker 0", "peer": "server 0", "bandwidth": 1}`, "phases[0].events[0].do: slow-link"},
		{"", "", `{"at": "0s", "do": "kill", "node": "worker 0", "fork": true}`, "whose child keeps"},
		{"", `, "bandwidth": 1000`, "", "transport.bandwidth"},
		{"", `, "queue": 1000`, "", "transport.queue"},
		{"", `, "break": 0.1`, "", "transport.break"},
		{"", `, "resend": true, "loss": 0.1`, "", "transport.loss"},
		{"", `, "resend": true, "duplicate": 0.1`, "", "transport.duplicate"},
		{`, "foreign": ["worker 0"]`, "", "", "cluster.foreign"},
		{`, "stuck": "worker 0", "stuck_by": "1s"`, "", "", "cluster.stuck"},
	} {
		r := sim.Run(t, parse(t, x.cluster, x.transport, x.event), 1)
		if len(r.Violations) != 1 || r.Violations[0].Kind != "not simulated" || !strings.Contains(r.Violations[0].Text, x.want) {
			t.Errorf("%+v: %v; want one violation that names it", x, r.Violations)
		}
	}
}
