package rdma

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// conn is what a serial number names: an outgoing connection with its peer, or an
// incoming one.
type connection struct {
	link *link
	peer *peer
	in   *inbound
}

// completed takes one completion. d.mu is held.
func (d *device) completed(c *verbs.Completion) {
	v := d.v
	serial := uint32(c.Cookie >> 8)
	if c.Type == verbs.SendDone {
		serial = uint32(c.ID >> 32)
	}
	x := (*v.conns.Load())[serial]
	if x == nil {
		return // of a connection that has ended
	}
	switch {
	case c.Type == verbs.SendDone && x.in != nil:
		x.in.sendCompleted(c)
	case c.Type == verbs.SendDone:
		x.peer.sendCompleted(x.link, c)
	case c.Type == verbs.RecvFailed && x.in != nil:
		x.in.receiveFailed(c)
	case c.Type == verbs.RecvFailed:
		x.link.fail(statusError(c.Status, "receive on queue pair", int(c.Cookie&0xff)))
	case x.in == nil && c.Type == verbs.RecvSend:
		x.peer.receiveSend(d, x.link, c)
	case x.in == nil:
		v.malformedFrom(x.peer.name(), &van.FieldError{Field: "notification", Value: c.Imm, Want: "none on a connection of this node"})
	case c.Type == verbs.RecvSend && c.Imm == immStart:
		x.in.slotRequested(recvData(c))
	case c.Type == verbs.RecvSend:
		if !x.in.dialect.control(c, &d.trailer) {
			v.malformed(x.in, &van.FieldError{Field: "SEND immediate", Value: c.Imm, Want: "0, 5, or 3 once"})
		}
	default:
		d.notification(x.in, c)
	}
}

func statusError(s verbs.Status, what string, q int) error {
	return fmt.Errorf("%w: %s %d: %s", van.ErrPeerLost, what, q, s)
}

