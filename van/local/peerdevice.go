package local

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/landing"
)

// peerDevice is a peer's device: what is mapped of it, and the copies that are under way.
// The holder of the feed uses it.
type peerDevice struct {
	c      *inCommon
	d      *device
	stream uintptr
	maps   map[uint64]*mapping // by allocation

	segments map[uint64]*mapping // by allocation, of those that came over imports
	imports  *imports            // nil when that was not agreed

	events []backend.Event      // not in use
	queue  fifo.Queue[*inbound] // from the first that waits for its copy, in the order of the ring
	asked  uint64               // when the device was last asked how it is

	keepStream bool // somebody asks whether its work is done, and frees it then
}

// span is a part of a value that is copied.
type span struct {
	of  *mapping
	mem backend.Mem
}

// mapping is an allocation of the peer.
type mapping struct {
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

// openPeerDevice maps the peer's probe and checks that it is what the peer says.
func openPeerDevice(c *inCommon, hello, name []byte) (s *peerDevice, err error) {
	if c.self.device == nil {
		return nil, c.self.noDevice
	}
	e, err := van.ParseExport(hello, len(name))
	if err != nil {
		return nil, err
	}
	s = &peerDevice{c: c, d: c.self.device, maps: map[uint64]*mapping{}, segments: map[uint64]*mapping{}}
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

// find fills p.spans with where p's value of n bytes lies.
func (s *peerDevice) find(p *inbound, b []byte, n int) error {
	p.spans = p.spans[:0]
	if p.rec.segments > 0 {
		return s.segmentsOf(p, b[van.ExportLen:exportSize(p.rec.segments)], n)
	}
	e, err := van.ParseExport(b, n)
	if err != nil {
		return err
	}
	m, err := s.mapOf(&e)
	if err != nil {
		return err
	}
	p.spans = append(p.spans, span{m, m.mem.Sub(e.Offset, n)})
	return nil
}

// copy queues the copies of p's value to dst, and behind them event. It returns what ends when
// they have, also with an error, or nil when none is under way.
func (s *peerDevice) copy(p *inbound, dst backend.Mem, event backend.Event) (backend.Event, error) {
	done := 0
	last := len(p.spans) - 1
	for i := range p.spans {
		src := p.spans[i].mem
		to := dst.Sub(done, src.Len())
		var err error
		if i < last {
			err = s.d.CopyAsync(to, src, s.stream)
		} else {
			err = s.d.CopyRecord(to, src, s.stream, event)
		}
		if err != nil {
			return s.settleStream(), err // the memory may be taken back now, and no copy must be at work then
		}
		done += src.Len()
	}
	return event, nil
}

// begin queues the copy of p's value to where it is wanted.
func (s *peerDevice) begin(p *inbound) error {
	h := &p.rec.parts[partVals]
	if err := s.find(p, p.buf[h.off:], h.n); err != nil {
		return err
	}
	dst, err := s.allocate(p, h.n)
	if err != nil {
		return err
	}
	event, err := s.event()
	if err != nil {
		return err
	}
	// Revoking the destination waits for the copy, or it is not begun.
	running, err := p.dest.Fill(func() (backend.Event, error) { return s.copy(p, dst, event) })
	if errors.Is(err, landing.ErrInvalidated) {
		s.events = append(s.events, event)
		return err
	}
	if err != nil {
		p.copied, p.stranded = running, running != nil
		if p.stranded {
			for i := range p.spans { // what the copy reads stays mapped
				p.spans[i].of.busy++
			}
		}
		return errors.Join(err, event.Close())
	}
	p.copied, p.begun = event, clock.Now()
	for i := range p.spans {
		p.spans[i].of.busy++
		p.spans[i].of.used = p.begun
	}
	s.c.copies.running.Add(1)
	s.c.copies.expect(p.begun, h.n)
	return nil
}

// mapOf returns the peer's allocation that e names.
func (s *peerDevice) mapOf(e *backend.Export) (*mapping, error) {
	if m := s.maps[e.Allocation]; m != nil {
		if m.mem.Len() != e.Size || m.base != e.Base {
			return nil, &van.FieldError{Field: "export", Value: fmt.Sprintf("allocation %d with %d bytes at %#x", e.Allocation, e.Size, e.Base),
				Want: fmt.Sprintf("%d bytes at %#x, as before", m.mem.Len(), m.base)}
		}
		return m, nil
	}
	// What lay there before has been freed. Beyond the bound the oldest goes.
	var oldest *mapping
	var oldestID uint64
	for id, m := range s.maps {
		switch {
		case m.busy > 0:
		case m.base < e.Base+uint64(e.Size) && e.Base < m.base+uint64(m.mem.Len()):
			s.unmap(s.maps, id, m)
		case oldest == nil || m.used < oldest.used:
			oldest, oldestID = m, id
		}
	}
	if len(s.maps) >= maxMaps {
		if oldest == nil {
			return nil, fmt.Errorf("%w: copies from %d allocations of one peer are under way", van.ErrQueueFull, len(s.maps))
		}
		s.unmap(s.maps, oldestID, oldest)
	}
	mem, err := s.d.Import(*e)
	if err != nil {
		return nil, err
	}
	m := &mapping{mem: mem, base: e.Base}
	s.maps[e.Allocation] = m
	return m, nil
}

// unmap unmaps m, which all has under id.
func (s *peerDevice) unmap(all map[uint64]*mapping, id uint64, m *mapping) {
	delete(all, id)
	if err := s.d.unmap(m.mem); err != nil {
		s.c.log.Warn("a peer's device memory stays mapped", "err", err)
	}
}

// segmentsOf finds the parts of n bytes that b lists.
func (s *peerDevice) segmentsOf(p *inbound, b []byte, n int) error {
	le := binary.LittleEndian
	for left := n; len(b) > 0 || left > 0; b = b[segmentPartLen:] {
		if len(b) == 0 || left == 0 {
			return &van.FieldError{Field: "record.segments", Value: fmt.Sprintf("%d bytes more, %d parts more", left, len(b)/segmentPartLen), Want: fmt.Sprintf("parts with %d bytes in all", n)}
		}
		id, off, part := le.Uint64(b), le.Uint64(b[8:]), le.Uint64(b[16:])
		m, err := s.segment(id, p.spans)
		if err != nil {
			return err
		}
		if size := uint64(m.mem.Len()); part == 0 || part > uint64(left) || off > size || part > size-off {
			return &van.FieldError{Field: "record.segment", Value: fmt.Sprintf("%d bytes at %d of %d", part, off, size), Want: fmt.Sprintf("1 to %d bytes, inside the allocation", left)}
		}
		p.spans = append(p.spans, span{m, m.mem.Sub(int(off), int(part))})
		left -= int(part)
	}
	return nil
}

// segment returns the peer's allocation id. Those of needed stay mapped.
func (s *peerDevice) segment(id uint64, needed []span) (*mapping, error) {
	if m := s.segments[id]; m != nil {
		return m, nil
	}
	if s.imports == nil {
		return nil, &van.FieldError{Field: "record.segments", Value: id, Want: "one allocation: it was not agreed that there may be several"}
	}
	mem, err := s.imports.get(id)
	if err != nil {
		if !errors.Is(err, van.ErrMalformed) && s.d.segmentsFailed() {
			s.c.log.Warn("a peer's device memory of several allocations cannot be mapped; it comes through host memory over links made in the next minute", "err", err)
		}
		return nil, err
	}
	s.dropWithdrawn(needed)
	m := &mapping{mem: mem}
	s.segments[id] = m
	return m, nil
}

// dropWithdrawn unmaps what the peer does not use any more, except needed: the peer may
// have offered it anew before the message that is being read.
func (s *peerDevice) dropWithdrawn(needed []span) {
	if s.imports == nil {
		return
	}
	for _, id := range s.imports.withdrawn() {
		switch m := s.segments[id]; {
		case m == nil:
		case m.busy > 0 || slices.ContainsFunc(needed, func(x span) bool { return x.of == m }): // later
			s.imports.putBack(id)
		default:
			s.unmap(s.segments, id, m)
		}
	}
}

// tidy unmaps what was not used for a while.
func (s *peerDevice) tidy(now uint64) {
	s.dropWithdrawn(nil)
	if s.d.mayBlock() {
		return // it would only be kept elsewhere
	}
	for id, m := range s.maps {
		if m.busy == 0 && now-m.used > uint64(mapTime) {
			s.unmap(s.maps, id, m)
		}
	}
}

// allocate finds the destination of p's value: where it is wanted, a buffer on the device, or,
// where there is no memory for one, on the host.
func (s *peerDevice) allocate(p *inbound, n int) (backend.Mem, error) {
	if dst, ok := s.c.dests.Find(&p.msg, n, &p.dest, true); ok {
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
	if k := s.c.stats.refused.Add(1); k&(k-1) == 0 {
		s.c.log.Warn("a value stays in host memory", "from", van.NodeName(p.from.id), "key", p.msg.Key, "bytes", n, "count", k, "err", err)
	}
	if p.blocks[partVals], err = s.c.blocks.get(n); err != nil {
		return backend.Mem{}, err
	}
	p.msg.Vals = backend.Bytes(p.blocks[partVals])
	return p.msg.Vals, nil
}

func (s *peerDevice) event() (backend.Event, error) {
	if n := len(s.events); n > 0 {
		e := s.events[n-1]
		s.events = s.events[:n-1]
		return e, nil
	}
	return s.d.NewEvent()
}

// waiting tells whether messages wait for copies, or behind such.
func (s *peerDevice) waiting() bool { return s != nil && s.queue.Len() > 0 }

// full tells whether no more is to be taken from the ring for now.
func (s *peerDevice) full() bool { return s != nil && s.queue.Len() >= maxCopies }

// pop returns the first message if its copy is done, nil if it is not.
func (s *peerDevice) pop() (*inbound, error) {
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
func (s *peerDevice) settle(p *inbound) {
	p.dest.Filled()
	s.events = append(s.events, p.copied)
	for i := range p.spans {
		p.spans[i].of.busy--
	}
	clear(p.spans)
	p.copied, p.spans = nil, p.spans[:0]
	s.c.copies.running.Add(-1)
}

// ask finds out, now and then, whether the device still works: from one that failed no
// copy comes.
func (s *peerDevice) ask(p *inbound) error {
	now := clock.Now()
	if now-max(p.begun, s.asked) < uint64(10*time.Millisecond) {
		return nil
	}
	s.asked = now
	return s.d.health()
}

// settleStream waits until nothing is under way on the stream, without an event, for dropTime
// at most. It returns what ends when that is so, or nil when it is.
func (s *peerDevice) settleStream() backend.Event {
	e := &streamEnd{stream: s.stream, free: s.d.FreeStream}
	e.idler, _ = s.d.Backend.(backend.StreamIdler)
	ctx, cancel := context.WithTimeout(context.Background(), s.c.dropTime)
	defer cancel()
	if _ = e.Sync(ctx); ctx.Err() == nil {
		return nil // at an error, too: a device that has failed writes nothing any more
	}
	s.keepStream = true
	return e
}

// streamEnd is the end of all work of a stream, for which no event could be recorded.
type streamEnd struct {
	idler  backend.StreamIdler // nil: nobody can tell
	stream uintptr
	free   func(uintptr) error
}

// Record implements backend.Event.
func (e *streamEnd) Record(uintptr) error { return errors.ErrUnsupported }

// Query implements backend.Event.
func (e *streamEnd) Query() (bool, error) {
	if e.idler == nil {
		return false, nil
	}
	return e.idler.Idle(e.stream)
}

// Sync implements backend.Event.
func (e *streamEnd) Sync(ctx context.Context) error {
	for {
		if idle, err := e.Query(); idle || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(copyPause):
		}
	}
}

// Close implements backend.Event. It is called when the work has ended, and nobody else has the
// stream by then.
func (e *streamEnd) Close() error { return e.free(e.stream) }

// drop waits for the copies under way, which write to memory that is used again, and
// forgets all messages. It waits for dropTime at most, however many there are: nothing is
// received meanwhile.
func (s *peerDevice) drop() {
	ctx, cancel := context.WithTimeout(context.Background(), s.c.dropTime)
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
				s.c.log.Error("a copy from a lost peer does not end; its memory is not used again", "from", van.NodeName(p.from.id), "err", err)
				p.stranded = true
				clear(p.spans) // what they name stays busy
				p.spans = p.spans[:0]
				s.c.copies.running.Add(-1)
			} else {
				s.settle(p)
			}
		}
		s.c.release(p)
	}
}

// dropTime is far longer than a copy takes.
const dropTime = 5 * time.Second

// close unmaps all that no copy reads which has not ended: unmapping may not wait for it.
func (s *peerDevice) close() {
	var errs []error
	for _, all := range []map[uint64]*mapping{s.maps, s.segments} {
		for id, m := range all {
			delete(all, id)
			if m.busy > 0 {
				s.d.keep(m.mem)
				continue
			}
			errs = append(errs, s.d.unmap(m.mem))
		}
	}
	if s.imports != nil {
		errs = append(errs, s.imports.close())
	}
	for _, e := range s.events {
		errs = append(errs, e.Close())
	}
	if !s.keepStream {
		errs = append(errs, s.d.FreeStream(s.stream))
	}
	if err := errors.Join(errs...); err != nil {
		s.c.log.Warn("a peer's device was not left in order", "err", err)
	}
}
