package local

import (
	"encoding/binary"
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

// The receiver's side of values in memory that both ends map: see exported.go.

// importedAllocation is an allocation of a peer that this process has mapped. It is the owner of values in it. It is unmapped when its link
// has ended, or the peer has freed it, and no message and no application uses it.
type importedAllocation struct {
	peer  [16]byte // the name in the peer's token
	addr  uint64   // in the peer
	inode uint64   // of the file
	mem   []byte
	users atomic.Int32
}

// Retain implements backend.Holder.
func (a *importedAllocation) Retain() { a.users.Add(1) }

// Release implements backend.Holder.
func (a *importedAllocation) Release() {
	if a.users.Add(-1) == 0 {
		_ = unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(a.mem)), uintptr(len(a.mem)))
	}
}

// has reports whether the n bytes at addr of the peer lie in a.
func (a *importedAllocation) has(addr uint64, n int) bool {
	return addr >= a.addr && n <= len(a.mem) && addr-a.addr <= uint64(len(a.mem)-n)
}

// at returns these bytes, which are at least one.
func (a *importedAllocation) at(addr uint64, n int) backend.Mem {
	return backend.At(unsafe.Pointer(&a.mem[addr-a.addr]), n, backend.Host, a)
}

// peerAddr returns the address in the peer of m, which lies in a.
func (a *importedAllocation) peerAddr(m backend.Mem) uint64 {
	return a.addr + m.Addr() - uint64(uintptr(unsafe.Pointer(unsafe.SliceData(a.mem))))
}

// importedAllocations are the peer's allocations that a link has mapped, and memory for the answers to the next request. The holder of the
// feed owns them.
type importedAllocations struct {
	list    []*importedAllocation
	record  []byte // a copy of the record that is handled
	pulls   []pullMemory
	request [3]int32 // its app, customer and timestamp
}

// pullMemory is memory of the peer for the answer to a pull. It holds a reference to its allocation.
type pullMemory struct {
	part int
	mem  backend.Mem
}

// copy returns a copy of a record in the ring, which the peer may change at any time. It is valid until the next call.
func (x *importedAllocations) copy(b []byte) []byte {
	x.record = append(x.record[:0], b...)
	return x.record
}

// find returns the allocation with the n bytes at addr of the peer, or nil.
func (x *importedAllocations) find(addr uint64, n int) *importedAllocation {
	for _, a := range x.list {
		if a.has(addr, n) {
			return a
		}
	}
	return nil
}

// recvAllocation handles the description of an allocation. If the file cannot be mapped, its values are copied.
func (l *inLink) recvAllocation(b []byte) error {
	switch {
	case l.source == nil || !l.c.mapsMemory:
		return &van.FieldError{Field: "record.kind", Value: kindAllocation, Want: "another one: this process has not offered to map memory"}
	case len(b) != allocationLen:
		return &van.FieldError{Field: "record.length", Value: len(b), Want: fmt.Sprint(allocationLen)}
	}
	le := binary.LittleEndian
	addr, size, inode, fd := le.Uint64(b[recordHead:]), le.Uint64(b[recordHead+8:]), le.Uint64(b[recordHead+16:]), le.Uint64(b[recordHead+24:])
	x := &l.imported
	x.list = slices.DeleteFunc(x.list, func(a *importedAllocation) bool {
		gone := a.addr < addr+max(size, 1) && addr < a.addr+uint64(len(a.mem)) // the peer has freed what was there
		if gone {
			a.Release()
		}
		return gone
	})
	if size == 0 {
		return nil
	}
	if size > 1<<46 || fd > 1<<30 || addr == 0 || addr > 1<<63 {
		return &van.FieldError{Field: "record.allocation", Value: fmt.Sprintf("%d bytes at %#x, descriptor %d", size, addr, fd), Want: "memory of a process, and its file"}
	}
	if len(x.list) >= maxImportedFiles {
		return nil
	}
	a, err := l.source.mapFile(int(fd), int(size), inode)
	if err != nil {
		l.c.log.Info("tensors of a peer are copied, not mapped", "peer", van.NodeName(l.from.id), "bytes", size, "why", err)
		return nil
	}
	a.peer, a.addr, a.inode = l.Process, addr, inode
	x.list = append(x.list, a)
	return nil
}

