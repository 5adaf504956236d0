package real

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
)

// ErrCannot is wrapped by the error of a plan that these processes cannot carry out.
var ErrCannot = errors.New("not on real processes")

// PlanOptions say how a plan is carried out.
type PlanOptions struct {
	Leg  Leg
	Host string // RDMA: the address of the device
	Dir  string // where logs are kept
	Log  func(line string)

	// Margin is how much longer things may take than the plan says, 3s if 0; and 3s if the times of
	// the plan are promised.
	Margin time.Duration
	// Slow is how many times as slow the machine is as others: all times but the promised ones
	// are so much longer.
	Slow int
	// Faults are planted in all processes: names of fail points, in a build that has them.
	Faults []string
}

// Result is the result of a plan.
type Result struct {
	Wrong    []string // violations
	Calls    int64    // that ended well
	Failed   int64
	Times    []string // durations of events for which the plan has a limit
	Timeline string
	Logs     func() string // the end of each process's
}

// defaultMargin is the margin of expectations about time, for a busy machine.
const defaultMargin = 3 * time.Second

// settle is how long everything may take to work again when all faults are over.
const settle = 30 * time.Second

// Cannot says why a plan cannot be carried out, or nothing.
func Cannot(p *plan.Plan, leg Leg) string {
	if p.Only == "simulation" {
		return "it is for the simulation"
	}
	if p.Transport.Loss+p.Transport.Duplicate+p.Transport.Break > 0 {
		return "the network of the system loses and duplicates nothing"
	}
	if k := p.Transport.Kind; k != "" && k != string(leg) {
		return "it is for " + k
	}
	if len(p.Cluster.Foreign) > 0 && leg == RDMA {
		return "nodes of the original are made for ZeroMQ only"
	}
	for _, ph := range p.Phases {
		for _, e := range ph.Events {
			switch {
			case e.Do == plan.SlowLink || e.Do == plan.Break:
				return "links cannot do " + string(e.Do)
			case e.NewHost || e.Do == plan.Cut:
				if leg != TCP {
					return "only processes with networks of their own can be cut off, and they share no memory"
				}
				if !Privileged() {
					return "a network for each process needs the rights of root"
				}
			}
		}
	}
	return ""
}

// RunPlan carries out a plan. The error is about steps that could not be done, or that of ctx.
// Violations are in the result.
func RunPlan(ctx context.Context, p *plan.Plan, o PlanOptions) (*Result, error) {
	if why := Cannot(p, o.Leg); why != "" {
		return nil, fmt.Errorf("%s on %s: %w: %s", p.Name, o.Leg, ErrCannot, why)
	}
	if o.Slow > 1 {
		p = p.Slower(o.Slow)
	}
	r := &planRun{p: p, ctx: ctx, stop: make(chan struct{}), margin: o.Margin}
	if r.margin == 0 || p.Promised {
		r.margin = defaultMargin
	}
	watched, end := context.WithCancel(ctx)
	defer end()
	r.machine = WatchMachine(watched)
	opts := Options{Workers: p.Cluster.Workers, Servers: p.Cluster.Servers, Group: p.Cluster.Group, Foreign: p.Cluster.Foreign, Leg: o.Leg,
		Program: Plain, PlainScheduler: p.Cluster.PlainScheduler, LoopEnds: p.Cluster.LoopEnds, Wait: !p.Cluster.FinalizeEarly, Host: o.Host, Dir: o.Dir, Log: o.Log, Faults: o.Faults, Slow: o.Slow}
	switch p.Cluster.API {
	case "python":
		opts.Program = Module
	case "kv":
		opts.Program = KeyValue
	}
	opts.Env = assignments(p.Cluster.Env)
	if p.Transport.Resend {
		opts.Env = append(opts.Env, "PS_RESEND=1")
	}
	opts.NodeEnv = func(role string, rank int) []string { return assignments(p.Cluster.Nodes[plan.NodeOf(role, rank)]) }
	for _, ph := range p.Phases {
		for _, e := range ph.Events {
			opts.Separate = opts.Separate || e.Do == plan.Cut || e.NewHost
		}
	}
	c, err := New(opts)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, c.Close)()
	r.c = c
	if p.Cluster.Stuck != "" {
		err = r.stuck()
	} else if err = c.Start(); err == nil {
		r.run()
	}
	if err != nil {
		c.wrong("%v", err)
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	c.Close() // so that all has come that they have said
	r.judgeBarriers()
	res := &Result{Wrong: c.Wrong(), Times: r.times, Timeline: c.Timeline()}
	for _, x := range c.All() {
		s := x.State().Stats
		res.Calls, res.Failed = res.Calls+s.OK, res.Failed+s.Failed
	}
	res.Logs = func() string {
		var b strings.Builder
		for _, x := range c.All() {
			fmt.Fprintf(&b, "--- %s\n%s", x, tailOf(x.Log(), 4000))
		}
		return b.String()
	}
	return res, nil
}

