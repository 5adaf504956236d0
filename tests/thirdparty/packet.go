package pipes

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// A message is a header, the meta, and the frames:
//
//	i32 sender, u32 length of the meta, u32 number of frames, u64 length of each frame
const (
	headerLen = 4 + 4 + 4 + 8*van.MaxFrames
	maxMeta   = 1 << 24
	maxFrame  = 1 << 31
)

// header is the fixed part.
type header struct {
	sender int
	meta   int
	frames int
	len    [van.MaxFrames]int
}

func (h *header) appendTo(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(int32(h.sender)))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.meta))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.frames))
	for _, n := range h.len {
		b = binary.LittleEndian.AppendUint64(b, uint64(n))
	}
	return b
}

// decode checks everything: lengths from a peer are not memory yet.
func (h *header) decode(b []byte) error {
	h.sender = int(int32(binary.LittleEndian.Uint32(b)))
	meta, frames := binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])
	if meta > maxMeta || frames > van.MaxFrames {
		return fmt.Errorf("%w: meta of %d bytes, %d frames", errFormat, meta, frames)
	}
	h.meta, h.frames = int(meta), int(frames)
	for i := range h.len {
		n := binary.LittleEndian.Uint64(b[12+8*i:])
		if n > maxFrame || n > 0 && i >= h.frames {
			return fmt.Errorf("%w: frame %d of %d bytes", errFormat, i, n)
		}
		h.len[i] = int(n)
	}
	return nil
}

// packet is one message, packed for the way out or unpacked on the way in.
type packet struct {
	msg   van.Message
	bytes []byte
}

var packets = sync.Pool{New: func() any { return new(packet) }}

// owner takes received messages back.
type owner struct{}

// Free implements van.Owner.
func (owner) Free(m *van.Message) { (*packet)(m.Native()).release() }

func (p *packet) release() {
	p.msg.Reset()
	p.bytes = p.bytes[:0]
	packets.Put(p)
}

// pack copies m.
func pack(sender int, m *van.Message) (*packet, error) {
	h := header{sender: sender, meta: m.EncodedLen(), frames: m.Frames}
	if m.Frames < 0 || m.Frames > van.MaxFrames {
		return nil, fmt.Errorf("%w: %d frames, want 0 to %d", van.ErrInvalid, m.Frames, van.MaxFrames)
	}
	for i := range m.Frames {
		f := m.Frame(i)
		if !f.OnHost() {
			return nil, fmt.Errorf("%w: frame %d is on %s, want host memory", van.ErrInvalid, i, f.Device())
		}
		h.len[i] = f.Len()
	}
	p := packets.Get().(*packet)
	b, err := m.AppendTo(h.appendTo(p.bytes[:0]))
	if err != nil {
		p.release()
		return nil, err
	}
	for i := range m.Frames {
		b = append(b, m.Frame(i).Host()...)
	}
	p.bytes = b
	return p, nil
}

// read reads the next message.
func read(r io.Reader) (*packet, error) {
	h, err := readHeader(r)
	if err != nil {
		return nil, err
	}
	size := h.meta + h.len[0] + h.len[1] + h.len[2]
	p := packets.Get().(*packet)
	if cap(p.bytes) < size {
		p.bytes = make([]byte, size)
	}
	p.bytes = p.bytes[:size]
	if _, err := io.ReadFull(r, p.bytes); err != nil {
		p.release()
		return nil, err
	}
	if err := van.DecodeMeta(p.bytes[:h.meta], &p.msg.Meta); err != nil {
		p.release()
		return nil, err
	}
	p.msg.Sender, p.msg.Frames = h.sender, h.frames
	at := h.meta
	for i := range h.frames {
		p.msg.SetFrame(i, backend.Bytes(p.bytes[at:at+h.len[i]:at+h.len[i]]))
		at += h.len[i]
	}
	p.msg.Adopt(owner{}, unsafe.Pointer(p))
	return p, nil
}
