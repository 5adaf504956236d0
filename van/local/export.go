package local

import (
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Values on a device travel by name: an export, and the list of allocations that it lies in.

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

// Memory that a device's driver has mapped from several allocations (backend.Sharer) is
// named by a list of parts of these. The sender tells of each allocation once, with its
// descriptor, over the link's socket, before the first record that names it:
//
//	0  char[4]  "SAFM", or "SAFU": it is not used any more
//	8  u64      allocation
//	16 u64      length
//
// The receiver maps it, and closes the descriptor. The sender says when it is to be unmapped:
// when it was unmapped there, or has not been used for mapTime, and nothing is pinned any more
// that lies in it.
const (
	segmentMagic = "SAFM"
	unusedMagic  = "SAFU"
	noticeLen    = 24

	// segmentLen is the length of a part in a record: allocation, offset, length.
	segmentPartLen = 24

	// maxSegments bounds the parts of a value: 2 GiB in allocations of 2 MiB, the smallest
	// that there are.
	maxSegments = 1025

	// maxOffers bounds the allocations that a peer has mapped.
	maxOffers = 4096
)

// exportSize is the length in a record of what names a value: an export, with the number of
// parts that follow in place of its offset when its length is 0.
func exportSize(segments int) int { return exportLen + segments*segmentPartLen }

// putShared writes what names a value.
func putShared(b []byte, x *backend.Shared) {
	if len(x.Segments) == 0 {
		putExport(b, &x.Export)
		return
	}
	putExport(b, &backend.Export{Offset: len(x.Segments)})
	le := binary.LittleEndian
	for i, s := range x.Segments {
		p := b[exportLen+i*segmentPartLen:]
		le.PutUint64(p, s.ID)
		le.PutUint64(p[8:], uint64(s.Offset))
		le.PutUint64(p[16:], uint64(s.Len))
	}
}

// segmentsIn tells how many parts the value has whose name b begins with; 0 if it lies in
// one allocation.
func segmentsIn(b []byte) (int, error) {
	le := binary.LittleEndian
	if len(b) < exportLen || le.Uint64(b[80:]) != 0 {
		return 0, nil // parseExport says what is wrong
	}
	n := le.Uint64(b[88:])
	if n == 0 || n > maxSegments || exportSize(int(n)) > len(b) {
		return 0, &van.FieldError{Field: "record.segments", Value: n, Want: fmt.Sprintf("1 to %d, in a record with %d bytes left", maxSegments, len(b))}
	}
	return int(n), nil
}
