package real

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is a node, seen from the runner. Its methods are safe for concurrent use.
type Process struct {
	Role   string
	Rank   int
	Serial uint32

	c     *Cluster
	cmd   *exec.Cmd
	log   *tail
	gone  chan struct{} // closed when it has ended
	began time.Time

	write sync.Mutex
	stdin io.WriteCloser

	mu      sync.Mutex
	state   State
	changed chan struct{}
	asked   int
	answers map[int]chan Event
	held    []int           // processes that hold its sockets
	oks     map[int64]int64 // calls that ended well, by the hundredth of a second in which they began
	done    []Call
	votes   []Vote

	startedAt int64 // when Start had returned, in nanoseconds since 1970
}

// State is the known state of a process.
type State struct {
	Started   bool
	ID        int
	StartMS   int64 // how long Start took
	Stats     Stats
	Fenced    string // why the node cannot be used any more
	Left      bool   // the program has ended by itself
	Error     string // of its end
	Ended     bool   // the process
	Killed    bool   // by the runner
	Finishing bool   // a command has asked it to end
	Stopped   bool   // by SIGSTOP
}

// runs tells whether the process has started and goes on. A killed process may take a
// while to end on a busy machine.
func (s State) runs() bool { return s.Started && !s.Stopped && !s.Killed && !s.Ended }

// Name is "worker 1".
func (p *Process) Name() string {
	if p.Role == "scheduler" {
		return p.Role
	}
	return fmt.Sprintf("%s %d", p.Role, p.Rank)
}

// String has the process, too.
func (p *Process) String() string { return fmt.Sprintf("%s (process %d)", p.Name(), p.Serial) }

// PID is its process ID.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Log is the end of its standard error.
func (p *Process) Log() string { return p.log.String() }

// State is its known state now.
func (p *Process) State() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

// change changes the state and wakes its waiters.
func (p *Process) change(f func(s *State)) {
	p.mu.Lock()
	f(&p.state)
	close(p.changed)
	p.changed = make(chan struct{})
	p.mu.Unlock()
}

// Await waits until ok says so, or until limit is over.
func (p *Process) Await(limit time.Duration, what string, ok func(s State) bool) error {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		p.mu.Lock()
		s, changed := p.state, p.changed
		p.mu.Unlock()
		if ok(s) {
			return nil
		}
		select {
		case <-changed:
		case <-timer.C:
			return fmt.Errorf("%s: not within %s: %s; it has %s", p, limit, what, s)
		}
	}
}

// String is for errors.
func (s State) String() string {
	var b strings.Builder
	if !s.Started {
		b.WriteString("not started, ")
	}
	fmt.Fprintf(&b, "%d calls done, %d failed, %d since", s.Stats.OK, s.Stats.Failed, s.Stats.Streak)
	if s.Stats.Last != "" {
		fmt.Fprintf(&b, ", the last error: %s", s.Stats.Last)
	}
	for _, x := range []struct {
		is   bool
		text string
	}{{s.Stopped, "stands still"}, {s.Left, "left: " + s.Error}, {s.Ended && !s.Left, "ended"}, {s.Fenced != "", "fenced: " + s.Fenced}} {
		if x.is {
			b.WriteString(", " + x.text)
		}
	}
	return b.String()
}

// Begin gives a command and returns at once. The channel has the answer, and is closed
// when the process ends before.
func (p *Process) Begin(c Command) <-chan Event {
	done := make(chan Event, 1)
	p.mu.Lock()
	p.state.Finishing = p.state.Finishing || c.Do == doFinish || c.Do == doLeave
	p.asked++
	c.Call = p.asked
	if p.state.Ended {
		p.mu.Unlock()
		close(done)
		return done
	}
	p.answers[c.Call] = done
	p.mu.Unlock()
	b, err := json.Marshal(c)
	if err == nil {
		p.write.Lock()
		_, err = p.stdin.Write(append(b, '\n'))
		p.write.Unlock()
	}
	if err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, os.ErrClosed) {
		p.c.wrong("%s: %v", p, err)
	}
	return done
}

// Do gives a command and waits for its answer.
func (p *Process) Do(c Command, limit time.Duration) (Event, error) {
	select {
	case e, ok := <-p.Begin(c):
		if !ok {
			return e, fmt.Errorf("%s: %s: the process has ended", p, c.Do)
		}
		if e.Text != "" {
			return e, fmt.Errorf("%s: %s: %s", p, c.Do, e.Text)
		}
		return e, nil
	case <-time.After(limit):
		return Event{}, fmt.Errorf("%s: %s has not ended after %s", p, c.Do, limit)
	}
}

