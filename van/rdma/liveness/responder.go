//go:build linux && cgo && !nordma

package liveness

/*
#cgo CFLAGS: -O2 -Wall -Wextra
#cgo LDFLAGS: -lpthread
#include "responder.h"
*/
import "C"

import (
	"errors"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants of both Go and C.
var (
	_ [C.SL_SIZE]byte = [size]byte{}
	_ [C.SL_HEAD]byte = [numberAt]byte{}
)

// Responder is the thread that answers for this process, with its socket.
type Responder struct {
	c       *C.sl_responder
	fd, end int
}

// StartResponder begins to answer at that address, for the process with that incarnation.
func StartResponder(at netip.AddrPort, incarnation uint32) (*Responder, error) {
	a := &Responder{fd: -1, end: -1}
	if err := a.open(at); err != nil {
		a.closeFiles()
		return nil, err
	}
	probes, answers := head(probe, incarnation), head(answer, incarnation)
	var why C.int
	a.c = C.sl_start(C.int(a.fd), C.int(a.end), (*C.uint8_t)(unsafe.SliceData(probes)), (*C.uint8_t)(unsafe.SliceData(answers)), &why)
	if a.c == nil {
		a.closeFiles()
		return nil, os.NewSyscallError("pthread_create", syscall.Errno(why))
	}
	return a, nil
}

// open makes the socket, which Go's poller does not watch, and the eventfd that ends the thread.
func (a *Responder) open(at netip.AddrPort) (err error) {
	var addr unix.Sockaddr
	family := unix.AF_INET
	switch ip := at.Addr().Unmap(); {
	case ip.Is4():
		addr = &unix.SockaddrInet4{Port: int(at.Port()), Addr: ip.As4()}
	case ip.Is6():
		zone, _ := strconv.ParseUint(ip.Zone(), 10, 32) // a number, as in package verbs
		family, addr = unix.AF_INET6, &unix.SockaddrInet6{Port: int(at.Port()), Addr: ip.As16(), ZoneId: uint32(zone)}
	default:
		return errors.New("no address")
	}
	if a.end, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return os.NewSyscallError("eventfd", err)
	}
	if a.fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return os.NewSyscallError("socket", err)
	}
	return os.NewSyscallError("bind", unix.Bind(a.fd, addr))
}

func (a *Responder) closeFiles() {
	for _, fd := range []int{a.fd, a.end} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// Close ends the thread. Call it once.
func (a *Responder) Close() {
	C.sl_stop(a.c)
	a.closeFiles()
}
