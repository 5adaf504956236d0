package zmq

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// ends searches all descriptors of this process for TCP connections to the port of a node's ROUTER. It returns the
// classes of the connecting ends and of the accepted ends, by descriptor.
func ends(t *testing.T, port int) (connected, accepted map[int]int) {
	t.Helper()
	for {
		var single bool
		if connected, accepted, single = scanEnds(t, port); single {
			return connected, accepted
		}
	}
}

// scanEnds is ends, and reports whether each connection has a single descriptor. The node duplicates descriptors for single
// calls of the system (tcpSocket.use).
func scanEnds(t *testing.T, port int) (connected, accepted map[int]int, single bool) {
	t.Helper()
	connected, accepted, single = map[int]int{}, map[int]int{}, true
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	for _, e := range entries {
		fd, _ := strconv.Atoi(e.Name())
		peer, err := unix.Getpeername(fd)
		if err != nil {
			continue
		}
		own, err := unix.Getsockname(fd)
		p, ok := peer.(*unix.SockaddrInet4)
		o, ok2 := own.(*unix.SockaddrInet4)
		if err != nil || !ok || !ok2 || p.Port != port && o.Port != port {
			continue
		}
		tos, err := unix.GetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS)
		if err != nil {
			continue
		}
		cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		if err != nil {
			continue
		}
		single = single && !seen[cookie]
		seen[cookie] = true
		if p.Port == port {
			connected[fd] = tos >> 2
		} else {
			accepted[fd] = tos >> 2
		}
	}
	return connected, accepted, single
}

// are reports whether m has n connections, all of that class.
func are(m map[int]int, n, class int) bool {
	for _, c := range m {
		if c != class {
			return false
		}
	}
	return len(m) == n
}

func marked(v van.TrafficClassSetter, id int) bool {
	now, _ := v.TrafficClassApplied(id)
	return now
}

// TestClasses: existing and later connections to a peer, and from the peer to this node's ROUTER, get the peer's traffic
// class. Other connections do not.
func TestClasses(t *testing.T) {
	for _, incarnation := range []uint32{0, 7} {
		t.Run(fmt.Sprint("incarnation ", incarnation), func(t *testing.T) {
			var server, worker, other *node
			server = newNode(t, 8, incarnation, nil, nil)
			worker = newNode(t, 9, incarnation, nil, nil)
			other = newNode(t, 11, incarnation, nil, nil)
			server.SetTrafficClasses(map[int]int{11: 3}) // before there is a connection
			if now, ever := server.TrafficClassApplied(11); now || !ever {
				t.Errorf("without a connection: marked %t, ever %t", now, ever)
			}
			for _, w := range []*node{worker, other} {
				link(t, w, server)
				w.must(t, push(8, 1, make([]byte, 100)))
				server.next(t)
			}
			until(t, "the class of another worker", func() bool { return marked(server, 11) })
			until(t, "connections", func() bool { return server.socketsTo(9) == 2 && (*worker.peers.Load())[8].link.Load() != nil })

			// The server's connections to worker 0: its DEALER, and the accepted end at its ROUTER.
			server.SetTrafficClasses(map[int]int{9: 46, 11: 3})
			if !marked(server, 9) {
				t.Error("worker 0 is not marked at once")
			}
			if own, _ := ends(t, worker.self.Port); !are(own, 1, 46) {
				t.Errorf("connections to worker 0 have %v, want 46", own)
			}
			_, accepted := ends(t, server.self.Port)
			if got := slices.Sorted(maps.Values(accepted)); !slices.Equal(got, []int{3, 46}) {
				t.Errorf("the server's accepted connections have %v, want 3 and 46", got)
			}
			// The workers' ends are theirs.
			if theirs, _ := ends(t, server.self.Port); !are(theirs, 2, 0) {
				t.Errorf("the workers' connections have %v, want none", theirs)
			}
			worker.SetTrafficClasses(map[int]int{8: 10})
			theirs, _ := ends(t, server.self.Port)
			if got := slices.Sorted(maps.Values(theirs)); !slices.Equal(got, []int{0, 10}) || !marked(worker, 8) {
				t.Errorf("the workers' connections have %v, want 10 and none", got)
			}

			// A connection that breaks is made again, with the class.
			for fd, class := range theirs {
				if class == 10 {
					if err := unix.Shutdown(fd, unix.SHUT_RDWR); err != nil {
						t.Fatal(err)
					}
				}
			}
			until(t, "the class on the next connection", func() bool {
				worker.must(t, push(8, 2, make([]byte, 100))) // messages identify the owner of the accepted connection
				theirs, _ := ends(t, server.self.Port)
				_, accepted := ends(t, server.self.Port)
				return slices.Equal(slices.Sorted(maps.Values(theirs)), []int{0, 10}) &&
					(incarnation == 0 || slices.Equal(slices.Sorted(maps.Values(accepted)), []int{3, 46}))
			})

			// Taken back.
			server.SetTrafficClasses(nil)
			worker.SetTrafficClasses(nil)
			until(t, "no class", func() bool {
				own, _ := ends(t, worker.self.Port)
				theirs, accepted := ends(t, server.self.Port)
				return are(own, 1, 0) && are(theirs, 2, 0) && are(accepted, len(accepted), 0)
			})
		})
	}
}

// TestClassTakenBack: a class that is taken back while a connection is made does not stay on it.
func TestClassTakenBack(t *testing.T) {
	server, worker := newNode(t, 8, 7, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, worker, server)
	worker.must(t, push(8, 1, make([]byte, 100)))
	server.next(t)
	c := (*worker.peers.Load())[8]
	until(t, "a connection", func() bool { return c.link.Load() != nil })
	s := *c.link.Load()
	for i := range 3000 {
		worker.SetTrafficClasses(map[int]int{8: 46})
		s.setClass(0) // as a connection is when it is made
		var made sync.WaitGroup
		for range 4 {
			made.Go(func() { c.connected(&worker.shared, s.fd) })
		}
		for range i % 300 {
			runtime.Gosched()
		}
		worker.SetTrafficClasses(nil)
		made.Wait()
		if s.hasClass(46) {
			t.Fatalf("round %d: the connection has a class that was taken back", i)
		}
	}
}

// socketsTo is how many sockets lead to a peer.
func (n *node) socketsTo(id int) int {
	c := (*n.peers.Load())[id]
	sockets := len(n.guard.of(c))
	if c.link.Load() != nil {
		sockets++
	}
	return sockets
}

// TestNoClasses: a node that cannot apply a traffic class reports that.
func TestNoClasses(t *testing.T) {
	for name, edit := range map[string]func(*env.Config){
		"unix":     func(c *env.Config) { c.Local = true },
		"no guard": func(c *env.Config) { c.StrangerBudget = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			server, worker := newNode(t, 8, 7, nil, edit), newNode(t, 9, 7, nil, edit)
			link(t, worker, server)
			worker.must(t, push(8, 0, nil)) // the answers leave over the server's ROUTER
			server.next(t).Release()
			server.SetTrafficClasses(map[int]int{9: 46})
			if now, ever := server.TrafficClassApplied(9); now || ever {
				t.Errorf("marked %t, ever %t", now, ever)
			}
			server.SetTrafficClasses(nil)
		})
	}
}
