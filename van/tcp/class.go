package tcp

import (
	"net"

	"golang.org/x/sys/unix"
)

// Traffic classes: the DSCP of the packets to a peer.

func (c *outConn) setClass(class int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.gone {
		_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_IP, unix.IP_TOS, class<<2)
		_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, class<<2)
	}
}

func (c *outConn) hasClass(class int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return false
	}
	level, option := unix.IPPROTO_IP, unix.IP_TOS
	if a, err := unix.Getsockname(c.fd); err == nil {
		if a, ok := a.(*unix.SockaddrInet6); ok && net.IP(a.Addr[:]).To4() == nil {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
		}
	}
	tos, err := unix.GetsockoptInt(c.fd, level, option)
	return err == nil && tos>>2 == class
}
