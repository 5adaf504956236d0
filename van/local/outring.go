package local

// The sending end of a ring, and the memory of rings.

import (
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// Lengths of the allocated part of a segment. It grows by doubling.
const (
	firstLen = 64 << 10 // of a new segment

	// sureLen is the length that the budget grants every link: every record fits in a ring of that length.
	sureLen = 256 << 10
)

var _ = [1]struct{}{}[(headerLen+maxRecord+padHead)/(sureLen+1)] // it fits

// ringMemory is the budget of the memory that a node shares with its peers. All methods may be called concurrently.
type ringMemory struct {
	log     *slog.Logger
	budget  int64 // STEPAF_SHM_BUDGET
	used    atomic.Int64
	refused atomic.Uint64 // links that got no memory, and rings that did not grow

	make   func(n, have int) (fd int, err error)  // memfd.Part, except in tests
	extend func(fd int, from, to int) (err error) // memfd.Extend, except in tests
}

func newRingMemory(log *slog.Logger, cfg *env.Config) *ringMemory {
	return &ringMemory{log: log, budget: int64(cfg.SHMBudget), make: memfd.Part, extend: memfd.Extend}
}

var errNoBudget = errors.New("no shared memory is left for this")

// take takes n bytes from the budget. It fails if fewer bytes are left.
func (m *ringMemory) take(n int) error {
	if used := m.used.Add(int64(n)); used > m.budget {
		m.used.Add(int64(-n))
		m.refused.Add(1)
		return fmt.Errorf("%w: %d bytes of shared memory are in use, %d more are needed, STEPAF_SHM_BUDGET is %d bytes",
			errNoBudget, used-int64(n), n, m.budget)
	}
	return nil
}

// give gives n bytes back to the budget.
func (m *ringMemory) give(n int) { m.used.Add(int64(-n)) }

// ringFile is the file of a ring that this process has made.
type ringFile struct {
	memory *ringMemory
	fd     int
	have   int    // allocated bytes of the file
	taken  int    // bytes taken from the budget, at least have
	again  uint64 // the time of the next request for memory after a refusal
}

// newRingFile makes the file of a ring. The caller closes it.
func newRingFile(m *ringMemory) (*ringFile, error) {
	if err := m.take(sureLen); err != nil {
		return nil, err
	}
	fd, err := m.make(segmentLen, firstLen)
	if err != nil {
		m.give(sureLen)
		return nil, err
	}
	return &ringFile{memory: m, fd: fd, have: firstLen, taken: sureLen}, nil
}

// growPause is the pause between a refused request for memory and the next one.
const growPause = 10 * time.Millisecond

// grow allocates the first n bytes of the file, or more. After a refusal it returns false without a
// request until growPause has passed.
func (f *ringFile) grow(n int, peer int) bool {
	now := clock.Now()
	if now < f.again {
		return false
	}
	want := 1 << bits.Len(uint(n-1))
	if want > segmentLen/2 {
		want = segmentLen
	}
	err := error(nil)
	if want > f.taken {
		if err = f.memory.take(want - f.taken); err == nil {
			f.taken = want
		}
	}
	if err == nil {
		if err = f.memory.extend(f.fd, f.have, want); err == nil {
			f.have = want
			return true
		}
		f.memory.refused.Add(1)
	}
	if k := f.memory.refused.Load(); f.again == 0 || k&(k-1) == 0 {
		f.memory.log.Warn("the shared memory with a peer does not grow: data waits for the peer more often", "peer", van.NodeName(peer),
			"bytes", f.have, "wanted", want, "err", err, "so far", k)
	}
	f.again = now + uint64(growPause)
	return false
}

// close closes the file. Its mappings stay until they are unmapped.
func (f *ringFile) close() {
	_ = unix.Close(f.fd)
	f.memory.give(f.taken)
}

// outRing is the sending end of a ring.
//
// At first only a part of a ring is allocated. If a record does not fit into that part after the last one, it begins at the
// start of the ring, provided that the receiver has consumed the records there. Otherwise the ring grows. A pair with little
// traffic therefore uses little memory, and reuses it. A pad, a record without contents, fills the skipped part of the ring.
type outRing struct {
	seg  *segment
	file *ringFile
	bell *bell // the peer's
	tail uint64
}

// space is the number of free bytes in the ring.
func (r *outRing) space() int { return ringLen - int(r.tail-r.seg.head().Load()) }

// fits reports whether a record of size bytes may be written at the tail now. peer is the id for the log.
func (r *outRing) fits(size, peer int) bool {
	if off := int(r.tail & (ringLen - 1)); r.file.have < segmentLen && end(off, size) > r.file.have && !r.turn(off, size, peer) {
		return false
	}
	return r.space() >= size
}

// turn provides memory for a record of size bytes, at the start of the ring or at off, the offset of the tail.
func (r *outRing) turn(off, size, peer int) bool {
	taken := off - int(r.tail-r.seg.head().Load()) // bytes from the start on that the receiver has consumed
	if taken < 0 {
		return false // the receiver has not reached the start yet
	}
	// A stream is faster through a long ring: its sender need not wait until the receiver wraps around.
	if (taken < size || size > maxChunk) && r.file.grow(min(end(off, size), segmentLen), peer) {
		return true
	}
	if off == 0 || end(0, size) > r.file.have {
		return false // the record waits until there is memory
	}
	r.advance(putPad(r.seg.at(r.tail), ringLen-off))
	if taken < size {
		r.bell.ring() // the receiver may sleep, and the sender waits until it has consumed the pad
	}
	return true
}

// end is the offset in the segment of the end of a record of size bytes at off, with the pad that may have to follow it.
func end(off, size int) int { return headerLen + off + size + padHead }

// advance makes the record of size bytes at the tail visible.
func (r *outRing) advance(size int) {
	r.tail += uint64(size)
	r.seg.tail().Store(r.tail)
}
