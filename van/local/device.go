package local

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van"
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

	shared     sync.Pool   // of *backend.Shared
	noSegments atomic.Bool // a peer's memory of several allocations could not be mapped
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

// exportLen is the length of an export as it travels:
//
//	 0  u8[64]  handle          80  u64  length of the allocation
//	64  u64     allocation      88  u64  offset in it
//	72  u64     its address
const exportLen = 96

func putExport(b []byte, e *backend.Export) {
	le := binary.LittleEndian
	copy(b, e.Handle[:])
	le.PutUint64(b[64:], e.Allocation)
	le.PutUint64(b[72:], e.Base)
	le.PutUint64(b[80:], uint64(e.Size))
	le.PutUint64(b[88:], uint64(e.Offset))
}

// parseExport reads what names n bytes of a peer's device.
func parseExport(b []byte, n int) (e backend.Export, err error) {
	le := binary.LittleEndian
	size, off := le.Uint64(b[80:]), le.Uint64(b[88:])
	const most = 1 << 50
	if n <= 0 || size > most || off > size || uint64(n) > size-off {
		return e, &van.FieldError{Field: "export", Value: fmt.Sprintf("%d bytes at %d of %d", n, off, size), Want: "at least one byte, inside its allocation"}
	}
	e.Handle, e.Allocation, e.Base = [64]byte(b[:64]), le.Uint64(b[64:]), le.Uint64(b[72:])
	e.Size, e.Offset = int(size), int(off)
	return e, nil
}

// deviceSource is a peer's device: what is mapped of it, and the copies that are under way.
// Who holds Van.feed uses it.
type deviceSource struct {
	v      *Van
	d      *device
	stream uintptr
	maps   map[uint64]*mapped // by allocation

	segments map[uint64]*mapped // by allocation, of those that came over inbox
	inbox    *inbox             // nil when that was not agreed

	events []backend.Event     // not in use
	queue  fifo.Queue[*parcel] // from the first that waits for its copy, in the order of the ring
	asked  uint64              // when the device was last asked how it is
}

// source is a part of a value that is copied.
type source struct {
	of  *mapped
	mem backend.Mem
}

// mapped is an allocation of the peer.
type mapped struct {
	mem  backend.Mem
	base uint64 // in the peer
	used uint64 // when it was last
	busy int    // copies under way
}

const (
	// maxMaps bounds what is mapped of a peer. A mapping keeps the peer's memory, also
	// when the peer has freed it, so those that were not used for mapTime go.
	maxMaps = 1024
	mapTime = 30 * time.Second

	// maxCopies is how many messages of a link wait for copies. More stay in the ring.
	maxCopies = 256
)

