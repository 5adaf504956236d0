package bench

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
)

func TestAFDArguments(t *testing.T) {
	for args, want := range map[string]string{
		"-n 0":                         "-n 0: want a number of workers, 1 to 64, or several separated by commas",
		"-n 1,x":                       "-n 1,x: want a number of workers",
		"-n 1 -s 65":                   "-s 65: want a number of servers, 1 to 64",
		"-s 1,":                        "-s 1,: want a number of servers",
		"--compute 97":                 "--compute 97: want a duration of 1us to 1s with its unit, such as 97us, or several",
		"--compute 97us,0s":            "--compute 97us,0s: want a duration",
		"--form both":                  "--form both: want push_pull, prepared, hosts, streams, side, graphs, torch, all, or several",
		"--form prepared,graphs":       "--form prepared,graphs: hosts, streams, side, graphs want --device gpu",
		"--device tpu":                 "--device tpu: want cpu or gpu",
		"--gpus 0":                     "--gpus wants --device gpu",
		"--device gpu --gpus 0,x":      "--gpus 0,x: want a number of a GPU, from 0, or several",
		"--van ibverbs":                "--van ibverbs: want local or zmq",
		"--push 7":                     "--push 7: want 8 to 1073741824 bytes",
		"--pull 0":                     "--pull 0: want 8 to",
		"--layers -1":                  "--layers -1: want 0 to 1000",
		"--micro-batches 0":            "--micro-batches 0: want 1 to 64",
		"--iters -1":                   "--iters -1: want 0 to 10000000, where 0 chooses by size",
		"--steps -1":                   "--steps -1: want 0 to",
		"--rounds 0":                   "--rounds 0: want 1 to",
		"--timeout 0s":                 "--timeout 0s: want more than 0",
		"--json --csv":                 "--json and --csv: want one of them",
		"-n 64 -s 64":                  "want at most 8 GiB: fewer processes",
		"--plot x.png -n 1,2":          "--plot x.png: want the name of a file that ends with .svg",
		"--plot no/x.svg -n 1,2":       "--plot no/x.svg: want a file in a directory that exists",
		"--plot x.svg":                 "--plot x.svg: want several values of -n or -s, or of --compute",
		"--plot x.svg -n 1 --layers 0": "--plot x.svg: want several values of",
		"2":                            `unexpected argument "2"`,
	} {
		_, err := bench(t, append([]string{"afd"}, strings.Fields(args)...)...)
		if err == nil || !strings.Contains(err.Error(), want) || exit.Status(err) != exit.Misuse {
			t.Errorf("%s: %v (status %d), want %q", args, err, exit.Status(err), want)
		}
	}
	if _, err := bench(t, "afd", "--timeout", "1ns"); err == nil || !strings.Contains(err.Error(), "deadline exceeded (--timeout 1ns)") {
		t.Errorf("--timeout 1ns: %v", err)
	}
}

