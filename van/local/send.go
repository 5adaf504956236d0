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

// send writes or queues msg. exports describe its values on the device: one of the message or of each part, nil for a value on the
// host. exports is empty if all values are on the host. sent is false if the link has ended.
func (l *outLink) send(msg *van.Message, exports []*backend.Shared) (sent bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return false, nil
	}
	if err := l.collect(); err != nil {
		return true, l.fail(err)
	}
	if l.unsent() >= l.limit(msg) && !l.awaitRoom() || len(l.queue.list) >= queueLen {
		return true, l.refuse()
	}
	seq, err := l.announce(exports)
	if err != nil {
		return true, err
	}
	byReference := l.exported.announce(msg)
	if isOneRecord(msg) {
		var export *backend.Shared
		if len(exports) > 0 {
			export = exports[0]
		}
		err = l.put(&record{}, msg, export, seq, false)
	} else {
		err = l.putBatch(msg, exports, seq, byReference)
	}
	if err == nil {
		l.bell.ring()
	}
	return true, err
}

// announce announces the allocations of exports to the peer. It returns the first number that l.offers counts for
// the message, for its pins.
func (l *outLink) announce(exports []*backend.Shared) (seq uint64, err error) {
	seq = l.offers.seq + 1
	since := func() uint64 { return min(l.inUseSince(), seq) }
	for _, x := range exports {
		if x == nil || len(x.Segments) == 0 {
			continue
		}
		if err := l.offers.tell(x, since); err != nil {
			return 0, err
		}
	}
	return seq, nil
}

// isOneRecord reports whether msg is one record: it is no batch, or all its values are short and on the host.
func isOneRecord(msg *van.Message) bool {
	if len(msg.Parts) == 0 {
		return true
	}
	n := 0
	for i := range msg.Parts {
		v := &msg.Parts[i].Vals
		if n += v.Len(); n >= streamFrom || v.Len() > 0 && !v.OnHost() {
			return false
		}
	}
	return true
}

// putBatch writes or queues msg as a record for each value.
func (l *outLink) putBatch(msg *van.Message, exports []*backend.Shared, seq uint64, byReference bool) error {
	all := van.NewAllSent(msg.Done)
	v := &l.value
	v.Meta = msg.Meta // a view, which ends with this call
	v.Frames = 2
	defer func() { v.Meta, v.Vals, v.Done = van.Meta{}, backend.Mem{}, nil }()
	l.batches++
	if l.batches&math.MaxUint16 == 0 {
		l.batches++
	}
	n := uint64(0)
	for i := range msg.Parts {
		if v.Vals = msg.Parts[i].Vals; v.Vals.Len() == 0 {
			continue
		}
		r := &record{kind: kindMessage, batch: uint64(l.batches&math.MaxUint16)<<16 | n}
		if n > 0 {
			r.kind = kindValue
		}
		var export *backend.Shared
		if i < len(exports) {
			export = exports[i]
		}
		v.Done = all.Add()
		if err := l.put(r, v, export, seq, byReference && l.exported.has(v.Vals) && !isPulled(msg, v.Vals)); err != nil { // only the first record can fail: the others have no meta
			all.Cancel()
			return err
		}
		n++
	}
	all.Sent()
	return nil
}

// put writes or queues r, a record of msg. export describes the value if it is on the device. byReference tells that the
// receiver may use the value in this process's memory.
func (l *outLink) put(r *record, msg *van.Message, export *backend.Shared, seq uint64, byReference bool) error {
	large := uint32(partStream)
	if export != nil {
		r.segments = len(export.Segments)
	} else if msg.Vals.Len() >= streamFrom {
		large = l.exported.formOf(r, msg, byReference)
	}
	size := r.plan(msg, large)
	if n := r.parts[0].n; n > math.MaxInt32 {
		return fmt.Errorf("%w: %d bytes of a message's body and head, want at most %d", van.ErrInvalid, n, math.MaxInt32)
	}
	if export != nil && r.streams() {
		return fmt.Errorf("%w: beside values on the device the other parts must have less than %d bytes", backend.ErrNotExportable, streamFrom)
	}
	var meta []byte
	if r.parts[0].form != partInline {
		meta = make([]byte, r.parts[0].n)
		if err := msg.EncodeTo(meta); err != nil {
			return err
		}
	}
	if len(l.queue.list) > 0 || !l.room(size, r) {
		return l.enqueue(r, size, msg, meta, export, seq)
	}
	if err := r.put(l.seg.at(l.tail), size, msg, meta, export); err != nil {
		return err
	}
	if r.inline() { // the usual small message: no memory is pinned
		if msg.Done != nil {
			msg.Done.Sent()
		}
		l.advance(size)
		return nil
	}
	l.publish(r, size, pinOf(r, msg, meta, seq))
	if l.streaming() {
		l.drain() // asks the peer to ring when there is room: the loop, which continues the stream, may sleep
	}
	return nil
}

// enqueue queues r until there is room. The caller holds l.mu.
func (l *outLink) enqueue(r *record, size int, msg *van.Message, meta []byte, export *backend.Shared, seq uint64) error {
	q := &queued{rec: *r, bytes: make([]byte, size)}
	if err := r.put(q.bytes, size, msg, meta, export); err != nil {
		return err
	}
	q.pin = pinOf(r, msg, meta, seq)
	l.queue.put(q)
	l.busy.Store(true)
	l.drain()
	return nil
}

