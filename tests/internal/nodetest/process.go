package nodetest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// patience is how long a busy machine may need for an expected event.
const patience = 30 * time.Second

// Process is a child, seen from the test that has started it.
type Process struct {
	Role, What string
	Rank       int // of the instance

	t     testing.TB
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string   // of standard output
	ended chan struct{} // closed when it has
	errs  Text
}

// Option changes the command of a child before it starts.
type Option func(*exec.Cmd)

// Attr gives a child attributes of the operating system, nil for none. The test is
// skipped where it has not the rights for that. It does not go with Under.
func Attr(a *syscall.SysProcAttr) Option { return func(c *exec.Cmd) { c.SysProcAttr = a } }

// Env replaces the environment of a child, whose behaviour goes with it.
func Env(env []string) Option {
	return func(c *exec.Cmd) { c.Env = append(slices.Clone(env), c.Env[0]) }
}

// Set adds variables to the environment of a child.
func Set(vars ...string) Option {
	return func(c *exec.Cmd) { c.Env = append(slices.Clone(c.Env), vars...) }
}

// Under starts a child as the last argument of another command.
func Under(command ...string) Option {
	return func(c *exec.Cmd) {
		outer := exec.Command(command[0], slices.Concat(command[1:], c.Args)...)
		c.Path, c.Args, c.Err = outer.Path, outer.Args, outer.Err
	}
}

// Spawn starts the test binary as the node of c with that role and instance rank. Its Main
// gets the task, what. It is killed when the test ends.
func Spawn(t testing.TB, c *testcluster.Cluster, role string, rank int, what string, opts ...Option) *Process {
	t.Helper()
	p := &Process{Role: role, Rank: rank, What: what, t: t, lines: make(chan string, 1000), ended: make(chan struct{})}
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = slices.Concat([]string{As(what)}, c.Environ(role, rank), []string{"STEPMESH_BAKCEND=CPU", "STEPAF_START_TIMEOUT=20", "PATH=" + os.Getenv("PATH")})
	for _, o := range opts {
		o(p.cmd)
	}
	if p.cmd.SysProcAttr != nil {
		// Through a descriptor, so that another user can execute it, too.
		self, err := os.Open("/proc/self/exe")
		if err != nil {
			t.Fatal(err)
		}
		defer self.Close()
		p.cmd.Path, p.cmd.Dir, p.cmd.ExtraFiles = "/proc/self/fd/3", "/", []*os.File{self}
	}
	p.cmd.Stderr = &p.errs
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdin = stdin
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		if p.cmd.SysProcAttr != nil {
			t.Skipf("needs more rights than this process has: %v", err)
		}
		t.Fatal(err)
	}
	go func() {
		for s := bufio.NewScanner(stdout); s.Scan(); {
			p.lines <- s.Text()
		}
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(p.clean)
	return p
}

// clean ends the child, and reports failures that the test has not read.
func (p *Process) clean() {
	p.Kill()
	for more := true; more; {
		select {
		case line := <-p.lines:
			if strings.HasPrefix(line, failed) {
				p.t.Errorf("%s: %s", p, line)
			}
		default:
			more = false
		}
	}
	if p.t.Failed() {
		p.t.Logf("standard error of %s:\n%s", p, &p.errs)
	}
}

// Elsewhere is for testcluster.Options: it starts one node as a child, which it puts
// into p.
func Elsewhere(t testing.TB, role string, rank int, what string, p **Process, opts ...Option) func(*testcluster.Cluster, string, int) bool {
	return func(c *testcluster.Cluster, r string, i int) bool {
		if r != role || i != rank {
			return false
		}
		*p = Spawn(t, c, role, rank, what, opts...)
		return true
	}
}

// String names the child.
func (p *Process) String() string { return fmt.Sprintf("%s %d (%s)", p.Role, p.Rank, p.What) }

// PID is its process ID.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Expect waits until the child says a line; those before are passed over.
func (p *Process) Expect(want string) {
	p.t.Helper()
	limit := time.After(patience)
	for {
		select {
		case line := <-p.lines:
			if line == want {
				return
			}
			if strings.HasPrefix(line, failed) {
				p.t.Fatalf("%s: %s", p, line)
			}
		case <-p.ended:
			p.t.Fatalf("%s ended before it wrote %q: %s\n%s", p, want, p.cmd.ProcessState, &p.errs)
		case <-limit:
			p.t.Fatalf("%s never wrote %q", p, want)
		}
	}
}

// Ready waits until the child is set up.
func (p *Process) Ready() {
	p.t.Helper()
	p.Expect(ready)
}

// Signal sends a signal. It is safe for concurrent use.
func (p *Process) Signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

// Stop stops the child: when Stop returns, each of its threads is stopped. The signal
// alone reaches threads on other processors some time later.
func (p *Process) Stop() error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	limit := time.After(patience)
	for tick := time.Tick(time.Millisecond); ; {
		still, err := p.still()
		if err != nil || still {
			return err
		}
		select {
		case <-tick:
		case <-limit:
			return fmt.Errorf("%s has not stopped within %s", p, patience)
		}
	}
}

// still tells whether all threads are stopped.
func (p *Process) still() (bool, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
	if err != nil || len(tasks) == 0 {
		return false, errors.Join(err, fmt.Errorf("%s has no threads", p))
	}
	for _, name := range tasks {
		b, err := os.ReadFile(name)
		if err != nil {
			return false, err
		}
		// The state follows the name, which is in brackets.
		if i := bytes.LastIndexByte(b, ')'); i < 0 || !bytes.HasPrefix(b[i:], []byte(") T")) {
			return false, nil
		}
	}
	return true, nil
}

// Kill ends the child as a crash would.
func (p *Process) Kill() {
	_ = p.Signal(syscall.SIGKILL) // it may have ended
	<-p.ended
}

// Leave tells the child to leave in order once the others do.
func (p *Process) Leave() {
	_, _ = io.WriteString(p.stdin, leave+"\n")
	p.End()
}

// End tells the child to end without asking the others.
func (p *Process) End() { _ = p.stdin.Close() }

// Ended waits until the child has ended, and returns its status, -1 after a signal.
func (p *Process) Ended() int {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.t.Fatalf("%s does not end", p)
	}
	return p.cmd.ProcessState.ExitCode()
}

// Left waits until the child has ended, and checks that it had no errors.
func (p *Process) Left() {
	p.t.Helper()
	if status := p.Ended(); status != 0 {
		p.t.Errorf("%s: %s", p, p.cmd.ProcessState)
	}
}
