package zmq

// A pause between new connections. libzmq accepts connections faster than it does their handshakes: in a flood they would take all
// descriptors, and messages would wait behind thousands of handshakes.

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// listener is the descriptor of libzmq's socket that listens at port, -1 if there is none.
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

// endingMost is how many connections that the guard has ended libzmq may still have, before new ones wait.
const endingMost = 256

// pause makes the system drop what arrives at the listening socket while libzmq has too many connections that were ended. The systems of peers
// try again, after 1 s first. g.mu is held.
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
