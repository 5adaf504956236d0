package vantest

// Memory of a Device that other devices import.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/stepaf/stepaf-go/van/backend"
)

// sharing refuses exports, and counts imports.
type sharing struct {
	st     *state
	memory *memory

	mu      sync.Mutex
	imports int
	private bool
	pooled  bool
}

// exported finds the memory that an Export names: these devices are all in one process.
var exported sync.Map // of []byte, by number

var exports atomic.Uint64

// Private makes Export refuse what follows.
func (x *sharing) Private(private bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.private = private
}

// PrivateMem makes Export refuse memory of Mem, as drivers do with that of memory pools.
func (x *sharing) PrivateMem(private bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.pooled = private
}

// Export implements backend.Exporter, for memory of Alloc and for whole values of Mem.
func (x *sharing) Export(m backend.Mem) (e backend.Export, err error) {
	if err := x.st.fails(); err != nil {
		return e, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	b, _ := m.Owner().([]byte)
	if x.private || b == nil || m.Device() != x.st.dev {
		return e, fmt.Errorf("export of %d bytes: %w", m.Len(), backend.ErrNotExportable)
	}
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	if x.pooled && !x.memory.has(base) {
		return e, fmt.Errorf("export of %d bytes: %w", m.Len(), backend.ErrNotExportable)
	}
	e.Base, e.Size, e.Offset = base, len(b), int(m.Addr()-base)
	id, ok := exported.Load(base)
	if !ok {
		id = exports.Add(1)
		exported.Store(base, id)
		exported.Store(id, b) // for ever, so that no other memory has the address
	}
	e.Allocation = id.(uint64)
	binary.LittleEndian.PutUint64(e.Handle[:], e.Allocation)
	return e, nil
}

// Import implements backend.Exporter.
func (x *sharing) Import(e backend.Export) (m backend.Mem, err error) {
	if err := x.st.fails(); err != nil {
		return m, err
	}
	b, ok := exported.Load(binary.LittleEndian.Uint64(e.Handle[:]))
	if !ok || len(b.([]byte)) < e.Size {
		return m, fmt.Errorf("import of %d bytes: a stale handle: %w", e.Size, backend.ErrNotExportable)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.imports++
	return x.memory.Mem(b.([]byte)[:e.Size]), nil
}

// Imports is how many imports are open.
func (x *sharing) Imports() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.imports
}

// closeImport ends an import.
func (x *sharing) closeImport() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.imports--; x.imports < 0 {
		return errors.New("closed what was not imported")
	}
	return nil
}
