package zmq

// The guard's records of the connections that the ROUTER has accepted.

import (
	"container/list"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// incoming is an accepted connection.
type incoming struct {
	tcpSocket
	since   time.Time  // the time at which it was accepted
	host    netip.Addr // of the peer
	name    peerName   // the sender's name in its messages
	member  *conn      // nil: the connection is unauthenticated
	heardAt uint64     // guard.mon.tries when the first message arrived
	taken   int64      // bytes of the messages that have arrived on it
	held    int64      // bytes received that were not handed up
	ended   bool       // the guard has shut it down, and libzmq has not noticed yet

	// libzmq has reported that the connection of this descriptor has ended, but the descriptor is open: libzmq
	// will close it, or it belongs to the next connection already, whose event follows.
	gone bool

	line  *connSet      // the set that counts the connection, or nil
	entry *list.Element // its entry in that set
}

// uncount removes in from the count of unauthenticated connections. The caller holds g.mu.
func (in *incoming) uncount() {
	if in.line != nil {
		in.line.remove(in)
	}
}

// leave takes the ended connection in out of all counts. The caller holds g.mu.
func (g *guard) leave(in *incoming) {
	g.held -= in.held
	if in.ended && !in.gone {
		g.ending--
	}
	in.held, in.gone = 0, true
	in.uncount()
	if c := in.member; c != nil {
		c.arrives.Store(0)
		for _, s := range g.ofLocked(c) {
			c.arrives.Store(int64(s.fd) + 1)
		}
	}
}

// forget deletes the record of the ended connection in. The caller holds g.mu.
func (g *guard) forget(in *incoming) {
	delete(g.conns, in.fd)
	g.leave(in)
}

// shut shuts down the unauthenticated connection in and returns its peer's address. libzmq then sees the end of the connection and
// frees its memory. The counter is incremented first, so that it is correct as soon as the peer sees the end. The caller
// holds g.mu.
func (g *guard) shut(in *incoming) (from string) {
	g.n.stats.strangers.Add(1)
	g.held -= in.held
	g.ending++
	in.held, in.ended = 0, true
	in.uncount()
	from = "unknown"
	in.use(func(fd int) {
		if a, err := unix.Getpeername(fd); err == nil {
			from = addrOf(a).String()
		}
		_ = unix.Shutdown(fd, unix.SHUT_RDWR)
	})
	return from
}

// of lists the connections that c's peer has made to the ROUTER.
func (g *guard) of(c *conn) (l []tcpSocket) {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.ofLocked(c)
}

// ofLocked is of. The caller holds g.mu.
func (g *guard) ofLocked(c *conn) (l []tcpSocket) {
	for _, in := range g.conns {
		if in.member == c && !in.gone {
			l = append(l, in.tcpSocket)
		}
	}
	return l
}
