package collective

// AllGatherBytes: short values of different lengths, such as addresses.

import (
	"cmp"
	"context"
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van"
)

// maxValue is the longest value that AllGatherBytes takes.
const maxValue = 1 << 20

// AllGatherBytes gives every rank the values of all ranks, in rank order: addresses, for example, or keys. Lengths
// may differ, up to 1 MiB. All ranks call it; it returns when all have.
func (c *Comm) AllGatherBytes(ctx context.Context, value []byte) ([][]byte, error) {
	own, lens := make([]uint32, 1), make([]uint32, c.Size())
	own[0] = uint32(min(len(value), maxValue+1)) // a value that is too long fails on all ranks, and the error names its rank
	in, err := af.FromSlice(own)
	out, err2 := af.FromSlice(lens)
	if err := cmp.Or(err, err2); err != nil {
		return nil, err
	}
	op, err := c.AllGather(out, in)
	if err == nil {
		err = op.Wait(ctx)
	}
	if err != nil {
		return nil, err
	}
	values, parts := make([][]byte, c.Size()), make([]af.Tensor, c.Size())
	for r, n := range lens {
		if n > maxValue {
			return nil, fmt.Errorf("all-gather of bytes: %w: rank %d has a value of %d bytes, want at most %d", van.ErrMalformed, r, n, maxValue)
		}
		values[r] = make([]byte, n)
		if parts[r], err = af.FromBytes(values[r], af.Uint8, int64(n)); err != nil {
			return nil, err
		}
	}
	if in, err = af.FromBytes(value, af.Uint8, int64(len(value))); err != nil {
		return nil, err
	}
	if op, err = c.AllGatherV(parts, in); err == nil {
		err = op.Wait(ctx)
	}
	if err != nil {
		return nil, err
	}
	return values, nil
}
