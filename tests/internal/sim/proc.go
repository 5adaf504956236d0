package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/internal/value"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// proc is one process: a node of the library and the program on it.
type proc struct {
	c    *cluster
	who  plan.Node
	gen  int // its number among the processes of node who, from 1
	name string
	host string
	ctx  context.Context
	end  context.CancelFunc

	env      map[string]string // that others of its place do not have
	node     atomic.Pointer[postoffice.Node]
	session  *core.Session
	worker   *af.Worker
	keyValue *kv.Worker[uint8]
	started  chan struct{} // closed when Start has returned
	err      error         // of Start, then
	calls    atomic.Int64
	apps     sync.WaitGroup // goroutines of the program

	leaving   atomic.Bool   // Finalize has begun
	finalized chan struct{} // closed when Finalize has returned
	finalErr  error
	loopOver  chan struct{} // closed when get_batch has said that all workers have ended

	// Guarded by c.mu.
	van       transport
	dead      bool
	frozen    bool
	woken     time.Duration // when it last went on
	disturbed bool          // it was stopped or cut off
	thawed    chan struct{}
	replaced  time.Duration // when the process that has taken its place had started
	slow      time.Duration // its handler blocks until then
	downs     map[int]time.Duration
}

// transport is how a plan gets at the van of a process.
type transport interface {
	kill(fork bool)
	bury()
	stop()
	wake()
	setReady()
	held() int64
}

// opened gives p its van, or ends the van if p was killed meanwhile.
func (p *proc) opened(v transport) {
	p.c.mu.Lock()
	p.van = v
	dead := p.dead
	p.c.mu.Unlock()
	if dead {
		v.kill(false)
	}
}

// startLinger is how long a node whose start timed out lets its last messages leave.
const startLinger = 2 * time.Second

// start begins a process. It does not wait until it has started.
func (c *cluster) start(who plan.Node, newHost bool, env map[string]string) *proc {
	c.mu.Lock()
	c.gens[who]++
	p := &proc{c: c, who: who, gen: c.gens[who], env: env, started: make(chan struct{}), finalized: make(chan struct{}), loopOver: make(chan struct{}), downs: map[int]time.Duration{}}
	p.name = procName(who, p.gen)
	p.host = c.host(who)
	if newHost {
		p.host = c.host(who) + strconv.Itoa(p.gen)
	}
	p.ctx, p.end = context.WithCancel(context.Background())
	old := c.current[who]
	c.current[who] = p
	c.procs = append(c.procs, p)
	c.mu.Unlock()
	c.net.note(p.name, "starts")
	done := c.check.within(p, c.startLimit()+startLinger, "Start")
	p.apps.Go(func() {
		err := p.join()
		done()
		p.err = err
		if err != nil {
			c.net.note(p.name, "has not started: "+err.Error())
		} else {
			c.net.note(p.name, "has started")
			c.sameCluster(p)
			c.mu.Lock()
			if p.van != nil {
				p.van.setReady()
			}
			if old != nil && old.replaced == 0 {
				old.replaced = c.net.now()
			}
			c.mu.Unlock()
		}
		close(p.started)
		if err == nil && c.plan.Cluster.FinalizeEarly && who.Role() != "worker" {
			_ = p.leave() // judged later
		}
	})
	return p
}

// sameCluster judges whether a process that has started may be in this cluster.
func (c *cluster) sameCluster(p *proc) {
	c.mu.Lock()
	scheduler := c.current["scheduler"]
	c.mu.Unlock()
	const name = "STEPAF_CLUSTER_ID"
	if want, got := c.environ(scheduler)[name], c.environ(p)[name]; want != got {
		c.check.fail("another cluster", "%s has started, its %s is %q, that of the scheduler is %q", p.name, name, got, want)
	}
}

// join starts the node and its servers or workers.
func (p *proc) join() error {
	c := p.c
	settings := c.environ(p)
	cfg, err := env.LoadFrom(env.Source{Lookup: func(name string) (string, bool) { v, ok := settings[name]; return v, ok }})
	if err != nil {
		return err
	}
	o := postoffice.Options{Config: cfg, Log: slog.New(&logger{p: p}), Van: c.factory(p), KeepBackend: true}
	c.options(p, &o)
	n, err := postoffice.Start(p.ctx, o)
	if err != nil {
		return err
	}
	p.node.Store(n)
	if n.IsRecovery() && c.plan.Cluster.IsForeign(p.who) { // one of the original waits in the barrier of start-up all the same
		if err := testcluster.StopBarrier(p.ctx, n); err != nil {
			return err
		}
	}
	began := c.net.now() // events at this time are reported, or not, by chance
	n.OnPeer(func(peer postoffice.NodeID, up bool, cause error) {
		id := int(peer)
		c.mu.Lock()
		defer c.mu.Unlock()
		if up {
			delete(p.downs, id)
		} else {
			p.downs[id] = c.net.now()
		}
		if c.net.now() > began {
			c.net.note(p.name, fmt.Sprintf("is told: %s up=%t", van.NodeName(id), up))
		}
	})
	role := p.who.Role()
	switch {
	case c.plan.Cluster.API == "python":
		if p.session, err = core.Open(p.ctx, n); err == nil && role == "server" {
			p.apps.Go(p.serve)
		}
	case c.plan.Cluster.API == "kv" && role == "server":
		var s *kv.Server[uint8]
		if s, err = kv.NewServer[uint8](n, kv.ServerOptions{}); err == nil {
			err = s.Handle(p.serveKV)
		}
	case c.plan.Cluster.API == "kv" && role == "worker":
		p.keyValue, err = kv.NewWorker[uint8](n, kv.WorkerOptions{})
	case role == "server":
		var s *af.Server
		if s, err = af.NewServer(n, af.ServerOptions{}); err == nil {
			err = s.Handle(p.handle)
		}
	case role == "worker":
		p.worker, err = af.NewWorker(n, af.WorkerOptions{})
	}
	if err != nil {
		n.Close()
	}
	return err
}