// events takes the events of the process, until it ends.
func (p *Process) events(out io.Reader) {
	in := bufio.NewScanner(out)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var e Event
		if err := json.Unmarshal(in.Bytes(), &e); err != nil {
			p.c.wrong("%s wrote %q", p, in.Text())
			continue
		}
		p.event(e)
	}
	_ = p.cmd.Wait()
	p.mu.Lock()
	for _, done := range p.answers {
		close(done)
	}
	clear(p.answers)
	p.mu.Unlock()
	p.change(func(s *State) { s.Ended = true })
	if s := p.State(); !s.Killed && !s.Left {
		p.c.wrong("%s ended by itself: %s", p, p.cmd.ProcessState)
	}
	close(p.gone)
}

func (p *Process) event(e Event) {
	switch e.Event {
	case started:
		p.c.takes(p)
		p.c.note("%s has started as node %d after %d ms", p, e.ID, e.MS)
		p.change(func(s *State) { s.Started, s.ID, s.StartMS = true, e.ID, e.MS })
		p.mu.Lock()
		p.startedAt = e.At
		p.mu.Unlock()
	case barrier:
		p.voted(*e.Vote)
	case report:
		p.change(func(s *State) {
			s.Stats = *e.Stats
			for _, x := range e.OK {
				p.oks[x[0]] += x[1]
			}
			p.done = append(p.done, e.Calls...)
		})
	case violation:
		p.c.wrong("%s: %s", p, e.Text)
	case fenced:
		p.c.note("%s is told that it is out: %s", p, e.Text)
		p.change(func(s *State) { s.Fenced = e.Text })
	case left:
		p.c.note("%s ends: %s", p, cmp.Or(e.Text, "well"))
		if l := e.After.beyond(e.Before); l != "" {
			p.c.wrong("%s has left descriptors open: %s; it had %v before it started, and has %v", p, l, e.Before, e.After)
		}
		p.change(func(s *State) { s.Left, s.Error = true, e.Text })
		if s := p.State(); e.Text != "" && s.Started && s.Fenced == "" && !s.Finishing && p.c.Get(p.Role, p.Rank) == p {
			p.c.wrong("%s ended by itself: %s", p, e.Text)
		}
	case answer:
		p.mu.Lock()
		done := p.answers[e.Call]
		delete(p.answers, e.Call)
		p.mu.Unlock()
		if done != nil {
			done <- e
		}
	}
}

// Kill ends the process as a crash would.
func (p *Process) Kill() {
	p.change(func(s *State) { s.Killed, s.Stopped = true, false })
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.gone
}

// Stop stops it until Continue. It may take a moment on other processors.
func (p *Process) Stop() error {
	p.change(func(s *State) { s.Stopped = true })
	return p.cmd.Process.Signal(syscall.SIGSTOP)
}

// Continue wakes it.
func (p *Process) Continue() error {
	p.change(func(s *State) { s.Stopped = false })
	return p.cmd.Process.Signal(syscall.SIGCONT)
}

// Fork makes a process that has all of its descriptors and lives on when it is killed.
func (p *Process) Fork() error {
	e, err := p.Do(Command{Do: doFork}, p.c.slowly(patience))
	if err == nil {
		p.mu.Lock()
		p.held = append(p.held, e.ID)
		p.mu.Unlock()
	}
	return err
}

// release ends the children of Fork.
func (p *Process) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pid := range p.held {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it ends by itself after a while
	}
	p.held = nil
}

// Resident is the memory of the process in bytes.
func (p *Process) Resident() int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.PID()))
	if err != nil {
		return 0
	}
	var total, resident int
	if _, err := fmt.Sscan(string(text), &total, &resident); err != nil {
		return 0
	}
	return resident * os.Getpagesize()
}

// Descriptors is how many the process has open.
func (p *Process) Descriptors() int {
	names, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID()))
	return len(names)
}

// tail keeps the end of the written text, and all of it in a file if there is one.
type tail struct {
	mu    sync.Mutex
	b     []byte
	lines int
	file  io.WriteCloser
}

const tailSize = 64 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file != nil {
		_, _ = t.file.Write(p)
	}
	t.b = append(t.b, p...)
	t.lines += bytes.Count(p, []byte("\n"))
	if len(t.b) > 2*tailSize {
		t.b = append(t.b[:0], t.b[len(t.b)-tailSize:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}

// Lines is how many lines it has written to standard error.
func (p *Process) Lines() int {
	p.log.mu.Lock()
	defer p.log.mu.Unlock()
	return p.log.lines
}
