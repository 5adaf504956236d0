package van

// The descriptor of exported device memory, as it travels to other processes of the host.

import (
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/van/backend"
)

// ExportLen is the length in bytes of an encoded backend.Export, little endian:
//
//	 0  u8[64]  handle          80  u64  length of the allocation
//	64  u64     allocation      88  u64  offset in it
//	72  u64     its address
const ExportLen = 96

// PutExport writes e to the first ExportLen bytes of b.
func PutExport(b []byte, e *backend.Export) {
	le := binary.LittleEndian
	copy(b[:ExportLen], e.Handle[:])
	le.PutUint64(b[64:], e.Allocation)
	le.PutUint64(b[72:], e.Base)
	le.PutUint64(b[80:], uint64(e.Size))
	le.PutUint64(b[88:], uint64(e.Offset))
}

// ParseExport decodes the descriptor of n bytes on a peer's device. b has at least ExportLen bytes. If the
// n bytes exceed the allocation, the error is a *FieldError.
func ParseExport(b []byte, n int) (e backend.Export, err error) {
	le := binary.LittleEndian
	size, off := le.Uint64(b[80:]), le.Uint64(b[88:])
	const most = 1 << 50
	if n <= 0 || size > most || off > size || uint64(n) > size-off {
		return e, &FieldError{Field: "export", Value: fmt.Sprintf("%d bytes at %d of %d", n, off, size), Want: "at least one byte, inside its allocation"}
	}
	e.Handle, e.Allocation, e.Base = [64]byte(b[:64]), le.Uint64(b[64:]), le.Uint64(b[72:])
	e.Size, e.Offset = int(size), int(off)
	return e, nil
}

// MapExport maps the allocation of e. It returns n bytes of it in m, and the complete allocation in all. The mapping exists until CloseImport
// of all, or the end of the backend: the driver unmaps nothing while streams may wait. If the allocation is shorter than e says, the error
// wraps ErrMalformed.
func MapExport(x backend.Exporter, e backend.Export, n int) (m, all backend.Mem, err error) {
	if all, err = x.Import(e); err != nil {
		return m, all, err
	}
	if all.Len() < e.Offset || all.Len()-e.Offset < n {
		return m, all, fmt.Errorf("%w: %d bytes at %d of an allocation of %d", ErrMalformed, n, e.Offset, all.Len())
	}
	return all.Sub(e.Offset, n), all, nil
}