func tailOf(s string, n int) string { return s[max(0, len(s)-n):] }

// planRun is a plan being carried out.
type planRun struct {
	p   *plan.Plan
	c   *Cluster
	ctx context.Context

	margin  time.Duration
	machine *Machine

	loads  []plan.Load // of the phase
	phases []phaseRun
	times  []string
	stop   chan struct{} // closed when faults are over: pending events are dropped
	events sync.WaitGroup

	mu    sync.Mutex
	cuts  map[[2]plan.Node]int
	held  time.Duration      // how long the plan's clock was stopped: see clock
	holds int                // steps for which it is stopped now
	since time.Time          // the first of them began
	gone  map[plan.Node]bool // left or finalized: not to be replaced
	wants map[plan.Node]bool // a process is to be there
}

// phaseRun is when a phase was, and the processes at its end.
type phaseRun struct {
	from, to time.Time
	living   []*Process
	replaced []*Process
	reached  map[plan.Duration]time.Time // when the plan's clock had come to a time of the phase
}

func (r *planRun) run() {
	r.cuts, r.gone, r.wants = map[[2]plan.Node]int{}, map[plan.Node]bool{}, map[plan.Node]bool{}
	for i := range r.p.Phases {
		r.phase(&r.p.Phases[i])
	}
	close(r.stop)
	r.events.Wait()
	if r.ctx.Err() != nil {
		return
	}
	if !r.p.End.Abandon {
		r.end()
	}
	for i := range r.phases {
		for _, e := range r.p.Phases[i].Expect {
			r.expect(&r.p.Phases[i], &r.phases[i], &e)
		}
	}
}

// phase is one phase, to its end.
func (r *planRun) phase(ph *plan.Phase) {
	r.c.note("phase %q begins", ph.Name)
	r.mu.Lock()
	r.loads = ph.Loads
	r.mu.Unlock()
	x, from := phaseRun{from: time.Now(), reached: map[plan.Duration]time.Time{}}, r.clock()
	for _, p := range r.c.Living() {
		if p.Role == "worker" {
			p.Begin(Command{Do: doLoads, Loads: r.loadsOf(p)})
		}
	}
	for i := range ph.Events {
		e := &ph.Events[i]
		r.events.Go(func() {
			if r.after(from.Add(e.At.D())) {
				r.event(e)
			}
		})
	}
	for _, e := range ph.Expect {
		r.events.Go(func() {
			if r.after(from.Add(e.After.D())) {
				r.mu.Lock()
				x.reached[e.After] = from.Add(e.After.D() + r.held)
				r.mu.Unlock()
			}
		})
	}
	r.after(from.Add(ph.For.D()))
	r.awaitJoining(ph)
	x.to = time.Now()
	x.living = r.c.Living()
	for _, p := range r.c.All() {
		if s := p.State(); r.c.Get(p.Role, p.Rank) != p && s.Started && !s.Killed {
			x.replaced = append(x.replaced, p)
		}
	}
	r.phases = append(r.phases, x)
}

