package sim

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// node is the van of one process.
type node struct {
	n    *Net
	who  plan.Node
	name string // with the number of the process: "worker 0.1"
	host string
	seed seed
	opts van.Options

	id    atomic.Int64
	watch func(id int, up bool, cause error)
	recv  van.Receiver
	loop  *engine.Loop[*packet]
	bell  chan struct{}
	quit  chan struct{}
	once  sync.Once
	over  atomic.Bool  // a budget was exceeded
	holds atomic.Int64 // received messages that are not freed

	sentMessages, sentBytes, receivedMessages, receivedBytes atomic.Uint64

	// Guarded by n.mu.
	self     van.Node
	conns    map[int]*conn
	old      []*conn        // that end
	dials    map[string]int // by address
	accepted map[*conn]bool
	routes   map[string]*conn // by routing id
	queue    []*packet
	lent     []*packet // requests whose values are the application's, and some that have arrived
	lanes    map[string]*lane
	outbox   []func() // sent while the process was stopped
	ready    bool     // started: its messages are repeated if that is asked for
	frozen   bool
	ghost    bool // killed, but its sockets are open
	dead     bool
	closed   bool
}

var (
	_ van.Van         = (*node)(nil)
	_ van.PeerWatcher = (*node)(nil)
	_ van.Meter       = (*node)(nil)
	_ van.HostChooser = (*node)(nil)
	_ van.Canceler    = (*node)(nil)
)

// lane is the queue of messages from one peer.
type lane struct {
	engine.PeerQueue[*packet]
	waits atomic.Int64 // bytes that have been read and not delivered
}

// newNode makes the van of a process.
func (n *Net) newNode(who plan.Node, name, host string, o van.Options) *node {
	v := &node{n: n, who: who, name: name, host: host, seed: n.seed.of(name), opts: o, bell: make(chan struct{}, 1), quit: make(chan struct{}),
		conns: map[int]*conn{}, dials: map[string]int{}, accepted: map[*conn]bool{}, routes: map[string]*conn{}, lanes: map[string]*lane{}}
	v.id.Store(van.Empty)
	v.loop = engine.NewLoop(v.next, v.deliver)
	v.loop.Limit = 5 * time.Millisecond
	v.loop.Discard = func(p *packet) {
		p.waits.Add(-p.size)
		p.msg.Release()
	}
	if o.Config != nil && !failpoint.On("recv-budget") {
		v.loop.Budget = engine.NewBudget(int64(o.Config.RecvBudgetPeer), int64(o.Config.RecvBudget))
	}
	v.loop.Weight = func(p *packet) int { return int(p.size) }
	v.loop.Resumed = func(*engine.PeerQueue[*packet]) { v.ring() }
	n.mu.Lock()
	n.nodes = append(n.nodes, v)
	n.mu.Unlock()
	return v
}

// Type implements van.Van.
func (v *node) Type() string { return "zmq" }

// ChooseHost implements van.HostChooser.
func (v *node) ChooseHost() (host, why string, err error) { return v.host, "the plan", nil }

// WatchPeers implements van.PeerWatcher.
func (v *node) WatchPeers(f func(id int, up bool, cause error)) { v.watch = f }

// SetID implements van.Van.
func (v *node) SetID(id int) { v.id.Store(int64(id)) }

// Stats implements van.Meter.
func (v *node) Stats() van.Stats {
	return van.Stats{SentMessages: v.sentMessages.Load(), SentBytes: v.sentBytes.Load(),
		ReceivedMessages: v.receivedMessages.Load(), ReceivedBytes: v.receivedBytes.Load(), LentValues: uint64(v.holds.Load())}
}

// tell reports a change of a connection, as long as the process runs.
func (v *node) tell(id int, up bool, cause error) {
	v.n.mu.Lock()
	if v.frozen {
		v.outbox = append(v.outbox, func() { v.tell(id, up, cause) })
		v.n.mu.Unlock()
		return
	}
	skip := v.dead || v.closed || v.watch == nil
	v.n.mu.Unlock()
	if !skip {
		v.watch(id, up, cause)
	}
}

// Bind implements van.Van.
func (v *node) Bind(_ context.Context, self van.Node) (int, error) {
	n := v.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if self.Port == 0 {
		n.ports++
		self.Port = n.ports
	}
	addr := net.JoinHostPort(self.Hostname, strconv.Itoa(self.Port))
	if n.listeners[addr] != nil {
		return 0, &van.Error{Op: "bind", Detail: addr, Err: fmt.Errorf("%w: another process listens there", syscall.EADDRINUSE)}
	}
	if v.closed || v.dead {
		return 0, &van.Error{Op: "bind", Detail: addr, Err: van.ErrClosed}
	}
	n.listeners[addr] = v
	v.self = self
	v.self.Ports = nil
	v.id.Store(int64(self.ID))
	return self.Port, nil
}

