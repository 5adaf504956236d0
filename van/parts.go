package van

// Batches: messages with several tensors, their directory, and the messages of ps-lite that stand for them.

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/stepaf/stepaf-go/van/backend"
)

// Part is one tensor of a batch. A batch is a message with Parts: all tensors that one call pushes to and pulls from one server, pushes
// first, or all answers to the pulls. It has no frames. Its body is the directory of its parts, see WriteDirectory.
type Part struct {
	Key    uint64
	Push   bool // the request pushes the value; otherwise it pulls one, or the part is the answer to a pull
	Placed bool // see Message.Placed

	// Timestamp is that of the part in its request. Those of a batch are consecutive from Meta.Timestamp on, unless the batch answers
	// messages of ps-lite. WriteDirectory sets those of a request.
	Timestamp int32

	Len    int            // bytes of the tensor
	Device backend.Device // where the sender of the request has the tensor
	Dtype  int32          // PyTorch's scalar type code
	Dim    int32
	Shape  [MaxDims]int64

	// Head, Addr, Option and Trace are those of the part's own message, if the batch has arrived as messages of ps-lite. An answer
	// repeats them.
	Head   BatchFlag
	Option int32
	Addr   uint64
	Trace  Trace

	Vals backend.Mem // the value of a push or of an answer
	Into backend.Mem // see Message.Into
}

// Limits of a batch.
const (
	// MaxParts is the largest number of parts.
	MaxParts = 16384
	// MaxValues is the largest number of bytes of all values of a batch; one value has less than 2 GiB.
	MaxValues = 64 << 30
	// PartBytes is the memory of a part, which can be far more than its entry in the directory.
	PartBytes = int(unsafe.Sizeof(Part{}))
)

// ShapeSlice returns the dimensions as a slice of p's own array.
func (p *Part) ShapeSlice() []int64 { return p.Shape[:p.Dim] }

// HasValue reports whether part i of m has a value.
func (m *Message) HasValue(i int) bool { return m.Parts[i].Push || !m.Request }

// IsBatch reports whether the message is a batch.
func (m *Meta) IsBatch() bool { return m.hasBatchHead() && (m.Request || !m.Push) }

// AcksBatch reports whether the message acknowledges all pushes of a batch without pulls. It has the timestamp of the last one.
func (m *Meta) AcksBatch() bool { return m.hasBatchHead() && !m.Request && m.Push }

// hasBatchHead reports whether the message is a batch, or acknowledges one.
func (m *Meta) hasBatchHead() bool {
	return m.Head == WholeBatch && m.IsTensor && !m.SimpleApp && !m.IsControl()
}

// Layout of the directory, an entry for each part:
//
//	0  u64  key          12  u8   1: push        16  i32  device number
//	8  u32  bytes        13  u8   dimensions     20  i32  dtype
//	                     14  u8   device type    24  i64  each dimension
//	                     15  u8   0
const (
	entryLen  = 24
	entryPush = 1
)

// WriteDirectory makes m, of which Parts and Timestamp are set, a batch. The body becomes its directory.
func (m *Message) WriteDirectory() {
	m.Head, m.IsTensor, m.Frames = WholeBatch, true, 0
	b := m.Body[:0]
	for i := range m.Parts {
		p := &m.Parts[i]
		flags, dims := byte(0), p.ShapeSlice()
		if p.Push {
			flags = entryPush
		}
		if m.Request {
			p.Timestamp = m.Timestamp + int32(i)
		} else {
			dims = nil
		}
		b = le.AppendUint64(b, p.Key)
		b = le.AppendUint32(b, uint32(p.Len))
		b = append(b, flags, byte(len(dims)), byte(p.Device.Type), 0)
		b = le.AppendUint32(b, uint32(p.Device.ID))
		b = le.AppendUint32(b, uint32(p.Dtype))
		for _, d := range dims {
			b = le.AppendUint64(b, uint64(d))
		}
	}
	m.Body = b
	m.DataSize = int32(min(m.PayloadLen(), math.MaxInt32))
}

