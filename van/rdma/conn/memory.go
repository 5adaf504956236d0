package conn

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the library's own registered memory.

// Block is memory of the library, outside of the Go heap, that is registered with one device.
type Block struct {
	Mem backend.Mem
	MR  verbs.MR
	// Deregister ends the device's access. The memory stays mapped until Close. Further calls return the first result.
	Deregister func() error
	free       func() error
}

const PageSize = 4096

// NewBlock maps and registers n bytes of host memory.
func NewBlock(dev verbs.Device, n int, a verbs.Access) (*Block, error) {
	b, err := unix.Mmap(-1, 0, (n+PageSize-1)&^(PageSize-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	mem := backend.Bytes(b[:n])
	mr, err := dev.Register(mem.Ptr(), n, a)
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(b))
	}
	return &Block{mem, mr, sync.OnceValue(mr.Deregister), func() error { return unix.Munmap(b) }}, nil
}

// NewDeviceBlock allocates and registers n bytes of back's memory.
func NewDeviceBlock(dev verbs.Device, back backend.Backend, n int, a verbs.Access) (*Block, error) {
	mem, err := back.Alloc(n)
	if err != nil {
		return nil, err
	}
	mr, err := register(dev, back, mem, a)
	if err != nil {
		return nil, errors.Join(err, back.Free(mem))
	}
	return &Block{mem, mr, sync.OnceValue(mr.Deregister), func() error { return back.Free(mem) }}, nil
}

// Close deregisters and frees the memory. If deregistering fails, peers may still write there, and the memory stays. Call it once.
func (b *Block) Close() error {
	if err := b.Deregister(); err != nil {
		return fmt.Errorf("%d bytes stay: %w", b.Mem.Len(), err)
	}
	return b.free()
}

// register registers mem with the device. Host memory is registered by its address. GPU memory is registered as a dma-buf if back can export
// one, else by its address, which needs the driver's peer memory module.
func register(dev verbs.Device, back backend.Backend, mem backend.Mem, a verbs.Access) (verbs.MR, error) {
	if mem.OnHost() {
		return dev.Register(mem.Ptr(), mem.Len(), a)
	}
	mr, shared := registerDMABuf(dev, back, mem, a)
	if shared == nil {
		return mr, nil
	}
	mr, err := dev.Register(mem.Ptr(), mem.Len(), a)
	if err != nil {
		return nil, fmt.Errorf("register %d bytes on %s: %w; GPU memory needs a driver that exports dma-bufs, or the module nvidia_peermem",
			mem.Len(), mem.Device(), errors.Join(fmt.Errorf("as a dma-buf: %w", shared), err))
	}
	return mr, nil
}

func registerDMABuf(dev verbs.Device, back backend.Backend, mem backend.Mem, a verbs.Access) (verbs.MR, error) {
	e, ok := back.(backend.DMABufExporter)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	fd, off, err := e.ExportDMABuf(mem)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return dev.RegisterDMABuf(fd, uint64(off), uint64(mem.Len()), mem.Addr(), a)
}

// Cells allocates small pieces of registered memory for metas.
type Cells struct {
	Device verbs.Device
	mu     sync.Mutex
	blocks []*Block
	free   []Cell
	large  map[*Block]bool // in use
	inUse  int             // number of cells in use
	closed bool
}

// Cell is registered memory for one meta.
type Cell struct {
	Mem   []byte
	Addr  uint64
	RKey  uint32
	large *Block // the block, if the cell has its own
}

const (
	CellSize  = 2048 // a meta with a small payload
	cellsEach = 64   // cells in a block
)

func (c *Cells) Get(n int) (Cell, error) {
	const access = verbs.LocalWrite | verbs.RemoteWrite
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return Cell{}, verbs.ErrClosed
	}
	if n > CellSize {
		b, err := NewBlock(c.Device, n, access)
		if err != nil {
			return Cell{}, err
		}
		if c.large == nil {
			c.large = map[*Block]bool{}
		}
		c.large[b] = true
		return Cell{b.Mem.Host(), b.Mem.Addr(), b.MR.RKey(), b}, nil
	}
	if len(c.free) == 0 {
		b, err := NewBlock(c.Device, CellSize*cellsEach, access)
		if err != nil {
			return Cell{}, err
		}
		c.blocks = append(c.blocks, b)
		mem := b.Mem.Host()
		for i := cellsEach - 1; i >= 0; i-- {
			m := mem[i*CellSize : (i+1)*CellSize : (i+1)*CellSize]
			c.free = append(c.free, Cell{m, uint64(uintptr(unsafe.Pointer(&m[0]))), b.MR.RKey(), nil})
		}
	}
	last := len(c.free) - 1
	x := c.free[last]
	c.free = c.free[:last]
	c.inUse++
	return x, nil
}

func (c *Cells) Put(x Cell) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case x.large != nil:
		delete(c.large, x.large)
		return x.large.Close()
	case x.Mem == nil:
		return nil
	}
	c.inUse--
	c.free = append(c.free, x)
	if c.closed && c.inUse == 0 {
		return c.unmap()
	}
	return nil
}

// Close deregisters everything. Memory that is still in use stays mapped until it is put back.
func (c *Cells) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var errs []error
	for b := range c.large {
		errs = append(errs, b.Deregister())
	}
	for _, b := range c.blocks {
		errs = append(errs, b.Deregister())
	}
	if c.inUse == 0 {
		errs = append(errs, c.unmap())
	}
	return errors.Join(errs...)
}

// unmap frees the blocks. c.mu is held.
func (c *Cells) unmap() error {
	var errs []error
	for _, b := range c.blocks {
		errs = append(errs, b.Close())
	}
	c.blocks, c.free = nil, nil
	return errors.Join(errs...)
}
