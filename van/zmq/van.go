// Package zmq is ps-lite's ZeroMQ transport: plain ZeroMQ over TCP, or over Unix
// sockets when DMLC_LOCAL is set.
//
// Each node binds one ROUTER socket and opens one DEALER to every peer, with the
// routing id "ps<id>" once it has an id. Requests and control messages leave over
// the DEALER to the peer. The data answers of a server leave over its own ROUTER,
// on the connection that the worker opened, so a worker also reads its DEALERs.
//
// Values are lent to libzmq and stay pinned until it lets go; received values are
// handed up as views on libzmq's messages. The ROUTER's receiver sleeps in a thread
// of its own; the others park in Go's network poller on the sockets' descriptors.
package zmq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/internal/affinity"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

func init() {
	van.Register("zmq", New)
}

// zvan is one node's ZeroMQ van.
type zvan struct {
	cfg  *env.Config
	log  *slog.Logger
	zctx *zmq4.Context
	lent *lent

	incarnation uint32 // own; 0: the node speaks as one of the original

	self   van.Node     // set by Bind
	id     atomic.Int32 // own node id
	names  atomic.Pointer[ownNames]
	router *socket
	recv   van.Receiver
	watch  func(id int, up bool, cause error)
	unbind func()

	peers    atomic.Pointer[map[int]*conn]
	accounts accounts
	flow     flow
	guard    *guard // of the ROUTER's connections; nil without one
	early    early
	senders  lanes // of the ROUTER
	stats    stats
	classes  atomic.Pointer[map[int]int] // traffic classes of peers, see SetClasses
	moved    atomic.Uint64               // bytes sent and received when busy was last called
	engine   *engine.Engine

	mu      sync.Mutex // guards changes of peers, and what follows
	loops   []*receiver
	started bool
	closed  atomic.Bool
	serial  int // names the monitors
	wg      sync.WaitGroup
}

// conn is the DEALER to one peer.
type conn struct {
	who  atomic.Pointer[identity]
	addr string
	sock *socket
	mon  *monitor
	rx   *receiver
	acct *account
	up   atomic.Bool // the connection stands
	lost atomic.Bool // it broke and has not been restored

	leaves atomic.Bool // this node ends it
	link   atomic.Pointer[tcpSocket]

	incarnation uint32        // of the peer; 0: a node of the original
	before      uint32        // of the process that it has replaced
	admitted    atomic.Bool   // this node knows it as the peer
	named       bool          // it knows which process this is
	bundles     bool          // it takes bundles, see bundle.go
	seen        atomic.Bool   // it has a connection to this node's ROUTER
	holding     sync.Mutex    // of changes of holdUntil, and with it of what the socket does
	holdUntil   atomic.Uint64 // the peer has asked for no data until then; 0: it has not
}

// identity is whom a connection serves.
type identity struct {
	id     int
	dest   string // the peer's routing id, for answers over the ROUTER
	viaOwn bool   // data answers to this peer leave over the own ROUTER
}

// ownNames is what the node calls itself.
type ownNames struct {
	plain string // towards nodes of the original
	full  string // towards nodes of this library
}

// nameFor is what the node calls itself towards c.
func (v *zvan) nameFor(c *conn) string {
	if c.incarnation != 0 {
		return v.names.Load().full
	}
	return v.names.Load().plain
}

// socketsEach is how many sockets a connection takes: the DEALER and the two ends
// of its monitor. BYTEPS_ZMQ_MAX_SOCKET counts only the first, as in the original.
const socketsEach = 3

// New makes a van that has not bound yet.
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
	v := &zvan{cfg: o.Config, log: o.Log, zctx: zctx, unbind: func() {}, incarnation: o.Incarnation}
	if v.engine = o.Engine; v.engine == nil {
		v.engine = engine.New(o.Config.BusyPoll.Spin())
	}
	v.peers.Store(&map[int]*conn{})
	v.lent = newLent(v.pump)
	v.log = cmp.Or(v.log, slog.New(slog.DiscardHandler))
	v.flow.init(v)
	v.early.most = keepTime
	v.bindThreads()
	v.setID(van.Empty)
	return v, nil
}

// bindThreads gives libzmq's threads the cores that the original gives those that
// receive. A core that cannot be had is a warning, and nothing is bound.
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

func wrap(name string, value int, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("zmq: %s=%d: %w", name, value, err)
}

