// Package freeport finds free ports: for schedulers of tests and benchmarks, and for nodes. A node
// must not take the port of its scheduler.
package freeport

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	first, count = 10000, 10000
	blockLen     = 250
	blocks       = count / blockLen
)

// ports are the ports of this process. A block of them is its own: otherwise another process could find a port that this one has
// found, before the scheduler has bound it.
var ports struct {
	sync.Mutex
	claimed          bool
	first, len, next int
}

// claim takes a free block for this process until fd is closed: no other process can bind a socket to the same name.
// tests/python/harness.py claims its blocks so, too. If no block is free, claim returns all ports and no fd.
func claim(name string) (firstPort, n, fd int) {
	for i := range blocks {
		block := (os.Getpid()*17 + i) % blocks
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			break
		}
		if unix.Bind(fd, &unix.SockaddrUnix{Name: fmt.Sprintf("@%s-%d", name, block)}) == nil {
			return first + block*blockLen, blockLen, fd
		}
		_ = unix.Close(fd)
	}
	return first, count, -1
}

// Find returns a free port of the loopback. The port is below the range that the kernel assigns to connections, and another
// process that calls Find gets a different one while this process runs.
func Find() (int, error) {
	ports.Lock()
	defer ports.Unlock()
	if !ports.claimed {
		ports.first, ports.len, _ = claim("stepaf-ports") // until the process ends
		ports.claimed = true
	}
	for range ports.len {
		ports.next = (ports.next + 1) % ports.len
		port := ports.first + ports.next
		if l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err == nil {
			return port, l.Close()
		}
	}
	return 0, fmt.Errorf("no free port from %d to %d", ports.first, ports.first+ports.len-1)
}

// Except calls bind, and returns the port that bind has bound: any free port but avoid. If bind gets avoid, Except calls it
// again, and releases avoid after that.
func Except(avoid int, bind func() (port int, release func(), err error)) (int, error) {
	port, release, err := bind()
	if err != nil || port != avoid {
		return port, err
	}
	defer release()
	port, _, err = bind()
	return port, err
}

// Ephemeral reports whether the kernel may give the port to a connection or to a node that asks for any
// port. A scheduler with such a port may find it in use. Ephemeral ignores reserved ports.
func Ephemeral(port int) bool {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	return err == nil && inRange(string(text), port)
}

func inRange(text string, port int) bool {
	var first, last int
	_, err := fmt.Sscan(text, &first, &last)
	return err == nil && first <= port && port <= last
}
