package launch

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// drainTime is how long output of a child that has ended may be held open by
// somebody who has left its process group.
const drainTime = time.Second

// process is a running child.
type process struct {
	*Child
	watch watch
	cmd   *exec.Cmd
	pipes [2]*os.File // our ends
	read  sync.WaitGroup

	mu    sync.Mutex
	ended bool // the group's number may belong to others
}

// ended is how a process ended.
type ended struct {
	p      *process
	status int    // as a shell says it: 128 and the signal's number
	how    string // "exit status 3", "signal: killed"
	ok     bool
	at     time.Time
}

// start starts c. The calling goroutine must be locked to its thread, and stay
// until the child has ended.
func start(c *Child, plan *Plan, colour int, out *printer) (*process, error) {
	p := &process{Child: c, watch: watch{failOn: plan.Spec.FailOn}, cmd: exec.Command(c.Argv[0], c.Argv[1:]...)}
	p.cmd.Env, p.cmd.SysProcAttr = c.Env, attributes()
	var theirs [2]*os.File
	defer func() {
		for _, f := range theirs {
			if f != nil {
				_ = f.Close()
			}
		}
	}()
	for i := range p.pipes {
		r, w, err := os.Pipe()
		if err != nil {
			p.closePipes()
			return nil, fmt.Errorf("%s: %w", c.Name(), err)
		}
		p.pipes[i], theirs[i] = r, w
	}
	p.cmd.Stdout, p.cmd.Stderr = theirs[toOut], theirs[toErr]
	if err := p.cmd.Start(); err != nil {
		p.closePipes()
		return nil, fmt.Errorf("%s: %w", c.Name(), err)
	}
	for i, r := range p.pipes {
		p.read.Go(func() {
			copyLines(r, func(line []byte) {
				p.watch.see(line)
				out.line(i, c.Name(), colour, line)
			})
		})
	}
	return p, nil
}

func (p *process) closePipes() {
	for _, f := range p.pipes {
		if f != nil {
			_ = f.Close()
		}
	}
}

// signal sends s to the child and to what it has started.
func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		_ = syscall.Kill(-p.cmd.Process.Pid, s) // it may have ended, which is as good
	}
}

// wait waits for the end of the child, ends what it has left behind in its group,
// and takes the rest of its output.
func (p *process) wait() ended {
	waitExit(p.cmd.Process.Pid)
	at := time.Now()
	p.signal(syscall.SIGKILL)
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	err := p.cmd.Wait()
	late := time.AfterFunc(drainTime, func() {
		for _, f := range p.pipes {
			_ = f.SetReadDeadline(time.Now())
		}
	})
	p.read.Wait()
	late.Stop()
	p.closePipes()

	e := ended{p: p, ok: err == nil, at: at}
	if st, is := p.cmd.ProcessState.Sys().(syscall.WaitStatus); is {
		e.status = st.ExitStatus()
		if st.Signaled() {
			e.status = 128 + int(st.Signal())
		}
	}
	e.how = p.cmd.ProcessState.String()
	if _, bad := p.watch.result(); e.ok && bad != "" {
		e.ok, e.status, e.how = false, 1, "printed "+quoted(bad)
	}
	return e
}

func quoted(line string) string {
	line = strings.TrimSpace(line)
	if len(line) > 200 {
		line = line[:200] + "..."
	}
	return fmt.Sprintf("%q", line)
}
