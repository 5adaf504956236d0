package zmq

/*
#cgo pkg-config: libzmq
#cgo CFLAGS: -O2 -Wall -Wextra
#include <stdlib.h>
#include "shim.h"
#cgo noescape sa_send
#cgo nocallback sa_send
#cgo noescape sa_recv
#cgo nocallback sa_recv
*/
import "C"

import (
	"errors"
	"net/netip"
	"os"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// This file owns all calls into C. It sends and receives on the sockets of pebbe/zmq4 directly,
// since the binding's own message calls copy every frame.

// socket is a zmq4 socket. All goroutines may send on it concurrently; one at a time may
// receive. A receiver without a message either sleeps in Go's network poller, without a thread, or
// sleeps in its own thread. The poller watches an epoll instance, which contains the socket's
// descriptor only while the receiver sleeps. Otherwise the poller would also wake a thread for each
// message that a spinning receiver takes.
type socket struct {
	z      *zmq4.Socket
	c      *C.sa_sock
	fd     int // libzmq's
	sleeps sleep
	poll   *os.File // the epoll instance of a socket that sleeps in the poller
	raw    syscall.RawConn
	closed atomic.Bool

	arm           func() bool // armed calls it; set by rest
	armed         func(uintptr) bool
	shown, hidden func(uintptr) // call show

	use sync.RWMutex // read-locked during each call with c; close waits for these calls
}

var errBinding = errors.New("zmq: the zmq4 binding has changed: its Socket or Context no longer begins with the libzmq handle")

// handle returns libzmq's socket inside z. The binding does not export that field, so handle checks its
// offset and type first.
func handle(z *zmq4.Socket) (unsafe.Pointer, error) {
	f, ok := reflect.TypeFor[zmq4.Socket]().FieldByName("soc")
	if !ok || f.Offset != 0 || f.Type.Kind() != reflect.UnsafePointer {
		return nil, errBinding
	}
	return *(*unsafe.Pointer)(unsafe.Pointer(z)), nil
}

// bindThreads binds the I/O threads that ctx will start to cores.
func bindThreads(ctx *zmq4.Context, cores ...int) error {
	f, ok := reflect.TypeFor[zmq4.Context]().FieldByName("ctx")
	if !ok || f.Offset != 0 || f.Type.Kind() != reflect.UnsafePointer {
		return errBinding
	}
	for _, core := range cores {
		if rc := C.zmq_ctx_set(*(*unsafe.Pointer)(unsafe.Pointer(ctx)), C.ZMQ_THREAD_AFFINITY_CPU_ADD, C.int(core)); rc != 0 {
			return syscall.Errno(C.zmq_errno())
		}
	}
	return nil
}

// sleep is how the receiver of a socket waits for messages.
type sleep int

const (
	noReceiver sleep = iota
	inPoller         // in Go's network poller
	inThread         // in its own thread
)

// newSocket wraps z and takes ownership of it, also if it returns an error.
func newSocket(z *zmq4.Socket, sleeps sleep) (*socket, error) {
	h, err := handle(z)
	if err != nil {
		return nil, errors.Join(err, z.Close())
	}
	fd, err := z.GetFd()
	if err != nil {
		return nil, errors.Join(err, z.Close())
	}
	s := &socket{z: z, fd: fd, sleeps: sleeps}
	s.armed = func(ep uintptr) bool {
		arm := s.arm
		if s.arm = nil; arm == nil { // the second call: the descriptor is readable
			return true
		}
		s.show(int(ep), true)
		return arm()
	}
	s.shown = func(ep uintptr) { s.show(int(ep), true) }
	s.hidden = func(ep uintptr) { s.show(int(ep), false) }
	if sleeps == inPoller {
		if err := s.openPoll(); err != nil {
			return nil, errors.Join(err, z.Close())
		}
	}
	if s.c, err = C.sa_sock_new(h, C.int(fd), cBool(sleeps == inThread)); s.c == nil {
		return nil, errors.Join(os.NewSyscallError("eventfd", err), s.closePoll(), z.Close())
	}
	return s, nil
}

// openPoll creates the epoll instance that Go's network poller watches.
func (s *socket) openPoll() error {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	err = os.NewSyscallError("fcntl", unix.SetNonblock(ep, true))
	if err == nil {
		err = os.NewSyscallError("epoll_ctl", unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, s.fd, &unix.EpollEvent{Fd: int32(s.fd)}))
	}
	if err != nil {
		return errors.Join(err, unix.Close(ep))
	}
	s.poll = os.NewFile(uintptr(ep), "zmq")
	if s.raw, err = s.poll.SyscallConn(); err != nil {
		return errors.Join(err, s.poll.Close())
	}
	return nil
}

