package backend

// Memory of a GPU, and host memory that it can use.

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// deviceMemory is what Alloc returned and Free has not got back.
type deviceMemory struct {
	c *gpuContext
	d memoryDriver

	mu   sync.Mutex
	mems map[uintptr]*deviceMem
}

// deviceMem is the owner of memory that Alloc returned. It counts the holders.
type deviceMem struct {
	addr uintptr
	n    int
	held atomic.Int32
}

func (m *deviceMem) Retain()  { m.held.Add(1) }
func (m *deviceMem) Release() { m.held.Add(-1) }

// Alloc returns device memory, aligned to 256 bytes.
func (a *deviceMemory) Alloc(n int) (Mem, error) {
	if n < 0 {
		return Mem{}, a.c.invalid("Alloc(%d): want a length of at least 0", n)
	}
	if n == 0 {
		return Mem{size: extentOf(0, a.c.Device())}, nil
	}
	m := &deviceMem{n: n}
	var free, total int64
	err := a.c.enter(func() (err error) {
		if m.addr, err = a.d.memAlloc(n); err != nil {
			free, total, _ = a.d.memInfo() // both 0 when that fails too
			return err
		}
		a.mu.Lock()
		a.mems[m.addr] = m
		a.mu.Unlock()
		return nil
	})
	if err == ErrClosed {
		return Mem{}, a.c.invalid("Alloc: %w", err)
	}
	if err != nil {
		return Mem{}, a.c.failedAs(fmt.Sprintf("Alloc of %d bytes", n), fmt.Sprintf("%d of %d bytes are free", free, total), err, nil)
	}
	return At(pointer(m.addr), n, a.c.Device(), m), nil
}

// Free releases memory that Alloc returned. Memory that a transport still holds is refused with ErrInUse.
func (a *deviceMemory) Free(m Mem) error {
	if m.Len() == 0 {
		return nil
	}
	addr := uintptr(m.ptr)
	return a.c.with("Free", func() error {
		a.mu.Lock()
		have := a.mems[addr]
		switch {
		case have == nil || have.n != m.Len() || m.Device() != a.c.Device():
			a.mu.Unlock()
			return a.c.invalid("Free of %d bytes at %#x on %s: not what Alloc returned, or freed before", m.Len(), addr, m.Device())
		case have.held.Load() > 0:
			a.mu.Unlock()
			return a.c.invalid("Free of %d bytes at %#x: %w: a message that is under way needs them", m.Len(), addr, ErrInUse)
		}
		delete(a.mems, addr)
		a.mu.Unlock()
		return a.d.memFree(addr)
	})
}

// held is how many bytes are allocated.
func (a *deviceMemory) held() (bytes int) {
	for _, m := range a.mems {
		bytes += m.n
	}
	return bytes
}

// close frees what is left. The context is current.
func (a *deviceMemory) close(note func(op string, err error)) {
	for _, m := range a.mems {
		note("Close: free memory", a.d.memFree(m.addr))
	}
	a.mems = nil
}

// hostMemory is what is pinned.
type hostMemory struct {
	c *gpuContext
	d memoryDriver

	mu    sync.Mutex
	hosts map[uintptr]*hostMem
}

// hostMem is the owner of host memory that the device can use: allocated by
// AllocPinned, or the caller's and registered.
type hostMem struct {
	c      *gpuContext
	ptr    unsafe.Pointer
	n      int
	addr   uintptr // of ptr, for the device
	caller any     // the owner of registered memory
	pages  []byte  // of AllocPinned; otherwise nil
	held   atomic.Int32
}

// Retain adds a holder, also to the owner of registered memory.
func (h *hostMem) Retain() {
	h.held.Add(1)
	if c, ok := h.caller.(Holder); ok {
		c.Retain()
	}
}

// Release ends a Retain.
func (h *hostMem) Release() {
	if c, ok := h.caller.(Holder); ok {
		c.Release()
	}
	h.held.Add(-1)
}

// deviceAddr is the device's address of m, which lies in h.
func (h *hostMem) deviceAddr(m Mem) uintptr { return h.addr + uintptr(m.ptr) - uintptr(h.ptr) }

// AllocPinned returns pinned host memory.
func (a *hostMemory) AllocPinned(n int) (Mem, error) {
	if n < 0 {
		return Mem{}, a.c.invalid("AllocPinned(%d): want a length of at least 0", n)
	}
	if n == 0 {
		return Mem{size: extentOf(0, Host)}, nil
	}
	h := &hostMem{c: a.c, n: n}
	err := a.c.with(fmt.Sprintf("AllocPinned of %d bytes", n), func() (err error) {
		if h.pages, err = pinNew(a.d, n); err != nil {
			return err
		}
		h.ptr = unsafe.Pointer(&h.pages[0])
		return a.keep(h)
	})
	if err != nil {
		return Mem{}, err
	}
	return At(h.ptr, n, Host, h), nil
}

