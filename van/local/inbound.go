package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/landing"
	"github.com/stepaf/stepaf-go/van/links"
)

// inPeer is the queue of one sender's messages. All links of the sender use the same queue.
type inPeer struct {
	id     int
	lane   engine.PeerQueue[*inbound]
	inHand atomic.Int32 // messages that the loop has received and not delivered

	fetching atomic.Bool // a value is being read from the sender's memory
	blame    engine.SlowDetector
}

// inbound is a received message with its memory.
type inbound struct {
	msg    van.Message
	from   *inPeer
	in     *inLink
	rec    record
	buf    []byte            // copy of the record
	blocks [partCount][]byte // of parts that were not inline, if they have no destination of their own
	ring   *inRing           // set while parts must be read from the peer
	dst    [partCount][]byte // destinations of parts that were not inline
	left   [partCount][]byte // the parts of dst that the stream has not filled
	dest   landing.Place     // of the values, if they are an answer
	mapped backend.Mem       // the value in the sender's memory, if this process has mapped that
	uses   []backend.Mem     // mapped memory that the message refers to

	// A batch can have several records. The first one has the meta, and collects the others.
	head            *inbound   // of another record: the first one
	item            int        // the index of the value's part in the batch
	values          []*inbound // of the first record: the complete other records, in order
	count           int        // of the first record: the number of values in the batch
	received, after int        // of the first record: the number of values whose record has arrived; the index of the part after the last of them

	onDevice *backend.Buffer // of values on the device without a destination of their own
	copied   backend.Event   // the end of the device's running copy
	spans    []span          // the memory that the copy reads
	begun    uint64          // the time at which the copy was queued
	stranded bool            // the copy may still run although the message was dropped
}

// partVals is the part that may have a destination of its own.
const partVals = 2

var errGone = errors.New("the sender has taken the message back")

// messageBytes is the approximate size of a received message without its parts.
const messageBytes = 1 << 10

// weight returns the memory of this node that p uses while it waits. Values with a destination of their own
// and values that are still in the sender's memory use none.
func (p *inbound) weight() int {
	n := messageBytes + cap(p.buf) + len(p.msg.Parts)*van.PartBytes
	for _, b := range p.blocks {
		n += cap(b)
	}
	if p.onDevice != nil {
		n += p.onDevice.Mem().Len()
	}
	for _, v := range p.values {
		n += v.weight()
	}
	return n
}

// batch is the message that p belongs to.
func (p *inbound) batch() *van.Message {
	if p.head != nil {
		return &p.head.msg
	}
	return &p.msg
}

// decode decodes the meta and finds the inline frames. If the values of an answer need no destination, decode
// removes their destination from q.
func (p *inbound) decode(q *landing.Table) error {
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
	p.frames(m)
	if m.IsBatch() {
		if err := p.open(m); err != nil {
			return err
		}
		if p.rec.parts[0].form != partPinned { // fetch decodes a pinned meta, without the feed that guards imported
			p.in.imported.setPullMemory(p)
		}
		if p.rec.batch != 0 {
			return nil
		}
	} else if p.rec.batch != 0 {
		return &van.FieldError{Field: "record.batch", Value: p.rec.batch, Want: "0, since the message is no batch"}
	}
	// Other values use their destination, if any, later, unless their meta is not inline: see allocate.
	if !m.Request && !m.Push && (m.Frames < partVals || p.rec.parts[partVals].form == partInline || p.rec.parts[0].form != partInline) {
		q.Answered(m)
	}
	return nil
}

// frames sets the sender and the inline frames of m, p's message.
func (p *inbound) frames(m *van.Message) {
	m.Sender, m.Frames = p.from.id, p.rec.frames
	for i := range m.Frames {
		if h := &p.rec.parts[i+1]; h.form == partInline {
			m.SetFrame(i, backend.Bytes(p.buf[h.off:h.off+h.n:h.off+h.n]))
		}
	}
}

