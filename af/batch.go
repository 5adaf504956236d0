package af

// Batch: a received batch as handlers of a server see it, and its state.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Pull is one request for a tensor.
type Pull struct {
	Key   uint64
	Len   int // bytes that the answer must have
	Dtype Dtype
	Shape []int64 // of the worker's pull tensor

	// Out is the worker's own pull tensor if this server maps it, see AllocShared, and an empty tensor otherwise. An answer
	// in Out is not copied. The handler may write to Out until it calls Respond or Refuse, or Batch.Wanted is false. Later
	// writes are lost or, after Respond, change the worker's tensor.
	Out Tensor

	part van.Part // of the request, without memory
}

// Batch is a handle of the data that one worker sent in one call: its push tensors, and the pulls to be answered. It
// is a small value. Push tensors are views of received messages or registered buffers. They and the lists belong to the
// handler until it calls Respond or Refuse or, with Retain, until the matching Release. Push tensors that are answers stay
// valid until they have been sent. A registered buffer is overwritten by the next push of its key.
//
// With STEPAF_SHM_MAP a push tensor may be the worker's own memory, see AllocShared. The handler must not write to it then. It
// changes when the batch was answered, also after Retain, and when the batch is not wanted any more.
type Batch struct {
	w   *batchState
	gen uint64
}

// batchState is the state of a Batch; it is reused.
type batchState struct {
	s        *Server
	x        *sender // the worker's assembler
	instance int     // node id of the worker's instance
	epoch    uint32  // of the worker's process, see van.Message
	customer int32   // the worker's
	single   bool
	first    int32 // timestamps
	last     int32
	trace    van.Trace // of the request
	pushes   []KeyTensor
	pulls    []Pull
	msgs     []*van.Message
	bytes    int           // of the values in msgs
	outs     int           // pulls with an Out tensor
	ack      datamsg.Reply // of a single push, or of all pushes of a batch that was received as one message
	state    atomic.Uint64 // generation<<1 | answered
	refs     atomic.Int32
	accepted cluster.Accepted

	answers []KeyTensor // to the pulls, while the batch is in the server's queue
	done    van.Completion
}

// Worker is the group rank of the worker.
func (b Batch) Worker() int { return van.RankOf(b.w.instance) / b.w.s.node.Config().GroupSize }

// Single reports whether the batch has only one tensor: a push or a pull.
func (b Batch) Single() bool { return b.w.single }

// Pushes returns the push tensors in the order sent.
func (b Batch) Pushes() []KeyTensor { return b.w.pushes }

// Pulls returns the requested answers in the order of the request.
func (b Batch) Pulls() []Pull { return b.w.pulls }

// Answered reports whether Respond or Refuse has been called for the batch. A Respond that returned an error before
// it sent anything does not count.
func (b Batch) Answered() bool { return b.w.state.Load() != b.gen<<1 }

// Wanted reports whether the worker still waits for the answer: it has not canceled the batch (workers of this
// library notify the server), is not lost, and was not replaced by another process.
func (b Batch) Wanted() bool {
	if b.w.state.Load()>>1 != b.gen {
		return false
	}
	c := b.w.s.serving.Load()
	return c == nil || c.IsAwaited(b.w.instance, b.w.epoch, b.w.customer, b.w.first)
}

// Context returns the context of the batch. The context ends when the batch is answered, refused or released, when its worker has
// canceled it or is lost, when the server or its node is closed, and when the context of Shutdown ends. context.Cause returns the
// reason. The first call for a batch creates the context.
func (b Batch) Context() context.Context {
	return b.w.s.inbound.Context(&b.w.accepted, b.w.x.id, func() bool { return b.w.state.Load()>>1 == b.gen })
}

