package simgpu

// Memory of a Device that other devices import: whole, or mapped from several allocations.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

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
	b := bytesOf(m)
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
		exported.Store(id, b) // never removed, so that no other memory gets the address
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

// segments are the allocations that Map and Remap have made: files, mapped one after the
// other. An imported segment is mapped once more, as another process would.
type segments struct {
	st    *state
	whole *sharing // of memory that is not mapped

	mu       sync.Mutex
	last     uint64
	mapped   map[uintptr]*segment // by address: its segment now
	imported map[uintptr]int
	refusing error
}

type segment struct {
	id   uint64
	fd   int
	size int
}

// Map returns memory of the device that is mapped from allocations of these lengths, which
// must be whole pages. FreeMapped gives it back.
func (s *segments) Map(t testing.TB, sizes ...int) backend.Mem {
	t.Helper()
	total := 0
	for _, n := range sizes {
		total += n
	}
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(total), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	at := uintptr(base)
	for _, n := range sizes {
		s.Remap(t, at, n)
		at += uintptr(n)
	}
	return backend.At(base, total, s.st.dev, nil)
}

// Remap puts a new allocation of n bytes at addr, where there may be one of that length.
func (s *segments) Remap(t testing.TB, addr uintptr, n int) {
	t.Helper()
	fd, err := unix.MemfdCreate("device", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, int64(n))
	}
	if err == nil {
		_, err = unix.MmapPtr(fd, 0, toPointer(addr), uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mapped == nil {
		s.mapped = map[uintptr]*segment{}
	}
	if old := s.mapped[addr]; old != nil {
		_ = unix.Close(old.fd)
	}
	s.last++
	s.mapped[addr] = &segment{s.last, fd, n}
}

// FreeMapped gives back all memory of Map.
func (s *segments) FreeMapped() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for base, x := range s.mapped {
		_ = unix.Close(x.fd)
		_ = unix.MunmapPtr(toPointer(base), uintptr(x.size))
	}
	s.mapped = nil
}

// RefuseSegments makes ImportSegment fail with err, until it is nil again.
func (s *segments) RefuseSegments(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refusing = err
}

func toPointer(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }

// at returns the allocation in which addr lies. The mutex is held.
func (s *segments) at(addr uintptr) (uintptr, *segment) {
	for base, x := range s.mapped {
		if addr >= base && addr < base+uintptr(x.size) {
			return base, x
		}
	}
	return 0, nil
}

// Share implements backend.Sharer.
func (s *segments) Share(sh *backend.Shared, m backend.Mem) (err error) {
	sh.Export, sh.Segments = backend.Export{}, sh.Segments[:0]
	s.mu.Lock()
	defer s.mu.Unlock()
	addr, left := uintptr(m.Addr()), m.Len()
	if _, x := s.at(addr); x == nil {
		sh.Export, err = s.whole.Export(m)
		return err
	}
	if err := s.st.fails(); err != nil {
		return err
	}
	for left > 0 {
		base, x := s.at(addr)
		if x == nil {
			return fmt.Errorf("share of %d bytes: %w", m.Len(), backend.ErrNotExportable)
		}
		off := int(addr - base)
		n := min(left, x.size-off)
		sh.Segments = append(sh.Segments, backend.Segment{ID: x.id, Base: uint64(base), Size: x.size, Offset: off, Len: n})
		addr, left = addr+uintptr(n), left-n
	}
	return nil
}

// SegmentFile implements backend.Sharer.
func (s *segments) SegmentFile(x backend.Segment) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have := s.mapped[uintptr(x.Base)]
	if have == nil || have.id != x.ID {
		return -1, fmt.Errorf("file of %d bytes: they were unmapped: %w", x.Size, backend.ErrNotExportable)
	}
	return unix.FcntlInt(uintptr(have.fd), unix.F_DUPFD_CLOEXEC, 0)
}

// HasSegment implements backend.Sharer.
func (s *segments) HasSegment(x backend.Segment) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	have := s.mapped[uintptr(x.Base)]
	return have != nil && have.id == x.ID
}

// TidySegments implements backend.Sharer.
func (s *segments) TidySegments() error { return s.st.fails() }

// ImportSegment implements backend.Sharer.
func (s *segments) ImportSegment(fd, size int) (backend.Mem, error) {
	if err := s.st.fails(); err != nil {
		return backend.Mem{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var st unix.Stat_t
	err := s.refusing
	if err == nil {
		err = unix.Fstat(fd, &st)
	}
	if err == nil && (size <= 0 || int64(size) > st.Size) {
		err = fmt.Errorf("%d bytes of a file with %d: %w", size, st.Size, backend.ErrNotExportable)
	}
	var p unsafe.Pointer
	if err == nil {
		p, err = unix.MmapPtr(fd, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		return backend.Mem{}, fmt.Errorf("import: %w", err)
	}
	if s.imported == nil {
		s.imported = map[uintptr]int{}
	}
	s.imported[uintptr(p)] = size
	return backend.At(p, size, s.st.dev, nil), nil
}

// unmap ends an import of ImportSegment. It tells whether m is one.
func (s *segments) unmap(m backend.Mem) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.imported[uintptr(m.Addr())]
	if ok {
		delete(s.imported, uintptr(m.Addr()))
		_ = unix.MunmapPtr(m.Ptr(), uintptr(n))
	}
	return ok
}

// SegmentImports are the lengths of the segments that ImportSegment has mapped.
func (s *segments) SegmentImports() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Values(s.imported))
}
