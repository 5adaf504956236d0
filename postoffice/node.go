package postoffice

// Node: how it starts, which transport and device it opens, its barriers, and its end.

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/stack"
)

// ErrRefused is wrapped by the error of Start when the scheduler refuses the node. The
// error has the scheduler's reason.
var ErrRefused = membership.ErrRefused

// Config is the configuration of a node; see docs/env.md for what each field
// means. Start from DefaultConfig or LoadConfig.
type Config = env.Config

// DefaultConfig returns a configuration with every setting at its default.
func DefaultConfig() *Config { return env.Default() }

// LoadConfig reads the environment. The error names every variable with an invalid
// value.
func LoadConfig() (*Config, error) { return env.LoadFrom(env.OS()) }

// LoadConfigFrom reads variables from another source: lookup returns a value and
// whether it is set; names, which may be nil, lists the names that are set.
func LoadConfigFrom(lookup func(name string) (string, bool), names func() []string) (*Config, error) {
	return env.LoadFrom(env.Source{Lookup: lookup, Names: names})
}

// Options of Start.
type Options struct {
	Config *Config // required

	// Log receives the node's log; nil means standard error at the level of PS_VERBOSE.
	Log *slog.Logger

	// Van makes the transport; nil means the one that Config.VanType names.
	Van van.Factory

	// Backend is the device's memory; nil means the one that Config.Backend names.
	// The node neither configures nor closes it.
	Backend backend.Backend

	// KeepBackend leaves the backend that Config names open after the node has left, for
	// programs that still use received tensors in its memory.
	KeepBackend bool

	// NoRank lets the scheduler choose the rank instead of computing it from
	// Config (only with a GroupSize of 1).
	NoRank bool

	// Rand is the source of random numbers: the incarnation, first timestamps. nil means
	// the system's. Reproducible tests set it.
	Rand func() uint64

	// NoBarrier makes Start return as soon as this node knows all others, without the
	// barrier over all nodes that C++ StepMesh programs begin with.
	NoBarrier bool
}

// Node is one member of a cluster. All methods are safe for concurrent use.
type Node struct {
	cfg     *Config
	role    van.Role
	baseLog *slog.Logger
	log     *slog.Logger
	debug   bool // log every message
	causes  logx.Causes
	profile *profile // nil unless asked for

	stack    *stack.Van
	van      van.Van      // of stack
	flusher  van.Flusher  // nil when the van holds nothing
	recaller van.Recaller // nil when the van reads no memory later
	back     backend.Backend
	ownBack  bool // this node closes back

	rand        func() uint64
	incarnation uint32 // of this process, see van.Identity
	id          atomic.Int32
	name        atomic.Pointer[string]
	self        van.Node

	control
	laneTable
	lifetime
	peerTable
	apps apps
}

// control is the membership machine, and which of its outputs are still to be carried out.
type control struct {
	mu       sync.Mutex // guards what follows, and changes of lifetime
	machine  *membership.Machine
	outputs  []membership.Output
	draining bool               // a goroutine carries outputs out
	unnamed  map[int]van.Node   // records of nodes with temporary ids
	due      map[int]int        // by peer, Connect outputs that are not carried out yet
	waiters  map[int]chan error // by barrier ticket
	rearm    chan struct{}      // the time of the next tick may have changed
}

// lifetime is how far a node has come, from its start to its end.
type lifetime struct {
	ready     chan struct{} // closed when all nodes are known
	failed    chan struct{} // closed when the node cannot be used any more; err says why
	err       error
	closed    bool
	onExit    []func()
	stop      chan struct{} // ends tick
	leaving   atomic.Bool
	left      chan struct{} // closed when the node has left; finalErr is set then
	finalErr  error
	closing   chan struct{} // closed by Close, to end a Finalize that waits
	closeOnce sync.Once     // closes closing
}

// peerTable is what a node knows of the other nodes.
type peerTable struct {
	peers     sync.Map   // node id to "host:port"
	lostMu    sync.Mutex // guards changes of what follows; taken before strangers.mu
	processes processes
	notices   notices
	strangers strangers
	stale     logx.Sparse // messages of or for other processes
	watchers  []*watcher
}

type watcher struct {
	f func(id int, up bool, cause error)
}

