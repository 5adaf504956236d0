package collective

// What comes from other ranks, and its answers.

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// request is one of another rank's that has not been answered.
type request struct {
	rank  int
	reply datamsg.Reply
}

// ask is a request for a part.
type ask struct {
	request
	epoch uint64
	seq   uint32
	call  call
	bytes int  // wanted
	kept  bool // it waits for this rank's call
}

// receive handles a request. It runs on a goroutine of the transport.
func (c *Comm) receive(msg *van.Message) {
	if err := c.handle(msg); err != nil {
		if n, show := c.node.Rarely("collective: " + logx.Kind(err)); show {
			c.node.Log().Warn("dropped a request to a communicator", "communicator", c.id, "from", c.node.PeerName(msg.Sender), "err", err, "so far", n)
		}
	}
}

// handle handles a request, or says why it makes no sense.
func (c *Comm) handle(msg *van.Message) error {
	rank, member := slices.BinarySearch(c.ids, msg.Sender)
	v, err := verbOf(msg.Body)
	switch {
	case err != nil:
		return err
	case msg.Push || rank == c.self && member:
		return fmt.Errorf("%w: a push, or a request of this node itself", van.ErrMalformed)
	}
	q := request{rank: rank, reply: datamsg.ReplyTo(msg)}
	stranger := func() error {
		return fmt.Errorf("%w: %s is not among the ranks of communicator %d at %s", errMisfit, van.NodeName(msg.Sender), c.id, c.node.Name())
	}
	switch v {
	case verbHello:
		h, err := parseHello(msg.Body)
		switch {
		case err != nil:
			return err
		case !member:
			c.refute(&q, stranger())
		default:
			c.receiveHello(rank, q, h)
		}
	case verbAsk:
		if !member {
			c.refuse(&q, stranger())
			return nil
		}
		return c.receiveAsk(&q, msg)
	case verbAbort:
		round, why, err := parseReason(msg.Body)
		if err != nil {
			return err
		}
		c.answer(&q, []byte{version, byte(verbDone)})
		if member {
			c.receiveAbort(rank, abort{round, why})
		}
	default:
		return &van.FieldError{Field: "body verb", Value: v, Want: "a request"}
	}
	return nil
}

// receiveAbort handles that a rank has given the communicator up. What it says of a round that is
// over, or of another communicator before this one, is too late.
func (c *Comm) receiveAbort(rank int, a abort) {
	if errors.Is(a.why, errMisfit) {
		c.mu.Lock()
		refuted := c.refuted
		ours := a.round == c.round
		c.mu.Unlock()
		if ours && refuted != nil {
			refuted(&van.Error{Op: "communicator", Node: c.node.Name(), Peer: c.name(rank), Err: a.why})
		}
		return
	}
	c.mu.Lock()
	p := &c.ranks[rank]
	p.aborted = a
	told := p.told
	p.told = nil
	ours := p.gaveUp() != nil && c.err == nil
	c.mu.Unlock()
	err := &van.Error{Op: "communicator", Node: c.node.Name(), Peer: c.name(rank), Err: a.why}
	if told != nil {
		c.customer.Abort(&told.Request, err) // it does not answer any more
	}
	switch {
	case ours && errors.Is(a.why, van.ErrClosed):
		c.leave(rank, err)
	case ours:
		c.fail(err)
	}
}

