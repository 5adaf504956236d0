package backend

// Memory of a GPU.

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// deviceMemory is what Alloc returned and Free has not got back.
type deviceMemory struct {
	c *gpuContext
	d memoryDriver

	mu   sync.Mutex
	mems map[uintptr]*deviceMem
}

// deviceAlign is what cuMemAlloc promises.
const deviceAlign = 256

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
		return Mem{dev: a.c.Device()}, nil
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

// Free gives back what Alloc returned. Memory that a transport still holds is refused
// with ErrInUse.
func (a *deviceMemory) Free(m Mem) error {
	if m.n == 0 {
		return nil
	}
	addr := uintptr(m.ptr)
	return a.c.with("Free", func() error {
		a.mu.Lock()
		have := a.mems[addr]
		switch {
		case have == nil || have.n != m.n || m.dev != a.c.Device():
			a.mu.Unlock()
			return a.c.invalid("Free of %d bytes at %#x on %s: not what Alloc returned, or freed before", m.n, addr, m.dev)
		case have.held.Load() > 0:
			a.mu.Unlock()
			return a.c.invalid("Free of %d bytes at %#x: %w: a message that is under way needs them", m.n, addr, ErrInUse)
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