// show makes ep report the events of s's descriptor, or none. The caller keeps s open.
func (s *socket) show(ep int, on bool) {
	e := unix.EpollEvent{Fd: int32(s.fd)}
	if on {
		e.Events = unix.EPOLLIN
	}
	_ = unix.EpollCtl(ep, unix.EPOLL_CTL_MOD, s.fd, &e) // it was added, and stays while s is open
}

func (s *socket) closePoll() error {
	if s.poll == nil {
		return nil
	}
	return s.poll.Close()
}

// stop makes all present and later calls of wait return at once.
func (s *socket) stop() {
	s.closed.Store(true)
	s.wake()
}

// close closes the socket. libzmq writes queued messages for up to linger; the end of the context waits for that,
// close does not. No receive may be running.
func (s *socket) close(linger time.Duration) error {
	c := s.take()
	if c == nil {
		return nil
	}
	return s.free(c, linger)
}

// leave is close for a connection to another node of this library. It waits up to linger until libzmq has written
// all sent messages and the peer's system has acknowledged them. It drops messages that arrive meanwhile. Two other
// ways to wait do not work:
//
//   - libzmq's linger: libzmq stops reading the connection of a closed socket. Version 4.3.4 then aborts the process at
//     the next heartbeat if the peer disconnects.
//   - The system's linger: when the answer to a heartbeat arrives for a closed socket, the system resets the
//     connection and drops the bytes that it still has to send or to repeat.
func (s *socket) leave(peer *conn, linger time.Duration) error {
	c := s.take()
	if c == nil {
		return nil
	}
	end := time.Now().Add(linger)
	// libzmq releases a message when it has copied it, and writes the copied bytes before it takes further
	// messages. If a first probe after all messages is released, the messages are copied. If a second probe is
	// released, they are written.
	probes := 0
	for !peer.lost.Load() {
		C.sa_discard(c)
		if peer.acct.unsent() == 0 {
			if probes < 2 && peer.up.Load() && C.sa_probe(c, peer.acct.c) == 0 {
				probes++
			} else if link := peer.link.Load(); link == nil || link.unacknowledged() == 0 {
				break
			}
		}
		left := time.Until(end)
		if left <= 0 {
			break
		}
		fds := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
		_, _ = unix.Poll(fds, int(min(left/time.Millisecond, 5))+1) // libzmq does not signal the release of a message
	}
	return s.free(c, 0)
}

// take stops the socket and transfers its C part to the caller, which frees it.
func (s *socket) take() *C.sa_sock {
	s.stop()
	s.use.Lock()
	defer s.use.Unlock()
	c := s.c
	s.c = nil
	return c
}

func (s *socket) free(c *C.sa_sock, linger time.Duration) error {
	C.sa_sock_free(c)
	return errors.Join(s.closePoll(), s.z.SetLinger(linger), s.z.Close())
}

// past is an expired deadline. It wakes a waiting receiver.
var past = time.Unix(1, 0)

// wake makes a waiting receiver poll again.
func (s *socket) wake() {
	s.use.RLock()
	defer s.use.RUnlock()
	s.wakeLocked()
}

// wakeLocked is wake. The caller holds use.
func (s *socket) wakeLocked() {
	switch {
	case s.sleeps == inPoller:
		_ = s.poll.SetReadDeadline(past)
	case s.sleeps == inThread && s.c != nil:
		C.sa_wake(s.c)
	}
}