func (v *node) addr() string { return net.JoinHostPort(v.self.Hostname, strconv.Itoa(v.self.Port)) }

// Start implements van.Van.
func (v *node) Start(recv van.Receiver) {
	v.recv = recv
	v.loop.Start()
}

// Connect implements van.Van.
func (v *node) Connect(_ context.Context, id int, peer van.Node) error {
	n := v.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if v.closed || v.dead {
		return &van.Error{Op: "connect", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(id), Err: van.ErrClosed}
	}
	old := v.conns[id]
	if old != nil {
		old.end(0)
	}
	own := int(v.id.Load())
	addr := net.JoinHostPort(peer.Hostname, strconv.Itoa(peer.Port))
	v.dials[addr]++ // not over all peers: several may be connected to at once, in any order
	c := &conn{n: n, from: v, peer: id, addr: addr,
		seed: v.seed.of("conn").of(addr).at(uint64(v.dials[addr])), senderID: own, ident: v.routingID(own, peer)}
	c.name = v.name + " > " + c.addr
	identity, native := peer.Extension()
	c.route = routingID(id, identity.Incarnation, v.opts.Incarnation, native)
	v.conns[id] = c
	v.old = append(v.old, c)
	if strings.Contains(c.route, ".") && id > van.SchedulerID && v.self.Role != van.Scheduler && (old == nil || old.idle) {
		c.idle = true // as in van/zmq, the first message connects two native nodes
		return nil
	}
	c.dial(0)
	return nil
}

// routingID is how the node presents itself to a peer.
func (v *node) routingID(own int, peer van.Node) string {
	if own == van.Empty {
		return ""
	}
	identity, native := peer.Extension()
	return routingID(own, v.opts.Incarnation, identity.Incarnation, native)
}

// routingID is that of van/zmq: between nodes of this library it says which process it is, and for which it is.
func routingID(id int, by, to uint32, native bool) string {
	switch {
	case !native || by == 0 || to == 0 || failpoint.On("incarnation"):
		return "ps" + strconv.Itoa(id)
	case failpoint.On("names"):
		return fmt.Sprintf("ps%d.%08x", id, by)
	}
	return fmt.Sprintf("ps%d.%08x.%08x", id, by, to)
}

// list is all connections that the node has made and that have not ended. n.mu is held.
func (v *node) list() []*conn {
	rest := v.old[:0]
	for _, c := range v.old {
		if c.state != ended {
			rest = append(rest, c)
		}
	}
	v.old = rest
	return append([]*conn(nil), rest...)
}

// Rename implements van.Van.
func (v *node) Rename(old, id int) error {
	n := v.n
	n.mu.Lock()
	defer n.mu.Unlock()
	c := v.conns[old]
	if c == nil {
		return &van.Error{Op: "rename", Peer: van.NodeName(old), Err: van.ErrUnknownPeer}
	}
	if old == id {
		return nil
	}
	if other := v.conns[id]; other != nil {
		other.end(0)
	}
	delete(v.conns, old)
	v.conns[id] = c
	c.peer = id
	_, inc, _ := strings.Cut(c.route, ".")
	c.route = "ps" + strconv.Itoa(id)
	if inc != "" {
		c.route += "." + inc
	}
	return nil
}

// leaveTime is how long Disconnect lets sent messages leave.
const leaveTime = 500 * time.Millisecond

// Disconnect implements van.Van.
func (v *node) Disconnect(id int) {
	n := v.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if c := v.conns[id]; c != nil {
		delete(v.conns, id)
		c.end(leaveTime)
	}
}

