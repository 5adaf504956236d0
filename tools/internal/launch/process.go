package launch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/wake"
)

// drainTime is the time for which a process that has left the child's process group may hold the output open after the
// child's end.
const drainTime = time.Second

// process is a running child.
type process struct {
	*Child
	watch   watch
	cmd     *exec.Cmd
	output  [2]output
	printed chan struct{} // closed when all output was printed

	mu    sync.Mutex
	ended bool          // the process group id may be reused
	cut   chan struct{} // has a token when wait need not wait for the output any more
}

// ended describes the end of a process.
type ended struct {
	p      *process
	status int    // as in a shell: after a signal 128 plus its number
	how    string // "exit status 3", "signal: killed"
	ok     bool
	at     time.Time
}

// start starts c. The calling goroutine must be locked to its thread, and must not end before the child has ended.
func start(c *Child, plan *Plan, colour int, out *printer) (*process, error) {
	p := &process{Child: c, watch: watch{failOn: plan.Spec.FailOn}, cmd: exec.Command(c.Argv[0], c.Argv[1:]...), printed: make(chan struct{}), cut: make(chan struct{}, 1)}
	p.cmd.Env = c.Env
	// The child has a process group of its own. The kernel kills it when the thread that started it ends.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var ends [2]*os.File // of the pipes, for the child
	var err error
	for i := range p.output {
		o := &p.output[i]
		o.done = make(chan struct{})
		if o.from, ends[i], err = os.Pipe(); err != nil {
			break
		}
		defer ends[i].Close() // the child has a copy
	}
	if err == nil {
		p.cmd.Stdout, p.cmd.Stderr = ends[toOut], ends[toErr]
		err = p.cmd.Start()
	}
	if err != nil {
		for i := range p.output {
			_ = p.output[i].from.Close() // nil if its pipe was not made
		}
		return nil, fmt.Errorf("%s: %w", c.Name(), err)
	}
	for i := range p.output {
		go p.output[i].copy(func(line []byte) {
			p.watch.see(line)
			out.line(i, c.Name(), colour, line)
		})
	}
	return p, nil
}

// signal sends s to the process group of the child. If the child has ended, SIGKILL ends the wait for its output.
func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		_ = syscall.Kill(-p.cmd.Process.Pid, s) // the child may have ended
	} else if s == syscall.SIGKILL {
		wake.Put(p.cut)
	}
}

// wait waits for the end of the child, kills the other processes of its group, and reads the rest of its output. If the launcher's
// output has no reader, wait returns after drainTime and sayTime, before the rest is printed; it waits until SIGKILL if the child
// succeeded and --fail-on may find a failure in its output.
func (p *process) wait() ended {
	waitExit(p.cmd.Process.Pid)
	at := time.Now()
	p.signal(syscall.SIGKILL)
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	_ = p.cmd.Wait() // the state has the error
	limit := time.Now().Add(drainTime)
	for i := range p.output {
		_ = p.output[i].from.SetReadDeadline(limit) // a pipe has deadlines
	}
	go func() {
		defer close(p.printed)
		for i := range p.output {
			<-p.output[i].done
		}
	}()
	state := p.cmd.ProcessState
	var unread <-chan time.Time
	if p.watch.failOn == nil || !state.Success() {
		unread = time.After(drainTime + sayTime)
	}
	select {
	case <-p.printed:
	case <-unread:
	case <-p.cut:
	}
	e := ended{p: p, status: state.ExitCode(), how: state.String(), ok: state.Success(), at: at}
	if st, is := state.Sys().(syscall.WaitStatus); is && st.Signaled() {
		e.status = 128 + int(st.Signal())
	}
	if _, bad := p.watch.seen(); e.ok && bad != "" {
		e.ok, e.status, e.how = false, 1, "printed "+quoted(bad)
	}
	return e
}

// waitExit waits until pid has ended and leaves it a zombie, so that its id, and the id of its group, are not reused
// yet.
func waitExit(pid int) {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}

func quoted(line string) string {
	line = strings.TrimSpace(line)
	if len(line) > 200 {
		line = line[:200] + "..."
	}
	return fmt.Sprintf("%q", line)
}
