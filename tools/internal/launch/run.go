package launch

import (
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

// Run starts the children of plan, and returns when all have ended: nil if all succeeded, else an error with the status
// of the first child that failed. Run ends all children if one fails, after Spec.Timeout, or at a signal. A second
// signal other than SIGPIPE kills them at once. When all have ended, any signal other than SIGPIPE ends the wait for the reader
// of their output. After a signal that ends the run or that wait the status is 128 plus its number, unless a child failed before.
//
// After all workers (or without workers, all servers) have succeeded, the other children have Spec.Grace to end.
// Children that Run must end count as failed.
func Run(plan *Plan, streams Streams, signals <-chan os.Signal, lookup func(string) (string, bool)) error {
	r := &run{plan: plan, out: newPrinter(streams, lookup), ends: make(chan ended)}
	if plan.MakesSecret {
		dir, err := r.makeSecret()
		if err != nil {
			return fmt.Errorf("creating the cluster's secret: %w; set TMPDIR to a directory where files can be created, or start without a secret (--no-secret)", err)
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
	started := slices.Clone(r.living)
	r.loop(signals)
	r.awaitOutput(started, signals)
	return r.result
}

// awaitOutput waits until all output of the ended children was printed, or for a signal other than SIGPIPE.
func (r *run) awaitOutput(children []*process, signals <-chan os.Signal) {
	printed, said := make(chan struct{}), r.said
	go func() {
		defer close(printed)
		for _, p := range children {
			<-p.printed
		}
		if said != nil {
			<-said
		}
	}()
	for {
		select {
		case <-printed:
			return
		case s := <-signals:
			if s != syscall.SIGPIPE {
				r.signalled(s)
				return
			}
		}
	}
}

// run is the state of Run's loop. Only its goroutine uses it.
type run struct {
	plan    *Plan
	out     *printer
	ends    chan ended
	extra   []string // variables of all children, in addition to those of the plan
	living  []*process
	stopped bool
	result  error
	first   time.Time     // when the process of result failed; zero if result is not about a process
	said    chan struct{} // closed when the last line of say was printed; nil before the first

	grace, kill, limit <-chan time.Time
}

// makeSecret writes a new secret to a file in a private directory, and returns the directory. All children get the
// file's path in STEPAF_SECRET_FILE. If the launcher is killed, the directory remains. Its secret is then useless,
// because the kernel kills all children with the launcher.
func (r *run) makeSecret() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "stepaf-launch-"); err != nil {
		return "", err
	}
	file, err := filepath.Abs(filepath.Join(dir, "secret")) // absolute, since a child may change its directory
	if err == nil {
		err = secret.Write(file, secret.Make())
	}
	if err != nil {
		os.RemoveAll(dir) // err is the cause
		return "", err
	}
	r.extra = append(r.extra, "STEPAF_SECRET_FILE="+file)
	return dir, nil
}

// startAll starts the children on one thread. The thread must not end before the children, so it lives until release is
// called.
func (r *run) startAll() (release func()) {
	done, started := make(chan struct{}), make(chan error)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread ends with this goroutine
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
			r.say("killing processes that did not end within %v: %s", r.plan.Spec.KillAfter, r.names())
			r.signalAll(syscall.SIGKILL)
		}
	}
}

func (r *run) signalled(s os.Signal) {
	switch number := s.(syscall.Signal); {
	case !r.stopped:
		r.fail(exit.With(128+int(number), fmt.Errorf("stopped by signal: %s", number)))
	case number != syscall.SIGPIPE: // each line written to a closed pipe raises one
		r.signalAll(syscall.SIGKILL)
	}
}

// exited handles the end of a process.
func (r *run) exited(e ended) {
	r.living = slices.DeleteFunc(r.living, func(p *process) bool { return p == e.p })
	switch {
	case !e.ok && !r.stopped:
		r.first = e.at
		r.fail(exit.With(e.status, failure{e}))
	case !e.ok && e.at.Before(r.first):
		// Its output ended later than that of the children that failed because of it.
		r.first = e.at
		r.result = exit.With(e.status, failure{e})
	case r.stopped:
	case r.grace == nil && !slices.ContainsFunc(r.living, func(p *process) bool { return p.Role == r.primary() }):
		r.grace = time.After(r.plan.Spec.Grace)
	}
}

// primary returns the role whose end ends the run.
func (r *run) primary() string {
	for _, role := range []string{"worker", "server"} {
		if r.plan.Spec.starts(role) {
			return role
		}
	}
	return "scheduler"
}

// failure is the error of a failed process. Its text has the last lines that were read of the process until then.
type failure struct{ ended }

func (e failure) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s failed: %s", e.p.Name(), e.how)
	if e.p.Role != "scheduler" {
		fmt.Fprintf(&b, " (group %d, instance %d, pid %d)", e.p.Group, e.p.Instance, e.p.cmd.Process.Pid)
	}
	last, _ := e.p.watch.seen()
	if len(last) == 0 {
		b.WriteString("; it printed nothing")
	} else {
		b.WriteString("; its last lines:")
		for _, l := range last {
			b.WriteString("\n    " + l)
		}
	}
	return b.String()
}

// fail records the reason of the end, and stops the running children.
func (r *run) fail(err error) {
	if r.stopped {
		return
	}
	r.stopped, r.result, r.grace = true, err, nil
	if len(r.living) == 0 {
		return
	}
	why, _, _ := strings.Cut(err.Error(), "; ")
	r.say("%s; stopping %s", why, r.names())
	r.signalAll(syscall.SIGTERM)
	r.kill = time.After(r.plan.Spec.KillAfter)
}

// sayTime is how long say waits for the output.
const sayTime = time.Second

// say prints a line of the launcher. If the output has no reader, the line is printed later, since the children must be ended
// nevertheless.
func (r *run) say(format string, args ...any) {
	before, said := r.said, make(chan struct{})
	r.said = said
	go func() {
		defer close(said)
		if before != nil {
			<-before
		}
		r.out.say(format, args...)
	}()
	select {
	case <-said:
	case <-time.After(sayTime):
	}
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
