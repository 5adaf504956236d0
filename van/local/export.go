package local

import (
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// The description of values on a device: an export, or a list of parts of allocations.

// A value in memory that a device's driver has mapped from several allocations (backend.Sharer) is
// described by a list of parts. The sender announces each allocation once, with its
// descriptor, over the link's socket, before the first record that names it:
//
//	0  char[4]  "SAFM", or "SAFU": it is not used any more
//	8  u64      allocation
//	16 u64      length
//
// The receiver maps the allocation and closes the descriptor. The sender sends SAFU when it has unmapped the
// allocation itself, or has not used it for mapTime, and no pinned value lies in it.
const (
	segmentMagic = "SAFM"
	unusedMagic  = "SAFU"
	noticeLen    = 24

	// segmentPartLen is the length of a part in a record: allocation, offset, length.
	segmentPartLen = 24

	// maxSegments limits the parts of a value: 2 GiB in allocations of 2 MiB, the smallest
	// size.
	maxSegments = 1025

	// maxOffers limits the allocations that a peer has mapped.
	maxOffers = 4096
)

// exportSize returns the length of a value's description in a record: an export and the parts that follow it. If
// there are parts, the export's length is 0, and its offset is their number.
func exportSize(segments int) int { return van.ExportLen + segments*segmentPartLen }

// putShared writes the description of a value to b.
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

// segmentsIn returns the number of parts of the value whose description b starts with, 0 if it lies in
// one allocation.
func segmentsIn(b []byte) (int, error) {
	le := binary.LittleEndian
	if len(b) < van.ExportLen || le.Uint64(b[80:]) != 0 {
		return 0, nil // parseExport returns the error
	}
	n := le.Uint64(b[88:])
	if n == 0 || n > maxSegments || exportSize(int(n)) > len(b) {
		return 0, &van.FieldError{Field: "record.segments", Value: n, Want: fmt.Sprintf("1 to %d, in a record with %d bytes left", maxSegments, len(b))}
	}
	return int(n), nil
}
