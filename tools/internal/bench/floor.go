package bench

/*
#cgo CFLAGS: -O2 -Wall -Wextra
#include "floor.h"
*/
import "C"

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van/backend"
)

// baseline is the client of a floor.
type baseline interface {
	// measure does n rounds and returns the nanoseconds of each.
	measure(n int) ([]int64, error)
	close()
}

// floorServer is the server of a floor.
type floorServer struct {
	addr  string
	ended chan struct{} // closed when the server has ended; nil for TCP
	close func()
}

// serving runs serve on a goroutine. close of the server calls stop, waits until serve has returned, and then calls free.
func serving(addr string, serve, stop, free func()) *floorServer {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		serve()
	}()
	return &floorServer{addr, ended, func() {
		stop()
		<-ended
		free()
	}}
}

// floors describes the baselines of a push_pull.
type floors struct {
	push, pull int
	touch      bool // every byte is read and written between rounds
	bare       bool // libzmq alone is measured, too
	shared     bool // through shared memory instead of TCP
	clients    int  // of each server
	pairs      int  // of all clients and servers
}

// onGPU reports whether the node's tensors are on a GPU.
func onGPU(node *postoffice.Node) bool { return node.Backend().Device().Type == backend.GPU }

// libzmqAlone reports whether a benchmark of a node also measures libzmq alone.
func libzmqAlone(node *postoffice.Node) bool {
	return node.Config().VanType == zmq && node.Config().EnableIPC == 0 && !onGPU(node)
}

// floorKind creates both ends of a floor.
type floorKind interface {
	serve() (*floorServer, error)
	// dial connects a client to servers. Only the kinds tcpFloor, sharedFloor and deviceFloor connect to several.
	dial(addrs []string) (baseline, error)
}

// kinds returns the floors that a node measures: the floor, and if x.bare is set libzmq alone.
func (x floors) kinds(node *postoffice.Node) ([]floorKind, error) {
	all := []floorKind{tcpFloor{x}}
	switch {
	case onGPU(node):
		all[0] = deviceFloor{x, node.Backend()}
	case node.Config().VanType == ibverbs:
		host, err := netip.ParseAddr(node.Config().NodeHost)
		if err != nil {
			return nil, err
		}
		all[0] = verbsFloor{x, host}
	case x.shared:
		all[0] = sharedFloor{x, node.Rank()}
	}
	if x.bare {
		all = append(all, zmqFloor{x})
	}
	return all, nil
}

// tcpFloor is the floor over TCP on loopback.
type tcpFloor struct{ floors }

// serve starts a server that answers the rounds of each client in a thread of its own.
func (x tcpFloor) serve() (*floorServer, error) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				_ = withBlocking(c, func(fd int) error {
					in, out := make([]byte, x.push), make([]byte, x.pull)
					return errno(C.floor_serve(C.int(fd), chars(in), C.size_t(x.push), chars(out), C.size_t(x.pull), flag(x.touch)))
				})
			}()
		}
	}()
	return &floorServer{addr: l.Addr().String(), close: func() { _ = l.Close() }}, nil
}

// floorPair is the client's end of one connection of a floor.
type floorPair interface {
	// rounds does n rounds in a thread of its own, each after the gate, and stores when each starts and ends.
	rounds(gate *C.struct_floor_gate, n int, start, end *C.int64_t) error
	close()
}

// pairs is the client of a floor with one or several servers. It makes the rounds of all servers at once.
type pairs struct {
	all  []floorPair
	poll time.Duration // a wait polls for this time before it sleeps
}

func (p *pairs) close() {
	for _, x := range p.all {
		x.close()
	}
}

// measure does n rounds and returns the nanoseconds of each, from the first start to the last end of its pairs.
func (p *pairs) measure(n int) ([]int64, error) {
	ns := make([]int64, n)
	if n == 0 {
		return ns, nil
	}
	gate := &C.struct_floor_gate{peers: C.uint32_t(len(p.all)), poll: C.int64_t(p.poll)}
	times := make([][2][]int64, len(p.all))
	var first error // others follow from it
	var failed sync.Once
	var threads sync.WaitGroup
	for i, x := range p.all {
		start, end := make([]int64, n), make([]int64, n)
		times[i] = [2][]int64{start, end}
		threads.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if err := x.rounds(gate, n, (*C.int64_t)(unsafe.Pointer(&start[0])), (*C.int64_t)(unsafe.Pointer(&end[0]))); err != nil {
				failed.Do(func() { first = err })
				C.floor_gate_break(gate) // the other pairs end with ECANCELED
			}
		})
	}
	threads.Wait()
	if first != nil {
		return nil, first
	}
	for i := range ns {
		first, last := times[0][0][i], times[0][1][i]
		for _, t := range times[1:] {
			first, last = min(first, t[0][i]), max(last, t[1][i])
		}
		ns[i] = last - first
	}
	return ns, nil
}

// dialAll connects to each address. After an error it closes the connections.
func dialAll[T interface{ close() }](addrs []string, dial func(addr string) (T, error)) (all []T, err error) {
	for _, at := range addrs {
		x, err := dial(at)
		if err != nil {
			for _, x := range all {
				x.close()
			}
			return nil, err
		}
		all = append(all, x)
	}
	return all, nil
}

// poll returns the time for which a thread of a floor polls before it sleeps. Threads that share processors do not poll
// for long.
func (x floors) poll() time.Duration {
	if 2*x.pairs > runtime.NumCPU() {
		return 20 * time.Microsecond
	}
	return time.Millisecond
}

// tcpPair is a connection over TCP.
type tcpPair struct {
	c          *net.TCPConn
	push, pull []byte
	touch      bool
}

func (x tcpFloor) dial(addrs []string) (baseline, error) {
	all, err := dialAll(addrs, func(addr string) (floorPair, error) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return nil, err
		}
		return &tcpPair{c.(*net.TCPConn), make([]byte, x.push), make([]byte, x.pull), x.touch}, nil
	})
	return &pairs{all, x.poll()}, err
}

func (f *tcpPair) close() { _ = f.c.Close() }

func (f *tcpPair) rounds(gate *C.struct_floor_gate, n int, start, end *C.int64_t) error {
	return withBlocking(f.c, func(fd int) error {
		return errno(C.floor_measure(C.int(fd), chars(f.push), C.size_t(len(f.push)), chars(f.pull), C.size_t(len(f.pull)),
			C.int(n), flag(f.touch), gate, start, end))
	})
}

// withBlocking runs f on a blocking duplicate of the connection's descriptor, on a thread of its own.
func withBlocking(c *net.TCPConn, f func(fd int) error) error {
	file, err := c.File()
	if err != nil {
		return err
	}
	defer file.Close()
	fd := int(file.Fd())
	if err := syscall.SetNonblock(fd, false); err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return f(fd)
}

func errno(n C.int) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("floor: %w", syscall.Errno(n))
}

// chars returns a pointer to b for C.
func chars(b []byte) *C.char { return (*C.char)(unsafe.Pointer(unsafe.SliceData(b))) }

// flag returns a bool for C.
func flag(on bool) C.int {
	if on {
		return 1
	}
	return 0
}
