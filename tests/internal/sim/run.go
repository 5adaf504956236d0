package sim

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// Result is the result of a run.
type Result struct {
	Plan       *plan.Plan
	Seed       uint64
	Violations []Violation
	Hash       uint64        // of the timeline
	Virtual    time.Duration // how long it was in the cluster
	Calls      int
	Failed     int // calls that ended with an error
	Posted     int // work requests of RDMA devices
	timeline   *timeline
}

// WriteTimeline writes the last lines of the timeline.
func (r *Result) WriteTimeline(w io.Writer, lines int) {
	fmt.Fprintf(w, "plan %s, seed %d\n", r.Plan.Name, r.Seed)
	r.timeline.write(w, lines)
}

// Run carries out a plan with a seed, in a bubble of its own. t is only for the bubble:
// violations are in the Result.
func Run(t *testing.T, p *plan.Plan, number uint64) (r *Result) {
	r = &Result{Plan: p, Seed: number, timeline: &timeline{}}
	if p.Transport.Kind == "rdma" {
		if err := rdmaLacks(p); err != nil {
			r.Violations = append(r.Violations, Violation{Kind: "not simulated", Text: err.Error()})
			return r
		}
	}
	defer func() {
		// Goroutines that stay blocked are a deadlock for synctest; the run has noted them.
		if e := recover(); e != nil {
			if text := fmt.Sprint(e); !strings.HasPrefix(text, "deadlock:") || len(r.Violations) == 0 {
				r.Violations = append(r.Violations, Violation{Kind: "panic", Text: text})
			}
		}
	}()
	synctest.Test(t, func(*testing.T) {
		// The host's clock counts from when the process began: not before it.
		time.Sleep(100 * 365 * 24 * time.Hour)
		c := newCluster(p, seed(mix(number)).of(p.Name))
		r.timeline = c.net.tl
		c.run()
		r.Violations = c.check.violations()
		r.Virtual = c.net.now()
		r.Hash = c.net.tl.hash()
		if c.fabric != nil {
			r.Posted = c.fabric.posted()
		}
		for _, x := range c.rounds {
			if !x.barrier {
				r.Calls++
				if x.err != nil {
					r.Failed++
				}
			}
		}
	})
	return r
}

// run is the whole story.
func (c *cluster) run() {
	defer c.shutdown()
	c.haunt()
	if !c.startAll() {
		return
	}
	c.net.mu.Lock()
	c.net.lossy = true
	c.net.mu.Unlock()
	for i := range c.plan.Phases {
		c.runPhase(i)
	}
	if !c.plan.End.Abandon {
		c.recover()
	}
}

// startAll starts all nodes at about the same time.
func (c *cluster) startAll() bool {
	for i, n := range c.plan.Cluster.All() {
		time.Sleep(c.seed.of("start").at(uint64(i)).upTo(5*time.Millisecond) + time.Microsecond)
		p := c.start(n, false, nil)
		if n == c.plan.Cluster.Stuck {
			c.net.after(c.seed.of("stuck").upTo(c.plan.Cluster.StuckBy.D()), func() { c.stop(p) })
		}
	}
	ok := true
	for _, p := range c.members("all") {
		select {
		case <-p.started:
		case <-time.After(c.startLimit() + startLinger + 2*slack):
			if p.who != c.plan.Cluster.Stuck { // else noted
				ok = false
			}
			continue
		}
		if p.err != nil && c.plan.Cluster.Stuck == "" {
			c.check.fail("not started", "%s: %v", p.name, p.err)
			ok = false
		}
	}
	return ok && c.plan.Cluster.Stuck == ""
}

// runPhase runs the loads and events of one phase.
func (c *cluster) runPhase(i int) {
	ph := &c.plan.Phases[i]
	c.mu.Lock()
	c.phase = i
	c.mu.Unlock()
	begin := c.net.now()
	c.net.note("PHASE", ph.Name)
	stop := make(chan struct{})
	work := func(p *proc) {
		for j := range ph.Loads {
			l := &ph.Loads[j]
			switch {
			case !l.Nodes.Has(p.who):
			case l.Collectives:
				c.work(p, func() { p.collect(l, i<<16|j, stop) })
			default:
				c.work(p, func() { p.run(l, i<<16|j, stop) })
			}
		}
	}
	for _, p := range c.living("all") {
		work(p)
	}
	over := false
	order := make([]int, len(ph.Events))
	for j := range order {
		order[j] = j
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(ph.Events[a].At, ph.Events[b].At) })
	var last time.Duration
	for _, j := range order {
		e := &ph.Events[j]
		at := e.At.D() + c.seed.of("event").at(uint64(i<<16|j)).upTo(50*time.Microsecond)
		at = max(at, last+time.Microsecond) // a process killed and started again at the same time is killed first
		last = at
		c.net.after(at, func() {
			c.mu.Lock()
			ended := over
			c.mu.Unlock()
			if ended {
				return
			}
			if e.Do == plan.Join {
				p := c.start(e.Node, e.NewHost, e.Env)
				work(p)
				c.supervise(p, e.NewHost, work)
				return
			}
			c.do(e)
		})
	}
	time.Sleep(ph.For.D() + time.Millisecond)
	close(stop)
	c.mu.Lock()
	over = true
	c.mu.Unlock()
	c.net.note("PHASE", ph.Name+": ends")
	c.rest()
	c.expect(ph, i, begin)
}

