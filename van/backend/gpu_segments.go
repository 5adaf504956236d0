package backend

// Memory that is mapped piece by piece (cuMemCreate, cuMemMap), as PyTorch's allocator does
// with expandable_segments: it has no CUDA IPC handle, but each piece has a file descriptor.

import (
	"fmt"
	"maps"
)

// segment is one piece.
type segment struct {
	id     uint64
	size   int
	handle uint64
}

// maxSegments bounds the handles that are held.
const maxSegments = 16384

func (x *exporter) at(base uintptr) *segment {
	if m := x.known.Load(); m != nil {
		return (*m)[base]
	}
	return nil
}

// put replaces the record of base; nil removes it. x.mu is held.
func (x *exporter) put(base uintptr, seg *segment) {
	m := map[uintptr]*segment{}
	if old := x.known.Load(); old != nil {
		m = maps.Clone(*old)
	}
	delete(m, base)
	if seg != nil {
		m[base] = seg
	}
	x.known.Store(&m)
}

// Share implements Sharer.
func (x *exporter) Share(to *Shared, m Mem) error {
	to.Export, to.Segments = Export{}, to.Segments[:0]
	if err := x.mayExport(m); err != nil {
		return err
	}
	addr := uintptr(m.ptr)
	var unshared error         // set when the driver knows the memory: a failure is about sharing
	if x.known.Load() == nil { // none that is mapped piece by piece: as a rule this is all
		if x.c.live(func() error { return x.name(&to.Export, m, &unshared) }) == nil {
			return nil
		}
		to.Export, unshared = Export{}, nil
	}
	err := x.c.enter(func() error {
		base, n, err := x.d.addressRange(addr)
		if err != nil {
			return err
		}
		known, fits := x.at(base) != nil, addr >= base && m.Len() <= n-int(addr-base)
		if known || !fits {
			unshared = ErrNotExportable
			if err := x.list(to, addr, m.Len()); err == nil || !fits {
				return err
			}
			to.Segments = to.Segments[:0] // it was unmapped, and has become memory of another kind
		}
		unshared = nil
		if err = x.name(&to.Export, m, &unshared); err != nil && unshared != nil && !known {
			to.Export = Export{}
			if x.list(to, addr, m.Len()) == nil {
				return nil
			}
			to.Segments = to.Segments[:0]
		}
		return err
	})
	return x.failed("Export", m, err, unshared)
}

// list lists the pieces in which n bytes at addr lie. The context is current.
func (x *exporter) list(to *Shared, addr uintptr, n int) error {
	for n > 0 {
		base, size, err := x.d.addressRange(addr)
		if err != nil {
			return err
		}
		if addr < base || addr-base >= uintptr(size) {
			return x.c.invalid("%#x is not in its allocation of %d bytes at %#x: %w", addr, size, base, ErrNotExportable)
		}
		seg, err := x.current(base, size)
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
func (x *exporter) current(base uintptr, size int) (*segment, error) {
	h, err := x.d.handleAt(base)
	if err != nil {
		return nil, err
	}
	if seg := x.at(base); seg != nil && seg.handle == h && seg.size == size {
		return seg, x.d.handleRelease(h)
	}
	seg, err := x.add(base, size, h)
	if err != nil {
		_ = x.d.handleRelease(h) // the first error tells more
	}
	return seg, err
}

// add takes note of a piece that is new, or has taken the place of another one.
func (x *exporter) add(base uintptr, size int, h uint64) (*segment, error) {
	ok, err := x.d.handleShareable(h)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, x.c.invalid("%d bytes at %#x are mapped from an allocation without a file descriptor: %w: %s", size, base, ErrNotExportable, whatIsShared)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if seg := x.at(base); seg != nil {
		if seg.handle == h && seg.size == size { // another goroutine was faster
			return seg, x.d.handleRelease(h)
		}
		x.put(base, nil)
		x.releaseHandle(seg)
	}
	if m := x.known.Load(); m != nil && len(*m) >= maxSegments {
		x.dropUnmapped()
		if len(*x.known.Load()) >= maxSegments {
			return nil, x.c.invalid("%d mapped allocations are shared, which is the limit: %w", maxSegments, ErrNotExportable)
		}
	}
	x.last++
	seg := &segment{id: x.last, size: size, handle: h}
	x.put(base, seg)
	return seg, nil
}

// releaseHandle releases the handle of a piece that has been removed. If a stream may wait for a message, the handle is
// kept until Close, because releasing the last handle frees memory. x.mu is held.
func (x *exporter) releaseHandle(seg *segment) {
	if x.c.MayBlock() || x.d.handleRelease(seg.handle) != nil {
		x.stale = append(x.stale, seg.handle)
	}
}

// dropUnmapped removes pieces that are not mapped any more. x.mu is held.
func (x *exporter) dropUnmapped() {
	old := x.known.Load()
	if old == nil {
		return
	}
	mapped, gone := map[uintptr]*segment{}, []*segment(nil)
	for base, seg := range *old {
		h, err := x.d.handleAt(base)
		if err == nil {
			_ = x.d.handleRelease(h) // it was retained a moment ago
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
	x.known.Store(&mapped)
	for _, seg := range gone {
		x.releaseHandle(seg)
	}
}

// TidySegments implements Sharer.
func (x *exporter) TidySegments() error {
	if x.known.Load() == nil {
		return nil
	}
	return x.c.with("TidySegments", func() error {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.dropUnmapped()
		return nil
	})
}

// HasSegment implements Sharer.
func (x *exporter) HasSegment(k Segment) bool {
	seg := x.at(uintptr(k.Base))
	return seg != nil && seg.id == k.ID
}

// SegmentFile implements Sharer.
func (x *exporter) SegmentFile(k Segment) (fd int, err error) {
	fd = -1
	op := fmt.Sprintf("SegmentFile of %d bytes at %#x", k.Size, k.Base)
	err = x.c.enter(func() error {
		x.mu.Lock() // the handle is not released meanwhile
		defer x.mu.Unlock()
		seg := x.at(uintptr(k.Base))
		if seg == nil || seg.id != k.ID {
			return x.c.invalid("%s: %w: it was unmapped", op, ErrNotExportable)
		}
		var err error
		fd, err = x.d.handleExport(seg.handle)
		return err
	})
	if err != nil {
		return -1, x.c.failedAs(op, whatIsShared, err, ErrNotExportable)
	}
	return fd, nil
}

// close releases all handles. The context is current.
func (x *exporter) close(note func(op string, err error)) {
	if m := x.known.Swap(nil); m != nil {
		for _, seg := range *m {
			note("Close: release an allocation", x.d.handleRelease(seg.handle))
		}
	}
	for _, h := range x.stale {
		note("Close: release an allocation", x.d.handleRelease(h))
	}
	x.stale = nil
}
