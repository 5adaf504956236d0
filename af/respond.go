package af

// Answers to batches.

import (
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
// If the transport does not take the answers, for example with van.ErrQueueFull, the worker's call fails at once. Its error
// matches neither van.ErrRequestRefused nor van.ErrQueueFull, since the batch was processed. The batch counts as answered.
//
// A missing key or a wrong size is an error that wraps van.ErrInvalid; nothing was sent then, and the batch can still
// be answered. A second Respond returns postoffice.ErrAnswered. If the worker has canceled the batch, see Batch.Wanted,
// Respond sends the answer all the same and returns nil; the worker drops it.
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
	if len(b.w.pulls) > 0 {
		err = s.reply(b.w, outs, o.order, o.done)
	} else if b.w.single {
		err = s.acknowledge(b.w.ack)
	}
	if err != nil {
		b.w.failed(err)
	}
	return err
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
	w.refuse(no)
	return nil
}

// refuse notifies the worker that the batch gets no answer.
func (b *batchState) refuse(why error) {
	b.s.node.Refuse(b.instance, b.epoch, int32(b.s.app), b.customer, b.first, why)
}

// failed notifies the worker that the answers were not sent, unless the server or its node is closed.
func (b *batchState) failed(err error) {
	if !errors.Is(err, van.ErrClosed) {
		b.refuse(cluster.Unanswered(err))
	}
}

// end records that the batch has its answer, and releases the first reference.
func (b *batchState) end() {
	b.s.inbound.Leave(&b.accepted)
	b.unref()
}

// answer returns the tensor of outs for pull i, or nil.
func (b *batchState) answer(i int, outs []KeyTensor, order Order) *Tensor {
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
	w.unsent(o.done)
	w.releaseAnswers()
	w.end()
	return &van.Error{Op: "respond", Node: s.node.Name(), Err: van.ErrClosed}
}

// Canceled implements streamqueue.Entry: an answer is sent unless its worker is lost, which Send reports.
func (b *batchState) Canceled() bool { return false }

// SendNow implements streamqueue.Entry: it sends the answers and releases the batch.
func (b *batchState) SendNow(err error) {
	s := b.s
	switch {
	case err != nil:
		b.unsent(b.done)
	case len(b.pulls) > 0:
		err = s.reply(b, b.answers, 0, b.done)
	case b.single:
		err = s.acknowledge(b.ack)
	}
	if err != nil {
		s.node.Rarely("af: answers: "+logx.Kind(err)).Warn("answers were not sent",
			"worker", s.node.PeerName(b.instance), "answers", len(b.answers), "err", err)
		b.failed(err)
	}
	b.releaseAnswers()
	b.end()
}

// releaseAnswers releases the answers.
func (b *batchState) releaseAnswers() {
	for i := range b.answers {
		b.answers[i].Val.mem.Release()
	}
	clear(b.answers)
	b.answers, b.done = b.answers[:0], nil
}

// checkAnswer returns an error for tensors that do not fit the pulls, or are on a device that the node does not own.
// It reports whether one is on the node's device.
func (b *batchState) checkAnswer(outs []KeyTensor, order Order) (device bool, err error) {
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
		case b.outs > 0 && b.isOutOfOther(i, t.mem):
			return false, fmt.Errorf("%w: tensor %s for key %d lies in the Out tensor of another pull", van.ErrInvalid, t.String(), p.Key)
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

// isOutOfOther reports whether mem lies in the worker's tensor of a pull other than i: the answer to that pull would change it.
func (b *batchState) isOutOfOther(i int, mem backend.Mem) bool {
	for k := range b.pulls {
		if k != i && b.pulls[k].Out.mem.Overlaps(mem) {
			return true
		}
	}
	return false
}

// unsent calls done, which may be nil, once for each pull, since no answer is sent.
func (b *batchState) unsent(done van.Completion) {
	for range b.pulls {
		if done != nil {
			done.Sent()
		}
	}
}

// reply sends the answers. b is retained until they have been sent.
func (s *Server) reply(b *batchState, outs []KeyTensor, order Order, done van.Completion) error {
	m := messages.Get().(*van.Message)
	defer messages.Put(m)
	m.Reset()
	m.Receiver, m.ProcessEpoch = b.instance, b.epoch
	m.AppID, m.CustomerID, m.Timestamp, m.RequestTrace = int32(s.app), b.customer, b.pulls[0].part.Timestamp, b.trace
	for i := range b.pulls {
		p := b.pulls[i].part
		p.Vals = b.answer(i, outs, order).mem
		if out := b.pulls[i].Out.mem; out.Addr() == p.Vals.Addr() && out.Len() == p.Vals.Len() {
			p.Vals = out // also if the caller has made a tensor of its own of Out
		}
		m.Parts = append(m.Parts, p)
	}
	m.Key, m.ValLen = m.Parts[0].Key, int32(m.Parts[0].Len)
	m.WriteDirectory()
	b.refs.Add(1)
	m.Done = b
	var both *sent
	if done != nil {
		both = sents.Get().(*sent)
		both.b, both.done, both.n = b, done, len(b.pulls)
		m.Done = both
	}
	err := s.node.Send(m)
	if err != nil && !failpoint.On("leak") {
		b.unsent(done)
		b.unref()
		if both != nil {
			both.put()
		}
	}
	m.Reset()
	return err
}

// sent notifies both the batch and the application, once for each of n pulls.
type sent struct {
	b    *batchState
	done van.Completion
	n    int
}

// Sent is called when the answers have been sent.
func (s *sent) Sent() {
	b, done, n := s.b, s.done, s.n
	s.put()
	for range n {
		done.Sent()
	}
	b.unref()
}

var sents = sync.Pool{New: func() any { return new(sent) }}

func (s *sent) put() {
	s.b, s.done = nil, nil
	sents.Put(s)
}

// acknowledge acknowledges a push, or all pushes of a batch that was received as one message.
func (s *Server) acknowledge(r datamsg.Reply) error {
	m := messages.Get().(*van.Message)
	defer messages.Put(m)
	r.Fill(m)
	m.IsTensor = r.Head == van.WholeBatch
	return s.node.Send(m)
}

var messages = sync.Pool{New: func() any { return new(van.Message) }}
