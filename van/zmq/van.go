// Package zmq is ps-lite's ZeroMQ transport: plain ZeroMQ over TCP, or over Unix
// sockets when DMLC_LOCAL is set.
//
// Each node binds one ROUTER socket and opens one DEALER to every peer, with the
// routing id "ps<id>" once it has an id. Requests and control messages leave over
// the DEALER to the peer. The data answers of a server leave over its own ROUTER,
// on the connection that the worker opened, so a worker also reads its DEALERs.
//
// libzmq gets copies of the frames. Received values are handed up as views on libzmq's messages. The ROUTER's receiver sleeps in its own
// thread. The other receivers sleep in Go's network poller on the sockets' descriptors.
package zmq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/internal/affinity"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

func init() {
	van.Register("zmq", New)
}

// zvan is one node's ZeroMQ van.
type zvan struct {
	shared
	outgoing
	intake

	zctx     *zmq4.Context
	unbind   func()
	refusals *monitor // of handshakes over a Unix socket; over TCP the guard follows them

	// shared.mu guards these.
	loops   []*receiver
	leaving map[*conn]struct{} // connections that are closing
	started bool
	serial  int // numbers the DEALERs
	wg      sync.WaitGroup
}

// socketsEach is the number of sockets that a connection uses: the DEALER and the two ends
// of its monitor. BYTEPS_ZMQ_MAX_SOCKET counts only the DEALER, as in the original.
const socketsEach = 3

// New returns a van that is not bound yet.
func New(o van.Options) (van.Van, error) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		return nil, fmt.Errorf("zmq: %w", err)
	}
	if err := errors.Join(
		wrap("BYTEPS_ZMQ_NTHREADS", o.Config.ZMQIOThreads, zctx.SetIoThreads(o.Config.ZMQIOThreads)),
		wrap("BYTEPS_ZMQ_MAX_SOCKET", o.Config.ZMQMaxSockets, zctx.SetMaxSockets(socketsEach*o.Config.ZMQMaxSockets)),
		zctx.SetBlocky(false),
	); err != nil {
		return nil, errors.Join(err, zctx.Term())
	}
	secure, err := newCurve(o.Keys)
	if err != nil {
		return nil, errors.Join(err, zctx.Term())
	}
	v := &zvan{zctx: zctx, unbind: func() {}, leaving: map[*conn]struct{}{}}
	n := &v.shared
	n.curve, n.redial, n.proofs.limit = secure, v.redial, proofTime
	v.outgoing.dial = v.dial
	if !o.Keys.Required() {
		n.proofs.warns = o.Keys
	}
	n.cfg, n.log, n.incarnation = o.Config, cmp.Or(o.Log, slog.New(slog.DiscardHandler)), o.Incarnation
	n.onDropped = o.OnDropped
	n.peers.Store(&map[int]*conn{})
	v.outgoing.n, v.intake.n = n, n
	if !failpoint.On("send-budget") {
		v.budget = int64(n.cfg.SendBudget)
	}
	v.flow.init(n)
	v.early.n, v.early.flow, v.early.most, v.early.admitTime = n, &v.flow, keepTime, admitTime
	if v.engine = o.Engine; v.engine == nil {
		v.engine = engine.New(o.Config.BusyPoll.Spin())
	}
	v.bindThreads()
	v.setID(van.Empty)
	return v, nil
}

// bindThreads binds libzmq's threads to the cores that the original uses for its receiving threads. If a core
// is not available, it logs a warning and binds nothing.
func (v *zvan) bindThreads() {
	if !v.cfg.BindCPUCore || v.cfg.GPU < 0 || v.cfg.Role == "scheduler" {
		return
	}
	cores := []int{v.cfg.Core(env.CoreReceiver), v.cfg.Core(env.CorePoller)}
	for _, core := range cores {
		if err := affinity.Check(core); err != nil {
			v.log.Warn("STEPMESH_BIND_CPU_CORE: nothing is bound", "err", err)
			return
		}
	}
	if err := bindThreads(v.zctx, cores...); err != nil {
		v.log.Warn("STEPMESH_BIND_CPU_CORE: nothing is bound", "err", err)
		return
	}
	v.log.Info("libzmq's threads are bound", "cores", cores)
}

func (v *zvan) Type() string { return "zmq" }

func (v *zvan) SetID(id int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.setID(id)
}