func (v *zvan) Type() string { return "zmq" }

func (v *zvan) WatchPeers(f func(id int, up bool, cause error)) { v.watch = f }

func (v *zvan) SetID(id int) { v.setID(id) }

func (v *zvan) setID(id int) {
	v.id.Store(int32(id))
	v.names.Store(&ownNames{routingID(peerName{id: id}), routingID(peerName{id, v.incarnation})})
}

// Bind opens the ROUTER. A busy port is an error that wraps syscall.EADDRINUSE.
func (v *zvan) Bind(_ context.Context, self van.Node) (int, error) {
	z, err := v.zctx.NewSocket(zmq4.ROUTER)
	if err != nil {
		return 0, fmt.Errorf("zmq: ROUTER: %w", err)
	}
	// A peer that comes back takes over the routing id of its old connection.
	err = errors.Join(z.SetRouterMandatory(1), z.SetRouterHandover(true), z.SetSndhwm(0), z.SetRcvhwm(routerQueue), tune(z))
	if err != nil {
		return 0, errors.Join(fmt.Errorf("zmq: ROUTER: %w", err), z.Close())
	}
	port, unbind, err := v.bind(z, self)
	if err != nil {
		return 0, errors.Join(&van.Error{Op: "bind", Node: van.NodeName(self.ID), Detail: self.Addr(), Err: err}, z.Close())
	}
	var g *guard
	if !v.cfg.Local {
		v.serial++
		if g, err = newGuard(v, z, v.serial, port); err != nil {
			unbind()
			return 0, errors.Join(fmt.Errorf("zmq: ROUTER: %w", err), z.Close())
		}
	}
	s, err := newSocket(z, true)
	if err != nil {
		g.close()
		unbind()
		return 0, err
	}
	v.self, v.router, v.unbind, v.guard = self, s, unbind, g
	v.self.Port = port
	if self.ID != van.Empty {
		v.setID(self.ID)
	}
	return port, nil
}

// routerQueue is how many messages of one peer libzmq receives ahead of this node. More
// stay in the system's buffers, and with their sender.
const routerQueue = 128

// maxFrame is the longest frame that is received: lengths are signed 32-bit numbers.
const maxFrame = math.MaxInt32

// tune sets what every socket has in common. Dead hosts are noticed by TCP
// keep-alives, since ZMTP heartbeats are unknown to the libzmq of the original.
func tune(z *zmq4.Socket) error {
	return errors.Join(z.SetLinger(0), z.SetMaxmsgsize(maxFrame), z.SetTcpKeepalive(1), z.SetTcpKeepaliveIdle(10), z.SetTcpKeepaliveIntvl(3),
		z.SetTcpKeepaliveCnt(3))
}

// bind binds z to self's address and returns the port and what undoes it.
func (v *zvan) bind(z *zmq4.Socket, self van.Node) (int, func(), error) {
	if v.cfg.Local {
		return v.bindLocal(z, self)
	}
	host := self.Hostname
	if self.ID == van.SchedulerID && v.cfg.Kubernetes {
		host = "0.0.0.0"
	}
	port := "*"
	if self.Port != 0 {
		port = strconv.Itoa(self.Port)
	}
	if err := z.Bind("tcp://" + net.JoinHostPort(host, port)); err != nil {
		return 0, nil, addressError(err)
	}
	end, err := z.GetLastEndpoint()
	if err != nil {
		return 0, nil, err
	}
	_, text, err := net.SplitHostPort(end[len("tcp://"):])
	if err != nil {
		return 0, nil, fmt.Errorf("endpoint %q: %w", end, err)
	}
	n, err := strconv.Atoi(text)
	return n, func() {}, err
}

// addressError gives libzmq's errno its usual Go type.
func addressError(err error) error {
	var z zmq4.Errno
	if !errors.As(err, &z) {
		return err
	}
	switch e := syscall.Errno(z); e {
	case syscall.EADDRINUSE:
		return fmt.Errorf("%w: another process listens there", e)
	case syscall.EADDRNOTAVAIL, syscall.ENODEV:
		return fmt.Errorf("%w: not an address of this host", syscall.EADDRNOTAVAIL)
	default:
		return e
	}
}

// Start begins to receive.
func (v *zvan) Start(recv van.Receiver) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.recv, v.started = recv, true
	v.guard.start()
	v.receiveFrom(v.router, nil, true, v.self.Role == van.Server)
	for _, c := range *v.peers.Load() {
		v.listen(c)
	}
}

