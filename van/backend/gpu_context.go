package backend

// The context of a GPU: when and where the driver may be called, and how its errors are reported.

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
)

// gpuContext is a device's primary context, which a backend shares with PyTorch and with other
// backends of the device in the same process. Backends of different devices share no lock.
//
// Goroutines change threads, and a thread of Python's has a context of its own: every use
// of the driver is between enter and leave, which lock the thread, make the device's
// context current and restore the former one.
type gpuContext struct {
	d        deviceDriver
	id       int
	dev      int
	ctx      uintptr
	info     Info
	blocking *atomic.Bool // streams may wait for the CPU; shared by all backends of the device

	life life
}

// life is the state of a backend. Every use of the driver holds it for reading.
type life struct {
	sync.RWMutex
	closed  bool
	closing sync.Mutex // held by Close
}

func (c *gpuContext) Device() Device { return Device{Type: GPU, ID: int32(c.id)} }

// MayBlock implements StreamBlocker. While a stream waits, cuMemFree and
// cuIpcCloseMemHandle block, and cuMemcpyAsync, cuMemAlloc and cuStreamCreate block
// behind those (observed with CUDA 13 on an H200).
func (c *gpuContext) MayBlock() bool { return c.blocking.Load() }

// with runs f, which calls the driver, on a thread where the device's context is current.
// An error of f is returned with op.
func (c *gpuContext) with(op string, f func() error) error { return c.failed(op, c.enter(f)) }

func (c *gpuContext) enter(f func() error) error {
	c.life.RLock()
	defer c.life.RUnlock()
	if c.life.closed {
		return ErrClosed
	}
	return c.inContext(f)
}

// live runs f, which enters the context itself, unless the backend is closed.
func (c *gpuContext) live(f func() error) error {
	c.life.RLock()
	defer c.life.RUnlock()
	if c.life.closed {
		return ErrClosed
	}
	return f()
}

func (c *gpuContext) inContext(f func() error) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	was, err := c.d.enter(c.ctx)
	if err != nil {
		return err
	}
	err = f()
	if e := c.d.leave(was); err == nil {
		err = e
	}
	return err
}

// failed makes a DeviceError of a driver's error, and adds op to ErrClosed; other errors pass unchanged.
func (c *gpuContext) failed(op string, err error) error {
	if err == ErrClosed {
		return c.invalid("%s: %w", op, err)
	}
	return c.failedAs(op, "", err, nil)
}

// failedAs makes a DeviceError, too, with a detail, and with a kind for results that have none.
func (c *gpuContext) failedAs(op, detail string, err, kind error) error {
	de, ok := err.(*driverError)
	if !ok {
		return err
	}
	if k := de.kind(); k != nil {
		kind = k
	}
	return &DeviceError{Device: c.Device(), Op: op, Call: de.call, Code: de.code, Name: de.name, Detail: detail, Kind: kind}
}

// refused is failedAs; other errors get op.
func (c *gpuContext) refused(op, detail string, err, kind error) error {
	if _, ok := err.(*driverError); !ok {
		return c.invalid("%s: %w", op, err)
	}
	return c.failedAs(op, detail, err, kind)
}

func (c *gpuContext) invalid(format string, args ...any) error {
	return fmt.Errorf("%s: "+format, append([]any{c.Device()}, args...)...)
}

// captured is the error of an operation that cannot be captured into a graph.
func (c *gpuContext) captured(op string, stream uintptr) error {
	return c.invalid("%s on stream %#x: %w: it is being captured into a graph", op, stream, ErrUnsupported)
}

// wrongDevice is the error of memory that is not the device's.
func (c *gpuContext) wrongDevice(m Mem) error {
	if m.OnHost() {
		return c.invalid("memory of the host: %w; MapHost makes pinned memory the device's", ErrWrongDevice)
	}
	return checkDevice(c.Device(), "GPU", m)
}