// TestAFD runs the benchmark with processes, over both transports: the report as JSON, as a table and as
// comma-separated values with a picture.
func TestAFD(t *testing.T) {
	all, err := lines[afdReport](t, "afd --python none -n 2 -s 2 --van local --push 5000 --pull 9000 --iters 20 --rounds 2 --layers 3 --micro-batches 2 --steps 4 --compute 20us")
	if err != nil || len(all) != 1 {
		t.Fatalf("%d reports, %v", len(all), err)
	}
	r := &all[0]
	if r.Workers != 2 || r.Servers != 2 || r.Van != local || r.Floor != "copies" || !r.Checked || r.Layers != 3 || r.MicroBatches != 2 || len(r.CPU) != 5 || r.NoPython != noPython || r.NoTorch != noPython || r.Processors < 1 {
		t.Errorf("%+v", r)
	}
	var forms []string
	for _, x := range r.Trips {
		forms = append(forms, afdName(x.From, x.Form)+" "+strconv.Itoa(x.Worker))
		floor := r.Trips[x.Worker]
		if !x.ordered() || x.Count != 20 || x.Form != askFloor && (x.RatioP50 != x.P50/floor.P50 || x.RatioP99 != x.P99/floor.P99) {
			t.Errorf("round trips %+v", x)
		}
	}
	if want := []string{"floor 0", "floor 1", "Go push_pull 0", "Go push_pull 1", "Go prepared 0", "Go prepared 1"}; !slices.Equal(forms, want) {
		t.Errorf("round trips of %q, want %q", forms, want)
	}
	if len(r.Steps) != 2 || r.Steps[0].Form != formPushPull || r.Steps[1].Form != formPrepared {
		t.Fatalf("steps %+v", r.Steps)
	}
	const layersMicroBatches, compute = 3 * 2, 20.0
	for _, x := range r.Steps {
		if !x.ordered() || !x.Alone.ordered() || x.Count != 4 || x.Compute != compute || x.RatioP50 != x.P50/x.Alone.P50 ||
			x.P50 < layersMicroBatches*compute || x.Alone.P50 < layersMicroBatches*compute {
			t.Errorf("steps %+v, want at least %g us", x, layersMicroBatches*compute)
		}
	}

	text, err := bench(t, strings.Fields("afd --python none --van zmq -n 1 -s 2 --form prepared --push 5000 --pull 9000 --iters 4 --rounds 2 --layers 2 --steps 2 --compute 10us")...)
	for _, want := range []string{"workers: 1, servers: 2, over zmq, push 5000 bytes to and pull 9000 bytes from each server, all answers checked: true\n",
		"\nfloor (TCP), worker 0 ", "\nGo prepared, worker 0 ", "\nPython: not measured: --python none\n", "\ndecode steps of 2 layers with 3 micro-batches, milliseconds\n", "\n10µs, Go prepared ", "\nCPU seconds: "} {
		if err != nil || !strings.Contains(text, want) {
			t.Errorf("%v; no %q in:\n%s", err, want, text)
		}
	}
	if strings.Contains(text, formPushPull) {
		t.Errorf("--form prepared has measured others:\n%s", text)
	}

	file := filepath.Join(t.TempDir(), "x.svg")
	text, err = bench(t, append(strings.Fields("afd --python none --van local -n 1,2 --push 50 --pull 90 --iters 4 --rounds 1 --layers 2 --micro-batches 1 --steps 2 --compute 10us,20us --csv --plot"), file)...)
	rows, wrong := csv.NewReader(strings.NewReader(text)).ReadAll()
	if err != nil || wrong != nil || len(rows) != 1+3+4+6+4 || !slices.Equal(rows[0], strings.Split(afdColumns, ",")) {
		t.Errorf("%v, %v; %d rows of:\n%s", err, wrong, len(rows), text)
	}
	svg, err := os.ReadFile(file)
	for _, want := range []string{"<svg ", ">round trip over local, p50<", ">1 x 1<", ">2 x 1<", ">floor (copies)<", ">decode step over local, p50<", ">2 x 1, Go prepared<"} {
		if err != nil || !strings.Contains(string(svg), want) {
			t.Errorf("the picture has no %q: %v", want, err)
		}
	}
}

