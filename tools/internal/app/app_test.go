package app

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van/env"
)

// The test binary also runs as the stepaf command.
func TestMain(m *testing.M) {
	if os.Getenv("STEPAF_TEST_COMMAND") != "" {
		os.Exit(Run(os.Args, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// command is "stepaf args" in an environment without other variables of ours.
func command(t *testing.T, environ []string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(append(env.Strip(os.Environ()), "STEPAF_TEST_COMMAND=1"), environ...)
	return cmd
}

func TestStatus(t *testing.T) {
	for _, c := range []struct {
		args   string
		status int
		out    string
		err    string
	}{
		{"", 0, "Try it:", ""},
		{"--help", 0, "COMMANDS:", ""},
		{"launch --help", 0, "-- COMMAND [ARGUMENT...]", ""},
		{"launch -h", 0, "--group-size", ""},
		{"env --help", 0, "DMLC_PS_ROOT_URI", ""},
		{"scheduler --help", 0, "stepaf launch", ""},
		{"version", 0, "zmq", ""},
		{"nonsense", 2, "", `unknown command "nonsense": want one of launch, scheduler`},
		{"--nonsense", 2, "", "see stepaf --help"},
		{"bench", 0, "latency", ""},
		{"bench --help", 0, "latency", ""},
		{"bench nonsense", 2, "", `bench: unknown command "nonsense": want one of latency, kv`},
		{"bench latency --nonsense", 2, "", "see stepaf bench latency --help"},
		{"bench latency 8 --rounds 1", 2, "", `bench latency: unexpected argument "8"`},
		{"bench kv now", 2, "", `bench kv: unexpected argument "now"`},
		{"bench software now", 2, "", `bench software: unexpected argument "now"`},
		{"bench session --timeout 0", 2, "", "bench session: --timeout 0s: want more than 0"},
		{"bench latency --timeout -1s", 2, "", "--timeout -1s: want more than 0"},
		{"doctor --help", 0, "DMLC_ENABLE_RDMA=ibverbs DMLC_INTERFACE=auto stepaf doctor", ""},
		{"doctor", 0, "ok    zmq loopback", ""},
		{"doctor now", 2, "", `doctor: unexpected argument "now"`},
		{"doctor --timeout 0", 2, "", "--timeout 0s: want more than 0"},
		{"doctor --nonsense", 2, "", "see stepaf doctor --help"},
		{"policy --help", 0, "stepaf policy set --peer worker:0 --class 46", ""},
		{"policy", 2, "", "which cluster?"},
		{"policy now", 2, "", `unexpected argument "now": want set, clear`},
		{"policy --scheduler nowhere", 2, "", "--scheduler nowhere: want HOST:PORT"},
		{"policy --scheduler 127.0.0.1:9 --timeout 0", 2, "", "--timeout 0s: want more than 0"},
		{"policy --scheduler 127.0.0.1:9 --timeout 300ms", 1, "", "scheduler at 127.0.0.1:9: no answer"},
		{"policy set", 2, "", "0 targets (): want one of --peer, --app, --comm"},
		{"policy set --nonsense", 2, "", "see stepaf policy set --help"},
		{"policy set --app 5", 2, "", "nothing to set for --app 5: want --rate"},
		{"policy set --peer worker:0", 2, "", "nothing to set for --peer worker:0: want --rate"},
		{"policy set --app 5 --comm 3 --rate 1M", 2, "", "2 targets (--app --comm)"},
		{"policy set --app -5 --rate 1M", 2, "", "--app -5: want 0 to 2147483647"},
		{"policy set --comm 5000 --rate 1M", 2, "", "communicator 5000, want 0 to 4095"},
		{"policy set --peer scheduler --rate 1M", 2, "", "--peer scheduler: want worker:RANK or server:RANK"},
		{"policy set --peer worker:-1 --rate 1M", 2, "", "--peer worker:-1: want worker:RANK"},
		{"policy set --peer worker:0 --rate -1", 2, "", "--rate -1: want 1000 to 1000000000000"},
		{"policy set --peer worker:0 --rate 5MB", 2, "", "--rate 5MB: want"},
		{"policy set --peer worker:0 --rate 99999G", 2, "", "--rate 99999G: want"},
		{"policy set --peer worker:0 --class 64", 2, "", "--class 64: want 0 to 63"},
		{"policy set --peer worker:0 --order ring", 2, "", "--order ring: want --comm with it"},
		{"policy set --app 5 --class 3", 2, "", "only a peer has a traffic class"},
		{"policy set --comm 5 --order odd", 2, "", `order "odd": want ring or rank`},
		{"policy clear", 2, "", "0 targets (): want one of --peer, --app, --comm, --all"},
		{"secret --help", 0, "STEPAF_SECRET_FILE=cluster.secret stepaf launch", ""},
		{"secret a b", 2, "", `secret: unexpected argument "b": want one file`},
		{"secret --nonsense", 2, "", "see stepaf secret --help"},
		{"secret /no/such/directory/secret", 1, "", "secret: open /no/such/directory/secret: no such file or directory"},
		{"version now", 2, "", `unexpected argument "now"`},
		{"launch", 2, "", "write it after --"},
		{"launch -n 0 -- ls", 2, "", "--workers 0: want at least 1"},
		{"launch -s -1 -- ls", 2, "", "--servers -1: want at least 1"},
		{"launch -n x -- ls", 2, "", `-n "x": want an integer; see stepaf launch --help`},
		{"launch --fserver=maybe -- ls", 2, "", `--fserver "maybe": want no value, true or false; see`},
		{"doctor --timeout 5", 2, "", `--timeout "5": want a duration with its unit, such as 300ms, 10s or 5m; see stepaf doctor --help`},
		{"policy set --peer worker:0 --class 99999999999999999999", 2, "", `--class "99999999999999999999": want an integer of at most 64 bits; see`},
		{"bench window --size 1K", 2, "", `--size "1K": want an integer, or several`},
		{"launch -n 99999999 -- ls", 2, "", "99999999 workers with 1 instances in each group: want at most 16379"},
		{"launch --port 0 -- ls", 2, "", "--port 0: want at least 1"},
		{"launch ls -l", 2, "", `"ls" is not an option: write -- before the command`},
		{"launch -- help", 2, "", `"help": executable file not found`},
		{"launch -- /no/such/program", 2, "", "/no/such/program"},
		{"launch --nonsense -- ls", 2, "", "-nonsense; see stepaf launch --help"},
		{"launch --role boss -- ls", 2, "", "--role boss: want one of joint, server, server-slave, worker, scheduler"},
		{"launch --group-size none -- ls", 2, "", "--group-size none"},
		{"launch --gpus 0,x -- ls", 2, "", "--gpus 0,x: want numbers"},
		{"launch --fail-on ( -- ls", 2, "", "--fail-on"},
		{"launch --default X -- ls", 2, "", "want [ROLE:]NAME=VALUE"},
		{"launch --worker-command 'x -- ls", 2, "", "is not closed"},
		{"scheduler", 2, "", "DMLC_PS_ROOT_URI is not set"},
		{"demo", 2, "", "DMLC_ROLE is not set"},
		{"demo --rounds 0", 2, "", "--rounds 0"},
		{"launch -n 1 -s 1 --timeout 30s -- false", 1, "", "failed: exit status 1"},
	} {
		t.Run(c.args, func(t *testing.T) {
			cmd := command(t, nil, strings.Fields(c.args)...)
			var out, errs bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &errs
			_ = cmd.Run() // the status is checked below
			if s := cmd.ProcessState.ExitCode(); s != c.status {
				t.Errorf("status %d, want %d", s, c.status)
			}
			if !strings.Contains(out.String(), c.out) {
				t.Errorf("output %q without %q", out.String(), c.out)
			}
			if !strings.Contains(errs.String(), c.err) || c.err == "" && errs.Len() > 0 {
				t.Errorf("standard error %q, want %q", errs.String(), c.err)
			}
		})
	}
}

func TestDemo(t *testing.T) {
	for _, shape := range []string{"-n 1 -s 1", "-n 2 -s 2", "-n 1 -s 1 --group-size 2"} {
		t.Run(shape, func(t *testing.T) {
			args := append([]string{"launch", "--timeout", "60s"}, strings.Fields(shape)...)
			args = append(args, "--", os.Args[0], "demo", "--rounds", "20")
			out, err := command(t, nil, args...).CombinedOutput()
			if err != nil || !strings.Contains(string(out), "[worker 0] every sum is right") {
				t.Fatalf("%v\n%s", err, out)
			}
		})
	}
}

// TestFullOutput: a command whose output is lost fails, with one error.
func TestFullOutput(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("this machine has no /dev/full")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { full.Close() })
	self := os.Args[0]
	for _, args := range []string{"secret", "version", "env", "env --json", "env --explain", "env --check", "doctor", "doctor --json", "", "--help", "help", "launch --help",
		"bench", "bench --help", "bench latency --help", "scheduler --help", "policy --help", "demo --help", "launch --timeout 60s -n 1 -s 1 -- " + self + " demo --rounds 2"} {
		t.Run(strings.ReplaceAll(args, self, "stepaf"), func(t *testing.T) {
			t.Parallel()
			cmd := command(t, nil, strings.Fields(args)...)
			var errs bytes.Buffer
			cmd.Stdout, cmd.Stderr = full, &errs
			err := cmd.Run()
			if cmd.ProcessState.ExitCode() != 1 || strings.Count(errs.String(), "no space left on device") != 1 {
				t.Errorf("%v: %s", err, errs.String())
			}
		})
	}
}

// TestSchedulerSignal: a scheduler that waits for nodes ends cleanly.
func TestSchedulerSignal(t *testing.T) {
	for signal, status := range map[syscall.Signal]int{syscall.SIGINT: 130, syscall.SIGTERM: 143} {
		port := testcluster.FreePort(t)
		cmd := command(t, []string{"DMLC_PS_ROOT_URI=127.0.0.1", fmt.Sprint("DMLC_PS_ROOT_PORT=", port), "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=2"}, "scheduler")
		var errs bytes.Buffer
		cmd.Stderr = &errs
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		guard := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
		line, _ := bufio.NewReader(stdout).ReadString('\n')
		if want := fmt.Sprintf("stepaf scheduler: at 127.0.0.1:%d (zmq), waiting for 2 servers and 1 worker\n", port); line != want {
			t.Errorf("first line %q, want %q", line, want)
		}
		if err := cmd.Process.Signal(signal); err != nil {
			t.Error(err)
		}
		_, _ = io.Copy(io.Discard, stdout)
		_ = cmd.Wait()
		guard.Stop()
		if s := cmd.ProcessState.ExitCode(); s != status {
			t.Errorf("status %d after %v, want %d; %s", s, signal, status, errs.String())
		}
		if want := "stepaf: stopped by signal: " + signal.String() + "\n"; errs.String() != want {
			t.Errorf("standard error %q, want %q", errs.String(), want)
		}
	}
}

// TestEnvCheckAbsent: a node with a transport or backend that this build does not have, or with an interface that this host does
// not have, could not start.
func TestEnvCheckAbsent(t *testing.T) {
	complete := []string{"DMLC_ROLE=worker", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT=1"}
	for setting, want := range map[string]string{
		"DMLC_ENABLE_RDMA=abc":    `DMLC_ENABLE_RDMA="abc": want one of those of this build, `,
		"STEPAF_BACKEND=abacus":   `STEPAF_BACKEND="ABACUS": want one of those of this build, `,
		"DMLC_INTERFACE=none7":    `DMLC_INTERFACE="none7": want one interface with an IPv4 address of this host, `,
		"STEPMESH_BAKCEND=CPU":    "",
		"DMLC_ENABLE_RDMA=zmq":    "",
		"STEPAF_CLUSTER_ID=a b c": "",
	} {
		var b bytes.Buffer
		err := showEnv(&b, env.FromList(append([]string{setting}, complete...)), envOptions{check: true, set: true})
		if (err != nil) != (want != "") || !strings.Contains(b.String(), want) {
			t.Errorf("%s: %v\n%s", setting, err, b.String())
		}
	}
}

// TestEnvCheckAddress: the check finds an address that a scheduler on another host cannot reach, with any interfaces of this host.
func TestEnvCheckAddress(t *testing.T) {
	for host, want := range map[string]string{"192.0.2.1": "192.0.2.1", "127.0.0.1": ""} {
		var b bytes.Buffer
		err := showEnv(&b, env.FromList([]string{"DMLC_ROLE=worker", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_PS_ROOT_URI=" + host,
			"DMLC_PS_ROOT_PORT=1", "DMLC_NODE_HOST=127.0.0.1"}), envOptions{check: true, set: true})
		_, errs, _ := strings.Cut(b.String(), "Errors")
		if (err != nil) != (want != "") || !strings.Contains(errs, want) {
			t.Errorf("scheduler at %s: %v\n%s", host, err, b.String())
		}
	}
}

func TestEnv(t *testing.T) {
	src := env.FromList([]string{"DMLC_ROLE=server", "STEPMESH_BACKEND=cpu", "PS_VERBOSE=yes", "DMLC_NUM_SEVER=2"})
	var b bytes.Buffer
	err := showEnv(&b, src, envOptions{json: true})
	if exit.Status(err) != exit.Failure {
		t.Errorf("status %d, want %d", exit.Status(err), exit.Failure)
	}
	var r envReport
	if err := json.Unmarshal(b.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	got := map[string]env.Effective{}
	for _, v := range r.Variables {
		got[v.Name] = v
	}
	for name, want := range map[string][2]string{
		"DMLC_ROLE": {"server", "environment"}, "STEPMESH_BAKCEND": {"CPU", "STEPMESH_BACKEND"},
		"DMLC_GROUP_SIZE": {"1", "default"}, "DMLC_NUM_SERVER": {"", "default"}, "PS_VERBOSE": {"0", "default"},
	} {
		if v := got[name]; v.Value != want[0] || v.Origin != want[1] || v.Help == "" || v.Allowed == "" {
			t.Errorf("%s: %+v, want %q", name, v, want)
		}
	}
	if len(r.Misspelt) != 1 || r.Misspelt[0] != (env.Suggestion{Name: "DMLC_NUM_SEVER", Nearest: "DMLC_NUM_SERVER"}) {
		t.Errorf("misspelt %v", r.Misspelt)
	}
	if len(r.Errors) != 1 || !strings.HasPrefix(r.Errors[0], `PS_VERBOSE="yes": want`) {
		t.Errorf("errors %q", r.Errors)
	}

	b.Reset()
	_ = showEnv(&b, src, envOptions{set: true, check: true}) // the errors are in the text
	want := `Cluster shape and identity
  DMLC_ROLE  server  environment

Devices, threads and queues
  STEPMESH_BAKCEND  CPU  STEPMESH_BACKEND

Warnings
  DMLC_NUM_SEVER is not a name that StepAF reads; did you mean DMLC_NUM_SERVER?

Errors
`
	if text := b.String(); !strings.HasPrefix(text, want) || !strings.Contains(text, "  DMLC_NUM_WORKER is not set: want") {
		t.Errorf("%s", text)
	}

	b.Reset()
	if err := showEnv(&b, env.FromList(nil), envOptions{explain: true}); err != nil {
		t.Error(err)
	}
	for _, v := range got {
		if !strings.Contains(b.String(), "  "+v.Name+" ") || !strings.Contains(b.String(), v.Help) {
			t.Errorf("no explanation of %s", v.Name)
		}
	}
}
