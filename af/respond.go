package af

// Answers to batches.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Respond answers the pulls of the batch: tensor i answers pull i, independent of its key, and must have the pull's
// size. With ByKey, each pull gets the first tensor of outs with its key. A batch without pulls takes no tensors.
// Options are ByKey, OnSent and a Stream.
//
// The tensors must not change until they have been sent; OnSent reports that. Push tensors of the batch may be
// answers: they remain valid until then.
//
// Answers are sent in the order of the calls. If a tensor is on the node's device, its answer waits for work on that
// device, see Stream: a goroutine of the server waits, and then sends. Errors of that goroutine are logged.
//
// A missing key or a wrong size is an error that wraps van.ErrInvalid; nothing was sent then, and the batch can still
// be answered. A second Respond returns postoffice.ErrAnswered.
func (b Batch) Respond(outs []KeyTensor, opts ...RespondOption) error {
	s := b.w.s // other fields of b.w may belong to another batch
	o, err := with(options{}, opts)
	if err != nil {
		return &van.Error{Op: "respond", Node: s.node.Name(), Err: err}
	}
	if !b.w.state.CompareAndSwap(b.gen<<1, b.gen<<1|1) {
		return &van.Error{Op: "respond", Node: s.node.Name(), Err: cluster.ErrAnswered, Hint: "respond once to each batch"}
	}
	var device bool
	device, err = b.w.checkAnswer(outs, o.order)
	var event backend.Event
	if err == nil && device {
		event, err = s.queue.RecordEvent(uintptr(o.stream))
	}
	if err != nil {
		b.w.state.Store(b.gen << 1)
		return &van.Error{Op: "respond", Node: s.node.Name(), Peer: s.node.PeerName(b.w.instance), Err: err}
	}
	if event != nil || s.queue.Busy() {
		return b.enqueue(event, outs, o)
	}
	defer b.w.end()
	if b.w.single && len(b.w.pulls) == 0 {
		return s.acknowledge(b.w.ack, false)
	}
	var errs []error
	for i := range b.w.pulls {
		p := &b.w.pulls[i]
		if err := s.reply(p.reply, &KeyTensor{Key: p.Key, Val: *b.w.answer(i, outs, o.order)}, b.w, o.done, i > len(errs)); err != nil {
			errs = append(errs, err)
			if o.done != nil {
				o.done.Sent()
			}
		}
	}
	return errors.Join(errs...)
}

// Refuse ends the batch without an answer: the worker's call fails at once, with van.ErrRequestRefused and about 900
// bytes of the text of why. The error also matches van.ErrInvalid or van.ErrQueueFull if why does. One refusal fails
// a call to several servers. A C++ worker cannot be notified; it waits for its limit, and this server logs that.
//
// A batch of several pushes without a pull is acknowledged as it arrives. For such a batch, and for a batch that was
// answered or refused before, Refuse returns postoffice.ErrAnswered.
func (b Batch) Refuse(why error) error {
	s := b.w.s
	no := cluster.Declined(why)
	if why == nil {
		return &van.Error{Op: "refuse", Node: s.node.Name(), Err: no}
	}
	if !b.w.state.CompareAndSwap(b.gen<<1, b.gen<<1|1) {
		return &van.Error{Op: "refuse", Node: s.node.Name(), Err: cluster.ErrAnswered}
	}
	w := b.w
	defer w.end()
	if !w.single && len(w.pulls) == 0 {
		return &van.Error{Op: "refuse", Node: s.node.Name(), Peer: s.node.PeerName(w.instance), Err: cluster.ErrAnswered,
			Hint: "pushes without a pull are acknowledged as they arrive"}
	}
	s.node.Refuse(w.instance, w.epoch, int32(s.app), w.customer, w.first, no)
	return nil
}

// end records that the batch has its answer, and releases the first reference.
func (b *work) end() {
	b.s.inbound.Leave(&b.accepted)
	b.unref()
}

// answer returns the tensor of outs for pull i, or nil.
func (b *work) answer(i int, outs []KeyTensor, order Order) *Tensor {
	if order == ByKey {
		for j := range outs {
			if outs[j].Key == b.pulls[i].Key {
				return &outs[j].Val
			}
		}
		return nil
	}
	if i < len(outs) {
		return &outs[i].Val
	}
	return nil
}

// enqueue puts the answers into the queue, which owns the batch until they are sent.
func (b Batch) enqueue(event backend.Event, outs []KeyTensor, o options) error {
	s, w := b.w.s, b.w
	for i := range w.pulls {
		t := b.w.answer(i, outs, o.order)
		t.mem.Retain()
		w.answers = append(w.answers, KeyTensor{Key: w.pulls[i].Key, Val: *t})
	}
	w.done = o.done
	if s.queue.Add(w, event) {
		return nil
	}
	for range w.answers {
		if o.done != nil {
			o.done.Sent()
		}
	}
	w.forget()
	w.end()
	return &van.Error{Op: "respond", Node: s.node.Name(), Err: van.ErrClosed}
}