// expect judges the expectations of a phase.
func (c *cluster) expect(ph *plan.Phase, i int, begin time.Duration) {
	c.mu.Lock()
	rounds := c.rounds
	procs := c.procs
	c.mu.Unlock()
	collectives := slices.ContainsFunc(ph.Loads, func(l plan.Load) bool { return l.Collectives })
	for j := range ph.Expect {
		e := &ph.Expect[j]
		for _, p := range procs {
			if !e.Nodes.Has(p.who) || p.dead || (p.replaced != 0) != e.Replaced {
				continue
			}
			good, bad := map[bool]int{}, map[bool]int{}
			told := map[string]bool{} // the first of its kind says enough
			fail := func(kind, format string, args ...any) {
				if !told[kind] {
					told[kind] = true
					c.check.fail(kind, format, args...)
				}
			}
			some := e.SomeError == ""
			for _, r := range rounds {
				if r.p != p || r.phase != i || r.start < begin+e.After.D() {
					continue
				}
				if r.err == nil {
					good[r.barrier]++
					if took := r.end - r.start; r.barrier && e.Within > 0 && took > e.Within.D() {
						fail("late", "%s in phase %q: a barrier passed after %s, want within %s", p.name, ph.Name, took, e.Within.D())
					}
					continue
				}
				if r.end > begin+ph.For.D() {
					continue // get_batch waits for workers that have nothing more to do
				}
				bad[r.barrier]++
				if e.Within > 0 && r.end-r.start > e.Within.D() {
					fail("late", "%s in phase %q: a call failed after %s, want within %s: %v", p.name, ph.Name, r.end-r.start, e.Within.D(), r.err)
				}
				some = some || !r.barrier && strings.Contains(r.err.Error(), e.SomeError)
				if e.Error != "" && !r.barrier && !strings.Contains(r.err.Error(), e.Error) {
					fail("wrong error", "%s in phase %q: %v; want one with %q", p.name, ph.Name, r.err, e.Error)
				}
				if e.Rounds == "all" && !r.barrier || e.Barriers == "pass" && r.barrier {
					fail("failed", "%s in phase %q: none may fail, and the one of %.6fs did: %v", p.name, ph.Name, r.start.Seconds(), r.err)
				}
			}
			if !some {
				fail("wrong error", "%s in phase %q: of %d calls that failed none has %q in its error", p.name, ph.Name, bad[false], e.SomeError)
			}
			if (p.who.Role() == "worker" || collectives) && good[false] == 0 && (e.Rounds == "all" || e.Rounds == "some") {
				fail("failed", "%s in phase %q: no call succeeded, %d failed", p.name, ph.Name, bad[false])
			}
			if e.Rounds == "none" && good[false] > 0 {
				fail("succeeded", "%s in phase %q: %d calls succeeded, want none", p.name, ph.Name, good[false])
			}
			if e.Barriers == "pass" && good[true] == 0 {
				fail("failed", "%s in phase %q: no barrier has passed", p.name, ph.Name)
			}
			if e.Barriers == "fail" && good[true] > 0 {
				fail("succeeded", "%s in phase %q: a barrier has passed, want none", p.name, ph.Name)
			}
		}
	}
}

// Times of the end.
const (
	defaultSettle = 30 * time.Second
	defaultRounds = 3
	schedulerTime = 5 * time.Second // in which a scheduler that was restarted learns its cluster
	finalizeLimit = 60 * time.Second
)

// recover ends all faults, replaces dead processes, and judges whether everything works.
func (c *cluster) recover() {
	c.mu.Lock()
	c.phase = len(c.plan.Phases)
	procs := append([]*proc(nil), c.procs...)
	c.mu.Unlock()
	c.net.note("END", "all faults are over")
	c.net.calm()
	if c.fabric != nil {
		c.fabric.calm()
	}
	for _, p := range procs {
		c.mu.Lock()
		p.slow = 0
		c.mu.Unlock()
		c.wake(p)
		if p.van != nil {
			p.van.bury()
		}
	}
	for _, n := range c.plan.Cluster.All() {
		c.mu.Lock()
		p := c.current[n]
		gone := p.dead
		c.mu.Unlock()
		if !gone && (!isClosed(p.started) || p.err == nil) {
			continue
		}
		if p = c.start(n, false, nil); n == "scheduler" {
			time.Sleep(schedulerTime)
		} else {
			c.supervise(p, false, func(*proc) {})
			time.Sleep(time.Microsecond) // which of two that start at one time has which port is chance
		}
	}
	for until := c.net.now() + joinTime + 2*slack; c.net.now() < until && !c.complete(); {
		time.Sleep(100 * time.Millisecond)
	}
	for _, p := range c.members("all") {
		select {
		case <-p.started:
		case <-time.After(c.startLimit() + startLinger + 2*slack):
		}
		if !isClosed(p.started) {
			return // noted
		}
		if p.err != nil {
			c.check.fail("not replaced", "%s has not started although all faults are over: %v", p.name, p.err)
			return
		}
	}
	time.Sleep(c.plan.End.Settle.Or(defaultSettle))
	for _, p := range procs { // those in whose place others are
		c.mu.Lock()
		old := c.current[p.who] != p && !p.dead
		c.mu.Unlock()
		if old {
			c.leave(p)
		}
	}
	if c.works() {
		c.finish()
	}
}

