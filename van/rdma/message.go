package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rendezvous"
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
	pull          pullOut
	direct        bool // the value is written to addr with rkey
	addr          uint64
	rkey          uint32
	id            requestID
	canceled      bool // the memory of the frames belongs to the caller again

	frames int
	lens   [van.MaxFrames]uint32
	data   [van.MaxFrames]backend.Mem // registered memory of the caller; empty if the frame was copied
	copies []byte                     // the copied frames, each aligned
	done   van.Completion
	size   int  // bytes of payload
	unsent int  // part of size that peer.unsent includes
	inMeta bool // all frames were copied, and fit behind the meta

	table batchOut
	of    valueOf
}

// pullOut is what a pull request says of its answer.
type pullOut struct {
	destination backend.Mem
	key         pullKey
	len         int
	invalidated bool // no caller waits for the answer any more
}

// batchOut is what a batch adds; see batch.go. It is zero for other messages.
type batchOut struct {
	parts  []outPart
	meta   int  // bytes of the meta, which the table and values follow
	lends  bool // the device reads a value from the caller's memory
	split  bool // a value was split over the queue pairs
	values int  // number of queued values that are not recycled
	ended  bool // it is recycled with its last value
}

// outPart is what a batch that is queued stores of a part.
type outPart struct {
	slot *rendezvous.RemoteSlot // that its value was written to
	into backend.Mem            // the pull tensor
	pull pullKey
}

// valueOf says of which part of a batch a message is the value; zero for other messages.
type valueOf struct {
	batch *outgoing
	part  int
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

// newOutgoing returns an empty message to p. p.mu is held.
func newOutgoing(p *peer) *outgoing {
	n := len(p.free)
	if n == 0 {
		return &outgoing{}
	}
	o := p.free[n-1]
	p.free = p.free[:n-1]
	*o = outgoing{meta: o.meta[:0], copies: o.copies[:0], table: batchOut{parts: o.table.parts[:0]}}
	return o
}

// fillMeta takes over the meta of msg.
func (o *outgoing) fillMeta(msg *van.Message) error {
	n := msg.EncodedLen()
	if n > maxMeta-trailerLen {
		return fmt.Errorf("%w: %d bytes of meta and body, want at most %d", van.ErrInvalid, n, maxMeta-trailerLen)
	}
	if cap(o.meta) < n {
		o.meta = make([]byte, max(n, conn.CellSize))
	}
	o.meta = o.meta[:n]
	if err := msg.EncodeTo(o.meta); err != nil {
		return err
	}
	o.control = msg.IsControl()
	o.oneShot, o.request, o.push, o.key = o.control || msg.SimpleApp, msg.Request, msg.Push, msg.Key
	o.id = requestID{msg.AppID, msg.CustomerID, msg.Timestamp}
	return nil
}

// fill takes over the meta and the frames of msg, which is no batch.
func (o *outgoing) fill(msg *van.Message, size int) error {
	if err := o.fillMeta(msg); err != nil {
		return err
	}
	o.frames, o.size = msg.Frames, size
	if !o.oneShot && msg.Frames >= 2 && msg.Keys.Len() == 8 && msg.Keys.OnHost() {
		o.useSingleKeyForm(msg)
	}
	zeroCopy := false
	for i := range msg.Frames {
		f := msg.Frame(i)
		o.lens[i] = uint32(f.Len())
		if o.singleKey && i != 1 || f.Len() == 0 {
			continue // the receiver derives them from the meta
		}
		if f.OnHost() && (f.Len() < smallFrame || size <= smallPayload-van.MaxFrames*frameAlign) {
			o.copies = append(o.copies, f.Host()...)
			continue
		}
		o.data[i] = f
		f.Retain() // recycle releases it
		zeroCopy = true
	}
	if n := o.packedLen(); n > maxData {
		return fmt.Errorf("%w: %d bytes of payload, each frame aligned to %d, want at most %d", van.ErrInvalid, n, frameAlign, maxData)
	}
	if zeroCopy {
		o.done = msg.Done
	}
	o.inMeta = !zeroCopy && o.frames > 0 && len(o.copies) > 0 && aligned(len(o.meta))+o.packedLen()+trailerLen <= conn.CellSize
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
		o.pull.len = int(msg.ValLen)
		if msg.Into.Len() == o.pull.len && msg.Addr == msg.Into.Addr() {
			o.pull.destination, o.pull.key = msg.Into, keyOf(&msg.Meta)
		}
	}
	if !msg.Request && !msg.Push && msg.Option != 0 && msg.Vals.Len() > 0 {
		o.direct, o.addr, o.rkey = true, msg.Addr, uint32(msg.Option)
	}
}

// isZeroCopy reports whether o is a request of which the device reads a value from the caller's memory.
func (o *outgoing) isZeroCopy() bool {
	return o.request && !o.oneShot && (o.table.lends || o.data != [van.MaxFrames]backend.Mem{})
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

// entry returns the table's entry for part i in meta.
func (o *outgoing) entry(meta []byte, i int) []byte {
	return meta[aligned(o.table.meta)+entryLen*i:][:entryLen]
}

// isCanceled reports whether o is not to be sent: it was canceled, or it is a value of a batch that was.
func (o *outgoing) isCanceled() bool { return o.canceled || o.of.batch != nil && o.of.batch.canceled }

// needsNoSlot reports whether o is put in its turn without a slot: the peer has named the memory of a value, or o is not sent.
func (o *outgoing) needsNoSlot() bool {
	return o.of.batch != nil && o.direct || (o.of.batch != nil || o.table.meta > 0) && o.isCanceled()
}