// openDeviceSource maps the peer's probe and looks whether it is what the peer says.
func (v *Van) openDeviceSource(hello, name []byte) (s *deviceSource, err error) {
	if v.device == nil {
		return nil, v.noDevice
	}
	e, err := parseExport(hello, len(name))
	if err != nil {
		return nil, err
	}
	s = &deviceSource{v: v, d: v.device, maps: map[uint64]*mapped{}, segments: map[uint64]*mapped{}}
	m, err := s.d.Import(e)
	if err != nil {
		return nil, err
	}
	got := make([]byte, len(name))
	err = errors.Join(s.d.Copy(backend.Bytes(got), m.Sub(e.Offset, len(name))), s.d.unmap(m))
	if err == nil && !bytes.Equal(got, name) {
		err = errors.New("the memory mapped is not the peer's")
	}
	if err == nil {
		s.stream, err = s.d.NewStream()
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// find fills p.sources with where p's value of n bytes lies.
func (s *deviceSource) find(p *parcel, b []byte, n int) error {
	p.sources = p.sources[:0]
	if p.rec.segments > 0 {
		return s.segmentsOf(p, b[exportLen:exportSize(p.rec.segments)], n)
	}
	e, err := parseExport(b, n)
	if err != nil {
		return err
	}
	m, err := s.mapOf(&e)
	if err != nil {
		return err
	}
	p.sources = append(p.sources, source{m, m.mem.Sub(e.Offset, n)})
	return nil
}

// copy queues the copies of p's value to dst, and behind them event.
func (s *deviceSource) copy(p *parcel, dst backend.Mem, event backend.Event) error {
	done := 0
	for i := range p.sources {
		n := p.sources[i].mem.Len()
		if err := s.d.CopyAsync(dst.Sub(done, n), p.sources[i].mem, s.stream); err != nil {
			if i > 0 {
				s.settleStream()
			}
			return err
		}
		done += n
	}
	err := event.Record(s.stream)
	if err != nil {
		s.settleStream() // here: who takes the place back now must not find the copy at work
	}
	return err
}

// begin queues the copy of p's value to where it is wanted.
func (s *deviceSource) begin(p *parcel) error {
	h := &p.rec.parts[partVals]
	if err := s.find(p, p.buf[h.off:], h.n); err != nil {
		return err
	}
	dst, err := s.allot(p, h.n)
	if err != nil {
		return err
	}
	event, err := s.event()
	if err != nil {
		return err
	}
	// Whoever takes the place back waits for the copy, or it is not begun.
	err = p.landed.fill(event, func() error { return s.copy(p, dst, event) })
	if errors.Is(err, errRevoked) {
		s.events = append(s.events, event)
		return err
	}
	if err != nil { // the copy may run, so its memory is not used again
		p.onDevice, p.blocks[partVals] = nil, nil
		return errors.Join(err, event.Close())
	}
	p.copied, p.begun = event, clock.Now()
	for i := range p.sources {
		p.sources[i].of.busy++
		p.sources[i].of.used = p.begun
	}
	s.v.copying.Add(1)
	s.v.lookFor(p.begun, h.n)
	return nil
}

// lookFor says that at time now n bytes have begun to be copied by a device, this node's
// or a peer's: their end, and what a peer answers then, is worth looking for without
// pause for as long as that takes over PCI Express.
func (v *Van) lookFor(now uint64, n int) {
	v.copyUntil.Store(max(v.copyUntil.Load(), now+uint64(copySpin+time.Duration(n/20))))
}

const copySpin = 100 * time.Microsecond

// copies tells whether to look without pause because of copies.
func (v *Van) copies(now uint64) bool {
	return now < v.copyUntil.Load() && (v.copying.Load() > 0 || v.lent.Load() > 0)
}

// mapOf returns the peer's allocation that e names.
func (s *deviceSource) mapOf(e *backend.Export) (*mapped, error) {
	if m := s.maps[e.Allocation]; m != nil {
		if m.mem.Len() != e.Size || m.base != e.Base {
			return nil, &van.FieldError{Field: "export", Value: fmt.Sprintf("allocation %d with %d bytes at %#x", e.Allocation, e.Size, e.Base),
				Want: fmt.Sprintf("%d bytes at %#x, as before", m.mem.Len(), m.base)}
		}
		return m, nil
	}
	// What lay there before has been freed. Beyond the bound the oldest goes.
	var oldest *mapped
	var oldestID uint64
	for id, m := range s.maps {
		switch {
		case m.busy > 0:
		case m.base < e.Base+uint64(e.Size) && e.Base < m.base+uint64(m.mem.Len()):
			s.unmap(id, m)
		case oldest == nil || m.used < oldest.used:
			oldest, oldestID = m, id
		}
	}
	if len(s.maps) >= maxMaps {
		if oldest == nil {
			return nil, fmt.Errorf("%w: copies from %d allocations of one peer are under way", van.ErrQueueFull, len(s.maps))
		}
		s.unmap(oldestID, oldest)
	}
	mem, err := s.d.Import(*e)
	if err != nil {
		return nil, err
	}
	m := &mapped{mem: mem, base: e.Base}
	s.maps[e.Allocation] = m
	return m, nil
}

func (s *deviceSource) unmap(id uint64, m *mapped) {
	delete(s.maps, id)
	if err := s.d.unmap(m.mem); err != nil {
		s.v.log.Warn("a peer's device memory stays mapped", "err", err)
	}
}

// tidy unmaps what was not used for a while.
func (s *deviceSource) tidy(now uint64) {
	s.dropWithdrawn(nil)
	if s.d.mayBlock() {
		return // it would only be kept elsewhere
	}
	for id, m := range s.maps {
		if m.busy == 0 && now-m.used > uint64(mapTime) {
			s.unmap(id, m)
		}
	}
}

// allot finds the place of p's value: where it is wanted, a buffer on the device, or,
// where there is no memory for one, on the host.
func (s *deviceSource) allot(p *parcel, n int) (backend.Mem, error) {
	if dst, ok := s.v.places.want(&p.msg, n, &p.landed, true); ok {
		p.msg.Vals, p.msg.Placed = dst, true
		return dst, nil
	}
	b, err := s.d.pool.Get(n)
	if b != nil {
		p.onDevice = b
		p.msg.Vals = b.Mem().Sub(0, n)
		return p.msg.Vals, nil
	}
	if err == nil {
		err = fmt.Errorf("received values hold %d bytes of the device's memory already: %w", s.d.pool.Limit(), backend.ErrNoMemory)
	}
	if k := s.v.stats.refused.Add(1); k&(k-1) == 0 {
		s.v.log.Warn("a value stays in host memory", "from", van.NodeName(p.from.id), "key", p.msg.Key, "bytes", n, "count", k, "err", err)
	}
	if p.blocks[partVals], err = s.v.blocks.get(n); err != nil {
		return backend.Mem{}, err
	}
	p.msg.Vals = backend.Bytes(p.blocks[partVals])
	return p.msg.Vals, nil
}

func (s *deviceSource) event() (backend.Event, error) {
	if n := len(s.events); n > 0 {
		e := s.events[n-1]
		s.events = s.events[:n-1]
		return e, nil
	}
	return s.d.NewEvent()
}

// waiting tells whether messages wait for copies, or behind such.
func (s *deviceSource) waiting() bool { return s != nil && s.queue.Len() > 0 }

// full tells whether no more is to be taken from the ring for now.
func (s *deviceSource) full() bool { return s != nil && s.queue.Len() >= maxCopies }

// pop returns the first message if its copy is done, nil if it is not.
func (s *deviceSource) pop() (*parcel, error) {
	p := s.queue.Front()
	if p.copied != nil {
		done, err := p.copied.Query()
		if err == nil && !done {
			return nil, s.ask(p)
		}
		if err != nil {
			return nil, err
		}
		s.settle(p)
	}
	return s.queue.Take(), nil
}

// settle takes note that the copy of p is over.
func (s *deviceSource) settle(p *parcel) {
	p.landed.filled()
	s.events = append(s.events, p.copied)
	for i := range p.sources {
		p.sources[i].of.busy--
	}
	clear(p.sources)
	p.copied, p.sources = nil, p.sources[:0]
	s.v.copying.Add(-1)
}

// ask finds out, now and then, whether the device still works: from one that failed no
// copy comes.
func (s *deviceSource) ask(p *parcel) error {
	now := clock.Now()
	if now-max(p.begun, s.asked) < uint64(10*time.Millisecond) {
		return nil
	}
	s.asked = now
	return s.d.health()
}

// settleStream waits until nothing is under way on the stream, without an event.
func (s *deviceSource) settleStream() {
	idler, ok := s.d.Backend.(backend.StreamIdler)
	for end := clock.Now() + uint64(s.v.dropTime); ok && clock.Now() < end; time.Sleep(copyNap) {
		if idle, err := idler.Idle(s.stream); idle || err != nil {
			return
		}
	}
}

// drop waits for the copies under way, which write to memory that is used again, and
// forgets all messages. It waits for dropTime at most, however many there are: nothing is
// received meanwhile.
func (s *deviceSource) drop() {
	ctx, cancel := context.WithTimeout(context.Background(), s.v.dropTime)
	defer cancel()
	var broken error // of the device: it writes nothing any more
	for s.waiting() {
		p := s.queue.Take()
		if p.copied != nil {
			done, err := p.copied.Query()
			if !done && broken == nil {
				broken = s.d.health()
			}
			if !done && broken == nil {
				if err = p.copied.Sync(ctx); err != nil {
					broken = s.d.health()
				}
			}
			if err != nil && broken == nil {
				s.v.log.Error("a copy from a lost peer does not end; its memory is not used again", "from", van.NodeName(p.from.id), "err", err)
				p.onDevice, p.blocks[partVals] = nil, nil
				p.sources = p.sources[:0] // they stay busy
			}
			s.settle(p)
		}
		s.v.release(p)
	}
}

// dropTime is far longer than a copy takes.
const dropTime = 5 * time.Second

// close unmaps all that no copy reads which has not ended: unmapping may not wait for it.
func (s *deviceSource) close() {
	var errs []error
	for _, all := range []map[uint64]*mapped{s.maps, s.segments} {
		for id, m := range all {
			delete(all, id)
			if m.busy > 0 {
				s.d.keep(m.mem)
				continue
			}
			errs = append(errs, s.d.unmap(m.mem))
		}
	}
	if s.inbox != nil {
		errs = append(errs, s.inbox.close())
	}
	for _, e := range s.events {
		errs = append(errs, e.Close())
	}
	errs = append(errs, s.d.FreeStream(s.stream))
	if err := errors.Join(errs...); err != nil {
		s.v.log.Warn("a peer's device was not left in order", "err", err)
	}
}
