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

// device is what a van needs to move values from device to device: its own memory can
// be named to other processes, and theirs mapped and copied from.
type device struct {
	backend.Backend
	backend.Exporter
	backend.AsyncCopier
	sharer backend.Sharer // nil: only memory of one allocation is shared
	health func() error
	pool   *backend.Pool // for pushes without a registered buffer

	mayBlock func() bool // see backend.StreamBlocker
	mu       sync.Mutex
	kept     []backend.Mem // imports that are closed at the end

	probe   backend.Mem // has the name in the van's token
	exports backend.Export

	shared     sync.Pool     // of *backend.Shared
	noSegments atomic.Uint64 // until when new links go without, since a peer's memory of several allocations could not be mapped
}

// segmentsPause is how long links that are made go without memory of several allocations when
// some could not be mapped: a try that fails ends a link. What was in the way, such as a limit,
// may have gone later.
const segmentsPause = time.Minute

// mapsSegments tells whether a link that is made now may have them.
func (d *device) mapsSegments() bool { return d.sharer != nil && clock.Now() >= d.noSegments.Load() }

// segmentsFailed is told that one could not be mapped. It tells whether that is news.
func (d *device) segmentsFailed() bool {
	now := clock.Now()
	return d.noSegments.Swap(now+uint64(segmentsPause)) <= now
}

// poolBytes bounds the device memory that the library keeps for received values. Those
// beyond stay in host memory.
const poolBytes = 4 << 30

// openDevice returns nil, and why, when values on b cannot be shared.
func openDevice(b backend.Backend, name []byte) (*device, error) {
	if b == nil || b.Device().Type == backend.CPU {
		return nil, errors.New("the node's backend is host memory")
	}
	d := &device{Backend: b, health: func() error { return nil }, mayBlock: func() bool { return false }}
	d.shared.New = func() any { return new(backend.Shared) }
	if s, ok := b.(backend.StreamBlocker); ok {
		d.mayBlock = s.MayBlock
	}
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

// close frees what the van has on its device. Where a stream may wait for a message that
// is left to the end of the backend, which knows how long to wait for it.
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

// unmap closes an import. Where a stream may wait for a message, it does so at the end:
// the driver would wait for that stream, and every copy for the driver.
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

// share describes a value. What it returns goes back with unshare.
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

// endpoint is what this node is to its peers: who it is, where it listens, its doorbell and
// its device.
type endpoint struct {
	id    atomic.Int32
	token token
	bell  doorbell

	device   *device // nil when values on the node's device are not shared
	noDevice error   // then: why

	linkTime time.Duration // linkTime, other than in tests

	guard auth.Guard // its Keys are nil if this node proves nothing
}