// Send implements van.Van.
func (v *node) Send(msg *van.Message) error {
	n := v.n
	n.mu.Lock()
	defer n.mu.Unlock()
	fail := func(err error) error {
		return &van.Error{Op: "send", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(msg.Receiver), Detail: msg.Meta.String(), Err: err}
	}
	c := v.conns[msg.Receiver]
	switch {
	case v.closed || v.dead:
		return fail(van.ErrClosed)
	case c == nil:
		return fail(van.ErrUnknownPeer)
	}
	if msg.Request || msg.IsControl() {
		msg.RequestTrace.PostSend = clock.Now()
	} else {
		msg.ResponseTrace.PostSend = clock.Now()
	}
	own := int(v.id.Load())
	answer := v.self.Role != van.Worker && msg.Receiver > 0 && van.RoleOf(msg.Receiver) == van.Worker && !msg.Request && !msg.IsControl() && !msg.SimpleApp
	if answer {
		back := v.routes[c.route]
		if back == nil || back.back == nil {
			return fail(fmt.Errorf("%w: it is not connected to this node", van.ErrPeerLost))
		}
		p := v.pack(msg, own, false)
		if !v.later(func() {
			if back.back != nil {
				back.back.send(p)
			} else {
				p.sent()
			}
		}) {
			back.back.send(p)
		}
		return nil
	}
	if limit := n.queueLimit(v); limit > 0 && !msg.IsControl() && c.unsent() > limit {
		return fail(van.ErrQueueFull)
	}
	if c.idle {
		c.idle = false
		c.dial(0)
	}
	p := v.pack(msg, c.senderID, v.opts.Incarnation != 0 && strings.Contains(c.route, "."))
	if c.senderID == van.Empty {
		p.sender = van.Empty
	}
	put := func() {
		if c.state == leaving || c.state == ended {
			p.sent()
			return
		}
		c.forward(p)
	}
	if n.tr.Resend && msg.IsControl() {
		put = func() { c.inOrder(p) }
	}
	if !v.later(put) {
		put()
	}
	if v.opts.Config != nil && v.opts.Config.SendBudget > 0 && n.tr.Queue == 0 && !msg.IsControl() {
		if most := int64(v.opts.Config.SendBudget) + 2*p.size + window; c.unsent() > most {
			go n.tooMuch(v, fmt.Sprintf("%d bytes wait for %s, the budget is %d", c.unsent(), van.NodeName(c.peer), v.opts.Config.SendBudget))
		}
	}
	return nil
}

// window is how many sent bytes may be in flight in kernels.
const window = 64 << 10

// pack counts a message and makes it a packet.
func (v *node) pack(msg *van.Message, sender int, recalls bool) *packet {
	v.sentMessages.Add(1)
	v.sentBytes.Add(uint64(msg.PayloadLen()))
	p := pack(msg, sender, recalls)
	p.size = int64(msg.PayloadLen()) + 300
	if p.lent && msg.Request {
		v.lent = append(slices.DeleteFunc(v.lent, func(p *packet) bool { return !p.lent || p.gone }), p)
	}
	return p
}

// Cancel implements van.Canceler: the receiver drops canceled messages that have not arrived.
func (v *node) Cancel(q van.Requests) {
	v.n.mu.Lock()
	defer v.n.mu.Unlock()
	for _, p := range v.lent {
		p.gone = p.gone || q.Has(&p.msg.Meta)
	}
}

// later queues an action of a stopped process until the process runs again. n.mu is held.
func (v *node) later(f func()) bool {
	if !v.frozen {
		return false
	}
	v.outbox = append(v.outbox, func() {
		v.n.mu.Lock()
		defer v.n.mu.Unlock()
		if !v.dead {
			f()
		}
	})
	return true
}

// queueLimit is how many bytes may wait for one peer.
func (n *Net) queueLimit(v *node) int64 {
	if n.tr.Queue > 0 || v.opts.Config == nil || failpoint.On("send-budget") {
		return n.tr.Queue
	}
	return int64(v.opts.Config.SendBudget)
}

// take queues a packet for the receiving goroutine. n.mu is held.
func (v *node) take(p *packet) {
	if v.closed || v.dead {
		p.free()
		return
	}
	p.at = v
	p.lane = strconv.Itoa(p.sender)
	if p.flow.back {
		p.lane += "a"
	} else {
		p.lane += p.flow.c.ident
	}
	v.queue = append(v.queue, p)
}

func (v *node) ring() {
	select {
	case v.bell <- struct{}{}:
	default:
	}
}

// next is the receiving side of the loop.
func (v *node) next() (*packet, *engine.PeerQueue[*packet], bool) {
	for {
		v.n.mu.Lock()
		if !v.dead {
			for i, p := range v.queue {
				in := v.lanes[p.lane]
				if in == nil {
					in = &lane{PeerQueue: engine.PeerQueue[*packet]{ID: p.sender}}
					v.lanes[p.lane] = in
				}
				if !v.loop.MayRead(&in.PeerQueue) {
					continue
				}
				v.queue = append(v.queue[:i], v.queue[i+1:]...)
				p.free()
				v.n.mu.Unlock()
				p.flow, p.waits = nil, &in.waits
				v.holds.Add(1)
				v.inLane(p)
				p.adopt()
				p.msg.Receiver = int(v.id.Load())
				now := clock.Now()
				if p.msg.Request {
					p.msg.RequestTrace.PostRecv = now
				} else {
					p.msg.ResponseTrace.PostRecv = now
				}
				v.receivedMessages.Add(1)
				v.receivedBytes.Add(uint64(p.msg.PayloadLen()))
				return p, &in.PeerQueue, true
			}
		}
		v.n.mu.Unlock()
		select {
		case <-v.bell:
		case <-v.quit:
			return nil, nil, false
		}
	}
}

