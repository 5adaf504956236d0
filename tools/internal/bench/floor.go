package bench

/*
#cgo CFLAGS: -O2 -Wall -Wextra
#include "floor.h"
*/
import "C"

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"syscall"
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

// tcpClient measures rounds.
type tcpClient struct {
	c          *net.TCPConn
	push, pull []byte
	touch      bool
}

func dialTCP(addr string, push, pull int, touch bool) (*tcpClient, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &tcpClient{c.(*net.TCPConn), make([]byte, push), make([]byte, pull), touch}, nil
}

func (f *tcpClient) close() { _ = f.c.Close() }

// measure does n rounds and returns the nanoseconds of each.
func (f *tcpClient) measure(n int) ([]int64, error) {
	ns := make([]int64, n)
	if n == 0 {
		return ns, nil
	}
	err := withBlocking(f.c, func(fd int) error {
		return errno(C.floor_measure(C.int(fd), chars(f.push), C.size_t(len(f.push)), chars(f.pull), C.size_t(len(f.pull)),
			C.int(n), flag(f.touch), (*C.int64_t)(unsafe.Pointer(&ns[0]))))
	})
	return ns, err
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
