// Package pipes stands for a third-party transport: it is in a module of its
// own, so it can use only exported packages of StepAF. It imports van and van/backend, its
// test also tests/vantest. It carries messages through pipes of the operating system, one for each
// connection, between nodes of one process.
//
// A connection has a goroutine on each end: one writes what Send has queued, the other
// reads, decodes and hands up. It is written to be read, not for speed.
package pipes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/stepaf/stepaf-go/van"
)

// queueCap is how many messages of one connection may wait to be written.
const queueCap = 4096

// Hub is where nodes find each other by address. The zero value is ready.
type Hub struct {
	mu      sync.Mutex
	at      map[string]*node
	arrived chan struct{} // closed and replaced at each Bind
	port    int           // the last that was given away
}

// Factory makes a van of the hub at each call.
func (h *Hub) Factory() van.Factory {
	return func(van.Options) (van.Van, error) {
		n := &node{hub: h, conns: map[int]*conn{}, started: make(chan struct{}), closing: make(chan struct{}), parted: map[*conn]bool{}, pipes: map[*os.File]bool{}, from: map[*node]*turn{}}
		n.id.Store(van.Empty)
		return n, nil
	}
}

// listen enters n under host and port; port 0 means any.
func (h *Hub) listen(n *node, host string, port int) (int, error) {
	if host == "" || strings.ContainsAny(host, " \t/") {
		return 0, fmt.Errorf("host %q: %w: want a name without blanks and slashes", host, van.ErrInvalid)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.at == nil {
		h.at, h.arrived, h.port = map[string]*node{}, make(chan struct{}), 1023
	}
	if port == 0 {
		h.port++
		port = h.port
	}
	addr := address(host, port)
	if port < 0 || port > 65535 {
		return 0, fmt.Errorf("port %d: %w: want 0 (any) to 65535", port, van.ErrInvalid)
	}
	if h.at[addr] != nil {
		return 0, fmt.Errorf("port %s: %w", addr, syscall.EADDRINUSE)
	}
	h.at[addr], n.addr = n, addr
	close(h.arrived)
	h.arrived = make(chan struct{})
	return port, nil
}

// leave takes n off.
func (h *Hub) leave(n *node) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.at[n.addr] == n {
		delete(h.at, n.addr)
	}
}

// find returns the node that listens at addr, or a channel that closes when another node listens.
func (h *Hub) find(addr string) (*node, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.at == nil {
		h.at, h.arrived, h.port = map[string]*node{}, make(chan struct{}), 1023
	}
	return h.at[addr], h.arrived
}

func address(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// node is the van of one node.
type node struct {
	hub   *Hub
	addr  string
	id    atomic.Int64
	recv  van.Receiver
	watch func(id int, up bool, cause error)

	started chan struct{} // closed by Start
	closing chan struct{} // closed by Close
	readers sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[int]*conn
	parted map[*conn]bool    // disconnected, and not yet written out
	pipes  map[*os.File]bool // reading ends
	from   map[*node]*turn   // of the peers that have a pipe to this node
}

// turn makes the messages of one peer be handed up one by one.
type turn struct {
	sync.Mutex
	pipes int // that need it; guarded by node.mu
}

var (
	_ van.Van         = (*node)(nil)
	_ van.PeerWatcher = (*node)(nil)
)

// Type implements van.Van.
func (n *node) Type() string { return "pipes" }

// WatchPeers implements van.PeerWatcher.
func (n *node) WatchPeers(f func(id int, up bool, cause error)) { n.watch = f }

// SetID implements van.Van.
func (n *node) SetID(id int) { n.id.Store(int64(id)) }

func (n *node) fail(op string, peer int, err error) error {
	e := &van.Error{Op: op, Node: van.NodeName(int(n.id.Load())), Err: err}
	if peer != van.Empty {
		e.Peer = van.NodeName(peer)
	}
	return e
}

// Bind implements van.Van.
func (n *node) Bind(ctx context.Context, self van.Node) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, n.fail("bind", van.Empty, err)
	}
	port, err := n.hub.listen(n, self.Hostname, self.Port)
	if err != nil {
		return 0, n.fail("bind", van.Empty, err)
	}
	n.SetID(self.ID)
	return port, nil
}

