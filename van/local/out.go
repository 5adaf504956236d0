package local

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// outLink carries messages to one peer.
type outLink struct {
	v    *Van
	id   atomic.Int32 // whom it serves
	conn *net.UnixConn

	// canRead says that the peer reads lent parts from this process.
	canRead bool

	// device says that its device copies values from this node's.
	device bool

	// segments says that it can also map what lies in several allocations.
	segments bool

	// busy says that something is lent, streamed or queued, so that it pays to look
	// for acknowledgements.
	busy atomic.Bool

	mu     sync.Mutex
	seg    *segment
	bell   *bell  // the peer's
	tail   uint64 // of the ring
	acked  uint32
	slots  [slotCount]loan
	free   []uint32 // slots
	gen    uint32
	stream stream
	queue  []*queued
	queued purposes // of which queue has lent parts
	unsent int64    // bytes that are lent, streamed or queued
	seen   taken    // when they were too many last
	offers map[uint64]*offer
	seq    uint64 // of messages that name allocations in offers
	gone   bool   // nothing can be sent any more
	cause  error  // why

	held atomic.Bool // the peer has not been rung for the last messages
}

// loan is what a message has lent until the receiver acknowledges it.
type loan struct {
	of     purpose
	mems   [partCount]backend.Mem
	bytes  int64
	done   van.Completion
	busy   bool
	device bool   // the peer's device copies it
	seq    uint64 // when it lies in allocations of outLink.offers
}

// stream is a message whose large parts are on their way in chunks.
type stream struct {
	loan
	part, off int
}

// queued is a message that waits for room.
type queued struct {
	rec   record
	bytes []byte
	loan  loan
}

// queueLen is how many messages wait for room at most.
const queueLen = 65536

func newOutLink(v *Van, id int, conn *net.UnixConn, seg *segment, bell *bell, canRead, device bool) *outLink {
	l := &outLink{v: v, conn: conn, canRead: canRead, device: device, seg: seg, bell: bell}
	l.id.Store(int32(id))
	l.seen.head = math.MaxUint64 // nothing yet
	for i := range uint32(slotCount) {
		l.free = append(l.free, slotCount-1-i)
	}
	return l
}

var errProtocol = errors.New("the peer does not keep to the protocol of the shared memory")

// send takes msg, whose values export names if they lie on the device. It reports
// sent=false when the link has ended.
func (l *outLink) send(msg *van.Message, export *backend.Shared) (sent bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return false, nil
	}
	if err := l.collect(); err != nil {
		return true, l.fail(err)
	}
	if l.unsent >= l.allowance(msg) && !l.relieved() {
		return true, l.tooMuch()
	}
	var r record
	if export != nil {
		r.segments = len(export.Segments)
	}
	size := r.plan(msg, partStream)
	if export != nil && r.streams() {
		return true, fmt.Errorf("%w: beside values on the device the other parts must have less than %d bytes", backend.ErrNotExportable, streamFrom)
	}
	if r.segments > 0 {
		if err := l.tell(export); err != nil {
			return true, err
		}
	}
	var meta []byte
	if r.parts[0].form != partInline {
		meta = make([]byte, r.parts[0].n)
		if err := msg.EncodeTo(meta); err != nil {
			return true, err
		}
	}
	if len(l.queue) == 0 && l.room(size, &r) {
		if err := r.put(l.seg.at(l.tail), size, msg, meta, export); err != nil {
			return true, err
		}
		if r.inline() { // the usual small message: nothing is lent
			if msg.Done != nil {
				msg.Done.Sent()
			}
			l.advance(size)
		} else {
			l.publish(&r, size, l.loanOf(&r, msg, meta))
		}
	} else if err := l.enqueue(&r, size, msg, meta, export); err != nil {
		return true, err
	}
	if msg.More {
		l.held.Store(true)
	} else {
		l.held.Store(false)
		l.bell.ring()
	}
	return true, nil
}