// TestAFDValues: wrong values in a push or an answer are found by the stamps or, in other bytes, by the check of every
// byte.
func TestAFDValues(t *testing.T) {
	const workers, servers, size = 2, 2, 200000
	for name, c := range map[string]struct {
		spoil func(ws []*afdWorker, ss []*afdServer)
		want  string
	}{
		"none":   {func([]*afdWorker, []*afdServer) {}, ""},
		"answer": {func(_ []*afdWorker, ss []*afdServer) { ss[1].answers[0][0].Val.Bytes()[stride(size)+100] ^= 1 }, "answer of server 1"},
		"push":   {func(ws []*afdWorker, _ []*afdServer) { ws[1].all[1].bytes()[size-1] ^= 1 }, "push to server"},
		"worker": {func(ws []*afdWorker, _ []*afdServer) { ws[1].rank = 0 }, "a push of worker 1 has the stamp of round trip 1 of worker 0"},
		"server": {func(_ []*afdWorker, ss []*afdServer) { ss[0].rank = 1 }, "of worker "},
	} {
		t.Run(name, func(t *testing.T) {
			cl := testcluster.Start(t, testcluster.Options{Workers: workers, Servers: servers})
			shape := &afdShape{push: size, pull: size, microBatches: 2, layers: 2, image: make([]byte, size)}
			fill(shape.image)
			var ws []*afdWorker
			var ss []*afdServer
			for _, node := range cl.Servers {
				s, err := newAFDServer(shape, node)
				if err != nil {
					t.Fatal(err)
				}
				ss = append(ss, s)
			}
			for _, node := range cl.Workers {
				w, err := newAFDWorker(shape, node)
				if err != nil {
					t.Fatal(err)
				}
				defer w.close()
				ws = append(ws, w)
			}
			c.spoil(ws, ss)
			var err error
			for _, what := range []string{askCalls, askSteps} {
				if what == askSteps {
					for _, s := range ss {
						s.compute.Store(int64(time.Microsecond))
					}
				}
				for _, form := range afdForms {
					var group errgroup.Group
					for _, w := range ws {
						group.Go(func() error {
							ns, err := w.do(t.Context(), what, form, time.Microsecond, 3)
							if err == nil && (len(ns) != 3 || slices.Min(ns) <= 0) {
								err = fmt.Errorf("%s: times %v", what, ns)
							}
							return err
						})
					}
					if err = group.Wait(); err != nil {
						break
					}
				}
				if err != nil {
					break
				}
			}
			if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// TestAFDEnds: the command ends with its processes if a signal interrupts it, or if one of the processes is killed, also
// while the others wait for that one.
func TestAFDEnds(t *testing.T) {
	for _, c := range []struct {
		what   string
		stop   func(parent int, children []int) error
		status int
		want   string
	}{
		{"interrupted", func(parent int, _ []int) error { return syscall.Kill(parent, syscall.SIGINT) }, 130, "stopped by signal: interrupt"},
		{"terminated", func(parent int, _ []int) error { return syscall.Kill(parent, syscall.SIGTERM) }, 143, "stopped by signal: terminated"},
		{"a worker is killed", func(_ int, children []int) error { return syscall.Kill(children[3], syscall.SIGKILL) }, 1, "worker 1: "},
	} {
		t.Run(c.what, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], strings.Fields("bench afd --python none -n 2 --van local --push 64 --pull 64 --iters 2 --rounds 2 --micro-batches 1 --steps 1000000")...)
			stderr, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			in := bufio.NewReader(stderr)
			for line := ""; !strings.Contains(line, "decode steps of 97µs, block 1 of 2"); {
				if line, err = in.ReadString('\n'); err != nil {
					t.Fatalf("%q, %v", line, err)
				}
			}
			children := childrenOf(t, cmd.Process.Pid)
			if len(children) != 4 {
				t.Fatalf("%d processes, want 4", len(children))
			}
			if err := c.stop(cmd.Process.Pid, children); err != nil {
				t.Fatal(err)
			}
			rest, _ := io.ReadAll(in)
			err = cmd.Wait()
			if exited := (*exec.ExitError)(nil); !errors.As(err, &exited) || exited.ExitCode() != c.status || !strings.Contains(string(rest), c.want) {
				t.Errorf("%v, want status %d and %q:\n%s", err, c.status, c.want, rest)
			}
			for _, pid := range children {
				if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
					t.Errorf("process %d is left: %v", pid, err)
				}
			}
		})
	}
}

// childrenOf returns the processes that a thread of a process has started, in their order.
func childrenOf(t *testing.T, pid int) (all []int) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for word := range strings.FieldsSeq(string(text)) {
			n, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, n)
		}
	}
	return all
}

// TestCurves: a form that only some numbers of processes have been measured in has points only there.
func TestCurves(t *testing.T) {
	p50 := func(us float64) quantiles { return quantiles{tail: tail{P50: us}} }
	all := []*afdReport{
		{Workers: 2, Servers: 1, Floor: "GPU", Trips: []afdTrip{{Form: askFloor, quantiles: p50(1)}, {Form: askFloor, Worker: 1, quantiles: p50(2)}},
			Steps: []afdStep{{From: fromGo, Form: formPrepared, Compute: 10, comparison: comparison{RatioP50: 1}}, {From: fromGo, Form: formPrepared, Compute: 20, comparison: comparison{RatioP50: 2}}}},
		{Workers: 1, Servers: 1, Floor: "GPU", Trips: []afdTrip{{Form: askFloor, quantiles: p50(3)}, {From: fromTorch, Form: formTorch, quantiles: p50(4)}},
			Steps: []afdStep{{From: fromTorch, Form: formTorch, Compute: 10, comparison: comparison{RatioP50: 3}}}},
	}
	curves, names := tripCurves(all)
	if got, want := fmt.Sprint(curves, names), "[{floor (GPU) [{0 2} {1 3}]} {PyTorch torch [{1 4}]}] [2 x 1 1 x 1]"; got != want {
		t.Errorf("round trips: %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(stepCurves(all)), "[{2 x 1, Go prepared [{10 1} {20 2}]} {1 x 1, PyTorch torch [{10 3}]}]"; got != want {
		t.Errorf("decode steps: %s, want %s", got, want)
	}
}