// awaitJoining waits until each worker that is joining, and whose calls the phase expects, has made one. How long a worker takes to join
// is not promised: a connection attempt that was lost in a cut is repeated after 1, 2, 4 and 8 s.
func (r *planRun) awaitJoining(ph *plan.Phase) {
	r.hold(true)
	defer r.hold(false)
	for _, p := range r.c.Living() {
		expected := slices.ContainsFunc(ph.Expect, func(e plan.Expect) bool {
			return !e.Replaced && (e.Rounds == "all" || e.Rounds == "some") && e.Nodes.Has(plan.NodeOf(p.Role, p.Rank))
		})
		if p.Role != "worker" || !expected || p.State().Started {
			continue
		}
		r.can(p.Await(r.c.slowly(settle), "it joins, and a call of it ends", func(s State) bool { return s.Stats.OK+s.Stats.Failed > 0 || s.Ended }))
	}
}

// clock is the plan's clock. It stops while a process starts, until that process listens, and while the network is changed. Promised
// times count from then. Such a step takes milliseconds, and seconds on a busy machine or an emulated processor.
func (r *planRun) clock() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.holds > 0 {
		return r.since.Add(-r.held)
	}
	return time.Now().Add(-r.held)
}

// hold stops the clock, or lets it go on.
func (r *planRun) hold(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if on {
		if r.holds++; r.holds == 1 {
			r.since = time.Now()
		}
	} else if r.holds--; r.holds == 0 {
		r.held += time.Since(r.since)
	}
}

// after waits until a time of the clock, and returns false when the faults are over before.
func (r *planRun) after(at time.Time) bool {
	for {
		left := at.Sub(r.clock())
		if left <= 0 {
			return true
		}
		timer := time.NewTimer(max(left, 5*time.Millisecond)) // the clock may stop meanwhile
		select {
		case <-timer.C:
		case <-r.stop:
			timer.Stop()
			return false
		case <-r.ctx.Done():
			timer.Stop()
			return false
		}
	}
}

func (r *planRun) loadsOf(p *Process) (l []plan.Load) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, x := range r.loads {
		if x.Nodes.Has(plan.NodeOf(p.Role, p.Rank)) {
			l = append(l, x)
		}
	}
	return l
}

// event makes something happen.
func (r *planRun) event(e *plan.Event) {
	p := r.c.Get(e.Node.Role(), e.Node.Rank())
	r.c.note("%s %s %s%s", e.Do, e.Node, e.Peer, forHow(e))
	switch e.Do {
	case plan.Kill:
		if s := p.State(); e.Fork && s.Started && !s.Stopped { // others do not answer, and are to be killed now
			r.can(p.Fork())
		}
		p.Kill()
	case plan.Stop:
		r.can(p.Stop())
		if e.For > 0 {
			r.after(r.clock().Add(e.For.D()))
			r.can(p.Continue())
		}
	case plan.Wake:
		for _, x := range r.c.All() { // the one that has been replaced meanwhile, if so
			if x.Role == p.Role && x.Rank == p.Rank && x.State().Stopped {
				r.can(x.Continue())
			}
		}
	case plan.Join:
		r.join(e.Node, e.Env)
	case plan.Leave, plan.Finalize:
		r.mu.Lock()
		r.gone[e.Node] = true
		r.mu.Unlock()
		if e.Do == plan.Leave {
			p.Leave()
		} else {
			p.Finish()
		}
	case plan.Barrier:
		p.Barrier(van.WorkerGroup|van.ServerGroup, 5*time.Minute)
	case plan.Cut:
		pairs := r.pairs(e)
		r.cut(pairs, true)
		if e.For > 0 {
			r.after(r.clock().Add(e.For.D()))
			r.cut(pairs, false)
		}
	case plan.Heal:
		r.cut(r.pairs(e), false)
	case plan.SlowHandler:
		r.can(p.Block(true))
		r.after(r.clock().Add(e.For.D()))
		if !p.State().Ended {
			r.can(p.Block(false))
		}
	}
}

