package zmq

// Traffic classes: the DSCP of the packets to a peer, set on the sockets that libzmq has opened.
// libzmq would set it on later connections only, and one for all on the ROUTER's.

import (
	"net"

	"golang.org/x/sys/unix"
)

// tcpSocket is a descriptor of libzmq's and the socket that it was: it may be closed, and used
// again, at any time.
type tcpSocket struct {
	fd     int
	cookie uint64
}

// use calls f with a descriptor of the socket, if fd still is one.
func (s tcpSocket) use(f func(fd int)) {
	dup, err := unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(dup) }()
	if cookie, err := unix.GetsockoptUint64(dup, unix.SOL_SOCKET, unix.SO_COOKIE); err == nil && cookie == s.cookie {
		f(dup)
	}
}

// setClass sets the class, for IPv6 as well where the socket has it.
func (s tcpSocket) setClass(class int) {
	s.use(func(fd int) {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, class<<2)
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, class<<2)
	})
}

// unacknowledged is how many bytes the peer's system has not acknowledged, 0 also if the socket is gone.
func (s tcpSocket) unacknowledged() (n int) {
	s.use(func(fd int) { n, _ = unix.IoctlGetInt(fd, unix.SIOCOUTQ) })
	return n
}

// hasClass tells whether the socket lives and has the class.
func (s tcpSocket) hasClass(class int) (ok bool) {
	s.use(func(fd int) {
		level, option := unix.IPPROTO_IP, unix.IP_TOS
		if a, err := unix.Getsockname(fd); err == nil {
			if a6, is6 := a.(*unix.SockaddrInet6); is6 && net.IP(a6.Addr[:]).To4() == nil {
				level, option = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
			}
		}
		tos, err := unix.GetsockoptInt(fd, level, option)
		ok = err == nil && tos>>2 == class
	})
	return ok
}

// connected is told that c's DEALER has a connection, of descriptor fd.
func (v *zvan) connected(c *conn, fd int) {
	s := tcpSocket{fd: fd}
	var err error
	if s.cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil {
		return // it has gone already
	}
	leads := false // the descriptor may be another connection's by now
	s.use(func(fd int) {
		if a, err := unix.Getpeername(fd); err == nil {
			_, port, _ := net.SplitHostPort(addrText(a))
			_, want, _ := net.SplitHostPort(c.addr)
			leads = port == want
		}
	})
	if !leads {
		return
	}
	c.link.Store(&s)
	for has := 0; ; { // behind the Store: SetClasses looks there behind its own; it may set another meanwhile
		class, _ := v.classOf(c)
		if class == has {
			return
		}
		s.setClass(class)
		has = class
	}
}

// classOf is the class of what leaves for c, if one is set.
func (v *zvan) classOf(c *conn) (class int, ok bool) {
	if m := v.classes.Load(); m != nil {
		class, ok = (*m)[c.who.Load().id]
	}
	return class, ok
}

// SetClasses implements van.Marker.
func (v *zvan) SetClasses(classes map[int]int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.classes.Swap(&classes)
	for id, c := range *v.peers.Load() {
		class, now := classes[id]
		before := now
		if old != nil && !now {
			_, before = (*old)[id]
		}
		if !before {
			continue
		}
		for _, s := range v.sockets(c) {
			s.setClass(class) // 0: the system's
		}
	}
}

// sockets are those over which messages leave for c: the DEALER's, and, for the answers of a
// server, the ROUTER's.
func (v *zvan) sockets(c *conn) (l []tcpSocket) {
	if s := c.link.Load(); s != nil {
		l = append(l, *s)
	}
	return append(l, v.guard.of(c)...)
}

// Marked implements van.Marker. Unix sockets have no classes, and without the guard nobody knows
// which of the ROUTER's connections is whose.
func (v *zvan) Marked(id int) (now, ever bool) {
	c := (*v.peers.Load())[id]
	if c == nil {
		return false, true
	}
	answers := c.who.Load().viaOwn
	if v.cfg.Local || answers && v.guard == nil {
		return false, false
	}
	class, _ := v.classOf(c)
	s := c.link.Load()
	if s == nil || !s.hasClass(class) {
		return false, true
	}
	accepted := v.guard.of(c)
	for _, s := range accepted {
		if !s.hasClass(class) {
			return false, true
		}
	}
	return len(accepted) > 0 || !answers, true
}

// of lists the connections that c's peer has made to the ROUTER.
func (g *guard) of(c *conn) (l []tcpSocket) {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for fd, in := range g.conns {
		if in.member == c && !in.gone {
			l = append(l, tcpSocket{fd, in.cookie})
		}
	}
	return l
}
