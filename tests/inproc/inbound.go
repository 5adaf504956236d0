package inproc

// Messages in flight between two nodes, and the pools of their buffers.

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// inbound is one message in flight, with the memory of its frames.
type inbound struct {
	msg  van.Message
	conn *conn
	buf  []byte
	next *inbound // in a queue
}

// frameAlign is the alignment of the frames within the buffer.
const frameAlign = 64

// Messages are pooled by the size of their buffer, a power of two, so that a small
// one does not occupy the memory of a large one.
var (
	pools  [bits.UintSize]sync.Pool
	pooled           = freer{}
	_      van.Owner = pooled
)

type freer struct{}

// Free implements van.Owner.
func (freer) Free(m *van.Message) { (*inbound)(m.Native()).free() }

// pack copies m. Its frames must be on the host.
func pack(m *van.Message) *inbound {
	size := 0
	for i := range m.Frames {
		size += (m.Frame(i).Len() + frameAlign - 1) &^ (frameAlign - 1)
	}
	if m.IsBatch() {
		size += (m.PayloadLen() + frameAlign - 1) &^ (frameAlign - 1)
	}
	class := 0
	if size > 0 {
		class = bits.Len(uint(size - 1))
	}
	p, _ := pools[class].Get().(*inbound)
	if p == nil {
		p = &inbound{}
		if size > 0 {
			p.buf = make([]byte, 1<<class)
		}
	}
	p.msg.Meta.CopyFrom(&m.Meta)
	p.msg.Frames = m.Frames
	off := 0
	for i := range m.Frames {
		src := m.Frame(i).Host()
		end := off + len(src)
		copy(p.buf[off:end], src)
		p.msg.SetFrame(i, backend.Bytes(p.buf[off:end:end]))
		off = (end + frameAlign - 1) &^ (frameAlign - 1)
	}
	if m.IsBatch() {
		for i := range m.Parts {
			off += copy(p.buf[off:], m.Parts[i].Vals.Host())
		}
		p.msg.Vals = backend.Bytes(p.buf[:off:off])
		if err := p.msg.Unpack(); err != nil {
			panic(err) // of WriteDirectory
		}
	}
	return p
}

// adopt makes p's message a received one.
func (p *inbound) adopt() { p.msg.Adopt(pooled, unsafe.Pointer(p)) }

// free returns p to its pool.
func (p *inbound) free() {
	p.msg.Reset()
	p.conn, p.next = nil, nil
	class := 0
	if n := len(p.buf); n > 0 {
		class = bits.Len(uint(n - 1))
	}
	pools[class].Put(p)
}
