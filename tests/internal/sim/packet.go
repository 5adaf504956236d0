package sim

import (
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// packet is one message on its way.
type packet struct {
	msg    van.Message
	flow   *flow // that has brought it
	sender int   // as the receiver sees it
	size   int64
	lent   bool // the values are still the sender's memory
	gone   bool // its request was canceled
	done   van.Completion
	made   time.Duration // when it was sent, of a packet in inOrder
	at     *node         // its receiver
	fin    bool          // no message: the sender has closed the connection
	lane   string
	waits  *atomic.Int64 // of its lane
}

// pack makes a packet of a message. Values that the sender lends, until Sent is called or the
// request is canceled, are read when they arrive, so that earlier changes are detected.
func pack(m *van.Message, sender int, recalls bool) *packet {
	p := &packet{sender: sender, done: m.Done}
	p.msg.Meta.CopyFrom(&m.Meta)
	p.msg.Frames = m.Frames
	for i := range m.Frames {
		f := m.Frame(i)
		if i == 1 && (m.Done != nil || recalls && m.Request) && f.Len() >= van.CopyBelow {
			p.lent = true
			p.msg.SetFrame(i, f)
			continue
		}
		p.msg.SetFrame(i, copied(f))
	}
	p.msg.Parts = append(p.msg.Parts, m.Parts...)
	p.lent = p.lent || len(m.Parts) > 0 && (m.Done != nil || recalls && m.Request)
	if !p.lent {
		p.copyParts()
	}
	return p
}

// copyParts makes the values of the parts the packet's own.
func (p *packet) copyParts() {
	for i := range p.msg.Parts {
		x := &p.msg.Parts[i]
		x.Vals, x.Into = copied(x.Vals), backend.Mem{}
	}
}

func copied(f backend.Mem) backend.Mem {
	return backend.Bytes(append(make([]byte, 0, f.Len()), f.Host()...))
}

// clone is the same message once more. If it was canceled while it waited for a connection, its memory holds something
// else by now, and the receiver takes neither.
func (p *packet) clone() *packet {
	q := &packet{sender: p.sender, size: p.size, flow: p.flow, lane: p.lane, lent: p.lent && p.gone, gone: p.gone}
	q.msg.Meta.CopyFrom(&p.msg.Meta)
	q.msg.Frames = p.msg.Frames
	for i := range p.msg.Frames {
		q.msg.SetFrame(i, copied(p.msg.Frame(i)))
	}
	q.msg.Parts = append(q.msg.Parts, p.msg.Parts...)
	q.copyParts()
	return q
}

// land makes the values the receiver's own.
func (p *packet) land() {
	if p.lent {
		p.lent = false
		p.msg.Vals = copied(p.msg.Vals)
		p.copyParts()
	}
}

// unpack sets the parts of a batch as its directory says.
func (p *packet) unpack() error {
	if !p.msg.IsBatch() {
		return nil
	}
	sent := p.msg.Parts
	p.msg.Parts = nil
	if _, err := p.msg.ReadDirectory(); err != nil {
		return err
	}
	for i := range p.msg.Parts {
		p.msg.Parts[i].Vals = sent[i].Vals
	}
	return nil
}

// sent tells the sender that its memory is its own again.
func (p *packet) sent() {
	if d := p.done; d != nil {
		p.done = nil
		d.Sent()
	}
}

// free ends a packet that no node has received.
func (p *packet) free() {
	if p.flow != nil {
		p.flow.bytes -= p.size
	}
}

// drop ends a packet that is lost: the sender has its memory back.
func (p *packet) drop() {
	p.sent()
	p.free()
}

// adopt makes it a received message.
func (p *packet) adopt() { p.msg.Adopt(postman{}, unsafe.Pointer(p)) }

// postman takes back received messages.
type postman struct{}

// Free implements van.Owner.
func (postman) Free(m *van.Message) {
	p := (*packet)(m.Native())
	p.at.holds.Add(-1)
	spoil := func(b []byte) { // later reads find nonsense
		for j := range b {
			b[j] = 0xdd
		}
	}
	for i := range m.Frames {
		spoil(m.Frame(i).Host())
	}
	for i := range m.Parts {
		spoil(m.Parts[i].Vals.Host())
	}
}
