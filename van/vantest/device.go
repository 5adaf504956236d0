package vantest

// A simulated GPU for tests.

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/van/backend"
)

// Device simulates a GPU: its memory is host memory with a device's address, its streams
// are queues of functions. The race detector finds code that reads memory before the
// stream that writes it is done.
type Device struct {
	backend.Backend
	dev backend.Device

	mu      sync.Mutex
	held    map[uint64][]byte
	allocs  int
	events  int
	made    int
	streams map[uintptr]*stream
	graph   *Graph        // that is being captured
	last    uintptr       // of NewStream
	own     int           // streams of NewStream
	pinned  []backend.Mem // host memory that is registered
	imports int
	private bool
	pooled  bool
	options backend.Options
	failing error
	closed  bool

	segments segments
}

// stream runs its functions one after the other.
type stream struct {
	work   chan func()
	done   chan struct{}
	queued atomic.Int64
}

var (
	_ backend.Backend    = (*Device)(nil)
	_ backend.HostPinner = (*Device)(nil)
	_ backend.PinTeller  = (*Device)(nil)
	_ backend.Tunable    = (*Device)(nil)

	_ backend.GraphFlagger  = (*Device)(nil)
	_ backend.AsyncCopier   = (*Device)(nil)
	_ backend.StreamIdler   = (*Device)(nil)
	_ backend.HealthChecker = (*Device)(nil)
	_ backend.Exporter      = (*Device)(nil)
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
	d.allocs++
	return m, nil
}

// Held is how many buffers of Alloc and AllocPinned there are.
func (d *Device) Held() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.held)
}

// Allocs is how often Alloc and AllocPinned were done.
func (d *Device) Allocs() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.allocs
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
func (d *Device) RegisterHost(m backend.Mem) (backend.Mem, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pinned = append(d.pinned, m)
	return m, nil
}

// UnregisterHost implements backend.HostPinner.
func (d *Device) UnregisterHost(m backend.Mem) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.IndexFunc(d.pinned, func(x backend.Mem) bool { return x.Addr() == m.Addr() })
	if i < 0 {
		return errors.New("unregistered what was not registered")
	}
	d.pinned = slices.Delete(d.pinned, i, i+1)
	return nil
}

// Pinned implements backend.PinTeller.
func (d *Device) Pinned(m backend.Mem) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	in := func(at uint64, n int) bool { return m.Addr() >= at && m.Addr()+uint64(m.Len()) <= at+uint64(n) }
	for at, b := range d.held {
		if in(at, len(b)) {
			return m.OnHost()
		}
	}
	return slices.ContainsFunc(d.pinned, func(x backend.Mem) bool { return in(x.Addr(), x.Len()) })
}

// Raw is the memory of a Mem that lies on a device of this kind, or on the host.
func Raw(m backend.Mem) []byte { return unsafe.Slice((*byte)(m.Ptr()), m.Len()) }

// Mem returns b as memory of the device.
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
	move(dst, src)
	return nil
}

// move copies src to dst. Four bytes at an address that they divide are a word, which others may read and write
// meanwhile.
func move(dst, src backend.Mem) {
	if dst.Len() == 4 && dst.Addr()%4 == 0 && src.Addr()%4 == 0 {
		atomic.StoreUint32((*uint32)(dst.Ptr()), atomic.LoadUint32((*uint32)(src.Ptr())))
		return
	}
	copy(Raw(dst), Raw(src))
}

// Graph is what was put into a stream between Capture and End.
type Graph struct {
	d    *Device
	from uintptr
	work []func()
}

// Capture begins a graph: until its End, what is put into stream s goes there.
func (d *Device) Capture(s uintptr) *Graph {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.graph = &Graph{d: d, from: s}
	return d.graph
}

// End ends the capture.
func (g *Graph) End() {
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	g.d.graph = nil
}

// Len is how many pieces of work are in g.
func (g *Graph) Len() int {
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	return len(g.work)
}

// Replay puts the work of g into stream s.
func (g *Graph) Replay(s uintptr) {
	for _, f := range g.work {
		g.d.Queue(s, f)
	}
}

// Capturing implements backend.GraphFlagger.
func (d *Device) Capturing(s uintptr) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.graph != nil && d.graph.from == s, nil
}

