package inproc

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// parcel is one message on its way, with the memory of its frames.
type parcel struct {
	msg  van.Message
	conn *conn
	buf  []byte
	next *parcel // in a queue
}

// frameAlign is the alignment of the frames within a parcel's buffer.
const frameAlign = 64

// parcels are pooled by the size of their buffer, a power of two, so that a
// small message does not hold on to the memory of a large one.
var (
	parcels [bits.UintSize]sync.Pool
	postman           = freer{}
	_       van.Owner = postman
)

type freer struct{}

// Free implements van.Owner.
func (freer) Free(m *van.Message) { (*parcel)(m.Native()).free() }

// pack copies m. Its frames must be on the host.
func pack(m *van.Message) *parcel {
	size := 0
	for i := range m.Frames {
		size += (m.Frame(i).Len() + frameAlign - 1) &^ (frameAlign - 1)
	}
	class := 0
	if size > 0 {
		class = bits.Len(uint(size - 1))
	}
	p, _ := parcels[class].Get().(*parcel)
	if p == nil {
		p = &parcel{}
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
	return p
}

// adopt makes the parcel's message a received one.
func (p *parcel) adopt() { p.msg.Adopt(postman, unsafe.Pointer(p)) }

// free puts the parcel back.
func (p *parcel) free() {
	p.msg.Reset()
	p.conn, p.next = nil, nil
	class := 0
	if n := len(p.buf); n > 0 {
		class = bits.Len(uint(n - 1))
	}
	parcels[class].Put(p)
}
