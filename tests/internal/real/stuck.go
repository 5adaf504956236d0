package real

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// freezer is the standard error of a process that is to be stopped. It stops the process some time
// after the node has logged that it connects to the scheduler, which is when it registers.
type freezer struct {
	w     io.Writer
	after time.Duration
	once  sync.Once
}

// Write implements io.Writer.
func (f *freezer) Write(p []byte) (int, error) {
	if f.after > 0 && bytes.Contains(p, []byte(`connect peer="scheduler`)) {
		f.once.Do(func() {
			time.AfterFunc(f.after, func() { _ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) })
		})
	}
	return f.w.Write(p)
}

// startLinger is how long a node whose start timed out lets its last messages leave.
const startLinger = 2 * time.Second

// startLimit is the nodes' STEPAF_START_TIMEOUT.
func (r *planRun) startLimit() time.Duration {
	s, err := strconv.Atoi(cmp.Or(r.p.Cluster.Env["STEPAF_START_TIMEOUT"], strconv.Itoa(startSeconds*r.c.o.Slow)))
	if err != nil {
		r.c.wrong("the runner: STEPAF_START_TIMEOUT: %v", err)
	}
	return time.Duration(s) * time.Second
}

// stuck starts all nodes, of which one stops at some moment of its start, and checks
// that the others start or time out within the limit. That one begins last, when the others have
// begun: it takes longer to begin a process than to start the last node of a cluster.
func (r *planRun) stuck() error {
	c, stuck := r.c, r.p.Cluster.Stuck
	var others []*Process
	for _, n := range r.p.Cluster.All() {
		if n == stuck {
			continue
		}
		p, err := c.Spawn(n.Role(), n.Rank())
		if err != nil {
			return err
		}
		others = append(others, p)
	}
	for _, p := range others {
		listens := func() bool { _, err := p.Port(); return err == nil }
		if err := r.until(p, "it listens", listens); err != nil {
			return err
		}
	}
	after := rand.N(r.p.Cluster.StuckBy.D())
	c.note("%s will stand still %s after it has connected to the scheduler", stuck, after)
	p, err := c.SpawnAs(stuck.Role(), stuck.Rank(), func(b *Behaviour) { b.Freeze = after + 1 })
	if err != nil {
		return err
	}
	p.change(func(s *State) { s.Stopped = true })
	limit := r.startLimit() + startLinger
	for _, p := range others {
		what := fmt.Sprintf("Start returns, for which it has %s and %s", r.startLimit(), startLinger)
		if err := p.Await(time.Until(p.began.Add(limit+r.late())), what, func(s State) bool { return s.Started || s.Left || s.Ended }); err != nil {
			c.wrong("%v", err)
		}
	}
	if err := r.until(p, "it stands still", p.standsStill); err != nil {
		c.wrong("the runner: %v", err)
	}
	return nil
}

// standsStill tells whether the process is stopped, by whichever process.
func (p *Process) standsStill() bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	if err != nil {
		return false
	}
	behind := text[bytes.LastIndexByte(text, ')')+1:] // its name may contain anything
	return bytes.HasPrefix(behind, []byte(" T"))
}

// until waits for a condition that is visible from outside a process.
func (r *planRun) until(p *Process, what string, ok func() bool) error {
	for end := time.Now().Add(r.c.slowly(patience)); !ok(); {
		if p.State().Ended || time.Now().After(end) {
			return fmt.Errorf("%s: not within %s: %s; it has %s", p, r.c.slowly(patience), what, p.State())
		}
		<-time.After(time.Millisecond)
	}
	return nil
}
