package rdma

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file turns completions into messages, and keeps the order of each sender's messages.

// handleCompletion handles one completion. The feed is held.
func (d *device) handleCompletion(c *verbs.Completion) {
	v := d.v
	serial, q := conn.CookieOf(c.Cookie)
	if c.Type == verbs.SendDone {
		serial = uint32(c.ID >> 32)
	}
	x := (*v.tables.conns.Load())[serial]
	if x == nil {
		return // of a connection that has ended
	}
	switch {
	case c.Type == verbs.SendDone && x.in != nil:
		x.in.handleSendCompletion(c)
	case c.Type == verbs.SendDone:
		x.peer.handleSendCompletion(x.link, c)
	case c.Type == verbs.RecvFailed && x.in != nil:
		x.in.handleReceiveFailure(c)
	case c.Type == verbs.RecvFailed:
		x.link.fail(statusError(c.Status, "receive on queue pair", q))
	case x.in == nil && c.Type == verbs.RecvSend:
		x.peer.handleSend(d, x.link, c)
	case x.in == nil:
		v.malformedFrom(x.peer.name(), &van.FieldError{Field: "notification", Value: c.Imm, Want: "none on a connection of this node"})
	case c.Type == verbs.RecvSend && c.Imm == immSlotRequest:
		slotSet{x.in}.handleSlotRequest(recvData(c))
	case c.Type == verbs.RecvSend:
		if !x.in.dialect.handleSend(c, &d.trailer) {
			x.in.malformed(&van.FieldError{Field: "SEND immediate", Value: c.Imm, Want: "0, 5, or 3 once"})
		}
	default:
		d.handleNotification(x.in, c)
	}
}

// handleNotification handles the notification of a write to a slot.
func (d *device) handleNotification(in *inbound, c *verbs.Completion) {
	v := d.v
	if c.Imm&immSlave != 0 {
		in.order.splits++
		d.releaseCompleted(in)
		in.noteDecoded()
		return
	}
	in.order.messages++
	l := v.budget.slots.Get(c.Imm)
	if l == nil || l.Owner != in {
		in.malformed(&van.FieldError{Field: "slot", Value: c.Imm, Want: "one granted on this connection"})
		return
	}
	ok, over := l.Hold() // released below, unless the message has values in the slot
	if !ok {
		return // the connection has ended
	}
	rx, err := d.decode(in, l, int(c.Len), over)
	if l.OneShot {
		v.budget.slots.End(l)
	}
	kept := rx != nil && rx.slot != nil
	if err != nil {
		in.malformed(err)
	} else if rx != nil {
		d.arrived(in, rx)
	}
	in.noteDecoded()
	if !kept {
		slotSet{in}.release(l)
	}
}

// arrived queues rx behind earlier messages. A control message does not wait for parts of data messages: its sender knows that it was
// written, and would not send it again if the connection ended meanwhile.
func (d *device) arrived(in *inbound, rx *received) {
	switch {
	case rx.splits <= in.order.splits && (len(in.order.incomplete) == 0 || rx.usesControlQueue() && !slices.ContainsFunc(in.order.incomplete, (*received).usesControlQueue)):
		d.makeReady(rx)
	case len(in.order.incomplete) >= maxIndex:
		in.fail(fmt.Errorf("%w: %d messages wait for the other part of one", van.ErrMalformed, len(in.order.incomplete)))
		rx.msg.Release()
	default:
		in.order.incomplete = append(in.order.incomplete, rx)
		in.order.hasIncomplete.Store(true)
	}
}

// makeReady queues rx, which has arrived as a whole, for delivery.
func (d *device) makeReady(rx *received) {
	slotSet{rx.in}.copyToBuffers(rx)
	d.ready.Put(rx)
}

// releaseCompleted moves messages whose other parts have arrived to d.ready.
func (d *device) releaseCompleted(in *inbound) {
	n := 0
	for n < len(in.order.incomplete) && in.order.incomplete[n].splits <= in.order.splits {
		d.makeReady(in.order.incomplete[n])
		n++
	}
	in.order.incomplete = append(in.order.incomplete[:0], in.order.incomplete[n:]...)
	in.order.hasIncomplete.Store(len(in.order.incomplete) > 0)
}

// dropIncomplete releases messages whose other parts will not arrive.
func (d *device) dropIncomplete(in *inbound) {
	if !in.order.hasIncomplete.Load() {
		return
	}
	var held []*received
	d.exclusive(func() {
		held, in.order.incomplete = in.order.incomplete, nil
		in.order.hasIncomplete.Store(false)
	})
	for _, rx := range held {
		rx.msg.Release()
	}
}

