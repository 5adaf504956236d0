package rdma

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// block is memory of the library's own, outside of the Go heap, registered with one
// device.
type block struct {
	mem  backend.Mem
	mr   verbs.MR
	free func() error
	once sync.Once // deregisters
	open error     // why it could not be
}

const pageSize = 4096

// newBlock maps and registers n bytes of host memory.
func newBlock(dev verbs.Device, n int, a verbs.Access) (*block, error) {
	b, err := unix.Mmap(-1, 0, (n+pageSize-1)&^(pageSize-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	mem := backend.Bytes(b[:n])
	mr, err := dev.Register(mem.Ptr(), n, a)
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(b))
	}
	return &block{mem: mem, mr: mr, free: func() error { return unix.Munmap(b) }}, nil
}

// newDeviceBlock allocates and registers n bytes of back's memory.
func newDeviceBlock(dev verbs.Device, back backend.Backend, n int, a verbs.Access) (*block, error) {
	mem, err := back.Alloc(n)
	if err != nil {
		return nil, err
	}
	mr, err := register(dev, back, mem, a)
	if err != nil {
		return nil, errors.Join(err, back.Free(mem))
	}
	return &block{mem: mem, mr: mr, free: func() error { return back.Free(mem) }}, nil
}

// deregister ends the device's access; the memory stays until close.
func (b *block) deregister() error {
	b.once.Do(func() { b.open = b.mr.Deregister() })
	return b.open
}

// close also frees the memory, unless peers may still write there. Call it once.
func (b *block) close() error {
	if err := b.deregister(); err != nil {
		return fmt.Errorf("%d bytes stay: %w", b.mem.Len(), err)
	}
	return b.free()
}

// register makes mem known to the device: host memory as it is; a GPU's as a dma-buf
// where back can export it, else by its address, which needs the driver's peer memory
// module.
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

// cells gives out small pieces of registered memory for metas.
type cells struct {
	dev    verbs.Device
	mu     sync.Mutex
	blocks []*block
	free   []cell
	large  map[*block]bool // given out
	out    int             // cells of blocks that are given out
	closed bool
}

// cell is registered memory for one meta.
type cell struct {
	mem   []byte
	addr  uint64
	rkey  uint32
	large *block // of its own
}

const (
	cellSize  = 2048 // a meta with a small payload
	cellsEach = 64   // in a block
)

func (c *cells) get(n int) (cell, error) {
	const access = verbs.LocalWrite | verbs.RemoteWrite
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return cell{}, verbs.ErrClosed
	}
	if n > cellSize {
		b, err := newBlock(c.dev, n, access)
		if err != nil {
			return cell{}, err
		}
		if c.large == nil {
			c.large = map[*block]bool{}
		}
		c.large[b] = true
		return cell{b.mem.Host(), b.mem.Addr(), b.mr.RKey(), b}, nil
	}
	if len(c.free) == 0 {
		b, err := newBlock(c.dev, cellSize*cellsEach, access)
		if err != nil {
			return cell{}, err
		}
		c.blocks = append(c.blocks, b)
		mem := b.mem.Host()
		for i := cellsEach - 1; i >= 0; i-- {
			m := mem[i*cellSize : (i+1)*cellSize : (i+1)*cellSize]
			c.free = append(c.free, cell{m, uint64(uintptr(unsafe.Pointer(&m[0]))), b.mr.RKey(), nil})
		}
	}
	last := len(c.free) - 1
	x := c.free[last]
	c.free = c.free[:last]
	c.out++
	return x, nil
}

func (c *cells) put(x cell) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case x.large != nil:
		delete(c.large, x.large)
		return x.large.close()
	case x.mem == nil:
		return nil
	}
	c.out--
	c.free = append(c.free, x)
	if c.closed && c.out == 0 {
		return c.unmap()
	}
	return nil
}

// close deregisters everything. Memory that somebody still reads stays until it is put
// back.
func (c *cells) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var errs []error
	for b := range c.large {
		errs = append(errs, b.deregister())
	}
	for _, b := range c.blocks {
		errs = append(errs, b.deregister())
	}
	if c.out == 0 {
		errs = append(errs, c.unmap())
	}
	return errors.Join(errs...)
}

// unmap frees the blocks. c.mu is held.
func (c *cells) unmap() error {
	var errs []error
	for _, b := range c.blocks {
		errs = append(errs, b.close())
	}
	c.blocks, c.free = nil, nil
	return errors.Join(errs...)
}
