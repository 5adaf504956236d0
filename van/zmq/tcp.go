package zmq

// The TCP sockets that libzmq has opened.

import (
	"net/netip"

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
	switch err {
	case nil:
		defer func() { _ = unix.Close(dup) }()
	case unix.EMFILE: // to end a connection is then all the more urgent
		dup = s.fd
	default:
		return
	}
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
		if a, err := unix.Getsockname(fd); err == nil && addrOf(a).Addr().Is6() {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
		}
		tos, err := unix.GetsockoptInt(fd, level, option)
		ok = err == nil && tos>>2 == class
	})
	return ok
}

// addrOf is the address of a TCP socket; that of another one is not valid.
func addrOf(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}
