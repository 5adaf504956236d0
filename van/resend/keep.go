package resend

// The sent messages that wait for their acknowledgement.

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// key names a kept message: the peer's id, which the signature has only 8 bits of, and
// the signature that the peer will acknowledge.
type key struct {
	peer int
	sig  uint64
}

// entry is a kept message. Its frames are the caller's, except short ones.
type entry struct {
	key   key
	from  uint32         // the incarnations that the message carries
	to    uint32         // likewise
	done  van.Completion // the caller's
	refs  atomic.Int32   // one while kept, one for each Send that the wrapped van has not completed
	start time.Time

	sending sync.Mutex // held during inner.Send, which writes to msg
	msg     van.Message
	dropped bool                               // not to be sent any more: its memory is the caller's again
	short   [van.MaxFrames][van.CopyBelow]byte // frames that Send copies
	probe   bool                               // sent until it is acknowledged; see monitor.go

	// Under Van.mu:
	held       bool // in the table
	queued     bool // in the list, not behind another entry with its key
	tries      int
	due        time.Time
	prev, next *entry // in the list, ordered by due
	behind     *entry // the next entry with the same key
}

var entries = sync.Pool{New: func() any { return new(entry) }}

// Sent implements van.Completion for the wrapped van.
func (e *entry) Sent() { e.release() }

func (e *entry) release() {
	if e.refs.Add(-1) > 0 {
		return
	}
	done := e.done
	e.done = nil
	for i := range e.msg.Frames {
		e.msg.Frame(i).Release()
	}
	e.msg.Reset()
	entries.Put(e)
	if done != nil {
		done.Sent()
	}
}

// transmit sends e over the wrapped van. The caller holds a reference to e.
func (v *Van) transmit(e *entry) error {
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

// Send implements van.Van. The message's frames are kept, not copied, until it is
// acknowledged or fails; then Done is called. Without Done, the frames' bytes may be
// changed after the answer has come, as with any van.
func (v *Van) Send(m *van.Message) error {
	self := int(v.id.Load())
	if !v.enabled.Load() || !tracked(m) || m.Receiver < 0 || self == van.Empty {
		return v.inner.Send(m)
	}
	e := entries.Get().(*entry)
	e.msg.Reset()
	e.msg.Meta.CopyFrom(&m.Meta)
	e.msg.Receiver, e.msg.Frames = m.Receiver, m.Frames
	e.msg.Placed, e.dropped, e.probe = m.Placed, false, isProbe(m, m.Receiver, self)
	for i := range m.Frames {
		f := m.Frame(i)
		if f.OnHost() && f.Len() < van.CopyBelow { // the caller may reuse it when Send returns
			f = backend.Bytes(e.short[i][:copy(e.short[i][:], f.Host())])
		}
		f.Retain()
		e.msg.SetFrame(i, f)
	}
	e.msg.Done = e
	e.done, e.start = m.Done, time.Now()
	e.key = key{m.Receiver, signature(&m.Meta, self, m.Receiver)}
	e.from, e.to = m.Incarnations()
	e.refs.Store(2) // the table's and this call's
	e.tries, e.behind = 0, nil

	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		e.done = nil
		e.refs.Store(1)
		e.release()
		return &van.Error{Op: "send", Node: van.NodeName(self), Peer: van.NodeName(m.Receiver), Err: van.ErrClosed}
	}
	e.held = true
	v.count++
	if head := v.kept[e.key]; head != nil {
		for head.behind != nil {
			head = head.behind
		}
		head.behind = e
		v.mu.Unlock()
		e.release()
		return nil
	}
	v.kept[e.key] = e
	v.scheduleLocked(e)
	v.mu.Unlock()

	err := v.transmit(e)
	if err != nil && e.outlasts(err) {
		err = nil
	}
	if err != nil {
		if next, ok := v.remove(e); ok {
			e.done = nil // the error is returned instead
			e.release()
			defer v.launch(next)
		} else {
			err = nil // failed meanwhile, which OnFail has reported
		}
	} else if !m.IsControl() {
		e.sending.Lock()
		m.RequestTrace.PostSend, m.ResponseTrace.PostSend = e.msg.RequestTrace.PostSend, e.msg.ResponseTrace.PostSend
		e.sending.Unlock()
	}
	e.release()
	return err
}

