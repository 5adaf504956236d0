package core

// The descriptors that a forked child must close.

import (
	"context"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// File is a descriptor with the identity of its inode, by which a child can check that the
// descriptor is still the same file.
type File struct {
	FD          int
	Device, Num uint64 // of the inode
}

// Files lists the descriptors by which peers notice that this process has ended: its
// connections and the sockets at which it listens. A forked child inherits them, and while
// it keeps them open the connections do not end.
func (s *Session) Files() []File {
	port, peers := s.node.App().Addresses()
	return filesOf(ownSockets(port, peers))
}

// filesOf lists the sockets of this process for which ours is true, and its RDMA devices.
func filesOf(ours func(fd int) bool) []File {
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil
	}
	var files []File
	for _, e := range dir {
		var st unix.Stat_t
		fd, err := strconv.Atoi(e.Name())
		if err != nil || unix.Fstat(fd, &st) != nil {
			continue // that of the directory itself
		}
		device := strings.HasPrefix(link(e.Name()), "/dev/infiniband/")
		if device || st.Mode&unix.S_IFMT == unix.S_IFSOCK && ours(fd) {
			files = append(files, File{fd, st.Dev, st.Ino})
		}
	}
	return files
}

func link(fd string) string {
	to, _ := os.Readlink("/proc/self/fd/" + fd)
	return to
}

// lookUpTime limits the look-up of peers' host names before a fork.
const lookUpTime = time.Second

// ownSockets tells which sockets are of a node that listens at port and is connected to
// peers: those with its port, those connected to one of them, and those of transports
// within the host, which have names of their own.
func ownSockets(port int, peers []string) func(fd int) bool {
	ctx, cancel := context.WithTimeout(context.Background(), lookUpTime)
	defer cancel()
	at := map[netip.AddrPort]bool{}
	names := map[string]bool{"/tmp/" + strconv.Itoa(port): true} // DMLC_LOCAL
	for _, p := range peers {
		host, service, err := net.SplitHostPort(p)
		n, err2 := strconv.ParseUint(service, 10, 16)
		if err != nil || err2 != nil {
			continue
		}
		names["/tmp/"+service] = true
		addrs, _ := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		for _, a := range addrs {
			at[netip.AddrPortFrom(a.Unmap().WithZone(""), uint16(n))] = true
		}
	}
	return func(fd int) bool {
		own, _ := unix.Getsockname(fd)
		other, _ := unix.Getpeername(fd)
		for _, s := range []unix.Sockaddr{own, other} {
			if u, ok := s.(*unix.SockaddrUnix); ok && (strings.HasPrefix(u.Name, "@stepaf-") || names[u.Name]) {
				return true
			}
		}
		kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
		return err == nil && kind == unix.SOCK_STREAM && (int(addrPort(own).Port()) == port || at[addrPort(other)])
	}
}

// addrPort returns the zero value for other kinds of addresses.
func addrPort(s unix.Sockaddr) netip.AddrPort {
	switch s := s.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), uint16(s.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(s.Addr).Unmap(), uint16(s.Port))
	}
	return netip.AddrPort{}
}
