package resend

// Sending, and the end of a message by an acknowledgement or a failure.

import (
	"errors"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// transmit sends e over the wrapped van. The caller has a reference to e, and has recorded it in table.sending
// while e was in the table. Cancel thus finds e even if an acknowledgement or a loss removes it from the table.
func (v *Van) transmit(e *entry) error {
	defer v.kept.sent(e)
	e.sending.Lock()
	defer e.sending.Unlock()
	if e.dropped {
		return nil
	}
	e.refs.Add(1)
	err := v.inner.Send(&e.msg)
	if err != nil {
		e.refs.Add(-1) // not the last one: the caller has its own
	}
	return err
}

// Send implements van.Van. To a C++ node, and with Options.Expand, the messages that stand for a batch are kept instead of the batch, since
// they are acknowledged one by one. If the wrapped van has accepted the first one and then its queue is full, the others are sent again
// later.
func (v *Van) Send(m *van.Message) error {
	self := int(v.id.Load())
	if !v.enabled.Load() || !tracked(m) || m.Receiver < 0 || self == van.Empty {
		return v.inner.Send(m)
	}
	if _, to := m.Incarnations(); m.IsBatch() && (to == 0 || v.opts.Expand) {
		first := true
		return m.Expand(func(m *van.Message) error {
			err := send(v, m, self, first)
			first = false
			return err
		})
	}
	return send(v, m, self, true)
}

// send keeps and sends a message of the node self. It fails with van.ErrQueueFull only if the message is refusable. The message's frames are kept, not copied, until it is
// acknowledged or fails; then Done is called. Without Done, the frames' bytes may be
// changed after the answer has arrived, as with any van.
func send(v *Van, m *van.Message, self int, refusable bool) error {
	e := entries.Get().(*entry)
	e.msg.CloneFrom(m, &e.short)
	e.dropped, e.probe = false, isProbe(m, m.Receiver, self)
	e.msg.Done = e
	e.done, e.start = m.Done, time.Now()
	e.key = key{m.Receiver, signature(&m.Meta, self, m.Receiver)}
	e.from, e.to = m.Incarnations()
	e.barrier, e.customer = van.EmptyCmd, m.CustomerID
	if m.Request && (m.Control.Cmd == van.Barrier || m.Control.Cmd == van.InstanceBarrier) {
		e.barrier = m.Control.Cmd
	}
	e.refs.Store(2) // the table's and this call's
	e.tries, e.behind = 0, nil

	first, open := v.kept.add(e)
	switch {
	case !open:
		e.done = nil
		e.refs.Store(1)
		e.release()
		return &van.Error{Op: "send", Node: van.NodeName(self), Peer: van.NodeName(m.Receiver), Err: van.ErrClosed}
	case !first:
		e.release()
		return nil
	}
	err := v.transmit(e)
	if err != nil && (e.outlasts(err) || !refusable && errors.Is(err, van.ErrQueueFull)) {
		err = nil
	}
	if err != nil {
		if next, ok := v.kept.remove(e); ok {
			e.done = nil // the error is returned instead
			e.release()
			defer v.launch(next)
		} else {
			err = nil // it has failed meanwhile, which OnFail has reported
		}
	} else if !m.IsControl() {
		e.sending.Lock()
		m.RequestTrace.PostSend, m.ResponseTrace.PostSend = e.msg.RequestTrace.PostSend, e.msg.ResponseTrace.PostSend
		e.sending.Unlock()
	}
	e.release()
	return err
}

// launch sends an entry that was queued behind another one with the same key.
func (v *Van) launch(e *entry) {
	for e != nil {
		var next *entry
		if err := v.transmit(e); err != nil && !errors.Is(err, van.ErrQueueFull) {
			var ok bool
			if next, ok = v.kept.remove(e); ok {
				v.fail(e, err)
			}
		}
		e.release()
		e = next
	}
}

// acknowledged releases the message that ack names.
func (v *Van) acknowledged(ack *van.Message) {
	if e, next := v.kept.acknowledged(ack); e != nil {
		e.release()
		v.launch(next)
	}
}

// isRelease reports whether m is a C++ StepMesh scheduler's release of a barrier.
func isRelease(m *van.Message) bool {
	by, _ := m.Incarnations()
	return (m.Control.Cmd == van.Barrier || m.Control.Cmd == van.InstanceBarrier) && !m.Request && by == 0 && m.Sender == van.SchedulerID
}

// released drops the barrier request that a C++ StepMesh scheduler has released with m. That scheduler sends no
// acknowledgements when it leaves, nor in the first 100 ms after the node table, when the requests for the start
// barrier arrive. It counts a repeated request for the next barrier.
func (v *Van) released(m *van.Message) {
	if e, next := v.kept.released(m); e != nil {
		e.release()
		v.launch(next)
	}
}

// fail reports e, which has been removed, with err.
func (v *Van) fail(e *entry, err error) {
	if v.opts.OnFail != nil && !e.probe {
		var m van.Meta
		e.sending.Lock()
		m.CopyFrom(&e.msg.Meta)
		e.sending.Unlock()
		v.opts.OnFail(e.key.peer, &m, err)
	}
	e.release()
}

// failAll fails all kept messages for peer.
func (v *Van) failAll(peer int, cause error) {
	for _, e := range v.kept.take(peer, false) {
		v.fail(e, cause)
	}
}

// drop releases entries that were removed from the table.
func drop(all []*entry) {
	for _, e := range all {
		e.release()
	}
}
