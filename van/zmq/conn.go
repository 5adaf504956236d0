package zmq

// The connection to one peer, and the node id that it serves.

import (
	"net/netip"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
)

// conn is the state of one peer. Its DEALER is opened when a message needs it; answers may leave over the ROUTER before.
type conn struct {
	who  atomic.Pointer[identity]
	peer van.Node
	to   string  // its address in libzmq's form
	sock *socket // nil: there is no DEALER, see Connect
	mon  *monitor
	rx   *receiver
	acct *account
	up   atomic.Bool // the connection is established
	lost atomic.Bool // it broke and has not been restored

	redials atomic.Int32 // how many attempts in a row have ended with a failed handshake

	leaves atomic.Bool                // this node is closing it
	ended  chan struct{}              // closed when it has ended
	link   atomic.Pointer[tcpSocket]  // the DEALER's TCP socket
	at     atomic.Pointer[netip.Addr] // the peer's address on the latest connection

	incarnation uint32        // of the peer; 0: a node of the original
	before      atomic.Uint32 // the incarnation of the process that the peer has replaced
	admitted    atomic.Bool   // this node knows the process as the peer
	answers     atomic.Int32  // over which socket answers to a native worker leave: undecided, overDealer, overRouter
	arrives     atomic.Int64  // 1 + the descriptor of the peer's connection to this node's ROUTER on which the last message arrived; 0: there is none
}

// identity is the node id that a connection serves, and the names used on it.
type identity struct {
	id           int
	dest         string // the peer's routing id, for answers over the ROUTER
	self         string // this node's routing id toward the peer
	servesWorker bool   // this node is not a worker, and the peer is a worker; see answersOverRouter
}

// Values of conn.answers. Answers to a native worker leave over the ROUTER if one of its requests has arrived there before the first
// answer. Otherwise its requests take another path, and answers leave over the DEALER. This does not change: on another socket, answers
// could overtake earlier ones.
const (
	undecided = iota
	overDealer
	overRouter
)

// answersOverRouter reports whether data answers to the peer leave over this node's ROUTER.
func (c *conn) answersOverRouter() bool {
	return c.who.Load().servesWorker && (c.incarnation == 0 || c.answers.Load() == overRouter)
}

// overRouter reports whether msg, which is about to be sent, leaves over this node's ROUTER. The first answer decides for all.
func (c *conn) overRouter(msg *van.Message) bool {
	if msg.Request || msg.IsControl() || msg.SimpleApp {
		return false
	}
	if c.answers.Load() == undecided {
		c.answers.CompareAndSwap(undecided, overDealer)
	}
	return c.answersOverRouter()
}

// isOf reports whether c is the connection to the process that name identifies.
func (c *conn) isOf(name peerName) bool {
	return c.incarnation == name.incarnation && c.admitted.Load()
}

// address returns the address of c's peer. If the peer's record has a host name, it returns the address of the latest
// connection; it is invalid before the first connection.
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

// succeed makes c the replacement of old.
func (c *conn) succeed(old *conn) {
	c.redials.Store(old.redials.Load())
	c.before.Store(old.incarnation)
	if c.peer.Hostname == old.peer.Hostname {
		c.at.Store(old.at.Load())
	}
	if c.incarnation == old.incarnation {
		c.before.Store(old.before.Load())
		c.admitted.Store(old.admitted.Load())
		c.answers.Store(old.answers.Load())
		return
	}
	c.admitted.Store(false)
}

// connected records that the DEALER has a new connection with descriptor fd.
func (c *conn) connected(n *shared, fd int) {
	s := tcpSocket{fd, cookieOf(fd)}
	leads := false // stays false if the connection is closed already, also if another one has reused the descriptor
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
	// The class is read after link is stored: SetTrafficClasses stores the classes first and then reads link, so one of
	// the two sees the other's change. The loop ends when the class has not changed meanwhile.
	for has := 0; ; {
		class, _ := n.classOf(c)
		if class == has {
			return
		}
		s.setClass(class)
		has = class
	}
}
