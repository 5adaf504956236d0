package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
)

// inLink brings messages from one peer. But for refs, acks and lost it is used by
// who holds Van.feed.
type inLink struct {
	v      *Van
	from   *peer
	name   [16]byte // in the peer's token
	conn   *net.UnixConn
	pid    int // of the peer's process
	seg    *segment
	bell   *bell         // the peer's
	source *remote       // its memory; nil if it cannot be read
	dev    *deviceSource // its device's; nil if it has none, or one out of reach

	head    uint64 // of the ring
	stream  *parcel
	part    int // of stream, that chunks go to
	off     int
	held    atomic.Bool  // nothing is taken yet: this node does not know the peer
	fenced  atomic.Bool  // nothing is taken any more: another process is the peer
	placing sync.RWMutex // read-held while a value is being written; fenced is set under it
	lost    atomic.Bool  // the connection has ended: what is in the ring is all there is
	refs    atomic.Int32
	ackMu   sync.Mutex
	acked   uint32
	owes    atomic.Bool // acknowledgements of which the peer has not been told
	failing sync.Once
	cause   atomic.Pointer[error]
}

// peer is the order of one sender's messages, over whichever link they come.
type peer struct {
	id     int
	lane   engine.Lane[*parcel]
	inHand atomic.Int32 // messages that the loop has received and not delivered
}

// parcel is a received message with its memory.
type parcel struct {
	msg    van.Message
	from   *peer
	in     *inLink
	rec    record
	buf    []byte            // copy of the record
	blocks [partCount][]byte // of parts that were not inline, if they have no place of their own
	link   *inLink           // while something is to be read from the peer
	dst    [partCount][]byte // where parts that were not inline go
	left   [partCount][]byte // of dst, what a stream has left to be read
	landed landing           // of the values, if they are an answer

	onDevice *backend.Buffer // of values on the device without a place of their own
	copied   backend.Event   // of the device's copy under way
	sources  []source        // that it reads
	begun    uint64          // when it was queued
}

var errGone = errors.New("the sender has taken the message back")

// maxChunks is how many chunks of a stream are taken before other links have a turn.
const maxChunks = 8

// next takes a message out of the ring. It returns nil when there is none, or, with
// something left, when a part of a stream was taken.
func (l *inLink) next() *parcel {
	if p := l.arrived(); p != nil {
		return p
	}
	for range maxChunks {
		tail := l.seg.tail().Load()
		if tail == l.head || l.dev.full() {
			break
		}
		avail := tail - l.head
		if avail > ringLen || avail%recordAlign != 0 {
			l.fail(&van.FieldError{Field: "ring.tail", Value: tail, Want: fmt.Sprintf("%d and at most %d more", l.head, ringLen)})
			return nil
		}
		b := l.seg.at(l.head)
		size, kind, err := peek(b, int(avail))
		var p *parcel
		switch {
		case err != nil:
		case kind == kindChunk:
			p, err = l.chunk(b[:size])
		case kind == kindRest:
			p, err = l.rest(b[:size])
		default:
			p, err = l.message(b[:size])
		}
		if err != nil {
			l.fail(err)
			return nil
		}
		l.head += uint64(size)
		l.seg.head().Store(l.head)
		if w := l.seg.wants(); w.Load() != 0 && (tail == l.head || tail-l.head < ringLen/2) && w.CompareAndSwap(1, 0) {
			l.bell.ring()
		}
		if p == nil {
			continue
		}
		if p.copied == nil && !l.dev.waiting() {
			return p
		}
		l.dev.queue.Put(p)
	}
	return l.arrived()
}

// arrived returns the next of the messages that wait for copies of the device, or
// behind such, if it is complete.
func (l *inLink) arrived() *parcel {
	for l.dev.waiting() {
		p, err := l.dev.pop()
		if err != nil {
			l.fail(err)
		}
		if p == nil || !p.rec.has(partDevice) {
			return p
		}
		// What was copied counts only if it has not been taken back meanwhile.
		gone := l.seg.gen(p.rec.slot).Load() != p.rec.gen
		p.link = nil
		l.acknowledge(p.rec.slot)
		l.unref()
		if l.v.land(p) == nil && !gone {
			return p
		}
		l.v.release(p)
	}
	return nil
}