// Canceled implements streamqueue.Entry: an answer is sent unless its worker is lost, which Send reports.
func (b *work) Canceled() bool { return false }

// SendNow implements streamqueue.Entry: it sends the answers and releases the batch.
func (b *work) SendNow(err error) {
	s := b.s
	sent := 0
	if err == nil && b.single && len(b.pulls) == 0 {
		err = s.acknowledge(b.ack, false)
	}
	for ; err == nil && sent < len(b.answers); sent++ {
		if err = s.reply(b.pulls[sent].reply, &b.answers[sent], b, b.done, sent > 0); err != nil {
			break
		}
	}
	if err != nil {
		s.node.Rarely("af: answers: "+logx.Kind(err)).Warn("answers did not leave",
			"worker", s.node.PeerName(b.instance), "answers", len(b.answers)-sent, "err", err)
		for range b.answers[sent:] {
			if b.done != nil {
				b.done.Sent()
			}
		}
	}
	b.forget()
	b.end()
}

// forget releases the answers.
func (b *work) forget() {
	for i := range b.answers {
		b.answers[i].Val.mem.Release()
	}
	clear(b.answers)
	b.answers, b.done = b.answers[:0], nil
}

// checkAnswer returns an error for tensors that do not fit the pulls, or are on a device that the node does not own.
// It reports whether one is on the node's device.
func (b *work) checkAnswer(outs []KeyTensor, order Order) (device bool, err error) {
	for i := range b.pulls {
		p := &b.pulls[i]
		t := b.answer(i, outs, order)
		switch {
		case t == nil && order != ByKey:
			return false, fmt.Errorf("%w: %d tensors for %d pulls", van.ErrInvalid, len(outs), len(b.pulls))
		case t == nil:
			return false, fmt.Errorf("%w: no tensor with key %d among the %d given", van.ErrInvalid, p.Key, len(outs))
		case t.Len() != p.Len:
			return false, fmt.Errorf("%w: tensor %s for key %d has %d bytes, the worker's pull tensor %s%v has %d", van.ErrInvalid,
				t.String(), p.Key, t.Len(), p.Dtype, p.Shape, p.Len)
		case !t.mem.OnHost():
			device = true
			if err := backend.CheckDevice(b.s.node.Backend(), t.mem); err != nil {
				return false, fmt.Errorf("%w: answer for key %d: %w", van.ErrInvalid, p.Key, err)
			}
		}
	}
	if len(b.pulls) < len(outs) {
		return false, fmt.Errorf("%w: %d tensors for %d pulls", van.ErrInvalid, len(outs), len(b.pulls))
	}
	return device, nil
}

// reply sends one answer, kt. b is retained until the answer has been sent. more means that the transport has taken
// another answer to the same batch.
func (s *Server) reply(r datamsg.Reply, kt *KeyTensor, b *work, done van.Completion, more bool) error {
	a := answers.Get().(*answer)
	r.Fill(&a.msg)
	a.msg.Continues = more
	binary.LittleEndian.PutUint64(a.key[:], kt.Key)
	datamsg.SetData(&a.msg, backend.Bytes(a.key[:]), kt.Val.mem, backend.Mem{}, van.TypeOther)
	b.refs.Add(1)
	a.msg.Done = b
	var both *sent
	if done != nil {
		both = sents.Get().(*sent)
		both.b, both.done = b, done
		a.msg.Done = both
	}
	err := s.node.Send(&a.msg)
	if err != nil && !failpoint.On("leak") {
		b.unref()
		if both != nil {
			both.put()
		}
	}
	a.msg.Done = nil
	answers.Put(a)
	return err
}

// sent notifies both the batch and the application.
type sent struct {
	b    *work
	done van.Completion
}

// Sent is called when an answer has left.
func (s *sent) Sent() {
	b, done := s.b, s.done
	s.put()
	done.Sent()
	b.unref()
}

var sents = sync.Pool{New: func() any { return new(sent) }}

func (s *sent) put() {
	s.b, s.done = nil, nil
	sents.Put(s)
}

// acknowledge answers a push. The worker needs acknowledgements of a batch only when the batch is complete, so with
// more it may be sent together with later messages.
func (s *Server) acknowledge(r datamsg.Reply, more bool) error {
	a := answers.Get().(*answer)
	defer answers.Put(a)
	r.Fill(&a.msg)
	a.msg.More = more
	return s.node.Send(&a.msg)
}

// answer is a message with space for its key frame.
type answer struct {
	msg van.Message
	key [8]byte
}

var answers = sync.Pool{New: func() any { return new(answer) }}
