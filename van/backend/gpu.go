package backend

// The GPU backend: opening a device, its context, its memory, and the conversion of
// driver errors. All of it goes through the driver interface and is tested without a GPU.

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
)

// gpu is the backend of one CUDA device. It works in the device's primary context,
// which it shares with PyTorch and with other backends of the device in the same process.
// Backends of different devices share no lock.
//
// Goroutines change threads, and a thread of Python's has a context of its own: every use
// of the driver is between enter and leave, which lock the thread, make the device's
// context current and restore the former one.
type gpu struct {
	d    driver
	id   int
	dev  int
	ctx  uintptr
	info Info

	oversubscribed bool // GOMAXPROCS is so small that a spinning wait must yield
	driverEvents   atomic.Bool
	blocking       *atomic.Bool // streams may wait for the CPU; shared by all backends of the device
	spin           atomic.Int64 // nanoseconds

	life   sync.RWMutex // held for reading by every use of the driver
	closed bool

	mu      sync.Mutex
	mems    map[uintptr]*deviceMem
	hosts   map[uintptr]*hostMem
	imports map[importKey]*imported
	mapped  map[uintptr]*importedSegment
	streams map[uintptr]struct{} // of NewStream
	events  map[uintptr]struct{} // of the driver
	idle    []uintptr            // streams not in use
	late    []uintptr            // likewise, but what was queued there may not be done yet
	flags   flagPool
	signals signalling

	segments segments
}

// deviceAlign is what cuMemAlloc promises.
const deviceAlign = 256

// deviceMem is the owner of memory that Alloc returned. It counts the holders.
type deviceMem struct {
	addr uintptr
	n    int
	held atomic.Int32
}

func (m *deviceMem) Retain()  { m.held.Add(1) }
func (m *deviceMem) Release() { m.held.Add(-1) }

// newGPU opens device id on driver d.
func newGPU(d driver, id int) (Backend, error) {
	if err := startDriver(d); err != nil {
		return nil, fmt.Errorf("backend GPU: %w: %w", ErrUnavailable, err)
	}
	n, err := d.count()
	if err != nil {
		return nil, fmt.Errorf("backend GPU: %w: %w", ErrUnavailable, err)
	}
	if id < 0 || id >= n {
		return nil, fmt.Errorf("backend GPU: %w: device %d (STEPMESH_GPU): this process sees %d (CUDA_VISIBLE_DEVICES), want 0 to %d", ErrUnavailable, id, n, n-1)
	}
	g := &gpu{d: d, id: id, oversubscribed: runtime.GOMAXPROCS(0) <= 3, mems: map[uintptr]*deviceMem{}, hosts: map[uintptr]*hostMem{},
		imports: map[importKey]*imported{}, mapped: map[uintptr]*importedSegment{}, streams: map[uintptr]struct{}{}, events: map[uintptr]struct{}{}}
	g.Configure(DefaultOptions())
	if g.dev, err = d.device(id); err != nil {
		return nil, fmt.Errorf("backend GPU: %w: %w", ErrUnavailable, g.failed("open", err))
	}
	g.blocking = d.mayBlock(g.dev)
	if g.info, err = describe(d, id, n); err != nil {
		return nil, fmt.Errorf("backend GPU: %w: %w", ErrUnavailable, g.failed("describe", err))
	}
	if g.ctx, err = d.retain(g.dev); err != nil {
		return nil, fmt.Errorf("backend GPU: %w: %w", ErrUnavailable, g.failed("open the primary context", err))
	}
	if err := g.probeFlags(); err != nil {
		return nil, errors.Join(fmt.Errorf("backend GPU: %w", err), g.Close())
	}
	return g, nil
}

// startDriver starts the driver. It adds the usual cause to an error.
func startDriver(d driver) error {
	err := d.start()
	var de *driverError
	switch {
	case !errors.As(err, &de):
		return err
	case de.code == codeNoDevice:
		return fmt.Errorf("%w: this process sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES", err)
	case de.code < 0:
		return fmt.Errorf("%w: this machine has no driver of NVIDIA, or the loader does not find it", err)
	default:
		return err
	}
}

// describe returns what the driver knows of device id, without opening it.
func describe(d driver, id, count int) (Info, error) {
	i := Info{Device: Device{Type: GPU, ID: int32(id)}}
	dev, err := d.device(id)
	if err != nil {
		return i, err
	}
	v, err := d.version()
	if err != nil {
		return i, err
	}
	i.Driver = fmt.Sprintf("CUDA %d.%d", v/1000, v%1000/10)
	attr := func(a deviceAttribute) int {
		n, err := d.attribute(dev, a)
		if err != nil {
			return 0 // an old driver does not know the attribute
		}
		return n
	}
	i.ComputeMajor, i.ComputeMinor, i.DMABuf = attr(attrComputeMajor), attr(attrComputeMinor), attr(attrDMABuf) != 0
	var errs [4]error
	i.Name, errs[0] = d.name(dev)
	i.UUID, errs[1] = d.uuid(dev)
	i.PCIBusID, errs[2] = d.pciBusID(dev)
	i.Memory, errs[3] = d.totalMem(dev)
	for _, err := range errs {
		if err != nil {
			return i, err
		}
	}
	for other := range count {
		if other == id {
			continue
		}
		peer, err := d.device(other)
		if err != nil {
			return i, err
		}
		if ok, err := d.canAccessPeer(dev, peer); err != nil {
			return i, err
		} else if ok {
			i.Peers = append(i.Peers, other)
		}
	}
	return i, nil
}

