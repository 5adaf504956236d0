package tests

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van/env"
)

// scriptRun is one call of a launch script, in another directory and without any
// variables of ours but its own.
type scriptRun struct {
	script string
	env    []string
	args   []string

	status   int
	out, err string
}

func (r *scriptRun) run(ctx context.Context, t *testing.T) {
	t.Helper()
	if end, ok := ctx.Deadline(); ok {
		testlimit.Longer(t, time.Until(end)) // a script may wait for another build
	}
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("the launch scripts need bash")
	}
	script, err := filepath.Abs(r.script)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, "bash", append([]string{script}, r.args...)...)
	cmd.Dir = t.TempDir()
	// A Python that has no torch, so that the Go programs run everywhere.
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "python3"), []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(env.Strip(os.Environ()), "PATH="+bin+":"+os.Getenv("PATH"), "PYTHON=python3")
	cmd.Env = append(cmd.Env, r.env...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run() // the caller checks the status
	r.status, r.out, r.err = cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestScripts(t *testing.T) {
	const (
		single = "fserver/run_single_gpu.sh"
		multi  = "fserver/run_multi_gpu.sh"
		ut     = "utests/run_single_gpu_ut.sh"
		utG    = "utests/run_multi_gpu_ut.sh"
		old    = "run.sh"
		// The choices of a machine without devices, so that the tests run alike on all machines.
		plain  = "DMLC_ENABLE_RDMA=zmq STEPMESH_BAKCEND=CPU STEPMESH_BIND_CPU_CORE=0 GROUP_SIZE=2"
		goNote = "no Python with torch and fserver_lib: running the Go program tests/fserver/test_fserver"
	)
	for _, c := range []struct {
		name, script, env, args string
		status                  int
		first                   string // line of standard output, "" is any
		out, err                []string
	}{
		{"single", single, "ROLE=joint " + plain, "", 0, "", []string{"[worker 0] worker test done"}, []string{goNote}},
		{"single, another test", single, "BIN=test_fserver_diff_stage BENCHMARK_ITER=2 " + plain, "", 0, "", []string{"[worker 0] worker test done", "iter: 1, stage: 2"}, nil},
		{"single, benchmark", single, "BIN=../benchmark/bmk_comm_latency_multiserver BENCHMARK_ITER=500 " + plain, "", 0, "", []string{"comm bmk gpu=0: mean="}, nil},
		{"single, help", single, "", "--help", 0, "usage: [RNIC=interface] [BIN=test] [ROLE=joint] tests/fserver/run_single_gpu.sh [argument...]", nil, nil},
		{"single, unknown option", single, plain, "--nothing", 2, "", nil, []string{"flag provided but not defined: -nothing", "usage: DMLC_ROLE=scheduler|server|worker|joint test_fserver"}},
		{"single, no such test", single, "BIN=test_nothing", "", 2, "", nil, []string{"BIN=test_nothing: want one of", "test_fserver_dynamic"}},
		{"single, one role", single, "ROLE=server", "", 2, "", nil, []string{"use tests/fserver/run_multi_gpu.sh", "usage: "}},
		{"single, no such interface", single, "RNIC=nothing0 " + plain, "", 2, "", nil, []string{`no interface "nothing0"`, "127.0.0.1"}},

		{"multi", multi, "ROLE=joint " + plain, "", 0, "Run scheduler, server, and worker jointly", []string{"[worker 0] worker test done", "[worker 1] worker test done"}, nil},
		{"multi, two nodes of each", multi, "ROLE=joint NUM_WORKER=2 NUM_SERVER=2 " + plain + " GROUP_SIZE=1", "", 0, "", []string{"[worker 1] worker test done"}, nil},
		{"multi, help", multi, "ROLE=worker", "-h", 0, "usage: [ROLE=role] [RNIC=interface] [BIN=test] [NUM_WORKER=n] [NUM_SERVER=n] [NODE_RANK=n] [GROUP_SIZE=n] [GPUS=list]", nil, nil},
		{"multi, unknown role", multi, "ROLE=boss", "", 2, "", nil, []string{"ROLE=boss: want server, worker, server-slave or joint", "usage: "}},
		{"multi, worker without address", multi, "ROLE=worker", "", 2, "", nil, []string{"needs the ip of the scheduler", "usage: "}},
		{"multi, slave without address", multi, "ROLE=server-slave", "", 2, "", nil, []string{"needs the ip of the scheduler"}},
		{"multi, bad count", multi, "ROLE=joint NUM_WORKER=many", "", 2, "", nil, []string{`-n "many": want an integer`}},
		{"multi, rank", multi, "ROLE=server NODE_RANK=1 " + plain, "", 2, "", nil, []string{"node rank 1, but there are 1 servers"}},

		{"ut", ut, "UTEST_WORKER_BATCH_MAX=3 " + plain, "first", 0, "first", []string{"SCHEDULER_IP is 127.0.0.1\n", "GPU 0 Batch 2: ALL PASS"}, nil},
		{"ut, paths of the original", ut, "UTEST_WORKER_BATCH_MAX=2 WORKER_BIN=./cmake_build/tests/utests/ut_tensor_worker " + plain, "", 0, "SCHEDULER_IP is 127.0.0.1",
			[]string{"GPU 0 Batch 1: ALL PASS"}, nil},
		{"ut, two workers", ut, "UTEST_WORKER_BATCH_MAX=2 DMLC_NUM_WORKER=2 " + plain, "", 0, "", []string{"[worker 0] GPU 0", "[worker 1] GPU 0"}, nil},
		{"ut, help", ut, "", "--help", 0, "usage: [SCHEDULER_BIN=program] [SERVER_BIN=program] [WORKER_BIN=program] [DMLC_NUM_WORKER=n] [RNIC=interface]", nil, nil},
		{"ut multi, help", utG, "", "--help", 0, "usage: [SCHEDULER_BIN=program] [SERVER_BIN=program] [WORKER_BIN=program] [DMLC_NUM_WORKER=n] [RNIC=interface]", []string{"GROUP_SIZE"}, nil},
		{"ut, no such program", ut, "SERVER_BIN=./nothing", "", 2, "", nil, []string{"SERVER_BIN=./nothing: no such program"}},
		{"ut, failing worker", ut, "WORKER_BIN=/bin/false " + plain, "", 1, "", nil, []string{"worker 0 failed: exit status 1"}},
		{"ut multi", utG, "UTEST_WORKER_BATCH_MAX=2 " + plain, "", 0, "SCHEDULER_IP is 127.0.0.1", []string{"GPU 0 Batch 1: ALL PASS", "GPU 1 Batch 1: ALL PASS"}, nil},

		{"run", old, "ROLE=joint BENCHMARK_ITER=1000 " + plain, "", 0, "Run scheduler, server, and worker jointly", nil, []string{"pushpull overall latency: : mean="}},
		{"run, push", old, "ROLE=joint BINARY=stepmesh_push_test BENCHMARK_ITER=1000 " + plain, "", 0, "", nil, []string{"push batch latency: : mean="}},
		{"run, help", old, "ROLE=boss", "--help", 0, "usage: [ROLE=role] [BINARY=program] [RNIC=interface] tests/run.sh [scheduler ip]", nil, nil},
		{"run, unknown role", old, "ROLE=boss", "", 2, "", nil, []string{"ROLE=boss: want", "usage: "}},
		{"run, worker without address", old, "ROLE=worker", "", 2, "", nil, []string{"needs the ip of the scheduler"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
			defer cancel()
			r := scriptRun{script: c.script, env: strings.Fields(c.env)}
			if c.args != "" {
				r.args = []string{c.args}
			}
			r.run(ctx, t)
			first, _, _ := strings.Cut(r.out, "\n")
			if r.status != c.status || c.first != "" && first != c.first {
				t.Errorf("status %d, first line %q; want %d and %q\n%s%s", r.status, first, c.status, c.first, r.out, r.err)
			}
			for _, w := range c.out {
				if !strings.Contains(r.out, w) {
					t.Errorf("output without %q:\n%s", w, r.out)
				}
			}
			for _, w := range c.err {
				if !strings.Contains(r.err, w) {
					t.Errorf("standard error without %q:\n%s", w, r.err)
				}
			}
		})
	}
}

// TestScriptsAcrossMachines: two server nodes and a worker node, each by a script
// of its own, as on three machines.
func TestScriptsAcrossMachines(t *testing.T) {
	common := []string{"DMLC_ENABLE_RDMA=zmq", "STEPMESH_BAKCEND=CPU", "STEPMESH_BIND_CPU_CORE=0", "DMLC_NODE_HOST=127.0.0.1",
		"NUM_SERVER=2", "NUM_WORKER=1", "GROUP_SIZE=2", fmt.Sprint("DMLC_PS_ROOT_PORT=", testcluster.FreePort(t))}
	runs := []*scriptRun{
		{env: []string{"ROLE=server"}},
		{env: []string{"ROLE=server-slave", "NODE_RANK=1"}, args: []string{"127.0.0.1"}},
		{env: []string{"ROLE=worker"}, args: []string{"127.0.0.1"}},
	}
	want := []string{"Run server and scheduler, scheduler ip 127.0.0.1 ", "Run server with scheduler ip: 127.0.0.1", "Run worker with scheduler ip: 127.0.0.1"}
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for _, r := range runs {
		r.script = "fserver/run_multi_gpu.sh"
		r.env = append(r.env, common...)
		wg.Go(func() { r.run(ctx, t) })
	}
	wg.Wait()
	for i, r := range runs {
		if first, _, _ := strings.Cut(r.out, "\n"); r.status != 0 || first != want[i] {
			t.Errorf("%s: status %d, first line %q; want 0 and %q\n%s%s", r.env[0], r.status, first, want[i], r.out, r.err)
		}
	}
	if w := runs[2].out; !strings.Contains(w, "[worker 0] worker test done") || !strings.Contains(w, "[worker 1] worker test done") {
		t.Errorf("worker node: %s", w)
	}
}

// tool runs a script of tools/, without a virtual machine being installed unless
// env has one.
func tool(t *testing.T, args string, env ...string) *scriptRun {
	t.Helper()
	fields := strings.Fields(args)
	r := &scriptRun{script: filepath.Join("../tools", fields[0]), args: fields[1:], env: append([]string{"RDMA_VM_CACHE=" + t.TempDir()}, env...)}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	r.run(ctx, t)
	return r
}

// A program in front of the others on the PATH.
func fakeProgram(t *testing.T, name, script string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return "PATH=" + dir + ":" + os.Getenv("PATH")
}

func TestToolScripts(t *testing.T) {
	elsewhere := fakeProgram(t, "uname", "echo aarch64")
	for _, c := range []struct {
		args, env string
		status    int
		out, err  string // parts of them; "" means that there is nothing
	}{
		{"rdma-vm --help", "", 0, "usage: rdma-vm [OPTION...] [--] COMMAND", ""},
		{"rdma-vm", "", 125, "", "usage: rdma-vm"},
		{"rdma-vm --nothing", "", 125, "", "unknown option: --nothing"},
		{"rdma-vm --cpus 0 true", "", 125, "", "--cpus wants a number from 1 to 64, not '0'"},
		{"rdma-vm --hosts 01 true", "", 125, "", "--hosts wants a number from 1 to 8, not '01'"},
		{"rdma-vm --mem much true", "", 125, "", "--mem wants a number"},
		{"rdma-vm --timeout", "", 125, "", "--timeout wants a value"},
		{"rdma-vm -- true", "", 125, "", "not installed yet: run rdma-vm --install"},
		{"rdma-vm --kernel 1.0 true", "", 125, "", "no kernel 1.0: see rdma-vm --list"},
		{"rdma-vm --list", "", 0, "", ""},
		{"rdma-vm --ready", "", 1, "", "no kernel in "},
		{"rdma-vm --install", elsewhere, 77, "", "cannot be prepared here: this is aarch64, not x86_64"},
		{"install_deps.sh rdma-vm", elsewhere, 77, "", "cannot be prepared here: this is aarch64, not x86_64"},
		{"install_deps.sh rdma-vm", "USE_RDMA=0", 77, "", "no virtual machine for RDMA: USE_RDMA=0"},
		{"install_deps.sh nothing", "", 2, "", "not nothing"},
		{"rdma_test.sh --help", "", 0, "usage: tools/rdma_test.sh [OPTION...]", ""},
		{"rdma_test.sh --nothing", "", 2, "", "unknown option: --nothing"},
		{"rdma_test.sh --run", "", 2, "", "--run wants a value"},
		{"rdma_test.sh --limit 0", "", 2, "", "--limit wants a number of seconds, not '0'"},
		{"rdma_test.sh --ready", "", 1, "", "tools/install_deps.sh rdma-vm prepares the virtual machine"},
		{"rdma_test.sh --ready", "USE_RDMA=0", 1, "", "not running: USE_RDMA=0"},
		{"rdma_test.sh ./van", "", 1, "", "tools/install_deps.sh rdma-vm prepares the virtual machine"},

		// The compiler "false" finds no headers.
		{"build_flags.sh -q", "USE_RDMA=0 USE_CUDA=0", 0, "-tags=nordma\n", ""},
		{"build_flags.sh -q fserver", "USE_RDMA=0 USE_CUDA=0", 0, "-tags=fserver,nordma\n", ""},
		{"build_flags.sh", "USE_CUDA=0 CC=false", 0, "-tags=nordma\n", "RDMA: off, no headers (Debian: libibverbs-dev librdmacm-dev;"},
		{"build_flags.sh", "USE_CUDA=0 CC=true", 0, "", "RDMA: on"},
		{"build_flags.sh -q", "USE_RDMA=1 CC=false", 2, "", "USE_RDMA=1: the C compiler does not find infiniband/verbs.h and rdma/rdma_cma.h (Debian: libibverbs-dev librdmacm-dev;"},
		{"build_flags.sh -q", "USE_RDMA=0 USE_CUDA=1 CC=true", 0, "-tags=cuda,nordma\n", ""},
		{"build_flags.sh", "USE_RDMA=0 CC=false", 0, "-tags=nordma\n", "GPU support: off, no CUDA (Debian: nvidia-cuda-dev of non-free;"},
		{"build_flags.sh -q", "USE_CUDA=1 CC=false", 2, "", "USE_CUDA=1: the C compiler does not find cuda.h and libcuda.so"},
		{"install_deps.sh cuda", "USE_CUDA=0", 77, "", "no CUDA: USE_CUDA=0"},
		{"build_flags.sh", "USE_RDMA=yes", 2, "", "USE_RDMA=yes: want 0 or 1"},
		{"build_flags.sh --nothing", "", 2, "", "want build tags, not '--nothing'"},

		// A script with --help only prints its usage.
		{"build_flags.sh --help", "", 0, "usage: [USE_CUDA=0|1] [USE_RDMA=0|1] tools/build_flags.sh", ""},
		{"count_locks.sh --help", "", 0, "usage: tools/count_locks.sh", ""},
		{"cuda_headers.sh -h", "", 0, "usage: tools/cuda_headers.sh", ""},
		{"cuda_headers.sh nothing", "", 2, "", "want no argument, not nothing"},
		{"gpu_test.sh --help", "", 0, "usage: tools/gpu_test.sh [--build | --ready]", ""},
		{"gpu_test.sh --ready now", "", 2, "", "usage: tools/gpu_test.sh"},
		{"install_deps.sh --help", "", 0, "usage: [USE_RDMA=0|1] [USE_CUDA=1] tools/install_deps.sh", ""},
		{"python/test.sh --help", "", 0, "usage: tools/python/test.sh", ""},
		{"python/test.sh --nothing", "", 2, "", "no environment is called --nothing"},
		{"python/test_deps.sh --help", "", 0, "usage: tools/python/test_deps.sh", ""},
		{"python/test_deps.sh nothing", "", 2, "", "no environment is called nothing"},
		{"python/wheel.sh --help", "", 0, "usage: [PYTHON=interpreter] tools/python/wheel.sh", ""},
		{"python/wheel.sh nothing", "", 2, "", "want no argument, not nothing"},
		{"python/wheel_check.sh --help", "", 0, "usage: [PYTHON=interpreter] tools/python/wheel_check.sh WHEEL", ""},
		{"python/wheel_check.sh", "", 2, "", "want one wheel, not ''"},
		{"test.sh --help", "", 0, "usage: tools/test.sh [long | computed | real | list]", ""},
		{"test.sh nothing", "", 2, "", "want no argument, long, computed, real or list, not nothing"},
		{"../.ci/run --help", "", 0, "usage: .ci/run", ""},
		{"../.ci/run nothing", "", 2, "", "CI: want no argument, not nothing"},
	} {
		t.Run(c.args+" "+c.env[:min(len(c.env), 20)], func(t *testing.T) {
			t.Parallel()
			r := tool(t, c.args, strings.Fields(c.env)...)
			if r.status != c.status {
				t.Errorf("status %d, want %d", r.status, c.status)
			}
			for name, o := range map[string][2]string{"output": {r.out, c.out}, "standard error": {r.err, c.err}} {
				if got, want := o[0], o[1]; !strings.Contains(got, want) || want == "" && got != "" {
					t.Errorf("%s %q, want %q", name, got, want)
				}
			}
		})
	}
}

// TestQuotedOptions: make quotes the directory of CUDA in CGO_CFLAGS, since it may have blanks. The compiler finds the headers
// all the same, and nothing is installed.
func TestQuotedOptions(t *testing.T) {
	compiler := filepath.Join(t.TempDir(), "cc")
	script := "#!/bin/sh\ncat >/dev/null\n[ \"$1\" = '-I/a b' ] && [ \"$2\" = -O2 ]\n"
	if err := os.WriteFile(compiler, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	if r := tool(t, "install_deps.sh", "USE_RDMA=", "USE_CUDA=", "CC="+compiler, "CGO_CPPFLAGS=", "CGO_CFLAGS='-I/a b' -O2"); r.status != 0 || r.out != "install_deps: nothing is missing\n" {
		t.Errorf("%+v, want status 0 and that nothing is missing", r)
	}
}

// TestRDMAMachineEnds: messages say how the virtual machine, here a script, ended.
func TestRDMAMachineEnds(t *testing.T) {
	cache := t.TempDir()
	if err := os.Mkdir(filepath.Join(cache, "default"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"layout": "1\n", "mode": "addresses\n"} {
		if err := os.WriteFile(filepath.Join(cache, "default", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, qemu, timeout string
		status              int
		says, not           string
	}{
		{"killed", "echo last words >&2; kill -9 $$", "600", 125, "the virtual machine was killed", "timed out"},
		{"killed, no limit", "echo last words >&2; kill -9 $$", "0", 125, "the virtual machine was killed", "timed out"},
		{"ended", "echo last words >&2; exit 1", "600", 125, "the virtual machine stopped unexpectedly", "timed out"},
		{"timed out", "exec sleep 30", "1", 124, "timed out after 1 s", "log:"},
		{"timed out, deaf", "trap '' TERM; while :; do sleep 1; done", "1", 124, "timed out after 1 s", "killed"},
		{"does not boot", "echo last words >&2; exec sleep 30", "6 --boot 1", 124, "did not boot in 1 s (try 1)", "log:"},
		{"boots when started again", `printf x >>"${0%qemu-*}starts"
test "$(cat "${0%qemu-*}starts")" != x || exec sleep 30
for a; do case $a in local,id=control,path=*) a=${a#*,path=}; d=${a%%,*}; esac; done
: >"$d/started"; echo good >>"$d/stdout"; sleep 2; echo 3 >"$d/status"`, "600 --boot 5", 3, "(try 1)", "timed out"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rdma, _, _ := strings.Cut(fakeProgram(t, "rdma", ""), ":") // needs to be there only
			path := strings.TrimPrefix(fakeProgram(t, "qemu-system-x86_64", c.qemu), "PATH=")
			r := tool(t, "rdma-vm --timeout "+c.timeout+" --no-share -- true", rdma+":"+path, "RDMA_VM_CACHE="+cache)
			if r.status != c.status || !strings.Contains(r.err, c.says) || strings.Contains(r.err, c.not) {
				t.Errorf("status %d, want %d with %q and without %q: %s", r.status, c.status, c.says, c.not, r.err)
			}
			if c.status == 125 && !strings.Contains(r.err, "last words") {
				t.Errorf("the machine's last words are missing: %s", r.err)
			}
		})
	}
}