// Start implements van.Van.
func (n *node) Start(recv van.Receiver) {
	n.recv = recv
	close(n.started)
}

// Connect implements van.Van.
func (n *node) Connect(ctx context.Context, id int, peer van.Node) error {
	if err := ctx.Err(); err != nil {
		return n.fail("connect", id, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return n.fail("connect", id, van.ErrClosed)
	}
	n.partLocked(id)
	c := &conn{from: n, sender: int(n.id.Load()), addr: address(peer.Hostname, peer.Port),
		queue: make(chan *packet, queueCap), part: make(chan struct{}), gone: make(chan struct{}), written: make(chan struct{})}
	c.id.Store(int64(id))
	n.conns[id] = c
	go c.write()
	return nil
}

// partLocked closes the connection to id, if there is one. Sent messages still leave.
func (n *node) partLocked(id int) {
	if c := n.conns[id]; c != nil {
		delete(n.conns, id)
		close(c.part)
		select {
		case <-c.written:
		default:
			n.parted[c] = true
		}
	}
}

// Rename implements van.Van.
func (n *node) Rename(old, id int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.conns[old]
	switch {
	case c == nil:
		return n.fail("rename", old, van.ErrUnknownPeer)
	case old == id:
		return nil
	}
	n.partLocked(id)
	delete(n.conns, old)
	n.conns[id] = c
	c.id.Store(int64(id))
	return nil
}

// Disconnect implements van.Van.
func (n *node) Disconnect(id int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.partLocked(id)
}

// Send implements van.Van. It copies the message, so Done is called at once. A transport without a form of its own for batches sends
// the messages that stand for them.
func (n *node) Send(m *van.Message) error {
	if m.IsBatch() {
		return m.Expand(n.Send)
	}
	n.mu.Lock()
	c, closed := n.conns[m.Receiver], n.closed
	n.mu.Unlock()
	switch {
	case closed:
		return n.fail("send", m.Receiver, van.ErrClosed)
	case c == nil:
		return n.fail("send", m.Receiver, van.ErrUnknownPeer)
	}
	if !m.IsControl() {
		trace(&m.Meta).PostSend = van.Now()
	}
	p, err := pack(c.sender, m)
	if err != nil {
		return n.fail("send", m.Receiver, err)
	}
	select {
	case <-c.gone:
		p.release()
		return n.fail("send", m.Receiver, van.ErrPeerLost)
	default:
	}
	select {
	case c.queue <- p:
	default:
		p.release()
		return n.fail("send", m.Receiver, fmt.Errorf("%w: %d messages wait", van.ErrQueueFull, queueCap))
	}
	if m.Done != nil {
		m.Done.Sent()
	}
	return nil
}

// Close implements van.Van. A receiver must not call it.
func (n *node) Close(ctx context.Context) error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	n.closed = true
	for id := range n.conns {
		n.partLocked(id)
	}
	leaving := slices.Collect(maps.Keys(n.parted))
	n.mu.Unlock()

	var lost []error
	for _, c := range leaving {
		select {
		case <-c.written:
		case <-ctx.Done():
			lost = append(lost, n.fail("close", int(c.id.Load()), fmt.Errorf("%d messages lost: %w", len(c.queue), ctx.Err())))
		}
	}
	close(n.closing) // ends writers, and callers that wait for Start
	for _, c := range leaving {
		<-c.written
	}
	n.hub.leave(n)
	n.mu.Lock()
	for r := range n.pipes {
		_ = r.Close()
	}
	n.mu.Unlock()
	done := make(chan struct{})
	go func() { n.readers.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		lost = append(lost, n.fail("close", van.Empty, fmt.Errorf("a receiver still runs: %w", ctx.Err())))
	}
	return errors.Join(lost...)
}