// mapFile maps a file of the process: descriptor fd, of size bytes, with that inode.
func (r *remote) mapFile(fd, size int, inode uint64) (*importedAllocation, error) {
	own, err := unix.PidfdGetfd(r.fd, fd, 0)
	if err != nil {
		return nil, fmt.Errorf("pidfd_getfd: %w", err)
	}
	defer unix.Close(own)
	if err := memfd.Check(own, size); err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(own, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	if st.Ino != inode {
		return nil, fmt.Errorf("descriptor %d has inode %d, want %d: the peer has freed the allocation", fd, st.Ino, inode)
	}
	if have := st.Blocks * 512; have < int64(size) {
		return nil, fmt.Errorf("descriptor %d has memory for %d bytes, want %d: this process would allocate the rest", fd, have, size)
	}
	p, err := unix.MmapPtr(own, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	a := &importedAllocation{mem: unsafe.Slice((*byte)(p), size)}
	a.users.Store(1)
	return a, nil
}

// recvPullMemory handles the record of memory for the answers to the next request.
func (l *inLink) recvPullMemory(b []byte) error {
	x := &l.imported
	x.clearPulls()
	switch {
	case !l.c.mapsMemory:
		return &van.FieldError{Field: "record.kind", Value: kindPullMemory, Want: "another one: this process has not offered to map memory"}
	case len(b) < pullMemoryHead:
		return &van.FieldError{Field: "record.length", Value: len(b), Want: fmt.Sprintf("at least %d", pullMemoryHead)}
	}
	le := binary.LittleEndian
	n := int(le.Uint32(b[recordHead+12:]))
	if n > maxPullMemory || n*pullMemoryEntry > len(b)-pullMemoryHead {
		return &van.FieldError{Field: "record.entries", Value: n, Want: fmt.Sprintf("at most %d, in a record of %d bytes", maxPullMemory, len(b))}
	}
	for i := range x.request {
		x.request[i] = int32(le.Uint32(b[recordHead+4*i:]))
	}
	for b = b[pullMemoryHead:]; n > 0; n, b = n-1, b[pullMemoryEntry:] {
		size, addr := int(le.Uint32(b[4:])), le.Uint64(b[8:])
		if a := x.find(addr, size); a != nil && size > 0 {
			a.Retain()
			x.pulls = append(x.pulls, pullMemory{int(le.Uint32(b)), a.at(addr, size)})
		}
	}
	return nil
}

func (x *importedAllocations) clearPulls() {
	for _, p := range x.pulls {
		p.mem.Release()
	}
	clear(x.pulls)
	x.pulls = x.pulls[:0]
}

// setPullMemory sets Into of the pulls of p's message, whose meta was decoded.
func (x *importedAllocations) setPullMemory(p *inbound) {
	if len(x.pulls) == 0 {
		return
	}
	m := &p.msg
	for _, a := range x.pulls {
		if x.request == [3]int32{m.AppID, m.CustomerID, m.Timestamp} && m.Request && a.part < len(m.Parts) && !m.Parts[a.part].Push && m.Parts[a.part].Len == a.mem.Len() {
			m.Parts[a.part].Into = a.mem
			a.mem.Retain()
			p.uses = append(p.uses, a.mem)
		}
	}
	x.clearPulls()
}

// findMapped finds the value of p in mapped memory, if its form is partMapped.
func (x *importedAllocations) findMapped(p *inbound) {
	h := &p.rec.parts[partVals]
	if h.form != partMapped || h.n == 0 {
		return
	}
	if a := x.find(h.addr, h.n); a != nil {
		a.Retain()
		p.mapped = a.at(h.addr, h.n)
		p.uses = append(p.uses, p.mapped)
	}
}

// close drops the link's references.
func (x *importedAllocations) close() {
	x.clearPulls()
	for _, a := range x.list {
		a.Release()
	}
	x.list = nil
}

// copyPart writes part i of p, which has an address in the sender, to dst.
func (l *inLink) copyPart(p *inbound, i int, dst []byte) error {
	h := &p.rec.parts[i]
	switch {
	case h.form == partMapped && p.mapped.Len() > 0:
		copy(dst, p.mapped.Host())
		return nil
	case h.form == partInReceiver && p.rec.receiverAddr == uint64(uintptr(unsafe.Pointer(unsafe.SliceData(dst)))) && hostmem.HasFile(backend.Bytes(dst), p.rec.receiverInode):
		return nil // the peer has written it there
	}
	return l.source.read(dst, h.addr)
}
