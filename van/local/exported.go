package local

import (
	"bytes"
	"encoding/binary"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/hostmem"
)

// The sender's side of values in memory that both ends map (van/hostmem).
//
// A record describes an allocation before the first record that refers to it:
//
//	128 u64 address in the sender    144 u64 inode of its file
//	136 u64 bytes; 0: it was freed   152 u64 descriptor of the file, in the sender
//
// The receiver copies the descriptor from the sender (pidfd_getfd), and maps the file. A pushed value in such memory has the
// form partMapped: the receiver uses the sender's memory. If it has not mapped the file, it reads the value from the sender as if
// the form were partPinned.
//
// A record before a batch names memory for the answers to its pulls:
//
//	128 i32 app          136 i32 first timestamp of the batch
//	132 i32 customer     140 u32 number of entries
//	144 entries: u32 part, u32 bytes, u64 address in the sender
//
// An answer in that memory has the form partInReceiver. Its part has the address in the process that answers, and at the part's
// offset in the record are two u64: the address in the process that pulls, and the inode of the file. If the memory of that process still has this
// file, the value is in place. Otherwise the process reads it from the process that answers.
const (
	allocationLen    = recordHead + 64 // of which the last 32 bytes are 0
	pullMemoryHead   = recordHead + 16
	pullMemoryEntry  = 16
	maxPullMemory    = 1024 // entries
	receiverRefLen   = 16
	maxImportedFiles = 1024 // that a process maps of one peer

	// maxReferences is the maximum number of values that one message sends by reference. Each uses a slot until the receiver has all
	// records of the batch. While a batch is sent, pinRest leaves maxReferences + 1 slots free.
	maxReferences = slotCount / 2
)

// exportedAllocations are the allocations of this process that the peer of a link knows. outLink.mu guards them.
type exportedAllocations struct {
	l        *outLink
	on       bool              // the peer maps memory
	pulls    bool              // also for answers: no device has registered it, which would keep memory that Revoke has replaced
	buf      []byte            // for the records
	inodes   map[uint64]uint64 // by address
	freed    uint64            // hostmem.Freed at the last check
	refsLeft int               // values of the message that may still be sent by reference
}

// has reports whether the peer knows the allocation of mem, and its present file.
func (s *exportedAllocations) has(mem backend.Mem) bool {
	a := hostmem.Find(mem)
	if a == nil {
		return false
	}
	addr, _ := a.Extent()
	inode, ok := s.inodes[addr]
	return ok && inode == a.Export(false).Inode
}

// announce sends the descriptions that the peer needs for msg, and the memory for its answers. byReference tells whether pushed values in
// shared allocations are used in place: the receiver may use a value until it answers, so only a request with an answer allows it.
func (s *exportedAllocations) announce(msg *van.Message) (byReference bool) {
	s.refsLeft = maxReferences
	if n := hostmem.Freed(); n != s.freed && len(s.inodes) > 0 {
		s.freed = n
		for addr := range s.inodes {
			if !hostmem.Allocated(addr) {
				delete(s.inodes, addr)
				s.send(addr, 0, &hostmem.File{})
			}
		}
	}
	n := len(msg.Parts)
	if !s.on || n == 0 || !msg.Request || msg.Parts[n-1].Push {
		return false
	}
	le := binary.LittleEndian
	for i := range msg.Parts {
		if x := &msg.Parts[i]; x.Vals.Len() >= streamFrom {
			if a := hostmem.Find(x.Vals); a != nil {
				s.export(a, false)
			}
		}
	}
	b := append(s.buf[:0], zeros[:pullMemoryHead]...)
	for i := range msg.Parts {
		x := &msg.Parts[i]
		if x.Push || x.Into.Len() < streamFrom || !s.pulls || len(b) == pullMemoryHead+maxPullMemory*pullMemoryEntry {
			continue
		}
		if a := hostmem.Find(x.Into); a == nil || !a.IsWhole(x.Into) || !s.export(a, true) {
			continue
		}
		b = le.AppendUint32(b, uint32(i))
		b = le.AppendUint32(b, uint32(x.Into.Len()))
		b = le.AppendUint64(b, x.Into.Addr())
	}
	if n := len(b) - pullMemoryHead; n > 0 {
		le.PutUint32(b[recordHead:], uint32(msg.AppID))
		le.PutUint32(b[recordHead+4:], uint32(msg.CustomerID))
		le.PutUint32(b[recordHead+8:], uint32(msg.Timestamp))
		le.PutUint32(b[recordHead+12:], uint32(n/pullMemoryEntry))
		b = append(b, zeros[:align(len(b))-len(b)]...)
		s.l.putPlain(kindPullMemory, b)
	}
	s.buf = b
	return true
}

// isPulled reports whether an answer to msg is written to mem. A push from there is copied: answers must not change their input.
func isPulled(msg *van.Message, mem backend.Mem) bool {
	for i := range msg.Parts {
		if msg.Parts[i].Into.Overlaps(mem) {
			return true
		}
	}
	return false
}

// export describes a to the peer unless the peer knows it. It reports whether the peer knows it now.
func (s *exportedAllocations) export(a *hostmem.Allocation, writable bool) bool {
	addr, n := a.Extent()
	file := a.Export(writable)
	inode, known := s.inodes[addr]
	if known && inode == file.Inode {
		return true
	}
	if !known && len(s.inodes) >= maxImportedFiles {
		return false
	}
	if s.inodes == nil {
		s.inodes, s.freed = map[uint64]uint64{}, hostmem.Freed()
	}
	s.inodes[addr] = file.Inode
	s.send(addr, n, file)
	return true
}

// send sends the description of an allocation.
func (s *exportedAllocations) send(addr uint64, n int, file *hostmem.File) {
	b := make([]byte, allocationLen)
	for i, x := range []uint64{addr, uint64(n), file.Inode, uint64(file.FD)} {
		binary.LittleEndian.PutUint64(b[recordHead+8*i:], x)
	}
	s.l.putPlain(kindAllocation, b)
}

// formOf returns the form of msg's value, which is long and on the host, and counts a value by reference. r is its record.
func (s *exportedAllocations) formOf(r *record, msg *van.Message, byReference bool) uint32 {
	if s.refsLeft == 0 {
		return partStream
	}
	if x, ok := msg.Vals.Owner().(*importedAllocation); ok && s.l.canRead && !msg.Request && x.peer == s.l.peer.Data.name {
		s.refsLeft--
		r.receiverAddr, r.receiverInode = x.peerAddr(msg.Vals), x.inode
		return partInReceiver
	}
	if byReference {
		s.refsLeft--
		return partMapped
	}
	return partStream
}

var zeros [max(pullMemoryHead, recordAlign)]byte

// putPlain writes or queues b as a record of that kind, after setting its head. The caller holds l.mu.
func (l *outLink) putPlain(kind byte, b []byte) {
	r := record{kind: kind, slot: noSlot, forms: 1 << partInline}
	binary.LittleEndian.PutUint32(b, uint32(len(b)))
	b[4] = kind
	setSlot(b, noSlot, 0)
	if len(l.queue.list) > 0 || !l.room(len(b), &r) {
		l.queue.put(&queued{rec: r, bytes: bytes.Clone(b)})
		l.busy.Store(true)
		l.drain()
		return
	}
	copy(l.seg.at(l.tail), b)
	l.advance(len(b))
}
