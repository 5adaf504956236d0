package inproc

// One node of a Network, as a van.Van.

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// node is one node's van.
type node struct {
	net    *Network
	log    *slog.Logger
	id     atomic.Int64
	closed atomic.Bool
	watch  atomic.Pointer[func(int, bool, error)]

	// conns is replaced as a whole under Network.mu; Send reads it without the lock.
	conns atomic.Pointer[map[int]*conn]
	// detached are closed connections that have messages waiting; under Network.mu.
	detached []*conn

	ep    atomic.Pointer[endpoint] // set by Bind, under Network.mu
	recv  van.Receiver
	loop  *engine.Loop[*inbound]
	lanes map[lane]*engine.PeerQueue[*inbound] // used by the receiving goroutine only

	sentMessages, sentBytes, receivedMessages, receivedBytes atomic.Uint64
}

// lane names a queue of undelivered messages: the control messages of a node, or its data messages. As on other transports,
// control messages do not wait for a handler of their sender that blocks.
type lane struct {
	from    *node
	control bool
}

var (
	_ van.Van         = (*node)(nil)
	_ van.PeerWatcher = (*node)(nil)
	_ van.Meter       = (*node)(nil)
)

// Factory returns a function that makes one node's van at each call.
func (n *Network) Factory() van.Factory {
	return func(opts van.Options) (van.Van, error) { return newNode(n, opts.Log), nil }
}

func newNode(n *Network, log *slog.Logger) *node {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	v := &node{net: n, log: log, lanes: map[lane]*engine.PeerQueue[*inbound]{}}
	v.id.Store(van.Empty)
	v.conns.Store(&map[int]*conn{})
	v.loop = engine.NewLoop(v.next, v.deliver)
	// Send bounds the queue of a connection, so peer queues need no bound, and a full
	// one never blocks the others.
	v.loop.QueueCap = int(^uint(0) >> 1)
	v.loop.Discard = func(p *inbound) {
		p.conn.queued.Add(-1)
		p.free()
	}
	return v
}

// Type implements van.Van.
func (v *node) Type() string { return "inproc" }

// WatchPeers implements van.PeerWatcher. A peer is down when it is closed or
// killed, and up when a node listens at its address again.
func (v *node) WatchPeers(f func(id int, up bool, cause error)) { v.watch.Store(&f) }

// Stats implements van.Meter. Bytes are those of data frames.
func (v *node) Stats() van.Stats {
	return van.Stats{SentMessages: v.sentMessages.Load(), SentBytes: v.sentBytes.Load(),
		ReceivedMessages: v.receivedMessages.Load(), ReceivedBytes: v.receivedBytes.Load()}
}

// Bind implements van.Van. A port in use gives an error that wraps
// syscall.EADDRINUSE.
func (v *node) Bind(ctx context.Context, self van.Node) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, &van.Error{Op: "bind", Detail: self.Addr(), Err: err}
	}
	port, err := v.net.bind(v, self.Hostname, self.Port)
	if err != nil {
		return 0, err
	}
	v.SetID(self.ID)
	return port, nil
}

// Start implements van.Van.
func (v *node) Start(recv van.Receiver) {
	v.recv = recv
	v.loop.Start()
}

// SetID implements van.Van.
func (v *node) SetID(id int) { v.id.Store(int64(id)) }

// Connect implements van.Van.
func (v *node) Connect(ctx context.Context, id int, peer van.Node) error {
	if err := ctx.Err(); err != nil {
		return &van.Error{Op: "connect", Peer: van.NodeName(id) + " at " + peer.Addr(), Err: err}
	}
	v.net.mu.Lock()
	defer v.net.mu.Unlock()
	if v.closed.Load() {
		return &van.Error{Op: "connect", Peer: van.NodeName(id) + " at " + peer.Addr(), Err: van.ErrClosed}
	}
	_, native := peer.Extension()
	c := &conn{from: v, to: v.net.endpointLocked(address(peer.Hostname, peer.Port)), senderID: int(v.id.Load()), native: native}
	c.peerID.Store(int64(id))
	c.to.conns[c] = struct{}{}
	conns := maps.Clone(*v.conns.Load())
	v.detachLocked(conns[id])
	conns[id] = c
	v.conns.Store(&conns)
	return nil
}

// Rename implements van.Van.
func (v *node) Rename(old, id int) error {
	v.net.mu.Lock()
	defer v.net.mu.Unlock()
	conns := maps.Clone(*v.conns.Load())
	c := conns[old]
	if c == nil {
		return &van.Error{Op: "rename", Peer: van.NodeName(old), Err: van.ErrUnknownPeer}
	}
	if old == id {
		return nil
	}
	v.detachLocked(conns[id])
	delete(conns, old)
	conns[id] = c
	c.peerID.Store(int64(id))
	v.conns.Store(&conns)
	return nil
}

// Disconnect implements van.Van. Messages sent before the peer listens are kept for
// it until Close.
func (v *node) Disconnect(id int) {
	v.net.mu.Lock()
	defer v.net.mu.Unlock()
	conns := maps.Clone(*v.conns.Load())
	v.detachLocked(conns[id])
	delete(conns, id)
	v.conns.Store(&conns)
}

