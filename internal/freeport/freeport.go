// Package freeport finds free ports: for schedulers of tests and benchmarks, and for nodes. A node
// must not take the port of its scheduler.
package freeport

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
)

const first, count = 10000, 10000

// Processes that start one after another begin at distant ports, spread by the golden ratio.
var ports = struct {
	sync.Mutex
	next int
}{next: os.Getpid() * 6181 % count}

// Find returns a free port of the loopback. The port is below the range that the kernel assigns to connections, and a
// process gets each port only once in 10000 calls, so another process rarely takes it before the scheduler does.
func Find() (int, error) {
	ports.Lock()
	defer ports.Unlock()
	for range count {
		ports.next = (ports.next + 1) % count
		port := first + ports.next
		if l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err == nil {
			return port, l.Close()
		}
	}
	return 0, errors.New("no free port from 10000 to 19999")
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