// Queue puts f into a stream, which is made when it is first used.
func (d *Device) Queue(s uintptr, f func()) {
	d.mu.Lock()
	if d.graph != nil && d.graph.from == s {
		d.graph.work = append(d.graph.work, f)
		d.mu.Unlock()
		return
	}
	x := d.streams[s]
	if x == nil {
		x = &stream{work: make(chan func(), 4096), done: make(chan struct{})}
		d.streams[s] = x
		go func() {
			defer close(x.done)
			for f := range x.work {
				f()
				x.queued.Add(-1)
			}
		}()
	}
	x.queued.Add(1)
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

// WaitBits implements backend.GraphFlagger. A wait ends with the device, too.
func (d *Device) WaitBits(s uintptr, word backend.Mem, bits uint64) error {
	d.Queue(s, func() {
		for atomic.LoadUint64((*uint64)(word.Ptr()))&bits == 0 && d.fails() == nil {
			runtime.Gosched()
		}
	})
	return nil
}

// WaitCount implements backend.GraphFlagger. A wait ends with the device, too.
func (d *Device) WaitCount(s uintptr, word backend.Mem, n uint64) error {
	d.Queue(s, func() {
		for int64(atomic.LoadUint64((*uint64)(word.Ptr()))-n) < 0 && d.fails() == nil {
			runtime.Gosched()
		}
	})
	return nil
}

// NewStream implements backend.AsyncCopier.
func (d *Device) NewStream() (uintptr, error) {
	if err := d.fails(); err != nil {
		return 0, err
	}
	d.mu.Lock()
	d.last++
	d.own++
	s := d.last + 1<<20 // far from those that tests choose
	d.mu.Unlock()
	d.Queue(s, func() {})
	return s, nil
}

// FreeStream implements backend.AsyncCopier.
func (d *Device) FreeStream(s uintptr) error {
	d.mu.Lock()
	x := d.streams[s]
	delete(d.streams, s)
	if x != nil {
		d.own--
	}
	d.mu.Unlock()
	if x == nil {
		return errors.New("freed what is no stream")
	}
	close(x.work)
	return nil
}

// Streams is how many streams of NewStream there are.
func (d *Device) Streams() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.own
}

// CopyAsync implements backend.AsyncCopier.
func (d *Device) CopyAsync(dst, src backend.Mem, s uintptr) error {
	if err := d.fails(); err != nil {
		return err
	}
	if dst.Len() != src.Len() {
		return fmt.Errorf("CopyAsync of %d bytes into %d", src.Len(), dst.Len())
	}
	d.Queue(s, func() { move(dst, src) })
	return nil
}

// WaitEvent implements backend.AsyncCopier.
func (d *Device) WaitEvent(s uintptr, e backend.Event) error {
	mark := e.(*event).latest()
	d.Queue(s, func() { <-mark })
	return nil
}

// Idle implements backend.StreamIdler.
func (d *Device) Idle(s uintptr) (bool, error) {
	d.mu.Lock()
	x := d.streams[s]
	d.mu.Unlock()
	return x == nil || x.queued.Load() == 0, d.fails()
}

// Health implements backend.HealthChecker.
func (d *Device) Health() error { return d.fails() }

// exported finds the memory that an Export names: these devices are all in one process.
var exported sync.Map // of []byte, by number

var exports atomic.Uint64

// Private makes Export refuse what follows.
func (d *Device) Private(private bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.private = private
}

// PrivateMem makes Export refuse memory of Mem, as drivers do with that of memory pools.
func (d *Device) PrivateMem(private bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pooled = private
}

// Export implements backend.Exporter, for memory of Alloc and for whole values of Mem.
func (d *Device) Export(m backend.Mem) (e backend.Export, err error) {
	if err := d.fails(); err != nil {
		return e, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	b, _ := m.Owner().([]byte)
	if d.private || b == nil || m.Device() != d.dev {
		return e, fmt.Errorf("export of %d bytes: %w", m.Len(), backend.ErrNotExportable)
	}
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	if d.pooled && d.held[base] == nil {
		return e, fmt.Errorf("export of %d bytes: %w", m.Len(), backend.ErrNotExportable)
	}
	e.Base, e.Size, e.Offset = base, len(b), int(m.Addr()-base)
	id, ok := exported.Load(base)
	if !ok {
		id = exports.Add(1)
		exported.Store(base, id)
		exported.Store(id, b) // for ever, so that no other memory has the address
	}
	e.Allocation = id.(uint64)
	binary.LittleEndian.PutUint64(e.Handle[:], e.Allocation)
	return e, nil
}

// Import implements backend.Exporter.
func (d *Device) Import(e backend.Export) (m backend.Mem, err error) {
	if err := d.fails(); err != nil {
		return m, err
	}
	b, ok := exported.Load(binary.LittleEndian.Uint64(e.Handle[:]))
	if !ok || len(b.([]byte)) < e.Size {
		return m, fmt.Errorf("import of %d bytes: a stale handle: %w", e.Size, backend.ErrNotExportable)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.imports++
	return d.Mem(b.([]byte)[:e.Size]), nil
}

// CloseImport implements backend.Exporter.
func (d *Device) CloseImport(m backend.Mem) error {
	if d.segments.unmap(m) {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.imports--; d.imports < 0 {
		return errors.New("closed what was not imported")
	}
	return nil
}

// Imports is how many imports are open.
func (d *Device) Imports() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.imports
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
	if done, err := e.Query(); done || err != nil { // whatever ctx says, as a device does
		return cmp.Or(err, e.d.fails())
	}
	select {
	case <-e.latest():
	case <-ctx.Done():
		return ctx.Err()
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

// Leaks fails the test if anything is held.
func (d *Device) Leaks(t testing.TB) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for what, n := range map[string]int{"buffers": len(d.held), "events": d.events, "imports": d.imports, "imported segments": len(d.SegmentImports()), "streams": d.own, "registered buffers of the host": len(d.pinned)} {
		if n != 0 {
			t.Errorf("%s: %d %s are held", d.dev, n, what)
		}
	}
}
