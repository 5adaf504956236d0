package bench

/*
#cgo CFLAGS: -O2 -Wall -Wextra
#include "floor.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"
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

// none is a baseline that is not measured.
type none struct{}

func (none) measure(int) ([]int64, error) { return nil, nil }
func (none) close()                       {}

// newTCPServer starts a server that answers the floor rounds of one client in a thread of its own.
func newTCPServer(push, pull int, touch bool) (*floorServer, error) {
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
					in, out := make([]byte, push), make([]byte, pull)
					return errno(C.floor_serve(C.int(fd), chars(in), C.size_t(push), chars(out), C.size_t(pull), flag(touch)))
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
	errs := make([]error, len(p.all))
	var threads sync.WaitGroup
	for i, x := range p.all {
		start, end := make([]int64, n), make([]int64, n)
		times[i] = [2][]int64{start, end}
		threads.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			errs[i] = x.rounds(gate, n, (*C.int64_t)(unsafe.Pointer(&start[0])), (*C.int64_t)(unsafe.Pointer(&end[0])))
			if errs[i] != nil {
				C.floor_gate_break(gate) // the other pairs end with ECANCELED
			}
		})
	}
	threads.Wait()
	slices.SortStableFunc(errs, func(a, b error) int { return cause(b) - cause(a) })
	if errs[0] != nil {
		return nil, errs[0]
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

// cause orders the errors of pairs: 2 is the error of a failed pair, 1 is the error of a pair that another pair has ended.
func cause(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, syscall.ECANCELED):
		return 1
	}
	return 2
}

// dialed returns the client of a floor with a pair for each address.
func dialed(addrs []string, poll time.Duration, dial func(addr string) (floorPair, error)) (*pairs, error) {
	p := &pairs{poll: poll}
	for _, at := range addrs {
		x, err := dial(at)
		if err != nil {
			p.close()
			return nil, err
		}
		p.all = append(p.all, x)
	}
	return p, nil
}

// floorPoll returns the time for which a thread of a floor with that many pairs polls before it sleeps. Threads that
// share processors do not poll for long.
func floorPoll(pairs int) time.Duration {
	if 2*pairs > runtime.NumCPU() {
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

// dialTCP connects to servers of newTCPServer. The floor of several clients has n pairs.
func dialTCP(addrs []string, n, push, pull int, touch bool) (*pairs, error) {
	return dialed(addrs, floorPoll(n), func(addr string) (floorPair, error) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return nil, err
		}
		return &tcpPair{c.(*net.TCPConn), make([]byte, push), make([]byte, pull), touch}, nil
	})
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
