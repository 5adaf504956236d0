package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/hostmem"
)

// Tensors in memory that both ends map (van/hostmem). The sender describes an allocation in a record before the first
// record that uses it:
//
//	128 u64 address in the sender    144 u64 inode number of its file
//	136 u64 bytes; 0: it was freed   152 u64 descriptor of the file, in the sender
//
// The receiver takes the descriptor from the sender (pidfd_getfd) and maps the file. A push in such memory (partMapped) is
// not copied: the received value is the sender's memory. If the receiver has not mapped it, the part is like any other
// that lies in the sender's memory.
//
// A record before a batch names memory for the answers to its pulls:
//
//	128 i32 app          136 i32 first timestamp of the batch
//	132 i32 customer     140 u32 number of entries
//	144 entries: u32 part, u32 bytes, u64 address in the sender
//
// An answer that lies there (partPlaced) has its address, and behind the record's head the address of the same memory in the process
// that pulls, and the name of the file that was mapped. That process takes it as it is if the memory still has that file.
// Otherwise (hostmem.Revoke) it reads the value from the mapping of the process that answers.
const (
	memoryLen = recordHead + 64
	intoHead  = recordHead + 16
	intoEntry = 16
	maxInto   = 1024 // pulls of a batch whose memory is named

	placedLen = 16

	maxRanges = 4096 // allocations that a peer maps
)

// shownMemory are the allocations of this process that the peer of a link knows.
type shownMemory struct {
	l     *outLink
	on    bool              // the peer maps memory
	names map[uint64]uint64 // of files, by address
	freed uint64            // hostmem.Freed at the last look
}

// mapped reports whether values of msg that lie in shared memory are handed over as they are. The receiver may use a value
// until it answers, so the request must have an answer.
func (s *shownMemory) mapped(msg *van.Message) bool {
	n := len(msg.Parts)
	return s.on && n > 0 && msg.Request && !msg.Parts[n-1].Push
}

// knows reports whether the peer knows the allocation of mem.
func (s *shownMemory) knows(mem backend.Mem) bool {
	m := hostmem.Of(mem)
	if m == nil {
		return false
	}
	addr, _ := m.Extent()
	_, ok := s.names[addr]
	return ok
}

// announce announces the allocations in which values of msg and memory for its answers lie, and names the latter. It reports
// whether values that lie in shared memory are handed over as they are. The caller holds l.mu.
func (s *shownMemory) announce(msg *van.Message) (maps bool) {
	if n := hostmem.Freed(); n != s.freed && len(s.names) > 0 {
		s.freed = n
		for addr := range s.names {
			if !hostmem.Allocated(addr) {
				delete(s.names, addr)
				s.describe(addr, 0, hostmem.File{})
			}
		}
	}
	if !s.mapped(msg) {
		return false
	}
	var into []byte
	for i := range msg.Parts {
		x := &msg.Parts[i]
		mem := x.Vals
		if !x.Push {
			mem = x.Into
		}
		if mem.Len() < streamFrom {
			continue
		}
		m := hostmem.Of(mem)
		if m == nil || !s.show(m, !x.Push) || x.Push || len(into) == maxInto*intoEntry {
			continue
		}
		into = binary.LittleEndian.AppendUint32(into, uint32(i))
		into = binary.LittleEndian.AppendUint32(into, uint32(mem.Len()))
		into = binary.LittleEndian.AppendUint64(into, mem.Addr())
	}
	if len(into) > 0 {
		b := make([]byte, intoHead, intoHead+len(into))
		le := binary.LittleEndian
		le.PutUint32(b[recordHead:], uint32(msg.AppID))
		le.PutUint32(b[recordHead+4:], uint32(msg.CustomerID))
		le.PutUint32(b[recordHead+8:], uint32(msg.Timestamp))
		le.PutUint32(b[recordHead+12:], uint32(len(into)/intoEntry))
		s.l.putPlain(kindInto, append(b, into...))
	}
	return true
}

// show announces m unless the peer knows it. It reports whether the peer knows it now.
func (s *shownMemory) show(m *hostmem.Memory, writes bool) bool {
	addr, n := m.Extent()
	file := m.Show(writes)
	if s.names[addr] == file.Name {
		return true
	}
	if len(s.names) >= maxRanges {
		return false
	}
	if s.names == nil {
		s.names = map[uint64]uint64{}
		s.freed = hostmem.Freed()
	}
	s.names[addr] = file.Name
	s.describe(addr, n, file)
	return true
}

