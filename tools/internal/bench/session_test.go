package bench

import (
	"strings"
	"testing"
)

func TestSessionArguments(t *testing.T) {
	for args, want := range map[string]string{
		"--ranks 0":                           "want positive numbers",
		"--iters 0":                           "want positive numbers",
		"--rounds -1":                         "want positive numbers",
		"--check":                             "--check wants --van local and 4 ranks",
		"--check --van local --ranks 2":       "--check wants --van local and 4 ranks",
		"--van local --ranks 1 --timeout 1ns": "deadline exceeded",
	} {
		_, err := bench(t, append([]string{"session"}, strings.Fields(args)...)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

// TestSession runs the benchmark with processes: its output, and that --check fails only if the goal is missed.
func TestSession(t *testing.T) {
	text, err := bench(t, strings.Fields("session --van zmq --ranks 1 --iters 5 --rounds 2")...)
	for _, want := range []string{"10 calls of an empty function on 1 ranks over zmq, all checked: true\n", "push_pull, 1 KiB ", "times one with all of them\n"} {
		if err != nil || !strings.Contains(text, want) {
			t.Errorf("%v; no %q in:\n%s", err, want, text)
		}
	}
	old := callGoal
	defer func() { callGoal = old }()
	for _, limit := range []float64{1e-6, 1e6} {
		callGoal.limit = limit
		all, err := lines[sessionReport](t, "session --van local --check --iters 10 --rounds 2")
		if len(all) != 1 {
			t.Fatalf("%d reports, %v", len(all), err)
		}
		r := &all[0]
		if !r.Call.ordered() || !r.PushPull.ordered() || !r.All.ordered() || r.Calls != 20 || r.Ranks != 4 || r.Van != local || !r.Checked || r.Goal != limit ||
			r.RatioP50 != r.Call.P50/r.PushPull.P50 || r.RatioAll != r.Call.P50/r.All.P50 {
			t.Errorf("%+v", r)
		}
		missed := err != nil && strings.Contains(err.Error(), "goals missed: call of 4 ranks over local: ") && strings.Contains(err.Error(), "times a push_pull of 1 KiB")
		if r.Missed != (limit < 1) || missed != r.Missed || !missed && err != nil {
			t.Errorf("goal %g, ratio %g: missed %t, %v", limit, r.RatioP50, r.Missed, err)
		}
	}
}
