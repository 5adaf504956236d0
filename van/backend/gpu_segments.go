package backend

// Memory that is mapped piece by piece (cuMemCreate, cuMemMap), as PyTorch's allocator does
// with expandable_segments: it has no CUDA IPC handle, but each piece has a file descriptor.

import (
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
	c     *gpuContext
	d     shareDriver
	whole *exporter // names memory that is not mapped piece by piece

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

// Share implements Sharer.
func (s *segments) Share(to *Shared, m Mem) error {
	to.Export, to.Segments = Export{}, to.Segments[:0]
	if err := s.whole.mayExport(m); err != nil {
		return err
	}
	addr := uintptr(m.ptr)
	var unshared error // set once the driver knows the memory: a later failure is about sharing
	err := s.c.enter(func() error {
		base, n, err := s.d.addressRange(addr)
		if err != nil {
			return err
		}
		known, fits := s.at(base) != nil, addr >= base && m.n <= n-int(addr-base)
		if known || !fits {
			unshared = ErrNotExportable
			if err := s.list(to, addr, m.n); err == nil || !fits {
				return err
			}
			to.Segments = to.Segments[:0] // it was unmapped, and has become memory of another kind
		}
		unshared = nil
		if err = s.whole.name(&to.Export, m, &unshared); err != nil && unshared != nil && !known {
			to.Export = Export{}
			if s.list(to, addr, m.n) == nil {
				return nil
			}
			to.Segments = to.Segments[:0]
		}
		return err
	})
	return s.whole.failed("Export", m, err, unshared)
}

// list lists the pieces in which n bytes at addr lie. The context is current.
func (s *segments) list(to *Shared, addr uintptr, n int) error {
	for n > 0 {
		base, size, err := s.d.addressRange(addr)
		if err != nil {
			return err
		}
		if addr < base || addr-base >= uintptr(size) {
			return s.c.invalid("%#x is not in its allocation of %d bytes at %#x: %w", addr, size, base, ErrNotExportable)
		}
		seg, err := s.current(base, size)
		if err != nil {
			return err
		}
		off := int(addr - base)
		part := min(n, size-off)
		to.Segments = append(to.Segments, Segment{ID: seg.id, Base: uint64(base), Size: size, Offset: off, Len: part})
		addr += uintptr(part)
		n -= part
	}
	return nil
}

// current returns what is mapped at base now.
func (s *segments) current(base uintptr, size int) (*segment, error) {
	h, err := s.d.handleAt(base)
	if err != nil {
		return nil, err
	}
	if seg := s.at(base); seg != nil && seg.handle == h && seg.size == size {
		return seg, s.d.handleRelease(h)
	}
	seg, err := s.add(base, size, h)
	if err != nil {
		_ = s.d.handleRelease(h) // the first error tells more
	}
	return seg, err
}

// add takes note of a piece that is new, or has taken the place of another one.
func (s *segments) add(base uintptr, size int, h uint64) (*segment, error) {
	ok, err := s.d.handleShareable(h)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, s.c.invalid("%d bytes at %#x are mapped from an allocation without a file descriptor: %w: %s", size, base, ErrNotExportable, whatIsShared)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if seg := s.at(base); seg != nil {
		if seg.handle == h && seg.size == size { // another goroutine was faster
			return seg, s.d.handleRelease(h)
		}
		s.put(base, nil)
		s.letGo(seg)
	}
	if m := s.known.Load(); m != nil && len(*m) >= maxSegments {
		s.dropUnmapped()
		if len(*s.known.Load()) >= maxSegments {
			return nil, s.c.invalid("%d mapped allocations are shared, which is the limit: %w", maxSegments, ErrNotExportable)
		}
	}
	s.last++
	seg := &segment{id: s.last, size: size, handle: h}
	s.put(base, seg)
	return seg, nil
}

// letGo gives back the handle of a piece that is not known any more. Where a stream may wait
// for a message it is kept to the end: releasing the last one frees memory. s.mu is
// held.
func (s *segments) letGo(seg *segment) {
	if s.c.MayBlock() || s.d.handleRelease(seg.handle) != nil {
		s.stale = append(s.stale, seg.handle)
	}
}

// dropUnmapped forgets what is not mapped any more. s.mu is held.
func (s *segments) dropUnmapped() {
	old := s.known.Load()
	if old == nil {
		return
	}
	mapped, gone := map[uintptr]*segment{}, []*segment(nil)
	for base, seg := range *old {
		h, err := s.d.handleAt(base)
		if err == nil {
			_ = s.d.handleRelease(h) // it was retained a moment ago
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
	s.known.Store(&mapped)
	for _, seg := range gone {
		s.letGo(seg)
	}
}

// TidySegments implements Sharer.
func (s *segments) TidySegments() error {
	if s.known.Load() == nil {
		return nil
	}
	return s.c.with("TidySegments", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.dropUnmapped()
		return nil
	})
}

// HasSegment implements Sharer.
func (s *segments) HasSegment(k Segment) bool {
	seg := s.at(uintptr(k.Base))
	return seg != nil && seg.id == k.ID
}

// SegmentFile implements Sharer.
func (s *segments) SegmentFile(k Segment) (fd int, err error) {
	fd = -1
	op := fmt.Sprintf("SegmentFile of %d bytes at %#x", k.Size, k.Base)
	err = s.c.enter(func() error {
		s.mu.Lock() // the handle is not released meanwhile
		defer s.mu.Unlock()
		seg := s.at(uintptr(k.Base))
		if seg == nil || seg.id != k.ID {
			return s.c.invalid("%s: %w: it was unmapped", op, ErrNotExportable)
		}
		var err error
		fd, err = s.d.handleExport(seg.handle)
		return err
	})
	if err != nil {
		return -1, s.c.failedAs(op, whatIsShared, err, ErrNotExportable)
	}
	return fd, nil
}

// close lets go of all. The context is current.
func (s *segments) close(note func(op string, err error)) {
	if m := s.known.Swap(nil); m != nil {
		for _, seg := range *m {
			note("Close: release an allocation", s.d.handleRelease(seg.handle))
		}
	}
	for _, h := range s.stale {
		note("Close: release an allocation", s.d.handleRelease(h))
	}
	s.stale = nil
}
