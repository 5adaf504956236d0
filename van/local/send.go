package local

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

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
	if l.unsent() >= l.limit(msg) && !msg.Continues && !l.awaitRoom() {
		return true, l.refuse()
	}
	var r record
	if export != nil {
		r.segments = len(export.Segments)
	}
	size := r.plan(msg, partStream)
	if n := r.parts[0].n; n > math.MaxInt32 {
		return true, fmt.Errorf("%w: %d bytes of a message's body and head, want at most %d", van.ErrInvalid, n, math.MaxInt32)
	}
	if export != nil && r.streams() {
		return true, fmt.Errorf("%w: beside values on the device the other parts must have less than %d bytes", backend.ErrNotExportable, streamFrom)
	}
	if r.segments > 0 {
		if err := l.offers.tell(export, l.inUseSince); err != nil {
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
	if len(l.queue.list) == 0 && l.room(size, &r) {
		if err := r.put(l.seg.at(l.tail), size, msg, meta, export); err != nil {
			return true, err
		}
		if r.inline() { // the usual small message: nothing is pinned
			if msg.Done != nil {
				msg.Done.Sent()
			}
			l.advance(size)
		} else {
			l.publish(&r, size, pinOf(&r, msg, meta, l.offers.seq))
			if l.streaming() {
				l.drain() // the peer is to say when there is room: the loop, which goes on then, may sleep
			}
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

// enqueue keeps msg until there is room. l.mu is held.
func (l *outLink) enqueue(r *record, size int, msg *van.Message, meta []byte, export *backend.Shared) error {
	if len(l.queue.list) >= queueLen && !msg.Continues {
		return l.refuse()
	}
	q := &queued{rec: *r, bytes: make([]byte, size)}
	if err := r.put(q.bytes, size, msg, meta, export); err != nil {
		return err
	}
	q.pin = pinOf(r, msg, meta, l.offers.seq)
	l.queue.put(q)
	l.busy.Store(true)
	l.drain()
	return nil
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

// limit is how much may be unsent for msg to be taken. Short messages may be a little
// beyond the budget: one value that uses it up is not to keep the request behind it.
func (l *outLink) limit(msg *van.Message) int64 {
	if msg.PayloadLen() < streamFrom {
		return l.c.budget + l.c.budget/16
	}
	return l.c.budget
}

// awaitRoom waits while too much is unsent and the peer goes on taking it, and tells
// whether there is room now. A peer that has taken nothing since the last time is not
// waited for. l.mu is held.
func (l *outLink) awaitRoom() bool {
	if failpoint.On("send-budget") {
		return true
	}
	last := l.progress()
	if last == l.seen {
		return false
	}
	pause := l.c.engine.Spinner()
	begun := clock.Now()
	for since := begun; ; pause.Pause() {
		if l.collect() != nil {
			return true // as the next call says
		}
		l.seg.wants().Store(0)
		l.drain()
		if l.unsent() < l.c.budget {
			return true
		}
		now := clock.Now()
		switch t := l.progress(); {
		case t != last:
			last, since = t, now
		case now-since > uint64(l.c.roomTimeout):
			l.seen = t
			return false
		}
		if now-begun > uint64(maxRoomWait) {
			return false
		}
	}
}

// Bounds of waiting for a peer that owes room: since it has last taken something, and in
// all.
const (
	roomTimeout = 10 * time.Millisecond
	maxRoomWait = 500 * time.Millisecond
)

// refuse says that nothing more is taken for the peer for now. l.mu is held.
func (l *outLink) refuse() error {
	if n := l.c.stats.unsent.Add(1); n&(n-1) == 0 {
		l.c.log.Warn("a message was refused: its peer takes nothing", "peer", van.NodeName(int(l.id.Load())), "bytes unsent", l.unsent(),
			"STEPAF_SEND_BUDGET", l.c.budget, "messages queued", len(l.queue.list), "at most", queueLen, "so far", n)
	}
	return fmt.Errorf("%w: %d bytes are unsent, %d messages queued, STEPAF_SEND_BUDGET is %d bytes, at most %d messages",
		van.ErrQueueFull, l.unsent(), len(l.queue.list), l.c.budget, queueLen)
}

// service polls for what the peer has taken and acknowledged, and goes on.
func (l *outLink) service() {
	if l.busy.Load() && l.mu.TryLock() { // else a sender has it, and does the same
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
	if len(l.queue.list) > 0 || l.streaming() {
		l.seg.wants().Store(0) // this is the poll that drain means
		l.drain()
	}
	idle := l.pins.idle() && len(l.queue.list) == 0 && !l.streaming()
	l.busy.Store(!idle)
	return idle && l.seg.head().Load() == l.tail
}

// pending tells whether service would find something.
func (l *outLink) pending() bool {
	if !l.busy.Load() {
		return false
	}
	if !l.mu.TryLock() {
		return true // a sender has it: poll again
	}
	defer l.mu.Unlock()
	waits := len(l.queue.list) > 0 || l.streaming()
	return !l.gone && (l.seg.acked().Load() != l.pins.acked || waits && l.seg.wants().Load() == 0)
}

// inUseSince is the number of the first message that is pinned, and may name an allocation.
// l.mu is held.
func (l *outLink) inUseSince() uint64 {
	first := l.pins.since(l.offers.seq + 1)
	for _, q := range l.queue.list {
		if q.pin.seq > 0 {
			first = min(first, q.pin.seq)
		}
	}
	return first
}

// tidy withdraws offers that are not used. While somebody sends it does so another time:
// that may wait for the peer, and the receiver must not.
func (l *outLink) tidy(now uint64) {
	if !l.mu.TryLock() {
		return
	}
	defer l.mu.Unlock()
	if !l.gone && len(l.offers.byID) > 0 {
		l.offers.tidy(now, l.inUseSince())
	}
}

// recall gives back what is pinned for the requests q: of a stream the rest is sent from a
// copy; what is queued is dropped.
func (l *outLink) recall(q *van.Requests) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return
	}
	l.pins.recall(q)
	if s := &l.stream; s.busy && s.of.in(q) {
		for i := s.part; i < partCount; i++ {
			m := s.mems[i]
			if m.Len() > 0 {
				s.mems[i] = backend.Bytes(bytes.Clone(m.Host()))
			}
			m.Release()
		}
		s.of = request{}
		if done := s.done; done != nil {
			s.done = nil
			done.Sent()
		}
	}
	l.queue.recall(q)
}

// linger waits until the peer has taken everything, at most until ctx ends. It
// tells whether it has.
func (l *outLink) linger(ctx context.Context) bool {
	tick := time.Tick(time.Millisecond)
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
		case <-tick:
		case <-ctx.Done():
			return false
		}
	}
}

// close ends the link: nobody may read what it has pinned any more, and its memory
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
	lost = l.pins.close()
	if l.streaming() {
		lost++
		l.stream.end()
	}
	lost += l.queue.close()
	l.busy.Store(false)
	l.bell.ring()
	_ = l.conn.Close()
	l.seg.unmap()
	l.file.close()
	l.bell.unmap()
	return lost
}
