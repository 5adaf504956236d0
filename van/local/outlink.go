package local

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// outCommon is the state that all outbound links of a node share.
type outCommon struct {
	engine *engine.Engine
	log    *slog.Logger
	stats  *stats
	copies *copies
	budget int64 // limit of unsent bytes for one peer
	memory *ringMemory

	roomTimeout time.Duration // the constant, except in tests
}

// outLink carries messages to one peer.
type outLink struct {
	c    *outCommon
	peer *outPeer
	conn *net.UnixConn

	// canRead says that the peer reads pinned parts from this process.
	canRead bool

	// device says that the peer's device copies values from this node's device.
	device bool

	// segments says that the peer can also map values in several allocations.
	segments bool

	// busy says that messages are pinned, streamed or queued, so that the loop polls
	// for acknowledgements.
	busy atomic.Bool

	mu sync.Mutex
	outRing
	pins     pins
	stream   stream
	queue    sendQueue
	seen     progress // of the peer when it last failed to make room in time
	offers   offers
	exported exportedAllocations
	gone     bool  // the link has ended
	cause    error // of its end

	value   van.Message // a value of a batch, while putBatch writes its record
	batches uint32      // number of batches so far

	number [8]byte // of the link, in its marks
}

// stream is a message whose large parts are being sent in chunks.
type stream struct {
	pin
	part, off int
	batch     bool // it belongs to a batch of several records
}

func newOutLink(c *outCommon, peer *outPeer, conn *net.UnixConn, seg *segment, file *ringFile, bell *bell, canRead, device bool) *outLink {
	l := &outLink{c: c, peer: peer, conn: conn, canRead: canRead, device: device, outRing: outRing{seg: seg, file: file, bell: bell}, offers: offers{conn: conn}}
	l.exported.l = l
	l.seen.head = math.MaxUint64 // nothing yet
	l.pins.init(seg, c)
	return l
}

// unsent returns how many bytes are pinned, streamed or queued. The caller holds l.mu.
func (l *outLink) unsent() int64 { return l.pins.bytes + l.stream.bytes + l.queue.bytes }

// progress is the position of the receiver: consumed and acknowledged records.
type progress struct {
	head  uint64
	acked uint32
}

func (l *outLink) progress() progress { return progress{l.seg.head().Load(), l.seg.acked().Load()} }

// room reports whether a record can be written now. The caller holds l.mu.
func (l *outLink) room(size int, r *record) bool {
	return !l.streaming() && (!r.pins() || len(l.pins.free) > 0) && l.fits(size, l.peer.ID())
}

func (l *outLink) streaming() bool { return l.stream.busy }

// publish makes the record that was written at the tail visible to the receiver.
func (l *outLink) publish(r *record, size int, a pin) {
	switch {
	case r.pins():
		if r.has(partDevice) {
			a.device = true
			l.c.copies.exported.Add(1)
			l.c.copies.expect(clock.Now(), r.parts[partVals].n)
		}
		l.pin(l.seg.at(l.tail), a)
	case r.streams():
		a.busy = true
		l.stream = stream{pin: a, batch: r.batch != 0}
		l.busy.Store(true)
	default:
		a.end()
	}
	l.advance(size)
	if l.streaming() {
		l.bell.ring() // so that the receiver is awake when the chunks arrive
		l.pump()
	}
}

// pin assigns the record at b a slot for its pinned parts. The caller holds l.mu.
func (l *outLink) pin(b []byte, a pin) {
	l.pins.add(b, a)
	l.busy.Store(true)
}