func forHow(e *plan.Event) string {
	if e.For > 0 {
		return " for " + e.For.D().String()
	}
	return ""
}

// can notes that something could not be made to happen.
func (r *planRun) can(err error) {
	if err != nil {
		r.c.note("the runner: %v", err)
	}
}

// join starts a process for a place, again when it is refused, as a process supervisor
// does.
func (r *planRun) join(n plan.Node, env map[string]string) {
	r.mu.Lock()
	if r.wants[n] {
		r.mu.Unlock()
		return
	}
	r.wants[n] = true
	delete(r.gone, n)
	r.mu.Unlock()
	r.events.Go(func() {
		defer func() {
			r.mu.Lock()
			delete(r.wants, n)
			r.mu.Unlock()
		}()
		for end := time.Now().Add(r.c.slowly(settle)); ; {
			if n == "scheduler" {
				r.c.release(n.Role(), n.Rank()) // a child that holds the port keeps all others from it
			}
			p, err := r.spawn(n, env)
			if err != nil {
				if r.ctx.Err() == nil {
					r.c.wrong("the runner: %v", err)
				}
				return
			}
			if p.Role == "worker" {
				p.Begin(Command{Do: doLoads, Loads: r.loadsOf(p)}) // which it reads when it has started
			}
			err = p.Await(time.Until(end)+r.c.slowly(patience), "it starts or is refused", func(s State) bool { return s.Started || s.Ended })
			if s := p.State(); err != nil || s.Started || s.Killed {
				r.can(err)
				if id := env["STEPAF_CLUSTER_ID"]; s.Started && id != "" && id != r.p.Cluster.Env["STEPAF_CLUSTER_ID"] {
					r.c.wrong("%s takes part, and is of another cluster, %q", p, id)
				}
				return
			}
			env = nil
			if x := r.c.Get(n.Role(), n.Rank()); x != p && x.State().runs() {
				r.c.note("%s goes on, and keeps its place", x)
				return
			}
			if time.Now().After(end) {
				r.c.wrong("%s: no process can take this place: %s", n, p.State().Error)
				return
			}
			<-time.After(100 * time.Millisecond)
		}
	})
}

// spawn starts a process that has no loads yet, with further variables.
func (r *planRun) spawn(n plan.Node, env map[string]string) (*Process, error) {
	r.hold(true)
	defer r.hold(false)
	p, err := r.c.SpawnAs(n.Role(), n.Rank(), func(b *Behaviour) { b.Loads = nil }, assignments(env)...)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(r.c.slowly(patience)); !p.State().Ended && !strings.Contains(p.Log(), "Bind to ") && time.Now().Before(end) && r.ctx.Err() == nil; {
		<-time.After(5 * time.Millisecond)
	}
	return p, nil
}

// assignments are variables as a process has them, in their order.
func assignments(env map[string]string) (l []string) {
	for name, value := range env {
		l = append(l, name+"="+value)
	}
	slices.Sort(l)
	return l
}

// pairs are the links that an event is about.
func (r *planRun) pairs(e *plan.Event) (l [][2]plan.Node) {
	if e.Peer != "" {
		return [][2]plan.Node{{e.Node, e.Peer}}
	}
	for _, n := range r.p.Cluster.All() {
		if n != e.Node {
			l = append(l, [2]plan.Node{e.Node, n})
		}
	}
	return l
}

func (r *planRun) cut(pairs [][2]plan.Node, on bool) {
	for _, x := range pairs {
		if x[0] > x[1] {
			x[0], x[1] = x[1], x[0]
		}
		r.mu.Lock()
		was := r.cuts[x] > 0
		if on {
			r.cuts[x] = 1
		} else {
			delete(r.cuts, x)
		}
		r.mu.Unlock()
		if was == on {
			continue
		}
		r.hold(true)
		if on {
			r.can(r.c.Cut(x[0].Role(), x[0].Rank(), x[1].Role(), x[1].Rank()))
		} else {
			r.can(r.c.Heal(x[0].Role(), x[0].Rank(), x[1].Role(), x[1].Rank()))
		}
		r.hold(false)
	}
}