// Start joins the cluster that o.Config describes and returns when every node has
// come, or with an error when ctx ends, when the start-up deadline passes, or when
// the scheduler refuses the node. The error says who is missing.
//
// Config.Role must be worker, server or scheduler; for joint see StartJoint.
func Start(ctx context.Context, o Options) (*Node, error) {
	began := now()
	n, err := newNode(o)
	if err != nil {
		return nil, err
	}
	if err := n.join(ctx); err != nil {
		linger := shortLinger
		if n.role == van.Scheduler {
			linger = lingerTime // all nodes wait for the scheduler's refusal
		}
		n.close(linger)
		return nil, err
	}
	if !o.NoBarrier && !n.IsRecovery() { // a replacement comes after the start barrier
		deadline := began + n.cfg.StartTimeout
		if failpoint.On("start-deadline") {
			deadline = 0
		}
		if err := n.await(ctx, "start barrier", func(t time.Duration) (int, error) { return n.machine.StartBarrier(t, deadline) }); err != nil {
			n.close(shortLinger) // a node that has not come does not read its messages, either
			return nil, err
		}
	}
	return n, nil
}

// StartJoint starts a server and a worker in this process, each with its own id
// and sockets, as DMLC_ROLE=joint does.
func StartJoint(ctx context.Context, o Options) (server, worker *Node, err error) {
	if o.Config == nil {
		return nil, nil, errNoConfig
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	var errs [2]error
	for i, role := range []string{"server", "worker"} {
		c := *o.Config
		c.Role = role
		if c.Port != 0 {
			c.Port += i
		}
		oi := o
		oi.Config = &c
		wg.Go(func() {
			var n *Node
			if n, errs[i] = Start(ctx, oi); errs[i] != nil {
				cancel() // the other node cannot start without this one
			}
			if i == 0 {
				server = n
			} else {
				worker = n
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		for _, n := range []*Node{server, worker} {
			if n != nil {
				n.Close()
			}
		}
		return nil, nil, err
	}
	return server, worker, nil
}

var errNoConfig = fmt.Errorf("start: %w: no Config", van.ErrInvalid)

var roles = map[string]van.Role{"server": van.Server, "worker": van.Worker, "scheduler": van.Scheduler}

func newNode(o Options) (*Node, error) {
	if o.Config == nil {
		return nil, errNoConfig
	}
	cfg := o.Config
	role, ok := roles[cfg.Role]
	if !ok && cfg.Role == "joint" {
		return nil, fmt.Errorf("start: %w: role joint is two nodes, use StartJoint", van.ErrInvalid)
	}
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("start: %w: %w", van.ErrInvalid, err)
	}
	if o.Van == nil { // the needs of a van of the program's own are not known
		if err := limits.Check(cfg, cfg.Role); err != nil {
			return nil, &van.Error{Op: "start", Node: role.String(), Err: err}
		}
	}
	n := &Node{cfg: cfg, role: role, control: control{waiters: map[int]chan error{}, rearm: make(chan struct{}, 1)},
		lifetime: lifetime{ready: make(chan struct{}), failed: make(chan struct{}), stop: make(chan struct{}), closing: make(chan struct{}), left: make(chan struct{})}}
	if n.rand = o.Rand; n.rand == nil {
		n.rand = rand.Uint64
	}
	n.incarnation = max(uint32(n.rand()), 1)
	n.id.Store(van.Empty)
	n.setName(role.String())
	n.strangers.init()
	n.apps.init()
	n.baseLog = o.Log
	if n.baseLog == nil {
		n.baseLog = logx.New(os.Stderr, cfg)
	}
	n.log = logx.With(n.baseLog, slog.Any(logx.Rank, nodeRank{n}), slog.Any(logx.ID, nodeID{n}))
	n.debug = n.log.Enabled(context.Background(), slog.LevelDebug)
	for _, w := range cfg.Warnings {
		n.log.Warn(w)
	}
	for _, w := range cfg.Notes {
		n.log.Info(w)
	}
	var err error
	if n.back = o.Backend; n.back == nil {
		if n.back, err = stack.OpenDevice(cfg, role, n.log); err != nil {
			return nil, err
		}
		n.ownBack = !o.KeepBackend
	}
	if n.profile, err = openProfile(cfg, role); err != nil {
		return nil, errors.Join(err, n.closeBackend())
	}
	n.stack, err = stack.New(stack.Options{
		Options: van.Options{Config: cfg, Log: n.log, Backend: n.back, Incarnation: n.incarnation},
		Role:    role, Transport: o.Van, OnFail: n.givenUp,
	})
	if err != nil {
		return nil, errors.Join(err, n.profile.close(), n.closeBackend())
	}
	n.van = n.stack.Van
	n.flusher, _ = van.As[van.Flusher](n.van)
	n.recaller, _ = van.As[van.Recaller](n.van)
	n.self = van.Node{Role: role, ID: van.Empty, AuxID: cfg.Rank()}
	if o.NoRank {
		n.self.AuxID = -1
	}
	if role == van.Scheduler {
		n.self.ID, n.self.AuxID = van.SchedulerID, -1
	}
	return n, nil
}

func (n *Node) closeBackend() error {
	if n.ownBack {
		return n.back.Close()
	}
	return nil
}

// join binds, starts the machine and waits until it is ready.
func (n *Node) join(ctx context.Context) error {
	if err := n.bind(ctx); err != nil {
		return err
	}
	interval, silence := n.cfg.Heartbeats()
	m, err := membership.New(membership.Config{
		Role: n.role, NumWorkers: n.cfg.NumWorkers, NumServers: n.cfg.NumServers, GroupSize: n.cfg.GroupSize,
		Self: n.self, Scheduler: n.scheduler(), NamedCluster: n.cfg.ClusterID != "",
		HeartbeatInterval: interval, HeartbeatTimeout: silence,
		NativeInterval: n.cfg.HeartbeatInterval < 0, NativeTimeout: n.cfg.HeartbeatTimeout < 0,
		StartTimeout: n.cfg.StartTimeout, StopTimeout: n.cfg.StopTimeout,
		BarrierTimeout: n.cfg.BarrierTimeout, ReplaceTimeout: n.cfg.ReplaceTimeout, OrderedHosts: n.cfg.OrderedHosts,
	})
	if err != nil {
		return err
	}
	n.machine = m
	if w, ok := van.As[van.PeerWatcher](n.van); ok {
		w.WatchPeers(n.peerChanged)
	}
	m.Start(now()) // before anything can be received
	n.van.Start(n.receive)
	go n.tick()
	n.step(func(time.Duration) {})
	select {
	case <-n.ready:
		return nil
	case <-n.failed:
		return n.err
	case <-ctx.Done():
		n.mu.Lock()
		report := m.Report(now())
		n.mu.Unlock()
		return &van.Error{Op: "start", Node: n.Name(), Detail: report.String(), Err: timeout(context.Cause(ctx))}
	}
}

// now is the machine's clock.
func now() time.Duration { return time.Duration(clock.Now()) }

func (n *Node) scheduler() van.Node {
	host, err := resolve(n.cfg.RootURI)
	if err != nil {
		host = n.cfg.RootURI
	}
	return van.Node{Role: van.Scheduler, ID: van.SchedulerID, Hostname: host, Port: n.cfg.RootPort}
}

// bind chooses the address and listens.
func (n *Node) bind(ctx context.Context) error {
	host, why, err := advertise(n.cfg, n.role, n.van)
	if err != nil {
		return err
	}
	n.self.Hostname, n.self.Port = host, n.cfg.Port
	if n.role == van.Scheduler {
		n.self.Port = n.cfg.RootPort
	}
	asked := n.self.Port
	port, err := n.van.Bind(ctx, n.self)
	if errors.Is(err, syscall.EADDRINUSE) && asked != 0 && n.role != van.Scheduler {
		n.self.Port = 0
		if port, err = n.van.Bind(ctx, n.self); err == nil {
			n.log.Warn("DMLC_PORT is in use, took another", "asked", asked, "took", port)
		}
	}
	if err != nil {
		hint := "set DMLC_NODE_HOST or DMLC_INTERFACE"
		switch {
		case errors.Is(err, syscall.EADDRINUSE):
			hint = "stop the process that uses it, or set DMLC_PS_ROOT_PORT on all nodes"
		case n.role == van.Scheduler:
			hint = "DMLC_PS_ROOT_URI must be an address of the scheduler's host"
		}
		return &van.Error{Op: "start", Node: n.Name(), Err: err, Hint: hint}
	}
	n.self.Port, n.self.Ports = port, []int32{int32(port)}
	n.self.DevTypes, n.self.DevIDs = []int32{int32(backend.CPU)}, []int32{0}
	interval, _ := n.cfg.Heartbeats()
	identity := van.Identity{Incarnation: n.incarnation, Cluster: n.cluster(),
		Settings: van.Settings{Known: true, Resend: n.cfg.Resend, Heartbeat: interval}}
	if a, ok := van.As[van.Advertiser](n.van); ok {
		identity.Local = a.Endpoint()
	}
	n.self.Endpoint = identity.Encode()
	if n.role == van.Scheduler {
		n.id.Store(van.SchedulerID)
		n.setName(van.NodeName(van.SchedulerID))
	} else {
		n.setName(fmt.Sprintf("%s at %s", n.role, n.self.Addr()))
	}
	n.log.Info("Bind to "+n.self.Addr(), "van", n.van.Type(), "why", why)
	return nil
}

// cluster is the identity of the cluster as this node knows it before it joins: derived
// from STEPAF_CLUSTER_ID if set; otherwise the scheduler chooses one and the others learn
// it from the scheduler.
func (n *Node) cluster() uint32 {
	switch {
	case n.cfg.ClusterID != "":
		h := fnv.New32a()
		h.Write([]byte(n.cfg.ClusterID))
		return max(h.Sum32(), 1)
	case n.role == van.Scheduler:
		return max(uint32(n.rand()), 1)
	}
	return 0
}

// Barrier waits until as many members of the group have called it as C++ StepMesh's
// group barrier counts: one for each group of instances. Only members that have called
// it are released. customer is usually 0. A call that ends with ctx still counts for the
// others: the protocol cannot cancel it. Barrier fails after STEPAF_BARRIER_TIMEOUT; or,
// when only lost members are missing, after STEPAF_REPLACE_TIMEOUT unless they are
// replaced.
func (n *Node) Barrier(ctx context.Context, customer, group int) error {
	return n.barrier(ctx, "barrier", customer, group, false)
}

// InstanceBarrier waits until every instance of the group has called it.
func (n *Node) InstanceBarrier(ctx context.Context, customer, group int) error {
	return n.barrier(ctx, "instance barrier", customer, group, true)
}

// StopBarrier is the instance barrier over all nodes that a program calls before
// Finalize. The scheduler and servers may call it as soon as they have started, so it has
// no limit of its own: it waits as long as a live member is missing.
func (n *Node) StopBarrier(ctx context.Context) error {
	return n.await(ctx, "stop barrier", func(t time.Duration) (int, error) { return n.machine.StopBarrier(t, 0) })
}

func (n *Node) barrier(ctx context.Context, op string, customer, group int, instance bool) error {
	return n.await(ctx, op, func(t time.Duration) (int, error) { return n.machine.Barrier(t, customer, group, instance) })
}

// await gets a barrier ticket from begin and waits for its end.
func (n *Node) await(ctx context.Context, op string, begin func(time.Duration) (int, error)) error {
	start := time.Now()
	done := make(chan error, 1)
	var ticket int
	var err error
	n.step(func(t time.Duration) {
		if ticket, err = begin(t); err == nil {
			n.waiters[ticket] = done
		}
	})
	if err != nil {
		return err
	}
	select {
	case err := <-done:
		return err
	case <-n.failed:
		return n.err
	case <-n.closing:
		return &van.Error{Op: op, Node: n.Name(), Elapsed: time.Since(start), Err: van.ErrClosed}
	case <-ctx.Done():
		missing := ""
		n.step(func(time.Duration) {
			delete(n.waiters, ticket)
			missing = n.machine.Missing(ticket)
			n.machine.CancelBarrier(ticket)
		})
		e := &van.Error{Op: op, Node: n.Name(), Detail: missing, Elapsed: time.Since(start), Err: timeout(context.Cause(ctx))}
		if missing == "" {
			e.Hint = "the scheduler's log says who has not come"
		}
		return e
	}
}

// timeout makes a context's deadline an ErrTimeout as well.
func timeout(cause error) error {
	if errors.Is(cause, context.DeadlineExceeded) && !errors.Is(cause, van.ErrTimeout) {
		return fmt.Errorf("%w (%w)", van.ErrTimeout, cause)
	}
	return cause
}

// Finalize waits until every node of the cluster has called it, then leaves. It leaves
// and returns an error when ctx ends; when only lost nodes are missing and
// STEPAF_REPLACE_TIMEOUT passes without replacements; or, on a worker, after
// STEPAF_STOP_TIMEOUT. Only the first call has an effect; others return its result.
func (n *Node) Finalize(ctx context.Context) error {
	n.leaveOnce(func() error {
		err := n.await(ctx, "finalize", func(t time.Duration) (int, error) { return n.machine.Finalize(t, 0) })
		return errors.Join(err, n.leave(ctx, lingerTime))
	})
	return n.finalErr
}

// leaveOnce calls leave the first time; other calls wait for its end. They wait for a
// channel, not for the mutex of a sync.Once, which would stop the virtual time of tests.
func (n *Node) leaveOnce(leave func() error) {
	if n.leaving.Swap(true) {
		<-n.left
		return
	}
	defer close(n.left)
	n.finalErr = leave()
}

// Close leaves at once, without waiting for other nodes. Requests in flight fail with
// van.ErrClosed, and so does a Finalize that waits. Close waits for handlers, so a handler
// must call it on another goroutine.
func (n *Node) Close() { n.close(lingerTime) }

func (n *Node) close(linger time.Duration) {
	n.closeOnce.Do(func() { close(n.closing) })
	n.leaveOnce(func() error { return n.leave(context.Background(), linger) })
}

// How long a leaving node waits for its last messages to be sent: normally, and when it
// has not started.
const (
	lingerTime  = 2 * time.Second
	shortLinger = 300 * time.Millisecond
)

func (n *Node) leave(ctx context.Context, linger time.Duration) error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	n.closed = true
	if n.machine != nil {
		n.machine.Leaving(now())
	}
	if n.err == nil {
		n.err = &van.Error{Op: "use", Node: n.Name(), Err: van.ErrClosed}
	}
	select {
	case <-n.failed:
	default:
		close(n.failed)
	}
	exits := n.onExit
	n.mu.Unlock()

	close(n.stop) // without waiting for tick: leave may run in a callback of it
	n.apps.abort(&van.Error{Op: "wait", Node: n.Name(), Err: van.ErrClosed})
	n.awaitLanes()
	n.strangers.close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), linger)
	defer cancel()
	err := n.van.Close(ctx)
	n.apps.discard()
	for i := len(exits) - 1; i >= 0; i-- {
		exits[i]()
	}
	return errors.Join(err, n.profile.close(), n.closeBackend())
}

