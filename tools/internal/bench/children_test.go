package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
)

// TestMain makes this program a child of a benchmark, too: benchmarks that a test runs start the test program
// itself.
func TestMain(m *testing.M) {
	if len(os.Args) < 2 || os.Args[1] != "bench" {
		os.Exit(m.Run())
	}
	app := &cli.App{Name: "stepaf", Commands: []*cli.Command{Command()}, ExitErrHandler: func(*cli.Context, error) {}}
	if err := app.Run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(exit.Status(err))
	}
}

// lines runs a benchmark with --json, and returns its output and its error.
func lines[T any](t *testing.T, args string) (all []T, err error) {
	t.Helper()
	text, err := bench(t, strings.Fields(args+" --json")...)
	for line := range strings.Lines(text) {
		var r T
		if e := json.Unmarshal([]byte(line), &r); e != nil {
			t.Fatalf("%s: %q: %v", args, line, e)
		}
		all = append(all, r)
	}
	return all, err
}

// ordered reports whether quantiles are in order and measured.
func (q quantiles) ordered() bool {
	return 0 < q.P50 && q.P50 <= q.P90 && q.P90 <= q.P99 && q.P99 <= q.Max && 0 < q.Mean && q.Mean <= q.Max
}

// TestOverRDMA runs the benchmarks that are compared with perftest, on a device.
func TestOverRDMA(t *testing.T) {
	run, err := newRDMARun(t.Context(), "")
	if err != nil {
		t.Skipf("no RDMA here (make rdma-test PKGS=./tools/internal/bench has some): %v", err)
	}
	check := func(what string, us float64, limit float64, r *rdmaReport) {
		t.Helper()
		if r == nil || r.Missing != "" || r.Device != run.at.Device || r.WriteLat <= 0 || r.LatRatio != us/r.WriteLat || r.LatGoal != limit || r.Missed != (r.LatRatio > limit) {
			t.Errorf("%s: %g us, beside perftest: %+v", what, us, r)
		}
	}
	windows, err := lines[windowReport](t, "window --van ibverbs --size 1024 --iters 20 --rounds 2")
	if err != nil || len(windows) != 1 || !windows[0].Trip.ordered() || !windows[0].Floor.ordered() || windows[0].Of != "verbs" {
		t.Fatalf("%+v, %v", windows, err)
	}
	check("PutSignal", windows[0].OneWay.P50, 3, windows[0].RDMA)
	gathers, err := lines[collectiveReport](t, "collective --van ibverbs --op AllGather --size 65536 --ranks 2 --iters 20 --rounds 2")
	if err != nil || len(gathers) != 1 || !gathers[0].Ours.ordered() || gathers[0].Gloo != nil || gathers[0].Missed || gathers[0].Goal != 0 {
		t.Fatalf("%+v, %v", gathers, err)
	}
	check("AllGather", gathers[0].Ours.P50, 5, gathers[0].RDMA)
}
