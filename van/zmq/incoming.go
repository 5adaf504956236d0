package zmq

// The connections that the ROUTER has accepted, as the guard knows them.

import (
	"container/list"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// incoming is a connection that was accepted.
type incoming struct {
	fd     int
	cookie uint64
	since  time.Time  // the time at which it was accepted
	host   netip.Addr // of the peer
	name   peerName   // the sender's name in its messages
	member *conn      // nil: the connection is unauthenticated
	taken  int64      // bytes of the messages that have arrived on it
	held   int64      // bytes received that were not handed up
	ended  bool       // by the guard; libzmq has not noticed yet

	// libzmq has said that the connection of this descriptor has ended, and it is still open:
	// it will be closed, or it is the next connection's already, and the event of that comes.
	gone bool

	line  *strangers    // that counts the connection, nil if none does
	entry *list.Element // in it
}

// uncount takes in out of the number of strangers' connections. g.mu is held.
func (in *incoming) uncount() {
	if in.line != nil {
		in.line.remove(in)
	}
}

// leave takes in, which has ended, out of the account. g.mu is held.
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

// forget forgets in, which has ended. g.mu is held.
func (g *guard) forget(in *incoming) {
	delete(g.conns, in.fd)
	g.leave(in)
}

// shut ends in, a stranger's: libzmq sees the end of it and lets go of what it holds. It is counted first, so that who sees the end
// finds it in the counter. shut returns the peer's address. g.mu is held.
func (g *guard) shut(in *incoming) (from string) {
	g.n.stats.strangers.Add(1)
	g.held -= in.held
	g.ending++
	in.held, in.ended = 0, true
	in.uncount()
	from = "unknown"
	tcpSocket{in.fd, in.cookie}.use(func(fd int) {
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

// ofLocked is of where g.mu is held.
func (g *guard) ofLocked(c *conn) (l []tcpSocket) {
	for _, in := range g.conns {
		if in.member == c && !in.gone {
			l = append(l, tcpSocket{in.fd, in.cookie})
		}
	}
	return l
}
