//go:build linux && cgo && !nordma

package beat

/*
#cgo CFLAGS: -O2 -Wall -Wextra
#cgo LDFLAGS: -lpthread
#include "answer.h"
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

// Both sides use these.
var (
	_ [C.SB_SIZE]byte = [size]byte{}
	_ [C.SB_HEAD]byte = [numberAt]byte{}
)

// Answerer is the thread that answers for this process, and its socket.
type Answerer struct {
	c       *C.sb_answerer
	fd, end int
}

// Answer begins to answer at that address, as the process with that incarnation.
func Answer(at netip.AddrPort, incarnation uint32) (*Answerer, error) {
	a := &Answerer{fd: -1, end: -1}
	if err := a.open(at); err != nil {
		a.closeFiles()
		return nil, err
	}
	asks, answers := head(question, incarnation), head(answer, incarnation)
	var why C.int
	a.c = C.sb_start(C.int(a.fd), C.int(a.end), (*C.uint8_t)(unsafe.SliceData(asks)), (*C.uint8_t)(unsafe.SliceData(answers)), &why)
	if a.c == nil {
		a.closeFiles()
		return nil, os.NewSyscallError("pthread_create", syscall.Errno(why))
	}
	return a, nil
}

// open makes the socket, which Go's poller is not to watch, and what ends the thread.
func (a *Answerer) open(at netip.AddrPort) (err error) {
	var addr unix.Sockaddr
	family := unix.AF_INET
	switch ip := at.Addr().Unmap(); {
	case ip.Is4():
		addr = &unix.SockaddrInet4{Port: int(at.Port()), Addr: ip.As4()}
	case ip.Is6():
		zone, _ := strconv.ParseUint(ip.Zone(), 10, 32) // a number, as package verbs has it
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

func (a *Answerer) closeFiles() {
	for _, fd := range []int{a.fd, a.end} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// Close ends the thread, once.
func (a *Answerer) Close() {
	C.sb_stop(a.c)
	a.closeFiles()
}