// receiveAsk answers a request for a part, or keeps it until this rank makes the call.
func (c *Comm) receiveAsk(q *request, msg *van.Message) error {
	want, epoch, err := parseAsk(msg.Body, len(c.ids))
	if err != nil {
		return err
	}
	seq, rank := parseKey(msg.Key)
	switch {
	case rank != q.rank:
		return &van.FieldError{Field: "key", Value: rank, Want: fmt.Sprintf("the sender's rank, %d", q.rank)}
	case msg.ValLen < 0:
		return &van.FieldError{Field: "val_len", Value: msg.ValLen, Want: "0 or more"}
	}
	a := ask{request: *q, epoch: epoch, seq: seq, call: want, bytes: int(msg.ValLen)}
	c.mu.Lock()
	switch {
	case c.closed:
		err = van.ErrClosed
	case epoch > c.epoch && c.joining: // this rank has not finished the round
		return c.keep(&a)
	case c.err != nil:
		err = c.err
	case epoch != c.epoch:
		err = errRebuild
	case int32(seq-c.next) >= 0:
		return c.keep(&a)
	}
	var o *op
	if err == nil {
		o = c.window[seq%maxInFlight]
		last := &c.asked[rank][seq%maxInFlight]
		again := last.epoch == epoch && last.seq == seq
		switch {
		case o == nil || o.seq != seq:
			c.mu.Unlock()
			if again {
				return fmt.Errorf("%w: asked twice for call %d", van.ErrMalformed, seq)
			}
			// It has ended, so all who have a part in it have taken theirs.
			c.mismatch(q, want.kind, fmt.Errorf("%w: call %d: %s there, here another one, which has ended", ErrMismatch, seq, want))
			return nil
		case !o.begun:
			return c.keep(&a)
		case !last.kept:
			last.epoch, last.seq = epoch, seq
		}
		o.refs++ // while it is answered
	}
	c.mu.Unlock()
	if err != nil {
		c.refuse(q, err)
		return nil
	}
	o.serve(&a)
	c.unref(o)
	return nil
}

// keep keeps a until this rank makes the call. mu is held, and unlocked.
func (c *Comm) keep(a *ask) error {
	old := &c.asked[a.rank][a.seq%maxInFlight]
	same, seq := old.kept && old.epoch == a.epoch && old.reply.Epoch == a.reply.Epoch, old.seq
	if !same {
		*old = *a
		old.kept = true
	}
	c.mu.Unlock()
	switch {
	case same && seq == a.seq:
		return fmt.Errorf("%w: asked twice for call %d", van.ErrMalformed, a.seq)
	case same:
		c.mismatch(&a.request, a.call.kind, fmt.Errorf("%w: asked for call %d and for call %d, no more than %d are in flight at once", ErrMismatch, a.seq, seq, maxInFlight))
	}
	return nil
}

// mismatch refuses a request for a part that does not go with the calls of this rank, of which
// no later one would.
func (c *Comm) mismatch(q *request, k kind, err error) {
	c.fail(&van.Error{Op: kinds[k], Node: c.node.Name(), Peer: c.name(q.rank), Err: err})
	c.refuse(q, fmt.Errorf("rank %d: %w", c.self, err))
}

// sendRequest sends a request without data.
func (c *Comm) sendRequest(id int, ts int32, body []byte) error {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Timestamp = id, true, ts
	m.AppID, m.CustomerID = int32(c.customer.AppID()), int32(c.customer.ID())
	m.Body = body
	return c.node.Send(m)
}

// sendSoon is sendRequest to a rank whose connection may not have been made yet.
func (c *Comm) sendSoon(id int, ts int32, body []byte) error {
	for end := time.Now().Add(tellLimit); ; {
		err := c.sendRequest(id, ts, body)
		if !errors.Is(err, van.ErrUnknownPeer) || time.Now().After(end) {
			return err
		}
		<-time.After(helloPause)
	}
}

// answer answers a request with a body only. Who cannot be reached is lost.
func (c *Comm) answer(q *request, body []byte) {
	m := &van.Message{}
	q.reply.Fill(m)
	m.Body = body
	if err := c.node.Send(m); err != nil {
		if n, show := c.node.Rarely("collective answer: " + logx.Kind(err)); show {
			c.node.Log().Info("could not answer a rank", "communicator", c.id, "rank", q.rank, "err", err, "so far", n)
		}
	}
}

// refuse answers a request with the reason why it gets nothing else.
func (c *Comm) refuse(q *request, why error) {
	c.answer(q, appendReason(nil, verbRefused, 0, why))
}