// feed begins the copy of a value from the peer's device.
func (l *inLink) feed(p *parcel) error {
	if l.dev == nil {
		return &van.FieldError{Field: "record.part.form", Value: partDevice, Want: "host memory: it was agreed that this process does not copy from the sender's device"}
	}
	if err := p.decode(l.v.places); err != nil {
		return err
	}
	return l.dev.begin(p)
}

// message takes the record b of a message. It returns nil when parts of it follow.
func (l *inLink) message(b []byte) (*parcel, error) {
	if l.stream != nil {
		return nil, &van.FieldError{Field: "record.kind", Value: kindMessage, Want: "the rest of a stream"}
	}
	p := l.v.pool.get()
	p.from, p.in = l.from, l
	p.buf = append(p.buf[:0], b...)
	err := p.rec.parse(p.buf)
	switch {
	case err != nil:
	case p.buf[4] != kindMessage: // as it was a moment ago
		err = &van.FieldError{Field: "record.kind", Value: p.buf[4], Want: "what it was when the record was looked at first"}
	case p.rec.lends():
		if l.source == nil && p.rec.has(partLent) {
			err = &van.FieldError{Field: "record.part.form", Value: partLent, Want: "inline or streamed: it was agreed that this process does not read the sender's memory"}
			break
		}
		if p.rec.streams() {
			err = &van.FieldError{Field: "record.part.form", Value: partStream, Want: "no stream beside lent parts"}
			break
		}
		p.link = l
		l.refs.Add(1)
		if !p.rec.has(partDevice) {
			return p, nil // the rest where it keeps nobody waiting
		}
		if err = l.feed(p); err == nil {
			return p, nil
		}
		if errors.Is(err, errRevoked) {
			l.v.release(p)
			return nil, nil
		}
	case p.rec.parts[0].form == partInline:
		err = p.decode(l.v.places)
	}
	if err == nil && p.rec.streams() {
		if err = l.v.allot(p); err == nil {
			l.stream, l.part, l.off = p, -1, 0
			l.advance()
			if l.stream == nil {
				return p, nil
			}
			return nil, nil
		}
	}
	if err != nil {
		l.v.release(p)
		return nil, err
	}
	return p, nil
}

// advance goes to the next part of the stream that wants bytes, or ends it.
func (l *inLink) advance() {
	for l.part, l.off = l.part+1, 0; l.part < partCount; l.part++ {
		if len(l.stream.dst[l.part]) > 0 {
			return
		}
	}
	l.stream = nil
}

// chunk takes the record b of a chunk. It returns the message that it completes.
func (l *inLink) chunk(b []byte) (*parcel, error) {
	n := int(binary.LittleEndian.Uint32(b[8:]))
	p := l.stream
	if p == nil || n > len(b)-chunkHead || n == 0 || n > len(p.dst[l.part])-l.off {
		return nil, &van.FieldError{Field: "chunk.length", Value: n, Want: "what is left of the stream's part"}
	}
	l.placing.RLock()
	switch {
	case l.fenced.Load():
	case l.part == partVals && p.landed.mem.Len() > 0:
		p.landed.mu.Lock()
		if !p.landed.revoked {
			copy(p.dst[l.part][l.off:], b[chunkHead:chunkHead+n])
		}
		p.landed.mu.Unlock()
	default:
		copy(p.dst[l.part][l.off:], b[chunkHead:chunkHead+n])
	}
	l.placing.RUnlock()
	l.off += n
	l.v.chunks.Add(1)
	if l.off < len(p.dst[l.part]) {
		return nil, nil
	}
	// A meta that was streamed says only now what the other parts are.
	if l.part == 0 {
		if err := p.decode(l.v.places); err != nil {
			return nil, err
		}
	}
	l.advance()
	if l.stream != nil {
		return nil, nil
	}
	if l.v.land(p) != nil {
		l.v.release(p)
		return nil, nil
	}
	return p, nil
}

