package backend

// Memory that is mapped piece by piece (cuMemCreate, cuMemMap), as PyTorch's allocator does
// with expandable_segments: it has no CUDA IPC handle, but each piece has a file descriptor.

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
)

// segments are the pieces of this process's memory that have been shared.
//
// Their handles are held: the driver gives a held handle to no other allocation, so memory
// that was unmapped and mapped anew at the same address is told from what was there before.
type segments struct {
	known atomic.Pointer[map[uintptr]*segment] // by address; never changed, but replaced
	mu    sync.Mutex                           // held to replace it
	last  uint64                               // id
	stale []uint64                             // handles that are released at the end: a stream may wait
}

// segment is one piece.
type segment struct {
	id     uint64
	size   int
	handle uint64
}

// maxSegments bounds the handles that are held.
const maxSegments = 16384

func (s *segments) at(base uintptr) *segment {
	if m := s.known.Load(); m != nil {
		return (*m)[base]
	}
	return nil
}

// put replaces what is known of base; nil forgets it. s.mu is held.
func (s *segments) put(base uintptr, seg *segment) {
	m := map[uintptr]*segment{}
	if old := s.known.Load(); old != nil {
		m = maps.Clone(*old)
	}
	delete(m, base)
	if seg != nil {
		m[base] = seg
	}
	s.known.Store(&m)
}

var _ Sharer = (*gpu)(nil)

// whatIsShared says how memory must be made that other processes can map.
const whatIsShared = "other processes can map what cudaMalloc returns, and what was made with a file descriptor, as by PyTorch with " +
	"PYTORCH_CUDA_ALLOC_CONF=backend:native or =expandable_segments:True, but nothing of cudaMallocAsync's pools"

// Share implements Sharer.
func (g *gpu) Share(s *Shared, m Mem) error {
	s.Export, s.Segments = Export{}, s.Segments[:0]
	if err := g.mayExport(m); err != nil {
		return err
	}
	addr := uintptr(m.ptr)
	var unshared error // set once the driver knows the memory: a later failure is about sharing
	err := g.enter(func() error {
		base, n, err := g.d.addressRange(addr)
		if err != nil {
			return err
		}
		known, fits := g.segments.at(base) != nil, addr >= base && m.n <= n-int(addr-base)
		if known || !fits {
			unshared = ErrNotExportable
			if err := g.listSegments(s, addr, m.n); err == nil || !fits {
				return err
			}
			s.Segments = s.Segments[:0] // it was unmapped, and has become memory of another kind
		}
		unshared = nil
		if err = g.name(&s.Export, m, &unshared); err != nil && unshared != nil && !known {
			s.Export = Export{}
			if g.listSegments(s, addr, m.n) == nil {
				return nil
			}
			s.Segments = s.Segments[:0]
		}
		return err
	})
	return g.exportError("Export", m, err, unshared)
}

// listSegments lists the pieces in which n bytes at addr lie. The context is current.
func (g *gpu) listSegments(s *Shared, addr uintptr, n int) error {
	for n > 0 {
		base, size, err := g.d.addressRange(addr)
		if err != nil {
			return err
		}
		if addr < base || addr-base >= uintptr(size) {
			return g.invalid("%#x is not in its allocation of %d bytes at %#x: %w", addr, size, base, ErrNotExportable)
		}
		seg, err := g.segmentAt(base, size)
		if err != nil {
			return err
		}
		off := int(addr - base)
		part := min(n, size-off)
		s.Segments = append(s.Segments, Segment{ID: seg.id, Base: uint64(base), Size: size, Offset: off, Len: part})
		addr += uintptr(part)
		n -= part
	}
	return nil
}

// segmentAt returns what is mapped at base now.
func (g *gpu) segmentAt(base uintptr, size int) (*segment, error) {
	h, err := g.d.handleAt(base)
	if err != nil {
		return nil, err
	}
	if seg := g.segments.at(base); seg != nil && seg.handle == h && seg.size == size {
		return seg, g.d.handleRelease(h)
	}
	seg, err := g.addSegment(base, size, h)
	if err != nil {
		_ = g.d.handleRelease(h) // the first error tells more
	}
	return seg, err
}

// addSegment takes note of a piece that is new, or has taken the place of another one.
func (g *gpu) addSegment(base uintptr, size int, h uint64) (*segment, error) {
	ok, err := g.d.handleShareable(h)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, g.invalid("%d bytes at %#x are mapped from an allocation without a file descriptor: %w: %s", size, base, ErrNotExportable, whatIsShared)
	}
	s := &g.segments
	s.mu.Lock()
	defer s.mu.Unlock()
	if seg := s.at(base); seg != nil {
		if seg.handle == h && seg.size == size { // another goroutine was faster
			return seg, g.d.handleRelease(h)
		}
		s.put(base, nil)
		g.letGo(seg)
	}
	if m := s.known.Load(); m != nil && len(*m) >= maxSegments {
		g.dropUnmapped()
		if len(*s.known.Load()) >= maxSegments {
			return nil, g.invalid("%d mapped allocations are shared, which is the limit: %w", maxSegments, ErrNotExportable)
		}
	}
	s.last++
	seg := &segment{id: s.last, size: size, handle: h}
	s.put(base, seg)
	return seg, nil
}

// letGo gives back the handle of a piece that is not known any more. Where a stream may wait
// for a message it is kept to the end: releasing the last one frees memory. g.segments.mu is
// held.
func (g *gpu) letGo(seg *segment) {
	if g.MayBlock() || g.d.handleRelease(seg.handle) != nil {
		g.segments.stale = append(g.segments.stale, seg.handle)
	}
}

