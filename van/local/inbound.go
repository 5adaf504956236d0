package local

import (
	"context"
	"errors"
	"log/slog"
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
)

// inPeer is the order of one sender's messages, over whichever link they come.
type inPeer struct {
	id     int
	lane   engine.PeerQueue[*inbound]
	inHand atomic.Int32 // messages that the loop has received and not delivered

	fetching atomic.Bool // a value is being read from its memory
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
	ring   *inRing           // while something is to be read from the peer
	dst    [partCount][]byte // where parts that were not inline go
	left   [partCount][]byte // of dst, what a stream has left to be read
	dest   landing.Place     // of the values, if they are an answer

	onDevice *backend.Buffer // of values on the device without a destination of their own
	copied   backend.Event   // of the device's copy under way
	spans    []span          // that it reads
	begun    uint64          // when it was queued
	stranded bool            // it may still run though the message has been given up
}

// partVals is the part that has destinations of its own.
const partVals = 2

var errGone = errors.New("the sender has taken the message back")

// messageBytes is about what a received message itself takes.
const messageBytes = 1 << 10

// weight is the memory of this node that p takes while it waits. Values that go to a
// destination of their own, and those still with the sender, take none.
func (p *inbound) weight() int {
	n := messageBytes + cap(p.buf)
	for _, b := range p.blocks {
		n += cap(b)
	}
	if p.onDevice != nil {
		n += p.onDevice.Mem().Len()
	}
	return n
}

// decode reads the meta and finds the inline frames. An answer whose values need no
// destination gives up the one in q.
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
	m.Sender, m.Frames = p.from.id, p.rec.frames
	for i := range m.Frames {
		if h := &p.rec.parts[i+1]; h.form == partInline {
			m.SetFrame(i, backend.Bytes(p.buf[h.off:h.off+h.n:h.off+h.n]))
		}
	}
	// Other values take their destination, if they have one, later; not behind a head that is not inline, see allocate.
	if !m.Request && !m.Push && (m.Frames < partVals || p.rec.parts[partVals].form == partInline || p.rec.parts[0].form != partInline) {
		q.Answered(m.Sender, &m.Meta)
	}
	return nil
}

// write calls f, which writes to part i of p.
func (p *inbound) write(i int, f func() error) error {
	if i == partVals && p.dest.Used() {
		return p.dest.Write(f)
	}
	return f()
}

// inCommon is what the inbound links of a node share: where values go, and the messages and
// buffers that are used again.
type inCommon struct {
	self   *endpoint
	log    *slog.Logger
	stats  *stats
	copies *copies
	feed   *engine.Feed[*inbound]
	dests  *landing.Table
	blocks blocks
	chunks atomic.Uint64 // of streams, received

	dropTime time.Duration // dropTime, other than in tests

	mu       sync.Mutex
	free     []*inbound
	stranded []*inbound // the device may write to their memory at any time: it is kept until it does not
}

// maxFree bounds the messages that an idle van keeps.
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

// allocate finds memory for the parts that are not inline: first, by itself, for the meta,
// which the others need.
func (c *inCommon) allocate(p *inbound) (err error) {
	for i := range present(p.rec.frames) {
		h := &p.rec.parts[i]
		if h.form == partInline || p.dst[i] != nil {
			continue
		}
		if i == partVals && p.rec.parts[0].form == partInline {
			if dst, ok := c.dests.Find(&p.msg, h.n, &p.dest, false); ok {
				p.dst[i] = dst.Host()
				p.msg.Vals, p.msg.Placed = dst, true
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

// finish ends the writing of p's values. It returns an error when their destination was
// taken back meanwhile: nobody awaits them any more.
func (c *inCommon) finish(p *inbound) error {
	return c.dests.Finish(&p.dest)
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

// release takes back a received message.
func (c *inCommon) release(p *inbound) {
	if p.stranded { // so is its destination: revoking that goes on to wait for the copy
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
	p.leave()
	p.msg.Reset()
	p.from, p.in = nil, nil
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

// unstrand releases the messages that were given up whose copies have ended since.
func (c *inCommon) unstrand() {
	var over []*inbound
	c.mu.Lock()
	c.stranded = slices.DeleteFunc(c.stranded, func(p *inbound) bool {
		done, err := p.copied.Query()
		if done || err != nil { // a device that has failed writes nothing any more
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

// awaitStranded waits for such copies a last time. The memory of those that have not ended then
// is nobody's any more.
func (c *inCommon) awaitStranded(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	c.mu.Lock()
	all := slices.Clone(c.stranded)
	c.mu.Unlock()
	for _, p := range all {
		_ = p.copied.Sync(ctx)
	}
	c.unstrand()
}

// leave ends the use of the peer's ring.
func (p *inbound) leave() {
	if r := p.ring; r != nil {
		p.ring = nil
		r.acknowledge(p.rec.slot)
		r.unref()
	}
}