// rest takes the record b of the rest of a stream, which is to be read from the
// sender.
func (l *inLink) rest(b []byte) (*parcel, error) {
	p := l.stream
	var r record
	if p == nil || l.source == nil {
		return nil, &van.FieldError{Field: "record.kind", Value: kindRest, Want: "no rest: there is no stream, or it was agreed that this process does not read the sender's memory"}
	}
	if err := r.parse(append([]byte(nil), b...)); err != nil {
		return nil, err
	}
	for i := range partCount {
		want, have := 0, 0
		if i >= l.part {
			want = len(p.dst[i])
		}
		if i == l.part {
			want -= l.off
		}
		if i < present(r.frames) {
			have = r.parts[i].n
		}
		if have != want || have > 0 && r.parts[i].form != partLent {
			return nil, &van.FieldError{Field: fmt.Sprintf("rest.part[%d].length", i), Value: have, Want: fmt.Sprint(want)}
		}
		if have > 0 {
			p.rec.parts[i].form, p.rec.parts[i].addr = partLent, r.parts[i].addr
			p.rec.forms |= 1 << partLent
			p.left[i] = p.dst[i][len(p.dst[i])-have:]
		}
	}
	p.rec.slot, p.rec.gen = r.slot, r.gen
	l.stream = nil
	p.link = l
	l.refs.Add(1)
	return p, nil
}

// decode reads the meta and finds the inline frames. An answer whose values have no place
// to look for is taken out of q.
func (p *parcel) decode(q *places) error {
	meta := p.dst[0]
	if h := &p.rec.parts[0]; h.form == partInline {
		meta = p.buf[h.off : h.off+h.n]
	}
	m := &p.msg
	if err := van.DecodeMeta(meta, &m.Meta); err != nil {
		return err
	}
	if m.IsControl() {
		return &van.FieldError{Field: "control.cmd", Value: m.Control.Cmd, Want: "a data message"}
	}
	m.Sender, m.Frames = p.from.id, p.rec.frames
	for i := range m.Frames {
		if h := &p.rec.parts[i+1]; h.form == partInline {
			m.SetFrame(i, backend.Bytes(p.buf[h.off:h.off+h.n:h.off+h.n]))
		}
	}
	// Other values find their place, if they have one, later.
	if !m.Request && !m.Push && (m.Frames < partVals || p.rec.parts[partVals].form == partInline || p.dst[partVals] != nil) {
		q.answered(m.Sender, &m.Meta)
	}
	return nil
}

// allot finds places for the parts that are not inline: first, by itself, the meta,
// which the others need.
func (v *Van) allot(p *parcel) (err error) {
	for i := range present(p.rec.frames) {
		h := &p.rec.parts[i]
		if h.form == partInline || p.dst[i] != nil {
			continue
		}
		if i == partVals && p.rec.parts[0].form == partInline {
			if dst, ok := v.places.want(&p.msg, h.n, &p.landed, false); ok {
				p.dst[i] = dst.Host()
				p.msg.Vals, p.msg.Placed = dst, true
				continue
			}
		}
		if p.blocks[i], err = v.blocks.get(h.n); err != nil {
			return err
		}
		p.dst[i] = p.blocks[i]
		if i > 0 {
			p.msg.SetFrame(i-1, backend.Bytes(p.blocks[i]))
		}
	}
	return nil
}

// partVals is the part that has places of its own.
const partVals = 2

// write calls f, which writes to part i of p.
func (p *parcel) write(i int, f func() error) error {
	if i == partVals && p.landed.mem.Len() > 0 {
		return p.landed.write(f)
	}
	return f()
}

// fetch reads the parts of p that are lent, and acknowledges them.
func (v *Van) fetch(p *parcel) error {
	l := p.link
	if l == nil {
		return nil
	}
	p.link = nil
	defer l.unref()
	err := v.fetchFrom(l, p)
	if late := v.land(p); err == nil {
		err = late
	}
	switch {
	case err == nil, errors.Is(err, errGone), errors.Is(err, errRevoked):
		l.acknowledge(p.rec.slot)
	case !l.lost.Load():
		l.fail(err)
	}
	return err
}

// land ends the writing of p's values. It returns an error when their place was
// taken back meanwhile: nobody awaits them any more.
func (v *Van) land(p *parcel) error {
	if p.landed.mem.Len() == 0 {
		return nil
	}
	v.places.settle(&p.landed)
	if p.landed.revoked {
		return errRevoked
	}
	return nil
}