// Bind opens the ROUTER. If the port is in use, the error wraps syscall.EADDRINUSE.
func (v *zvan) Bind(_ context.Context, self van.Node) (int, error) {
	z, err := v.zctx.NewSocket(zmq4.ROUTER)
	if err != nil {
		return 0, fmt.Errorf("zmq: ROUTER: %w", socketError(err))
	}
	// With handover, a peer that reconnects takes over the routing id of its old connection.
	err = errors.Join(z.SetRouterMandatory(1), z.SetRouterHandover(true), z.SetSndhwm(0), z.SetRcvhwm(routerQueue), tune(z), v.curve.server(z))
	if err != nil {
		return 0, errors.Join(fmt.Errorf("zmq: ROUTER: %w", err), z.Close())
	}
	port, unbind, err := v.bind(z, self)
	if err != nil {
		return 0, errors.Join(&van.Error{Op: "bind", Node: van.NodeName(self.ID), Detail: self.Addr(), Err: err}, z.Close())
	}
	var g *guard
	var refusals *monitor
	if v.cfg.Local {
		refusals, err = v.newMonitor(v.zctx, z, handshakeFailed)
	} else {
		g, err = newGuard(&v.shared, &v.flow, v.zctx, z, port)
	}
	if err != nil {
		unbind()
		return 0, errors.Join(fmt.Errorf("zmq: ROUTER: %w", err), z.Close())
	}
	s, err := newSocket(z, inThread)
	if err != nil {
		g.close()
		if refusals != nil {
			refusals.close()
		}
		unbind()
		return 0, err
	}
	v.self, v.router, v.unbind, v.guard, v.refusals = self, s, unbind, g, refusals
	v.self.Port = port
	if self.ID != van.Empty {
		v.setID(self.ID)
	}
	return port, nil
}

// bind binds z to self's address. It returns the port and a function that releases it.
func (v *zvan) bind(z *zmq4.Socket, self van.Node) (int, func(), error) {
	if v.cfg.Local {
		return bindLocal(z, self, v.cfg.RootPort)
	}
	host := self.Hostname
	if self.ID == van.SchedulerID && v.cfg.Kubernetes {
		host = "0.0.0.0"
	}
	if err := noIPv6(host); err != nil {
		return 0, nil, err
	}
	if self.Port != 0 || self.ID == van.SchedulerID {
		port, err := bindTCP(z, host, strconv.Itoa(self.Port))
		return port, func() {}, err
	}
	port, err := freeport.Except(v.cfg.RootPort, func() (int, func(), error) {
		port, err := bindTCP(z, host, "*")
		return port, func() { _ = z.Unbind("tcp://" + net.JoinHostPort(host, strconv.Itoa(port))) }, err
	})
	return port, func() {}, err
}

// bindTCP binds z to a port of host, "*" for any, and returns the port.
func bindTCP(z *zmq4.Socket, host, port string) (int, error) {
	if err := z.Bind("tcp://" + net.JoinHostPort(host, port)); err != nil {
		return 0, addressError(err)
	}
	end, err := z.GetLastEndpoint()
	if err != nil {
		return 0, err
	}
	_, text, err := net.SplitHostPort(end[len("tcp://"):])
	if err != nil {
		return 0, fmt.Errorf("endpoint %q: %w", end, err)
	}
	return strconv.Atoi(text)
}

// Start starts the receivers.
func (v *zvan) Start(recv van.Receiver) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.recv, v.started = recv, true
	v.guard.start()
	if v.refusals != nil {
		v.wg.Go(v.followRefusals)
	}
	v.receiveFrom(v.router, nil, true, v.self.Role == van.Server)
	for _, c := range *v.peers.Load() {
		v.listen(c)
	}
}

// Close stops the van. It waits for sent messages to be written until ctx ends, at most maxLinger.
func (v *zvan) Close(ctx context.Context) error {
	v.mu.Lock()
	if v.closed.Swap(true) {
		v.mu.Unlock()
		return nil
	}
	loops, peers := v.loops, *v.peers.Load()
	v.peers.Store(&map[int]*conn{})
	v.loops = nil
	v.mu.Unlock()

	for _, r := range loops {
		r.sock.stop()
	}
	var errs []error
	stopped := make(chan error, len(loops))
	for _, r := range loops {
		go func() { stopped <- r.stop(ctx) }()
	}
	for range loops {
		if err := <-stopped; err != nil {
			errs = append(errs, &van.Error{Op: "close", Node: van.NodeName(int(v.id.Load())), Detail: "a receiver still runs", Err: err})
		}
	}
	end := time.Now().Add(maxLinger)
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end = d
	}
	linger := max(time.Until(end), 0)
	v.guard.close()
	if v.refusals != nil {
		v.refusals.close()
	}
	if v.router != nil {
		errs = append(errs, v.router.close(linger))
	}
	ended := make(chan error, len(peers))
	for _, c := range peers {
		if c.leaves.Swap(true) || c.sock == nil { // closed already, see open
			ended <- nil
			continue
		}
		go func() { ended <- v.end(c, linger) }()
	}
	for range peers {
		errs = append(errs, <-ended)
	}
	v.wg.Wait()
	errs = append(errs, v.zctx.Term())
	v.early.close()
	v.unbind()
	return errors.Join(errs...)
}

// maxLinger is the longest time that Close waits for messages to be written.
const maxLinger = 5 * time.Second