// ReadDirectory sets the parts of m, a received batch, without their values. It returns the number of bytes of all values. Invalid
// parts are a *FieldError, and m has no parts then.
func (m *Message) ReadDirectory() (values int, err error) {
	bad := func(field string, value any, want string, a ...any) (int, error) {
		where := fmt.Sprintf("directory[%d]", len(m.Parts))
		if n := len(m.Parts); n > 0 {
			where = fmt.Sprintf("directory[%d] (key %d)", n-1, m.Parts[n-1].Key)
		}
		m.Parts = m.Parts[:0]
		return 0, &FieldError{Field: where + " " + field, Value: value, Want: fmt.Sprintf(want, a...)}
	}
	m.Parts = m.Parts[:0]
	if m.Timestamp < 0 {
		return bad("timestamp", m.Timestamp, "0 to %d", math.MaxInt32)
	}
	b := m.Body
	if len(b) == 0 {
		return bad("length", 0, "at least one entry of %d bytes", entryLen)
	}
	for len(b) > 0 {
		if len(m.Parts) == MaxParts {
			return bad("further bytes", len(b), "none after %d entries", MaxParts)
		}
		if len(b) < entryLen {
			return bad("length", len(b), "at least %d bytes", entryLen)
		}
		if n := len(m.Parts); n < cap(m.Parts) {
			m.Parts = m.Parts[:n+1]
		} else {
			m.Parts = append(m.Parts, Part{})
		}
		n := len(m.Parts)
		p := &m.Parts[n-1]
		*p = Part{}
		p.Key, p.Timestamp = le.Uint64(b), m.Timestamp+int32(n-1)
		size, flags, dims, dev := le.Uint32(b[8:]), b[12], int(b[13]), b[14]
		p.Len, p.Push = int(size), flags == entryPush
		p.Device = backend.Device{Type: backend.DeviceType(dev), ID: int32(le.Uint32(b[16:]))}
		p.Dtype, p.Dim = int32(le.Uint32(b[20:])), int32(dims)
		switch {
		case int(m.Timestamp)+n-1 > math.MaxInt32:
			return bad("timestamp", int(m.Timestamp)+n-1, "0 to %d", math.MaxInt32)
		case size > math.MaxInt32:
			return bad("bytes", size, "at most %d", math.MaxInt32)
		case flags > entryPush || p.Push && (!m.Request || n > 1 && !m.Parts[n-2].Push):
			return bad("kind", flags, "0, a pull, or 1, a push of a request before all its pulls")
		case dims > MaxDims || entryLen+8*dims > len(b):
			return bad("dimensions", dims, "at most %d, and within the directory", MaxDims)
		case dev > byte(backend.GPU) || b[15] != 0:
			return bad("device", b[14:16], "cpu or gpu, and 0")
		}
		for i := range dims {
			if p.Shape[i] = int64(le.Uint64(b[entryLen+8*i:])); p.Shape[i] < 0 {
				return bad("shape", p.Shape[i], "0 or more")
			}
		}
		if m.HasValue(n - 1) {
			if values += p.Len; values > MaxValues {
				return bad("bytes of all values", values, "at most %d", MaxValues)
			}
		}
		b = b[entryLen+8*dims:]
	}
	return values, nil
}

// Unpack sets the parts of a received batch, whose values all are in Vals, one after the other. Other messages are not changed.
func (m *Message) Unpack() error {
	if !m.IsBatch() {
		return nil
	}
	n, err := m.ReadDirectory()
	if err != nil {
		return err
	}
	if m.Vals.Len() != n || m.Keys.Len() > 0 || m.Lens.Len() > 0 {
		m.Parts = m.Parts[:0]
		return &FieldError{Field: "bytes of keys, values and lengths", Value: fmt.Sprint(m.Keys.Len(), m.Vals.Len(), m.Lens.Len()),
			Want: fmt.Sprintf("0, %d and 0, as the directory says", n)}
	}
	at := 0
	for i := range m.Parts {
		if p := &m.Parts[i]; m.HasValue(i) && p.Len > 0 { // no pointer to the end of the values, where other memory may begin
			p.Vals = m.Vals.Sub(at, p.Len)
			at += p.Len
		}
	}
	m.Vals, m.Frames = backend.Mem{}, 0
	return nil
}

