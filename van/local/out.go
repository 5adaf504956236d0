package local

import (
	"context"
	"errors"
	"fmt"
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
	queued int   // bytes in queue
	gone   bool  // nothing can be sent any more
	cause  error // why

	held atomic.Bool // the peer has not been rung for the last messages
}

// loan is what a message has lent until the receiver acknowledges it.
type loan struct {
	mems [partCount]backend.Mem
	done van.Completion
	busy bool
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

// Bounds of a link's queue. The values of queued messages are not in it.
const (
	queueLen   = 65536
	queueBytes = 256 << 20
)

func newOutLink(v *Van, id int, conn *net.UnixConn, seg *segment, bell *bell, canRead bool) *outLink {
	l := &outLink{v: v, conn: conn, canRead: canRead, seg: seg, bell: bell}
	l.id.Store(int32(id))
	for i := range uint32(slotCount) {
		l.free = append(l.free, slotCount-1-i)
	}
	return l
}

var errProtocol = errors.New("the peer does not keep to the protocol of the shared memory")

// send takes msg. It reports sent=false when the link has ended.
func (l *outLink) send(msg *van.Message) (sent bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return false, nil
	}
	if err := l.collect(); err != nil {
		return true, l.fail(err)
	}
	var r record
	size := r.plan(msg, l.canRead)
	var meta []byte
	if r.parts[0].form != partInline {
		meta = make([]byte, r.parts[0].n)
		if err := msg.EncodeTo(meta); err != nil {
			return true, err
		}
	}
	if len(l.queue) == 0 && l.room(size, &r) {
		if err := r.put(l.seg.at(l.tail), size, msg, meta); err != nil {
			return true, err
		}
		l.publish(&r, size, loanOf(&r, msg, meta))
	} else if err := l.enqueue(&r, size, msg, meta); err != nil {
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
func loanOf(r *record, msg *van.Message, meta []byte) loan {
	var l loan
	for i := range present(r.frames) {
		switch {
		case r.parts[i].form == partInline:
		case i == 0:
			l.mems[0] = backend.Bytes(meta)
		default:
			l.mems[i] = msg.Frame(i - 1)
			l.mems[i].Retain()
		}
	}
	l.done = msg.Done
	return l
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
	return !l.streaming() && (!r.lends() || len(l.free) > 0) && ringLen-int(l.tail-l.seg.head().Load()) >= size
}

func (l *outLink) streaming() bool { return l.stream.busy }

// publish makes the record at the tail, which has been written there, visible.
func (l *outLink) publish(r *record, size int, a loan) {
	b := l.seg.at(l.tail)
	switch {
	case r.lends():
		slot := l.free[len(l.free)-1]
		l.free = l.free[:len(l.free)-1]
		if l.gen++; l.gen == 0 {
			l.gen = 1
		}
		l.seg.gen(slot).Store(l.gen)
		r.setSlot(b, slot, l.gen)
		a.busy = true
		l.slots[slot] = a
		l.busy.Store(true)
		l.v.stats.pinned.Add(1)
	case r.streams():
		a.busy = true
		l.stream = stream{loan: a}
		l.busy.Store(true)
	default:
		a.end()
	}
	l.tail += uint64(size)
	l.seg.tail().Store(l.tail)
	if l.streaming() {
		l.pump()
	}
}

// enqueue keeps msg until there is room. l.mu is held.
func (l *outLink) enqueue(r *record, size int, msg *van.Message, meta []byte) error {
	if len(l.queue) >= queueLen || l.queued+size > queueBytes {
		return fmt.Errorf("%w: %d messages, %d bytes", van.ErrQueueFull, len(l.queue), l.queued)
	}
	q := &queued{rec: *r, bytes: make([]byte, size)}
	if err := r.put(q.bytes, size, msg, meta); err != nil {
		return err
	}
	q.loan = loanOf(r, msg, meta)
	if !r.lends() && !r.streams() {
		q.loan.end()
	}
	l.queue = append(l.queue, q)
	l.queued += size
	l.busy.Store(true)
	l.drain()
	return nil
}

// pump writes chunks of the stream while there is room. l.mu is held.
func (l *outLink) pump() {
	for s := &l.stream; s.busy; {
		for s.part < partCount && s.off == s.mems[s.part].Len() {
			s.part, s.off = s.part+1, 0
		}
		if s.part == partCount {
			s.loan.end()
			l.stream = stream{}
			return
		}
		n := min(s.mems[s.part].Len()-s.off, maxChunk)
		if ringLen-int(l.tail-l.seg.head().Load()) < chunkHead+align(n) {
			return
		}
		l.tail += uint64(putChunk(l.seg.at(l.tail), s.mems[s.part].Host()[s.off:s.off+n]))
		l.seg.tail().Store(l.tail)
		s.off += n
	}
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
			l.queued -= len(q.bytes)
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
		l.slots[slot].end()
		l.v.stats.pinned.Add(-1)
	}
	return nil
}

// service looks what the peer has taken and acknowledged, and goes on.
func (l *outLink) service() {
	if l.busy.Load() {
		l.mu.Lock()
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
	l.mu.Lock()
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
			l.slots[i].end()
			l.v.stats.pinned.Add(-1)
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
	l.queue = nil
	l.busy.Store(false)
	l.bell.ring()
	_ = l.conn.Close()
	l.seg.unmap()
	l.bell.unmap()
	return lost
}
