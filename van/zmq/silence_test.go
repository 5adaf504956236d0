package zmq

import (
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// patience is TCP_USER_TIMEOUT of both ends of the connections to a node's ROUTER: of the connecting ends and of
// the accepted ends.
func patience(t *testing.T, port int) (connected, accepted []time.Duration) {
	t.Helper()
	of := func(fds map[int]int) (l []time.Duration) {
		for fd := range maps.Keys(fds) {
			ms, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
			if err != nil {
				t.Fatal(err)
			}
			l = append(l, time.Duration(ms)*time.Millisecond)
		}
		slices.Sort(l)
		return l
	}
	c, a := ends(t, port)
	return of(c), of(a)
}

// TestUnacknowledgedData: if data is not acknowledged for as long as a node may be silent, the TCP connection
// ends, at both ends, each by its own node's limit. The same holds for the next connection. A node of the original
// may stay silent: its connections have the system's timeout, as have all connections without heartbeats.
func TestUnacknowledgedData(t *testing.T) {
	const server, worker = 3 * time.Second, 4500 * time.Millisecond
	beats := func(limit time.Duration) func(*env.Config) {
		return func(c *env.Config) { c.HeartbeatInterval, c.HeartbeatTimeout = limit/3, limit }
	}
	silent := beats(0)
	defaults := func(c *env.Config) { c.HeartbeatInterval, c.HeartbeatTimeout = -1, -1 }
	for _, x := range []struct {
		name           string
		server, worker func(*env.Config)
		incarnations   [2]uint32 // of the server, of the worker
		want           [2]time.Duration
	}{
		{"both of this library", beats(server), beats(worker), [2]uint32{5, 7}, [2]time.Duration{server, worker}},
		{"default", defaults, defaults, [2]uint32{5, 7}, [2]time.Duration{10 * time.Second, 10 * time.Second}},
		{"no heartbeats", silent, silent, [2]uint32{5, 7}, [2]time.Duration{}},
		{"one without heartbeats", silent, beats(worker), [2]uint32{5, 7}, [2]time.Duration{0, worker}},
		{"worker of the original", beats(server), beats(worker), [2]uint32{5, 0}, [2]time.Duration{}},
		{"server of the original", beats(server), beats(worker), [2]uint32{0, 7}, [2]time.Duration{}},
	} {
		t.Run(x.name, func(t *testing.T) {
			s, w := newNode(t, 8, x.incarnations[0], nil, x.server), newNode(t, 9, x.incarnations[1], nil, x.worker)
			link(t, s, w)
			are := func(connected, accepted time.Duration, n *node) bool {
				c, a := patience(t, n.self.Port)
				return slices.Equal(c, []time.Duration{connected}) && slices.Equal(a, []time.Duration{accepted})
			}
			w.must(t, push(8, 1, make([]byte, 100)))
			s.next(t)
			s.must(t, heartbeat(9, 1)) // over its own connection
			w.next(t)
			if !are(x.want[1], x.want[0], s) || !are(x.want[0], x.want[1], w) {
				sc, sa := patience(t, s.self.Port)
				wc, wa := patience(t, w.self.Port)
				t.Fatalf("the worker's connection has %v at its end and %v at the server's, the server's %v and %v; want %v at the server's ends, %v at the worker's",
					sc, sa, wc, wa, x.want[0], x.want[1])
			}
			c := (*w.peers.Load())[8]
			until(t, "connection", func() bool { return c.link.Load() != nil })
			broken := *c.link.Load()
			broken.use(func(fd int) { _ = unix.Shutdown(fd, unix.SHUT_RDWR) })
			until(t, "the same on the next connection", func() bool {
				w.must(t, push(8, 2, make([]byte, 100))) // messages identify the owner of the accepted connection
				now := c.link.Load()
				return now != nil && now.cookie != broken.cookie && are(x.want[1], x.want[0], s)
			})
		})
	}
}

// TestDescriptors: a connection of two nodes uses 13 descriptors of both nodes together: in each direction two TCP sockets, the queue of
// the DEALER, and three for its monitor. One more is the epoll instance with which the worker reads its DEALER.
func TestDescriptors(t *testing.T) {
	const peers = 4
	server := newNode(t, 8, 5, nil, nil)
	var workers []*node
	for i := range peers {
		workers = append(workers, newNode(t, van.WorkerID(i), uint32(7+i), nil, nil))
	}
	before := descriptors(t)
	for _, w := range workers {
		link(t, server, w)
		w.must(t, push(8, 0, nil))
		server.next(t).Release()
		server.must(t, heartbeat(w.self.ID, 0))
		w.next(t).Release()
	}
	until(t, "13 descriptors for each", func() bool { return descriptors(t)-before <= 13*peers })
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}
