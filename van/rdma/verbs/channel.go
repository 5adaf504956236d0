//go:build linux && cgo && !nordma

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// channel waits for events in Go's network poller. It polls a duplicate of the descriptor, since os.File and librdmacm both close theirs.
type channel struct {
	s      *stack
	poll   *os.File
	raw    syscall.RawConn
	closed atomic.Bool
	next   sync.Mutex // held by Next

	mu   sync.Mutex
	c    *C.sv_chan // nil: closed
	ids  int
	devs map[C.uintptr_t]*device
}

// NewChannel opens an event channel. The error wraps ErrUnavailable if RDMA cannot be used here.
func (s *stack) NewChannel() (Channel, error) {
	if err := s.diagnose(nil); err != nil {
		return nil, err
	}
	var rc C.int
	c := C.sv_chan_new(s.c, &rc)
	if c == nil {
		return nil, s.diagnose(failure(rc, "create an event channel", "", ""))
	}
	fd, err := syscall.Dup(int(C.sv_chan_fd(c)))
	if err != nil {
		C.sv_chan_free(c)
		return nil, os.NewSyscallError("dup", err)
	}
	syscall.CloseOnExec(fd)
	ch := &channel{s: s, c: c, poll: os.NewFile(uintptr(fd), "rdma_cm"), devs: map[C.uintptr_t]*device{}}
	if ch.raw, err = ch.poll.SyscallConn(); err != nil {
		return nil, errors.Join(err, ch.Close())
	}
	return ch, nil
}

// Next waits for the next event. After Close it returns ErrClosed.
func (ch *channel) Next() (Event, error) {
	ch.next.Lock()
	defer ch.next.Unlock()
	ev := new(C.sv_event)
	var rc C.int
	err := ch.raw.Read(func(uintptr) bool {
		if ch.closed.Load() {
			rc = C.SV_ESTALE
			return true
		}
		rc = C.sv_next(ch.c, ev)
		return rc != C.int(syscall.EAGAIN)
	})
	switch {
	case err != nil && ch.closed.Load():
		rc = C.SV_ESTALE
	case err != nil:
		return Event{}, fmt.Errorf("rdma: wait for an event: %w", err)
	}
	if rc != 0 {
		return Event{}, failure(rc, "wait for an event", "", "")
	}
	e := Event{Type: EventType(ev._type), Status: int(ev.status), Cookie: uint64(ev.cookie), Peer: fromAddr(&ev.peer)}
	if n := int(ev.private_len); n > 0 {
		e.Private = append(e.Private, unsafe.Slice((*byte)(&ev.private_data[0]), n)...)
	}
	if ev.fresh != nil {
		e.New = ch.own(ev.fresh)
	}
	return e, nil
}

// NewID makes an ID.
func (ch *channel) NewID(cookie uint64) (ID, error) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if ch.c == nil || ch.closed.Load() {
		return nil, failure(C.SV_ESTALE, "create an ID", "", "")
	}
	var rc C.int
	c := C.sv_id_new(ch.c, C.uint64_t(cookie), &rc)
	if c == nil {
		return nil, failure(rc, "create an ID", "", "")
	}
	ch.ids++
	return &id{ch: ch, c: c}, nil
}

func (ch *channel) own(c *C.sv_id) *id {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	ch.ids++
	return &id{ch: ch, c: c}
}

// Close ends Next and releases everything. If IDs or memory regions are left, the error names them, and Close can be called again when they
// are released. A second Close does nothing.
func (ch *channel) Close() error {
	ch.closed.Store(true)
	err := ch.poll.Close()
	if errors.Is(err, os.ErrClosed) {
		err = nil
	}
	ch.next.Lock() // wait until Next has returned
	defer ch.next.Unlock()
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if ch.c == nil {
		return err
	}
	if ch.ids > 0 {
		return errors.Join(err, fmt.Errorf("rdma: close the event channel: %d IDs have not been destroyed", ch.ids))
	}
	for k, d := range ch.devs {
		if derr := d.close(); derr != nil {
			return errors.Join(err, derr)
		}
		delete(ch.devs, k)
	}
	C.sv_chan_free(ch.c)
	ch.c = nil
	return err
}

// device returns the device of c. It opens the device for the first ID on it.
func (ch *channel) device(c *C.sv_id) (*device, error) {
	key := C.sv_id_context(c)
	if key == 0 {
		return nil, errors.New("rdma: the ID has no device yet: its address must be resolved, or bound to a device's")
	}
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if d := ch.devs[key]; d != nil {
		return d, nil
	}
	d, err := newDevice(ch.s, c)
	if err == nil {
		ch.devs[key] = d
	}
	return d, err
}
