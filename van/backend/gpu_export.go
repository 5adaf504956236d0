package backend

// Device memory shared with other processes (CUDA IPC) and with other devices (dma-buf).

import (
	"fmt"
	"os"
)

// imported is the owner of another process's memory.
type imported struct {
	g     *gpu
	key   importKey
	addr  uintptr
	users int // Imports without CloseImport; under the gpu's mutex
}

// importKey identifies an allocation. The handle is not enough: the driver may give a new
// allocation that of a freed one.
type importKey struct {
	handle     [64]byte
	allocation uint64
}

// Export names the allocation in which m lies.
func (g *gpu) Export(m Mem) (Export, error) {
	var e Export
	if err := g.mayExport(m); err != nil {
		return e, err
	}
	var unshared error // set once the driver knows the memory: a later failure is about sharing
	err := g.enter(func() error { return g.name(&e, m, &unshared) })
	return e, g.exportError("Export", m, err, unshared)
}

// mayExport refuses what is not this process's memory of this device.
func (g *gpu) mayExport(m Mem) error {
	if m.n == 0 || m.dev != g.Device() {
		return g.invalid("Export of %d bytes on %s: %w", m.n, m.dev, ErrWrongDevice)
	}
	switch m.owner.(type) {
	case *imported, *importedSegment:
		return g.invalid("Export of %d bytes: another process's memory: %w", m.n, ErrNotExportable)
	}
	return nil
}

// name describes m, which lies in one allocation. The context is current.
func (g *gpu) name(e *Export, m Mem, unshared *error) error {
	base, n, err := g.allocation(m)
	if err != nil {
		return err
	}
	e.Base, e.Size, e.Offset = uint64(base), n, int(uintptr(m.ptr)-base)
	if e.Allocation, err = g.d.bufferID(base); err != nil {
		return err
	}
	*unshared = ErrNotExportable
	e.Handle, err = g.d.ipcExport(base)
	return err
}

// allocation returns the allocation in which m lies.
func (g *gpu) allocation(m Mem) (base uintptr, n int, err error) {
	addr := uintptr(m.ptr)
	if base, n, err = g.d.addressRange(addr); err != nil {
		return 0, 0, err
	}
	if addr < base || m.n > n || int(addr-base) > n-m.n {
		return 0, 0, g.invalid("%d bytes at %#x reach beyond their allocation of %d bytes at %#x: %w", m.n, addr, n, base, ErrNotExportable)
	}
	return base, n, nil
}

func (g *gpu) exportError(op string, m Mem, err, kind error) error {
	if err == nil {
		return nil
	}
	op = fmt.Sprintf("%s of %d bytes at %#x", op, m.n, uintptr(m.ptr))
	if _, ok := err.(*driverError); !ok {
		return g.invalid("%s: %w", op, err)
	}
	detail := whatIsShared
	if kind == nil {
		detail = "this is no device memory, or freed memory"
	}
	return g.failedAs(op, detail, err, kind)
}

// Import maps another process's allocation.
func (g *gpu) Import(e Export) (Mem, error) {
	if e.Size <= 0 {
		return Mem{}, g.invalid("Import of %d bytes: want at least 1", e.Size)
	}
	var m Mem
	err := g.enter(func() error {
		g.mu.Lock() // held during ipcOpen: concurrent Imports of one allocation share its mapping
		defer g.mu.Unlock()
		key := importKey{e.Handle, e.Allocation}
		i := g.imports[key]
		if i == nil {
			i = &imported{g: g, key: key}
			var err error
			if i.addr, err = g.d.ipcOpen(e.Handle); err != nil {
				return err
			}
			g.imports[key] = i
		}
		i.users++
		if err := g.checkImport(i, e.Size); err != nil {
			_ = g.dropImport(i) // the first error tells more
			return err
		}
		m = At(pointer(i.addr), e.Size, g.Device(), i)
		return nil
	})
	if err != nil {
		op := fmt.Sprintf("Import of %d bytes", e.Size)
		if _, ok := err.(*driverError); !ok {
			return Mem{}, g.invalid("%s: %w", op, err)
		}
		return Mem{}, g.failedAs(op, "the handle is stale, of this very process, or of a device that this one does not reach", err, ErrNotExportable)
	}
	return m, nil
}

// checkImport compares the mapping with the size that the peer has announced.
func (g *gpu) checkImport(i *imported, size int) error {
	_, n, err := g.d.addressRange(i.addr)
	if err == nil && n < size {
		err = g.invalid("the peer says %d bytes, the allocation has %d: %w", size, n, ErrNotExportable)
	}
	return err
}

// dropImport removes one user; the mutex is held and the context is current.
func (g *gpu) dropImport(i *imported) error {
	if i.users--; i.users > 0 {
		return nil
	}
	delete(g.imports, i.key)
	return g.d.ipcClose(i.addr)
}

// CloseImport gives back what Import returned.
func (g *gpu) CloseImport(m Mem) error {
	if i, ok := m.owner.(*importedSegment); ok && i.g == g {
		return g.closeSegment(i)
	}
	i, ok := m.owner.(*imported)
	if !ok || i.g != g {
		return g.invalid("CloseImport of %d bytes at %#x: not what Import returned", m.n, uintptr(m.ptr))
	}
	return g.with("CloseImport", func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		if i.users == 0 {
			return g.invalid("CloseImport of %d bytes at %#x: closed before", m.n, uintptr(m.ptr))
		}
		return g.dropImport(i)
	})
}

// ExportDMABuf returns m as a dma-buf. It covers whole pages, as the driver demands.
func (g *gpu) ExportDMABuf(m Mem) (fd, offset int, err error) {
	if m.n == 0 || m.dev != g.Device() {
		return -1, 0, g.invalid("ExportDMABuf of %d bytes on %s: %w", m.n, m.dev, ErrWrongDevice)
	}
	if !g.info.DMABuf {
		return -1, 0, g.invalid("ExportDMABuf: %w: the driver has no dma-buf for this device; it needs the open kernel modules", ErrUnsupported)
	}
	page := uintptr(os.Getpagesize())
	addr := uintptr(m.ptr)
	first := addr &^ (page - 1)
	var unshared error
	err = g.enter(func() (err error) {
		if _, _, err = g.allocation(m); err != nil {
			return err
		}
		unshared = ErrNotExportable
		end := (addr + uintptr(m.n) + page - 1) &^ (page - 1)
		fd, err = g.d.dmabuf(first, int(end-first))
		return err
	})
	if err != nil {
		return -1, 0, g.exportError("ExportDMABuf", m, err, unshared)
	}
	return fd, int(addr - first), nil
}
