package af

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Response answers the pulls of the batch: each gets the first of tensors with
// its key, whose size must be the pull's. A batch without pulls takes none. The
// tensors must stay as they are until they have left, which Release'd push tensors
// do by themselves; done, if not nil, is called once for each pull when its answer
// has left, from any goroutine; it must neither block nor send.
//
// Answers leave in the order of the calls. If a tensor lies on the node's device, they
// wait for the device's default stream, see ResponseOn.
//
// A missing key or a wrong size is an error that wraps van.ErrInvalid; then
// nothing was sent and the batch can still be answered. A second Response is
// ErrAnswered.
func (b Batch) Response(tensors []KeyTensor, done van.Completion) error {
	return b.ResponseOn(DefaultStream, tensors, done)
}

// ResponseOn is Response with tensors on the node's device that the work in stream
// makes. It does not wait for that work: a goroutine of the server does, and sends
// then. What fails there is logged, and done is told of answers that will not leave, as
// of those that have.
func (b Batch) ResponseOn(stream Stream, tensors []KeyTensor, done van.Completion) error {
	return b.respond(stream, len(tensors), func(i int) *Tensor {
		if kt := find(tensors, b.pulls[i].Key); kt != nil {
			return &kt.Val
		}
		return nil
	}, done)
}

// ResponseInOrder is Response with tensors in the order of the pulls, of which
// there must be as many.
func (b Batch) ResponseInOrder(tensors []Tensor, done van.Completion) error {
	return b.ResponseInOrderOn(DefaultStream, tensors, done)
}

// ResponseInOrderOn is ResponseOn with tensors in the order of the pulls.
func (b Batch) ResponseInOrderOn(stream Stream, tensors []Tensor, done van.Completion) error {
	return b.respond(stream, len(tensors), func(i int) *Tensor {
		if i < len(tensors) {
			return &tensors[i]
		}
		return nil
	}, done)
}

// respond answers each pull with what answer has for it.
func (b Batch) respond(stream Stream, n int, answer func(pull int) *Tensor, done van.Completion) error {
	s := b.s // all else may be another batch's by now
	if !b.state.CompareAndSwap(b.gen<<1, b.gen<<1|1) {
		return &van.Error{Op: "respond", Node: s.node.Name(), Err: ErrAnswered, Hint: "respond once to each batch"}
	}
	device, err := b.checkAnswer(n, answer)
	var event backend.Event
	if err == nil && device {
		event, err = s.line.mark(stream)
	}
	if err != nil {
		b.state.Store(b.gen << 1)
		return &van.Error{Op: "respond", Node: s.node.Name(), Peer: s.node.PeerName(b.instance), Err: err}
	}
	if event != nil || s.line.busy() {
		return b.enqueue(event, answer, done)
	}
	defer b.unref()
	if b.single && len(b.pulls) == 0 {
		return s.reply(b.ack, nil, nil, nil)
	}
	var errs []error
	for i := range b.pulls {
		p := &b.pulls[i]
		if err := s.reply(p.reply, &KeyTensor{Key: p.Key, Val: *answer(i)}, b.work, done); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// enqueue puts the answers into the line, which has the batch until they are sent.
func (b Batch) enqueue(event backend.Event, answer func(pull int) *Tensor, done van.Completion) error {
	s, w := b.s, b.work
	for i := range w.pulls {
		t := answer(i)
		t.mem.Retain()
		w.answers = append(w.answers, KeyTensor{Key: w.pulls[i].Key, Val: *t})
	}
	w.done = done
	if s.line.add(w, event) {
		return nil
	}
	w.forget()
	w.unref()
	return &van.Error{Op: "respond", Node: s.node.Name(), Err: van.ErrClosed}
}

// dead implements job: an answer is wanted until its worker is lost, which Send says.
func (b *work) dead() bool { return false }

// send implements job: it sends the answers and gives up the batch.
func (b *work) send(err error) {
	s := b.s
	sent := 0
	if err == nil && b.single && len(b.pulls) == 0 {
		err = s.reply(b.ack, nil, nil, nil)
	}
	for ; err == nil && sent < len(b.answers); sent++ {
		if err = s.reply(b.pulls[sent].reply, &b.answers[sent], b, b.done); err != nil {
			break
		}
	}
	if err != nil {
		if n, speak := s.node.Rarely("af: answers: " + logx.Kind(err)); speak {
			s.node.Log().Warn("answers did not leave", "worker", s.node.PeerName(b.instance), "answers", len(b.answers)-sent, "err", err, "so far", n)
		}
		for range b.answers[sent:] {
			if b.done != nil {
				b.done.Sent()
			}
		}
	}
	b.forget()
	b.unref()
}

// forget gives the answers back to their owners.
func (b *work) forget() {
	for i := range b.answers {
		b.answers[i].Val.mem.Release()
	}
	clear(b.answers)
	b.answers, b.done = b.answers[:0], nil
}

// checkAnswer refuses tensors that do not fit the pulls, or lie on a device that the
// node does not own. It tells whether one lies on the node's.
func (b *work) checkAnswer(n int, answer func(pull int) *Tensor) (device bool, err error) {
	for i := range b.pulls {
		p := &b.pulls[i]
		t := answer(i)
		switch {
		case t == nil:
			return false, fmt.Errorf("%w: no tensor with key %d among the %d given", van.ErrInvalid, p.Key, n)
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
	if len(b.pulls) < n {
		return false, fmt.Errorf("%w: %d tensors for %d pulls", van.ErrInvalid, n, len(b.pulls))
	}
	return device, nil
}

func find(tensors []KeyTensor, key uint64) *KeyTensor {
	for i := range tensors {
		if tensors[i].Key == key {
			return &tensors[i]
		}
	}
	return nil
}

// reply sends one answer: kt, or an empty one. b, if not nil, is held until the
// answer has left.
func (s *TensorServer) reply(r kv.ReplyTo, kt *KeyTensor, b *work, done van.Completion) error {
	a := answers.Get().(*answer)
	r.Fill(&a.msg)
	if kt == nil {
		err := s.node.Send(&a.msg)
		answers.Put(a)
		return err
	}
	binary.LittleEndian.PutUint64(a.key[:], kt.Key)
	kv.SetData(&a.msg, backend.Bytes(a.key[:]), kt.Val.mem, backend.Mem{}, van.TypeOther)
	b.refs.Add(1)
	a.msg.Done = b
	if done != nil {
		a.msg.Done = &sent{b, done}
	}
	err := s.node.Send(&a.msg)
	if err != nil && !failpoint.On("leak") {
		b.unref()
	}
	a.msg.Done = nil
	answers.Put(a)
	return err
}

// sent tells both the batch and the application.
type sent struct {
	b    *work
	done van.Completion
}

func (s *sent) Sent() {
	s.done.Sent()
	s.b.unref()
}

// acknowledge answers a push of a batch. Nobody waits for it before the batch is
// complete, so it may leave together with what follows.
func (s *TensorServer) acknowledge(msg *van.Message) error {
	a := answers.Get().(*answer)
	defer answers.Put(a)
	r := kv.ReplyOf(msg)
	r.Fill(&a.msg)
	a.msg.More = true
	return s.node.Send(&a.msg)
}

// answer is a message with room for its key frame.
type answer struct {
	msg van.Message
	key [8]byte
}

var answers = sync.Pool{New: func() any { return new(answer) }}