// scheduleLocked appends e to the list, which keeps it in order: the timeout is the
// same for all.
func (v *Van) scheduleLocked(e *entry) {
	e.tries++
	e.due = time.Now().Add(v.opts.Timeout)
	e.queued = true
	e.prev, e.next = v.last, nil
	if v.last == nil {
		v.first = e
		select {
		case v.wake <- struct{}{}:
		default:
		}
	} else {
		v.last.next = e
	}
	v.last = e
}

func (v *Van) unlinkLocked(e *entry) {
	if !e.queued {
		return
	}
	e.queued = false
	if e.prev == nil {
		v.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		v.last = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.prev, e.next = nil, nil
}

// remove takes e, the first of its key, out of the table. It reports false when e has
// been removed already. Otherwise the table's reference to e is the caller's, which
// must pass next, if not nil, to launch.
func (v *Van) remove(e *entry) (next *entry, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.removeLocked(e)
}

func (v *Van) removeLocked(e *entry) (next *entry, ok bool) {
	if !e.held {
		return nil, false
	}
	e.held = false
	v.unlinkLocked(e)
	if next = e.behind; next != nil {
		e.behind = nil
		v.kept[e.key] = next
		next.refs.Add(1)
		v.scheduleLocked(next)
	} else {
		delete(v.kept, e.key)
	}
	v.fewerLocked(1)
	return next, true
}

func (v *Van) fewerLocked(n int) {
	if v.count -= n; v.count == 0 && v.none != nil {
		close(v.none)
		v.none = nil
	}
}

// launch sends an entry that has waited behind another one with the same key.
func (v *Van) launch(e *entry) {
	for e != nil {
		var next *entry
		if err := v.transmit(e); err != nil && !errors.Is(err, van.ErrQueueFull) {
			var ok bool
			if next, ok = v.remove(e); ok {
				v.fail(e, err)
			}
		}
		e.release()
		e = next
	}
}

// acknowledged removes the message that ack names. Between our nodes an acknowledgement
// carries the incarnations of the message that came, the other way round: the message of
// another process under the same id may have had the same signature.
func (v *Van) acknowledged(ack *van.Message) {
	by, of := ack.Incarnations()
	v.mu.Lock()
	e := v.kept[key{ack.Sender, ack.Control.MsgSig}]
	var next *entry
	if e != nil && (of != 0 && e.from != 0 && of != e.from || by != 0 && e.to != 0 && by != e.to) && !failpoint.On("incarnation") {
		e = nil
	}
	if e != nil {
		next, _ = v.removeLocked(e)
	}
	v.mu.Unlock()
	if e != nil {
		e.release()
		v.launch(next)
	}
}

// fail reports e, which has been removed, with err.
func (v *Van) fail(e *entry, err error) {
	if v.opts.OnFail != nil && !e.probe {
		f := Failure{Peer: e.key.peer, Err: err}
		e.sending.Lock()
		f.Meta.CopyFrom(&e.msg.Meta)
		e.sending.Unlock()
		v.opts.OnFail(f)
	}
	e.release()
}

// take removes and returns all entries of peer, or with all those of every peer.
func (v *Van) take(peer int, all bool) []*entry {
	v.mu.Lock()
	defer v.mu.Unlock()
	var taken []*entry
	if delete(v.quiet, peer); all {
		clear(v.quiet)
	}
	for k, e := range v.kept {
		if !all && k.peer != peer {
			continue
		}
		delete(v.kept, k)
		for e != nil {
			next := e.behind
			e.behind, e.held = nil, false
			v.unlinkLocked(e)
			taken = append(taken, e)
			e = next
		}
	}
	if len(taken) > 0 {
		v.fewerLocked(len(taken))
	}
	return taken
}

func (v *Van) giveUp(peer int, cause error) {
	for _, e := range v.take(peer, false) {
		v.fail(e, cause)
	}
}

func (v *Van) dropKept(peer int) {
	for _, e := range v.take(peer, false) {
		e.release()
	}
}

func (v *Van) dropAll() {
	for _, e := range v.take(0, true) {
		e.release()
	}
}