// end ends all faults. Then everything must work, and leave in order.
func (r *planRun) end() {
	r.c.note("all faults are over")
	over := time.Now()
	limit := r.p.End.Settle.Or(settle) + r.late()
	r.mu.Lock()
	var all [][2]plan.Node
	for x := range r.cuts {
		all = append(all, x)
	}
	r.loads = []plan.Load{{Nodes: "workers", Every: plan.Duration(5 * time.Millisecond), Limit: plan.Duration(2 * time.Second)}}
	r.mu.Unlock()
	r.cut(all, false)
	var zombies []*Process
	for _, p := range r.c.All() {
		if p.State().Stopped {
			r.can(p.Continue())
			if r.c.Get(p.Role, p.Rank) != p && !r.p.Cluster.IsForeign(plan.NodeOf(p.Role, p.Rank)) { // one of the original reads no notice
				zombies = append(zombies, p)
			}
		}
	}
	for _, n := range r.p.Cluster.All() {
		p := r.c.Get(n.Role(), n.Rank())
		r.mu.Lock()
		gone := r.gone[n]
		r.mu.Unlock()
		if p.State().Ended && !gone {
			r.c.note("join %s", n)
			r.join(n, nil)
		}
	}
	for _, p := range r.c.Living() {
		if p.Role == "worker" {
			p.Begin(Command{Do: doLoads, Loads: r.loadsOf(p)})
		}
	}
	// A process that was declared dead while it was cut off may learn only now that another process
	// has replaced it. A process that has ended is replaced.
	for {
		err := r.c.Works(max(r.p.End.Rounds, 3), min(r.c.slowly(5*time.Second), limit))
		if err == nil && r.present() {
			break
		}
		if r.ctx.Err() != nil {
			return
		}
		if time.Since(over) > limit {
			r.c.wrong("%s behind the end of all faults not everything works: %v", time.Since(over).Round(time.Second), err)
			return
		}
		for _, n := range r.p.Cluster.All() {
			p := r.c.Get(n.Role(), n.Rank())
			if r.mu.Lock(); p.State().Ended && !r.gone[n] {
				r.mu.Unlock()
				r.join(n, nil)
				continue
			}
			r.mu.Unlock()
		}
		<-time.After(50 * time.Millisecond)
	}
	if err := r.barrier(); err != nil {
		r.c.wrong("behind the end of all faults: %v", err)
		return
	}
	r.c.note("everything works, %s behind the end of all faults", time.Since(over).Round(time.Millisecond))
	r.events.Wait()
	for _, p := range zombies {
		if err := p.Await(r.c.slowly(patience), "it is told that another process has its place, and ends", func(s State) bool { return s.Fenced != "" || s.Ended }); err != nil {
			r.c.wrong("%v", err)
		}
	}
	if len(r.gone) == 0 {
		if err := r.c.Finish(r.c.slowly(patience)); err != nil {
			r.c.wrong("the end: %v", err)
		}
	}
}

// barrier makes a barrier of all workers, and of servers unless they are in Finalize already. A
// process may still wait at an earlier barrier whose other members have died, or its canceled
// request may still count. Then the first try ends that barrier, and another try is for all.
func (r *planRun) barrier() error {
	group := van.WorkerGroup
	if !r.p.Cluster.FinalizeEarly {
		group |= van.ServerGroup
	}
	var errs []error
	for range 3 {
		var all []<-chan error
		for _, p := range r.c.Living() {
			if p.Role == "worker" || p.Role == "server" && group&van.ServerGroup != 0 {
				all = append(all, p.Barrier(group, r.c.slowly(8*time.Second)))
			}
		}
		errs = nil
		for _, c := range all {
			errs = append(errs, <-c)
		}
		if errors.Join(errs...) == nil {
			return nil
		}
	}
	return errors.Join(errs...)
}