// limit returns the number of unsent bytes up to which msg is accepted. Short messages may exceed the budget a
// little: one value that uses it up must not block the request after it.
func (l *outLink) limit(msg *van.Message) int64 {
	if msg.PayloadLen() < streamFrom {
		return l.c.budget + l.c.budget/16
	}
	return l.c.budget
}

// awaitRoom waits while the budget is used up and the peer continues to consume messages. It reports whether there is
// room now. If the peer has consumed nothing since the last call, it does not wait. The caller holds
// l.mu.
func (l *outLink) awaitRoom() bool {
	if failpoint.On("send-budget") {
		return true
	}
	w := roomWait{last: l.progress()}
	if w.last == l.seen {
		return false
	}
	pause := l.c.engine.Spinner()
	w.begun = clock.Now()
	for w.since = w.begun; ; pause.Pause() {
		if l.collect() != nil {
			return true // the caller's next step reports the error
		}
		l.seg.wants().Store(0)
		l.drain()
		if l.unsent() < l.c.budget {
			return true
		}
		switch over, idle := w.over(clock.Now(), l.progress(), l.c.roomTimeout); {
		case idle:
			l.seen = w.last
			return false
		case over:
			return false
		}
	}
}

// roomWait decides when awaitRoom ends although the budget is still used up.
type roomWait struct {
	last         progress // the peer's latest progress
	begun, since uint64   // the times at which the wait began and the peer last made progress
}

// over reports whether the wait ends. t is the peer's progress at the time now. idle reports that the peer has
// consumed nothing for timeout.
func (w *roomWait) over(now uint64, t progress, timeout time.Duration) (over, idle bool) {
	if t != w.last {
		w.last, w.since = t, now
	}
	idle = now-w.since > uint64(timeout)
	return idle || now-w.begun > uint64(maxRoomWait), idle
}

// Limits of awaitRoom: the time since the peer has last consumed a message, and the total
// time.
const (
	roomTimeout = 10 * time.Millisecond
	maxRoomWait = 500 * time.Millisecond
)

// refuse returns the error for a message that exceeds the budget. The caller holds l.mu.
func (l *outLink) refuse() error {
	if n := l.c.stats.unsent.Add(1); n&(n-1) == 0 {
		l.c.log.Warn("a message was refused: its peer takes nothing", "peer", l.peer.Name(), "bytes unsent", l.unsent(),
			"STEPAF_SEND_BUDGET", l.c.budget, "messages queued", len(l.queue.list), "at most", queueLen, "so far", n)
	}
	return fmt.Errorf("%w: %d bytes are unsent, %d messages queued, STEPAF_SEND_BUDGET is %d bytes, at most %d messages",
		van.ErrQueueFull, l.unsent(), len(l.queue.list), l.c.budget, queueLen)
}

// service releases acknowledged memory and continues to send queued messages.
func (l *outLink) service() {
	if l.busy.Load() && l.mu.TryLock() { // otherwise a sender holds the lock and does the same
		l.serviceLocked()
		l.mu.Unlock()
	}
}

// serviceLocked is service. It reports whether the peer has consumed and acknowledged all messages. The caller holds
// l.mu.
func (l *outLink) serviceLocked() bool {
	if l.gone {
		return true
	}
	if err := l.collect(); err != nil {
		_ = l.fail(err)
		return true
	}
	if len(l.queue.list) > 0 || l.streaming() {
		l.seg.wants().Store(0) // drain sets it again and then polls
		l.drain()
	}
	idle := l.pins.idle() && len(l.queue.list) == 0 && !l.streaming()
	l.busy.Store(!idle)
	return idle && l.seg.head().Load() == l.tail
}

// pending reports whether service may have work.
func (l *outLink) pending() bool {
	if !l.busy.Load() {
		return false
	}
	if !l.mu.TryLock() {
		return true // a sender holds the lock: poll again
	}
	defer l.mu.Unlock()
	waits := len(l.queue.list) > 0 || l.streaming()
	return !l.gone && (l.seg.acked().Load() != l.pins.acked || waits && l.seg.wants().Load() == 0)
}

// inUseSince returns the number of the first pinned or queued message that may name an allocation. The caller holds
// l.mu.
func (l *outLink) inUseSince() uint64 {
	first := l.pins.since(l.offers.seq + 1)
	for _, q := range l.queue.list {
		if q.pin.seq > 0 {
			first = min(first, q.pin.seq)
		}
	}
	return first
}

// tidy withdraws unused allocations. If a sender holds the lock, tidy leaves that to a later call: a sender may wait
// for the peer, and the receiver must not wait.
func (l *outLink) tidy(now uint64) {
	if !l.mu.TryLock() {
		return
	}
	defer l.mu.Unlock()
	if !l.gone && len(l.offers.byID) > 0 {
		l.offers.tidy(now, l.inUseSince())
	}
}

// recall releases the memory of the requests q. The rest of a stream is sent from a copy, and queued
// messages are dropped.
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

// Linger waits until the peer has consumed all messages, at most until ctx ends.
func (l *outLink) Linger(ctx context.Context) {
	tick := time.Tick(time.Millisecond)
	for begun := clock.Now(); ; {
		l.mu.Lock()
		done := l.serviceLocked()
		if !done {
			l.bell.ring()
		}
		l.mu.Unlock()
		if done {
			return
		}
		if clock.Now()-begun < uint64(100*time.Microsecond) {
			continue
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return
		}
	}
}

// close ends the link and frees its memory. The peer may not read its pinned memory any more. close returns how many
// messages were not delivered.
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