// loanOf lists what the message lends or streams, and keeps it.
func (l *outLink) loanOf(r *record, msg *van.Message, meta []byte) loan {
	var a loan
	if r.segments > 0 {
		a.seq = l.seq
	}
	for i := range present(r.frames) {
		switch {
		case r.parts[i].form == partInline:
		case i == 0:
			a.mems[0] = backend.Bytes(meta)
			a.bytes += int64(len(meta))
		default:
			a.mems[i] = msg.Frame(i - 1)
			a.mems[i].Retain()
			if a.mems[i].OnHost() { // the device's memory is read where it is, and has no budget
				a.bytes += int64(a.mems[i].Len())
			}
		}
	}
	a.of, a.done = sentFor(&msg.Meta), msg.Done
	return a
}

// end gives the memory back to who has lent it.
func (l *loan) end() {
	done := l.done
	for i := range l.mems {
		l.mems[i].Release()
	}
	*l = loan{}
	if done != nil {
		done.Sent()
	}
}

// room tells whether a record fits now. l.mu is held.
func (l *outLink) room(size int, r *record) bool {
	return !l.streaming() && (!r.lends() || len(l.free) > 0) && l.space() >= size
}

func (l *outLink) streaming() bool { return l.stream.busy }

// publish makes the record at the tail, which has been written there, visible.
func (l *outLink) publish(r *record, size int, a loan) {
	switch {
	case r.lends():
		if r.has(partDevice) {
			a.device = true
			l.v.lent.Add(1)
			l.v.lookFor(clock.Now(), r.parts[partVals].n)
		}
		l.lend(l.seg.at(l.tail), a)
	case r.streams():
		a.busy = true
		l.stream = stream{loan: a}
		l.busy.Store(true)
	default:
		a.end()
	}
	l.unsent += a.bytes
	l.advance(size)
	if l.streaming() {
		l.bell.ring() // so that the receiver is awake when the chunks come
		l.pump()
	}
}

// advance makes the record of size bytes at the tail visible. l.mu is held.
func (l *outLink) advance(size int) {
	l.tail += uint64(size)
	l.seg.tail().Store(l.tail)
}

// enqueue keeps msg until there is room. l.mu is held.
func (l *outLink) enqueue(r *record, size int, msg *van.Message, meta []byte, export *backend.Shared) error {
	if len(l.queue) >= queueLen {
		return l.tooMuch()
	}
	q := &queued{rec: *r, bytes: make([]byte, size)}
	if err := r.put(q.bytes, size, msg, meta, export); err != nil {
		return err
	}
	q.loan = l.loanOf(r, msg, meta)
	if !r.lends() && !r.streams() {
		q.loan.end()
	} else {
		l.queued.add(q.loan.of)
	}
	l.queue = append(l.queue, q)
	l.unsent += int64(size) + q.loan.bytes
	l.busy.Store(true)
	l.drain()
	return nil
}

// pump writes chunks of the stream, waiting for room as long as the peer keeps up.
// What then remains is lent, or, if the peer cannot read it, left to drain. l.mu is
// held.
func (l *outLink) pump() {
	s := &l.stream
	if !s.busy {
		return
	}
	pause := l.v.engine.Spinner()
	var since uint64 // since when there is no room
	budget := maxStall + time.Duration(s.left()/16)
	for streamed := 0; ; {
		for s.part < partCount && s.off == s.mems[s.part].Len() {
			s.part, s.off = s.part+1, 0
		}
		if s.part == partCount {
			l.unsent -= s.loan.bytes
			s.loan.end()
			l.stream = stream{}
			return
		}
		n := min(s.mems[s.part].Len()-s.off, maxChunk)
		if l.space() >= chunkHead+align(n)+recordHead && streamed < maxStream {
			l.advance(putChunk(l.seg.at(l.tail), s.mems[s.part].Host()[s.off:s.off+n]))
			l.bell.ring() // it may have given up waiting for more
			s.off += n
			streamed += n
			if since != 0 {
				budget -= time.Duration(clock.Now() - since)
				since = 0
			}
			continue
		}
		if !l.canRead {
			return
		}
		switch now := clock.Now(); {
		case since == 0:
			since = now
		case streamed >= maxStream || time.Duration(now-since) > min(stallFor(s.left()), budget):
			l.lendRest()
			return
		}
		pause.Pause()
	}
}

