package local

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/backend"
)

// device is the backend of a van that copies values from device to device: it exports its own memory to
// other processes, and maps their memory and copies from it.
type device struct {
	backend.Backend
	backend.Exporter
	backend.AsyncCopier
	sharer backend.Sharer // nil: only memory of one allocation is shared
	health func() error
	pool   *backend.Pool // for pushes without a registered buffer

	mayBlock func() bool // see backend.StreamBlocker
	mu       sync.Mutex
	kept     []backend.Mem // imports that are closed with the van

	probe   backend.Mem // contains the name in the van's token
	exports backend.Export

	shared     sync.Pool     // of *backend.Shared
	noSegments atomic.Uint64 // until this time, new links do not use memory of several allocations, because a peer's could not be mapped
}

// segmentsPause is how long new links do not use memory of several allocations after such memory could
// not be mapped. Each failure ends a link, but its cause, such as a limit, may be temporary.
const segmentsPause = time.Minute

// mapsSegments reports whether a new link may use memory of several allocations.
func (d *device) mapsSegments() bool { return d.sharer != nil && clock.Now() >= d.noSegments.Load() }

// segmentsFailed records that an allocation could not be mapped. It reports whether this is the first failure
// since the last pause.
func (d *device) segmentsFailed() bool {
	now := clock.Now()
	return d.noSegments.Swap(now+uint64(segmentsPause)) <= now
}

// poolBytes limits the device memory that the library keeps for received values. Further values are put
// into host memory.
const poolBytes = 4 << 30

// openDevice returns the device for backend b. If values on b cannot be shared, it returns nil and the cause.
func openDevice(b backend.Backend, name []byte) (*device, error) {
	if b == nil || b.Device().Type == backend.CPU {
		return nil, errors.New("the node's backend is host memory")
	}
	d := &device{Backend: b, health: func() error { return nil }, mayBlock: backend.MayBlockOf(b)}
	d.shared.New = func() any { return new(backend.Shared) }
	d.sharer, _ = b.(backend.Sharer)
	var ok, copies bool
	d.Exporter, ok = b.(backend.Exporter)
	d.AsyncCopier, copies = b.(backend.AsyncCopier)
	if !ok || !copies {
		return nil, fmt.Errorf("backend %s does not share memory between processes", b.Name())
	}
	if h, ok := b.(backend.HealthChecker); ok {
		d.health = h.Health
	}
	var err error
	if d.probe, err = b.Alloc(len(name)); err != nil {
		return nil, err
	}
	if err = b.Copy(d.probe, backend.Bytes(name)); err == nil {
		d.exports, err = d.Export(d.probe)
	}
	if err != nil {
		return nil, errors.Join(err, b.Free(d.probe))
	}
	d.pool = backend.NewPool(poolBytes, b.Alloc, b.Free).For(b)
	return d, nil
}

// close frees the van's memory on its device. If a stream may wait for a message, the memory is freed when the
// backend is closed, which knows how long to wait for the stream.
func (d *device) close() error {
	if d.mayBlock() {
		return d.pool.Close()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, m := range d.kept {
		errs = append(errs, d.CloseImport(m))
	}
	d.kept = nil
	return errors.Join(append(errs, d.Free(d.probe), d.pool.Close())...)
}

// unmap closes an import. If a stream may wait for a message, the import is closed with the van: otherwise
// the driver would wait for that stream, and all copies for the driver.
func (d *device) unmap(m backend.Mem) error {
	if !d.mayBlock() {
		return d.CloseImport(m)
	}
	d.keep(m)
	return nil
}

// keep leaves an import mapped until the van is closed.
func (d *device) keep(m backend.Mem) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kept = append(d.kept, m)
}

// share returns the description of a value for other processes. The caller returns it with unshare.
func (d *device) share(m backend.Mem, segments bool) (*backend.Shared, error) {
	x := d.shared.Get().(*backend.Shared)
	var err error
	switch {
	case d.sharer == nil || !segments:
		x.Segments = x.Segments[:0]
		x.Export, err = d.Export(m)
	default:
		if err = d.sharer.Share(x, m); err == nil && len(x.Segments) > maxSegments {
			err = fmt.Errorf("%w: %d bytes lie in %d allocations, want at most %d", backend.ErrNotExportable, m.Len(), len(x.Segments), maxSegments)
		}
	}
	if err != nil {
		d.unshare(x)
		return nil, err
	}
	return x, nil
}

func (d *device) unshare(x *backend.Shared) { d.shared.Put(x) }

// endpoint is this node as its peers see it: its id, the address of its socket, its doorbell and
// its device.
type endpoint struct {
	id    atomic.Int32
	token token
	bell  doorbell

	device   *device // nil: values on the node's device are not shared
	noDevice error   // the cause, if device is nil

	linkTime time.Duration // the constant, except in tests

	guard auth.Guard // its Keys are nil if this node proves nothing
}
