package rdma

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the way from a completion to a message, and the order of each sender's
// messages.

// completed takes one completion. The feed is held.
func (d *device) completed(c *verbs.Completion) {
	v := d.v
	serial, q := conn.CookieOf(c.Cookie)
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
		x.link.fail(statusError(c.Status, "receive on queue pair", q))
	case x.in == nil && c.Type == verbs.RecvSend:
		x.peer.receiveSend(d, x.link, c)
	case x.in == nil:
		v.malformedFrom(x.peer.name(), &van.FieldError{Field: "notification", Value: c.Imm, Want: "none on a connection of this node"})
	case c.Type == verbs.RecvSend && c.Imm == immStart:
		slotSet{x.in}.slotRequested(recvData(c))
	case c.Type == verbs.RecvSend:
		if !x.in.dialect.control(c, &d.trailer) {
			x.in.malformed(&van.FieldError{Field: "SEND immediate", Value: c.Imm, Want: "0, 5, or 3 once"})
		}
	default:
		d.notification(x.in, c)
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
		in.malformed(&van.FieldError{Field: "slot", Value: c.Imm, Want: "one that this connection was given"})
		return
	}
	ok, over := l.Hold() // until all of it has been looked at
	if !ok {
		return // the connection has ended
	}
	messages, err := d.written.messages(in.dialect, l.Memory.meta.Mem, int(c.Len))
	for _, b := range messages {
		var rx *received
		if rx, err = d.decode(in, l, b, over); err != nil || rx != nil && !d.arrived(in, rx) {
			break
		}
	}
	if err != nil {
		in.malformed(err)
	}
	if l.OneShot {
		v.slots.End(l)
	}
	slotSet{in}.letGo(l)
}

// arrived puts rx behind what has come before it. It reports false when the connection ends instead. A control message
// does not wait for the parts of data: its sender, which knows that it has been written, would not send it again if the
// connection ended meanwhile.
func (d *device) arrived(in *inbound, rx *received) bool {
	switch {
	case rx.splits <= in.splits && (len(in.held) == 0 || rx.ofControl() && !slices.ContainsFunc(in.held, (*received).ofControl)):
		d.came.Put(rx)
	case len(in.held) >= maxIndex:
		in.fail(fmt.Errorf("%w: %d messages wait for the other part of one", van.ErrMalformed, len(in.held)))
		rx.msg.Release()
		return false
	default:
		in.held = append(in.held, rx)
		in.holds.Store(true)
	}
	return true
}

// releaseHeld hands up messages whose other parts have come.
func (d *device) releaseHeld(in *inbound) {
	n := 0
	for n < len(in.held) && in.held[n].splits <= in.splits {
		d.came.Put(in.held[n])
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

// decode makes a message of what was written to l, which the caller holds. With over, a message of an earlier write lies
// there. A nil message with a nil error is none, but nothing wrong either.
func (d *device) decode(in *inbound, l *receiveSlot, b []byte, over bool) (*received, error) {
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
	if t.recalled {
		m.Release()
		return nil, nil
	}
	if in.unlisted.Load() && !m.IsControl() {
		v := d.v
		if n := v.stats.fenced.Add(1); n&(n-1) == 0 {
			v.log.Warn("rdma: dropped a message of a process that the cluster's table does not name", "from", in.name(), "dropped so far", n)
		}
		m.Release()
		return nil, nil
	}
	m.Sender, m.Receiver = in.hello.node, int(d.v.id.Load())
	m.Trace().PostRecv = clock.Now()
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
	if in.stalled.Load() && in.dialect.returnsCredits() && !rx.ofControl() {
		rx.slot = l // though no value lies there: its sender has to stop
	}
	if rx.slot != nil {
		if ok, _ := rx.slot.Hold(); !ok {
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
	} else if in.dialect.endsSlot(m) {
		d.v.slots.End(l)
	}
	d.v.stats.received(len(b) + m.PayloadLen())
	return rx, nil
}

// lane is the order of a sender's messages. deferred is what has come while its handler has
// too much to do: the slots that it lies in are not given back, so the sender has to stop.
type lane struct {
	engine.Lane[*van.Message]
	hand     atomic.Int32 // Lane.Hand
	blame    engine.Blame
	deferred fifo.Queue[*received] // these two are of who holds the feed
	stalled  []*inbound            // the connections that they came on
}

// lanes gives each sender two lanes: control messages do not wait for data, nor for the
// handler of data. Senders without an id share theirs.
type lanes struct {
	m sync.Map // int to *lane
}

func (l *lanes) of(sender int, control bool) *lane {
	key := sender << 1
	if control {
		key++
	}
	if p, ok := l.m.Load(key); ok {
		return p.(*lane)
	}
	x := &lane{}
	x.ID, x.Hand = sender, &x.hand
	p, _ := l.m.LoadOrStore(key, x)
	return p.(*lane)
}

// ofControl tells whether rx goes the way of control messages: their order is kept among
// them.
func (rx *received) ofControl() bool { return rx.msg.IsControl() || rx.msg.SimpleApp }

// lane is that of rx.
func (d *device) lane(rx *received) *lane {
	l := &rx.in.lanes[0]
	if rx.ofControl() {
		l = &rx.in.lanes[1]
	}
	if *l == nil {
		*l = d.lanes.of(rx.msg.Sender, rx.ofControl())
	}
	return *l
}

// forPoll tells whether a Poll may deliver rx: an answer or a request of its own role that comes to a worker,
// or a request that comes to a server. Other handlers may take long.
func (d *device) forPoll(rx *received) bool {
	switch {
	case rx.ofControl():
		return false
	case d.v.self.Role == van.Server:
		return rx.msg.Request
	}
	return !rx.msg.Request || van.RoleOf(rx.msg.Sender) == d.v.self.Role
}

// next returns what is to be delivered next. What a Poll may not deliver is the loop's, and what comes behind
// it, too.
func (d *device) next(poll bool) (*received, *lane, engine.Found) {
	left := func(rx *received, l *lane) bool { return poll && (!d.forPoll(rx) || l.hand.Load() != 0) }
	for i, l := range d.deferredLanes {
		if !d.feed.Loop.MayRead(&l.Lane) {
			continue
		}
		rx := l.deferred.Front()
		if left(rx, l) {
			return nil, nil, engine.Leave
		}
		if l.deferred.Take(); l.deferred.Len() == 0 {
			d.deferredLanes = slices.Delete(d.deferredLanes, i, i+1)
			for _, in := range l.stalled {
				in.stalled.Store(false)
			}
			l.stalled = nil
		}
		return rx, l, engine.Message
	}
	for d.came.Len() > 0 {
		rx := d.came.Front()
		l := d.lane(rx)
		if left(rx, l) {
			return nil, nil, engine.Leave
		}
		d.came.Take()
		if l.deferred.Len() == 0 && d.feed.Loop.MayRead(&l.Lane) {
			return rx, l, engine.Message
		}
		if l.deferred.Len() == 0 {
			d.deferredLanes = append(d.deferredLanes, l)
		}
		l.deferred.Put(rx)
		if !rx.in.stalled.Swap(true) {
			l.stalled = append(l.stalled, rx.in)
		}
	}
	return nil, nil, engine.Nothing
}

// mayReadmit tells whether something that was put aside may be handed up now.
func (d *device) mayReadmit() bool {
	return slices.ContainsFunc(d.deferredLanes, func(l *lane) bool { return d.feed.Loop.MayRead(&l.Lane) })
}
