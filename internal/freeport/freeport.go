// Package freeport finds ports for schedulers of tests and benchmarks.
package freeport

import (
	"errors"
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
