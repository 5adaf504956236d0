package tcp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/stepaf/stepaf-go/van"
)

// A message on a connection:
//
//	 0  u32  length of the meta
//	 4  u32  length of the keys
//	 8  u32  length of the lengths
//	12  u32  data frames: 0, 2 or 3; 4: a batch, whose directory is the body of the meta
//	16  u64  length of the values
//	24  meta, keys, lengths, values
const (
	headLen     = 24
	batchFrames = van.MaxFrames + 1
)

// head has the lengths of a message's parts.
type head struct {
	meta, keys, lens, frames int
	vals                     int
}

// front is the number of bytes before the values.
func (h *head) front() int { return headLen + h.meta + h.keys + h.lens }

func (h *head) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(h.meta))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.keys))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.lens))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.frames))
	return binary.LittleEndian.AppendUint64(b, uint64(h.vals))
}

// parseHead reads a head and checks it. b has headLen bytes.
func parseHead(b []byte) (h head, err error) {
	meta, keys, lens := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])
	frames, vals := binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint64(b[16:])
	if vals > math.MaxInt64 {
		vals = math.MaxInt64
	}
	h = head{int(meta), int(keys), int(lens), int(frames), int(vals)}
	if e := h.check(); e != nil {
		return head{}, e
	}
	return h, nil
}

// check returns an error for lengths that a receiver does not accept. The receiver allocates memory as bytes arrive: a length alone
// reserves little (common.memory).
func (h *head) check() *van.FieldError {
	switch {
	case h.meta > math.MaxInt32:
		return &van.FieldError{Field: "length of the meta", Value: h.meta, Want: "below 2 GiB"}
	case h.keys > math.MaxInt32:
		return &van.FieldError{Field: "length of the keys", Value: h.keys, Want: "below 2 GiB"}
	case h.lens > math.MaxInt32:
		return &van.FieldError{Field: "length of the lengths", Value: h.lens, Want: "below 2 GiB"}
	case h.vals > math.MaxInt32 && h.frames != batchFrames || h.vals > van.MaxValues:
		return &van.FieldError{Field: "length of the values", Value: h.vals, Want: fmt.Sprintf("below 2 GiB; of a batch, at most %d", van.MaxValues)}
	case h.frames < 0 || h.frames == 1 || h.frames > batchFrames:
		return &van.FieldError{Field: "data frames", Value: h.frames, Want: "0, 2, 3, or 4, a batch"}
	case h.frames == 0 && (h.keys > 0 || h.vals > 0) || h.frames != van.MaxFrames && h.lens > 0 || h.frames == batchFrames && h.keys > 0:
		return &van.FieldError{Field: "data frames", Value: h.frames, Want: "a length only for frames that are there"}
	}
	return nil
}