// begin begins a call. The returned function waits for it, within limit from now on.
func (p *proc) begin(t *tensors, id callID, limit time.Duration) (wait func() error, err error) {
	switch {
	case p.keyValue != nil:
		return t.pushThenPull(id, limit)
	case p.session == nil:
		call, err := p.worker.PushPull(t.push, testcluster.PerServer(t.pull, p.node.Load().Topology().NumServers), af.Within(limit))
		return func() error { return call.Wait(context.Background()) }, err
	}
	h, err := p.session.PushPull(af.DefaultStream, nil, t.push, t.pull)
	return func() error { return p.wait(h, limit) }, err
}

// slice is how long one wait of the Python module is.
const slice = time.Second

// wait is the wait of the Python module.
func (p *proc) wait(h int32, limit time.Duration) error {
	for {
		if err := p.session.Wait(int64(h), limit, slice); !errors.Is(err, core.ErrPending) {
			return err
		}
	}
}

// begins waits until the process has started, and tells whether it has.
func (p *proc) begins() bool {
	select {
	case <-p.started:
		return p.err == nil
	case <-p.ctx.Done():
		return false
	}
}

// runs waits until the process may run, and tells whether it lives.
func (p *proc) runs() bool {
	for {
		p.c.mu.Lock()
		dead, thawed := p.dead, p.thawed
		if !p.frozen {
			thawed = nil
		}
		p.c.mu.Unlock()
		if dead || thawed == nil {
			return !dead
		}
		select {
		case <-thawed:
		case <-p.ctx.Done():
			return false
		}
	}
}

// excused is how long the process may still take for overdue work.
func (p *proc) excused() time.Duration {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	switch {
	case p.dead:
		return time.Hour
	case p.frozen:
		return slack
	case p.woken != 0:
		return p.woken + slack - p.c.net.now()
	}
	return 0
}

// pause is a time in which the program does nothing. It tells whether the process lives.
func (p *proc) pause(d time.Duration) bool {
	if d > 0 {
		select {
		case <-time.After(d):
		case <-p.ctx.Done():
			return false
		}
	}
	return p.runs()
}

// stand blocks a handler for as long as the plan says.
func (p *proc) stand() {
	for {
		p.c.mu.Lock()
		left := p.slow - p.c.net.now()
		p.c.mu.Unlock()
		if left <= 0 || !p.pause(left) {
			return
		}
	}
}

// handle is the handler of a tensor server.
func (p *proc) handle(b af.Batch) {
	p.stand()
	if !p.runs() {
		b.Release()
		return
	}
	if answers, ok := p.take(b); ok {
		if err := b.Respond(answers); err != nil {
			p.refused(err)
		}
		return
	}
	b.Release()
}

// refused judges that the library has not taken an answer.
func (p *proc) refused(err error) {
	p.c.net.note(p.name, "answer refused: "+brief(err))
	if errors.Is(err, van.ErrInvalid) || errors.Is(err, postoffice.ErrAnswered) {
		p.c.check.fail("refused answer", "%s: %v", p.name, err)
	}
}

// serve is the program of a server in Python.
func (p *proc) serve() {
	var items []core.Item
	for {
		if !p.runs() {
			return
		}
		p.stand()
		var err error
		items, err = p.session.GetBatch(items[:0], slice)
		if !p.runs() {
			return
		}
		switch {
		case err == nil:
			p.respond(items)
		case errors.Is(err, core.ErrPending):
		case errors.Is(err, core.ErrLoopOver):
			close(p.loopOver)
			return
		case p.node.Load().Alive() != nil:
			return
		case !p.pause(50 * time.Millisecond):
			return
		}
	}
}

// respond answers one batch of every worker.
func (p *proc) respond(items []core.Item) {
	for _, it := range items {
		answers, ok := p.take(it.Batch)
		if ok {
			p.stale(it.Batch)
			if _, err := p.session.Answer(af.DefaultStream, it.ID, answers, nil); err != nil {
				p.refused(err)
			}
		}
		it.Release()
	}
}

// instance is the rank of the process that has sent a batch: of the worker group that is
// this server's counterpart.
func (p *proc) instance(b af.Batch) int {
	g := p.c.group()
	return b.Worker()*g + p.who.Rank()%g
}