// left is how many bytes of the stream have not been written.
func (s *stream) left() (n int) {
	for i := s.part; i < partCount; i++ {
		n += s.mems[i].Len()
	}
	return n - s.off
}

// stallFor is how long the sender of a stream with n bytes left waits for a receiver
// that takes nothing. One that is at it takes a chunk in some microseconds, one that
// sleeps wants to be woken, and reading n bytes from this process takes longer than
// streaming by about n/32 nanoseconds.
func stallFor(n int) time.Duration { return min(max(minStall, time.Duration(n/32)), maxStall) }

const (
	minStall = 25 * time.Microsecond
	maxStall = 200 * time.Microsecond

	// maxStream is how much is streamed at once: the sender is occupied with it, and
	// other receivers wait.
	maxStream = 32 << 20
)

// space is how many bytes are free in the ring. l.mu is held.
func (l *outLink) space() int { return ringLen - int(l.tail-l.seg.head().Load()) }

// lendRest lends what is left of the stream, if there is a slot and room for the
// record, which pump leaves. l.mu is held.
func (l *outLink) lendRest() {
	s := &l.stream
	if len(l.free) == 0 || l.space() < recordHead {
		return
	}
	b := l.seg.at(l.tail)
	clear(b[:recordHead])
	le := binary.LittleEndian
	le.PutUint32(b, recordHead)
	b[4], b[5] = kindRest, van.MaxFrames
	for i := range partCount {
		h := b[16+partHead*i:]
		le.PutUint32(h[12:], partInline)
		if off := s.off; i >= s.part && s.mems[i].Len() > 0 {
			if i > s.part {
				off = 0
			}
			le.PutUint64(h, s.mems[i].Addr()+uint64(off))
			le.PutUint32(h[8:], uint32(s.mems[i].Len()-off))
			le.PutUint32(h[12:], partLent)
		}
	}
	l.lend(b, s.loan)
	l.stream = stream{}
	l.advance(recordHead)
}

// lend gives the record at b a slot for its lent parts. l.mu is held.
func (l *outLink) lend(b []byte, a loan) {
	slot := l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	if l.gen++; l.gen == 0 {
		l.gen = 1
	}
	l.seg.gen(slot).Store(l.gen)
	setSlot(b, slot, l.gen)
	a.busy = true
	l.slots[slot] = a
	l.busy.Store(true)
	l.v.stats.pinned.Add(1)
}

// drain writes what is queued while there is room, and says so to the peer if it
// is not all. l.mu is held.
func (l *outLink) drain() {
	for {
		before := l.tail
		l.pump()
		for len(l.queue) > 0 {
			q := l.queue[0]
			if !l.room(len(q.bytes), &q.rec) {
				break
			}
			copy(l.seg.at(l.tail), q.bytes)
			l.queue[0] = nil
			l.queue = l.queue[1:]
			l.unsent -= int64(len(q.bytes)) + q.loan.bytes
			l.queued.remove(q.loan.of)
			l.publish(&q.rec, len(q.bytes), q.loan)
		}
		if l.tail != before {
			l.bell.ring()
		}
		if len(l.queue) == 0 && !l.streaming() {
			l.queue = nil
			return
		}
		if w := l.seg.wants(); w.Load() != 0 {
			return // the peer has not taken anything since the last look
		}
		l.seg.wants().Store(1) // and look again: it may have done so before it could see this
	}
}

