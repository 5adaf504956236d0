package zmq

// Sending: messages within the send budget.

import (
	"errors"
	"fmt"
	"sync"
	"syscall"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// outgoing is the sending side of a van. libzmq gets a copy of each message, so the caller may reuse its memory after Send. An account
// for each peer counts the bytes that libzmq has not written. When the account reaches the budget, Send refuses messages. A batch
// counts as one: C++ nodes get all messages that stand for it.
type outgoing struct {
	n        *shared
	dial     func(id int) (*conn, error)
	router   *socket // set by Bind
	budget   int64   // STEPAF_SEND_BUDGET; 0: no limit
	refusals logx.Sparse
}

// opened returns c or, if msg needs a DEALER and c has none, the peer's connection after its DEALER has been opened.
func (o *outgoing) opened(msg *van.Message, c *conn) (*conn, error) {
	if c == nil || c.sock != nil || c.overRouter(msg) {
		return c, nil
	}
	c, err := o.dial(msg.Receiver)
	switch {
	case err == nil, errors.Is(err, van.ErrClosed):
		return c, err
	case limits.Hint(err) != "": // The limit is this process's or host's; the peer is not lost.
		return nil, err
	}
	return nil, fmt.Errorf("%w: %w", van.ErrPeerLost, err)
}

// controlReserve is the number of bytes beyond the send budget that control messages may use.
const controlReserve = 16 << 20

// Send hands msg to the socket that the protocol prescribes for it.
func (o *outgoing) Send(msg *van.Message) error {
	c, err := o.opened(msg, (*o.n.peers.Load())[msg.Receiver])
	if err != nil {
		return o.sendError(msg, nil, err)
	}
	err = o.sendToPeer(msg, c)
	if errors.Is(err, van.ErrClosed) {
		// The connection may have been replaced in between.
		o.n.mu.Lock()
		now := (*o.n.peers.Load())[msg.Receiver]
		o.n.mu.Unlock()
		switch {
		case now == nil || o.n.closed.Load():
		case now != c:
			return o.Send(msg)
		default: // see open
			return o.sendError(msg, c, fmt.Errorf("%w: another process is at its address", van.ErrPeerLost))
		}
	}
	return err
}

// flat is a batch as one frame of values.
type flat struct {
	msg van.Message
	buf []byte
}

var flats = sync.Pool{New: func() any { return new(flat) }}

// keepFlat is the capacity of an idle flat's buffer.
const keepFlat = 1 << 20

// sendToPeer sends msg in the form that the node of c understands.
func (o *outgoing) sendToPeer(msg *van.Message, c *conn) error {
	switch {
	case !msg.IsBatch() || c == nil:
		return o.send(msg, c, false)
	case c.incarnation == 0:
		accepted := false
		return msg.Expand(func(m *van.Message) error {
			err := o.send(m, c, accepted)
			accepted = true
			return err
		})
	}
	if err := msg.CheckOnHost(); err != nil {
		return o.sendError(msg, c, err)
	}
	x := flats.Get().(*flat)
	x.msg.Reset()
	x.msg.CopyFrom(&msg.Meta)
	x.msg.Receiver, x.msg.Parts, x.msg.Done = msg.Receiver, msg.Parts, msg.Done
	x.buf = x.msg.Pack(x.buf)
	err := o.send(&x.msg, c, false)
	msg.RequestTrace.PostSend, msg.ResponseTrace.PostSend = x.msg.RequestTrace.PostSend, x.msg.ResponseTrace.PostSend
	if x.msg.Reset(); cap(x.buf) > keepFlat {
		x.buf = nil
	}
	flats.Put(x)
	return err
}

// send sends one message. continues says that c has accepted an earlier message of the same batch: the budget then does not apply.
func (o *outgoing) send(msg *van.Message, c *conn, continues bool) error {
	if c == nil {
		if o.n.closed.Load() {
			return o.sendError(msg, nil, van.ErrClosed)
		}
		return o.sendError(msg, nil, van.ErrUnknownPeer)
	}
	if msg.Request || msg.IsControl() {
		msg.RequestTrace.PostSend = clock.Now()
	} else {
		msg.ResponseTrace.PostSend = clock.Now()
	}
	if msg.Control.Cmd == van.AddNode && o.n.proofs.warns != nil && msg.Receiver == van.SchedulerID {
		o.n.proveRecord(&msg.Meta)
	}
	var buf [1024]byte
	meta, n := buf[:], msg.EncodedLen()
	if n > len(buf) {
		meta = make([]byte, n)
	}
	meta = meta[:n]
	if err := msg.EncodeTo(meta); err != nil {
		return o.sendError(msg, c, err)
	}
	if err := msg.CheckOnHost(); err != nil {
		return o.sendError(msg, c, err)
	}
	size := msg.PayloadLen()
	to := route{acct: c.acct, limit: o.budget}
	switch {
	case msg.IsControl():
		if o.budget > 0 {
			to.limit += controlReserve
		}
	case continues:
		to.limit = 0
	}
	sock := c.sock
	if c.overRouter(msg) {
		who := c.who.Load()
		sock, to.dest, to.self = o.router, who.dest, who.self
	}
	if err := sock.send(&to, meta, msg); err != nil {
		if errors.Is(err, van.ErrQueueFull) {
			err = o.overBudget(c)
		}
		return o.sendError(msg, c, err)
	}
	o.n.stats.sent(len(meta) + size)
	return nil
}

// sendError adds the peer, the message and the cause to err, the error of a send.
func (o *outgoing) sendError(msg *van.Message, c *conn, err error) error {
	e := &van.Error{Op: "send", Node: van.NodeName(int(o.n.id.Load())), Peer: van.NodeName(msg.Receiver), Detail: msg.Meta.String()}
	if c != nil {
		e.Peer += " at " + c.peer.Addr()
	}
	switch {
	case errors.Is(err, syscall.EHOSTUNREACH):
		e.Err = fmt.Errorf("%w: it is not connected to this node", van.ErrPeerLost)
	case errors.Is(err, syscall.EAGAIN) && c != nil && c.redials.Load() > 0: // libzmq keeps no queue for it, see redial
		e.Err = fmt.Errorf("%w: %w", van.ErrPeerLost, van.ErrUnauthenticated)
	case errors.Is(err, syscall.EAGAIN):
		e.Err = van.ErrQueueFull
	case errors.Is(err, syscall.Errno(zmq4.ETERM)), errors.Is(err, syscall.ENOTSOCK):
		e.Err = van.ErrClosed
	default:
		e.Err = err
	}
	return e
}

// overBudget returns the error for a message to c that was refused because of the budget.
func (o *outgoing) overBudget(c *conn) error {
	unsent := c.acct.unsent()
	o.n.stats.refused.Add(1)
	if n, speak := o.refusals.Next(); speak {
		o.n.log.Warn("a message is refused: its receiver does not take what was sent before", "peer", van.NodeName(c.who.Load().id), "addr", c.peer.Addr(),
			"bytes unsent", unsent, "limit", fmt.Sprintf("%d (STEPAF_SEND_BUDGET)", o.budget), "refused so far", n)
	}
	return fmt.Errorf("%w: it has not taken %d bytes yet, want less than %d (STEPAF_SEND_BUDGET)", van.ErrQueueFull, unsent, o.budget)
}
