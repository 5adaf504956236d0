package simgpu

// Device: its type, its settings and its memory.

import (
	"errors"
	"slices"
	"sync"
	"unsafe"

	"github.com/stepaf/stepaf-go/van/backend"
)

// state is the common state of all parts of a Device.
type state struct {
	dev backend.Device

	mu      sync.Mutex
	options backend.Options
	failing error
	closed  bool
}

// Name implements backend.Backend.
func (s *state) Name() string { return "GPU" }

// Device implements backend.Backend.
func (s *state) Device() backend.Device { return s.dev }

// Configure implements backend.Tunable.
func (s *state) Configure(o backend.Options) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.options = o
}

// Options returns what Configure was given last.
func (s *state) Options() backend.Options {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.options
}

// Fail makes all that follows fail with err, until it is nil again.
func (s *state) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failing = err
}

func (s *state) fails() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return backend.ErrClosed
	}
	return s.failing
}

// Health implements backend.HealthChecker.
func (s *state) Health() error { return s.fails() }

// memory is the allocated memory, and the registered host memory.
type memory struct {
	st *state

	mu     sync.Mutex
	held   map[uint64][]byte
	allocs int
	pinned []backend.Mem
	lent   Holds // of memory of Mem
}

// lentBytes owns memory of Mem, whose holds count.
type lentBytes struct {
	*Holds
	b []byte
}

// bytesOf is the bytes of a Device's memory, nil for that of others.
func bytesOf(m backend.Mem) []byte {
	switch o := m.Owner().(type) {
	case lentBytes:
		return o.b
	case []byte:
		return o
	}
	return nil
}

func (a *memory) alloc(n int, on backend.Device) (backend.Mem, error) {
	if err := a.st.fails(); err != nil {
		return backend.Mem{}, err
	}
	b := make([]byte, max(n, 1))
	for i := range b {
		b[i] = 0xa5 // a driver's memory holds whatever was there
	}
	m := backend.At(unsafe.Pointer(unsafe.SliceData(b)), n, on, b)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held[m.Addr()] = b
	a.allocs++
	return m, nil
}

// Held is how many buffers of Alloc and AllocPinned there are.
func (a *memory) Held() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.held)
}

// Allocs is how often Alloc and AllocPinned were done.
func (a *memory) Allocs() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.allocs
}

// Alloc implements backend.Backend.
func (a *memory) Alloc(n int) (backend.Mem, error) { return a.alloc(n, a.st.dev) }

// AllocPinned implements backend.HostPinner.
func (a *memory) AllocPinned(n int) (backend.Mem, error) { return a.alloc(n, backend.Host) }

// Free implements backend.Backend.
func (a *memory) Free(m backend.Mem) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.held[m.Addr()] == nil {
		return errors.New("freed what was not allocated")
	}
	delete(a.held, m.Addr())
	return nil
}

// FreePinned implements backend.HostPinner.
func (a *memory) FreePinned(m backend.Mem) error { return a.Free(m) }

// RegisterHost implements backend.HostPinner.
func (a *memory) RegisterHost(m backend.Mem) (backend.Mem, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pinned = append(a.pinned, m)
	return m, nil
}

// UnregisterHost implements backend.HostPinner.
func (a *memory) UnregisterHost(m backend.Mem) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	i := slices.IndexFunc(a.pinned, func(x backend.Mem) bool { return x.Addr() == m.Addr() })
	if i < 0 {
		return errors.New("unregistered what was not registered")
	}
	a.pinned = slices.Delete(a.pinned, i, i+1)
	return nil
}

// Pinned implements backend.PinTeller.
func (a *memory) Pinned(m backend.Mem) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	in := func(at uint64, n int) bool { return m.Addr() >= at && m.Addr()+uint64(m.Len()) <= at+uint64(n) }
	for at, b := range a.held {
		if in(at, len(b)) {
			return m.OnHost()
		}
	}
	return slices.ContainsFunc(a.pinned, func(x backend.Mem) bool { return in(x.Addr(), x.Len()) })
}

// has tells whether Alloc has returned base.
func (a *memory) has(base uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.held[base] != nil
}

// Raw is the memory of a Mem that lies on a device of this kind, or on the host.
func Raw(m backend.Mem) []byte { return unsafe.Slice((*byte)(m.Ptr()), m.Len()) }

// Mem returns b as memory of the device, whose holds count, see NothingLent.
func (a *memory) Mem(b []byte) backend.Mem {
	return backend.At(unsafe.Pointer(unsafe.SliceData(b)), len(b), a.st.dev, lentBytes{&a.lent, b})
}