// decode decodes the message of n bytes that was written to l, to which the caller holds a reference. A message with values in l takes it
// over. over says that an earlier message is still in l. A nil message with a nil error is one to be dropped silently.
func (d *device) decode(in *inbound, l *receiveSlot, n int, over bool) (*received, error) {
	mem := l.Memory.meta.Mem
	if n < rawMeta || n > len(mem) {
		return nil, &van.FieldError{Field: "meta", Value: fmt.Sprintf("%d bytes", n), Want: fmt.Sprintf("%d to %d", rawMeta, len(mem))}
	}
	t := &d.trailer
	*t = trailer{}
	b, behind, err := in.dialect.splitMeta(mem[:n:n], t) // behind: placements and inline values
	if err != nil {
		return nil, err
	}
	rx := d.pool.get()
	m := &rx.msg
	if err := van.DecodeMeta(b, &m.Meta); err != nil {
		m.Release()
		return nil, err
	}
	rx.in, rx.number = in, in.order.messages
	if t.canceled {
		m.Release()
		return nil, nil
	}
	if in.process.unlisted.Load() && !m.IsControl() {
		v := d.v
		if n := v.stats.fenced.Add(1); n&(n-1) == 0 {
			v.log.Warn("rdma: dropped a message of a process that the cluster's table does not name", "from", in.name(), "dropped so far", n)
		}
		m.Release()
		return nil, nil
	}
	m.Sender, m.Receiver = in.handshake.node, int(d.v.local.id.Load())
	m.Trace().PostRecv = d.now
	if m.SlaveQPNum > 0 {
		rx.splits = m.SlaveQPCounter[1]
		m.SlaveQPNum, m.SlaveQPCounter = 0, [2]uint64{}
	}
	if t.numbered && m.IsControl() && d.v.isRepeated(in, t) {
		m.Release()
		return nil, nil
	}
	if err := in.dialect.frames(rx, l, t, behind); err != nil {
		rx.slot = nil
		m.Release()
		return nil, err
	}
	if in.stalled.Load() && in.handshake.native && !rx.usesControlQueue() {
		rx.slot = l // no value is there, but keeping the slot stops the sender
	}
	if rx.slot != nil && over {
		if err := in.dialect.handleOverwrite(l, m.Key); err != nil {
			rx.slot = nil
			m.Release()
			return nil, err
		}
	} else if rx.slot == nil && in.dialect.endsSlot(m) {
		d.v.budget.slots.End(l)
	}
	d.v.stats.received(len(b) + m.PayloadLen())
	return rx, nil
}

// peerQueue orders the messages of one sender. deferred holds those that arrive while too many wait for the handler. Their slots are not
// returned, so the sender has to stop.
type peerQueue struct {
	engine.PeerQueue[*van.Message]
	inFlight atomic.Int32 // PeerQueue.Undelivered
	blame    engine.SlowDetector
	deferred fifo.Queue[*received] // the holder of the feed uses this and stalled
	stalled  []*inbound            // the connections of deferred messages
}

// peerQueues has two queues for each sender, so that control messages wait neither for data nor for its handler. Senders without an id
// share theirs.
type peerQueues struct {
	m sync.Map // int to *peerQueue
}

func (l *peerQueues) of(sender int, control bool) *peerQueue {
	key := sender << 1
	if control {
		key++
	}
	if p, ok := l.m.Load(key); ok {
		return p.(*peerQueue)
	}
	x := &peerQueue{}
	x.ID, x.Undelivered = sender, &x.inFlight
	p, _ := l.m.LoadOrStore(key, x)
	return p.(*peerQueue)
}

// queueOf returns the queue of rx.
func (d *device) queueOf(rx *received) *peerQueue {
	l := &rx.in.order.queues[0]
	if rx.usesControlQueue() {
		l = &rx.in.order.queues[1]
	}
	if *l == nil {
		*l = d.queues.of(rx.msg.Sender, rx.usesControlQueue())
	}
	return *l
}

// pollable reports whether a Poll may deliver rx: at a worker, an answer or another worker's request; at a server, a request. Other
// handlers may take long.
func (d *device) pollable(rx *received) bool {
	switch {
	case rx.usesControlQueue():
		return false
	case d.v.local.self.Role == van.Server:
		return rx.msg.Request
	}
	return !rx.msg.Request || van.RoleOf(rx.msg.Sender) == d.v.local.self.Role
}

// next returns the next message to deliver. If a Poll may not deliver it, the loop must deliver it and all messages behind it.
func (d *device) next(poll bool) (*received, *peerQueue, engine.PollResult) {
	forLoop := func(rx *received, l *peerQueue) bool { return poll && (!d.pollable(rx) || l.inFlight.Load() != 0) }
	for i, l := range d.deferredQueues {
		if !d.feed.Loop.MayRead(&l.PeerQueue) {
			continue
		}
		rx := l.deferred.Front()
		if forLoop(rx, l) {
			return nil, nil, engine.LeaveToLoop
		}
		if l.deferred.Take(); l.deferred.Len() == 0 {
			d.deferredQueues = slices.Delete(d.deferredQueues, i, i+1)
			for _, in := range l.stalled {
				in.stalled.Store(false)
			}
			l.stalled = nil
		}
		return rx, l, engine.Message
	}
	for d.ready.Len() > 0 {
		rx := d.ready.Front()
		l := d.queueOf(rx)
		if forLoop(rx, l) {
			return nil, nil, engine.LeaveToLoop
		}
		d.ready.Take()
		if l.deferred.Len() == 0 && d.feed.Loop.MayRead(&l.PeerQueue) {
			return rx, l, engine.Message
		}
		if l.deferred.Len() == 0 {
			d.deferredQueues = append(d.deferredQueues, l)
		}
		l.deferred.Put(rx)
		if !rx.in.stalled.Swap(true) {
			l.stalled = append(l.stalled, rx.in)
		}
	}
	return nil, nil, engine.Nothing
}

// mayResume reports whether a deferred message may be delivered now.
func (d *device) mayResume() bool {
	return slices.ContainsFunc(d.deferredQueues, func(l *peerQueue) bool { return d.feed.Loop.MayRead(&l.PeerQueue) })
}
