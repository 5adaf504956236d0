package tests

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// Every test starts real processes on free ports of the loopback.

var (
	utPass  = regexp.MustCompile(`^GPU \d Batch \d+: ALL PASS duration=\d+ns$`)
	us      = `[\d.]+(e[+-]\d+)?us` // C++ prints a second and more as 1.2e+06
	latency = `mean=` + us + `, min=` + us + `, p50=` + us + `, p90=` + us + `, p99=` + us + `, max=` + us + `$`
)

func TestTensorWorker(t *testing.T) {
	for _, tt := range []struct{ workers, servers, group int }{{1, 1, 1}, {2, 2, 1}, {1, 1, 2}, {2, 1, 2}} {
		t.Run(fmt.Sprintf("%dx%d group %d", tt.workers, tt.servers, tt.group), func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, tt.workers, tt.servers, tt.group)
			c.setenv("UTEST_WORKER_BATCH_MAX=4", "UTEST_WORKER_TENSOR_NUM=3")
			c.programs = map[string]string{"scheduler": "ut_scheduler", "server": "ut_server", "worker": "ut_tensor_worker"}
			c.start()
			c.mustSucceed()
			for _, p := range c.role("worker") {
				lines := p.lines()
				if len(lines) != 3 {
					t.Errorf("%s printed %q, want 3 lines", p.name, lines)
				}
				for i, line := range lines {
					if !utPass.MatchString(line) || !strings.HasPrefix(line, fmt.Sprintf("GPU %d Batch %d:", p.gpu, i+1)) {
						t.Errorf("%s: line %q, want a pass of batch %d on GPU %d", p.name, line, i+1, p.gpu)
					}
				}
			}
		})
	}
}

// A server that adds wrongly is found out: FAILED lines and status 1, while
// all processes end in good order.
func TestTensorWorkerFails(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 1, 1)
	c.setenv("UTEST_WORKER_BATCH_MAX=3", "UTEST_WORKER_TENSOR_NUM=2")
	c.programs = map[string]string{"scheduler": "ut_scheduler", "server": "wrong_server", "worker": "ut_tensor_worker"}
	c.start()
	c.wait()
	for _, p := range c.processes {
		want := 0
		if p.role == "worker" {
			want = 1
		}
		if p.status() != want {
			t.Errorf("%s ended with status %d, want %d; standard error:\n%s", p.name, p.status(), want, p.stderr())
		}
	}
	w := c.role("worker")[0]
	failed := regexp.MustCompile(`^GPU 0 Batch 1 FAILED 32/32 duration=\d+ns\nGPU 0 Batch 2 FAILED 32/32 duration=\d+ns$`)
	if out := strings.Join(w.lines(), "\n"); !failed.MatchString(out) {
		t.Errorf("worker printed %q, want two FAILED lines", out)
	}
}

func TestLatencyPrograms(t *testing.T) {
	tests := []struct {
		program string
		lines   []string
	}{
		{"stepmesh_echo_test", []string{"pushpull batch latency: : ", "pushpull overall latency: : "}},
		{"stepmesh_push_test", []string{"push batch latency: : "}},
		{"stepmesh_pull_test", []string{"pull batch latency: : "}},
		{"stepmesh_register_test", []string{"pushpull batch latency: : ", "pushpull batch latency: : "}},
	}
	for _, tt := range tests {
		for _, n := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s %dx%d", tt.program, n, n), func(t *testing.T) {
				t.Parallel()
				c := newCluster(t, n, n, 1)
				c.setenv("BENCHMARK_ITER=20", "BENCHMARK_WARMUP=2", "BENCHMARK_SIZE=1000")
				c.program(tt.program)
				c.start()
				c.mustSucceed()
				for _, w := range c.role("worker") {
					var got []string
					for line := range strings.Lines(w.stderr()) {
						if i := strings.Index(line, tt.lines[0][:4]); i >= 0 && strings.Contains(line, "latency") {
							got = append(got, strings.TrimSuffix(line[i:], "\n"))
						}
					}
					if len(got) != len(tt.lines) {
						t.Fatalf("%s: latency lines %q, want %d", w.name, got, len(tt.lines))
					}
					for i, want := range tt.lines {
						if !regexp.MustCompile(`^` + want + latency).MatchString(got[i]) {
							t.Errorf("%s: line %q, want %q and numbers", w.name, got[i], want)
						}
					}
				}
			})
		}
	}
}