// inLane counts the bytes of a peer that have been read and not delivered, and reports when they
// exceed its budget.
func (v *node) inLane(p *packet) {
	bytes := p.waits.Add(p.size)
	c := v.opts.Config
	if c == nil || c.RecvBudgetPeer <= 0 {
		return
	}
	if most := int64(c.RecvBudgetPeer) + 2*p.size + window; bytes > most {
		v.n.tooMuch(v, fmt.Sprintf("%d bytes of %s wait for the handler, the budget is %d", bytes, van.NodeName(p.sender), c.RecvBudgetPeer))
	}
}

func (v *node) deliver(p *packet) {
	p.waits.Add(-p.size)
	v.recv(&p.msg)
	p.msg.Release()
}

// lingerStep is how often Close checks whether all messages have left.
const lingerStep = 20 * time.Millisecond

// Close implements van.Van.
func (v *node) Close(ctx context.Context) error {
	n := v.n
	n.mu.Lock()
	if v.closed {
		n.mu.Unlock()
		return nil
	}
	v.closed = true
	if v.ghost { // the sockets are not this process's alone
		n.mu.Unlock()
		return v.halt(ctx)
	}
	if n.listeners[v.addr()] == v {
		delete(n.listeners, v.addr())
	}
	for _, c := range v.list() {
		c.end(time.Hour)
	}
	n.mu.Unlock()
	err := v.halt(ctx)
	for ctx.Err() == nil && v.waits() {
		select {
		case <-ctx.Done():
		case <-time.After(lingerStep):
		}
	}
	n.mu.Lock()
	for _, c := range v.list() {
		if c.to == nil {
			c.giveUp()
		}
	}
	n.hangUp(v)
	n.mu.Unlock()
	return err
}

// halt ends receiving.
func (v *node) halt(ctx context.Context) error {
	v.once.Do(func() { close(v.quit) })
	err := v.loop.Stop(ctx)
	if err != nil {
		return &van.Error{Op: "close", Node: van.NodeName(int(v.id.Load())), Detail: "a receiver still runs", Err: err}
	}
	return nil
}

// waits tells whether something that was sent waits for its connection.
func (v *node) waits() bool {
	v.n.mu.Lock()
	defer v.n.mu.Unlock()
	for _, c := range v.list() {
		if c.state == leaving && c.to == nil && len(c.pending) > 0 && !v.dead {
			return true
		}
	}
	return false
}

// hangUp sends the diallers of v, after its earlier messages, the end of its process, and drops
// the queued messages. mu is held.
func (n *Net) hangUp(v *node) {
	for _, x := range n.nodes {
		for _, c := range x.list() {
			if c.to == v && c.back != nil {
				c.back.send(&packet{fin: true})
			}
		}
	}
	for _, p := range v.queue {
		p.free()
	}
	v.queue = nil
}

func (v *node) setReady() {
	v.n.mu.Lock()
	defer v.n.mu.Unlock()
	v.ready = true
}

func (v *node) held() int64 { return v.holds.Load() }

// kill ends a process as SIGKILL does. With fork a child of it keeps the sockets open.
func (v *node) kill(fork bool) {
	n := v.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if v.dead {
		return
	}
	v.dead, v.frozen, v.ghost = true, false, fork
	v.outbox = nil
	n.note(v.name, map[bool]string{false: "killed", true: "killed; a child keeps its sockets"}[fork])
	for _, c := range v.list() {
		if c.to == nil {
			c.giveUp()
		}
	}
	if !fork {
		v.closeSockets()
	}
}

// bury ends the child of a killed process.
func (v *node) bury() {
	n := v.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if v.ghost {
		v.ghost = false
		v.closeSockets()
	}
}

// closeSockets closes the sockets when no process has them any more. n.mu is
// held.
func (v *node) closeSockets() {
	for _, c := range v.list() {
		if c.to != nil {
			c.state = leaving
			c.fwd.send(&packet{fin: true})
		}
	}
	if v.n.listeners[v.addr()] == v {
		delete(v.n.listeners, v.addr())
	}
	v.n.hangUp(v)
}

// stop stops a process, as SIGSTOP does.
func (v *node) stop() {
	n := v.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if !v.dead && !v.frozen {
		v.frozen = true
		n.note(v.name, "stopped")
	}
}

// wake lets it go on. Messages sent to it meanwhile arrive, and its own queued messages
// leave.
func (v *node) wake() {
	n := v.n
	n.mu.Lock()
	if v.dead || !v.frozen {
		n.mu.Unlock()
		return
	}
	v.frozen = false
	n.note(v.name, "woken")
	outbox := v.outbox
	v.outbox = nil
	for _, x := range n.nodes {
		for _, c := range x.list() {
			if c.to == nil || c.from != v && c.to != v || n.link(c.from.who, c.to.who).cut != 0 {
				continue
			}
			if c.from == v {
				c.back.resume()
			} else {
				c.fwd.resume()
			}
		}
	}
	n.mu.Unlock()
	for _, f := range outbox {
		f()
	}
}
