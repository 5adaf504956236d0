package inproc

// The addresses that nodes of one process share, and simulated failures.

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/stepaf/stepaf-go/van"
)

// DefaultQueueCap is how many messages of one connection may wait.
const DefaultQueueCap = 65536

// firstPort is where the search for a free port begins.
const firstPort = 20000

// Network is a set of addresses at which the nodes of one process listen and
// find each other. All methods are safe for concurrent use.
type Network struct {
	// QueueCap is how many messages of one connection may wait at the receiver,
	// or for a receiver that does not listen yet. Beyond it Send returns
	// van.ErrQueueFull. Set it before use.
	QueueCap int

	cuts atomic.Pointer[map[link]struct{}] // nil: no partition

	mu        sync.Mutex
	endpoints map[string]*endpoint
	nextPort  int
	left      map[string]struct{} // addresses where a node has listened, and none does now
	bound     chan struct{}       // closed and replaced at each Bind
	events    []event             // for watchers, in order
	notifying bool                // a goroutine is in notify
}

// link is a pair of addresses in order.
type link struct{ a, b string }

func linkOf(a, b string) link {
	if b < a {
		a, b = b, a
	}
	return link{a, b}
}

type event struct {
	watcher *node
	id      int
	up      bool
	cause   error
}

// NewNetwork makes a network without nodes.
func NewNetwork() *Network {
	return &Network{QueueCap: DefaultQueueCap, endpoints: map[string]*endpoint{}, left: map[string]struct{}{}, nextPort: firstPort,
		bound: make(chan struct{})}
}

// Kill ends the node that listens at addr ("host:port") as a crash would: messages
// queued for it are lost, messages that it has sent are not, and its Send returns
// van.ErrClosed from now on. Watchers of nodes connected to it are called. Kill
// reports whether there was such a node. The node's van must still be closed.
func (n *Network) Kill(addr string) bool {
	n.mu.Lock()
	e := n.endpoints[addr]
	var victim *node
	if e != nil {
		victim = e.owner // only changed under n.mu
	}
	n.mu.Unlock()
	if victim == nil {
		return false
	}
	n.detach(victim, "it was killed")
	return true
}

// Partition makes the network drop, without any error, all messages between the nodes
// that listen at a and b.
func (n *Network) Partition(a, b string) { n.setCut(linkOf(a, b), true) }

// Heal ends a Partition. Dropped messages stay lost.
func (n *Network) Heal(a, b string) { n.setCut(linkOf(a, b), false) }

func (n *Network) setCut(l link, cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	next := map[link]struct{}{}
	if old := n.cuts.Load(); old != nil {
		for k := range *old {
			next[k] = struct{}{}
		}
	}
	if cut {
		next[l] = struct{}{}
	} else {
		delete(next, l)
	}
	if len(next) == 0 {
		n.cuts.Store(nil)
		return
	}
	n.cuts.Store(&next)
}

func (n *Network) isCut(a, b string) bool {
	cuts := n.cuts.Load()
	if cuts == nil {
		return false
	}
	_, cut := (*cuts)[linkOf(a, b)]
	return cut
}

func address(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// bind makes v the owner of host:port.
func (n *Network) bind(v *node, host string, port int) (int, error) {
	fail := func(detail string, err error) (int, error) {
		return 0, &van.Error{Op: "bind", Detail: detail, Err: err}
	}
	if host == "" || strings.ContainsAny(host, " \t\r\n/:*") {
		return fail(fmt.Sprintf("hostname %q: want a name without spaces, '/', ':' and '*'", host), van.ErrInvalid)
	}
	if port < 0 || port > 65535 {
		return fail(fmt.Sprintf("port %d: want 0 (any) to 65535", port), van.ErrInvalid)
	}
	n.mu.Lock()
	defer n.notify()
	defer n.mu.Unlock()
	if v.closed.Load() {
		return fail(address(host, port), van.ErrClosed)
	}
	if old := v.ep.Load(); old != nil {
		return fail(address(host, port)+": already bound to "+old.addr, van.ErrInvalid)
	}
	if port == 0 {
		var err error
		if port, err = n.freePortLocked(host); err != nil {
			return fail(host, err)
		}
	}
	e := n.endpointLocked(address(host, port))
	if e.owner != nil {
		return fail("port "+e.addr, syscall.EADDRINUSE)
	}
	e.mu.Lock()
	e.owner = v
	for c := range e.conns {
		if c.down.CompareAndSwap(true, false) {
			n.events = append(n.events, event{c.from, int(c.peerID.Load()), true, nil})
		}
	}
	e.mu.Unlock()
	close(n.bound)
	n.bound = make(chan struct{})
	delete(n.left, e.addr)
	v.ep.Store(e)
	return port, nil
}

func (n *Network) freePortLocked(host string) (int, error) {
	for range 65536 {
		port := n.nextPort
		if n.nextPort++; n.nextPort > 65535 {
			n.nextPort = firstPort
		}
		if _, used := n.endpoints[address(host, port)]; !used {
			return port, nil
		}
	}
	return 0, fmt.Errorf("no free port: %w", syscall.EADDRINUSE)
}

func (n *Network) endpointLocked(addr string) *endpoint {
	e := n.endpoints[addr]
	if e == nil {
		e = newEndpoint(addr)
		n.endpoints[addr] = e
	}
	return e
}

// dropLocked removes c from its endpoint, and the endpoint if it is unused then.
func (n *Network) dropLocked(c *conn) {
	delete(c.to.conns, c)
	n.forgetLocked(c.to)
}

func (n *Network) forgetLocked(e *endpoint) {
	e.mu.Lock()
	unused := e.owner == nil && len(e.conns) == 0 && e.first == nil
	e.mu.Unlock()
	if unused && n.endpoints[e.addr] == e {
		delete(n.endpoints, e.addr)
	}
}

// discardLocked drops the queued messages of v to e.
func (n *Network) discardLocked(e *endpoint, v *node) {
	e.mu.Lock()
	lost := e.takeLocked(v)
	e.mu.Unlock()
	discard(lost)
	n.forgetLocked(e)
}

// detach takes v off the network: it neither receives nor sends any more, and the
// watchers of nodes connected to it are called with why.
func (n *Network) detach(v *node, why string) {
	n.mu.Lock()
	defer n.notify()
	defer n.mu.Unlock()
	v.closed.Store(true)
	for _, c := range *v.conns.Swap(&map[int]*conn{}) {
		n.dropLocked(c)
	}
	e := v.ep.Load()
	if e == nil || e.owner != v {
		return
	}
	n.left[e.addr] = struct{}{}
	e.mu.Lock()
	e.owner = nil
	lost := e.takeLocked(nil)
	for c := range e.conns {
		c.down.Store(true)
		id := int(c.peerID.Load())
		n.events = append(n.events, event{c.from, id, false, &van.Error{Op: "connection",
			Peer: van.NodeName(id) + " at " + e.addr, Detail: why, Err: van.ErrPeerLost}})
	}
	e.mu.Unlock()
	e.filled.Broadcast()
	discard(lost)
	n.forgetLocked(e)
}

// notify calls the watchers, without locks and in the order of the events.
func (n *Network) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.notifying {
		return
	}
	n.notifying = true
	for len(n.events) > 0 {
		ev := n.events[0]
		n.events = n.events[1:]
		if f := ev.watcher.watch.Load(); f != nil && !ev.watcher.closed.Load() {
			n.mu.Unlock()
			(*f)(ev.id, ev.up, ev.cause)
			n.mu.Lock()
		}
	}
	n.events = nil
	n.notifying = false
}
