package local

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Layout of a link's segment. Each index has a cache line of its own side, so that
// neither end's writes slow down the other's.
const (
	offTail   = 0   // u64, sender: end of the written records
	offBye    = 64  // u32, sender: the end of the link is no loss
	offBehind = 68  // u32, sender: 1, earlier data was sent over the van inside; receiver: 0, that data has arrived
	offHead   = 128 // u64, receiver: end of the consumed records
	offAcked  = 192 // u32, receiver: records acknowledged, as a count
	offWants  = 256 // u32, both: the sender waits for room or acknowledgements
	offAcks   = 320 // u32 of each slot, receiver: ring of acknowledged slots
	offGens   = offAcks + 4*slotCount

	headerLen = 8192 // two pages
	ringLen   = 2 << 20
	slotCount = 512 // messages whose memory is pinned at a time

	segmentLen = headerLen + ringLen
)

var _ = [1]struct{}{}[(offGens+4*slotCount)/(headerLen+1)] // it fits

// segment is a mapped link segment.
type segment struct {
	mem    []byte // header, ring, and the ring again
	ring   []byte // twice
	shadow shadow
}

// mapSegment maps the segment in fd, which stays open. Only a part of its ring may be allocated: see outRing.
func mapSegment(fd int) (*segment, error) {
	const flags = unix.MAP_SHARED | unix.MAP_FIXED
	const total = segmentLen + ringLen
	base, err := unix.MmapPtr(-1, 0, nil, total, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	for _, m := range []struct {
		at   uintptr
		off  int64
		size uintptr
	}{{0, 0, segmentLen}, {segmentLen, headerLen, ringLen}} {
		if _, err := unix.MmapPtr(fd, m.off, unsafe.Add(base, m.at), m.size, unix.PROT_READ|unix.PROT_WRITE, flags); err != nil {
			return nil, errors.Join(fmt.Errorf("mmap: %w", err), unix.MunmapPtr(base, total))
		}
	}
	mem := unsafe.Slice((*byte)(base), total)
	shadow, err := newShadow(fd)
	if err != nil {
		return nil, errors.Join(err, unix.MunmapPtr(base, total))
	}
	return &segment{mem: mem, ring: mem[headerLen:], shadow: shadow}, nil
}

// unmap unmaps s. No goroutine may access it any more.
func (s *segment) unmap() {
	_ = unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(s.mem)), uintptr(len(s.mem)))
	s.mem, s.ring = nil, nil
	s.shadow.drop()
}

func (s *segment) u64(off int) index64 {
	return index64{(*atomic.Uint64)(unsafe.Pointer(&s.mem[off])), s.shadow.at(off)}
}

func (s *segment) u32(off int) index32 {
	return index32{(*atomic.Uint32)(unsafe.Pointer(&s.mem[off])), s.shadow.at(off)}
}

func (s *segment) tail() index64           { return s.u64(offTail) }
func (s *segment) head() index64           { return s.u64(offHead) }
func (s *segment) acked() index32          { return s.u32(offAcked) }
func (s *segment) wants() index32          { return s.u32(offWants) }
func (s *segment) bye() index32            { return s.u32(offBye) }
func (s *segment) behind() index32         { return s.u32(offBehind) }
func (s *segment) ack(n uint32) index32    { return s.u32(offAcks + 4*int(n%slotCount)) }
func (s *segment) gen(slot uint32) index32 { return s.u32(offGens + 4*int(slot%slotCount)) }

// index64 and index32 are numbers in a segment that both ends use.
type index64 struct {
	n *atomic.Uint64
	shadowWord
}

type index32 struct {
	n *atomic.Uint32
	shadowWord
}

func (x index64) Load() uint64 {
	n := x.n.Load()
	x.read()
	return n
}

func (x index64) Store(n uint64) {
	x.write()
	x.n.Store(n)
}

func (x index32) Load() uint32 {
	n := x.n.Load()
	x.read()
	return n
}

func (x index32) Store(n uint32) {
	x.write()
	x.n.Store(n)
}

func (x index32) CompareAndSwap(old, n uint32) bool {
	x.replace()
	done := x.n.CompareAndSwap(old, n)
	x.read()
	return done
}

// at is the ring from index i, one whole round of it.
func (s *segment) at(i uint64) []byte {
	off := int(i & (ringLen - 1))
	return s.ring[off : off+ringLen : off+ringLen]
}