// accept reads from r what peer sends, until either side closes it. It reports whether n
// still listens.
func (n *node) accept(peer *node, r *os.File) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	select {
	case <-n.closing:
		return false
	default:
	}
	from := n.from[peer]
	if from == nil {
		from = &turn{}
		n.from[peer] = from
	}
	from.pipes++
	n.pipes[r] = true
	n.readers.Go(func() {
		defer n.forget(peer, r)
		select {
		case <-n.started:
		case <-n.closing:
			return
		}
		for {
			p, err := read(r)
			if err != nil {
				return // the peer has closed it, or Close has
			}
			from.Lock()
			n.deliver(p)
			from.Unlock()
		}
	})
	return true
}

// forget closes a pipe that is no longer read.
func (n *node) forget(peer *node, r *os.File) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_ = r.Close()
	delete(n.pipes, r)
	if n.from[peer].pipes--; n.from[peer].pipes == 0 {
		delete(n.from, peer)
	}
}

func (n *node) deliver(p *packet) {
	select {
	case <-n.closing:
		p.release()
		return
	default:
	}
	p.msg.Receiver = int(n.id.Load())
	if !p.msg.IsControl() {
		trace(&p.msg.Meta).PostRecv = van.Now()
	}
	n.recv(&p.msg)
	p.msg.Release()
}

// trace returns the times of the direction in which m travels.
func trace(m *van.Meta) *van.Trace {
	if m.Request {
		return &m.RequestTrace
	}
	return &m.ResponseTrace
}

// conn is a connection to an address.
type conn struct {
	from    *node
	id      atomic.Int64 // of the peer
	sender  int          // from's id when it was made
	addr    string
	queue   chan *packet
	part    chan struct{} // closed when nothing more will be queued
	gone    chan struct{} // closed when the peer does not listen any more
	written chan struct{} // closed when the goroutine that writes has ended
}

// write waits until the peer listens, and writes the queued messages.
func (c *conn) write() {
	defer func() {
		c.from.mu.Lock()
		defer c.from.mu.Unlock()
		close(c.written)
		delete(c.from.parted, c)
	}()
	w, peer := c.dial()
	if peer == nil {
		return
	}
	defer w.Close()
	go func() { // a Write to a peer that reads nothing ends with Close
		select {
		case <-c.from.closing:
			_ = w.Close()
		case <-c.written:
		}
	}()
	parted := false
	for {
		var p *packet
		select {
		case p = <-c.queue:
		default:
			if parted {
				return
			}
			select {
			case p = <-c.queue:
			case <-c.part:
				parted = true
				continue
			case <-peer.closing:
				c.lost(syscall.EPIPE)
				return
			}
		}
		_, err := w.Write(p.bytes)
		p.release()
		if err != nil {
			c.lost(err)
			return
		}
	}
}

// dial makes the pipe as soon as there is a listener, and returns that, too. It returns nil if nothing is left to be written.
func (c *conn) dial() (*os.File, *node) {
	part := c.part
	for {
		peer, arrived := c.from.hub.find(c.addr)
		if peer != nil {
			r, w, err := os.Pipe()
			if err != nil {
				c.lost(err)
				return nil, nil
			}
			if peer.accept(c.from, r) {
				return w, peer
			}
			_, _ = r.Close(), w.Close()
		}
		select {
		case <-arrived:
		case <-part:
			if len(c.queue) == 0 {
				return nil, nil
			}
			part = nil // Close limits how long the messages wait for a listener
		case <-c.from.closing:
			return nil, nil
		}
	}
}

// lost says that nothing arrives any more.
func (c *conn) lost(err error) {
	select {
	case <-c.from.closing:
		return
	default:
	}
	close(c.gone)
	if f := c.from.watch; f != nil {
		id := int(c.id.Load())
		f(id, false, c.from.fail("connection", id, fmt.Errorf("%w: %w", van.ErrPeerLost, err)))
	}
}

var errFormat = errors.New("not a message")

// readHeader reads the fixed part that every message begins with.
func readHeader(r io.Reader) (h header, err error) {
	var b [headerLen]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return h, err
	}
	return h, h.decode(b[:])
}