// receiveFrom starts a receiver on s, the ROUTER or peer's DEALER. Its loop looks before it
// sleeps if spins is set, and Polls receive from it if polls is. v.mu is held.
func (v *zvan) receiveFrom(s *socket, peer *conn, spins, polls bool) *receiver {
	r := newReceiver(v, s, peer, spins, polls)
	v.loops = append(v.loops, r)
	r.feed.Start()
	return r
}

// listen starts what reads from c: answers come to a worker over its DEALERs.
// v.mu is held.
func (v *zvan) listen(c *conn) {
	if v.self.Role == van.Worker && c.rx == nil {
		c.rx = v.receiveFrom(c.sock, c, false, van.RoleOf(c.who.Load().id) == van.Server)
	}
	c.mon.start(v, c)
}

// Connect opens a DEALER to the peer, in place of one that serves the same id.
func (v *zvan) Connect(_ context.Context, id int, peer van.Node) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed.Load() {
		return &van.Error{Op: "connect", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(id), Err: van.ErrClosed}
	}
	fail := func(err error) error {
		return &van.Error{Op: "connect", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(id) + " at " + peer.Addr(), Err: err}
	}
	c := &conn{addr: peer.Addr()}
	c.incarnation, c.bundles = v.peerIdentity(&peer)
	c.admitted.Store(true)
	old := (*v.peers.Load())[id]
	if old != nil {
		v.succeed(c, old)
		v.drop(old, 0)
		defer func() {
			if (*v.peers.Load())[id] == old { // it has ended, and must not end again
				v.replace(func(m map[int]*conn) { delete(m, id) })
			}
		}()
	}
	z, err := v.zctx.NewSocket(zmq4.DEALER)
	if err != nil {
		return fail(err)
	}
	if err := errors.Join(tune(z), z.SetSndhwm(0), z.SetReconnectIvl(50*time.Millisecond),
		z.SetReconnectIvlMax(2*time.Second)); err != nil {
		return fail(errors.Join(err, z.Close()))
	}
	if own := int(v.id.Load()); own != van.Empty {
		if err := z.SetIdentity(v.nameFor(c)); err != nil {
			return fail(errors.Join(err, z.Close()))
		}
		c.named = c.incarnation != 0
	}
	if c.incarnation != 0 {
		if err := v.tuneNative(z); err != nil {
			return fail(errors.Join(err, z.Close()))
		}
	}
	v.serial++
	mon, err := newMonitor(v.zctx, z, v.serial, connEvents)
	if err != nil {
		return fail(errors.Join(err, z.Close()))
	}
	endpoint := "tcp://" + net.JoinHostPort(peer.Hostname, strconv.Itoa(peer.Port))
	if v.cfg.Local {
		path := localPath(peer.Port)
		if err := checkLocal(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // it may come later
			mon.close()
			return fail(errors.Join(err, z.Close()))
		}
		endpoint = "ipc://" + path
	}
	if err := z.Connect(endpoint); err != nil {
		mon.close()
		return fail(errors.Join(addressError(err), z.Close()))
	}
	s, err := newSocket(z, false)
	if err != nil {
		mon.close()
		return fail(err)
	}
	c.sock, c.mon, c.acct = s, mon, v.accounts.open()
	s.limit(c.acct, sendWindow)
	v.name(c, id)
	v.replace(func(m map[int]*conn) { m[id] = c })
	v.guard.known(c)
	if old != nil && !c.admitted.Load() {
		time.AfterFunc(admitTime, func() { v.admit(c) })
	}
	if v.started {
		v.listen(c)
	}
	v.log.Info("connect", "peer", van.NodeName(id), "addr", endpoint)
	return nil
}

// peerIdentity is which process peer is, if this node and it can tell such things, and
// whether it takes bundles.
func (v *zvan) peerIdentity(peer *van.Node) (incarnation uint32, bundles bool) {
	if identity, ok := peer.Identity(); ok && v.incarnation != 0 {
		return identity.Incarnation, identity.Bundles
	}
	return 0, false
}

