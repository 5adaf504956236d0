package sim

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/foreign"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
)

// cluster is all processes of a plan.
type cluster struct {
	plan   *plan.Plan
	seed   seed
	net    *Net
	check  *checker
	fabric *fabric // of RDMA; nil for others
	gentle bool    // the only faults are slow handlers: all messages arrive

	mu      sync.Mutex
	procs   []*proc // all there have ever been
	current map[plan.Node]*proc
	gens    map[plan.Node]int
	phase   int
	over    bool // no process is started any more
	rounds  []*round
	jobs    []*job
}

func newCluster(p *plan.Plan, s seed) *cluster {
	tl := &timeline{}
	n := newNet(s, p.Transport, tl)
	c := &cluster{plan: p, seed: s, net: n, check: newChecker(n), current: map[plan.Node]*proc{}, gens: map[plan.Node]int{}, gentle: true}
	n.fat = func(who, what string) { c.check.fail("budget", "%s: %s", who, what) }
	n.storm = func() { c.check.fail("storm", "%d messages have been sent", maxSent) }
	for _, ph := range p.Phases {
		for _, e := range ph.Events {
			c.gentle = c.gentle && (e.Do == plan.SlowHandler || e.Do == plan.Barrier)
		}
	}
	t := p.Transport
	c.gentle = c.gentle && t.Break == 0 && t.Loss == 0 && t.Queue == 0 && t.Bandwidth == 0
	if t.Kind == "rdma" {
		c.fabric = newFabric(c)
	}
	return c
}

func (c *cluster) group() int { return max(c.plan.Cluster.Group, 1) }

// schedulerPort is where the scheduler listens.
const schedulerPort = 9000

// host is the address of a node's machine.
func (c *cluster) host(n plan.Node) string {
	net := map[string]string{"scheduler": "127.0.0.1", "server": "127.0.1.", "worker": "127.0.2."}[n.Role()]
	if n.Role() == "scheduler" {
		return net
	}
	return net + strconv.Itoa(n.Rank()+1)
}

// environ is the environment of a process.
func (c *cluster) environ(p *proc) map[string]string {
	s := &c.plan.Cluster
	g := c.group()
	env := map[string]string{
		"DMLC_ROLE": p.who.Role(), "DMLC_NUM_WORKER": strconv.Itoa(s.Workers), "DMLC_NUM_SERVER": strconv.Itoa(s.Servers),
		"DMLC_GROUP_SIZE": strconv.Itoa(g), "DMLC_PS_ROOT_URI": c.host("scheduler"), "DMLC_PS_ROOT_PORT": strconv.Itoa(schedulerPort),
		"DMLC_NODE_RANK": strconv.Itoa(p.who.Rank() / g), "STEPMESH_GPU": strconv.Itoa(p.who.Rank() % g),
		"STEPMESH_BAKCEND": "CPU", "STEPAF_BUSY_POLL_ENABLE": "0", "BYTEPS_ENABLE_IPC": "0", "STEPAF_START_TIMEOUT": "60",
		"STEPAF_BARRIER_TIMEOUT": strconv.Itoa(int(barrierLimit / time.Second)),
	}
	if c.plan.Transport.Resend {
		env["PS_RESEND"] = "1"
	}
	if c.fabric != nil {
		env["DMLC_ENABLE_RDMA"] = "ibverbs"
	}
	if len(s.Foreign) > 0 { // also where a plan gives the cluster a name
		env["STEPAF_FOREIGN"] = "1"
	}
	if c.named() {
		env["STEPAF_CLUSTER_ID"] = "sim"
	}
	maps.Copy(env, s.Env)
	maps.Copy(env, s.Nodes[p.who])
	maps.Copy(env, p.env)
	return env
}

// startLimit is how long Start may take.
func (c *cluster) startLimit() time.Duration {
	if s, err := strconv.Atoi(c.plan.Cluster.Env["STEPAF_START_TIMEOUT"]); err == nil {
		return time.Duration(s) * time.Second
	}
	return time.Minute
}

// factory makes the van of a process.
func (c *cluster) factory(p *proc) van.Factory {
	f := func(o van.Options) (van.Van, error) {
		if c.fabric != nil {
			return c.fabric.newVan(p, o)
		}
		v := c.net.newNode(p.who, p.name, p.host, o)
		p.opened(v)
		return v, nil
	}
	if c.plan.Cluster.IsForeign(p.who) {
		return foreign.Factory(f)
	}
	return f
}

