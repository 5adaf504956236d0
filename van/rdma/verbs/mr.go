//go:build linux && cgo && !nordma

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"unsafe"
)

type mr struct {
	d          *device
	lkey, rkey C.uint32_t
	what       string

	mu sync.Mutex
	c  unsafe.Pointer // nil: deregistered
}

// Register registers memory with the device. RemoteWrite implies LocalWrite.
func (d *device) Register(p unsafe.Pointer, n int, a Access) (MR, error) {
	m := &mr{d: d, what: fmt.Sprintf("%d bytes at %p", n, p)}
	if n <= 0 || p == nil {
		return nil, &Error{Op: "register", Device: d.name, What: m.what, Errno: syscall.EINVAL, Hint: "want at least one byte at an address"}
	}
	r, err := m.register(func() C.int {
		return C.sv_reg(d.c, C.uintptr_t(uintptr(p)), C.size_t(n), C.int(a), &m.c, &m.lkey, &m.rkey)
	})
	if e, ok := errors.AsType[*Error](err); ok && e.Errno == syscall.EFAULT {
		e.Hint = "memory that is not mapped, or is read-only while Access wants to write, " +
			"or belongs to a GPU without nvidia_peermem or dma-buf"
	}
	return r, err
}

// RegisterDMABuf registers a dma-buf with the device. If the library lacks support, the error wraps errors.ErrUnsupported. Kernels and drivers
// without support return EOPNOTSUPP, which errors.Is treats as the same.
func (d *device) RegisterDMABuf(fd int, offset, length, iova uint64, a Access) (MR, error) {
	m := &mr{d: d, what: fmt.Sprintf("dma-buf %d (%d bytes at offset %d)", fd, length, offset)}
	if C.sv_has_dmabuf(d.s.c) == 0 {
		return nil, fmt.Errorf("rdma: %s: register %s: libibverbs has no ibv_reg_dmabuf_mr, want version 34 or newer: %w",
			d.name, m.what, errors.ErrUnsupported)
	}
	if length == 0 {
		return nil, &Error{Op: "register", Device: d.name, What: m.what, Errno: syscall.EINVAL, Hint: "want at least one byte"}
	}
	return m.register(func() C.int {
		return C.sv_reg_dmabuf(d.c, C.int(fd), C.uint64_t(offset), C.size_t(length), C.uint64_t(iova), C.int(a), &m.c, &m.lkey, &m.rkey)
	})
}

// register returns m if f, which registers it, succeeds.
func (m *mr) register(f func() C.int) (MR, error) {
	m.d.mu.RLock()
	defer m.d.mu.RUnlock()
	rc := C.int(C.SV_ESTALE)
	if !m.d.closed {
		rc = f()
	}
	if rc != 0 {
		return nil, failure(rc, "register", m.d.name, m.what)
	}
	m.d.mrs.Add(1)
	return m, nil
}

func (m *mr) LKey() uint32 { return uint32(m.lkey) }
func (m *mr) RKey() uint32 { return uint32(m.rkey) }

// Deregister ends the region. A second call does nothing.
func (m *mr) Deregister() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.c == nil {
		return nil
	}
	if rc := C.sv_dereg(m.d.c, m.c); rc != 0 {
		return failure(rc, "deregister", m.d.name, m.what)
	}
	m.c = nil
	m.d.mrs.Add(-1)
	return nil
}
