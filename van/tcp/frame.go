package tcp

import (
	"encoding/binary"
	"math"

	"github.com/stepaf/stepaf-go/van"
)

// A message on a connection:
//
//	 0  u32  length of the meta
//	 4  u32  length of the keys
//	 8  u32  length of the lengths
//	12  u32  data frames: 0, 2 or 3
//	16  u64  length of the values
//	24  meta, keys, lengths, values
const headLen = 24

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

// maxMeta is the longest meta, with its body, that is received.
const maxMeta = 64 << 20

// parseHead reads a head and checks it. b has headLen bytes.
func parseHead(b []byte) (h head, err error) {
	meta, keys, lens := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])
	frames, vals := binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint64(b[16:])
	switch {
	case meta > maxMeta:
		err = &van.FieldError{Field: "length of the meta", Value: meta, Want: "at most 67108864"}
	case keys > math.MaxInt32:
		err = &van.FieldError{Field: "length of the keys", Value: keys, Want: "below 2 GiB"}
	case lens > math.MaxInt32:
		err = &van.FieldError{Field: "length of the lengths", Value: lens, Want: "below 2 GiB"}
	case vals > math.MaxInt32:
		err = &van.FieldError{Field: "length of the values", Value: vals, Want: "below 2 GiB"}
	case frames == 1 || frames > van.MaxFrames:
		err = &van.FieldError{Field: "data frames", Value: frames, Want: "0, 2 or 3"}
	case frames == 0 && (keys > 0 || vals > 0) || frames < van.MaxFrames && lens > 0:
		err = &van.FieldError{Field: "data frames", Value: frames, Want: "a length only for frames that are there"}
	}
	return head{int(meta), int(keys), int(lens), int(frames), int(vals)}, err
}
