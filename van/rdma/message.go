package rdma

import (
	"fmt"
	"slices"

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
	form          form
	frames        int
	key           uint64
	id            requestID
	canceled      bool // the memory of the values belongs to the caller again
	invalidated   bool // the destination of a pull belongs to the caller again
	setsSize      bool // the first request of its key to a StepMesh node

	parts    []outPart // the values
	copies   []byte    // the inline values, one after the other
	inline   int       // bytes of the inline values, each aligned
	done     van.Completion
	zeroCopy bool // the device reads a value from the caller's memory
	size     int  // bytes of payload
	unsent   int  // part of size that peer.unsent includes
}

// form says how a message describes its values.
type form uint8

// The forms.
const (
	formPlain  form = iota // there are no values
	formKey                // StepMesh's: one key, which the meta repeats, and one value of val_len bytes
	formFrames             // each frame is a value. Their lengths are in the trailer
	formBatch              // the meta has a directory
)

// outPart is a value to be sent, and for a pull the destination of the answer.
type outPart struct {
	key    uint64
	push   bool        // a request pushes the value
	len    int         // bytes of the value; 0: none
	mem    backend.Mem // registered memory of the caller; empty if the value was copied
	into   backend.Mem // of a pull: the destination of the answer
	pull   pullKey     // of a pull with into
	want   int         // of a pull in formKey: bytes of the answer
	addr   uint64      // of an answer: the destination in the request; of a pull: that of into
	rkey   uint32      // of addr; 0: the peer may not write there
	placed bool        // the value is written to addr, unless it is inline
}

const (
	// stageEach is the staging memory of a message. It holds the meta; for a StepMesh node up to metaRoom bytes, and then a copied value.
	stageEach = conn.CellSize
	metaRoom  = 512
	// inlineValue is the length of the longest inline value. A longer one costs less as a write of its own than as a copy.
	inlineValue = stageEach - metaRoom - van.MaxFrames*frameAlign
)

func isInline(v *backend.Mem) bool { return v.Len() <= inlineValue && v.OnHost() }

// fill takes over the meta and the values of msg.
func (o *outgoing) fill(msg *van.Message, size int) error {
	n, most := msg.EncodedLen(), maxMeta-trailerLen
	if msg.Frames > 0 {
		most -= aligned(van.MaxFrames*placementLen) + inlineValue + van.MaxFrames*frameAlign
	}
	if n > most {
		return fmt.Errorf("%w: %d bytes of meta and body, want at most %d", van.ErrInvalid, n, most)
	}
	if cap(o.meta) < n {
		o.meta = make([]byte, max(n, metaRoom))
	}
	o.meta = o.meta[:n]
	if err := msg.EncodeTo(o.meta); err != nil {
		return err
	}
	o.control, o.oneShot = msg.IsControl(), msg.IsControl() || msg.SimpleApp
	o.request, o.push, o.key, o.frames, o.size = msg.Request, msg.Push, msg.Key, msg.Frames, size
	o.id, o.canceled, o.invalidated, o.setsSize = requestID{msg.AppID, msg.CustomerID, msg.Timestamp}, false, false, false
	o.form, o.parts, o.copies, o.inline, o.zeroCopy = formPlain, o.parts[:0], o.copies[:0], 0, false
	switch {
	case msg.IsBatch():
		o.form = formBatch
		o.fillBatch(msg)
	case !o.oneShot && hasOneKey(msg):
		o.form, o.key = formKey, le.Uint64(msg.Keys.Host())
		o.fillKey(msg)
	case msg.Frames > 0:
		o.form = formFrames
		if err := o.fillFrames(msg); err != nil {
			return err
		}
	}
	if o.zeroCopy {
		o.done = msg.Done
	}
	return nil
}

