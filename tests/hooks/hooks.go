// Package hooks wraps a van in tests and does on demand what a transport does rarely: it
// refuses messages, delays them, lets them overtake each other, and holds lent memory for
// long.
//
//	hook := &hooks.Van{}
//	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)})
//	hook.OnSend(func(m *van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
package hooks

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
)

// Verdict is the action for one message.
type Verdict struct {
	what action
	err  error
}

type action int

const (
	pass action = iota
	refuse
	keep
	lose
)

// Verdicts on a message. The zero Verdict is Pass.
var (
	Pass = Verdict{}
	// Keep holds a message until SendKept sends it or DeliverKept delivers it.
	Keep = Verdict{what: keep}
	// Lose takes a message and drops it.
	Lose = Verdict{what: lose}
)

// Refuse makes Send return err.
func Refuse(err error) Verdict { return Verdict{what: refuse, err: err} }

// Van wraps a van. It is made by Wrap, or by setting the embedded van before use. OnSend's
// and OnReceive's functions get one message at a time, which they must not keep.
type Van struct {
	van.Van

	// Expands makes Send send a batch as the messages of ps-lite that stand for it, as a transport without a form for batches does.
	Expands bool

	mu       sync.Mutex
	send     func(*van.Message) Verdict
	receive  func(*van.Message) Verdict
	up       van.Receiver
	sent     []*van.Message // kept on the way out
	received []*van.Message // kept on the way in
	sends    int
	held     atomic.Int64
}

var (
	_ van.Van     = (*Van)(nil)
	_ van.Wrapper = (*Van)(nil)
)

// Wrap is for testcluster.Options: it puts v around the van of one node.
func (v *Van) Wrap(role string, rank int) func(string, int, van.Factory) van.Factory {
	return func(r string, i int, f van.Factory) van.Factory {
		if r != role || i != rank {
			return f
		}
		return func(o van.Options) (van.Van, error) {
			inner, err := f(o)
			v.Van = inner
			return v, err
		}
	}
}

// Unwrap implements van.Wrapper.
func (v *Van) Unwrap() van.Van { return v.Van }

// OnSend makes f decide about each data message that is sent from now on; nil lets all
// pass. Control messages always do.
func (v *Van) OnSend(f func(*van.Message) Verdict) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.send = f
}

// OnReceive makes f decide about each data message received from now on. Other messages
// overtake those that are kept.
func (v *Van) OnReceive(f func(*van.Message) Verdict) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.receive = f
}

// Sends is how many data messages Send was given.
func (v *Van) Sends() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.sends
}

// Kept are the outgoing messages that are kept; their frames are the sender's memory.
func (v *Van) Kept() []*van.Message {
	v.mu.Lock()
	defer v.mu.Unlock()
	return append([]*van.Message(nil), v.sent...)
}

// Waiting is how many received messages are kept.
func (v *Van) Waiting() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.received)
}

// Send implements van.Van.
func (v *Van) Send(m *van.Message) error {
	if v.Expands && m.IsBatch() {
		return m.Expand(v.Send)
	}
	if m.IsControl() {
		return v.Van.Send(m)
	}
	v.mu.Lock()
	v.sends++
	d := Pass
	if v.send != nil {
		d = v.send(m)
	}
	if d.what == keep {
		v.sent = append(v.sent, lent(m))
	}
	v.mu.Unlock()
	switch d.what {
	case refuse:
		return d.err
	case keep:
		return nil
	case lose:
		if m.Done != nil {
			m.Done.Sent()
		}
		return nil
	}
	return v.Van.Send(m)
}

// lent is the part of a message that a transport keeps: the meta, a copy of the short frames,
// and the memory of the long ones.
func lent(m *van.Message) *van.Message {
	c := &van.Message{}
	c.CloneFrom(m, new([van.MaxFrames][van.CopyBelow]byte))
	return c
}

// SendKept sends the kept messages in order, and returns the first error.
func (v *Van) SendKept() error {
	v.mu.Lock()
	all := v.sent
	v.sent = nil
	v.mu.Unlock()
	var first error
	for _, m := range all {
		if err := v.Van.Send(m); err != nil && first == nil {
			first = err
		}
		m.ReleaseClone()
	}
	return first
}

// Start implements van.Van.
func (v *Van) Start(recv van.Receiver) {
	v.up = recv
	v.Van.Start(func(m *van.Message) {
		d := Pass
		if !m.IsControl() && m.Owner() != nil {
			h := &hold{v: v, owner: m.Owner(), native: m.Native()}
			v.held.Add(1)
			m.Adopt(h, h.native)
		}
		if !m.IsControl() {
			v.mu.Lock()
			if v.receive != nil {
				d = v.receive(m)
			}
			if d.what == keep {
				v.received = append(v.received, m.Retain())
			}
			v.mu.Unlock()
		}
		if d.what == pass {
			recv(m)
		}
	})
}

// DeliverKept delivers the received messages that are kept, in order.
func (v *Van) DeliverKept() {
	v.mu.Lock()
	all := v.received
	v.received = nil
	v.mu.Unlock()
	for _, m := range all {
		v.up(m)
		m.Release()
	}
}

// Held is how many received data messages have holders, including those being delivered
// and those kept here.
func (v *Van) Held() int { return int(v.held.Load()) }

// hold owns a received message in the place of its transport.
type hold struct {
	v      *Van
	owner  van.Owner
	native unsafe.Pointer
}

// Free implements van.Owner.
func (h *hold) Free(m *van.Message) {
	h.v.held.Add(-1)
	m.Adopt(h.owner, h.native)
	h.owner.Free(m)
}
