//go:build linux && cgo && !nordma

package verbs

/*
#include "shim.h"
#cgo noescape sv_post
#cgo nocallback sv_post
#cgo noescape sv_poll
#cgo nocallback sv_poll
#cgo noescape sv_wake
#cgo nocallback sv_wake
*/
import "C"

import (
	"fmt"
	"math"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// firstCQE is the capacity of a completion queue before Reserve.
const firstCQE = 4096

// device is shared by the IDs of a channel on one RDMA device. Its protection domain and queues end with the channel. The C structure lives as
// long as the Go one, so that late calls find it closed.
type device struct {
	s    *stack
	c    *C.sv_dev
	name string

	posts, polls atomic.Uint64

	mu     sync.RWMutex // held for reading in calls that use what close releases
	closed bool
	mrs    atomic.Int64
}

func newDevice(s *stack, i *C.sv_id) (*device, error) {
	num := s.devices.Add(1)
	if num >= 1<<C.SV_DEV_BITS {
		return nil, fmt.Errorf("rdma: open a device: %d have been opened in this process, want fewer than %d", num-1, 1<<C.SV_DEV_BITS)
	}
	var rc C.int
	var op *C.char
	c := C.sv_dev_new(s.c, i, C.uint32_t(num), firstCQE, &rc, &op)
	if c == nil {
		return nil, failure(rc, C.GoString(op), "", "")
	}
	d := &device{s: s, c: c, name: C.GoString(C.sv_dev_name(c))}
	runtime.AddCleanup(d, func(c *C.sv_dev) { C.sv_dev_free(c) }, c)
	s.log.Debug("rdma: device opened", "device", d.name, "completions", d.capacity(), "most", int(C.sv_max_cqe(c)))
	return d, nil
}

// close releases everything, unless memory regions are left.
func (d *device) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.mrs.Load(); n > 0 {
		return fmt.Errorf("rdma: %s: close: %d memory regions have not been deregistered", d.name, n)
	}
	d.closed = true
	var op *C.char
	rc := C.sv_dev_close(d.c, &op)
	if rc != 0 {
		return failure(rc, C.GoString(op), d.name, "")
	}
	return nil
}

// Name returns the device's name, for example "mlx5_0".
func (d *device) Name() string { return d.name }

// Info returns the present state of the device.
func (d *device) Info() (DeviceInfo, error) {
	q := new(query)
	rc := C.sv_dev_query(d.c, &q.info, &q.ports[0])
	runtime.KeepAlive(d)
	if rc != 0 {
		return DeviceInfo{}, failure(rc, "query the device", d.name, "")
	}
	return d.s.describe(q), nil
}

// Calls returns the number of calls into C.
func (d *device) Calls() (posts, polls uint64) { return d.posts.Load(), d.polls.Load() }

// Post posts work requests. A queue pair that is not connected yet returns ENOTCONN.
func (d *device) Post(wrs []SendWR) (int, error) {
	if len(wrs) == 0 {
		return 0, nil
	}
	d.posts.Add(1)
	rc := C.sv_post(d.c, (*C.sv_wr)(unsafe.Pointer(unsafe.SliceData(wrs))), C.int(min(len(wrs), math.MaxInt32)))
	runtime.KeepAlive(d)
	n, errno := int(uint32(rc)), C.int(rc>>32)
	if errno == 0 {
		return n, nil
	}
	return n, d.postError(errno, &wrs[n])
}

// postError makes the error of Post. A full queue is common, so its error has no details.
func (d *device) postError(errno C.int, w *SendWR) error {
	switch errno {
	case C.SV_EFULL:
		return ErrQueueFull
	case C.SV_ESTALE:
		return ErrClosed
	}
	return failure(errno, "post", d.name, fmt.Sprintf("work request %d on queue pair %#x (%s, %d bytes, flags %#x)",
		w.ID, w.QP, w.Op, w.Len, w.Flags))
}

// Poll takes completions.
func (d *device) Poll(out []Completion, spin, block time.Duration) (int, error) {
	if len(out) == 0 {
		return 0, fmt.Errorf("rdma: %s: poll: no space for completions", d.name)
	}
	d.polls.Add(1)
	n := C.sv_poll(d.c, (*C.sv_wc)(unsafe.Pointer(unsafe.SliceData(out))), C.int(min(len(out), math.MaxInt32)),
		C.int64_t(spin), C.int64_t(block))
	runtime.KeepAlive(d)
	if n >= 0 {
		return int(n), nil
	}
	if n == -C.SV_ESTALE {
		return 0, ErrClosed
	}
	return 0, failure(-n, "poll", d.name, "")
}

// Wake ends a waiting Poll, or else the next one that would wait.
func (d *device) Wake() {
	C.sv_wake(d.c)
	runtime.KeepAlive(d)
}

// Reserve makes room for n completions.
func (d *device) Reserve(n int) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if most := int(C.sv_max_cqe(d.c)); n > most {
		return &Error{Op: "reserve", Device: d.name, What: strconv.Itoa(n) + " completions", Errno: syscall.EINVAL,
			Hint: fmt.Sprintf("the device's limit, max_cqe, is %d: use shorter queues or fewer queue pairs", most)}
	}
	return failure(C.sv_resize(d.c, C.int(n)), "reserve", d.name, strconv.Itoa(n)+" completions")
}

// capacity returns the number of entries of the completion queue.
func (d *device) capacity() int {
	n := int(C.sv_capacity(d.c))
	runtime.KeepAlive(d)
	return n
}
