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

// peerDevice is a peer's device: its mapped memory and the running copies from it.
// The holder of the feed owns it.
type peerDevice struct {
	c      *inCommon
	d      *device
	stream uintptr
	maps   map[uint64]*mapping // by allocation

	segments map[uint64]*mapping // allocations that were announced over imports
	imports  *imports            // nil if the handshake has not agreed on it

	events []backend.Event      // unused, for later copies
	queue  fifo.Queue[*inbound] // messages from the first that waits for its copy on, in the order of the ring
	asked  uint64               // the time of the last health check of the device

	keepStream bool // a streamEnd frees the stream when its work is done
}

// span is a part of a value that is copied.
type span struct {
	of  *mapping
	mem backend.Mem
}

// mapping is an allocation of the peer.
type mapping struct {
	mem  backend.Mem
	base uint64 // address in the peer
	used uint64 // the time of the last use
	busy int    // running copies
}

const (
	// maxMaps limits the mappings of a peer's memory. A mapping keeps the peer's memory allocated even
	// after the peer has freed it, so a mapping that was not used for mapTime is closed.
	maxMaps = 1024
	mapTime = 30 * time.Second

	// maxCopies limits the messages of a link that wait for copies. Further messages stay in the ring.
	maxCopies = 256
)

// openPeerDevice maps the peer's probe and checks its contents.
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

// find fills p.spans with the mapped memory of p's value of n bytes.
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

// copy queues the copies of p's value to dst, and then event. It returns the event of the end of the copies, also
// together with an error; nil means that no copy is running.
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
			return s.settleStream(), err // the memory may be invalidated now, and no copy may be running then
		}
		done += src.Len()
	}
	return event, nil
}

// begin queues the copy of p's value to its destination.
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
	// If the destination is invalidated, either that waits for the copy, or the copy is not started.
	running, err := p.dest.Fill(func() (backend.Event, error) { return s.copy(p, dst, event) })
	if errors.Is(err, landing.ErrInvalidated) {
		s.events = append(s.events, event)
		return err
	}
	if err != nil {
		p.copied, p.stranded = running, running != nil
		if p.stranded {
			for i := range p.spans { // the memory that the copy reads stays mapped
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
	// A former allocation at that address has been freed, so its mapping is closed. Above maxMaps, the oldest mapping
	// is closed.
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

// unmap closes m, the entry id of all, and deletes the entry.
func (s *peerDevice) unmap(all map[uint64]*mapping, id uint64, m *mapping) {
	delete(all, id)
	if err := s.d.unmap(m.mem); err != nil {
		s.c.log.Warn("a peer's device memory stays mapped", "err", err)
	}
}

// segmentsOf fills p.spans with the parts that b lists. Together they have n bytes.
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

// segment returns the peer's allocation id. Mappings in needed stay mapped.
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

// dropWithdrawn unmaps the allocations that the peer has withdrawn, except needed: the peer may have announced
// these again before the message that is being read.
func (s *peerDevice) dropWithdrawn(needed []span) {
	if s.imports == nil {
		return
	}
	for _, id := range s.imports.withdrawn() {
		switch m := s.segments[id]; {
		case m == nil:
		case m.busy > 0 || slices.ContainsFunc(needed, func(x span) bool { return x.of == m }): // retried later
			s.imports.putBack(id)
		default:
			s.unmap(s.segments, id, m)
		}
	}
}

// tidy unmaps allocations that were not used for mapTime.
func (s *peerDevice) tidy(now uint64) {
	s.dropWithdrawn(nil)
	if s.d.mayBlock() {
		return // unmap would only keep the mapping until the van is closed
	}
	for id, m := range s.maps {
		if m.busy == 0 && now-m.used > uint64(mapTime) {
			s.unmap(s.maps, id, m)
		}
	}
}

// allocate finds the destination of p's value: the registered or requested memory, else a buffer on the device, else,
// if the device has no memory for one, a buffer on the host.
func (s *peerDevice) allocate(p *inbound, n int) (backend.Mem, error) {
	if dst, ok := s.c.dests.Find(p.batch(), max(p.item, 0), n, &p.dest, true); ok {
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

// waiting reports whether messages wait for copies, their own or those of earlier messages.
func (s *peerDevice) waiting() bool { return s != nil && s.queue.Len() > 0 }

// full reports whether the queue is full. No more messages are then taken from the ring.
func (s *peerDevice) full() bool { return s != nil && s.queue.Len() >= maxCopies }

// pop returns the first message if its copy is done, else nil.
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

// settle records that the copy of p has ended.
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

// ask checks periodically whether the device still works: the copies of a failed device never end.
func (s *peerDevice) ask(p *inbound) error {
	now := clock.Now()
	if now-max(p.begun, s.asked) < uint64(10*time.Millisecond) {
		return nil
	}
	s.asked = now
	return s.d.health()
}

// settleStream waits, for dropTime at most, until the stream has no more work. It needs no event for that. It returns nil
// if the work has ended, else an event of its end.
func (s *peerDevice) settleStream() backend.Event {
	e := &streamEnd{stream: s.stream, free: s.d.FreeStream}
	e.idler, _ = s.d.Backend.(backend.StreamIdler)
	ctx, cancel := context.WithTimeout(context.Background(), s.c.dropTime)
	defer cancel()
	if _ = e.Sync(ctx); ctx.Err() == nil {
		return nil // also after an error: a failed device does not write any more
	}
	s.keepStream = true
	return e
}

// streamEnd stands for the end of all work of a stream for which no event could be recorded.
type streamEnd struct {
	idler  backend.StreamIdler // nil: the backend cannot report it
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

// Close implements backend.Event. It is called when the work has ended. The stream then has no other
// user.
func (e *streamEnd) Close() error { return e.free(e.stream) }

// drop waits for the running copies, since their memory is reused, and drops all messages. It waits for dropTime
// at most, for any number of copies, because the node receives nothing meanwhile.
func (s *peerDevice) drop() {
	ctx, cancel := context.WithTimeout(context.Background(), s.c.dropTime)
	defer cancel()
	var broken error // the device has failed and does not write any more
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
				clear(p.spans) // their mappings stay busy
				p.spans = p.spans[:0]
				s.c.copies.running.Add(-1)
			} else {
				s.settle(p)
			}
		}
		s.c.release(p)
	}
}

// dropTime is the limit for the end of running copies. It is far longer than a copy takes.
const dropTime = 5 * time.Second

// close unmaps the peer's memory, except mappings that a running copy reads: unmapping must not wait for that copy.
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