// sendCompleted takes the completion of what an answer to a slot request, or credits, were posted
// with.
func (in *inbound) sendCompleted(c *verbs.Completion) {
	q, id := conn.RecordOf(c.ID)
	if c.Status != verbs.StatusOK {
		in.fail(statusError(c.Status, "answer to a rendezvous on queue pair", q))
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.sends == nil || in.closed {
		return
	}
	if c.Status != verbs.StatusOK {
		in.sends.Broken = true
		return // its memory may still be in use; see abandon
	}
	in.sends.Complete(id)
	in.sendQueued()
}

// receiveFailed counts a receive request that has ended with its queue pair.
func (in *inbound) receiveFailed(c *verbs.Completion) {
	in.fail(statusError(c.Status, "receive on queue pair", int(c.Cookie&0xff)))
	in.mu.Lock()
	qps := len(in.qps)
	in.mu.Unlock()
	_, rx := in.v.cfg.RDMADepths()
	if int(in.flushed.Add(1)) == qps*max(rx/in.v.cfg.QPNum, 1) {
		close(in.drained)
	}
}

// sendCompleted takes the completion of a message's last part.
func (p *peer) sendCompleted(l *link, c *verbs.Completion) {
	q, id := conn.RecordOf(c.ID)
	if c.Status != verbs.StatusOK {
		why := van.ErrPeerLost
		if c.Status == verbs.StatusRetryExceeded {
			why = errUnacknowledged
		}
		l.fail(fmt.Errorf("%w: queue pair %d (number %d): %s", why, q, l.QPs[q].Num(), c.Status))
	}
	p.mu.Lock()
	if c.Status != verbs.StatusOK {
		if q == 0 && peerRefused(c.Status) {
			l.restoreCredits()
		} else if r := l.Record(id); r != nil {
			l.markUncertain(&r.Note)
		}
		l.Broken = true // what is posted now would only be flushed
		l.MarkFailed(id)
		p.mu.Unlock()
		return // another queue pair may still read the memory; see abandon
	}
	f, last := l.Complete(id)
	if last && f.Note.control != nil {
		p.recycle(f.Note.control)
		f.Note.control = nil
	}
	if last && p.link == l && p.waiting() {
		p.returnSlots()
		p.pump()
		p.flush(false)
	}
	p.mu.Unlock()
	if last {
		endSent(&f)
	}
}

// errUnacknowledged: nobody has acknowledged what was written: the peer has gone, or its
// host is too busy.
var errUnacknowledged = fmt.Errorf("%w", van.ErrPeerLost)

// peerRefused tells whether the peer has said no: it has not received this work request, nor
// those behind it. Those before it have completed.
func peerRefused(s verbs.Status) bool {
	return s == verbs.StatusRemoteInvalid || s == verbs.StatusRemoteAccess || s == verbs.StatusRemoteOp
}

// receiveSend takes what the peer says on this node's connection to it: answers to
// slot requests, and credits.
func (p *peer) receiveSend(d *device, l *link, c *verbs.Completion) {
	b := recvData(c)
	switch c.Imm {
	case immReply:
		var r reply
		if err := r.get(b); err != nil {
			p.v.malformedFrom(p.name(), err)
			return
		}
		if !p.slotReply(l, &r) {
			p.v.malformedFrom(p.name(), &van.FieldError{Field: "rendezvous reply: origin", Value: r.origin, Want: "that of an open slot request"})
		}
	case immCredits:
		t := &d.trailer
		if err := t.get(b); err != nil {
			p.v.malformedFrom(p.name(), err)
			return
		}
		if !p.takeCredits(t) {
			p.v.malformedFrom(p.name(), &van.FieldError{Field: "credits", Value: t.credits[:t.n], Want: "slots that are in use"})
		}
	case immReclaim:
		var r reclaim
		if err := r.get(b); err != nil {
			p.v.malformedFrom(p.name(), err)
			return
		}
		p.reclaimRequested(l, &r)
	default:
		p.v.malformedFrom(p.name(), &van.FieldError{Field: "SEND immediate", Value: c.Imm, Want: "1, 2 or 4"})
	}
}

// notification takes a notification.
func (d *device) notification(in *inbound, c *verbs.Completion) {
	v := d.v
	if c.Imm&immSlave != 0 {
		in.splits++
		d.releaseHeld(in)
		return
	}
	l := v.slots.Get(c.Imm)
	if l == nil || l.Owner != in {
		v.malformed(in, &van.FieldError{Field: "slot", Value: c.Imm, Want: "one that this connection was given"})
		return
	}
	rx, err := d.decode(in, l, c)
	if rx == nil {
		if err != nil {
			v.malformed(in, err)
		}
		if !l.Held() {
			d.slotConsumed(in, l)
		}
		return
	}
	if len(in.held) > 0 || rx.splits > in.splits {
		if len(in.held) >= maxIndex {
			in.fail(fmt.Errorf("%w: %d messages wait for the other part of one", van.ErrMalformed, len(in.held)))
			rx.msg.Release()
			return
		}
		in.held = append(in.held, rx)
		in.holds.Store(true)
		return
	}
	d.appendPolled(rx)
}

// releaseHeld hands up messages whose other parts have come.
func (d *device) releaseHeld(in *inbound) {
	n := 0
	for n < len(in.held) && in.held[n].splits <= in.splits {
		d.appendPolled(in.held[n])
		n++
	}
	in.held = append(in.held[:0], in.held[n:]...)
	in.holds.Store(len(in.held) > 0)
}

// dropHeld gives up messages whose other parts will not come.
func (d *device) dropHeld(in *inbound) {
	if !in.holds.Load() {
		return
	}
	var held []*received
	d.exclusive(func() {
		held, in.held = in.held, nil
		in.holds.Store(false)
	})
	for _, rx := range held {
		rx.msg.Release()
	}
}

// exclusive calls f while nobody polls.
func (d *device) exclusive(f func()) {
	d.lockWaiters.Add(1)
	defer d.lockWaiters.Add(-1)
	d.dev.Wake() // the loop holds mu while it sleeps
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

func (d *device) appendPolled(rx *received) { d.polled = append(d.polled, rx) }

// slotConsumed gives back a slot that nothing is read from any more.
func (d *device) slotConsumed(in *inbound, l *receiveSlot) {
	if l.OneShot {
		if d.v.slots.End(l) {
			in.freeSlot(l)
		}
		return
	}
	in.returnCredit(l)
}

// received is a received message.
type received struct {
	msg    van.Message
	d      *device
	in     *inbound
	slot   *receiveSlot // that the frames lie in; nil when they do not
	splits uint64       // notifications of other parts that must have come
	key    [8]byte
	lens   [4]byte
	copies []byte // copies of keys and lengths of many
}

// maxKeptCopies is the most that a message keeps for the next one.
const maxKeptCopies = 64 << 10

// copyFrame returns a copy of b, a frame of keys or lengths, of a message with trailer t, which
// has been checked.
func (rx *received) copyFrame(b []byte, t *trailer) backend.Mem {
	from := aligned(len(rx.copies))
	if most := aligned(int(t.lens[0])) + int(t.lens[2]); cap(rx.copies) < most { // for both: it must not move
		rx.copies = make([]byte, 0, most)
	}
	rx.copies = rx.copies[:from+len(b)]
	copy(rx.copies[from:], b)
	return backend.Bytes(rx.copies[from:])
}

// decode makes a message of a notification. A nil rxMsg with a nil error is no
// message, but nothing wrong either.
func (d *device) decode(in *inbound, l *receiveSlot, c *verbs.Completion) (*received, error) {
	b := l.Memory.meta.Mem
	if c.Len < rawMeta || int(c.Len) > len(b) {
		return nil, &van.FieldError{Field: "meta", Value: fmt.Sprintf("%d bytes", c.Len), Want: fmt.Sprintf("%d to %d", rawMeta, len(b))}
	}
	b = b[:c.Len]
	t := &d.trailer
	*t = trailer{}
	b, behind, err := in.dialect.split(b, t) // behind is the frames, when they lie with the meta
	if err != nil {
		return nil, err
	}
	rx := d.pool.get()
	m := &rx.msg
	if err := van.DecodeMeta(b, &m.Meta); err != nil {
		m.Release()
		return nil, err
	}
	rx.in = in
	if in.unlisted.Load() && !m.IsControl() {
		v := d.v
		if n := v.stats.fenced.Add(1); n&(n-1) == 0 {
			v.log.Warn("rdma: dropped a message of a process that the cluster's table does not name", "from", in.name(), "dropped so far", n)
		}
		m.Release()
		return nil, nil
	}
	m.Sender, m.Receiver = in.hello.node, int(d.v.id.Load())
	now := clock.Now()
	if m.Request {
		m.RequestTrace.PostRecv = now
	} else {
		m.ResponseTrace.PostRecv = now
	}
	if m.SlaveQPNum > 0 {
		rx.splits = m.SlaveQPCounter[1]
		m.SlaveQPNum, m.SlaveQPCounter = 0, [2]uint64{}
	}
	if t.numbered && m.IsControl() && d.v.isRepeated(in, t) {
		m.Release()
		return nil, nil
	}
	if err := in.dialect.frames(rx, l, t, behind); err != nil {
		rx.slot = nil // it does not hold it yet
		m.Release()
		return nil, err
	}
	if rx.slot != nil {
		ok, over := rx.slot.Hold()
		if !ok {
			rx.slot = nil
			m.Release()
			return nil, nil // the connection has ended
		}
		if over {
			if err := in.dialect.overwrite(rx.slot, m.Key); err != nil {
				m.Release()
				return nil, err
			}
		}
		if l.OneShot {
			d.v.slots.End(l)
		}
	} else if in.dialect.endsSlot(m) {
		if d.v.slots.End(l) {
			in.freeSlot(l)
		}
	} else {
		d.slotConsumed(in, l)
	}
	d.v.stats.received(len(b) + m.PayloadLen())
	return rx, nil
}

// oneKey makes the frames that the meta repeats.
func (rx *received) oneKey() {
	m := &rx.msg
	m.Frames = 2
	le.PutUint64(rx.key[:], m.Key)
	m.Keys = backend.Bytes(rx.key[:])
	if len(m.DataTypes) == van.MaxFrames {
		m.Frames = van.MaxFrames
		le.PutUint32(rx.lens[:], uint32(m.ValLen))
		m.Lens = backend.Bytes(rx.lens[:])
	}
}

// endPull tells the peer's side of an answer; see peer.answered.
func (v *rvan) endPull(node int, m *van.Meta, value []byte) (into backend.Mem, copied bool) {
	if p := (*v.peers.Load())[node]; p != nil {
		return p.endPull(m, value)
	}
	return backend.Mem{}, false
}

// creditsArrived takes the credits that have come with a message.
func (v *rvan) creditsArrived(in *inbound, t *trailer) {
	x := (*v.conns.Load())[t.epoch-v.epoch]
	if x == nil || x.peer == nil {
		return // of an earlier connection
	}
	if int(x.peer.id.Load()) != in.hello.node && in.hello.node != van.Empty || !x.peer.takeCredits(t) {
		v.malformed(in, &van.FieldError{Field: "credits", Value: t.credits[:t.n], Want: "slots that are in use"})
	}
}

// lane is the order of a sender's messages. aside is what has come while its handler has
// too much to do: the slots that it lies in are not given back, so the sender has to stop.
type lane struct {
	engine.Lane[*van.Message]
	deferred []*received // these two belong to the goroutine with the receiving role
	stalled  []*inbound  // the connections that they came on
}

// lanes gives each sender two lanes: control messages do not wait for data, nor for the
// handler of data. Senders without an id share theirs.
type lanes struct {
	m sync.Map // int to *lane
}

func (l *lanes) of(m *van.Message) *lane {
	key := m.Sender << 1
	if m.IsControl() || m.SimpleApp { // whose order is kept among them
		key++
	}
	if p, ok := l.m.Load(key); ok {
		return p.(*lane)
	}
	x := &lane{}
	x.ID = m.Sender
	p, _ := l.m.LoadOrStore(key, x)
	return p.(*lane)
}

// lane is that of rx.
func (d *device) lane(rx *received) *lane {
	l := &rx.in.lanes[0]
	if rx.msg.IsControl() || rx.msg.SimpleApp {
		l = &rx.in.lanes[1]
	}
	if *l == nil {
		*l = d.lanes.of(&rx.msg)
	}
	return *l
}

// admit tells whether rx may be handed to its lane. If not it is put aside.
func (d *device) admit(rx *received) (*lane, bool) {
	l := d.lane(rx)
	if len(l.deferred) == 0 && d.loop.MayRead(&l.Lane) {
		return l, true
	}
	if len(l.deferred) == 0 {
		d.deferredLanes = append(d.deferredLanes, l)
	}
	l.deferred = append(l.deferred, rx)
	if !rx.in.stalled.Swap(true) {
		l.stalled = append(l.stalled, rx.in)
	}
	return nil, false
}

// readmit returns what was put aside and may be handed up now.
func (d *device) readmit() (*received, *lane) {
	for i, l := range d.deferredLanes {
		if !d.loop.MayRead(&l.Lane) {
			continue
		}
		rx := l.deferred[0]
		l.deferred[0] = nil
		if l.deferred = l.deferred[1:]; len(l.deferred) == 0 {
			l.deferred = nil
			d.deferredLanes = slices.Delete(d.deferredLanes, i, i+1)
			for _, in := range l.stalled {
				in.stalled.Store(false)
			}
			l.stalled = nil
		}
		return rx, l
	}
	return nil, nil
}

// pool reuses messages.
type pool struct {
	d    *device
	mu   sync.Mutex
	free []*received
}

const poolCap = 256

func (p *pool) get() *received {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		rx := p.free[n-1]
		p.free = p.free[:n-1]
		return rx
	}
	rx := &received{d: p.d}
	rx.msg.Reset()
	rx.msg.Adopt(p, unsafe.Pointer(rx))
	return rx
}

// Free implements van.Owner.
func (p *pool) Free(m *van.Message) {
	rx := (*received)(m.Native())
	if l := rx.slot; l != nil {
		in := rx.in
		switch over, free := l.Drop(); {
		case free:
			in.freeSlot(l)
		case !over && !l.Held():
			in.returnCredit(l)
		}
	}
	rx.in, rx.slot, rx.splits = nil, nil, 0
	if rx.copies = rx.copies[:0]; cap(rx.copies) > maxKeptCopies {
		rx.copies = nil
	}
	m.Reset()
	m.Adopt(p, unsafe.Pointer(rx))
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) < poolCap {
		p.free = append(p.free, rx)
	}
}
