package backend

// Pinned host memory of the GPU backend.

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// hostMem is the owner of host memory that the device can use: allocated by
// AllocPinned, or the caller's and registered.
type hostMem struct {
	g      *gpu
	ptr    unsafe.Pointer
	n      int
	addr   uintptr // of ptr, for the device
	caller any     // the owner of registered memory
	ours   bool    // from AllocPinned, not registered
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
func (g *gpu) AllocPinned(n int) (Mem, error) {
	if n < 0 {
		return Mem{}, g.invalid("AllocPinned(%d): want a length of at least 0", n)
	}
	if n == 0 {
		return Mem{dev: Host}, nil
	}
	h := &hostMem{g: g, n: n, ours: true}
	err := g.with(fmt.Sprintf("AllocPinned of %d bytes", n), func() (err error) {
		if h.ptr, err = g.d.hostAlloc(n); err != nil {
			return err
		}
		return g.keepHost(h)
	})
	if err != nil {
		return Mem{}, err
	}
	return At(h.ptr, n, Host, h), nil
}

// FreePinned gives back what AllocPinned returned.
func (g *gpu) FreePinned(m Mem) error { return g.dropHost("FreePinned", m, true) }

// RegisterHost pins the caller's memory.
func (g *gpu) RegisterHost(m Mem) (Mem, error) {
	if !m.OnHost() || m.n == 0 {
		return Mem{}, g.invalid("RegisterHost of %d bytes on %s: want host memory", m.n, m.dev)
	}
	h := &hostMem{g: g, ptr: m.ptr, n: m.n, caller: m.owner}
	err := g.with(fmt.Sprintf("RegisterHost of %d bytes at %#x", m.n, uintptr(m.ptr)), func() error {
		if err := g.d.hostRegister(m.ptr, m.n); err != nil {
			return err
		}
		return g.keepHost(h)
	})
	if err != nil {
		return Mem{}, err
	}
	return At(h.ptr, h.n, Host, h), nil
}

// UnregisterHost ends a RegisterHost.
func (g *gpu) UnregisterHost(m Mem) error { return g.dropHost("UnregisterHost", m, false) }

var _ PinTeller = (*gpu)(nil)

// Pinned implements PinTeller.
func (g *gpu) Pinned(m Mem) bool {
	h, is := m.owner.(*hostMem)
	return is && h.g == g && m.OnHost()
}

// keepHost records pinned memory. It frees it when the device cannot map it.
func (g *gpu) keepHost(h *hostMem) error {
	var err error
	if h.addr, err = g.d.hostDeviceAddr(h.ptr); err != nil {
		_ = g.freeHost(h) // the first error tells more
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hosts[uintptr(h.ptr)] = h
	return nil
}

func (g *gpu) freeHost(h *hostMem) error {
	if h.ours {
		return g.d.hostFree(h.ptr)
	}
	return g.d.hostUnregister(h.ptr)
}

func (g *gpu) dropHost(op string, m Mem, ours bool) error {
	if m.n == 0 {
		return nil
	}
	return g.with(op, func() error {
		g.mu.Lock()
		h := g.hosts[uintptr(m.ptr)]
		switch {
		case h == nil || h.n != m.n || h.ours != ours:
			g.mu.Unlock()
			return g.invalid("%s of %d bytes at %#x: not what was given out, or given back before", op, m.n, uintptr(m.ptr))
		case h.held.Load() > 0:
			g.mu.Unlock()
			return g.invalid("%s of %d bytes at %#x: %w: a message that is under way needs them", op, m.n, uintptr(m.ptr), ErrInUse)
		}
		delete(g.hosts, uintptr(m.ptr))
		g.mu.Unlock()
		return g.freeHost(h)
	})
}