// complete tells whether every node has a process that has started.
func (c *cluster) complete() bool {
	return !slices.ContainsFunc(c.members("all"), func(p *proc) bool { return !isClosed(p.started) || p.err != nil })
}

// works tells whether all workers' calls and a barrier of all succeed.
func (c *cluster) works() bool {
	for _, p := range c.members("all") {
		if isClosed(p.finalized) {
			if p.finalErr != nil {
				c.check.fail("not finalized", "%s, although the others have not left: %v", p.name, p.finalErr)
			}
			return false
		}
	}
	rounds := cmp.Or(c.plan.End.Rounds, defaultRounds)
	c.net.note("END", "everybody works")
	phase := c.at()
	l := &plan.Load{Every: plan.Duration(time.Millisecond), Rounds: rounds, Limit: plan.Duration(10 * time.Second)}
	for _, p := range c.members("workers") {
		c.work(p, func() { p.run(l, 1<<20, nil) })
	}
	c.rest()
	c.mu.Lock()
	all := c.rounds
	c.mu.Unlock()
	good := map[*proc]int{}
	ok := true
	for _, r := range all {
		if r.phase != phase || r.barrier {
			continue
		}
		if r.err == nil {
			good[r.p]++
		} else if ok {
			ok = false
			c.check.fail("does not recover", "%s, %s after the end of all faults: %v", r.p.name, c.plan.End.Settle.Or(defaultSettle), r.err)
		}
	}
	for _, p := range c.members("workers") {
		if good[p] < rounds && ok {
			ok = false
			c.check.fail("does not recover", "%s has made %d of %d rounds", p.name, good[p], rounds)
		}
	}
	if !ok {
		return false
	}
	group := van.WorkerGroup
	if !c.plan.Cluster.FinalizeEarly {
		group |= van.ServerGroup
	}
	for _, p := range c.members("all") {
		if p.who.Role() == "worker" || p.who.Role() == "server" && group&van.ServerGroup != 0 {
			c.work(p, func() {
				if err := c.barrier(p, group); err != nil {
					c.check.fail("does not recover", "%s: barrier: %v", p.name, err)
				}
			})
		}
	}
	c.rest()
	return len(c.check.violations()) == 0
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// finish lets all leave together.
func (c *cluster) finish() {
	c.net.note("END", "everybody leaves")
	for _, p := range c.members("all") {
		done := c.check.within(p, finalizeLimit, "Finalize")
		c.work(p, func() {
			err := p.leave()
			done()
			if err != nil {
				c.check.fail("not finalized", "%s: %v", p.name, err)
			}
		})
	}
	limit := time.After(finalizeLimit + 2*slack)
	all := make(chan struct{})
	go func() {
		c.rest()
		close(all)
	}()
	select {
	case <-all:
		for _, p := range c.members("all") {
			if n := p.van.held(); n != 0 {
				c.check.fail("leak", "%s has left and holds %d received messages", p.name, n)
			}
		}
	case <-limit:
	}
}

// shutdown ends the remaining processes, and reports goroutines that do not end.
func (c *cluster) shutdown() {
	c.mu.Lock()
	c.over = true
	procs := append([]*proc(nil), c.procs...)
	c.mu.Unlock()
	for _, p := range procs {
		c.wake(p)
		c.mu.Lock()
		dead := p.dead
		p.dead = true
		p.slow = 0
		c.mu.Unlock()
		if !dead {
			c.sweep(p)
		}
	}
	time.Sleep(10 * time.Second)
	c.net.close()
	if c.fabric != nil {
		c.fabric.close()
	}
	time.Sleep(30 * time.Second)
	synctest.Wait()
	if left := others(); len(left) > 0 && len(c.check.violations()) == 0 {
		c.check.fail("goroutines", "%d do not end: %s", len(left), strings.Join(left, "\n"))
	}
}

// others lists the goroutines of this bubble besides the caller's.
func others() (list []string) {
	all := vantest.Stacks()
	mark := bubble(all[0])
	for _, g := range all[1:] {
		if mark != "" && bubble(g) == mark && !strings.Contains(g, "testing/synctest.") && !strings.Contains(g, "internal/synctest.Run") {
			list = append(list, g)
		}
	}
	return list
}

// bubble is the bubble in the first line of a goroutine's stack.
func bubble(stack string) string {
	line, _, _ := strings.Cut(stack, "\n")
	i := strings.Index(line, "synctest bubble ")
	if i < 0 {
		return ""
	}
	rest := line[i:]
	return rest[:strings.IndexAny(rest+"]", "],")]
}
