package collective

// What comes from other ranks, and what follows when one fails or leaves.

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// receive handles a request. It runs on a goroutine of the transport.
func (c *Comm) receive(msg *van.Message) {
	if err := c.handle(msg); err != nil {
		if n, show := c.b.node.Rarely("collective: " + logx.Kind(err)); show {
			c.b.node.Log().Warn("dropped a request to a communicator", "communicator", c.b.id, "from", c.b.node.PeerName(msg.Sender), "err", err, "so far", n)
		}
	}
}

// handle handles a request, or says why it makes no sense.
func (c *Comm) handle(msg *van.Message) error {
	b := &c.b
	rank, member := slices.BinarySearch(b.ids, msg.Sender)
	v, err := verbOf(msg.Body)
	switch {
	case err != nil:
		return err
	case msg.Push || rank == b.self && member:
		return fmt.Errorf("%w: a push, or a request of this node itself", van.ErrMalformed)
	}
	q := request{rank: rank, reply: datamsg.ReplyTo(msg)}
	stranger := func() error {
		return fmt.Errorf("%w: %s is not among the ranks of communicator %d at %s", errMisfit, van.NodeName(msg.Sender), b.id, b.node.Name())
	}
	switch v {
	case verbHello:
		h, err := parseHello(msg.Body)
		switch {
		case err != nil:
			return err
		case !member:
			c.meeting.refute(&q, stranger())
		default:
			c.meeting.receiveHello(rank, q, h)
		}
	case verbAsk:
		if !member {
			b.refuse(&q, stranger())
			return nil
		}
		return c.flight.receiveAsk(&q, msg)
	case verbAbort:
		round, why, err := parseReason(msg.Body)
		if err != nil {
			return err
		}
		b.answer(&q, []byte{version, byte(verbDone)})
		if !member {
			return nil
		}
		err = c.meeting.receiveAbort(rank, abort{round, why})
		switch {
		case errors.Is(err, van.ErrClosed):
			c.leave(rank, err)
		case err != nil:
			c.fail(err)
		}
	default:
		return &van.FieldError{Field: "body verb", Value: v, Want: "a request"}
	}
	return nil
}

// receiveAsk answers a request for a part, or keeps it until this rank makes the call.
func (l *flight) receiveAsk(q *request, msg *van.Message) error {
	b := l.b
	want, epoch, err := parseAsk(msg.Body, len(b.ids))
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
	b.mu.Lock()
	switch {
	case b.closed:
		err = van.ErrClosed
	case epoch > b.epoch && b.joining: // this rank has not finished the round
		return l.keep(&a)
	case b.err != nil:
		err = b.err
	case epoch != b.epoch:
		err = errRebuild
	case int32(seq-l.next) >= 0:
		return l.keep(&a)
	}
	var o *op
	if err == nil {
		o = l.window[seq%maxInFlight]
		last := &l.asked[rank][seq%maxInFlight]
		again := last.epoch == epoch && last.seq == seq
		switch {
		case o == nil || o.seq != seq:
			b.mu.Unlock()
			if again {
				return fmt.Errorf("%w: asked twice for call %d", van.ErrMalformed, seq)
			}
			// It has ended, so all who have a part in it have taken theirs.
			l.mismatch(q, want.kind, fmt.Errorf("%w: call %d: %s there, here another one, which has ended", ErrMismatch, seq, want))
			return nil
		case !o.begun:
			return l.keep(&a)
		case !last.kept:
			last.epoch, last.seq = epoch, seq
		}
		o.refs++ // while it is answered
	}
	b.mu.Unlock()
	if err != nil {
		b.refuse(q, err)
		return nil
	}
	o.serve(&a)
	l.unref(o)
	return nil
}

// fail makes the communicator unusable until Rebuild: all calls in flight end with err, and
// the other ranks are told. Only the first error counts.
func (c *Comm) fail(err error) {
	b, l := &c.b, &c.flight
	b.mu.Lock()
	if b.err != nil {
		b.mu.Unlock()
		return
	}
	b.err = err
	var ops []*op
	for i, o := range l.window {
		if o != nil {
			o.refs++
			ops = append(ops, o)
			l.window[i] = nil
		}
	}
	refused := l.takeAsked(func(a *ask) bool { return a.epoch <= b.epoch })
	c.meeting.telling.Add(1)
	round, tenants := c.meeting.round, c.tenants.all
	c.tenants.all = nil
	b.mu.Unlock()
	for _, t := range tenants {
		t.changed(-1, err)
	}
	for _, o := range ops {
		o.end(err)
		l.unref(o)
	}
	go func() { // this may be a goroutine that must not send
		defer c.meeting.telling.Done()
		for _, a := range refused {
			b.refuse(&a.request, err)
		}
		c.meeting.tell(round, err)
	}()
}

// leave notes that a rank has closed its end. Calls in flight that need it fail, and so do all
// later ones.
func (c *Comm) leave(rank int, err error) {
	b := &c.b
	b.mu.Lock()
	b.left = cmp.Or(b.left, err)
	needed := false
	for _, o := range c.flight.window {
		needed = needed || o != nil && o.needs(rank)
	}
	tenants := c.tenants.all
	b.mu.Unlock()
	for _, t := range tenants {
		t.changed(rank, err)
	}
	if needed {
		c.fail(err)
	}
}