// tuneNative sets what a connection to another node of this library has besides.
func (v *zvan) tuneNative(z *zmq4.Socket) error {
	// An empty message, so that the peer knows at once whose connection it is.
	errs := []error{z.SetProbeRouter(1)}
	if every, limit := v.heartbeats(); limit > 0 {
		// libzmq's own threads ask and answer, so that neither a busy process nor
		// Python's lock looks like a dead one. No TTL: the peer would end a connection
		// that it does not read for a while. libzmq must not stop to read the connection: it
		// would not see the answers to its heartbeats, and version 4.3.4 ends the process if
		// the peer goes meanwhile (its issue 4364). So its queue has no end: a server sends
		// its worker no more than that has asked for.
		errs = append(errs, z.SetRcvhwm(0), z.SetHeartbeatIvl(every), z.SetHeartbeatTimeout(limit), z.SetTcpMaxrt(limit))
	}
	return errors.Join(errs...)
}

// heartbeats returns the time between two of libzmq's heartbeats, and how long it waits for the
// answer; 0 is none. A peer that stops is noticed within both.
func (v *zvan) heartbeats() (every, limit time.Duration) {
	if every, limit = v.cfg.Heartbeats(); every <= 0 || limit <= 0 {
		return 0, 0
	}
	return min(every, limit/4), limit
}

// Beating implements van.Beater. libzmq ends the connection to a peer whose threads do not
// answer its heartbeats. That the peer's own connection to this node stands says that it is
// still that process, not another one at its address.
func (v *zvan) Beating(id int) bool {
	c := (*v.peers.Load())[id]
	if c == nil || c.incarnation == 0 || !c.up.Load() || v.guard != nil && !c.seen.Load() {
		return false
	}
	_, limit := v.heartbeats()
	return limit > 0
}

// name makes c the connection to id.
func (v *zvan) name(c *conn, id int) {
	c.who.Store(&identity{id, routingID(peerName{id, c.incarnation}), v.self.Role != van.Worker && id > 0 && van.RoleOf(id) == van.Worker})
}

// replace changes the table of peers. v.mu is held.
func (v *zvan) replace(change func(map[int]*conn)) {
	m := maps.Clone(*v.peers.Load())
	change(m)
	v.peers.Store(&m)
}

// Rename makes the connection to old serve new instead.
func (v *zvan) Rename(old, new int) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	c := (*v.peers.Load())[old]
	if c == nil {
		return &van.Error{Op: "rename", Peer: van.NodeName(old), Err: van.ErrUnknownPeer}
	}
	other := (*v.peers.Load())[new]
	v.replace(func(m map[int]*conn) { delete(m, old) })
	v.name(c, new)
	if other != nil && other != c {
		c.before = other.incarnation
	}
	v.replace(func(m map[int]*conn) { m[new] = c })
	v.guard.known(c)
	if other != nil && other != c {
		v.drop(other, 0)
	}
	return nil
}

// leaveTime is how long Disconnect lets sent messages leave.
const leaveTime = 500 * time.Millisecond

func (v *zvan) Disconnect(id int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	c := (*v.peers.Load())[id]
	if c == nil {
		return
	}
	v.replace(func(m map[int]*conn) { delete(m, id) })
	v.drop(c, leaveTime)
}

// handlerTime is how long the end of a connection waits for a handler that still
// runs. One that runs longer does no harm: it does not use the socket.
const handlerTime = 2 * time.Second

// drop ends a connection that is no longer in the table (or about to be
// replaced). The receiver may be delivering a message, perhaps the one whose
// handler called: its end is awaited elsewhere. v.mu is held.
func (v *zvan) drop(c *conn, linger time.Duration) {
	c.leaves.Store(true)
	c.sock.stop()
	v.loops = slices.DeleteFunc(v.loops, func(r *receiver) bool { return r == c.rx })
	v.wg.Go(func() {
		if c.rx != nil {
			ctx, cancel := context.WithTimeout(context.Background(), handlerTime)
			defer cancel()
			_ = c.rx.stop(ctx) // one that runs longer does no harm, see handlerTime
		}
		_ = v.end(c, linger)
	})
}

// end closes c's socket.
func (v *zvan) end(c *conn, linger time.Duration) error {
	if c.lost.Load() {
		linger = 0 // nobody to wait for
	}
	var err error
	if c.incarnation != 0 && linger > 0 {
		err = c.sock.leave(c, linger, c.mon.close)
	} else {
		c.mon.close()
		err = c.sock.close(linger)
	}
	v.accounts.close(c.acct)
	return err
}

