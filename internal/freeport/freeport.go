// Package freeport finds ports: for schedulers of tests and benchmarks, and for nodes, which
// must not take that of their scheduler.
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

// Processes that start one after another begin far from each other: by the golden ratio.
var ports = struct {
	sync.Mutex
	next int
}{next: os.Getpid() * 6181 % count}

// Find returns a port of the loopback that nobody uses. It is below the range that the kernel assigns
// to connections, and a process gets each only once in 10000 calls, so that nothing takes it by chance before
// the scheduler does.
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

// Except returns the port that bind has bound, which is any free one but avoid. If bind gets avoid, it is called
// again, and what it bound first is released after that.
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
// port. A scheduler there may find its port taken. Reserved ones are not looked for.
func Ephemeral(port int) bool {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	return err == nil && inRange(string(text), port)
}

func inRange(text string, port int) bool {
	var first, last int
	_, err := fmt.Sscan(text, &first, &last)
	return err == nil && first <= port && port <= last
}
