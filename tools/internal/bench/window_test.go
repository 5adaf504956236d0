package bench

import (
	"strings"
	"testing"
)

func TestWindowArguments(t *testing.T) {
	for args, want := range map[string]string{
		"--van tcp":                 "--van tcp: want local, zmq or ibverbs",
		"--size 15":                 "--size [15], --iters 0, --rounds 10: want sizes of 16 bytes",
		"--size 2147483647":         "to 1 GiB",
		"--iters -1":                "--iters -1",
		"--rounds 0":                "--rounds 0: want",
		"--van local --timeout 1ns": "deadline exceeded",
	} {
		_, err := bench(t, append([]string{"window"}, strings.Fields(args)...)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

// TestWindow runs the benchmark with processes: its output, and that --check fails only if a goal is missed.
func TestWindow(t *testing.T) {
	text, err := bench(t, strings.Fields("window --van zmq --size 1024 --iters 6 --rounds 2")...)
	for _, want := range []string{"two ranks over zmq, ", "\n     1024      6 ", "(libzmq)\n"} {
		if err != nil || !strings.Contains(text, want) {
			t.Errorf("%v; no %q in:\n%s", err, want, text)
		}
	}
	const size = 4096
	defer delete(windowGoals[local], size)
	for _, limit := range []float64{1e-6, 1e6} {
		windowGoals[local][size] = limit
		all, err := lines[windowReport](t, "window --van local --check --size 16 --size 4096 --iters 10 --rounds 2")
		if len(all) != 2 {
			t.Fatalf("%d reports, %v", len(all), err)
		}
		for i := range all {
			r := &all[i]
			if !r.Trip.ordered() || !r.OneWay.ordered() || !r.Floor.ordered() || r.Iters != 10 || r.Bytes != []int{16, size}[i] || !r.Checked || r.RatioP50 != r.Trip.P50/r.Floor.P50 {
				t.Errorf("%+v", r)
			}
		}
		r := &all[1]
		missed := err != nil && strings.Contains(err.Error(), "goals missed: PutSignal of 4096 bytes: ") && strings.Contains(err.Error(), "times the floor")
		if all[0].Goal != 0 || all[0].Missed || r.Goal != limit || r.Missed != (limit < 1) || missed != r.Missed || !missed && err != nil {
			t.Errorf("goal %g, ratio %g: missed %t, %v", limit, r.RatioP50, r.Missed, err)
		}
	}
}

// TestWindowGoals: results at the goals and beyond them; over RDMA one way is compared with perftest.
func TestWindowGoals(t *testing.T) {
	beside := func(lat, us float64) *rdmaReport {
		x := &rdmaReport{Device: "rxe0", Port: 1, WriteLat: lat}
		x.compareTime(us)
		return x
	}
	for _, x := range []struct {
		r    windowReport
		want string // of --check; "" is well
	}{
		{windowReport{windowFigures: windowFigures{Van: zmq, Bytes: 1 << 10, comparison: comparison{RatioP50: 3}}}, ""},
		{windowReport{windowFigures: windowFigures{Van: zmq, Bytes: 1 << 10, comparison: comparison{RatioP50: 3.1}}}, "PutSignal of 1024 bytes: 3.10 times the floor, want at most 3"},
		{windowReport{windowFigures: windowFigures{Van: local, Bytes: 1 << 20, comparison: comparison{RatioP50: 4.1}}}, "PutSignal of 1048576 bytes: 4.10 times the floor, want at most 4"},
		{windowReport{windowFigures: windowFigures{Van: local, Bytes: 1 << 10, comparison: comparison{RatioP50: 100}}}, ""},
		{windowReport{windowFigures: windowFigures{Van: ibverbs, Bytes: 1 << 10, comparison: comparison{RatioP50: 100}}, RDMA: beside(10, 30)}, ""},
		{windowReport{windowFigures: windowFigures{Van: ibverbs, Bytes: 1 << 10}, RDMA: beside(10, 31)}, "PutSignal of 1024 bytes: 3.10 times ib_write_lat, want at most 3"},
		{windowReport{windowFigures: windowFigures{Van: ibverbs, Bytes: 1 << 20}, RDMA: beside(10, 1e4)}, ""},
		{windowReport{windowFigures: windowFigures{Van: ibverbs, Bytes: 1 << 10}, RDMA: &rdmaReport{Missing: "no tools"}}, "PutSignal of 1024 bytes: no tools"},
	} {
		var v verdict
		x.r.compareGoal(&v)
		err := v.err()
		if (err != nil) != (x.want != "") || err != nil && !strings.HasSuffix(err.Error(), x.want) {
			t.Errorf("%+v: %v, want %q", x.r, err, x.want)
		}
	}
	if got := exchangeGoals[ibverbs][exchange{allGather, 64 << 10}]; got != 5 {
		t.Errorf("AllGather of 64 KiB over RDMA: goal %g, want 5", got)
	}
	r := windowReport{windowFigures: windowFigures{Van: ibverbs, Bytes: 1 << 10}, RDMA: beside(10, 31)}
	var text strings.Builder
	r.compareGoal(new(verdict))
	if err := r.print(&text); err != nil || !strings.HasSuffix(text.String(), "\nib_write_lat, one way: 10.00 us; one way takes 3.10 times that (goal: at most 3)\n") {
		t.Errorf("%v:\n%s", err, text.String())
	}
}