// add adds one tensor to the batch: a part of msg, or all of it.
func (b *batchState) add(x *van.Part, msg *van.Message) error {
	if len(b.pushes)+len(b.pulls) >= van.MaxParts {
		return fmt.Errorf("%w: batch of more than %d tensors", van.ErrMalformed, van.MaxParts)
	}
	b.last = x.Timestamp
	d := Dtype(x.Dtype)
	if !x.Push {
		size, err := byteSize(d, x.ShapeSlice())
		if err != nil || size != x.Len {
			return fmt.Errorf("%w: pull of key %d: %s%v is not the announced %d bytes (%w)", van.ErrMalformed, x.Key, d, x.ShapeSlice(), x.Len, cmp.Or(err, errSizes))
		}
		p := b.growPulls()
		p.Key, p.Len, p.Dtype, p.part = x.Key, size, d, *x
		p.part.Vals, p.part.Into, p.Out = backend.Mem{}, backend.Mem{}, Tensor{}
		if x.Into.Len() > 0 {
			b.outs++
			p.Out = Tensor{mem: x.Into, dtype: d, ndim: int8(x.Dim), shape: x.Shape}
			b.retainMessage(msg)
		}
		p.Shape = append(p.Shape[:0], x.ShapeSlice()...)
		return nil
	}
	mem, owned, err := b.s.buffers.Place(msg.Sender, x.Key, x.Vals, x.Placed)
	if err != nil {
		return err
	}
	size, err := byteSize(d, x.ShapeSlice())
	if err != nil || size != mem.Len() {
		return fmt.Errorf("%w: push of key %d: %s%v does not match the %d received bytes (%w)", van.ErrMalformed, x.Key, d, x.ShapeSlice(), mem.Len(), cmp.Or(err, errSizes))
	}
	t := Tensor{mem: mem, dtype: d, ndim: int8(x.Dim), shape: x.Shape}
	b.pushes = append(b.pushes, KeyTensor{Key: x.Key, Val: t})
	if b.single && !msg.IsBatch() {
		b.ack = datamsg.ReplyTo(msg)
	}
	if !owned {
		if msg.IsBatch() {
			b.bytes += x.Vals.Len()
		} else {
			b.bytes += msg.PayloadLen()
		}
		b.retainMessage(msg)
	}
	return nil
}

// retainMessage keeps msg until the last reference to b is dropped.
func (b *batchState) retainMessage(msg *van.Message) {
	if n := len(b.msgs); n == 0 || b.msgs[n-1] != msg {
		b.msgs = append(b.msgs, msg.Retain())
	}
}

var errSizes = errors.New("sizes differ")

// growPulls appends an entry and reuses its shape slice.
func (b *batchState) growPulls() *Pull {
	if n := len(b.pulls); n < cap(b.pulls) {
		b.pulls = b.pulls[:n+1]
	} else {
		b.pulls = append(b.pulls, Pull{})
	}
	return &b.pulls[len(b.pulls)-1]
}

// Retain keeps the push tensors valid until a matching Release, also beyond
// Respond. Call it before Respond.
func (b Batch) Retain() Batch {
	b.w.refs.Add(1)
	return b
}

// Release drops one reference to the batch. Respond drops the first one; call Release only after Retain, or for a
// batch that will never be answered. Without references it has no effect.
//
// With a stream in which work still reads push tensors on the node's device, Release returns at once, and the
// reference is dropped when that work is done.
func (b Batch) Release(opts ...StreamOption) {
	if b.w.state.Load()>>1 != b.gen {
		return
	}
	stream, device := Complete, false
	for _, opt := range opts {
		if s, is := opt.(Stream); is {
			stream = s
		}
	}
	if stream != Complete {
		for i := range b.w.pushes {
			device = device || !b.w.pushes[i].Val.mem.OnHost()
		}
	}
	if !device {
		b.w.unref()
		return
	}
	event, err := b.w.s.late.RecordEvent(uintptr(stream))
	switch {
	case err != nil, event == nil && !b.w.s.late.Busy(): // without an event the stream has done its work
		(*reading)(b.w).SendNow(err)
	case !b.w.s.late.Add((*reading)(b.w), event):
		b.w.unref() // the node has left; its device's memory is freed after that work
	}
}

// reading is a batch that the device still reads.
type reading batchState

func (*reading) Canceled() bool { return false }

// SendNow drops the reference. If err leaves open whether the device still reads the memory, the batch leaves the server but keeps its
// memory.
func (r *reading) SendNow(err error) {
	b := (*batchState)(r)
	if err == nil || errors.Is(err, backend.ErrDeviceLost) || errors.Is(err, van.ErrClosed) || errors.Is(err, backend.ErrClosed) {
		b.unref()
		return
	}
	b.s.inbound.Leave(&b.accepted)
	b.s.node.Log().Warn("received tensors stay allocated: the device did not report whether work still reads them", "worker", b.s.node.PeerName(b.instance), "err", err)
}

// unref drops one reference; after the last one the state is reused.
func (b *batchState) unref() {
	if b.refs.Add(-1) > 0 {
		return
	}
	b.s.inbound.Leave(&b.accepted) // no effect if the batch was answered
	b.state.Store((b.state.Load()>>1 + 1) << 1)
	for i, m := range b.msgs {
		m.Release()
		b.msgs[i] = nil
	}
	clear(b.pushes)
	x := b.x
	x.freeMu.Lock()
	defer x.freeMu.Unlock()
	if len(x.free) < keepBatches {
		x.free = append(x.free, b)
	}
}

// Sent is called when the answers have been sent.
func (b *batchState) Sent() { b.unref() }
