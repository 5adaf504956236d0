package backend

// Device memory named for other processes (CUDA IPC) and for other devices (dma-buf).

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
)

// exporter names memory for other processes, and knows the pieces of it that have been shared.
//
// Their handles are held: the driver gives a held handle to no other allocation, so memory
// that was unmapped and mapped anew at the same address is distinguished from the former memory.
type exporter struct {
	c    *gpuContext
	d    shareDriver
	once onceDriver

	known atomic.Pointer[map[uintptr]*segment] // by address; never changed, but replaced
	mu    sync.Mutex                           // held to replace it
	last  uint64                               // id
	stale []uint64                             // handles that are released at the end: a stream may wait
}

// whatIsShared says how memory must be made that other processes can map.
const whatIsShared = "other processes can map what cudaMalloc returns, and what was made with a file descriptor, as by PyTorch with " +
	"PYTORCH_CUDA_ALLOC_CONF=backend:native or =expandable_segments:True, but nothing of cudaMallocAsync's pools"

// Export names the allocation in which m lies.
func (x *exporter) Export(m Mem) (Export, error) {
	var e Export
	if err := x.mayExport(m); err != nil {
		return e, err
	}
	var unshared error // set when the driver knows the memory: a failure is about sharing
	err := x.c.live(func() error { return x.name(&e, m, &unshared) })
	return e, x.failed("Export", m, err, unshared)
}

// mayExport refuses what is not this process's memory of this device.
func (x *exporter) mayExport(m Mem) error {
	if m.Len() == 0 || m.Device() != x.c.Device() {
		return x.c.invalid("Export of %d bytes on %s: %w", m.Len(), m.Device(), ErrWrongDevice)
	}
	switch m.owner.(type) {
	case *imported, *importedSegment:
		return x.c.invalid("Export of %d bytes: another process's memory: %w", m.Len(), ErrNotExportable)
	}
	return nil
}

// name describes m, which lies in one allocation.
func (x *exporter) name(e *Export, m Mem, unshared *error) error {
	n, err := x.once.nameIn(x.c.ctx, uintptr(m.ptr))
	if n.n > 0 {
		if beyond := x.within(m, n.base, n.n); beyond != nil {
			return beyond
		}
	}
	if n.known {
		*unshared = ErrNotExportable
	}
	e.Handle, e.Allocation, e.Base, e.Size, e.Offset = n.handle, n.id, uint64(n.base), n.n, int(uintptr(m.ptr)-n.base)
	return err
}

// within refuses memory that reaches beyond the allocation of n bytes at base.
func (x *exporter) within(m Mem, base uintptr, n int) error {
	if addr := uintptr(m.ptr); addr < base || m.Len() > n || int(addr-base) > n-m.Len() {
		return x.c.invalid("%d bytes at %#x reach beyond their allocation of %d bytes at %#x: %w", m.Len(), addr, n, base, ErrNotExportable)
	}
	return nil
}

func (x *exporter) failed(op string, m Mem, err, kind error) error {
	if err == nil {
		return nil
	}
	detail := whatIsShared
	if kind == nil {
		detail = "this is no device memory, or freed memory"
	}
	return x.c.refused(fmt.Sprintf("%s of %d bytes at %#x", op, m.Len(), uintptr(m.ptr)), detail, err, kind)
}

// ExportDMABuf returns m as a dma-buf. It covers whole pages, as the driver demands.
func (x *exporter) ExportDMABuf(m Mem) (fd, offset int, err error) {
	if m.Len() == 0 || m.Device() != x.c.Device() {
		return -1, 0, x.c.invalid("ExportDMABuf of %d bytes on %s: %w", m.Len(), m.Device(), ErrWrongDevice)
	}
	if !x.c.info.DMABuf {
		return -1, 0, x.c.invalid("ExportDMABuf: %w: the driver has no dma-buf for this device; it needs the open kernel modules", ErrUnsupported)
	}
	page := uintptr(os.Getpagesize())
	addr := uintptr(m.ptr)
	first := addr &^ (page - 1)
	var unshared error
	err = x.c.enter(func() (err error) {
		base, n, err := x.d.addressRange(addr)
		if err == nil {
			err = x.within(m, base, n)
		}
		if err != nil {
			return err
		}
		unshared = ErrNotExportable
		end := (addr + uintptr(m.Len()) + page - 1) &^ (page - 1)
		fd, err = x.d.dmabuf(first, int(end-first))
		return err
	})
	if err != nil {
		return -1, 0, x.failed("ExportDMABuf", m, err, unshared)
	}
	return fd, int(addr - first), nil
}
