package gpusync

// Memory that other processes of the host map.

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// PageLen is the smallest unit of device memory that drivers share, in bytes.
const PageLen = 2 << 20

// TokenLen is the length of a Token in bytes.
const TokenLen = 16

// Token is at the start of shared memory. A process that has mapped the memory of a peer finds the peer's token there,
// unless the names of the memory mean other memory on its host.
type Token [TokenLen]byte

// NewToken returns a random token.
func NewToken() (t Token) {
	binary.NativeEndian.PutUint64(t[:], random.Uint64())
	binary.NativeEndian.PutUint64(t[8:], random.Uint64())
	return t
}

// Map maps n bytes of device memory that another process has exported, and checks its token. owner names the process
// in the error, for example "the peer's". After an error nothing stays mapped, unless streams of the device may wait:
// unmapping would block until they end.
func Map(d backend.StreamDevice, e backend.Export, n int, t Token, owner string) (backend.Mem, error) {
	m, all, err := van.MapExport(d, e, n)
	if err == nil {
		var got Token
		if err = d.Copy(backend.Bytes(got[:]), m.Sub(0, TokenLen)); err == nil && got != t {
			err = fmt.Errorf("%w: the memory mapped is not %s; it may be on another host", van.ErrMalformed, owner)
		}
	}
	if err == nil {
		return m, nil
	}
	if all.Len() > 0 && !backend.MayBlockOf(d)() {
		err = errors.Join(err, d.CloseImport(all))
	}
	return backend.Mem{}, err
}
