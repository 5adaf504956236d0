package local

import (
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Values on a device travel by name: an export, and the list of allocations that it lies in.

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
func exportSize(segments int) int { return van.ExportLen + segments*segmentPartLen }

// putShared writes what names a value.
func putShared(b []byte, x *backend.Shared) {
	if len(x.Segments) == 0 {
		van.PutExport(b, &x.Export)
		return
	}
	van.PutExport(b, &backend.Export{Offset: len(x.Segments)})
	le := binary.LittleEndian
	for i, s := range x.Segments {
		p := b[van.ExportLen+i*segmentPartLen:]
		le.PutUint64(p, s.ID)
		le.PutUint64(p[8:], uint64(s.Offset))
		le.PutUint64(p[16:], uint64(s.Len))
	}
}

// segmentsIn tells how many parts the value has whose name b begins with; 0 if it lies in
// one allocation.
func segmentsIn(b []byte) (int, error) {
	le := binary.LittleEndian
	if len(b) < van.ExportLen || le.Uint64(b[80:]) != 0 {
		return 0, nil // parseExport says what is wrong
	}
	n := le.Uint64(b[88:])
	if n == 0 || n > maxSegments || exportSize(int(n)) > len(b) {
		return 0, &van.FieldError{Field: "record.segments", Value: n, Want: fmt.Sprintf("1 to %d, in a record with %d bytes left", maxSegments, len(b))}
	}
	return int(n), nil
}