// hasOneKey reports whether msg has the form that StepMesh can send: one key, which the meta repeats, and val_len bytes.
func hasOneKey(msg *van.Message) bool {
	if msg.Frames < 2 || msg.Keys.Len() != 8 || !msg.Keys.OnHost() {
		return false
	}
	key, pull := le.Uint64(msg.Keys.Host()), msg.Request && !msg.Push
	vals := msg.Vals.Len() == int(msg.ValLen) || pull && msg.Vals.Len() == 0
	lens := msg.Frames == 2 || msg.Lens.Len() == 4 && msg.Lens.OnHost() && le.Uint32(msg.Lens.Host()) == uint32(msg.ValLen)
	return vals && lens && (key == msg.Key || msg.Key == 0)
}

// fillKey takes over the value of msg, which has one key.
func (o *outgoing) fillKey(msg *van.Message) {
	le.PutUint64(o.meta[metaKey:], o.key) // as StepMesh does
	switch x := o.addPart(o.key); {
	case msg.Request && !msg.Push:
		x.want = int(msg.ValLen)
		if msg.Into.Len() == x.want && msg.Addr == msg.Into.Addr() {
			x.into, x.pull = msg.Into, keyOf(&msg.Meta)
		}
	default:
		x.push = msg.Request
		if !msg.Push {
			x.addr, x.rkey = msg.Addr, uint32(msg.Option)
			x.placed = x.rkey != 0
		}
		o.addValue(x, &msg.Vals, isInline(&msg.Vals))
	}
}

// fillFrames takes over the frames of msg.
func (o *outgoing) fillFrames(msg *van.Message) error {
	key := msg.Key
	if !o.oneShot && msg.Keys.Len() >= 8 && msg.Keys.OnHost() {
		key = le.Uint64(msg.Keys.Host()) // the receive buffer of the message is that of its first key
	}
	n := 0
	for i := range msg.Frames {
		f, x := msg.Frame(i), o.addPart(key)
		x.push = i == 1 && msg.Request && msg.Push
		// Meta and inline frames fit a cell.
		o.addValue(x, &f, isInline(&f) && (f.Len() <= frameAlign || o.inline+aligned(f.Len()) <= inlineValue))
		n = aligned(n) + x.len
	}
	if n > maxData {
		return fmt.Errorf("%w: %d bytes of payload, each frame aligned to %d, want at most %d", van.ErrInvalid, n, frameAlign, maxData)
	}
	return nil
}

// fillBatch takes over the parts of msg, a batch.
func (o *outgoing) fillBatch(msg *van.Message) {
	o.parts = slices.Grow(o.parts, len(msg.Parts))
	for i := range msg.Parts {
		x, v := &msg.Parts[i], o.addPart(msg.Parts[i].Key)
		switch {
		case !msg.Request:
			v.addr, v.rkey = x.Addr, uint32(x.Option)
			v.placed = v.rkey != 0
		case x.Push:
			v.push = true
		case x.Into.Len() == x.Len && x.Into.Len() > 0:
			v.into, v.pull = x.Into, pullKey{x.Timestamp, int16(msg.AppID), int16(msg.CustomerID), x.Key}
		}
		o.addValue(v, &x.Vals, isInline(&x.Vals))
	}
}

// addPart adds a part without a value.
func (o *outgoing) addPart(key uint64) *outPart {
	o.parts = append(o.parts, outPart{key: key})
	return &o.parts[len(o.parts)-1]
}

// addValue sets the value of part x. An inline value is copied.
func (o *outgoing) addValue(x *outPart, v *backend.Mem, inline bool) {
	if x.len = v.Len(); inline {
		o.copies = append(o.copies, v.Host()...)
		o.inline += aligned(x.len)
		return
	}
	x.mem, o.zeroCopy = *v, true
	x.mem.Retain() // recycle releases it
}

// isZeroCopy reports whether o is a request whose value the device reads from the caller's memory.
func (o *outgoing) isZeroCopy() bool {
	return o.request && !o.oneShot && o.zeroCopy
}

// requestID identifies the request that a message belongs to.
type requestID struct{ app, customer, ts int32 }

func (r requestID) in(q *van.Requests) bool {
	return r.app == q.App && r.customer == q.Customer && r.ts >= q.First && r.ts-q.First < q.Count
}