// detachLocked closes c, which may be nil.
func (v *node) detachLocked(c *conn) {
	if c == nil {
		return
	}
	if c.to.owner == nil && c.queued.Load() > 0 {
		v.detached = append(v.detached, c)
	}
	v.net.dropLocked(c)
}

// Send implements van.Van. The frames have been copied, and Done has been
// called, when it returns.
func (v *node) Send(m *van.Message) error {
	fail := func(err error, detail string) error {
		return &van.Error{Op: "send", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(m.Receiver), Detail: detail, Err: err}
	}
	if v.closed.Load() {
		return fail(van.ErrClosed, "")
	}
	c := (*v.conns.Load())[m.Receiver]
	switch {
	case c == nil && v.closed.Load(): // closed after the first check
		return fail(van.ErrClosed, "")
	case c == nil:
		return fail(van.ErrUnknownPeer, "")
	case c.down.Load():
		return fail(van.ErrPeerLost, c.to.addr)
	case int(c.queued.Load()) >= v.net.QueueCap:
		return fail(van.ErrQueueFull, fmt.Sprintf("%d messages wait for %s", v.net.QueueCap, c.to.addr))
	case m.Frames < 0 || m.Frames > 3:
		return fail(van.ErrInvalid, fmt.Sprintf("%d frames, want 0 to 3", m.Frames))
	}
	if err := m.CheckOnHost(); err != nil {
		return fail(err, "")
	}
	if m.IsBatch() && !c.native {
		return m.Expand(v.Send)
	}
	if !m.IsControl() {
		m.Trace().PostSend = clock.Now()
	}
	p := pack(m)
	p.conn = c
	p.msg.Sender = c.senderID
	size := uint64(m.PayloadLen())
	switch e := v.ep.Load(); {
	case e != nil && v.net.isCut(e.addr, c.to.addr):
		p.free()
	case !c.to.push(p):
		p.free()
		return fail(van.ErrPeerLost, c.to.addr)
	}
	v.sentMessages.Add(1)
	v.sentBytes.Add(size)
	if m.Done != nil {
		m.Done.Sent()
	}
	return nil
}

// next waits for a message and returns it with the lane of its sender.
func (v *node) next() (*inbound, *engine.PeerQueue[*inbound], bool) {
	e := v.ep.Load()
	if e == nil {
		return nil, nil, false // Start without Bind: a node that only sends
	}
	p := e.pop(v)
	if p == nil {
		return nil, nil, false
	}
	of := lane{p.conn.from, p.msg.IsControl()}
	queue := v.lanes[of]
	if queue == nil {
		queue = new(engine.PeerQueue[*inbound])
		v.lanes[of] = queue
	}
	return p, queue, true
}

func (v *node) deliver(p *inbound) {
	p.conn.queued.Add(-1)
	v.receivedMessages.Add(1)
	v.receivedBytes.Add(uint64(p.msg.PayloadLen()))
	p.msg.Receiver = int(v.id.Load())
	if !p.msg.IsControl() {
		p.msg.Trace().PostRecv = clock.Now()
	}
	p.adopt()
	v.recv(&p.msg)
	p.msg.Release()
}

// Close implements van.Van. It waits for messages to peers that do not listen yet, but not for those to
// peers that have left; those to peers that listen have arrived.
func (v *node) Close(ctx context.Context) error {
	lingerErr := v.linger(ctx)
	v.net.detach(v, "it was closed")
	if err := v.loop.Stop(ctx); err != nil {
		return &van.Error{Op: "close", Node: van.NodeName(int(v.id.Load())), Detail: "a receiver still runs", Err: err}
	}
	return lingerErr
}

// linger waits until no sent message waits for a listener.
func (v *node) linger(ctx context.Context) error {
	for {
		v.net.mu.Lock()
		waiting := v.waitingLocked()
		bound := v.net.bound
		if len(waiting) == 0 {
			v.net.mu.Unlock()
			return nil
		}
		if ctx.Err() != nil {
			count := 0
			for _, e := range waiting {
				count += e.waiting(v)
				v.net.discardLocked(e, v)
			}
			v.net.mu.Unlock()
			return &van.Error{Op: "close", Node: van.NodeName(int(v.id.Load())), Peer: waiting[0].addr,
				Detail: fmt.Sprintf("%d messages lost, no node listens", count), Err: ctx.Err()}
		}
		v.net.mu.Unlock()
		select {
		case <-bound:
		case <-ctx.Done():
		}
	}
}

// waitingLocked lists the addresses where messages wait for a listener. Those to listeners that have left are lost.
func (v *node) waitingLocked() []*endpoint {
	var waiting []*endpoint
	add := func(c *conn) {
		e := c.to
		if _, left := v.net.left[e.addr]; left {
			v.net.discardLocked(e, v)
		}
		if e.owner == nil && !slices.Contains(waiting, e) && e.waiting(v) > 0 {
			waiting = append(waiting, e)
		}
	}
	for _, c := range *v.conns.Load() {
		add(c)
	}
	for _, c := range v.detached {
		add(c)
	}
	return waiting
}
