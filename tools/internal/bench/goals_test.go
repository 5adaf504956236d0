package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/van/backend"
)

// bench runs the command in this process.
func bench(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	app := &cli.App{Name: "stepaf", Commands: []*cli.Command{Command()}, Writer: &out, ErrWriter: io.Discard,
		ExitErrHandler: func(*cli.Context, error) {}}
	err := app.RunContext(t.Context(), append([]string{"stepaf", "bench"}, args...))
	return out.String(), err
}

func TestArguments(t *testing.T) {
	for args, want := range map[string]string{
		"latency --device tpu":                                 "--device tpu: want cpu or gpu",
		"latency --gpus 0,1":                                   "--gpus wants --device gpu",
		"latency --prepared":                                   "--prepared wants --device gpu",
		"latency --device gpu --van ibverbs":                   "--device gpu --van ibverbs: want --van local or zmq",
		"latency --device gpu --gpus 1":                        "--gpus 1: want the worker's and the server's number",
		"latency --device gpu --gpus 0,1,2":                    "--gpus 0,1,2: want",
		"latency --device gpu --gpus 0,x":                      "--gpus 0,x: want",
		"latency --device gpu --gpus 0,-1":                     "--gpus 0,-1: want",
		"latency --check":                                      "--check wants --van ibverbs, or --van local --device gpu",
		"latency --check --van local":                          "--check wants --van ibverbs, or --van local --device gpu",
		"latency --check --van ibverbs --push 3 --pull 1":      "--check: there is no goal for --push 3 --pull 1",
		"latency --push 0 --pull 0":                            "want 0 to 2147483647 bytes each, not both 0",
		"latency --iters -1":                                   "--iters -1, --warmup 0, --rounds 10: want",
		"latency --van local --push 4294967296 --pull 1":       "want 0 to 2147483647 bytes each",
		"latency --push 1 --pull 1 --rounds 0 --iters 1 --van": "flag needs an argument",
	} {
		_, err := bench(t, strings.Fields(args)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

func TestPlace(t *testing.T) {
	for _, c := range []struct {
		args string
		gpus int
		want []int
		err  string
		note bool
	}{
		{"--van local --device gpu", 2, []int{0, 1}, "", false},
		{"--van zmq --device gpu", 8, []int{0, 1}, "", false},
		{"--van local --device gpu", 1, []int{0, 0}, "", true},
		{"--van local --device gpu --gpus 3,2", 4, []int{3, 2}, "", false},
		{"--van local --device gpu --gpus 1,1", 4, []int{1, 1}, "", true},
		{"--van local --device gpu --gpus 0,2", 2, nil, "--gpus 0,2: this machine has 2", false},
		{"--van local --device gpu", 0, nil, "no driver", false},
		{"--van local", 0, nil, "", false},
	} {
		latency := Command().Subcommands[0]
		var got place
		latency.Action = func(ctx *cli.Context) (err error) {
			got, err = newPlace(ctx, func() ([]backend.Info, error) {
				if c.gpus == 0 {
					return nil, errors.New("no driver")
				}
				return make([]backend.Info, c.gpus), nil
			})
			return err
		}
		app := &cli.App{Commands: []*cli.Command{latency}, ExitErrHandler: func(*cli.Context, error) {}}
		err := app.Run(append([]string{"stepaf", "latency"}, strings.Fields(c.args)...))
		if (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, want %q", c.args, err, c.err)
		}
		if !slices.Equal(got.gpus, c.want) || (got.note() != "") != c.note {
			t.Errorf("%s, of %d GPUs: %v, note %q; want %v", c.args, c.gpus, got.gpus, got.note(), c.want)
		}
	}
	p := place{gpus: []int{0, 3}}
	for role, want := range map[string]string{
		"scheduler": "STEPMESH_BAKCEND=CPU",
		"worker":    "STEPMESH_BAKCEND=GPU STEPMESH_GPU=0 DMLC_RANK_OFFSET=0",
		"server":    "STEPMESH_BAKCEND=GPU STEPMESH_GPU=3 DMLC_RANK_OFFSET=-3",
	} {
		if got := strings.Join(p.env(role), " "); got != want {
			t.Errorf("%s: %s, want %s", role, got, want)
		}
		if got := (place{}).env(role); !slices.Equal(got, []string{"STEPMESH_BAKCEND=CPU"}) {
			t.Errorf("%s without a GPU: %s", role, got)
		}
	}
}

func TestCourses(t *testing.T) {
	if got := courses[course{zmq, cpu}]; got != nil {
		t.Errorf("host memory: %v", got)
	}
	if got := courses[course{ibverbs, cpu}]; !slices.Equal(got, []payload{both(1024), both(65536), attention}) {
		t.Errorf("RDMA: %v", got)
	}
	want := []payload{both(1024), attention, both(16777216), both(268435456)}
	for _, way := range []course{{local, gpu}, {zmq, gpu}} {
		if got := courses[way]; !slices.Equal(got, want) {
			t.Errorf("%v: %v", way, got)
		}
	}
	for _, c := range []struct {
		p       payload
		ratio   float64
		verdict string
	}{
		{both(1024), 2, ""},
		{both(1024), 2.01, "push 1024, pull 1024: 2.01 times the floor, want at most 2"},
		{attention, 1.6, ""},
		{attention, 1.61, "push 917504, pull 1835008: 1.61 times the floor, want at most 1.6"},
		{both(16 << 20), 100, ""},
		{both(256 << 20), 1.05, ""},
		{both(256 << 20), 1.06, "1.06 times the floor, want at most 1.05"},
		{both(77), 100, ""},
	} {
		var v verdict
		rep := newLatencyReport(local, place{}, c.p, 1,
			[]int64{int64(c.ratio * 1e6)}, []int64{1e6}, nil)
		rep.judge(c.p, course{local, gpu}.goal(c.p), &v)
		err := v.err()
		if (err != nil) != (c.verdict != "") || err != nil && !strings.Contains(err.Error(), c.verdict) || rep.Missed != (err != nil) {
			t.Errorf("%v, %g times: %v, missed %t; want %q", c.p, c.ratio, err, rep.Missed, c.verdict)
		}
	}
}

func TestDeviceReport(t *testing.T) {
	rep := newLatencyReport(local, place{gpus: []int{1, 1}, both: true}, both(1024), 2, []int64{20000, 30000}, []int64{10000, 12000}, nil)
	rep.Floor = "GPU"
	rep.judge(both(1024), course{local, gpu}.goal(both(1024)), new(verdict))
	var text, line strings.Builder
	if err := errors.Join(rep.print(&text), json.NewEncoder(&line).Encode(rep)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"push_pull over local (gpu:1 and gpu:1, prepared by both ends), push 1024 bytes, pull 1024 bytes, 2 round trips, values checked around each block: true\n",
		"note: both processes use gpu:1: ",
		"floor (GPU)            12.0       12.0       12.0       12.0\n",
		"push_pull takes 2.50 times the floor at p50 (goal: at most 2)\n",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in:\n%s", want, text.String())
		}
	}
	var got map[string]any
	if err := json.Unmarshal([]byte(line.String()), &got); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]any{"device": "gpu", "prepared": true, "goal_ratio_p50": 2.0, "missed": true, "floor": "GPU", "ratio_p50": 2.5} {
		if got[name] != want {
			t.Errorf("%s: %v, want %v", name, got[name], want)
		}
	}
}
