package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// This file owns outgoing messages: the data that Send takes from the caller, and the lengths on the wire.

// pullKey names a pull request in flight.
type pullKey struct {
	ts            int32
	app, customer int16
	key           uint64
}

func keyOf(m *van.Meta) pullKey {
	return pullKey{m.Timestamp, int16(m.AppID), int16(m.CustomerID), m.Key}
}

// outgoing is a message to be sent.
type outgoing struct {
	meta          []byte
	oneShot       bool // a control or simple-app message
	control       bool
	number        uint32 // of control messages
	request, push bool
	singleKey     bool // in StepMesh's form: one key, which the meta repeats
	key           uint64
	answer        pulledAnswer
	direct        bool // the value is written to addr with rkey
	addr          uint64
	rkey          uint32
	id            requestID
	canceled      bool // the memory of the frames belongs to the caller again

	frames   int
	lens     [van.MaxFrames]uint32
	data     [van.MaxFrames]backend.Mem // registered memory of the caller; empty if the frame was copied
	copies   []byte                     // the copied frames, each aligned
	done     van.Completion
	zeroCopy bool // the device reads a value from the caller's memory
	size     int  // bytes of payload
	unsent   int  // part of size that peer.unsent includes
	inMeta   bool // the frames, or the placements and inline values of a batch, are between the meta and the trailer

	parts  []outPart // of a batch
	inline int       // bytes of a batch's inline values, each aligned
}

// pulledAnswer says where the answer to a pull request belongs.
type pulledAnswer struct {
	into        backend.Mem
	key         pullKey
	len         int
	invalidated bool // no caller waits for the answer any more
}

// smallPayload is the largest payload whose frames Send copies: a copy costs less than registering the caller's memory.
const smallPayload = stageEach - metaRoom

// stageEach is the staging memory of a message. It holds the meta, up to metaRoom bytes, and the copied frames.
const (
	stageEach = conn.CellSize
	metaRoom  = 512
)

// smallFrame is the length below which a frame of a larger payload is copied.
const smallFrame = 64

// fill takes over the meta and the frames of msg.
func (o *outgoing) fill(msg *van.Message, size int) error {
	n := msg.EncodedLen()
	if n > maxMeta-trailerLen {
		return fmt.Errorf("%w: %d bytes of meta and body, want at most %d", van.ErrInvalid, n, maxMeta-trailerLen)
	}
	if cap(o.meta) < n {
		o.meta = make([]byte, max(n, metaRoom))
	}
	o.meta = o.meta[:n]
	if err := msg.EncodeTo(o.meta); err != nil {
		return err
	}
	control := msg.IsControl() || msg.SimpleApp
	o.control = msg.IsControl()
	o.oneShot, o.request, o.push, o.key = control, msg.Request, msg.Push, msg.Key
	o.frames, o.size, o.lens = msg.Frames, size, [van.MaxFrames]uint32{}
	o.answer.into, o.direct, o.singleKey, o.answer.len, o.answer.invalidated = backend.Mem{}, false, false, 0, false
	o.id, o.canceled = requestID{msg.AppID, msg.CustomerID, msg.Timestamp}, false
	o.copies, o.parts, o.zeroCopy = o.copies[:0], o.parts[:0], false
	if msg.IsBatch() {
		o.fillParts(msg)
		return nil
	}
	if !control && msg.Frames >= 2 && msg.Keys.Len() == 8 && msg.Keys.OnHost() {
		o.useSingleKeyForm(msg)
	}
	if !o.singleKey && !control && msg.Keys.Len() >= 8 && msg.Keys.OnHost() {
		o.key = le.Uint64(msg.Keys.Host()) // the receive buffer of the message is that of its first key
	}
	for i := range msg.Frames {
		f := msg.Frame(i)
		o.lens[i], o.data[i] = uint32(f.Len()), backend.Mem{}
		if o.singleKey && i != 1 || f.Len() == 0 {
			continue // the receiver derives them from the meta
		}
		if f.OnHost() && (f.Len() < smallFrame || size <= inlineValue) {
			o.copies = append(o.copies, f.Host()...)
			continue
		}
		o.data[i] = f
		f.Retain() // recycle releases it
		o.zeroCopy = true
	}
	if n := o.packedLen(); n > maxData {
		return fmt.Errorf("%w: %d bytes of payload, each frame aligned to %d, want at most %d", van.ErrInvalid, n, frameAlign, maxData)
	}
	if o.zeroCopy {
		o.done = msg.Done
	}
	o.inMeta = !o.zeroCopy && o.frames > 0 && len(o.copies) > 0 && aligned(len(o.meta))+o.packedLen()+trailerLen <= conn.CellSize
	return nil
}

// useSingleKeyForm sets singleKey if msg has the form that StepMesh can send: one key, which the meta repeats, and val_len bytes.
func (o *outgoing) useSingleKeyForm(msg *van.Message) {
	key := le.Uint64(msg.Keys.Host())
	pull := msg.Request && !msg.Push
	vals := msg.Vals.Len() == int(msg.ValLen) || pull && msg.Vals.Len() == 0
	lens := msg.Frames == 2 || msg.Lens.Len() == 4 && msg.Lens.OnHost() && le.Uint32(msg.Lens.Host()) == uint32(msg.ValLen)
	if !vals || !lens || key != msg.Key && msg.Key != 0 {
		return
	}
	// As StepMesh does.
	le.PutUint64(o.meta[metaKey:], key)
	o.singleKey, o.key = true, key
	if pull {
		o.answer.len = int(msg.ValLen)
		if msg.Into.Len() == o.answer.len && msg.Addr == msg.Into.Addr() {
			o.answer.into, o.answer.key = msg.Into, keyOf(&msg.Meta)
		}
	}
	if !msg.Request && !msg.Push && msg.Option != 0 && msg.Vals.Len() > 0 {
		o.direct, o.addr, o.rkey = true, msg.Addr, uint32(msg.Option)
	}
}

// isZeroCopy reports whether o is a request whose value the device reads from the caller's memory.
func (o *outgoing) isZeroCopy() bool {
	return o.request && !o.oneShot && o.zeroCopy
}

// packedLen returns the number of bytes that are written to the slot's data.
func (o *outgoing) packedLen() int {
	if o.singleKey {
		return int(o.lens[1])
	}
	n := 0
	for i := range o.frames {
		n = aligned(n) + int(o.lens[i])
	}
	return n
}

// writeFrames writes the packed frames to b, behind the meta.
func (o *outgoing) writeFrames(b []byte) {
	if o.singleKey {
		copy(b, o.copies)
		return
	}
	off, copied := 0, 0
	for _, n := range o.lens[:o.frames] {
		off = aligned(off)
		copied += copy(b[off:off+int(n)], o.copies[copied:])
		off += int(n)
	}
}

// requestID identifies the request that a message belongs to.
type requestID struct{ app, customer, ts int32 }

func (r requestID) in(q *van.Requests) bool {
	return r.app == q.App && r.customer == q.Customer && r.ts >= q.First && r.ts-q.First < q.Count
}
