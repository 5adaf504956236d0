package zmq

// The connection to one peer, and whom it serves.

import (
	"math"
	"net/netip"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
)

// conn is the DEALER to one peer.
type conn struct {
	who  atomic.Pointer[identity]
	peer van.Node
	to   string // libzmq's name of its address
	sock *socket
	mon  *monitor
	rx   *receiver
	acct *account
	up   atomic.Bool // the connection stands
	lost atomic.Bool // it broke and has not been restored

	redials atomic.Int32 // how many attempts have ended with a failed handshake, one after the other

	leaves atomic.Bool   // this node ends it
	ended  chan struct{} // closed when it has
	link   atomic.Pointer[tcpSocket]
	at     atomic.Pointer[netip.Addr] // the address that the latest connection leads to

	incarnation uint32        // of the peer; 0: a node of the original
	before      uint32        // of the process that it has replaced
	admitted    atomic.Bool   // this node knows it as the peer
	named       bool          // it knows which process this is
	bundles     bool          // it takes bundles, see bundle.go
	arrives     atomic.Int64  // 1 + the descriptor of the peer's connection to this node's ROUTER on which the last message arrived; 0: there is none
	holding     sync.Mutex    // of changes of holdUntil, and with it of what the socket does
	holdUntil   atomic.Uint64 // the peer has asked for no data until then; 0: it has not
}

// identity is whom a connection serves.
type identity struct {
	id     int
	dest   string // the peer's routing id, for answers over the ROUTER
	self   string // what this node calls itself towards the peer
	viaOwn bool   // data answers to this peer leave over the own ROUTER
}

// isOf tells whether c is the connection to the process that calls itself name.
func (c *conn) isOf(name peerName) bool {
	return c.incarnation == name.incarnation && c.admitted.Load()
}

// address is the address of c's peer. If the peer's record has a name, it is that of the latest connection, and not valid before there was one.
func (c *conn) address() netip.Addr {
	if at := addrOfNode(&c.peer); at.IsValid() {
		return at
	}
	if at := c.at.Load(); at != nil {
		return *at
	}
	return netip.Addr{}
}

// seen reports whether c's peer has a connection to this node's ROUTER.
func (c *conn) seen() bool { return c.arrives.Load() != 0 }

// succeed makes c the connection that takes old's place.
func (c *conn) succeed(old *conn) {
	c.redials.Store(old.redials.Load())
	c.before = old.incarnation
	if c.peer.Hostname == old.peer.Hostname {
		c.at.Store(old.at.Load())
	}
	if c.incarnation == old.incarnation {
		c.before = old.before
		c.admitted.Store(old.admitted.Load())
		return
	}
	c.admitted.Store(false)
}

// connected is told that the DEALER has a connection, of descriptor fd.
func (c *conn) connected(n *shared, fd int) {
	s := tcpSocket{fd: fd}
	var err error
	if s.cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil {
		return // it has gone already
	}
	leads := false // the descriptor may be another connection's by now
	s.use(func(fd int) {
		peer, err := unix.Getpeername(fd)
		if err != nil {
			return
		}
		leads = int(addrOf(peer).Port()) == c.peer.Port
		// The kernel may have given this connection the port of a scheduler that has not started yet. SO_REUSEADDR lets
		// the scheduler listen there all the same. A connection to that port may be connected to itself; it is shut down.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		if own, err := unix.Getsockname(fd); err == nil && addrOf(own) == addrOf(peer) && addrOf(own).IsValid() {
			leads = false
			_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		}
		if at := addrOf(peer).Addr(); leads && at.IsValid() {
			c.at.Store(&at)
		}
	})
	if !leads {
		return
	}
	c.link.Store(&s)
	for has := 0; ; { // behind the Store: SetTrafficClasses looks there behind its own; it may set another meanwhile
		class, _ := n.classOf(c)
		if class == has {
			return
		}
		s.setClass(class)
		has = class
	}
}

// hold makes data for c's peer wait until then.
func (c *conn) hold(until uint64) {
	c.holding.Lock()
	defer c.holding.Unlock()
	if c.holdUntil.Swap(until) == 0 {
		c.sock.hold(true)
	}
}

// goOn lets data for c's peer leave again.
func (c *conn) goOn() { c.goOnAt(math.MaxUint64) }

// goOnAt lets it leave if it was to wait until now at most.
func (c *conn) goOnAt(now uint64) {
	c.holding.Lock()
	defer c.holding.Unlock()
	if until := c.holdUntil.Load(); until != 0 && until <= now {
		c.holdUntil.Store(0)
		c.sock.hold(false)
	}
}