// describe writes or queues the record of an allocation.
func (s *shownMemory) describe(addr uint64, n int, file hostmem.File) {
	b := make([]byte, memoryLen)
	le := binary.LittleEndian
	le.PutUint64(b[recordHead:], addr)
	le.PutUint64(b[recordHead+8:], uint64(n))
	le.PutUint64(b[recordHead+16:], file.Name)
	le.PutUint64(b[recordHead+24:], uint64(file.FD))
	s.l.putPlain(kindMemory, b)
}

// putPlain writes or queues a record of that kind whose contents behind the head are those of b.
func (l *outLink) putPlain(kind byte, b []byte) {
	b = append(b, make([]byte, align(len(b))-len(b))...)
	r := record{kind: kind, slot: noSlot, forms: 1 << partInline}
	binary.LittleEndian.PutUint32(b, uint32(len(b)))
	b[4] = kind
	setSlot(b, noSlot, 0)
	if len(l.queue.list) > 0 || !l.room(len(b), &r) {
		l.queue.put(&queued{rec: r, bytes: b})
		l.busy.Store(true)
		l.drain()
		return
	}
	copy(l.seg.at(l.tail), b)
	l.advance(len(b))
}

// formOf is the form of the long value of msg, on the host, whose record is r. maps is what announce has returned.
func (s *shownMemory) formOf(r *record, msg *van.Message, maps bool) uint32 {
	if x, ok := msg.Vals.Owner().(*memoryRange); ok && s.l.canRead && !msg.Request && x.of == s.l.peer {
		r.placedAt, r.placedIn = x.peerAddr(msg.Vals), x.name
		return partPlaced
	}
	if maps && s.knows(msg.Vals) {
		return partMapped
	}
	return partStream
}

// memoryRange is an allocation of a peer that this process maps. It is the owner of values in it, and is unmapped when its
// link has ended or the peer has freed it, and no message or application uses it.
type memoryRange struct {
	of    [16]byte // the name in the peer's token
	addr  uint64   // in the peer
	name  uint64   // of the file
	mem   []byte
	users atomic.Int32
}

// Retain implements backend.Holder.
func (r *memoryRange) Retain() { r.users.Add(1) }

// Release implements backend.Holder.
func (r *memoryRange) Release() {
	if r.users.Add(-1) == 0 {
		_ = unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(r.mem)), uintptr(len(r.mem)))
	}
}

// has reports whether the n bytes at addr of the peer lie in r.
func (r *memoryRange) has(addr uint64, n int) bool {
	return addr >= r.addr && n <= len(r.mem) && addr-r.addr <= uint64(len(r.mem)-n)
}

// at returns these bytes.
func (r *memoryRange) at(addr uint64, n int) backend.Mem {
	return backend.At(unsafe.Pointer(&r.mem[addr-r.addr]), n, backend.Host, r)
}

// peerAddr is the peer's address of m, which lies in r.
func (r *memoryRange) peerAddr(m backend.Mem) uint64 {
	return r.addr + m.Addr() - uint64(uintptr(unsafe.Pointer(unsafe.SliceData(r.mem))))
}

// mappedMemory are the peer's allocations that a link has mapped. The holder of the feed owns it.
type mappedMemory struct {
	ranges []*memoryRange
	into   []intoPart // for the next message
	of     [3]int32   // its app, customer and timestamp
}

// intoPart is memory of the peer for the answer to a pull.
type intoPart struct {
	part int
	mem  backend.Mem
}

// find returns the range with the n bytes at addr of the peer, or nil.
func (x *mappedMemory) find(addr uint64, n int) *memoryRange {
	for _, r := range x.ranges {
		if r.has(addr, n) {
			return r
		}
	}
	return nil
}

// describe handles the record of an allocation.
func (l *inLink) describe(b []byte) error {
	if len(b) != memoryLen || l.source == nil || !l.c.maps {
		return &van.FieldError{Field: "record.kind", Value: kindMemory, Want: "no memory: it was agreed that this process maps none, or a record of another length"}
	}
	le := binary.LittleEndian
	addr, size, name, fd := le.Uint64(b[recordHead:]), le.Uint64(b[recordHead+8:]), le.Uint64(b[recordHead+16:]), le.Uint64(b[recordHead+24:])
	x := &l.memory
	if i := slices.IndexFunc(x.ranges, func(r *memoryRange) bool { return r.addr == addr }); i >= 0 {
		x.ranges[i].Release()
		x.ranges = slices.Delete(x.ranges, i, i+1)
	}
	if size == 0 {
		return nil
	}
	if size > 1<<46 || fd > 1<<30 || addr == 0 || addr > 1<<63 {
		return &van.FieldError{Field: "record.memory", Value: fmt.Sprintf("%d bytes at %#x, descriptor %d", size, addr, fd), Want: "an allocation"}
	}
	if len(x.ranges) >= maxRanges {
		return nil
	}
	r, err := l.source.mapFile(int(fd), int(size), name)
	if err != nil { // values are copied
		l.c.log.Info("memory of a peer is copied, not mapped", "peer", van.NodeName(l.from.id), "bytes", size, "why", err)
		return nil
	}
	r.of, r.addr, r.name = l.Process, addr, name
	x.ranges = append(x.ranges, r)
	return nil
}