// Send hands msg to the socket that the protocol wants it on.
func (v *zvan) Send(msg *van.Message) error {
	c := (*v.peers.Load())[msg.Receiver]
	err := v.send(msg, c)
	if errors.Is(err, van.ErrClosed) {
		// The connection may have been replaced in between.
		v.mu.Lock()
		now := (*v.peers.Load())[msg.Receiver]
		v.mu.Unlock()
		if now != nil && now != c {
			return v.send(msg, now)
		}
	}
	return err
}

func (v *zvan) send(msg *van.Message, c *conn) error {
	if c == nil {
		if v.closed.Load() {
			return v.sendError(msg, nil, van.ErrClosed)
		}
		return v.sendError(msg, nil, van.ErrUnknownPeer)
	}
	if msg.Request || msg.IsControl() {
		msg.RequestTrace.PostSend = clock.Now()
	} else {
		msg.ResponseTrace.PostSend = clock.Now()
	}
	var buf [1024]byte
	meta, n := buf[:], msg.EncodedLen()
	if n > len(buf) {
		meta = make([]byte, n)
	}
	meta = meta[:n]
	if err := msg.EncodeTo(meta); err != nil {
		return v.sendError(msg, c, err)
	}
	for i := range msg.Frames {
		if f := msg.Frame(i); !f.OnHost() {
			return v.sendError(msg, c, fmt.Errorf("%w: frame %d lies on %s, want host memory", van.ErrInvalid, i, f.Device()))
		}
	}
	size := msg.PayloadLen()
	to := route{acct: c.acct, limit: v.flow.send, marks: c.named}
	if msg.IsControl() {
		to.urgent, to.limit = true, v.flow.controlLimit()
	}
	sock := c.sock
	if who := c.who.Load(); who.viaOwn && !msg.Request && !msg.IsControl() && !msg.SimpleApp {
		sock, to.dest, to.self, to.marks = v.router, who.dest, v.nameFor(c), c.incarnation != 0
	}
	to.bundles = to.marks && c.bundles
	if err := sock.send(&to, meta, msg, v.lent); err != nil {
		if errors.Is(err, van.ErrQueueFull) {
			err = v.overBudget(c, &to)
		}
		return v.sendError(msg, c, err)
	}
	v.stats.sent(len(meta) + size)
	return nil
}

// Flush sends what was sent to id with More.
func (v *zvan) Flush(id int) {
	c := (*v.peers.Load())[id]
	if c == nil {
		return
	}
	c.sock.flush(v.lent)
	if c.who.Load().viaOwn {
		v.router.flush(v.lent)
	}
}

// sendError says what went wrong with a message for a peer.
func (v *zvan) sendError(msg *van.Message, c *conn, err error) error {
	e := &van.Error{Op: "send", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(msg.Receiver), Detail: msg.Meta.String()}
	if c != nil {
		e.Peer += " at " + c.addr
	}
	switch {
	case errors.Is(err, syscall.EHOSTUNREACH):
		e.Err = fmt.Errorf("%w: it is not connected to this node", van.ErrPeerLost)
	case errors.Is(err, van.ErrQueueFull):
		e.Err = err
	case errors.Is(err, syscall.EAGAIN):
		e.Err = van.ErrQueueFull
	case errors.Is(err, syscall.Errno(zmq4.ETERM)), errors.Is(err, syscall.ENOTSOCK):
		e.Err = van.ErrClosed
	default:
		e.Err = err
	}
	return e
}

func (v *zvan) Stats() van.Stats {
	s := v.stats.get()
	s.Pinned = uint64(v.lent.held.Load())
	return s
}

// Close ends everything; sent messages leave until ctx ends, at most maxLinger.
func (v *zvan) Close(ctx context.Context) error {
	v.engine.EndPoll(ctx)
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
	v.flow.stop()
	if v.router != nil {
		errs = append(errs, v.router.close(linger))
	}
	ended := make(chan error, len(peers))
	for _, c := range peers {
		c.leaves.Store(true)
		go func() { ended <- v.end(c, linger) }()
	}
	for range peers {
		errs = append(errs, <-ended)
	}
	v.wg.Wait()
	errs = append(errs, v.zctx.Term())
	v.lent.close()
	v.accounts.free()
	v.early.close()
	v.unbind()
	return errors.Join(errs...)
}

// maxLinger is the longest that Close waits for messages to leave.
const maxLinger = 5 * time.Second
