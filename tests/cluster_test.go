package tests

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// limit is the time that a cluster of processes has.
const limit = 60 * time.Second

// binDir has the built programs.
var binDir string

func TestMain(m *testing.M) {
	code, err := buildAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func buildAndRun(m *testing.M) (int, error) {
	dir, err := os.MkdirTemp("", "programs")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	binDir = dir
	args := append([]string{"build", "-buildvcs=false", "-ldflags=-s", "-o", dir + "/"}, tags()...) // git may fail here, see tools/go.sh
	if vantest.Race {
		args = append(args, "-race")
	}
	args = append(args, "./utests/...", "./fserver/...", "./benchmark/...", "./examples/...", "./testdata/wrong_server")
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build the programs: %w\n%s", err, out)
	}
	return m.Run(), nil
}

// tags returns the build tags of this test as an option of go, if there are any. With other tags go would compile every
// package again.
func tags() []string {
	info, _ := debug.ReadBuildInfo()
	for _, s := range info.Settings {
		if s.Key == "-tags" {
			return []string{"-tags=" + s.Value}
		}
	}
	return nil
}

// compiles gives a test that runs the compiler a longer limit: beside other builds, the compiler may wait for the disk for long.
func compiles(t testing.TB) { testlimit.Longer(t, 5*time.Minute) }

// cluster is processes of one cluster.
type cluster struct {
	t                       testing.TB
	workers, servers, group int
	joint                   bool // one process for each server and worker
	env                     []string
	args                    []string
	programs                map[string]string // by role
	processes               []*process
}

func newCluster(t testing.TB, workers, servers, group int) *cluster {
	c := &cluster{t: t, workers: workers, servers: servers, group: group}
	c.env = []string{
		fmt.Sprintf("DMLC_NUM_WORKER=%d", workers), fmt.Sprintf("DMLC_NUM_SERVER=%d", servers), fmt.Sprintf("DMLC_GROUP_SIZE=%d", group),
		"DMLC_PS_ROOT_URI=127.0.0.1", fmt.Sprintf("DMLC_PS_ROOT_PORT=%d", testcluster.FreePort(t)), "DMLC_NODE_HOST=127.0.0.1",
		"STEPMESH_BAKCEND=CPU", "STEPAF_START_TIMEOUT=30", "STEPAF_STOP_TIMEOUT=20",
		"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"),
	}
	t.Cleanup(c.kill)
	return c
}

// setenv overrides variables of all processes.
func (c *cluster) setenv(kv ...string) { c.env = append(c.env, kv...) }

// program makes all roles run the same program.
func (c *cluster) program(name string) {
	c.programs = map[string]string{"scheduler": name, "server": name, "worker": name, "joint": name}
}

// start starts all processes.
func (c *cluster) start() {
	c.launch(c.programs["scheduler"], "scheduler", 0)
	if c.joint {
		for i := range c.workers * c.group {
			c.launch(c.programs["joint"], "joint", i)
		}
		return
	}
	for i := range c.servers * c.group {
		c.launch(c.programs["server"], "server", i)
	}
	for i := range c.workers * c.group {
		c.launch(c.programs["worker"], "worker", i)
	}
}

// launch starts one process as instance rank of a role. Variables of the cluster
// come last, so that tests may override the role.
func (c *cluster) launch(program, role string, rank int) *process {
	c.t.Helper()
	p := &process{t: c.t, name: fmt.Sprintf("%s %d", role, rank), role: role, gpu: rank % c.group, done: make(chan struct{})}
	p.cmd = exec.Command(filepath.Join(binDir, program))
	if role != "scheduler" {
		p.cmd.Args = append(p.cmd.Args, c.args...)
	}
	p.cmd.Env = append([]string{"DMLC_ROLE=" + role, fmt.Sprintf("DMLC_NODE_RANK=%d", rank/c.group), fmt.Sprintf("STEPMESH_GPU=%d", rank%c.group)}, c.env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.errs
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.processes = append(c.processes, p)
	go func() {
		p.cmd.Wait()
		close(p.done)
	}()
	return p
}

func (c *cluster) role(role string) []*process {
	var ps []*process
	for _, p := range c.processes {
		if p.role == role {
			ps = append(ps, p)
		}
	}
	return ps
}

// wait waits until all processes have ended.
func (c *cluster) wait() {
	c.t.Helper()
	deadline := time.After(limit)
	for _, p := range c.processes {
		select {
		case <-p.done:
		case <-deadline:
			for _, p := range c.processes {
				c.t.Logf("%s: standard error:\n%s", p.name, p.stderr())
			}
			c.t.Fatalf("%s still runs after %s", p.name, limit)
		}
	}
}

// mustSucceed waits and fails the test when a process failed.
func (c *cluster) mustSucceed() {
	c.t.Helper()
	c.wait()
	for _, p := range c.processes {
		if p.status() != 0 {
			c.t.Errorf("%s ended with status %d, standard error:\n%s", p.name, p.status(), p.stderr())
		}
	}
	if c.t.Failed() {
		c.t.FailNow()
	}
}

// kill ends all processes that still run.
func (c *cluster) kill() {
	for _, p := range c.processes {
		select {
		case <-p.done:
		default:
			syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
			<-p.done
		}
	}
}

// process is one program running.
type process struct {
	t          testing.TB
	name, role string
	gpu        int
	cmd        *exec.Cmd
	out, errs  nodetest.Text
	done       chan struct{} // closed when it has ended
}

// lines are those of standard output.
func (p *process) lines() []string {
	return strings.Split(strings.TrimSuffix(p.out.String(), "\n"), "\n")
}

func (p *process) stderr() string { return p.errs.String() }

// status is the exit status, or 128 plus the signal that ended the process. It
// must have ended.
func (p *process) status() int {
	s := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if s.Signaled() {
		return 128 + int(s.Signal())
	}
	return s.ExitStatus()
}

// waitFor waits until standard error has text.
func (p *process) waitFor(text string) {
	p.t.Helper()
	if !p.errs.Comes(p.done, limit, text) {
		p.t.Fatalf("%s never wrote %q; standard error:\n%s", p.name, text, p.stderr())
	}
}

func (p *process) signal(s syscall.Signal) {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Error(err)
	}
}