// pinNew maps n bytes of host memory and pins them. The memory is not the driver's, so it can outlive the backend. It is shared:
// after a fork, a write to a private page would give this process another page than the device's.
func pinNew(d memoryDriver, n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w: %w", n, ErrNoMemory, err)
	}
	if err := d.hostRegister(unsafe.Pointer(&b[0]), n); err != nil {
		_ = unix.Munmap(b)
		return nil, err
	}
	return b, nil
}

// unpin undoes pinNew. Memory that the driver does not give back stays mapped.
func unpin(d memoryDriver, b []byte) error {
	if err := d.hostUnregister(unsafe.Pointer(&b[0])); err != nil {
		return err
	}
	return unix.Munmap(b)
}

// FreePinned releases memory of AllocPinned.
func (a *hostMemory) FreePinned(m Mem) error { return a.drop("FreePinned", m, true) }

// RegisterHost pins the caller's memory.
func (a *hostMemory) RegisterHost(m Mem) (Mem, error) {
	if !m.OnHost() || m.Len() == 0 {
		return Mem{}, a.c.invalid("RegisterHost of %d bytes on %s: want host memory", m.Len(), m.Device())
	}
	h := &hostMem{c: a.c, ptr: m.ptr, n: m.Len(), caller: m.owner}
	err := a.c.with(fmt.Sprintf("RegisterHost of %d bytes at %#x", m.Len(), uintptr(m.ptr)), func() error {
		if err := a.d.hostRegister(m.ptr, m.Len()); err != nil {
			return err
		}
		return a.keep(h)
	})
	if err != nil {
		return Mem{}, err
	}
	return At(h.ptr, h.n, Host, h), nil
}

// UnregisterHost ends a RegisterHost.
func (a *hostMemory) UnregisterHost(m Mem) error { return a.drop("UnregisterHost", m, false) }

// Pinned implements PinTeller.
func (a *hostMemory) Pinned(m Mem) bool {
	h, is := m.owner.(*hostMem)
	return is && h.c == a.c && m.OnHost()
}

// MapHost implements Signaller.
func (a *hostMemory) MapHost(m Mem) (Mem, error) {
	if !m.OnHost() || m.Len() == 0 {
		return Mem{}, a.c.invalid("MapHost of %d bytes on %s: want pinned host memory", m.Len(), m.Device())
	}
	var addr uintptr
	err := a.c.enter(func() (err error) {
		addr, err = a.d.hostDeviceAddr(m.ptr)
		return err
	})
	if err != nil {
		return Mem{}, a.c.failedAs(fmt.Sprintf("MapHost of %d bytes at %#x", m.Len(), uintptr(m.ptr)), "is the memory pinned?", err, nil)
	}
	return At(pointer(addr), m.Len(), a.c.Device(), m.owner), nil
}

// keep records pinned memory. It frees it when the device cannot map it.
func (a *hostMemory) keep(h *hostMem) error {
	var err error
	if h.addr, err = a.d.hostDeviceAddr(h.ptr); err != nil {
		_ = a.free(h) // the first error tells more
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.hosts[uintptr(h.ptr)] = h
	return nil
}

// free unpins h, and unmaps pages of AllocPinned.
func (a *hostMemory) free(h *hostMem) error {
	if h.pages == nil {
		return a.d.hostUnregister(h.ptr)
	}
	return unpin(a.d, h.pages)
}

func (a *hostMemory) drop(op string, m Mem, ours bool) error {
	if m.Len() == 0 {
		return nil
	}
	return a.c.with(op, func() error {
		a.mu.Lock()
		h := a.hosts[uintptr(m.ptr)]
		switch {
		case h == nil || h.n != m.Len() || (h.pages != nil) != ours:
			a.mu.Unlock()
			return a.c.invalid("%s of %d bytes at %#x: not what was given out, or given back before", op, m.Len(), uintptr(m.ptr))
		case h.held.Load() > 0:
			a.mu.Unlock()
			return a.c.invalid("%s of %d bytes at %#x: %w: a message that is under way needs them", op, m.Len(), uintptr(m.ptr), ErrInUse)
		}
		delete(a.hosts, uintptr(m.ptr))
		a.mu.Unlock()
		return a.free(h)
	})
}

// held is how many bytes are pinned.
func (a *hostMemory) held() (bytes int) {
	for _, h := range a.hosts {
		bytes += h.n
	}
	return bytes
}

// close unpins what is left. Pages of AllocPinned stay mapped while there is a Mem of them. The context is current.
func (a *hostMemory) close(note func(op string, err error)) {
	for _, h := range a.hosts {
		err := a.d.hostUnregister(h.ptr)
		note("Close: free host memory", err)
		if err == nil && h.pages != nil {
			runtime.AddCleanup(h, func(b []byte) { _ = unix.Munmap(b) }, h.pages)
		}
	}
	a.hosts = nil
}
