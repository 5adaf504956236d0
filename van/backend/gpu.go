package backend

// The GPU backend, put together: opening and closing it, and its description of devices.

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// gpu is the backend of one CUDA device, made of parts that own their data. All of it goes
// through the driver interface and is tested without a GPU.
type gpu struct {
	gpuContext
	waiter waiter
	flags  flagPool

	deviceMemory
	hostMemory
	streamPool
	events
	copies
	signals
	exporter
	importer
}

// newGPU opens device id on driver d.
func newGPU(d driver, id int) (Backend, error) {
	n, err := startDriver(d)
	if err != nil {
		return nil, fmt.Errorf("backend GPU: %w: %w", ErrUnavailable, err)
	}
	if id < 0 || id >= n {
		return nil, fmt.Errorf("backend GPU: %w: device %d (STEPMESH_GPU): this process sees %d (CUDA_VISIBLE_DEVICES), want 0 to %d", ErrUnavailable, id, n, n-1)
	}
	g := assemble(d, id)
	if g.dev, err = d.device(id); err != nil {
		return nil, fmt.Errorf("backend GPU: %w: %w", ErrUnavailable, g.gpuContext.failed("open", err))
	}
	g.blocking = d.mayBlock(g.dev)
	if g.info, err = describe(d, id, n); err != nil {
		return nil, fmt.Errorf("backend GPU: %w: %w", ErrUnavailable, g.gpuContext.failed("describe", err))
	}
	if g.ctx, err = d.retain(g.dev); err != nil {
		return nil, fmt.Errorf("backend GPU: %w: %w", ErrUnavailable, g.gpuContext.failed("open the primary context", err))
	}
	if err := g.flags.probe(); err != nil {
		return nil, errors.Join(fmt.Errorf("backend GPU: %w", err), g.Close())
	}
	return g, nil
}

// assemble makes the parts. The device is not open yet.
func assemble(d driver, id int) *gpu {
	g := &gpu{gpuContext: gpuContext{d: d, id: id}}
	c, s, w := &g.gpuContext, &g.streamPool, &g.waiter
	g.waiter = waiter{c: c, oversubscribed: runtime.GOMAXPROCS(0) <= 3}
	g.flags = flagPool{c: c, d: d, streams: s}
	g.deviceMemory = deviceMemory{c: c, d: d, mems: map[uintptr]*deviceMem{}}
	g.hostMemory = hostMemory{c: c, d: d, hosts: map[uintptr]*hostMem{}}
	g.streamPool = streamPool{c: c, d: d, once: d, made: map[uintptr]struct{}{}}
	g.events = events{c: c, streams: s, flags: &g.flags, waiter: w, made: map[uintptr]struct{}{}}
	g.copies = copies{c: c, streams: s, waiter: w}
	g.signals = signals{c: c, d: d}
	g.exporter = exporter{c: c, d: d, once: d}
	g.importer = importer{c: c, d: d, whole: map[importKey]*imported{}, pieces: map[uintptr]*importedSegment{}}
	g.Configure(DefaultOptions())
	return g
}

// startDriver starts the driver and counts its devices. It adds the usual cause to an error.
func startDriver(d driver) (devices int, err error) {
	if err = d.start(); err == nil {
		return d.count()
	}
	var de *driverError
	switch {
	case !errors.As(err, &de):
	case de.code == codeNoDevice:
		err = fmt.Errorf("%w: this process sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES", err)
	case de.code < 0:
		err = fmt.Errorf("%w: this machine has no driver of NVIDIA, or the loader does not find it", err)
	}
	return 0, err
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
	if err := cmp.Or(errs[:]...); err != nil {
		return i, err
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
	n, err := startDriver(d)
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

func (g *gpu) Name() string { return "GPU" }

// Describe implements Describer.
func (g *gpu) Describe() (info Info, free int64, err error) {
	err = g.with("Describe", func() error {
		free, _, err = g.deviceMemory.d.memInfo()
		return err
	})
	info = g.info
	info.Peers = append([]int(nil), g.info.Peers...)
	return info, free, err
}

// callLimit and closeLimit are how long Close waits for calls of the driver, and then for streams.
const (
	callLimit  = 5 * time.Second
	closeLimit = time.Second
)

// Close releases the device. It waits up to closeLimit for flags that streams have yet to
// write; flags that are still to be written then are not freed, and the error says so.
//
// If streams may wait for the CPU and do not end within closeLimit, nothing is freed: the
// driver would wait for them, perhaps forever. The error wraps ErrInUse and says how much
// stays allocated until the process ends. If a call of the driver does not return within
// callLimit, the error wraps ErrInUse, too, and the backend stays open.
func (g *gpu) Close() error {
	g.life.closing.Lock()
	defer g.life.closing.Unlock()
	// A Lock that waits would block new readers, and one of these may be the call that lets the driver return.
	for end := time.Now().Add(callLimit); !g.life.TryLock(); clock.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return g.invalid("Close: %w: a call of the driver has not ended after %s; nothing is freed", ErrInUse, callLimit)
		}
	}
	was := g.life.closed
	g.life.closed = true
	g.life.Unlock() // no use of the driver is under way, and none begins
	if was {
		return nil
	}
	if g.MayBlock() {
		if err := g.awaitStreams(closeLimit); err != nil {
			return g.invalid("Close: %w: %w; nothing is freed, since the driver waits for streams first: %s", ErrInUse, err, g.holdings())
		}
	}
	g.flags.settle(closeLimit)
	var errs []error
	note := func(op string, err error) {
		if err != nil {
			errs = append(errs, g.gpuContext.failed(op, err))
		}
	}
	err := g.inContext(func() error {
		g.signals.close(note)
		g.events.close(note)
		g.streamPool.close(note)
		g.importer.close(note)
		g.exporter.close(note)
		g.deviceMemory.close(note)
		g.hostMemory.close(note)
		if late := g.flags.settle(0); late > 0 { // freeing may have waited for the streams
			errs = append(errs, g.invalid("Close: %d events are recorded on streams that have not come so far; their flags are not freed", late))
			return nil
		}
		g.flags.close(note)
		return nil
	})
	note("Close", err)
	note("Close: release the primary context", g.gpuContext.d.release(g.dev))
	return errors.Join(errs...)
}

// awaitStreams waits until all streams of the device are idle, including those that other
// code of this process has made. It returns an error at the limit.
func (g *gpu) awaitStreams(limit time.Duration) error {
	done := make(chan error, 1)
	// The driver's wait has no limit, and other code's streams are not known here. After
	// the limit this goroutine's thread stays in the driver until the streams end.
	go func() { done <- g.inContext(g.gpuContext.d.synchronize) }()
	select {
	case <-time.After(limit):
		return fmt.Errorf("streams of the device have not ended after %s, and may wait for the CPU", limit)
	case err := <-done:
		if err = g.gpuContext.failed("wait for streams", err); errors.Is(err, ErrDeviceLost) {
			return nil // no stream runs on a failed device
		}
		return err
	}
}

// holdings describes what Close leaves allocated.
func (g *gpu) holdings() string {
	device, host := g.deviceMemory.held(), g.hostMemory.held()+len(g.flags.pages)*flagPage
	return fmt.Sprintf("%d bytes of the device, %d bytes of host memory and %d mappings of other processes' memory are left", device, host, g.importer.held())
}