// OnExit registers f to run when the node has left, the last one first.
func (n *Node) OnExit(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.onExit = append(n.onExit, f)
}

// Rarely limits log lines about what peers send, of which there may be a flood: it counts
// one more event of a cause, and returns the count and whether to log this one. Errors of
// one cause have the same logx.Kind.
func (n *Node) Rarely(cause string) (count uint64, show bool) { return n.causes.Next(cause) }

// Alive returns nil, or why the node cannot be used: it has left, or failed.
func (n *Node) Alive() error {
	select {
	case <-n.failed:
		return n.err
	default:
		return nil
	}
}

// givenUp is called with a message that was resent in vain.
func (n *Node) givenUp(peer int, meta *van.Meta, err error) {
	if k, show := n.Rarely("gave up a message"); show {
		n.log.Warn("gave up a message", "peer", n.PeerName(peer), "message", meta.String(), "err", err, "so far", k)
	}
	if !meta.IsControl() && meta.Request {
		n.apps.failRequest(meta, peer, err)
	}
}

// nodeRank and nodeID make log lines show the rank and id as soon as they are known.
type nodeRank struct{ n *Node }

func (r nodeRank) LogValue() slog.Value {
	if id := r.n.id.Load(); id != van.Empty {
		return slog.IntValue(van.RankOf(int(id)))
	}
	return slog.StringValue("-")
}

type nodeID struct{ n *Node }

func (i nodeID) LogValue() slog.Value {
	if id := i.n.id.Load(); id != van.Empty {
		return slog.IntValue(int(id))
	}
	return slog.StringValue("-")
}