// options sets the random parts of a node.
func (c *cluster) options(p *proc, o *postoffice.Options) {
	var mu sync.Mutex
	r := stream{s: c.seed.of("node").of(p.name)}
	o.Rand = func() uint64 {
		mu.Lock()
		defer mu.Unlock()
		return uint64(r.next())
	}
}

// process is one of all that have been. c.mu is held.
func (c *cluster) process(who plan.Node, gen int) *proc {
	for _, p := range c.procs {
		if p.who == who && p.gen == gen {
			return p
		}
	}
	return nil
}

// heard judges whether a batch comes from a process that another has replaced before it
// began the call.
func (c *cluster) heard(at *proc, id callID) {
	call, ok := c.check.find(id)
	c.mu.Lock()
	from := c.process(plan.NodeOf("worker", id.worker), id.gen)
	replaced := from != nil && from.replaced != 0 && ok && call.start > from.replaced+slack
	now := c.current[plan.NodeOf("worker", id.worker)]
	mixed := len(c.plan.Cluster.Foreign) > 0
	c.mu.Unlock()
	if replaced && !mixed && !c.unaware(at) {
		c.check.fail("replaced, and heard", "%s got the batch of %s, which was made at %.6fs; %s had taken its place at %.6fs",
			at.name, id, call.start.Seconds(), now.name, from.replaced.Seconds())
	}
}

// nameless tells whether a call is of a process of the original that another has replaced,
// or that has just replaced another. Nothing in its messages says which of the two has sent
// them, so with PS_RESEND one that comes again after the record of the next process, which
// may itself have been lost and come late, looks like that one's first.
func (c *cluster) nameless(id callID) bool {
	who := plan.NodeOf("worker", id.worker)
	if !c.plan.Transport.Resend || !c.plan.Cluster.IsForeign(who) {
		return false
	}
	call, ok := c.check.find(id)
	c.mu.Lock()
	defer c.mu.Unlock()
	from, before := c.process(who, id.gen), c.process(who, id.gen-1)
	return from != nil && from.replaced != 0 || ok && before != nil && before.replaced != 0 && call.start <= before.replaced+2*slack
}

// unaware tells whether a process may not have received yet the notices that the scheduler has
// sent to the others: it was woken, or the link to the scheduler was healed, less than slack ago,
// or not yet. Messages of other processes arrive at the same time as the scheduler's
// notices, so it may accept a message of a process that has been replaced.
func (c *cluster) unaware(p *proc) bool {
	now := c.net.now()
	c.mu.Lock()
	asleep := p.frozen || p.woken != 0 && now <= p.woken+slack
	c.mu.Unlock()
	return asleep || c.net.apart(p.who, "scheduler", now-slack)
}

// stands tells whether a process is stopped, and when it was woken last.
func (c *cluster) stands(p *proc) (still bool, woken time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return p.frozen, p.woken
}

// living lists the processes of nodes that run, in order.
func (c *cluster) living(nodes plan.Nodes) (all []*proc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.procs {
		if nodes.Has(p.who) && !p.dead {
			all = append(all, p)
		}
	}
	return all
}

// now is the process of each node, in order.
func (c *cluster) members(nodes plan.Nodes) (all []*proc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.plan.Cluster.All() {
		if p := c.current[n]; p != nil && nodes.Has(n) {
			all = append(all, p)
		}
	}
	return all
}

// holders lists the processes that may have p's place in the eyes of the scheduler at some
// time since then: p, and the one before until p has started. That one goes on until p takes
// its place; if p is killed or refused before, it never does.
func (c *cluster) holders(p *proc, since time.Duration) []*proc {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := []*proc{p}
	for _, o := range slices.Backward(c.procs[:slices.Index(c.procs, p)]) {
		if o.who != p.who {
			continue
		}
		if isClosed(p.started) && p.err == nil && o.replaced < since {
			break
		}
		p = o
		list = append(list, o)
	}
	return list
}

// live is the process of a node that events are about: the latest that lives.
func (c *cluster) live(n plan.Node, want func(*proc) bool) *proc {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range slices.Backward(c.procs) {
		if p.who == n && !p.dead && want(p) {
			return p
		}
	}
	return nil
}