// open reads the directory of a batch. The record has all values of the batch, or the first one.
func (p *inbound) open(m *van.Message) error {
	if p.rec.batch == 0 {
		if m.Frames > 0 && p.rec.parts[partVals].form != partInline {
			return &van.FieldError{Field: "record.part.form", Value: p.rec.parts[partVals].form, Want: "inline values of a batch"}
		}
		return m.Unpack()
	}
	if _, err := m.ReadDirectory(); err != nil {
		return err
	}
	for i := range m.Parts {
		if m.HasValue(i) && m.Parts[i].Len > 0 {
			p.count++
		}
	}
	if p.rec.frames != 2 || p.rec.parts[1].n != 0 || p.rec.batch&math.MaxUint16 != 0 {
		return &van.FieldError{Field: "record.batch", Value: p.rec.batch, Want: "the first record of a batch, with one value and no keys"}
	}
	return p.assign(p, 0)
}

// assign makes v the record of the first value of the batch from part i on.
func (p *inbound) assign(v *inbound, i int) error {
	m := &p.msg
	for i < len(m.Parts) && (!m.HasValue(i) || m.Parts[i].Len == 0) {
		i++
	}
	if i == len(m.Parts) || m.Parts[i].Len != v.rec.parts[partVals].n {
		want, key := 0, uint64(0)
		if i < len(m.Parts) {
			want, key = m.Parts[i].Len, m.Parts[i].Key
		}
		return &van.FieldError{Field: fmt.Sprintf("value of part %d (key %d), bytes", i, key), Value: v.rec.parts[partVals].n, Want: fmt.Sprintf("%d, as the directory says", want)}
	}
	v.item, p.after = i, i+1
	p.received++
	return nil
}

// useMapped makes the value of p the sender's memory, if that is mapped and the sender does not reuse it before the answer. It reports
// whether it did.
func (p *inbound) useMapped() bool {
	m := p.batch()
	n := len(m.Parts)
	if p.mapped.Len() == 0 || n == 0 || !m.Request || m.Parts[n-1].Push {
		return false
	}
	p.msg.Vals = p.mapped
	return true
}

// setParts sets the parts of p, the first record of a complete batch, from all its records.
func (p *inbound) setParts(q *landing.Table) {
	m := &p.msg
	set := func(v *inbound) {
		x := &m.Parts[v.item]
		x.Vals, x.Placed = v.msg.Vals, v.msg.Placed
	}
	set(p)
	m.Vals, m.Placed, m.Frames = backend.Mem{}, false, 0
	for _, v := range p.values {
		set(v)
	}
	if !m.Request {
		q.Answered(m)
	}
}

// write calls f, which writes to part i of p.
func (p *inbound) write(i int, f func() error) error {
	if i == partVals && p.dest.Used() {
		return p.dest.Write(f)
	}
	return f()
}

// inCommon is the state that all inbound links of a node share: the destinations of values, and the pools of
// messages and buffers.
type inCommon struct {
	self       *endpoint
	log        *slog.Logger
	stats      *stats
	copies     *copies
	feed       *engine.Feed[*inbound]
	dests      *landing.Table
	blocks     blocks
	mapsMemory bool          // STEPAF_SHM_MAP: this process maps memory of peers
	chunks     atomic.Uint64 // received chunks of streams

	dropTime time.Duration // the constant, except in tests

	mu       sync.Mutex
	free     []*inbound
	stranded []*inbound // the device may still write to their memory, so it is kept until their copies have ended
}

// maxFree limits the messages that an idle van keeps.
const maxFree = 256

// get returns a message for use.
func (c *inCommon) get() *inbound {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.free); n > 0 {
		p := c.free[n-1]
		c.free = c.free[:n-1]
		return p
	}
	return &inbound{}
}