// describeAll lists the devices that this process sees, without opening any.
func describeAll(d driver) ([]Info, error) {
	if err := startDriver(d); err != nil {
		return nil, fmt.Errorf("GPUs: %w: %w", ErrUnavailable, err)
	}
	n, err := d.count()
	if err != nil {
		return nil, fmt.Errorf("GPUs: %w: %w", ErrUnavailable, err)
	}
	all := make([]Info, n)
	for i := range all {
		if all[i], err = describe(d, i, n); err != nil {
			return nil, fmt.Errorf("GPUs: gpu:%d: %w", i, err)
		}
	}
	return all, nil
}

func (g *gpu) Name() string   { return "GPU" }
func (g *gpu) Device() Device { return Device{Type: GPU, ID: int32(g.id)} }

// Configure sets the kind of new events, and how long waits spin.
func (g *gpu) Configure(o Options) {
	g.driverEvents.Store(o.DriverEvents)
	g.spin.Store(int64(o.Spin))
}

var _ StreamBlocker = (*gpu)(nil)

// MayBlock implements StreamBlocker. While a stream waits, cuMemFree and
// cuIpcCloseMemHandle block, and cuMemcpyAsync, cuMemAlloc and cuStreamCreate block
// behind those (observed with CUDA 13 on an H200).
func (g *gpu) MayBlock() bool { return g.blocking.Load() }

// Describe implements Describer.
func (g *gpu) Describe() (info Info, free int64, err error) {
	err = g.with("Describe", func() error {
		free, _, err = g.d.memInfo()
		return err
	})
	info = g.info
	info.Peers = append([]int(nil), g.info.Peers...)
	return info, free, err
}

// with runs f, which calls the driver, on a thread where the device's context is current.
// An error of f is returned with op.
func (g *gpu) with(op string, f func() error) error {
	err := g.enter(f)
	if err != nil && err != ErrClosed {
		return g.failed(op, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %s: %w", g.Device(), op, err)
	}
	return nil
}

func (g *gpu) enter(f func() error) error {
	g.life.RLock()
	defer g.life.RUnlock()
	if g.closed {
		return ErrClosed
	}
	return g.inContext(f)
}

func (g *gpu) inContext(f func() error) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	was, err := g.d.enter(g.ctx)
	if err != nil {
		return err
	}
	err = f()
	if e := g.d.leave(was); err == nil {
		err = e
	}
	return err
}

// failed makes a DeviceError of a driver's error; other errors pass unchanged.
func (g *gpu) failed(op string, err error) error {
	return g.failedAs(op, "", err, nil)
}

// failedAs is failed with a detail, and with a kind for results that have none.
func (g *gpu) failedAs(op, detail string, err, kind error) error {
	de, ok := err.(*driverError)
	if !ok {
		return err
	}
	if k := de.kind(); k != nil {
		kind = k
	}
	return &DeviceError{Device: g.Device(), Op: op, Call: de.call, Code: de.code, Name: de.name, Detail: detail, Kind: kind}
}

func (g *gpu) invalid(format string, args ...any) error {
	return fmt.Errorf("%s: "+format, append([]any{g.Device()}, args...)...)
}

// Alloc returns device memory, aligned to 256 bytes.
func (g *gpu) Alloc(n int) (Mem, error) {
	if n < 0 {
		return Mem{}, g.invalid("Alloc(%d): want a length of at least 0", n)
	}
	if n == 0 {
		return Mem{dev: g.Device()}, nil
	}
	m := &deviceMem{n: n}
	var free, total int64
	err := g.enter(func() (err error) {
		if m.addr, err = g.d.memAlloc(n); err != nil {
			free, total, _ = g.d.memInfo() // both 0 when that fails too
			return err
		}
		g.mu.Lock()
		g.mems[m.addr] = m
		g.mu.Unlock()
		return nil
	})
	if err == ErrClosed {
		return Mem{}, g.invalid("Alloc: %w", err)
	}
	if err != nil {
		return Mem{}, g.failedAs(fmt.Sprintf("Alloc of %d bytes", n), fmt.Sprintf("%d of %d bytes are free", free, total), err, nil)
	}
	return At(pointer(m.addr), n, g.Device(), m), nil
}

// Free gives back what Alloc returned. Memory that a transport still holds is refused
// with ErrInUse.
func (g *gpu) Free(m Mem) error {
	if m.n == 0 {
		return nil
	}
	addr := uintptr(m.ptr)
	return g.with("Free", func() error {
		g.mu.Lock()
		have := g.mems[addr]
		switch {
		case have == nil || have.n != m.n || m.dev != g.Device():
			g.mu.Unlock()
			return g.invalid("Free of %d bytes at %#x on %s: not what Alloc returned, or freed before", m.n, addr, m.dev)
		case have.held.Load() > 0:
			g.mu.Unlock()
			return g.invalid("Free of %d bytes at %#x: %w: a message that is under way needs them", m.n, addr, ErrInUse)
		}
		delete(g.mems, addr)
		g.mu.Unlock()
		return g.d.memFree(addr)
	})
}
