package cluster

// The start of a node: its options, the device and the transport that it opens, its address.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/stack"
)

// ErrRefused is wrapped by the error of Start when the scheduler refuses the node. The error has the scheduler's
// reason.
var ErrRefused = membership.ErrRefused

// Config is the configuration of a node; docs/env.md describes its fields.
type Config = env.Config

// Options of Start.
type Options struct {
	Config *Config // required

	// Log receives the node's log; nil means standard error at the level of PS_VERBOSE. Each line has the attributes role,
	// rank and id, and gpu if STEPMESH_GPU is set; rank and id are "-" until they are known.
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

	// Rand is the source of random numbers: the incarnation, first timestamps. nil means the kernel's source.
	// Reproducible tests set it.
	Rand func() uint64

	// NoBarrier makes Start return as soon as this node knows all others, without the
	// barrier over all nodes that C++ StepMesh programs begin with.
	NoBarrier bool

	// OnTrace, if not nil, is called with the times of each answer to a request of a customer that keeps traces: the node
	// that has answered, and the timestamp of the request. It must not block.
	OnTrace func(id int, timestamp int32, t Trace)
}

// Start joins the cluster that o.Config describes and returns when every node has joined, or with an error when ctx
// ends, when the start-up deadline passes, or when the scheduler refuses the node. The error names the missing nodes.
//
// Config.Role must be worker, server or scheduler; for joint see StartJoint.
func Start(ctx context.Context, o Options) (*Node, error) {
	began := now()
	n, err := newNode(o)
	if err != nil {
		if _, limit := errors.AsType[*limits.Error](err); limit || !errors.Is(err, van.ErrInvalid) { // an invalid configuration may belong to another cluster
			sendEnded(ctx, o, err)
		}
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
	if !o.NoBarrier {
		deadline := began + n.cfg.StartTimeout
		if failpoint.On("start-deadline") {
			deadline = 0
		}
		if err := n.control.await(ctx, "start barrier", func(t time.Duration) (int, error) { return n.control.machine.StartBarrier(t, van.AllNodes, deadline) }); err != nil {
			n.close(shortLinger) // a missing node does not read its messages, either
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
	var nodes [2]*Node
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
			if nodes[i], errs[i] = Start(ctx, oi); errs[i] != nil {
				cancel() // the other node cannot start without this one
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		for _, n := range nodes {
			if n != nil {
				n.Close()
			}
		}
		return nil, nil, err
	}
	return nodes[0], nodes[1], nil
}

var errNoConfig = fmt.Errorf("start: %w: no Config", van.ErrInvalid)

var roles = map[string]van.Role{"server": van.Server, "worker": van.Worker, "scheduler": van.Scheduler}

// newNode opens the device and makes the transport.
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
	var tight []limits.Need
	if o.Van == nil { // the needs of a program's own van are not known
		var err error
		if tight, err = limits.Check(cfg, cfg.Role); err != nil {
			return nil, &van.Error{Op: "start", Node: role.String(), Err: err}
		}
	}
	n := &Node{nodeInfo: nodeInfo{cfg: cfg, role: role, onTrace: o.OnTrace}, lifetime: newLifetime()}
	if n.rand = o.Rand; n.rand == nil {
		n.rand = random.Uint64
	}
	n.incarnation = max(uint32(n.rand()), 1)
	n.id.Store(van.Empty)
	n.setName(role.String())
	base := cmp.Or(o.Log, logx.New(logx.Stderr, cfg))
	who := []slog.Attr{slog.String(logx.Role, role.String()), slog.Any(logx.Rank, knownID{&n.nodeInfo, true}), slog.Any(logx.ID, knownID{&n.nodeInfo, false})}
	if cfg.Origin("STEPMESH_GPU") != "default" {
		who = append(who, slog.Int(logx.GPU, cfg.GPU))
	}
	n.log = logx.With(base, who...)
	n.debug = n.log.Enabled(context.Background(), slog.LevelDebug)
	for _, w := range cfg.Warnings {
		n.log.Warn(w)
	}
	for _, w := range cfg.Notes {
		n.log.Info(w)
	}
	for i := range tight {
		n.log.Warn(tight[i].String())
	}
	var err error
	if n.device.Backend = o.Backend; o.Backend == nil {
		if n.device.Backend, err = stack.OpenDevice(cfg, role, n.log); err != nil {
			return nil, err
		}
		n.device.own = !o.KeepBackend
	}
	if n.apps.profile, err = openProfile(cfg, role, n.log); err != nil {
		return nil, errors.Join(err, n.device.close())
	}
	options := van.Options{Config: cfg, Log: n.log, Backend: n.Backend(), Incarnation: n.incarnation}
	if !cfg.Resend { // with PS_RESEND the sender repeats a dropped message
		options.OnDropped = n.pending.droppedByVan
	}
	n.transport.stack, err = stack.New(stack.Options{Options: options, Role: role, Transport: o.Van, OnFail: n.resendFailed})
	if err != nil {
		return nil, errors.Join(err, n.apps.profile.close(), n.device.close())
	}
	n.transport.van = n.transport.stack.Van
	n.transport.canceler, _ = van.As[van.Canceler](n.transport.van)
	n.assemble()
	n.self = van.Node{Role: role, ID: van.Empty, AuxID: cfg.Rank()}
	if o.NoRank {
		n.self.AuxID = -1
	}
	if role == van.Scheduler {
		n.self.ID, n.self.AuxID = van.SchedulerID, -1
	}
	return n, n.watchEnds()
}

// assemble connects the parts of n. nodeInfo and van are complete.
func (n *Node) assemble() {
	n.processes.self, n.processes.incarnation = &n.nodeInfo, n.incarnation
	n.notices.self, n.notices.processes, n.notices.van, n.notices.by = &n.nodeInfo, &n.processes, n.transport.van, map[int][]peerNotice{}
	n.apps.init(&n.nodeInfo, &n.processes, &n.notices)
	n.pending.init(&n.nodeInfo, &n.processes, &n.apps)
	n.ending.workers = map[int]workerMessage{}
	n.control = control{self: &n.nodeInfo, life: &n.lifetime, pendingConnects: map[int]int{}, waiters: map[int]*waiter{}, rearm: make(chan struct{}, 1)}
	n.control.members = members{self: &n.nodeInfo, processes: &n.processes, pending: &n.pending, tempNodes: map[int]van.Node{}}
	n.control.queues.perform = n.perform
}

// join binds, starts the machine and waits until it is ready.
func (n *Node) join(ctx context.Context) error {
	scheduler, notFound := schedulerRecord(ctx, n.cfg)
	if err := n.bind(ctx, scheduler); err != nil {
		sendEnded(ctx, Options{Config: n.cfg}, err)
		return err
	}
	interval, silence := n.cfg.Heartbeats()
	_, tries := van.As[van.Prober](n.transport.van)
	m, err := membership.New(membership.Config{
		Role: n.role, NumWorkers: n.cfg.NumWorkers, NumServers: n.cfg.NumServers, GroupSize: n.cfg.GroupSize,
		Self: n.self, Scheduler: scheduler, NamedCluster: n.cfg.ClusterID != "", Foreign: n.cfg.Foreign, Nonce: n.rand(),
		HeartbeatInterval: interval, HeartbeatTimeout: silence,
		NativeInterval: n.cfg.HeartbeatInterval < 0, NativeTimeout: n.cfg.HeartbeatTimeout < 0,
		CanProbe:     tries && !n.cfg.Resend, // replies are not acknowledged
		StartTimeout: n.cfg.StartTimeout, StopTimeout: n.cfg.StopTimeout,
		BarrierTimeout: n.cfg.BarrierTimeout, ReplaceTimeout: n.cfg.ReplaceTimeout, OrderedHosts: n.cfg.OrderedHosts,
	})
	if err != nil {
		return err
	}
	n.control.machine = m
	n.probes = newProbes(n)
	if w, ok := van.As[van.PeerWatcher](n.transport.van); ok {
		w.WatchPeers(n.control.peerChanged)
	}
	if b, ok := van.As[van.LivenessProber](n.transport.van); ok {
		n.control.probe = b.Alive
	}
	m.Start(now()) // before any message can be received
	if notFound != nil && n.role != van.Scheduler {
		m.SchedulerNotFound(notFound)
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		go n.control.lookUpScheduler(ctx)
	}
	n.transport.van.Start(n.receive)
	go n.control.runTimer()
	n.control.step(func(time.Duration) {})
	select {
	case <-n.lifetime.ready:
		return nil
	case <-n.lifetime.failed:
		return n.lifetime.err
	case <-ctx.Done():
		n.control.mu.Lock()
		report := m.Report(now())
		n.control.mu.Unlock()
		detail := report.String()
		if meter, ok := van.As[van.Meter](n.transport.van); ok && meter.Stats().Unauthenticated > 0 {
			detail += fmt.Sprintf("; %d connections had no valid proof of the cluster's secret, see the log", meter.Stats().Unauthenticated)
		}
		return &van.Error{Op: "start", Node: n.Name(), Detail: detail, Err: van.TimedOut(context.Cause(ctx))}
	}
}

// bind chooses the address and listens.
func (n *Node) bind(ctx context.Context, scheduler van.Node) error {
	here := hostaddr.This()
	host, why, err := advertise(ctx, n.cfg, n.role, n.transport.van, here, scheduler.Hostname)
	if err != nil {
		return err
	}
	n.self.Hostname, n.self.Port = host, n.cfg.Port
	if n.role == van.Scheduler {
		n.self.Port = n.cfg.RootPort
	}
	asked := n.self.Port
	if asked == n.cfg.RootPort && n.role != van.Scheduler && isLocal(scheduler.Hostname) {
		n.self.Port = 0
		n.log.Warn("DMLC_PORT is the scheduler's port on this host: another port is used", "configured", asked)
	}
	port, err := n.transport.van.Bind(ctx, n.self)
	if n.role == van.Scheduler && errors.Is(err, syscall.EADDRINUSE) && freeport.Ephemeral(asked) {
		port, err = n.transport.bindAgain(ctx, n.self)
	}
	if errors.Is(err, syscall.EADDRINUSE) && asked != 0 && n.role != van.Scheduler {
		n.self.Port = 0
		if port, err = n.transport.van.Bind(ctx, n.self); err == nil {
			n.log.Warn("DMLC_PORT is in use: another port is used", "configured", asked, "used", port)
		}
	}
	if err != nil {
		return &van.Error{Op: "start", Node: n.Name(), Err: van.TimedOut(err), Hint: bindHint(err, n.role, asked)}
	}
	n.self.Port, n.self.Ports = port, []int32{int32(port)}
	n.self.DevTypes, n.self.DevIDs = []int32{int32(backend.CPU)}, []int32{0}
	identity := van.NodeExtension{Incarnation: n.incarnation, Cluster: n.cluster(), Settings: van.Settings{
		Known: true, Resend: n.cfg.Resend, TLS: n.cfg.TLS, Workers: n.cfg.NumWorkers * n.cfg.GroupSize, Servers: n.cfg.NumServers * n.cfg.GroupSize,
	}}
	if a, ok := van.As[van.Advertiser](n.transport.van); ok {
		identity.Local = a.Endpoint()
	}
	if a, ok := van.As[van.DataAcceptor](n.transport.van); ok {
		identity.DataPort = uint16(a.DataPort())
	}
	n.self.Endpoint = identity.Encode()
	if n.role == van.Scheduler {
		n.id.Store(van.SchedulerID)
		n.setName(van.NodeName(van.SchedulerID))
	} else {
		n.setName(fmt.Sprintf("%s at %s", n.role, n.self.Addr()))
	}
	n.log.Info("Bind to "+n.self.Addr(), "van", n.transport.van.Type(), "why", why)
	if doubt := unreachableReason(n.cfg, n.role, here, host, scheduler.Hostname); doubt != "" && !n.cfg.Local {
		n.log.Warn(doubt, "why", why)
	}
	if danger := unprotectedReason(n.cfg, n.self); danger != "" {
		n.log.Warn(danger)
	}
	return nil
}

// bindHint says what to do about err, with which a node of a role could not listen at a port. Port 0 is any free port.
func bindHint(err error, role van.Role, port int) string {
	variable, all := "DMLC_PORT", ""
	if role == van.Scheduler {
		variable, all = "DMLC_PS_ROOT_PORT", " on all nodes"
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		hint := "stop the process that uses it, or set DMLC_PS_ROOT_PORT on all nodes"
		if freeport.Ephemeral(port) {
			hint += " to one outside of net.ipv4.ip_local_port_range, whose ports the kernel assigns to any connection"
		}
		return hint
	case limits.Hint(err) != "":
		return limits.Hint(err)
	case errors.Is(err, syscall.EACCES) && 0 < port && port < 1024:
		return "ports below 1024 need the capability CAP_NET_BIND_SERVICE: set " + variable + " to a higher port" + all
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return ""
	case role == van.Scheduler:
		return "DMLC_PS_ROOT_URI must be an address of the scheduler's host"
	}
	return "set DMLC_NODE_HOST or DMLC_INTERFACE"
}

// bindTries and bindPause bound the scheduler's wait for its port. The kernel may have given the port to a node's
// attempt to connect to that same port.
const (
	bindTries = 20
	bindPause = 50 * time.Millisecond
)

// bindAgain binds self, whose port is in use, once the port is free.
func (t *transport) bindAgain(ctx context.Context, self van.Node) (port int, err error) {
	pause := time.NewTicker(bindPause)
	defer pause.Stop()
	for range bindTries {
		select {
		case <-pause.C:
		case <-ctx.Done():
			return 0, van.TimedOut(context.Cause(ctx))
		}
		if port, err = t.van.Bind(ctx, self); !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return port, err
}

// cluster is the cluster's name as this node knows it before it joins: derived from STEPAF_CLUSTER_ID if set.
// Otherwise the scheduler chooses one and the others receive it from the scheduler.
func (n *nodeInfo) cluster() uint32 {
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