// allocate finds memory for the parts that are not inline. If the meta is one of them, the first call allocates
// only the meta, since the other parts depend on it.
func (c *inCommon) allocate(p *inbound) (err error) {
	for i := range present(p.rec.frames) {
		h := &p.rec.parts[i]
		if h.form == partInline || p.dst[i] != nil {
			continue
		}
		if i == partVals && p.rec.parts[0].form == partInline {
			if dst, ok := c.dests.Find(p.batch(), max(p.item, 0), h.n, &p.dest, false); ok {
				p.dst[i] = dst.Host()
				p.msg.Vals, p.msg.Placed = dst, true
				continue
			}
			if p.useMapped() {
				continue
			}
		}
		if p.blocks[i], err = c.blocks.get(h.n); err != nil {
			return err
		}
		p.dst[i] = p.blocks[i]
		if i > 0 {
			p.msg.SetFrame(i-1, backend.Bytes(p.blocks[i]))
		}
	}
	return nil
}

// finish ends the writing of p's values. It returns an error if their destination was invalidated
// meanwhile: the caller of the request does not wait for them any more.
func (c *inCommon) finish(p *inbound) error {
	err := c.dests.Finish(&p.dest)
	if err != nil {
		c.stats.late.Add(1)
	}
	return err
}

// adopt makes p's message one that has been received.
func (c *inCommon) adopt(p *inbound) {
	m := &p.msg
	m.Receiver = int(c.self.id.Load())
	m.Trace().PostRecv = clock.Now()
	m.Adopt(c, unsafe.Pointer(p))
}

// Free implements van.Owner.
func (c *inCommon) Free(m *van.Message) { c.release((*inbound)(m.Native())) }

// release returns a received message to the pool.
func (c *inCommon) release(p *inbound) {
	for i, v := range p.values {
		p.values[i] = nil
		c.release(v)
	}
	p.values, p.count, p.received, p.after = p.values[:0], 0, 0, 0
	if p.stranded { // its destination stays in use: Invalidate continues to wait for the copy
		c.strand(p)
		return
	}
	_ = c.dests.Finish(&p.dest)
	for i, b := range p.blocks {
		if b != nil {
			c.blocks.put(b)
		}
		p.blocks[i], p.dst[i], p.left[i] = nil, nil, nil
	}
	if p.onDevice != nil {
		p.onDevice.Put()
		p.onDevice = nil
	}
	for i, m := range p.uses {
		m.Release()
		p.uses[i] = backend.Mem{}
	}
	p.uses, p.mapped = p.uses[:0], backend.Mem{}
	p.leave()
	p.msg.Reset()
	p.from, p.in, p.head, p.item = nil, nil, nil, 0
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.free) < maxFree {
		c.free = append(c.free, p)
	}
}

// strand keeps p and its memory until its copy has ended.
func (c *inCommon) strand(p *inbound) {
	p.leave()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stranded = append(c.stranded, p)
}

// unstrand releases the stranded messages whose copies have ended.
func (c *inCommon) unstrand() {
	var over []*inbound
	c.mu.Lock()
	c.stranded = slices.DeleteFunc(c.stranded, func(p *inbound) bool {
		done, err := p.copied.Query()
		if done || err != nil { // a failed device does not write any more
			over = append(over, p)
			return true
		}
		return false
	})
	c.mu.Unlock()
	for _, p := range over {
		p.dest.Filled()
		if err := p.copied.Close(); err != nil {
			c.log.Warn("a copy that was given up was not left in order", "err", err)
		}
		p.copied, p.stranded = nil, false
		c.release(p)
	}
}

// awaitStranded waits for the copies of stranded messages a last time. The memory of copies that have not ended
// then is leaked.
func (c *inCommon) awaitStranded(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, links.StopTime)
	defer cancel()
	c.mu.Lock()
	all := slices.Clone(c.stranded)
	c.mu.Unlock()
	for _, p := range all {
		_ = p.copied.Sync(ctx)
	}
	c.unstrand()
}

// leave releases p's reference to the peer's ring.
func (p *inbound) leave() {
	if r := p.ring; r != nil {
		p.ring = nil
		r.acknowledge(p.rec.slot)
		r.unref()
	}
}