// mapFile maps the file of size bytes that has that descriptor in the process, and that inode number.
func (r *remote) mapFile(fd, size int, name uint64) (*memoryRange, error) {
	own, err := unix.PidfdGetfd(r.fd, fd, 0)
	if err != nil {
		return nil, fmt.Errorf("pidfd_getfd: %w", err)
	}
	defer unix.Close(own)
	if err := memfd.Check(own, size); err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(own, &st); err != nil || st.Ino != name {
		return nil, errors.Join(fmt.Errorf("%w: file %d, want %d: it was freed", memfd.ErrMemory, st.Ino, name), err)
	}
	p, err := unix.MmapPtr(own, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	m := &memoryRange{mem: unsafe.Slice((*byte)(p), size)}
	m.users.Store(1)
	return m, nil
}

// nameInto handles the record of memory for answers.
func (l *inLink) nameInto(b []byte) error {
	x := &l.memory
	x.clearInto()
	le := binary.LittleEndian
	if len(b) < intoHead || !l.c.maps {
		return &van.FieldError{Field: "record.kind", Value: kindInto, Want: fmt.Sprintf("at least %d bytes, if it was agreed that this process maps memory", intoHead)}
	}
	n := int(le.Uint32(b[recordHead+12:]))
	if n > maxInto || n*intoEntry > len(b)-intoHead {
		return &van.FieldError{Field: "record.entries", Value: n, Want: fmt.Sprintf("at most %d, in a record of %d bytes", maxInto, len(b))}
	}
	for i := range x.of {
		x.of[i] = int32(le.Uint32(b[recordHead+4*i:]))
	}
	for b = b[intoHead:]; n > 0; n, b = n-1, b[intoEntry:] {
		size, addr := int(le.Uint32(b[4:])), le.Uint64(b[8:])
		if r := x.find(addr, size); r != nil && size > 0 {
			r.Retain()
			x.into = append(x.into, intoPart{int(le.Uint32(b)), r.at(addr, size)})
		}
	}
	return nil
}

func (x *mappedMemory) clearInto() {
	for _, p := range x.into {
		p.mem.Release()
	}
	clear(x.into)
	x.into = x.into[:0]
}

// takeInto sets Into of the pulls of p's message, whose meta was decoded.
func (x *mappedMemory) takeInto(p *inbound) {
	if len(x.into) == 0 {
		return
	}
	m := &p.msg
	for _, a := range x.into {
		if x.of == [3]int32{m.AppID, m.CustomerID, m.Timestamp} && m.Request && a.part < len(m.Parts) && !m.Parts[a.part].Push && m.Parts[a.part].Len == a.mem.Len() {
			m.Parts[a.part].Into = a.mem
			a.mem.Retain()
			p.uses = append(p.uses, a.mem)
		}
	}
	x.clearInto()
}

// close unmaps everything that is not in use.
func (x *mappedMemory) close() {
	x.clearInto()
	for _, r := range x.ranges {
		r.Release()
	}
	x.ranges = nil
}

// takeMapped finds the value of p in mapped memory, if it lies there.
func (x *mappedMemory) takeMapped(p *inbound) {
	h := &p.rec.parts[partVals]
	if h.form != partMapped {
		return
	}
	if r := x.find(h.addr, h.n); r != nil {
		r.Retain()
		p.mapped = r.at(h.addr, h.n)
		p.uses = append(p.uses, p.mapped)
	}
}

// copyPart writes part i of p, which lies in the sender's memory, to dst.
func (l *inLink) copyPart(p *inbound, i int, dst []byte) error {
	h := &p.rec.parts[i]
	switch {
	case h.form == partMapped && p.mapped.Len() > 0:
		copy(dst, p.mapped.Host())
		return nil
	case h.form == partPlaced && p.rec.placedAt == uint64(uintptr(unsafe.Pointer(unsafe.SliceData(dst)))) && hostmem.Has(backend.Bytes(dst), p.rec.placedIn):
		return nil // the peer has written it there
	}
	return l.source.read(dst, h.addr)
}
