package sim

import (
	"fmt"
	"testing"

	"github.com/stepaf/stepaf-go/tests/internal/sim"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

const expectPlan = `{"name": "x", "about": "x", "cluster": {"workers": 1, "servers": 1, "env": {"STEPAF_SEND_BUDGET": "1M", "PS_HEARTBEAT_INTERVAL": "0"}}, "transport": {},
	"phases": [{"name": "x", "for": "6s", "loads": [{"nodes": "workers", "size": 65536, "window": 100, "every": "1ms", "limit": "1s", "rounds": 200}],
		"events": [{"at": "10ms", "do": "stop", "node": "server 0", "for": "4s"}, {"at": "5s", "do": "barrier", "node": "worker 0"},
			{"at": "5500ms", "do": "barrier", "node": "server 0"}],
		"expect": [{"nodes": "worker 0", %s}]}], "end": {}}`

// TestExpectations: an error or a time that a plan does not expect is a violation, and so is an expected one that is missing.
func TestExpectations(t *testing.T) {
	for _, x := range []struct{ expect, want string }{
		{`"some_error": "send queue full"`, ""},
		{`"some_error": "the sky has fallen"`, "wrong error"},
		{`"error": "send queue full"`, "wrong error"}, // others have timed out
		{`"barriers": "pass", "within": "2s"`, ""},
		{`"barriers": "pass", "within": "300ms"`, "late"},
	} {
		p, err := plan.Parse("x.json", []byte(fmt.Sprintf(expectPlan, x.expect)))
		if err != nil {
			t.Fatal(err)
		}
		r := sim.Run(t, p, 1)
		got := map[string]bool{}
		for _, v := range r.Violations {
			got[v.Kind] = true
		}
		if len(got) > 1 || len(got) == 0 && x.want != "" || len(got) == 1 && !got[x.want] {
			t.Errorf("%s: %v, want %q", x.expect, r.Violations, x.want)
		}
	}
}
