package zmq

// A pause between new connections. libzmq accepts connections faster than it completes their handshakes. In a flood, connections
// would use up all descriptors, and messages would wait for thousands of handshakes.

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// listener returns the descriptor of libzmq's socket that listens at port, or -1.
func listener(port int) int {
	l, _ := os.ReadDir("/proc/self/fd")
	for _, e := range l {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || on == 0 {
			continue
		}
		if a, err := unix.Getsockname(fd); err == nil && int(addrOf(a).Port()) == port {
			return fd
		}
	}
	return -1
}

// endingMost limits the connections that the guard has shut down and libzmq has not closed yet. Above it, new connections wait.
const endingMost = 256

// pause makes the system drop packets to the listening socket while more than endingMost connections are shut down and not closed.
// The peers' systems retry, first after 1 s. The caller holds g.mu.
func (g *guard) pause() {
	switch {
	case g.listens < 0:
	case g.ending > endingMost && !g.paused:
		drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
		g.paused = unix.SetsockoptSockFprog(g.listens, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop}) == nil
	case g.ending < endingMost/2 && g.paused:
		g.paused = unix.SetsockoptInt(g.listens, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) != nil
	}
}