// present tells whether each place has a process that has started.
func (r *planRun) present() bool {
	for _, n := range r.p.Cluster.All() {
		r.mu.Lock()
		gone := r.gone[n]
		r.mu.Unlock()
		if s := r.c.Get(n.Role(), n.Rank()).State(); !gone && (!s.Started || s.Ended) {
			return false
		}
	}
	return true
}

// expect checks the expectations of a phase.
func (r *planRun) expect(ph *plan.Phase, x *phaseRun, e *plan.Expect) {
	list := x.living
	if e.Replaced {
		list = x.replaced
	}
	begin := x.from.Add(e.After.D())
	if at, ok := x.reached[e.After]; ok {
		begin = at
	}
	from, to := begin.UnixMilli(), x.to.UnixMilli()
	for _, p := range list {
		if !e.Nodes.Has(plan.NodeOf(p.Role, p.Rank)) {
			continue
		}
		wrong := func(format string, args ...any) {
			r.c.wrong("phase %q: %s: %s", ph.Name, p, fmt.Sprintf(format, args...))
		}
		ok, failed, barriers := p.calls(from, to)
		switch {
		case p.Role != "worker" && e.Rounds != "":
		case e.Rounds == "all" && len(failed) > 0:
			wrong("%d calls failed, want none; the first: %s", len(failed), failed[0].Text)
		case (e.Rounds == "all" || e.Rounds == "some") && ok == 0:
			wrong("no call ended well, want %s", e.Rounds)
		case e.Rounds == "none" && ok > 0:
			wrong("%d calls ended well, want none", ok)
		}
		for _, b := range barriers {
			if e.Barriers == "pass" && b.Text != "" || e.Barriers == "fail" && b.Text == "" {
				wrong("a barrier ended with %q, want it to %s", b.Text, e.Barriers)
			}
		}
		if e.Barriers != "" && len(barriers) == 0 && p.Role != "scheduler" {
			wrong("no barrier has ended")
		}
		if !slices.ContainsFunc(failed, func(f Call) bool { return strings.Contains(f.Text, e.SomeError) }) && e.SomeError != "" {
			wrong("of %d calls that failed none has %q in its error", len(failed), e.SomeError)
		}
		var longest Call
		for _, f := range slices.Concat(failed, barriers) {
			if f.MS >= longest.MS {
				longest = f
			}
			if (f.Text != "" || f.Barrier) && e.Within > 0 && f.MS > (e.Within.D()+r.lateFor(&f)).Milliseconds() {
				wrong("a call or barrier took %d ms, want at most %s: %s", f.MS, e.Within.D(), cmp.Or(f.Text, "it passed"))
			}
			if f.Text != "" && !f.Barrier && !strings.Contains(f.Text, e.Error) {
				wrong("a call failed with %q, want %q in it", f.Text, e.Error)
			}
		}
		if e.Within > 0 {
			r.times = append(r.times, fmt.Sprintf("phase %q: %s: of %d barriers and %d calls that failed the longest took %d ms, with a limit of %s and %s for this machine",
				ph.Name, p, len(barriers), len(failed), longest.MS, e.Within.D(), r.lateFor(&longest).Round(time.Millisecond)))
		}
	}
}

// calls are those that began within a time, in milliseconds since 1970.
func (p *Process) calls(from, to int64) (ok int64, failed, barriers []Call) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for at, n := range p.oks {
		if at*10 >= from && at*10 < to {
			ok += n
		}
	}
	for _, c := range p.done {
		switch {
		case c.Begin < from || c.Begin >= to:
		case c.Text != "" && c.Begin+c.MS > to: // others have nothing more to do by then
		case c.Barrier:
			barriers = append(barriers, c)
		default:
			failed = append(failed, c)
		}
	}
	return ok, failed, barriers
}