// pump writes chunks of the stream. It waits for room while the peer keeps up. Then it pins the rest of the
// stream, or, if the peer cannot read it, leaves the rest to drain. The caller holds l.mu.
func (l *outLink) pump() {
	s := &l.stream
	if !s.busy {
		return
	}
	pause := l.c.engine.Spinner()
	var since uint64 // the time since which the ring is full
	budget := maxStall + time.Duration(s.left()/16)
	for streamed := 0; ; {
		for s.part < partCount && s.off == s.mems[s.part].Len() {
			s.part, s.off = s.part+1, 0
		}
		if s.part == partCount {
			s.end()
			l.stream = stream{}
			return
		}
		n := min(s.mems[s.part].Len()-s.off, maxChunk)
		if streamed < maxStream && l.fits(chunkHead+align(n)+recordHead, l.peer.ID()) {
			l.advance(putChunk(l.seg.at(l.tail), s.mems[s.part].Host()[s.off:s.off+n]))
			l.bell.ring() // the receiver may have stopped polling
			s.off += n
			streamed += n
			if since != 0 {
				budget -= time.Duration(clock.Now() - since)
				since = 0
			}
			continue
		}
		if !l.canRead || s.batch && s.part == 0 { // the receiver needs the directory when the next record arrives
			return
		}
		switch now := clock.Now(); {
		case since == 0:
			since = now
		case streamed >= maxStream || time.Duration(now-since) > min(stallFor(s.left()), budget):
			l.pinRest()
			return
		}
		pause.Pause()
	}
}

// left returns how many bytes of the stream have not been written.
func (s *stream) left() (n int) {
	for i := s.part; i < partCount; i++ {
		n += s.mems[i].Len()
	}
	return n - s.off
}

// stallFor returns how long the sender of a stream with n bytes left waits for a receiver
// that consumes nothing. An active receiver consumes a chunk in some microseconds; a sleeping receiver must
// wake up first. The alternative, reading n bytes from this process, takes about n/32 nanoseconds longer than
// streaming.
func stallFor(n int) time.Duration { return min(max(minStall, time.Duration(n/32)), maxStall) }

const (
	minStall = 25 * time.Microsecond
	maxStall = 200 * time.Microsecond

	// maxStream limits the bytes that are streamed in one call: the sender is busy meanwhile, and
	// other receivers wait.
	maxStream = 32 << 20
)

// pinRest pins the rest of the stream if a slot is free and the record fits; pump leaves room for
// it. A batch leaves slots free for its values by reference, and for one value on the device. The caller holds l.mu.
func (l *outLink) pinRest() {
	s := &l.stream
	reserved := 0
	if s.batch {
		reserved = maxReferences + 1
	}
	if len(l.pins.free) <= reserved || !l.fits(recordHead, l.peer.ID()) {
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
			le.PutUint32(h[12:], partPinned)
		}
	}
	l.pin(b, s.pin)
	l.stream = stream{}
	l.advance(recordHead)
}

// drain writes queued messages while there is room. If some are left, it asks the peer to ring when there is
// room. The caller holds l.mu.
func (l *outLink) drain() {
	for {
		before := l.tail
		l.pump()
		for len(l.queue.list) > 0 {
			q := l.queue.list[0]
			if !l.room(len(q.bytes), &q.rec) {
				break
			}
			copy(l.seg.at(l.tail), q.bytes)
			l.queue.take()
			l.publish(&q.rec, len(q.bytes), q.pin)
		}
		if l.tail != before {
			l.bell.ring()
		}
		if len(l.queue.list) == 0 && !l.streaming() {
			l.queue.list = nil
			return
		}
		if w := l.seg.wants(); w.Load() != 0 {
			return // the peer has not consumed anything since the last poll
		}
		l.seg.wants().Store(1) // and poll again: the peer may have consumed a record before it could see the flag
	}
}

// collect releases the pins that the peer has acknowledged. The caller holds l.mu.
func (l *outLink) collect() error {
	if l.tail-l.seg.head().Load() > ringLen {
		return fmt.Errorf("%w: head %d, tail %d", errProtocol, l.seg.head().Load(), l.tail)
	}
	return l.pins.collect()
}

// fail ends the link because of err. The goroutine that watches the connection does the rest of the
// work. The caller holds l.mu.
func (l *outLink) fail(err error) error {
	l.cause = cmp.Or(l.cause, err)
	_ = l.conn.Close()
	return fmt.Errorf("%w: %w", van.ErrPeerLost, err)
}

// why returns the cause of the link's end.
func (l *outLink) why() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return cmp.Or(l.cause, errLinkBroke)
}