// Pack makes the values of m, a batch in host memory, one frame, for a transport that carries no others. The frame is the only value, or
// buf with a copy of all. Pack returns buf. It removes the parts, so m must be the transport's own copy of the message.
func (m *Message) Pack(buf []byte) []byte {
	n, only := 0, -1
	for i := range m.Parts {
		if k := m.Parts[i].Vals.Len(); k > 0 {
			n, only = n+1, i
		}
	}
	buf = buf[:0]
	switch n {
	case 0:
		m.Frames = 0
	case 1:
		m.Frames, m.Vals = 2, m.Parts[only].Vals
	default:
		for i := range m.Parts {
			buf = append(buf, m.Parts[i].Vals.Host()...)
		}
		m.Frames, m.Vals = 2, backend.Bytes(buf)
	}
	if m.Frames > 0 {
		m.DataTypes = append(m.DataTypes[:0], TypeUint64, TypeOther)
	}
	m.Parts = nil
	return buf
}

// CloneFrom makes m a copy of src that outlives the Send of src: it retains the memory of src, and copies frames shorter than CopyBelow to
// short. ReleaseClone releases the memory. Sender, receiver and Done are copied, too.
func (m *Message) CloneFrom(src *Message, short *[MaxFrames][CopyBelow]byte) {
	m.Reset()
	m.CopyFrom(&src.Meta)
	m.Sender, m.Receiver, m.ProcessEpoch, m.Frames = src.Sender, src.Receiver, src.ProcessEpoch, src.Frames
	m.Into, m.Placed, m.Done = src.Into, src.Placed, src.Done
	for i := range src.Frames {
		f := src.Frame(i)
		if f.OnHost() && f.Len() < CopyBelow { // the caller may reuse it when Send returns
			f = backend.Bytes(short[i][:copy(short[i][:], f.Host())])
		}
		f.Retain()
		m.SetFrame(i, f)
	}
	m.Parts = append(m.Parts[:0], src.Parts...)
	for i := range m.Parts {
		m.Parts[i].Vals.Retain()
	}
}

// ReleaseClone releases the memory that CloneFrom has retained.
func (m *Message) ReleaseClone() {
	for i := range m.Frames {
		m.Frame(i).Release()
	}
	for i := range m.Parts {
		m.Parts[i].Vals.Release()
	}
}

// flagOf returns the flag of the message of ps-lite for part i of a request of n parts. An only part is Single, since no message follows.
func flagOf(i, n int) BatchFlag {
	switch {
	case n == 1:
		return Single
	case i == 0:
		return BatchStart
	case i == n-1:
		return BatchEnd
	}
	return BatchMiddle
}

// expansion is a message of ps-lite for one part of a batch.
type expansion struct {
	msg Message
	key [8]byte
}

var expansions = sync.Pool{New: func() any { return new(expansion) }}

// AllSent is the completion of several messages or values that stand for one message. It calls Done of that message when Sent has been
// called once for Begin and once for each Add.
type AllSent struct {
	left atomic.Int32
	done Completion
}

var allSents = sync.Pool{New: func() any { return new(AllSent) }}

// NewAllSent returns an AllSent for done, nil if done is nil. The caller calls Add for each message, and Sent after the last one.
func NewAllSent(done Completion) *AllSent {
	if done == nil {
		return nil
	}
	s := allSents.Get().(*AllSent)
	s.done = done
	s.left.Store(1)
	return s
}

// Add returns the completion of one more message, nil if s is nil.
func (s *AllSent) Add() Completion {
	if s == nil {
		return nil
	}
	s.left.Add(1)
	return s
}

// Sent implements Completion. s may be nil.
func (s *AllSent) Sent() {
	if s != nil && s.left.Add(-1) == 0 {
		done := s.done
		s.done = nil
		allSents.Put(s)
		done.Sent()
	}
}