// wait calls try until it returns true. Between calls it sleeps until the socket may have a
// message. It returns false when the socket is stopped. All calls of wait must pass the same try, to avoid
// allocations. It is for sockets without a thread.
func (s *socket) wait(try func(uintptr) bool) bool {
	_ = s.raw.Control(s.shown)
	for !s.closed.Load() {
		err := s.raw.Read(try)
		switch {
		case err == nil:
			return true
		case errors.Is(err, os.ErrDeadlineExceeded):
			// Reset the deadline before try polls again, so that a later wake is not lost.
			_ = s.poll.SetReadDeadline(time.Time{})
			if s.closed.Load() {
				return false
			}
		default:
			return false
		}
	}
	return false
}

// rest calls arm. If arm returns false, rest sleeps until the socket may have a message or wake is
// called. The caller must not have received since arm's last receive.
func (s *socket) rest(arm func() bool) {
	if s.sleeps == inThread {
		if !arm() {
			s.sleep()
		}
		return
	}
	// Go's network poller drops events from before Read, so arm polls once more inside Read.
	s.arm = arm
	if err := s.raw.Read(s.armed); errors.Is(err, os.ErrDeadlineExceeded) {
		// Reset the deadline before the caller polls again, so that a later wake is not lost.
		_ = s.poll.SetReadDeadline(time.Time{})
	}
	_ = s.raw.Control(s.hidden)
}

// sleep blocks the calling thread until there may be a message, or wake is called.
func (s *socket) sleep() {
	s.use.RLock()
	defer s.use.RUnlock()
	if s.c != nil && !s.closed.Load() {
		C.sa_wait(s.c)
	}
}

// recv receives one message into f. It spins for spin at most. With park, the socket's descriptor signals the
// next message.
func (s *socket) recv(f *frames, spin time.Duration, park bool) (bool, error) {
	s.use.RLock()
	defer s.use.RUnlock()
	if s.c == nil {
		return false, van.ErrClosed
	}
	switch rc := C.sa_recv(s.c, (*C.sa_msg)(f), C.int64_t(spin), cBool(park)); {
	case rc == 1:
		return true, nil
	case rc == 0:
		return false, nil
	default:
		return false, syscall.Errno(-rc)
	}
}

// frames is a received message in libzmq's memory.
type frames C.sa_msg

func newFrames() *frames   { return (*frames)(C.sa_msg_new()) }
func (f *frames) release() { C.sa_msg_close((*C.sa_msg)(f)) }
func (f *frames) free()    { C.sa_msg_free((*C.sa_msg)(f)) }
func (f *frames) len() int { return int(f.n) }

// excess is the number of frames beyond the most that a message may have.
func (f *frames) excess() int { return int(f.extra) }

// probe reports whether f is the empty message that a DEALER sends first, to identify itself.
func (f *frames) probe() bool { return f.n == 2 && f.extra == 0 && f.size[1] == 0 }

// source returns the descriptor of the connection on which f arrived, or -1.
func (f *frames) source() int { return int(C.sa_msg_fd((*C.sa_msg)(f))) }

// host returns the source address of a message that arrived over TCP. Otherwise the result is invalid.
func (f *frames) host() netip.Addr {
	if p := C.sa_msg_host((*C.sa_msg)(f)); p != nil {
		a, _ := netip.ParseAddr(C.GoString(p))
		return a.Unmap()
	}
	return netip.Addr{}
}

// dataLen returns the length of the meta and the first data data frames.
func (f *frames) dataLen(data int) (n int) {
	for i := 1; i < 2+data; i++ {
		n += int(f.size[i])
	}
	return n
}

// wire returns the length of f on a ROUTER's connection, which does not carry the routing id.
func (f *frames) wire() (n int64) {
	for i := 1; i < f.len(); i++ {
		if n += int64(f.size[i]) + 2; f.size[i] > 255 {
			n += 7
		}
	}
	return n + int64(f.surplus)
}

