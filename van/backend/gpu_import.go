package backend

// Memory of other processes, mapped here: whole allocations, and pieces.

import (
	"errors"
	"fmt"
	"sync"
)

// importer is what is mapped.
type importer struct {
	c *gpuContext
	d shareDriver

	mu     sync.Mutex
	whole  map[importKey]*imported
	pieces map[uintptr]*importedSegment
}

// imported is the owner of another process's memory.
type imported struct {
	c     *gpuContext
	key   importKey
	addr  uintptr
	users int // Imports without CloseImport; under the importer's mutex
}

// importKey identifies an allocation. The handle is not enough: the driver may give a new
// allocation that of a freed one.
type importKey struct {
	handle     [64]byte
	allocation uint64
}

// Import maps another process's allocation.
func (p *importer) Import(e Export) (Mem, error) {
	if e.Size <= 0 {
		return Mem{}, p.c.invalid("Import of %d bytes: want at least 1", e.Size)
	}
	var m Mem
	err := p.c.enter(func() error {
		p.mu.Lock() // held during ipcOpen: concurrent Imports of one allocation share its mapping
		defer p.mu.Unlock()
		key := importKey{e.Handle, e.Allocation}
		i := p.whole[key]
		if i == nil {
			i = &imported{c: p.c, key: key}
			var err error
			if i.addr, err = p.d.ipcOpen(e.Handle); err != nil {
				return err
			}
			p.whole[key] = i
		}
		i.users++
		if err := p.check(i, e.Size); err != nil {
			_ = p.drop(i) // the first error tells more
			return err
		}
		m = At(pointer(i.addr), e.Size, p.c.Device(), i)
		return nil
	})
	if err != nil {
		return Mem{}, p.c.refused(fmt.Sprintf("Import of %d bytes", e.Size), "the handle is stale, of this very process, or of a device that this one does not reach", err, ErrNotExportable)
	}
	return m, nil
}

// check compares the mapping with the size that the peer has announced.
func (p *importer) check(i *imported, size int) error {
	_, n, err := p.d.addressRange(i.addr)
	if err == nil && n < size {
		err = p.c.invalid("the peer says %d bytes, the allocation has %d: %w", size, n, ErrNotExportable)
	}
	return err
}

// drop removes one user; the mutex is held and the context is current.
func (p *importer) drop(i *imported) error {
	if i.users--; i.users > 0 {
		return nil
	}
	delete(p.whole, i.key)
	return p.d.ipcClose(i.addr)
}

// CloseImport releases memory that Import returned.
func (p *importer) CloseImport(m Mem) error {
	if i, ok := m.owner.(*importedSegment); ok && i.c == p.c {
		return p.closeSegment(i)
	}
	i, ok := m.owner.(*imported)
	if !ok || i.c != p.c {
		return p.c.invalid("CloseImport of %d bytes at %#x: not what Import returned", m.Len(), uintptr(m.ptr))
	}
	return p.c.with("CloseImport", func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if i.users == 0 {
			return p.c.invalid("CloseImport of %d bytes at %#x: closed before", m.Len(), uintptr(m.ptr))
		}
		return p.drop(i)
	})
}

// importedSegment is the owner of a piece of another process's memory.
type importedSegment struct {
	c    *gpuContext
	addr uintptr
	n    int
}

// ImportSegment implements Sharer.
func (p *importer) ImportSegment(fd, size int) (Mem, error) {
	if size <= 0 {
		return Mem{}, p.c.invalid("ImportSegment of %d bytes: want at least 1", size)
	}
	i := &importedSegment{c: p.c, n: size}
	err := p.c.enter(func() error {
		h, err := p.d.handleImport(fd)
		if err != nil {
			return err
		}
		err = p.mapSegment(i, h)
		if e := p.d.handleRelease(h); err == nil && e != nil { // the mapping keeps the memory
			err = errors.Join(e, p.unmapSegment(i))
		}
		if err == nil {
			p.mu.Lock()
			p.pieces[i.addr] = i
			p.mu.Unlock()
		}
		return err
	})
	if err != nil {
		return Mem{}, p.c.refused(fmt.Sprintf("ImportSegment of %d bytes", size), "the file is of no device memory, of less of it, or of a device that this one does not reach", err, ErrNotExportable)
	}
	return At(pointer(i.addr), size, p.c.Device(), i), nil
}

// mapSegment maps i.n bytes of h where this device reaches them.
func (p *importer) mapSegment(i *importedSegment, h uint64) (err error) {
	if i.addr, err = p.d.addressReserve(i.n); err != nil {
		return err
	}
	if err = p.d.memMap(i.addr, i.n, h); err != nil {
		_ = p.d.addressFree(i.addr, i.n) // the first error tells more
		return err
	}
	if err = p.d.memAccess(i.addr, i.n, p.c.id); err == nil {
		var n int
		if _, n, err = p.d.addressRange(i.addr); err == nil && n != i.n {
			err = p.c.invalid("the peer says %d bytes, the allocation has %d: %w", i.n, n, ErrNotExportable)
		}
	}
	if err != nil {
		_ = p.unmapSegment(i)
	}
	return err
}

func (p *importer) unmapSegment(i *importedSegment) error {
	if err := p.d.memUnmap(i.addr, i.n); err != nil {
		return err
	}
	return p.d.addressFree(i.addr, i.n)
}

// closeSegment implements CloseImport for a result of ImportSegment.
func (p *importer) closeSegment(i *importedSegment) error {
	return p.c.with("CloseImport", func() error {
		p.mu.Lock()
		open := p.pieces[i.addr] == i
		delete(p.pieces, i.addr)
		p.mu.Unlock()
		if !open {
			return p.c.invalid("CloseImport of %d bytes at %#x: closed before", i.n, i.addr)
		}
		return p.unmapSegment(i)
	})
}

// held is how many mappings there are.
func (p *importer) held() int { return len(p.whole) + len(p.pieces) }

// close ends all. The context is current.
func (p *importer) close(note func(op string, err error)) {
	for _, i := range p.whole {
		note("Close: end an import", p.d.ipcClose(i.addr))
	}
	for _, i := range p.pieces {
		note("Close: end an import", p.unmapSegment(i))
	}
	p.whole, p.pieces = nil, nil
}