// take judges a batch and makes its answers.
func (p *proc) take(b af.Batch) (answers []af.KeyTensor, ok bool) {
	c := p.c
	worker := p.instance(b)
	var id callID
	for i, t := range b.Pushes() {
		l, ok := c.check.push(p, worker, i, t.Val.Bytes())
		if !ok {
			return nil, false
		}
		if i > 0 && l.id != id {
			c.check.fail("wrong data", "%s got a batch with tensors of %s and %s", p.name, id, l.id)
			return nil, false
		}
		id = l.id
	}
	if len(b.Pushes()) == 0 {
		c.check.fail("wrong data", "%s got a batch of worker %d without a push", p.name, worker)
		return nil, false
	}
	c.net.note(p.name, "has the batch of "+id.String())
	c.check.handle(id, p)
	c.heard(p, id)
	for i, q := range b.Pulls() {
		buf := make([]byte, q.Len)
		label{kind: value.Answered, id: id, index: i, server: p.who.Rank(), sgen: p.gen}.write(buf)
		t, err := af.FromBytes(buf, q.Dtype, q.Shape...)
		if err != nil {
			c.check.fail("wrong data", "%s: pull %d of %s: %v", p.name, i, id, err)
			return nil, false
		}
		answers = append(answers, af.KeyTensor{Key: q.Key, Val: t})
	}
	return answers, true
}

// stale judges whether a batch that get_batch has returned should have gone before.
func (p *proc) stale(b af.Batch) {
	c := p.c
	l, err := read(b.Pushes()[0].Val.Bytes(), value.Pushed)
	if err != nil {
		return
	}
	now := c.net.now()
	id := van.WorkerID(l.id.worker)
	c.mu.Lock()
	from := c.process(plan.NodeOf("worker", l.id.worker), l.id.gen)
	down, lost := p.downs[id]
	replaced := from != nil && from.replaced != 0 && now > from.replaced+slack && from.dead
	foreign := c.plan.Cluster.IsForeign(p.who) || c.plan.Cluster.IsForeign(plan.NodeOf("worker", l.id.worker))
	c.mu.Unlock()
	switch {
	case replaced && !c.unaware(p):
		c.check.fail("batch of a lost worker", "%s: get_batch returned %s, which was killed and replaced before", p.name, l.id)
	case lost && now > down+slack && from != nil && from.dead:
		c.check.fail("batch of a lost worker", "%s: get_batch returned %s; it was told at %.6fs that this worker is lost", p.name, l.id, down.Seconds())
	}
	call, ok := c.check.find(l.id)
	if ok && call.gaveUp && call.end > 0 && now > call.end+slack && !foreign && c.gentle {
		c.check.fail("abandoned batch", "%s: get_batch returned %s, which was given up at %.6fs", p.name, l.id, call.end.Seconds())
	}
}

// leave ends the program: Finalize, stop() in Python. It returns when that has
// ended, also if another goroutine has begun it.
func (p *proc) leave() error {
	if p.leaving.Swap(true) {
		<-p.finalized
		return p.finalErr
	}
	if p.c.plan.Cluster.LoopEnds && p.who.Role() == "server" {
		select {
		case <-p.loopOver:
		case <-p.ctx.Done():
		}
	}
	p.c.net.note(p.name, "finalizes")
	if p.session != nil && !(p.c.plan.Cluster.PlainScheduler && p.who.Role() == "scheduler") {
		p.finalErr = p.session.Stop(context.Background())
	} else {
		p.finalErr = p.node.Load().Shutdown(context.Background())
	}
	p.c.net.note(p.name, "has finalized: "+brief(p.finalErr))
	close(p.finalized)
	return p.finalErr
}

// brief is an error without what differs between equal runs: nothing of the library's
// numbers is in it.
func brief(err error) string {
	if err == nil {
		return "ok"
	}
	for _, k := range []struct {
		err  error
		text string
	}{{postoffice.ErrRefused, "refused"}, {van.ErrPeerLost, "peer lost"}, {van.ErrTimeout, "timed out"}, {van.ErrClosed, "closed"},
		{van.ErrQueueFull, "queue full"}, {van.ErrUnknownPeer, "unknown peer"}, {van.ErrMalformed, "malformed"}, {van.ErrInvalid, "invalid"}} {
		if errors.Is(err, k.err) {
			return k.text
		}
	}
	return "failed"
}

// logger puts what a node logs into the timeline.
type logger struct {
	p *proc
}

// Enabled implements slog.Handler.
func (l *logger) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

// Handle implements slog.Handler.
func (l *logger) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	b.WriteString("log: " + r.Message)
	r.Attrs(func(a slog.Attr) bool {
		fmt.Fprintf(&b, " %s=%v", a.Key, a.Value.Resolve())
		return true
	})
	l.p.c.net.tl.log(entry{at: l.p.c.net.now(), who: l.p.name, what: b.String()})
	return nil
}

// WithAttrs implements slog.Handler.
func (l *logger) WithAttrs([]slog.Attr) slog.Handler { return l }

// WithGroup implements slog.Handler.
func (l *logger) WithGroup(string) slog.Handler { return l }