// Cancel ends an AllSent of which no message was sent. It does not call Done.
func (s *AllSent) Cancel() {
	if s != nil {
		s.done = nil
		allSents.Put(s)
	}
}

// PartSender sends a message that stands for one part of a batch. It may keep no message beyond its return.
type PartSender interface{ SendPart(*Message) error }

// Expand passes send, which must not be nil, to ExpandTo.
func (m *Message) Expand(send func(*Message) error) error { return m.ExpandTo(partFunc(send)) }

// partFunc is a function as a PartSender.
type partFunc func(*Message) error

// SendPart implements PartSender.
func (f partFunc) SendPart(m *Message) error { return f(m) }

// ExpandTo calls to with the messages of ps-lite that stand for m, a batch, in order: one for each part.
// It stops at the first error, and returns it if it is that of the first message, or if m has no Done. Otherwise m counts
// as sent and lost: the transport may still read its memory. A transport that has accepted the first message must therefore accept the
// others, unless the peer is lost.
func (m *Message) ExpandTo(to PartSender) error {
	x := expansions.Get().(*expansion)
	defer func() {
		x.msg.Reset()
		expansions.Put(x)
	}()
	all := NewAllSent(m.Done)
	for i := range m.Parts {
		m.expand(i, x)
		x.msg.Done = all.Add()
		err := to.SendPart(&x.msg)
		if i == 0 || err != nil {
			m.RequestTrace.PostSend, m.ResponseTrace.PostSend = x.msg.RequestTrace.PostSend, x.msg.ResponseTrace.PostSend
		}
		switch {
		case err == nil:
			continue
		case i == 0:
			all.Cancel()
			return err
		case all == nil:
			return err
		}
		all.Sent() // of part i, which is not sent
		break
	}
	all.Sent()
	return nil
}

// expand makes x the message for part i.
func (m *Message) expand(i int, x *expansion) {
	p, e := &m.Parts[i], &x.msg
	e.Reset()
	e.Sender, e.Receiver, e.ProcessEpoch = m.Sender, m.Receiver, m.ProcessEpoch
	e.Request, e.Push, e.AppID, e.CustomerID, e.Timestamp = m.Request, p.Push, m.AppID, m.CustomerID, p.Timestamp
	e.Key, e.Addr, e.ValLen, e.Option = p.Key, p.Addr, int32(p.Len), p.Option
	e.RequestTrace, e.ResponseTrace = m.RequestTrace, m.ResponseTrace
	le.PutUint64(x.key[:], p.Key)
	e.DataTypes = append(e.DataTypes, TypeUint64, TypeOther)
	e.Frames, e.Keys, e.Vals, e.Into, e.Placed = 2, backend.Bytes(x.key[:]), p.Vals, p.Into, p.Placed
	if m.Request {
		e.Head = flagOf(i, len(m.Parts))
		e.IsTensor, e.Dtype, e.Dim, e.Shape = true, p.Dtype, p.Dim, p.Shape
		e.Src, e.Dst = p.Device, p.Device
	} else {
		pre := e.RequestTrace.PreStart // the incarnations
		e.Head, e.RequestTrace = p.Head, p.Trace
		e.RequestTrace.PreStart = pre
		dev := p.Vals.Device()
		if dev.Type == backend.Unknown {
			dev = backend.Host
		}
		e.Src, e.Dst = dev, dev
	}
	e.DataSize = int32(min(e.PayloadLen(), math.MaxInt32))
}

// PartOf returns the part that m, a message of ps-lite for one tensor, stands for. It has the key of the meta, and no value.
func PartOf(m *Meta) Part {
	return Part{Key: m.Key, Push: m.Push, Timestamp: m.Timestamp, Len: int(m.ValLen), Device: m.Dst, Dtype: m.Dtype, Dim: m.Dim, Shape: m.Shape,
		Head: m.Head, Addr: m.Addr, Option: m.Option, Trace: m.RequestTrace}
}