// collect takes back what the peer has acknowledged. l.mu is held.
func (l *outLink) collect() error {
	if l.tail-l.seg.head().Load() > ringLen {
		return fmt.Errorf("%w: head %d, tail %d", errProtocol, l.seg.head().Load(), l.tail)
	}
	acked := l.seg.acked().Load()
	if acked-l.acked > slotCount {
		return fmt.Errorf("%w: %d acknowledgements, %d have been seen", errProtocol, acked, l.acked)
	}
	for ; l.acked != acked; l.acked++ {
		slot := l.seg.ack(l.acked).Load()
		if slot >= slotCount || !l.slots[slot].busy {
			return fmt.Errorf("%w: slot %d acknowledged, which is not lent", errProtocol, slot)
		}
		l.free = append(l.free, slot)
		l.giveBack(slot)
	}
	return nil
}

// giveBack ends the loan in a slot. l.mu is held.
func (l *outLink) giveBack(slot uint32) {
	if l.slots[slot].device {
		l.v.lent.Add(-1)
	}
	l.unsent -= l.slots[slot].bytes
	l.slots[slot].end()
	l.v.stats.pinned.Add(-1)
}

// service looks what the peer has taken and acknowledged, and goes on.
func (l *outLink) service() {
	if l.busy.Load() && l.mu.TryLock() { // else somebody sends, who does the same
		l.serviceLocked()
		l.mu.Unlock()
	}
}

// serviceLocked tells whether nothing is left to be taken or acknowledged.
func (l *outLink) serviceLocked() bool {
	if l.gone {
		return true
	}
	if err := l.collect(); err != nil {
		_ = l.fail(err)
		return true
	}
	if len(l.queue) > 0 || l.streaming() {
		l.seg.wants().Store(0) // this is the look
		l.drain()
	}
	idle := len(l.free) == slotCount && len(l.queue) == 0 && !l.streaming()
	l.busy.Store(!idle)
	return idle && l.seg.head().Load() == l.tail
}

// pending tells whether service would find something.
func (l *outLink) pending() bool {
	if !l.busy.Load() {
		return false
	}
	if !l.mu.TryLock() {
		return true // somebody sends: look again
	}
	defer l.mu.Unlock()
	waits := len(l.queue) > 0 || l.streaming()
	return !l.gone && (l.seg.acked().Load() != l.acked || waits && l.seg.wants().Load() == 0)
}

// flush rings for what was sent with More.
func (l *outLink) flush() {
	if l.held.Load() && l.held.Swap(false) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if !l.gone {
			l.bell.ring()
		}
	}
}

// fail ends the link because of err; what has to be done then is done where its
// connection is watched. l.mu is held.
func (l *outLink) fail(err error) error {
	if l.cause == nil {
		l.cause = err
	}
	_ = l.conn.Close()
	return fmt.Errorf("%w: %w", van.ErrPeerLost, err)
}

// why says what has ended the link.
func (l *outLink) why() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return l.cause
	}
	return errLinkBroke
}

// linger waits until the peer has taken everything, at most until ctx ends. It
// tells whether it has.
func (l *outLink) linger(ctx context.Context) bool {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for begun := clock.Now(); ; {
		l.mu.Lock()
		done := l.serviceLocked()
		if !done {
			l.bell.ring()
		}
		l.mu.Unlock()
		if done {
			return true
		}
		if clock.Now()-begun < uint64(100*time.Microsecond) {
			continue
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
}

// close ends the link: nobody may read what it has lent any more, and its memory
// goes. It returns how many messages it had not passed on.
func (l *outLink) close(inOrder bool) (lost int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return 0
	}
	l.gone = true
	if inOrder {
		l.seg.bye().Store(1)
	}
	for i := range l.slots {
		if l.slots[i].busy {
			lost++
			l.seg.gen(uint32(i)).Store(0) // first: the reader looks at it after it has read
			l.giveBack(uint32(i))
		}
	}
	if l.streaming() {
		lost++
		l.stream.end()
	}
	for _, q := range l.queue {
		lost++
		if q.rec.lends() || q.rec.streams() {
			q.loan.end()
		}
	}
	l.queue, l.queued = nil, nil
	l.busy.Store(false)
	l.bell.ring()
	_ = l.conn.Close()
	l.seg.unmap()
	l.bell.unmap()
	return lost
}