// dropUnmapped forgets what is not mapped any more. g.segments.mu is held.
func (g *gpu) dropUnmapped() {
	old := g.segments.known.Load()
	if old == nil {
		return
	}
	mapped, gone := map[uintptr]*segment{}, []*segment(nil)
	for base, seg := range *old {
		h, err := g.d.handleAt(base)
		if err == nil {
			_ = g.d.handleRelease(h) // it was retained a moment ago
		}
		if err == nil && h == seg.handle {
			mapped[base] = seg
		} else {
			gone = append(gone, seg)
		}
	}
	if len(gone) == 0 {
		return
	}
	g.segments.known.Store(&mapped)
	for _, seg := range gone {
		g.letGo(seg)
	}
}

// TidySegments implements Sharer.
func (g *gpu) TidySegments() error {
	if g.segments.known.Load() == nil {
		return nil
	}
	return g.with("TidySegments", func() error {
		g.segments.mu.Lock()
		defer g.segments.mu.Unlock()
		g.dropUnmapped()
		return nil
	})
}

// HasSegment implements Sharer.
func (g *gpu) HasSegment(s Segment) bool {
	seg := g.segments.at(uintptr(s.Base))
	return seg != nil && seg.id == s.ID
}

// SegmentFile implements Sharer.
func (g *gpu) SegmentFile(s Segment) (fd int, err error) {
	fd = -1
	op := fmt.Sprintf("SegmentFile of %d bytes at %#x", s.Size, s.Base)
	err = g.enter(func() error {
		g.segments.mu.Lock() // the handle is not released meanwhile
		defer g.segments.mu.Unlock()
		seg := g.segments.at(uintptr(s.Base))
		if seg == nil || seg.id != s.ID {
			return g.invalid("%s: %w: it was unmapped", op, ErrNotExportable)
		}
		var err error
		fd, err = g.d.handleExport(seg.handle)
		return err
	})
	if err != nil {
		return -1, g.failedAs(op, whatIsShared, err, ErrNotExportable)
	}
	return fd, nil
}

// importedSegment is the owner of a piece of another process's memory.
type importedSegment struct {
	g    *gpu
	addr uintptr
	n    int
}

// ImportSegment implements Sharer.
func (g *gpu) ImportSegment(fd, size int) (Mem, error) {
	if size <= 0 {
		return Mem{}, g.invalid("ImportSegment of %d bytes: want at least 1", size)
	}
	i := &importedSegment{g: g, n: size}
	err := g.enter(func() error {
		h, err := g.d.handleImport(fd)
		if err != nil {
			return err
		}
		err = g.mapSegment(i, h)
		if e := g.d.handleRelease(h); err == nil && e != nil { // the mapping keeps the memory
			err = errors.Join(e, g.unmapSegment(i))
		}
		if err == nil {
			g.mu.Lock()
			g.mapped[i.addr] = i
			g.mu.Unlock()
		}
		return err
	})
	if err != nil {
		op := fmt.Sprintf("ImportSegment of %d bytes", size)
		if _, ok := err.(*driverError); !ok {
			return Mem{}, g.invalid("%s: %w", op, err)
		}
		return Mem{}, g.failedAs(op, "the file is of no device memory, of less of it, or of a device that this one does not reach", err, ErrNotExportable)
	}
	return At(pointer(i.addr), size, g.Device(), i), nil
}

// mapSegment maps i.n bytes of h where this device reaches them.
func (g *gpu) mapSegment(i *importedSegment, h uint64) (err error) {
	if i.addr, err = g.d.addressReserve(i.n); err != nil {
		return err
	}
	if err = g.d.memMap(i.addr, i.n, h); err != nil {
		_ = g.d.addressFree(i.addr, i.n) // the first error tells more
		return err
	}
	if err = g.d.memAccess(i.addr, i.n, g.id); err == nil {
		var n int
		if _, n, err = g.d.addressRange(i.addr); err == nil && n != i.n {
			err = g.invalid("the peer says %d bytes, the allocation has %d: %w", i.n, n, ErrNotExportable)
		}
	}
	if err != nil {
		_ = g.unmapSegment(i)
	}
	return err
}

func (g *gpu) unmapSegment(i *importedSegment) error {
	if err := g.d.memUnmap(i.addr, i.n); err != nil {
		return err
	}
	return g.d.addressFree(i.addr, i.n)
}

// closeSegment is CloseImport of what ImportSegment returned.
func (g *gpu) closeSegment(i *importedSegment) error {
	return g.with("CloseImport", func() error {
		g.mu.Lock()
		open := g.mapped[i.addr] == i
		delete(g.mapped, i.addr)
		g.mu.Unlock()
		if !open {
			return g.invalid("CloseImport of %d bytes at %#x: closed before", i.n, i.addr)
		}
		return g.unmapSegment(i)
	})
}

// freeSegments is Close's part: it lets go of all handles and mappings.
func (g *gpu) freeSegments(note func(op string, err error)) {
	for _, i := range g.mapped {
		note("Close: end an import", g.unmapSegment(i))
	}
	if m := g.segments.known.Swap(nil); m != nil {
		for _, seg := range *m {
			note("Close: release an allocation", g.d.handleRelease(seg.handle))
		}
	}
	for _, h := range g.segments.stale {
		note("Close: release an allocation", g.d.handleRelease(h))
	}
	g.segments.stale = nil
}