func TestFServerPrograms(t *testing.T) {
	tests := []struct {
		program         string
		iterations      int
		workers, groups int
		joint           bool
		lines           int // of standard output
	}{
		{"test_fserver", 0, 1, 1, false, 1},
		{"test_fserver", 0, 2, 1, false, 1},
		{"test_fserver", 0, 1, 1, true, 2},
		{"test_fserver", 0, 1, 2, false, 1},
		{"test_fserver_diff_stage", 5, 2, 1, false, 16},
		{"test_fserver_dynamic", 3, 2, 1, false, 1},
	}
	for _, tt := range tests {
		name := fmt.Sprintf("%s %dx%d group %d joint %t", tt.program, tt.workers, tt.workers, tt.groups, tt.joint)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, tt.workers, tt.workers, tt.groups)
			c.joint = tt.joint
			if tt.iterations > 0 {
				c.setenv(fmt.Sprintf("BENCHMARK_ITER=%d", tt.iterations))
			}
			c.program(tt.program)
			c.start()
			c.mustSucceed()
			role := "worker"
			if tt.joint {
				role = "joint"
			}
			for _, w := range c.role(role) {
				lines := w.lines()
				if len(lines) != tt.lines || lines[len(lines)-1] != "worker test done" {
					t.Errorf("%s printed %q, want %d lines and the last one: worker test done", w.name, lines, tt.lines)
				}
			}
		})
	}
}

func TestBenchmark(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 2, 1)
	c.setenv("BENCHMARK_ITER=12")
	c.program("bmk_comm_latency_multiserver")
	c.args = []string{"-rows", "4", "-cols", "64", "-report", "10"}
	c.start()
	c.mustSucceed()
	out := strings.Join(c.role("worker")[0].lines(), "\n")
	leg := func(name string) string {
		return "\t\t" + name + strings.Repeat(`\t-?\d+\.\d{3}`, 4) + strings.Repeat(` -?\d+\.\d{3}`, 2) + "\n"
	}
	want := `^start to run 12\ncomm bmk gpu=0: mean=[\d.]+ms, p50=[\d.]+ms, p99=[\d.]+ms, max=[\d.]+ms\n`
	for _, part := range []string{"push 1", "push 2", "pull 1"} {
		want += "\t gpu=0 " + part + ":\n"
		for _, l := range []string{"python_req", "req_send", "req_recv", "process  ", "rsp_send", "rsp_recv", "python_rsp", "net_cost"} {
			want += leg(l)
		}
	}
	if !regexp.MustCompile(want + "\ncomm bmk gpu=0: ").MatchString(out) {
		t.Errorf("printed\n%s\nwant a report of 10 rounds and one of 2", out)
	}
}

// An endless program ends at once upon SIGTERM, and so do those that depend on it.
func TestSignal(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 1, 1)
	c.setenv("BENCHMARK_ITER=0", "BENCHMARK_SIZE=16")
	c.program("stepmesh_echo_test")
	c.start()
	c.role("worker")[0].waitFor("latency")
	// Each process finds its own signal before it can notice that another one has ended.
	for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGTERM, syscall.SIGCONT} {
		for _, p := range c.processes {
			p.signal(sig)
		}
	}
	c.wait()
	for _, p := range c.processes {
		if p.status() != 128+15 || !strings.HasSuffix(p.stderr(), "ended by signal: terminated\n") {
			t.Errorf("%s ended with status %d, want 143; standard error:\n%s", p.name, p.status(), p.stderr())
		}
	}
}

func TestWrongEnvironment(t *testing.T) {
	t.Parallel()
	tests := []struct{ program, env, want string }{
		{"ut_scheduler", "DMLC_ROLE=worker", `DMLC_ROLE="worker": this program has [scheduler]`},
		{"stepmesh_echo_test", "DMLC_ROLE=clerk", `DMLC_ROLE="clerk"`},
		{"test_fserver", "DMLC_PS_ROOT_PORT=many", `DMLC_PS_ROOT_PORT="many"`},
	}
	for _, tt := range tests {
		t.Run(tt.program, func(t *testing.T) {
			c := newCluster(t, 1, 1, 1)
			c.setenv(tt.env)
			p := c.launch(tt.program, "scheduler", 0)
			c.wait()
			if p.status() != 1 || !strings.Contains(p.stderr(), tt.want) {
				t.Errorf("status %d, want 1; standard error %q, want %q in it", p.status(), p.stderr(), tt.want)
			}
		})
	}
}

// TestWithoutRDMA: a build without RDMA does not say that it has its transport.
func TestWithoutRDMA(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles the transports with other build tags")
	}
	compiles(t)
	program := filepath.Join(t.TempDir(), "stepaf")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-tags", "nordma", "-o", program, "../tools/stepaf").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), program, "version").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "transports: zmq\n") {
		t.Errorf("stepaf version: %v, %q, want transports: zmq", err, out)
	}
}