// do carries out an event.
func (c *cluster) do(e *plan.Event) {
	any := func(*proc) bool { return true }
	p := c.live(e.Node, any)
	what := string(e.Do)
	if e.Peer != "" {
		what += " " + string(e.Peer)
	}
	c.net.note(string(e.Node), "plan: "+what)
	switch e.Do {
	case plan.Kill:
		c.kill(p, e.Fork)
	case plan.Stop:
		c.stop(p)
		c.later(e.For, func() { c.wake(p) })
	case plan.Wake:
		c.wake(c.live(e.Node, func(p *proc) bool { return p.frozen }))
	case plan.Join:
		c.supervise(c.start(e.Node, e.NewHost, e.Env), e.NewHost, func(*proc) {})
	case plan.Leave:
		if p != nil {
			c.leave(p)
		}
	case plan.Finalize:
		if p != nil {
			p.apps.Go(func() {
				if p.begins() {
					_ = p.leave() // judged later
				}
			})
		}
	case plan.Barrier:
		if p != nil {
			c.work(p, func() {
				if p.begins() {
					_ = c.barrier(p, van.WorkerGroup|van.ServerGroup) // noted
				}
			})
		}
	case plan.Cut:
		c.each(e, plan.Cut, c.net.cut)
		c.later(e.For, func() { c.each(e, plan.Heal, c.net.heal) })
	case plan.Heal:
		c.each(e, plan.Heal, c.net.heal)
	case plan.Break:
		c.each(e, plan.Break, c.net.breakLink)
	case plan.SlowLink:
		c.net.slow(e.Node, e.Peer, e.Bandwidth)
		c.later(e.For, func() { c.net.slow(e.Node, e.Peer, 0) })
	case plan.SlowHandler:
		if p != nil {
			c.mu.Lock()
			p.slow = c.net.now() + e.For.D()
			c.mu.Unlock()
		}
	}
}

func (c *cluster) later(d plan.Duration, f func()) {
	if d > 0 {
		c.net.after(d.D(), f)
	}
}

// each applies f to the simulated links of the two nodes of an event, or of the one and all others, and does the same to
// links over RDMA.
func (c *cluster) each(e *plan.Event, do plan.Action, f func(a, b plan.Node)) {
	for _, n := range c.plan.Cluster.All() {
		if n == e.Node || e.Peer != "" && n != e.Peer {
			continue
		}
		f(e.Node, n)
		if c.fabric != nil {
			c.fabric.link(e.Node, n, do)
		}
		if do == plan.Cut {
			c.mu.Lock()
			for _, m := range []plan.Node{n, e.Node} {
				if p := c.current[m]; p != nil {
					p.disturbed = true
				}
			}
			c.mu.Unlock()
		}
	}
}

// joinTime is how long a process that is refused is started again.
const joinTime = 30 * time.Second

// supervise starts a process again when it is refused, as a process supervisor does:
// the scheduler may not know yet that the process before has died. begun is called for each
// later process.
func (c *cluster) supervise(p *proc, newHost bool, begun func(*proc)) {
	first := c.net.now()
	p.apps.Go(func() {
		for {
			<-p.started
			c.mu.Lock()
			if holder := c.holderLocked(p); holder != nil {
				p.dead = true
				c.current[p.who] = holder
				c.mu.Unlock()
				p.end()
				return
			}
			stay := p.err == nil || p.dead || c.current[p.who] != p || c.net.now() > first+joinTime || c.over
			c.mu.Unlock()
			if stay {
				return
			}
			time.Sleep(time.Second + c.seed.of("again").of(p.name).upTo(100*time.Millisecond))
			c.mu.Lock()
			stay = p.dead || c.current[p.who] != p || c.over
			p.dead = true
			c.mu.Unlock()
			if stay {
				return
			}
			p.end()
			p = c.start(p.who, newHost, nil)
			begun(p)
		}
	})
}