// setWeight records the bytes that f counts while it waits, and whether an unknown process has sent it.
func (f *frames) setWeight(n int, stranger bool) {
	f.weight, f.stranger = C.int64_t(n), cBool(stranger)
}

// weight returns the values that setWeight has recorded for msg.
func weight(msg *van.Message) (n int64, stranger bool) {
	f := (*frames)(msg.Native())
	return int64(f.weight), f.stranger != 0
}

// bytes returns frame i as a view on libzmq's memory, valid until release.
func (f *frames) bytes(i int) []byte {
	return unsafe.Slice((*byte)(f.data[i]), int(f.size[i]))
}

// mem returns frame i as a Mem on libzmq's memory, valid until release.
func (f *frames) mem(i int) backend.Mem {
	return backend.At(f.data[i], int(f.size[i]), backend.Host, nil)
}

// route describes how a message is sent. If dest is not empty, the message is sent to dest over a ROUTER, with
// self as the visible sender.
type route struct {
	dest, self string
	acct       *account // of the peer
	limit      int64    // of acct; 0: none
}

// send hands a copy of msg to libzmq without blocking.
func (s *socket) send(to *route, meta []byte, msg *van.Message) error {
	var f [van.MaxFrames]struct {
		ptr C.uintptr_t
		len C.size_t
	}
	bytes := int64(messageCost + len(meta))
	for i := range msg.Frames {
		m := msg.Frame(i)
		f[i].ptr, f[i].len = C.uintptr_t(uintptr(m.Ptr())), C.size_t(m.Len())
		bytes += int64(m.Len())
	}
	s.use.RLock()
	defer s.use.RUnlock()
	if s.c == nil || s.closed.Load() {
		return van.ErrClosed
	}
	if !to.acct.take(bytes, to.limit) {
		return van.ErrQueueFull
	}
	rc := C.sa_send(s.c, (*C.char)(unsafe.Pointer(unsafe.StringData(to.dest))), C.int(len(to.dest)),
		(*C.char)(unsafe.Pointer(unsafe.StringData(to.self))), C.int(len(to.self)),
		unsafe.Pointer(unsafe.SliceData(meta)), C.size_t(len(meta)), C.int(msg.Frames),
		f[0].ptr, f[0].len, f[1].ptr, f[1].len, f[2].ptr, f[2].len, to.acct.c, C.int64_t(bytes))
	runtime.KeepAlive(msg)
	if rc != 0 { // a failed send may also have consumed the receiver's signal
		s.wakeLocked()
	}
	if rc < 0 {
		return syscall.Errno(-rc)
	}
	if msg.Done != nil {
		msg.Done.Sent()
	}
	return nil
}

func cBool(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

// account counts the unsent bytes of one conn. Its memory in C is freed when Go has no reference to the account, and libzmq has released
// all messages that it counts, which may be long after their connection was closed.
type account struct{ c *C.sa_acct }

// messageCost is the approximate memory of a message besides its bytes: libzmq's parts and allocations.
const messageCost = 1024

func newAccount() *account {
	a := &account{(*C.sa_acct)(C.calloc(1, C.sizeof_sa_acct))}
	a.take(C.SA_OPEN, 0)
	runtime.AddCleanup(a, func(c *C.sa_acct) { C.sa_settle(c, C.SA_OPEN) }, a.c)
	return a
}

// unsent returns the number of unsent bytes.
func (a *account) unsent() int64 { return a.add(0) }

// add adds n bytes and returns the number of unsent bytes.
func (a *account) add(n int64) int64 {
	defer runtime.KeepAlive(a)
	return atomic.AddInt64((*int64)(unsafe.Pointer(&a.c.unsent)), n) - C.SA_OPEN
}

// take adds n bytes, unless the account has limit bytes already (0: no limit). A message of any length is therefore
// accepted while the account is below the limit.
func (a *account) take(n, limit int64) bool {
	if now := a.add(n); limit <= 0 || now-n < limit {
		return true
	}
	a.add(-n)
	return false
}
