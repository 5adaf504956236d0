package rdma

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// This file owns received messages, which are pooled.

// received is a received message.
type received struct {
	msg    van.Message
	in     *inbound
	slot   *receiveSlot // holds the frames; nil: the frames are elsewhere
	splits uint64       // notifications of parts that must precede the message
	number uint32       // of the message on its connection, from 1
	key    [8]byte
	lens   [4]byte
	copies []byte // copies of keys and lengths, if there are several
}

// usesControlQueue reports whether rx is ordered among control messages.
func (rx *received) usesControlQueue() bool { return rx.msg.IsControl() || rx.msg.SimpleApp }

// maxKeptCopies is the capacity of copies that a pooled message keeps.
const maxKeptCopies = 64 << 10

// copyFrame returns a copy of b, a frame of keys or lengths. most is the length of all copies of a message.
func (rx *received) copyFrame(b []byte, most int) backend.Mem {
	from := aligned(len(rx.copies))
	if cap(rx.copies) < most { // large enough for both frames: the first must not move
		rx.copies = make([]byte, 0, most)
	}
	rx.copies = rx.copies[:from+len(b)]
	copy(rx.copies[from:], b)
	return backend.Bytes(rx.copies[from:])
}

// oneKey makes the frames of keys and lengths from the meta.
func (rx *received) oneKey() {
	m := &rx.msg
	m.Frames = 2
	le.PutUint64(rx.key[:], m.Key)
	m.Keys = backend.Bytes(rx.key[:])
	if len(m.DataTypes) == van.MaxFrames {
		m.Frames = van.MaxFrames
		le.PutUint32(rx.lens[:], uint32(m.ValLen))
		m.Lens = backend.Bytes(rx.lens[:])
	}
}

// pool reuses messages.
type pool struct {
	mu   sync.Mutex
	free []*received
}

const poolCap = 256

func (p *pool) get() *received {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		rx := p.free[n-1]
		p.free = p.free[:n-1]
		return rx
	}
	rx := &received{}
	rx.msg.Reset()
	rx.msg.Adopt(p, unsafe.Pointer(rx))
	return rx
}

// Free implements van.Owner.
func (p *pool) Free(m *van.Message) {
	rx := (*received)(m.Native())
	if l := rx.slot; l != nil {
		slotSet{rx.in}.release(l)
	}
	rx.in, rx.slot, rx.splits = nil, nil, 0
	if rx.copies = rx.copies[:0]; cap(rx.copies) > maxKeptCopies {
		rx.copies = nil
	}
	m.Reset()
	m.Adopt(p, unsafe.Pointer(rx))
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) < poolCap {
		p.free = append(p.free, rx)
	}
}

// takeFrames makes the located parts of rx its frames.
func (rx *received) takeFrames(t *trailer) error {
	m := &rx.msg
	m.Frames = t.frames
	most := aligned(m.Parts[0].Vals.Len())
	if t.frames == van.MaxFrames {
		most += m.Parts[2].Vals.Len()
	}
	for i := range m.Parts {
		frame := m.Parts[i].Vals
		if i != 1 && frame.Len() > 0 {
			// Keys and lengths are validated before use: copy them, so that the peer cannot change them in between.
			if !frame.OnHost() {
				return &van.FieldError{Field: "trailer frames", Value: fmt.Sprintf("frame %d in memory of %s", i, frame.Device()), Want: "it in ordinary memory"}
			}
			frame = rx.copyFrame(frame.Host(), most)
		}
		m.SetFrame(i, frame)
	}
	if m.Vals.Len() == 0 {
		rx.slot = nil
	}
	return nil
}
