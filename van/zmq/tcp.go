package zmq

// The TCP sockets that libzmq has opened.

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// tcpSocket is a descriptor of libzmq and the cookie of its socket. libzmq may close and reuse the descriptor
// at any time.
type tcpSocket struct {
	fd     int
	cookie uint64
}

// cookieOf returns the cookie of the socket with descriptor fd, 0 if fd is no socket.
func cookieOf(fd int) uint64 {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return 0
	}
	return cookie
}

// is reports whether the descriptor refers to the socket now.
func (s tcpSocket) is() bool { return s.cookie != 0 && cookieOf(s.fd) == s.cookie }

// use calls f with a descriptor of the socket, if fd still refers to it.
func (s tcpSocket) use(f func(fd int)) {
	dup, err := unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 0)
	switch err {
	case nil:
		defer func() { _ = unix.Close(dup) }()
	case unix.EMFILE: // closing a connection is then all the more urgent
		dup = s.fd
	default:
		return
	}
	if (tcpSocket{dup, s.cookie}).is() {
		f(dup)
	}
}

// setClass sets the traffic class, for IPv6 as well if the socket supports it.
func (s tcpSocket) setClass(class int) {
	s.use(func(fd int) {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, class<<2)
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, class<<2)
	})
}

// unacknowledged returns the number of bytes that the peer's system has not acknowledged, 0 if the socket is closed.
func (s tcpSocket) unacknowledged() (n int) {
	s.use(func(fd int) { n, _ = unix.IoctlGetInt(fd, unix.SIOCOUTQ) })
	return n
}

// hasClass reports whether the socket is open and has the class.
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

// addrOf returns the address of a TCP socket. For other sockets it returns an invalid address.
func addrOf(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}
