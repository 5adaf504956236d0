package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/tools/internal/secret"
)

// Run starts the children of plan, and returns when all have ended: nil if all
// ended well, else an error with the status of the first that failed. Everything
// is stopped when one fails, when Spec.Timeout passes, or when a signal comes; a
// second signal, other than SIGPIPE, kills at once. Signals end with status 128 and their number.
//
// When all workers (or, without workers, all servers) have ended well, the others
// have Spec.Grace to do so too; those that must be ended count as failed.
func Run(plan *Plan, streams Streams, signals <-chan os.Signal, lookup func(string) (string, bool)) error {
	r := &run{plan: plan, out: newPrinter(streams, lookup), ends: make(chan ended)}
	if plan.MakesSecret {
		dir, err := r.makeSecret()
		if err != nil {
			return fmt.Errorf("making the cluster's secret: %w; set TMPDIR to a directory where files can be made, or start without a secret (--no-secret)", err)
		}
		defer func() {
			if err := os.RemoveAll(dir); err != nil {
				r.out.say("the file with the cluster's secret was not removed: %v", err)
			}
		}()
	}
	if b := plan.Spec.Banner; b != "" {
		host, port := plan.Spec.Host, strconv.Itoa(plan.Spec.Port)
		r.out.banner(strings.NewReplacer("{host}", host, "{port}", port).Replace(b))
	}
	for _, m := range plan.Messages {
		r.out.say("%s", m)
	}
	release := r.startAll()
	defer release()
	r.loop(signals)
	return r.result
}

// run is the state of Run's loop. Only its goroutine touches it.
type run struct {
	plan    *Plan
	out     *printer
	ends    chan ended
	extra   []string // variables of all children, in addition to those of the plan
	living  []*process
	stopped bool
	result  error
	first   time.Time // when the process failed that result is about; zero if it is about none

	grace, kill, limit <-chan time.Time
}

// makeSecret writes a new secret to a file in a private directory, and returns the directory. STEPAF_SECRET_FILE names the
// file to all children. If the launcher is killed, the directory remains. Its secret is worthless then, because all children
// are killed with the launcher.
func (r *run) makeSecret() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "stepaf-launch-"); err != nil {
		return "", err
	}
	file, err := filepath.Abs(filepath.Join(dir, "secret")) // a child may change its directory first
	if err == nil {
		err = secret.Write(file, secret.Make())
	}
	if err != nil {
		os.RemoveAll(dir) // err has the cause
		return "", err
	}
	r.extra = append(r.extra, "STEPAF_SECRET_FILE="+file)
	return dir, nil
}

// startAll starts the children on one thread, which lives until the returned
// function is called: their lives hang on it.
func (r *run) startAll() (release func()) {
	done, started := make(chan struct{}), make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with this goroutine
		for i := range r.plan.Children {
			c := r.plan.Children[i]
			c.Env = append(slices.Clip(c.Env), r.extra...)
			p, err := start(&c, r.plan, 31+(i+1)%6, r.out)
			if err != nil {
				started <- err
				break
			}
			r.living = append(r.living, p)
			go func() { r.ends <- p.wait() }()
		}
		close(started)
		<-done
	}()
	if err := <-started; err != nil {
		r.fail(err)
	}
	return func() { close(done) }
}

func (r *run) loop(signals <-chan os.Signal) {
	if t := r.plan.Spec.Timeout; t > 0 {
		r.limit = time.After(t)
	}
	for len(r.living) > 0 {
		select {
		case e := <-r.ends:
			r.exited(e)
		case s := <-signals:
			r.signalled(s)
		case <-r.limit:
			r.limit = nil
			r.fail(exit.With(exit.Timeout, fmt.Errorf("stopped after --timeout %v; still running: %s", r.plan.Spec.Timeout, r.names())))
		case <-r.grace:
			r.grace = nil
			r.fail(fmt.Errorf("did not end within %v of the last %s: %s", r.plan.Spec.Grace, r.primary(), r.names()))
		case <-r.kill:
			r.kill = nil
			r.out.say("killing what did not stop within %v: %s", r.plan.Spec.KillAfter, r.names())
			r.signalAll(syscall.SIGKILL)
		}
	}
}

func (r *run) signalled(s os.Signal) {
	number, ok := s.(syscall.Signal)
	if !ok {
		return
	}
	switch {
	case r.stopped && number == syscall.SIGPIPE:
		return // each line that nobody reads gives one
	case r.stopped:
		r.signalAll(syscall.SIGKILL)
		return
	}
	r.fail(exit.With(128+int(number), fmt.Errorf("stopped by signal: %s", number)))
}

// exited takes note of a process that has ended.
func (r *run) exited(e ended) {
	r.living = slices.DeleteFunc(r.living, func(p *process) bool { return p == e.p })
	switch {
	case !e.ok && !r.stopped:
		r.first = e.at
		r.fail(exit.With(e.status, r.describe(e)))
	case !e.ok && e.at.Before(r.first):
		// Its output took longer than that of those who failed because of it.
		r.first = e.at
		r.result = exit.With(e.status, r.describe(e))
	case r.stopped:
	case r.grace == nil && !slices.ContainsFunc(r.living, func(p *process) bool { return p.Role == r.primary() }):
		r.grace = time.After(r.plan.Spec.Grace)
	}
}

// primary is the role whose end ends the run.
func (r *run) primary() string {
	for _, role := range []string{"worker", "server"} {
		if r.plan.Spec.starts(role) {
			return role
		}
	}
	return "scheduler"
}

// describe names a failed process and repeats its last lines.
func (r *run) describe(e ended) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s failed: %s", e.p.Name(), e.how)
	if e.p.Role != "scheduler" {
		fmt.Fprintf(&b, " (group %d, instance %d, pid %d)", e.p.Group, e.p.Instance, e.p.cmd.Process.Pid)
	}
	last := e.p.watch.last
	if len(last) == 0 {
		b.WriteString("; it printed nothing")
	} else {
		b.WriteString("; its last lines:")
		for _, l := range last {
			b.WriteString("\n    " + l)
		}
	}
	return errors.New(b.String())
}

// fail records why everything ends, and stops what is running.
func (r *run) fail(err error) {
	if r.stopped {
		return
	}
	r.stopped, r.result, r.grace = true, err, nil
	if len(r.living) == 0 {
		return
	}
	why, _, _ := strings.Cut(err.Error(), "; ")
	r.out.say("%s; stopping %s", why, r.names())
	r.signalAll(syscall.SIGTERM)
	r.kill = time.After(r.plan.Spec.KillAfter)
}

func (r *run) signalAll(s syscall.Signal) {
	for _, p := range r.living {
		p.signal(s)
	}
}

func (r *run) names() string {
	var l []string
	for _, p := range r.living {
		l = append(l, p.Name())
	}
	return strings.Join(l, ", ")
}
