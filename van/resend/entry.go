package resend

// A kept message, and the signature by which an acknowledgement names it.

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// key identifies a kept message: the peer's id, of which the signature has only 8 bits, and
// the signature that the peer will acknowledge.
type key struct {
	peer int
	sig  uint64
}

// entry is a kept message. Its frames are the caller's, except short ones.
type entry struct {
	key      key
	from     uint32      // the incarnations that the message carries
	to       uint32      // likewise
	barrier  van.Command // the kind of barrier that the message requests for customer; EmptyCmd: the message is no request
	customer int32
	done     van.Completion // the caller's
	refs     atomic.Int32   // one while the table keeps the message, one for each Send that the wrapped van has not completed
	start    time.Time

	sending sync.Mutex // held during inner.Send, which writes to msg
	msg     van.Message
	dropped bool                               // it must not be sent: its memory is the caller's again
	short   [van.MaxFrames][van.CopyBelow]byte // frames that Send copies
	probe   bool                               // it is sent until it is acknowledged; see sendProbe

	// Under table.mu:
	inTable    bool
	queued     bool // it is in the list, and not behind another entry with its key
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
	e.msg.ReleaseClone()
	e.msg.Reset()
	entries.Put(e)
	if done != nil {
		done.Sent()
	}
}

// outlasts reports whether e is a probe that is kept although it could not be sent.
func (e *entry) outlasts(err error) bool {
	return e.probe && !errors.Is(err, van.ErrUnknownPeer) && !errors.Is(err, van.ErrClosed)
}

// isProbe reports whether m, between nodes a and b, is a probe of sendProbe.
func isProbe(m *van.Message, a, b int) bool {
	return m.Control.Cmd == van.Heartbeat && len(m.Control.Nodes) == 0 && len(m.Body) == 0 && van.RoleOf(a) != van.Scheduler && van.RoleOf(b) != van.Scheduler
}

// tracked reports whether a message is acknowledged. A control message without a
// timestamp is not: its signature would not identify it.
func tracked(m *van.Message) bool {
	switch m.Control.Cmd {
	case van.Ack, van.Terminate:
		return false
	case van.EmptyCmd:
		return true
	}
	return m.Timestamp != van.Empty
}

// signature identifies a message in acknowledgements; see the package documentation.
func signature(m *van.Meta, sender, receiver int) uint64 {
	low := m.Timestamp << 1
	if m.Request {
		low |= 1
	}
	return uint64(uint16(m.AppID))<<48 | uint64(uint8(sender))<<40 | uint64(uint8(receiver))<<32 | uint64(int64(low))
}
