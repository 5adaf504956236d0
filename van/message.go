package van

// Message, the unit that transports carry, and its reference count.

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/stepaf/stepaf-go/van/backend"
)

// Origin says how far a transport has verified the sender of a received message. Any process can claim any sender id.
type Origin uint8

const (
	OriginUnknown Origin = iota // the transport does not know the hosts of connections
	OriginDialed                // received over the connection that this node has made to the sender's address
	OriginHost                  // received over a connection from the host of the sender's address
	OriginOther                 // received over a connection from any other host
)

// Message is a Meta, its data frames or the parts of a batch, and its two ends.
//
// To send a message, fill it and call Van.Send. When Send returns, the Message itself
// may be used again, but the bytes of its frames and parts belong to the transport
// until Done has been called (or, without Done, until the answer to the message
// has arrived). Send copies frames shorter than CopyBelow.
//
// A received Message belongs to the transport. It is valid until the receiver
// function returns. To use it or its frames longer, call Retain before that and
// Release afterwards.
type Message struct {
	Meta
	Sender   int // node id; Empty if the sender has no id yet
	Receiver int

	// ProcessEpoch numbers the processes that have had the sender's id one after the other.
	// The node sets it in received messages. An answer carries its request's, so that it does not
	// reach another process. 0 means any process with that id.
	ProcessEpoch uint32

	// Origin says how far the transport has verified Sender. It is set in received control messages.
	Origin Origin

	// Frames is the number of data frames: 0, 2 (keys, values) or 3 (and lengths).
	Frames int
	Keys   backend.Mem // 8 bytes each
	Vals   backend.Mem
	Lens   backend.Mem // 4 bytes each

	// Into, in a pull request, is the destination of the answer's value: the memory at Addr, ValLen
	// bytes long. Transports that can write there do so; the others ignore it. It belongs to the
	// transport until the answer has arrived or Invalidator.Invalidate has returned.
	Into backend.Mem

	// Placed says that the transport has written the value to the requested destination, so that
	// Vals need not be copied.
	Placed bool

	// Parts are the tensors of a batch, see Part. A batch has no frames. A received part whose value would have exceeded the receive budget
	// has no value, although its Len is not 0.
	Parts []Part

	// Done, if not nil, is called exactly once after a successful Send, when the
	// transport no longer needs the bytes of frames and parts. It may run on any goroutine,
	// also before Send returns, and must neither block nor send.
	Done Completion

	// InPoll says that a Poll (package engine) delivers a received message: the receiver must not block.
	InPoll bool

	refs   atomic.Int32
	owner  Owner
	native unsafe.Pointer
}

// CopyBelow is the length in bytes below which Send copies a frame instead of
// lending it to the transport. A key frame is shorter.
const CopyBelow = 34

// Completion is called when a transport no longer needs a message's bytes.
type Completion interface{ Sent() }

// Owner is the transport that has received a message. Only transports use it.
type Owner interface {
	// Free returns a message to the transport after its last Release.
	Free(*Message)
}

// Adopt makes m a received message with one reference. The last Release returns it to
// owner. native is the transport's own handle. Only transports call Adopt.
func (m *Message) Adopt(owner Owner, native unsafe.Pointer) {
	m.owner, m.native = owner, native
	m.refs.Store(1)
}

// Owner returns the transport that has received m, nil for other messages. A wrapper
// that must know when m is free adopts it with an owner of its own before it
// delivers m. The Free of that owner then calls the transport's.
func (m *Message) Owner() Owner { return m.owner }

// Native returns the handle that Adopt has stored.
func (m *Message) Native() unsafe.Pointer { return m.native }

// Retain adds a reference to a received message and returns m.
func (m *Message) Retain() *Message {
	if m.refs.Add(1) <= 1 && m.owner != nil {
		panic("van: Retain of a released message")
	}
	return m
}

// Release removes a reference. After the last Release, m and its frames are invalid.
func (m *Message) Release() {
	switch n := m.refs.Add(-1); {
	case n == 0 && m.owner != nil:
		m.owner.Free(m)
	case n < 0 && m.owner != nil:
		panic("van: Release of a released message")
	}
}

// keepParts is the largest capacity of Parts that Reset keeps.
const keepParts = 256

// Reset makes m an empty message with ps-lite's defaults, for reuse.
func (m *Message) Reset() {
	m.Meta.Reset()
	m.Sender, m.Receiver = Empty, Empty
	m.ProcessEpoch, m.Origin = 0, OriginUnknown
	m.Frames = 0
	m.Keys, m.Vals, m.Lens, m.Into = backend.Mem{}, backend.Mem{}, backend.Mem{}, backend.Mem{}
	m.Placed = false
	if cap(m.Parts) > keepParts {
		m.Parts = nil
	}
	clear(m.Parts)
	m.Parts = m.Parts[:0]
	m.Done, m.InPoll = nil, false
	m.owner, m.native = nil, nil
}

// PayloadLen is the number of bytes in all data frames and in the values of all parts.
func (m *Message) PayloadLen() int {
	n := m.Keys.Len() + m.Vals.Len() + m.Lens.Len()
	for i := range m.Parts {
		n += m.Parts[i].Vals.Len()
	}
	return n
}

// CheckOnHost returns an error that wraps ErrInvalid if a frame or a value lies on a device.
func (m *Message) CheckOnHost() error {
	for i := range m.Frames {
		if f := m.Frame(i); !f.OnHost() {
			return fmt.Errorf("%w: frame %d lies on %s, want host memory", ErrInvalid, i, f.Device())
		}
	}
	for i := range m.Parts {
		if p := &m.Parts[i]; !p.Vals.OnHost() {
			return fmt.Errorf("%w: the value of key %d lies on %s, want host memory", ErrInvalid, p.Key, p.Vals.Device())
		}
	}
	return nil
}

// Frame returns data frame i (0 keys, 1 values, 2 lengths).
func (m *Message) Frame(i int) backend.Mem {
	switch i {
	case 0:
		return m.Keys
	case 1:
		return m.Vals
	default:
		return m.Lens
	}
}

// SetFrame sets data frame i.
func (m *Message) SetFrame(i int, f backend.Mem) {
	switch i {
	case 0:
		m.Keys = f
	case 1:
		m.Vals = f
	default:
		m.Lens = f
	}
}
