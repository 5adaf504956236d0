package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/landing"
	"github.com/stepaf/stepaf-go/van/links"
)

// inLink receives messages from one peer. The holder of the feed owns its fields, except those that inRing and
// Inbound guard, lost and fenced.
type inLink struct {
	inRing
	links.Inbound // Process is the name in the peer's token
	c             *inCommon
	from          *inPeer
	conn          *net.UnixConn
	pid           int         // of the peer's process
	dev           *peerDevice // its device; nil if it has none or this node cannot copy from it

	batch    inBatch
	stream   inStream
	fenced   atomic.Bool  // no record is consumed any more: another process is the peer
	placing  sync.RWMutex // read-locked while a value is written; write-locked while fenced is set
	lost     atomic.Bool  // the connection has ended: the ring gets no more records
	failure  linkFailure
	imported importedAllocations
}

// linkFailure is the first failure of a link.
type linkFailure struct {
	once  sync.Once
	cause atomic.Pointer[error]
}

// inBatch is the first record of the batch that is being received, at two stages. Records pass the queue of device copies in between.
type inBatch struct {
	open   *inbound // its next record is expected from the ring; nil: no record is
	joined *inbound // its next record is expected from the queue of device copies; nil: no record is
}

// inStream is the message whose long parts are being received in chunks.
type inStream struct {
	msg  *inbound // nil: none
	part int      // the part that the next chunk belongs to
	off  int      // the offset of the next chunk in that part
}

// newInLink makes a link of process pid. It has one reference to its ring.
func newInLink(c *inCommon, from *inPeer, conn *net.UnixConn, pid int, seg *segment, bell *bell) *inLink {
	l := &inLink{c: c, from: from, conn: conn, pid: pid}
	l.seg, l.bell, l.feed = seg, bell, c.feed
	l.From = from.id
	l.refs.Store(1)
	return l
}

// maxChunks is how many chunks of a stream are received before other links are served.
const maxChunks = 8

// next receives a message from the ring. It returns nil if there is none, or if it has received a part of
// a stream; the ring may then have more.
func (l *inLink) next() *inbound {
	for p := l.record(); p != nil; p = l.record() {
		if p = l.join(p); p != nil {
			return p
		}
	}
	return nil
}

// join adds p to its batch. It returns the message that is complete with p, or nil.
func (l *inLink) join(p *inbound) *inbound {
	h := l.batch.joined
	if p.head == nil && h != nil { // the sender has canceled the rest of that batch
		l.c.release(h)
		l.batch.joined = nil
	}
	switch {
	case p.rec.kind == kindValue && !p.follows(h): // its batch was canceled
		l.c.release(p)
		return nil
	case p.head == nil && p.count < 2:
		return p
	case p.head == nil:
		l.batch.joined = p
		return nil
	}
	if h.values = append(h.values, p); len(h.values)+1 < h.count {
		return nil
	}
	l.batch.joined = nil
	return h
}

// follows reports whether p is a further record of the batch that begins with h, which may be nil. The former batch of p may have been
// dropped, and its first record be used again.
func (p *inbound) follows(h *inbound) bool {
	return h != nil && p.head == h && p.rec.batch>>16 == h.rec.batch>>16
}

// drop releases a record that is not delivered. If it belongs to the open batch, the rest of that batch is dropped, too.
func (l *inLink) drop(p *inbound) {
	if h := l.batch.open; h == p || p.follows(h) {
		l.batch.open = nil
	}
	if h := l.batch.joined; p.follows(h) {
		l.batch.joined = nil
		l.c.release(h)
	}
	l.c.release(p)
}