// holderLocked is the process whose place p was refused, since it lives: it was stopped or
// cut off, and was there again before p could take its place. It goes on then. c.mu is
// held.
func (c *cluster) holderLocked(p *proc) *proc {
	if c.current[p.who] != p || p.err == nil || !strings.Contains(p.err.Error(), "none of its nodes is dead") {
		return nil
	}
	for _, o := range slices.Backward(c.procs) {
		if o == p || o.who != p.who || o.dead || o.frozen || !isClosed(o.started) {
			continue
		}
		if n := o.node.Load(); o.err == nil && n != nil && n.Alive() == nil {
			return o
		}
	}
	return nil
}

// kill ends a process.
func (c *cluster) kill(p *proc, fork bool) {
	if p == nil {
		return
	}
	c.mu.Lock()
	p.dead = true
	frozen := p.frozen
	p.frozen = false
	v := p.van
	c.mu.Unlock()
	if v != nil {
		v.kill(fork)
	}
	if frozen {
		close(p.thawed)
	}
	c.sweep(p)
}

// sweep ends the goroutines of a process that has died.
func (c *cluster) sweep(p *proc) {
	p.end()
	p.apps.Go(func() {
		<-p.started
		if n := p.node.Load(); n != nil {
			n.Close()
		}
	})
}

// leave ends a process without waiting for other nodes.
func (c *cluster) leave(p *proc) {
	c.mu.Lock()
	p.dead = true
	c.mu.Unlock()
	c.net.note(p.name, "leaves")
	c.sweep(p)
}

func (c *cluster) stop(p *proc) {
	if p == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.frozen || p.van == nil {
		return
	}
	p.frozen, p.disturbed = true, true
	p.thawed = make(chan struct{})
	p.van.stop()
}

func (c *cluster) wake(p *proc) {
	if p == nil {
		return
	}
	c.mu.Lock()
	if !p.frozen {
		c.mu.Unlock()
		return
	}
	p.frozen, p.woken = false, c.net.now()
	close(p.thawed)
	v := p.van
	c.mu.Unlock()
	v.wake()
}

// job is something that the program of a process does.
type job struct {
	p    *proc
	done chan struct{}
}

// work makes the program of p do something, which a phase waits for.
func (c *cluster) work(p *proc, f func()) {
	j := &job{p, make(chan struct{})}
	c.mu.Lock()
	c.jobs = append(c.jobs, j)
	c.mu.Unlock()
	go func() {
		defer close(j.done)
		f()
	}()
}

// workTime is the longest that calls in flight may take.
const workTime = 2 * time.Minute

// rest waits until all jobs have ended but those of stopped processes.
func (c *cluster) rest() {
	c.mu.Lock()
	jobs := c.jobs
	c.jobs = nil
	c.mu.Unlock()
	var left []*job
	until := c.net.now() + workTime
	for _, j := range jobs {
		for j != nil {
			c.mu.Lock()
			frozen := j.p.frozen
			c.mu.Unlock()
			if frozen {
				left = append(left, j)
				break
			}
			select {
			case <-j.done:
				j = nil
			case <-time.After(20 * time.Millisecond):
				if c.net.now() > until {
					c.check.fail("never ends", "%s: what its program does has not ended after %s", j.p.name, workTime)
					j = nil
				}
			}
		}
	}
	c.mu.Lock()
	c.jobs = append(c.jobs, left...)
	c.mu.Unlock()
}

// barrierLimit is how long a program waits in a barrier.
const barrierLimit = 30 * time.Second

// barrier calls the barrier of all instances of a group.
func (c *cluster) barrier(p *proc, group int) error {
	if !p.runs() {
		return p.ctx.Err()
	}
	v := c.check.vote(p)
	c.net.note(p.name, fmt.Sprintf("barrier of group %d", group))
	done := c.check.within(p, barrierLimit, "barrier")
	err := p.node.Load().InstanceBarrier(p.ctx, 0, postoffice.Group(group))
	done()
	if p.ctx.Err() != nil {
		return err
	}
	var all [][]*proc
	for _, n := range []struct {
		bit   int
		nodes plan.Nodes
	}{{van.ServerGroup, "servers"}, {van.WorkerGroup, "workers"}} {
		if group&n.bit != 0 {
			for _, p := range c.members(n.nodes) {
				all = append(all, c.holders(p, v.start))
			}
		}
	}
	c.check.voted(v, err, all)
	c.net.note(p.name, "barrier: "+brief(err))
	c.note(&round{p: p, phase: c.at(), barrier: true, start: v.start, end: c.net.now(), err: err})
	return err
}