func (v *Van) fetchFrom(l *inLink, p *parcel) error {
	read := func(i int) error {
		h := &p.rec.parts[i]
		if h.form != partLent {
			return nil
		}
		dst := p.dst[i]
		if p.left[i] != nil {
			dst = p.left[i]
		}
		l.placing.RLock()
		err := errGone
		if !l.fenced.Load() {
			err = p.write(i, func() error { return l.source.read(dst, h.addr) })
		}
		l.placing.RUnlock()
		// What is read counts only if the sender has not taken it back meanwhile, and
		// is still the process that it was, and the peer.
		if l.fenced.Load() || !l.source.alive() || l.seg.gen(p.rec.slot).Load() != p.rec.gen {
			return errGone
		}
		if err != nil && !errors.Is(err, errRevoked) {
			return fmt.Errorf("%w (was it freed while it was being sent?)", err)
		}
		return err
	}
	if p.rec.parts[0].form == partLent {
		if p.dst[0] == nil {
			block, err := v.blocks.get(p.rec.parts[0].n)
			if err != nil {
				return err
			}
			p.blocks[0], p.dst[0] = block, block
		}
		if err := read(0); err != nil {
			return err
		}
	}
	if p.msg.Sender != p.from.id { // not decoded before, as the message of a stream is
		if err := p.decode(v.places); err != nil {
			return err
		}
		if err := v.allot(p); err != nil {
			return err
		}
	}
	for i := 1; i < present(p.rec.frames); i++ {
		if err := read(i); err != nil {
			return err
		}
	}
	return nil
}

// acknowledge gives the parts in a slot back to the sender. It is told when this
// node has nothing better to do, unless it waits.
func (l *inLink) acknowledge(slot uint32) {
	l.ackMu.Lock()
	l.seg.ack(l.acked).Store(slot)
	l.acked++
	l.seg.acked().Store(l.acked)
	l.ackMu.Unlock()
	l.owes.Store(true)
	if w := l.seg.wants(); w.Load() != 0 && w.CompareAndSwap(1, 0) || l.v.feed.Parked() {
		l.tell()
	}
}

// tell rings for acknowledgements.
func (l *inLink) tell() {
	if l.owes.Load() && l.owes.Swap(false) {
		l.bell.ring()
	}
}

// fail ends the link because of what the peer has sent.
func (l *inLink) fail(err error) {
	l.failing.Do(func() {
		l.cause.Store(&err)
		l.v.stats.malformed.Add(1)
		_ = l.conn.Close()
	})
}

// failed tells whether what is in the ring is not to be looked at any more.
func (l *inLink) failed() bool { return l.cause.Load() != nil }

// unref gives up one hold; after the last one the link's memory goes.
func (l *inLink) unref() {
	if l.refs.Add(-1) > 0 {
		return
	}
	l.seg.unmap()
	l.bell.unmap()
	if l.source != nil {
		l.source.close()
	}
	if l.dev != nil {
		l.dev.close()
	}
}

// pool keeps parcels for use again.
type pool struct {
	mu   sync.Mutex
	free []*parcel
}

// poolLen bounds what an idle van keeps.
const poolLen = 256

func (q *pool) get() *parcel {
	q.mu.Lock()
	defer q.mu.Unlock()
	if n := len(q.free); n > 0 {
		p := q.free[n-1]
		q.free = q.free[:n-1]
		return p
	}
	return &parcel{}
}

// adopt makes p's message one that has been received.
func (v *Van) adopt(p *parcel) {
	m := &p.msg
	m.Receiver = int(v.id.Load())
	now := clock.Now()
	if m.Request {
		m.RequestTrace.PostRecv = now
	} else {
		m.ResponseTrace.PostRecv = now
	}
	m.Adopt(v, unsafe.Pointer(p))
}

// Free implements van.Owner.
func (v *Van) Free(m *van.Message) { v.release((*parcel)(m.Native())) }

// release takes back a parcel.
func (v *Van) release(p *parcel) {
	v.places.settle(&p.landed)
	for i, b := range p.blocks {
		if b != nil {
			v.blocks.put(b)
		}
		p.blocks[i], p.dst[i], p.left[i] = nil, nil, nil
	}
	p.landed.revoked = false
	if p.onDevice != nil {
		p.onDevice.Put()
		p.onDevice = nil
	}
	if l := p.link; l != nil {
		p.link = nil
		l.acknowledge(p.rec.slot)
		l.unref()
	}
	p.msg.Reset()
	p.from, p.in = nil, nil
	v.pool.mu.Lock()
	defer v.pool.mu.Unlock()
	if len(v.pool.free) < poolLen {
		v.pool.free = append(v.pool.free, p)
	}
}