// record receives a record with its parts. Like next, it returns nil if there is none, or after a part of a stream.
func (l *inLink) record() *inbound {
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
		var p *inbound
		switch {
		case err != nil || kind == kindPad:
		case kind == kindChunk:
			p, err = l.chunk(b[:size])
		case kind == kindRest:
			p, err = l.rest(b[:size])
		case kind == kindAllocation:
			err = l.recvAllocation(l.imported.copy(b[:size]))
		case kind == kindPullMemory:
			err = l.recvPullMemory(l.imported.copy(b[:size]))
		default:
			p, err = l.message(b[:size])
		}
		if err != nil {
			l.fail(err)
			return nil
		}
		l.consume(size, tail)
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

// arrived returns the first message of the queue of device copies if it is complete. Messages after a
// copy wait in the same queue.
func (l *inLink) arrived() *inbound {
	for l.dev.waiting() {
		p, err := l.dev.pop()
		if err != nil {
			l.fail(err)
		}
		if p == nil || !p.rec.has(partDevice) {
			return p
		}
		// The copy is valid only if the sender has not reused the memory meanwhile.
		gone := l.seg.gen(p.rec.slot).Load() != p.rec.gen
		p.ring = nil
		l.acknowledge(p.rec.slot)
		l.unref()
		if l.c.finish(p) == nil && !gone {
			return p
		}
		l.drop(p)
	}
	return nil
}

// beginCopy starts the copy of a value from the peer's device.
func (l *inLink) beginCopy(p *inbound) error {
	if l.dev == nil {
		return &van.FieldError{Field: "record.part.form", Value: partDevice, Want: "host memory: it was agreed that this process does not copy from the sender's device"}
	}
	return l.dev.begin(p)
}

// begin decodes the meta of a message, or finds the batch of a value. It reports whether the record is used: a value whose batch the
// sender has canceled is not.
func (l *inLink) begin(p *inbound) (used bool, err error) {
	if p.rec.kind != kindValue {
		l.batch.open = nil
		if p.rec.parts[0].form != partInline {
			return true, nil // the meta follows
		}
		if err := p.decode(l.c.dests); err != nil {
			return false, err
		}
		l.opened(p)
		return true, nil
	}
	h := l.batch.open
	if h == nil || p.rec.batch != h.rec.batch+uint64(h.received) {
		l.batch.open = nil
		return false, nil
	}
	p.head = h
	if err := h.assign(p, h.after); err != nil {
		return false, err
	}
	if h.received == h.count {
		l.batch.open = nil
	}
	p.frames(&p.msg)
	return true, nil
}

// opened makes p, whose meta is decoded, the batch of which further records are awaited, if it is one.
func (l *inLink) opened(p *inbound) {
	if p.count > 1 {
		l.batch.open = p
	}
}

// message handles the record b of a message. It returns nil if parts of the message follow.
func (l *inLink) message(b []byte) (*inbound, error) {
	if l.stream.msg != nil {
		return nil, &van.FieldError{Field: "record.kind", Value: kindMessage, Want: "the rest of a stream"}
	}
	p := l.c.get()
	p.from, p.in = l.from, l
	p.buf = append(p.buf[:0], b...)
	err, used := p.rec.parse(p.buf), true
	if err == nil && p.rec.kind == kindRest { // the sender has changed the record since next read it
		err = &van.FieldError{Field: "record.kind", Value: p.buf[4], Want: "the kind that the record had at first"}
	}
	if err == nil {
		used, err = l.begin(p)
	}
	switch {
	case err != nil:
	case !used:
		if p.rec.pins() {
			l.acknowledge(p.rec.slot)
		}
		if p.rec.streams() { // its chunks must be read
			break
		}
		p.rec = record{kind: kindValue}
		return p, nil // join ends the batch
	case p.rec.pins():
		if l.source == nil && p.rec.hasAddress() {
			err = &van.FieldError{Field: "record.part.form", Value: p.rec.parts[partVals].form, Want: "inline or streamed: it was agreed that this process does not read the sender's memory"}
			break
		}
		if p.rec.streams() {
			err = &van.FieldError{Field: "record.part.form", Value: partStream, Want: "no stream beside pinned parts"}
			break
		}
		p.ring = l.hold()
		if !p.rec.has(partDevice) {
			l.imported.findMapped(p)
			return p, nil // fetch reads the value later, when no other message waits for it
		}
		if err = l.beginCopy(p); err == nil {
			return p, nil
		}
		if errors.Is(err, landing.ErrInvalidated) {
			l.c.stats.late.Add(1)
			l.drop(p)
			return nil, nil
		}
	}
	if err == nil && p.rec.streams() {
		if err = l.c.allocate(p); err == nil {
			l.stream.msg, l.stream.part, l.stream.off = p, -1, 0
			l.advance()
			if l.stream.msg == nil {
				return p, nil
			}
			return nil, nil
		}
	}
	if err != nil {
		l.drop(p)
		return nil, err
	}
	return p, nil
}

// advance goes to the next part of the stream that lacks bytes. Without such a part, it ends the stream.
func (l *inLink) advance() {
	for l.stream.part, l.stream.off = l.stream.part+1, 0; l.stream.part < partCount; l.stream.part++ {
		if len(l.stream.msg.dst[l.stream.part]) > 0 {
			return
		}
	}
	l.stream.msg = nil
}

// chunk handles the record b of a chunk. It returns the message that the chunk completes, or nil.
func (l *inLink) chunk(b []byte) (*inbound, error) {
	n := int(binary.LittleEndian.Uint32(b[8:]))
	p := l.stream.msg
	if p == nil || n > len(b)-chunkHead || n == 0 || n > len(p.dst[l.stream.part])-l.stream.off {
		return nil, &van.FieldError{Field: "chunk.length", Value: n, Want: "what is left of the stream's part"}
	}
	l.placing.RLock()
	if !l.fenced.Load() {
		_ = p.write(l.stream.part, func() error { // finish reports landing.ErrInvalidated
			copy(p.dst[l.stream.part][l.stream.off:], b[chunkHead:chunkHead+n])
			return nil
		})
	}
	l.placing.RUnlock()
	l.stream.off += n
	l.c.chunks.Add(1)
	if l.stream.off < len(p.dst[l.stream.part]) {
		return nil, nil
	}
	// The meta was streamed. Only now does the receiver know the other parts.
	if l.stream.part == 0 {
		if err := p.decode(l.c.dests); err != nil {
			return nil, err
		}
		l.opened(p)
	}
	l.advance()
	if l.stream.msg != nil {
		return nil, nil
	}
	if l.c.finish(p) != nil {
		l.drop(p)
		return nil, nil
	}
	return p, nil
}

// rest handles the record b of the rest of a stream. The receiver reads that rest from the sender's
// memory.
func (l *inLink) rest(b []byte) (*inbound, error) {
	p := l.stream.msg
	var r record
	if p == nil || l.source == nil {
		return nil, &van.FieldError{Field: "record.kind", Value: kindRest, Want: "no rest: there is no stream, or it was agreed that this process does not read the sender's memory"}
	}
	if p.rec.batch != 0 && l.stream.part == 0 {
		return nil, &van.FieldError{Field: "record.kind", Value: kindRest, Want: "chunks of the meta of a batch"}
	}
	if err := r.parse(append([]byte(nil), b...)); err != nil {
		return nil, err
	}
	for i := range partCount {
		want, have := 0, 0
		if i >= l.stream.part {
			want = len(p.dst[i])
		}
		if i == l.stream.part {
			want -= l.stream.off
		}
		if i < present(r.frames) {
			have = r.parts[i].n
		}
		if have != want || have > 0 && r.parts[i].form != partPinned {
			return nil, &van.FieldError{Field: fmt.Sprintf("rest.part[%d].length", i), Value: have, Want: fmt.Sprint(want)}
		}
		if have > 0 {
			p.rec.parts[i].form, p.rec.parts[i].addr = partPinned, r.parts[i].addr
			p.rec.forms |= 1 << partPinned
			p.left[i] = p.dst[i][len(p.dst[i])-have:]
		}
	}
	p.rec.slot, p.rec.gen = r.slot, r.gen
	l.stream.msg = nil
	p.ring = l.hold()
	return p, nil
}

// fetch reads the parts of p and of its further records that are pinned, and acknowledges them. Then p is complete.
func (l *inLink) fetch(p *inbound) error {
	if err := l.fetchRecord(p); err != nil {
		return err
	}
	for _, v := range p.values {
		if err := l.fetchRecord(v); err != nil {
			return err
		}
	}
	if p.count > 0 {
		p.setParts(l.c.dests)
	}
	return nil
}

// fetchRecord is fetch for one record.
func (l *inLink) fetchRecord(p *inbound) error {
	if p.ring == nil {
		return nil
	}
	p.ring = nil
	defer l.unref()
	l.from.fetching.Store(true)
	err := l.read(p)
	l.from.fetching.Store(false)
	if late := l.c.finish(p); err == nil {
		err = late
	}
	switch {
	case err == nil, errors.Is(err, errGone), errors.Is(err, landing.ErrInvalidated):
		l.acknowledge(p.rec.slot)
	case !l.lost.Load():
		l.fail(err)
	}
	return err
}

// read reads the pinned parts of p from the sender's memory.
func (l *inLink) read(p *inbound) error {
	if p.rec.parts[0].form == partPinned {
		if p.dst[0] == nil {
			block, err := l.c.blocks.get(p.rec.parts[0].n)
			if err != nil {
				return err
			}
			p.blocks[0], p.dst[0] = block, block
		}
		if err := l.readPart(p, 0); err != nil {
			return err
		}
	}
	if p.msg.Sender != p.from.id { // not decoded yet; the message of a stream is decoded
		if err := p.decode(l.c.dests); err != nil {
			return err
		}
	}
	if err := l.c.allocate(p); err != nil {
		return err
	}
	for i := 1; i < present(p.rec.frames); i++ {
		if err := l.readPart(p, i); err != nil {
			return err
		}
	}
	return nil
}

// readPart reads part i of p, if it has an address in the sender.
func (l *inLink) readPart(p *inbound, i int) error {
	h := &p.rec.parts[i]
	if !h.hasAddress() {
		return nil
	}
	dst := p.dst[i]
	if p.left[i] != nil {
		dst = p.left[i]
	}
	l.placing.RLock()
	err := errGone
	if !l.fenced.Load() {
		if err = nil; dst != nil { // nil: the value is used in place
			err = p.write(i, func() error { return l.copyPart(p, i, dst) })
		}
	}
	l.placing.RUnlock()
	// The bytes are valid only if the sender has not reused the memory meanwhile, and is
	// still the same process, and is still the peer.
	if l.fenced.Load() || !l.source.alive() || l.seg.gen(p.rec.slot).Load() != p.rec.gen {
		return errGone
	}
	if err != nil && !errors.Is(err, landing.ErrInvalidated) {
		return fmt.Errorf("%w (was it freed while it was being sent?)", err)
	}
	return err
}

// fail ends the link because the peer has sent invalid data.
func (l *inLink) fail(err error) {
	l.failure.once.Do(func() {
		l.failure.cause.Store(&err)
		l.c.stats.malformed.Add(1)
		_ = l.conn.Close()
	})
}

// waits reports whether no record may be consumed yet.
func (l *inLink) waits() bool { return l.Held.Load() || l.Marks.Missing() }

// failed reports whether the link has failed. Its ring is then not read any more.
func (l *inLink) failed() bool { return l.failure.cause.Load() != nil }

// end drops unfinished messages and releases the link's reference to its ring. The caller holds the feed, or
// no other goroutine knows the link.
func (l *inLink) end() {
	if l.stream.msg != nil {
		l.c.release(l.stream.msg)
		l.stream.msg = nil
	}
	if l.batch.joined != nil {
		l.c.release(l.batch.joined)
		l.batch.joined = nil
	}
	if l.dev != nil {
		l.dev.drop()
		l.dev.close()
	}
	l.imported.close()
	l.unref()
}
