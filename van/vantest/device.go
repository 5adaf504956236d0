package vantest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/van/backend"
)

// Device is a GPU that is none: memory that says that it lies on a device, and streams
// that are queues of functions. The race detector sees who reads memory before the
// work that makes it is done.
type Device struct {
	backend.Backend
	dev backend.Device

	mu      sync.Mutex
	held    map[uint64][]byte
	events  int
	made    int
	streams map[uintptr]*stream
	options backend.Options
	failing error
	closed  bool
}

// stream runs its functions one after the other.
type stream struct {
	work chan func()
	done chan struct{}
}

var (
	_ backend.Backend    = (*Device)(nil)
	_ backend.HostPinner = (*Device)(nil)
	_ backend.Tunable    = (*Device)(nil)

	_ backend.StreamFlagger = (*Device)(nil)
)

// NewDevice returns a device with that id.
func NewDevice(id int) *Device {
	return &Device{Backend: backend.NewCPU(), dev: backend.Device{Type: backend.GPU, ID: int32(id)}, held: map[uint64][]byte{}, streams: map[uintptr]*stream{}}
}

// Name implements backend.Backend.
func (d *Device) Name() string { return "GPU" }

// Device implements backend.Backend.
func (d *Device) Device() backend.Device { return d.dev }

// Configure implements backend.Tunable.
func (d *Device) Configure(o backend.Options) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.options = o
}

// Options returns what Configure was given last.
func (d *Device) Options() backend.Options {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.options
}

// Fail makes all that follows fail with err, until it is nil again.
func (d *Device) Fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failing = err
}

func (d *Device) fails() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return backend.ErrClosed
	}
	return d.failing
}

func (d *Device) memory(n int, on backend.Device) (backend.Mem, error) {
	if err := d.fails(); err != nil {
		return backend.Mem{}, err
	}
	b := make([]byte, max(n, 1))
	m := backend.At(unsafe.Pointer(unsafe.SliceData(b)), n, on, b)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held[m.Addr()] = b
	return m, nil
}

// Alloc implements backend.Backend.
func (d *Device) Alloc(n int) (backend.Mem, error) { return d.memory(n, d.dev) }

// AllocPinned implements backend.HostPinner.
func (d *Device) AllocPinned(n int) (backend.Mem, error) { return d.memory(n, backend.Host) }

// Free implements backend.Backend.
func (d *Device) Free(m backend.Mem) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held[m.Addr()] == nil {
		return errors.New("freed what was not allocated")
	}
	delete(d.held, m.Addr())
	return nil
}

// FreePinned implements backend.HostPinner.
func (d *Device) FreePinned(m backend.Mem) error { return d.Free(m) }

// RegisterHost implements backend.HostPinner.
func (d *Device) RegisterHost(m backend.Mem) (backend.Mem, error) { return m, nil }

// UnregisterHost implements backend.HostPinner.
func (d *Device) UnregisterHost(backend.Mem) error { return nil }

// Raw is the memory of a Mem that lies on a device of this kind, or on the host.
func Raw(m backend.Mem) []byte { return unsafe.Slice((*byte)(m.Ptr()), m.Len()) }

// Mem says of b that it lies on the device.
func (d *Device) Mem(b []byte) backend.Mem {
	return backend.At(unsafe.Pointer(unsafe.SliceData(b)), len(b), d.dev, b)
}

// Copy implements backend.Backend.
func (d *Device) Copy(dst, src backend.Mem) error {
	if err := d.fails(); err != nil {
		return err
	}
	if dst.Len() != src.Len() {
		return fmt.Errorf("Copy of %d bytes into %d", src.Len(), dst.Len())
	}
	copy(Raw(dst), Raw(src))
	return nil
}

// Queue puts f into a stream, which is made when it is first used.
func (d *Device) Queue(s uintptr, f func()) {
	d.mu.Lock()
	x := d.streams[s]
	if x == nil {
		x = &stream{work: make(chan func(), 4096), done: make(chan struct{})}
		d.streams[s] = x
		go func() {
			defer close(x.done)
			for f := range x.work {
				f()
			}
		}()
	}
	d.mu.Unlock()
	x.work <- f
}

// WriteFlag implements backend.StreamFlagger.
func (d *Device) WriteFlag(s uintptr, word backend.Mem, v uint32) error {
	d.Queue(s, func() { atomic.StoreUint32((*uint32)(word.Ptr()), v) })
	return nil
}

// WaitFlag implements backend.StreamFlagger. A wait ends with the device, too.
func (d *Device) WaitFlag(s uintptr, word backend.Mem, v uint32) error {
	d.Queue(s, func() {
		for int32(atomic.LoadUint32((*uint32)(word.Ptr()))-v) < 0 && d.fails() == nil {
			runtime.Gosched()
		}
	})
	return nil
}

// event is done when the stream has come to its latest mark.
type event struct {
	d      *Device
	mu     sync.Mutex
	mark   chan struct{} // closed when done
	closed bool
}

// NewEvent implements backend.Backend.
func (d *Device) NewEvent() (backend.Event, error) {
	if err := d.fails(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events++
	d.made++
	return &event{d: d}, nil
}

func (e *event) Record(s uintptr) error {
	if err := e.d.fails(); err != nil {
		return err
	}
	mark := make(chan struct{})
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return errors.New("Record of a closed event")
	}
	e.mark = mark
	e.mu.Unlock()
	e.d.Queue(s, func() { close(mark) })
	return nil
}

func (e *event) latest() chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mark
}

func (e *event) Query() (bool, error) {
	select {
	case <-e.latest():
		return true, nil
	default:
		return e.latest() == nil, nil
	}
}

func (e *event) Sync(ctx context.Context) error {
	if mark := e.latest(); mark != nil {
		select {
		case <-mark:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return e.d.fails()
}

func (e *event) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return errors.New("event closed twice")
	}
	e.closed = true
	e.d.mu.Lock()
	defer e.d.mu.Unlock()
	e.d.events--
	return nil
}

// Events returns how many events there are, and how many were ever made.
func (d *Device) Events() (open, made int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.events, d.made
}

// Close implements backend.Backend. It waits for the streams.
func (d *Device) Close() error {
	d.mu.Lock()
	streams := d.streams
	d.streams, d.closed = nil, true
	d.mu.Unlock()
	for _, s := range streams {
		close(s.work)
		<-s.done
	}
	return nil
}

// Leaks fails the test if memory or events are held.
func (d *Device) Leaks(t testing.TB) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.held) > 0 || d.events > 0 {
		t.Errorf("%s: %d buffers and %d events are held", d.dev, len(d.held), d.events)
	}
}
