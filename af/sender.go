package af

// The batches of one worker. A worker of this library sends a batch as one message. Messages of ps-lite, which C++ workers and some
// transports send, are assembled to batches here.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// sender assembles the batches of one worker. It processes one message at a time.
type sender struct {
	s            *Server
	id           int          // node id of the worker
	pendingCount atomic.Int32 // number of pending messages

	mu       sync.Mutex
	open     []*batchState  // incomplete batches; the last one is the current one
	pending  []*van.Message // pending messages: they arrived before the message that they follow
	refusals []refused      // removed from open; the function that added them ends them without the lock

	part         van.Part // of the message that accept adds; a field, since a variable of accept would be allocated
	openBytes    int      // of the messages in open
	pendingBytes int

	freeMu sync.Mutex
	free   []*batchState // for reuse
}

// maxOpen is the maximum number of incomplete batches of a worker, and of its pending messages. Beyond it the oldest
// one is dropped.
const maxOpen = 1024

// refused is a batch that will never be complete, and why.
type refused struct {
	b   *batchState
	why error
}

// errNoBatch: the message continues a batch that is not open. Its first message was lost, canceled by the worker, or
// refused.
var errNoBatch = fmt.Errorf("%w: the batch has not begun, or was dropped", van.ErrMalformed)

// acceptBatch delivers msg, a batch, or refuses it.
func (x *sender) acceptBatch(msg *van.Message) error {
	s := x.s
	if len(msg.Parts) == 0 {
		err := fmt.Errorf("%w: a batch of 0 tensors, want at least 1", van.ErrMalformed)
		s.refuse(msg, err)
		return err
	}
	if s.closed.Load() {
		return fmt.Errorf("%w: the server", van.ErrClosed)
	}
	b, err := x.begin(msg)
	if err == nil {
		b.single = len(msg.Parts) == 1
		b.last = msg.Timestamp + int32(len(msg.Parts)-1)
		b.ack = datamsg.ReplyTo(msg)
		b.ack.Push, b.ack.Timestamp = true, b.last
		size := unplaced(msg)
		for i := range msg.Parts {
			if p := &msg.Parts[i]; p.Push && p.Vals.Len() < p.Len {
				err = s.tooLarge(size)
			} else {
				err = b.add(p, msg)
			}
			if err != nil {
				break
			}
		}
		if most, _ := s.largest(); err == nil && b.bytes > most && !failpoint.On("recv-budget") {
			err = s.tooLarge(b.bytes)
		}
		if err != nil {
			defer b.unref()
		}
	}
	if err != nil {
		s.refuse(msg, err)
		return err
	}
	if !b.single && len(b.pulls) == 0 {
		s.acknowledgeEarly(b.ack)
	}
	s.serve(b)
	return nil
}

// unplaced is the number of bytes that msg, a batch, pushes to memory that is not registered.
func unplaced(msg *van.Message) (size int) {
	for i := range msg.Parts {
		if p := &msg.Parts[i]; p.Push && !p.Placed {
			size += p.Len
		}
	}
	return size
}

// tooLarge is the error of a batch of size bytes.
func (s *Server) tooLarge(size int) error {
	most, name := s.largest()
	return fmt.Errorf("%w: a batch of %d bytes, want at most %d (%s)", van.ErrInvalid, size, most, name)
}

// refuse notifies the worker that msg is not processed.
func (s *Server) refuse(msg *van.Message, why error) {
	s.node.Refuse(msg.Sender, msg.ProcessEpoch, int32(s.app), msg.CustomerID, msg.Timestamp, cluster.RefusalReason(why))
}

// serve passes b, which is complete, to the handler.
func (s *Server) serve(b *batchState) {
	instance := b.instance
	s.inbound.Enter(instance)
	s.handler(Batch{b, b.state.Load() >> 1})
	s.inbound.Exit(instance)
}

// largest returns the limit of the bytes of one batch, and the variable that sets it.
func (s *Server) largest() (limit int, name string) {
	if c := s.node.Config(); c.RecvBudgetPeer > c.RecvBudget {
		return c.RecvBudgetPeer, "STEPAF_RECV_BUDGET_PEER"
	}
	return s.node.Config().RecvBudget, "STEPAF_RECV_BUDGET"
}

// acknowledgeEarly acknowledges pushes before the handler has answered their batch. If that fails, it logs the error and fails the worker's
// call, which would wait for its limit. After van.ErrClosed it only logs.
func (s *Server) acknowledgeEarly(r datamsg.Reply) {
	if err := s.acknowledge(r); err != nil {
		if !errors.Is(err, van.ErrClosed) {
			s.node.Refuse(r.Sender, r.ProcessEpoch, r.AppID, r.CustomerID, r.Timestamp, cluster.Unanswered(err))
		}
		s.node.Rarely("af: push not acknowledged: "+logx.Kind(err)).Warn("push not acknowledged", "err", err)
	}
}

// accept adds msg, a message of ps-lite, to its batch and delivers the batch when it is complete.
func (x *sender) accept(msg *van.Message) error {
	s := x.s
	if err := checkTensorMessage(msg); err != nil {
		s.refuse(msg, err)
		return err
	}
	x.mu.Lock()
	if s.closed.Load() {
		x.mu.Unlock()
		return fmt.Errorf("%w: the server", van.ErrClosed)
	}
	b, err := x.batchOf(msg)
	if err != nil && errors.Is(err, van.ErrFinished) {
		x.mu.Unlock()
		s.refuse(msg, err)
		return err
	}
	if err != nil {
		var oldest []*van.Message
		if s.reorders {
			oldest, err = x.keep(msg), nil
		}
		x.mu.Unlock()
		for _, m := range oldest {
			err := fmt.Errorf("%w: out-of-order message of %d bytes, want at most %d such messages, and %d bytes in all (STEPAF_RECV_BUDGET_PEER)",
				van.ErrQueueFull, m.PayloadLen(), maxOpen, s.node.Config().RecvBudgetPeer)
			s.refuse(m, err)
			s.node.Rarely("af: pending messages").Warn("dropped an out-of-order message", "err", err, "from", s.node.PeerName(m.Sender), "message", &m.Meta)
			m.Release()
		}
		return err
	}
	p := &x.part
	*p = van.PartOf(&msg.Meta)
	p.Key, p.Vals, p.Placed = binary.LittleEndian.Uint64(msg.Keys.Host()), msg.Vals, msg.Placed
	if err = b.add(p, msg); err == nil {
		err = x.charge(b, msg)
	}
	if err != nil {
		x.refuse(b, err)
	}
	complete := err == nil && (b.single || msg.Head == van.BatchEnd)
	if complete {
		x.remove(b)
	}
	refusals := x.refusals
	x.refusals = nil
	x.mu.Unlock()
	for _, r := range refusals {
		s.node.Refuse(r.b.instance, r.b.epoch, int32(s.app), r.b.customer, r.b.first, cluster.RefusalReason(r.why))
		r.b.unref()
	}
	if err != nil {
		return err
	}

	// A C++ worker gets an acknowledgement of each push of a batch on arrival. A worker of this library gets one for all pushes, if no
	// answer follows. A single push is acknowledged when the application answers it.
	native := s.node.Native(msg.Sender)
	if msg.Push && !b.single && !native {
		s.acknowledgeEarly(datamsg.ReplyTo(msg))
	}
	if complete {
		if native && !b.single && len(b.pulls) == 0 {
			r := datamsg.ReplyTo(msg)
			r.Head = van.WholeBatch
			s.acknowledgeEarly(r)
		}
		s.serve(b)
	}
	return nil
}

// checkTensorMessage checks the data frames, the key and the batch flag of msg, a ps-lite message with one tensor of a batch.
func checkTensorMessage(msg *van.Message) error {
	if msg.SimpleApp || msg.Frames < 2 || msg.Keys.Len() != 8 {
		return fmt.Errorf("%w: tensor request with %d data frames and %d key bytes, want 2 and 8", van.ErrMalformed, msg.Frames, msg.Keys.Len())
	}
	if msg.Head < van.Single || msg.Head > van.BatchEnd {
		return fmt.Errorf("%w: batch flag %d, want 0 (single), 1 (start), 2 (middle) or 3 (end)", van.ErrMalformed, msg.Head)
	}
	return nil
}

// batchOf finds or begins the batch that msg belongs to. Batches of one worker, and of several customers of its process, may
// interleave; the timestamps within a batch are consecutive. x.mu is held.
func (x *sender) batchOf(msg *van.Message) (*batchState, error) {
	if msg.Head == van.Single || msg.Head == van.BatchStart {
		b, err := x.begin(msg)
		if err != nil {
			return nil, err
		}
		if s := x.s; len(x.open) >= maxOpen { // the oldest one will never be completed
			old := x.open[0]
			x.refuse(old, fmt.Errorf("%w: %d batches have been begun since, and this one has not ended", van.ErrQueueFull, maxOpen))
			s.node.Rarely("af: open batches").Warn("dropped a batch that has not ended",
				"worker", s.node.PeerName(msg.Sender), "last timestamp", old.last, "begun since", maxOpen)
		}
		x.open = append(x.open, b)
		return b, nil
	}
	for i := len(x.open) - 1; i >= 0; i-- {
		if b := x.open[i]; b.continuedBy(msg) {
			return b, nil
		}
	}
	return nil, fmt.Errorf("%w: the %s of a batch, at timestamp %d, continues none of the %d open batches", errNoBatch, [...]string{van.BatchMiddle: "middle", van.BatchEnd: "end"}[msg.Head], msg.Timestamp, len(x.open))
}

// continuedBy reports whether msg is the next message of b. Each tensor worker of a process numbers its own messages, so two
// batches of one process may have the same timestamps.
func (b *batchState) continuedBy(msg *van.Message) bool {
	return b.last+1 == msg.Timestamp && b.epoch == msg.ProcessEpoch && b.customer == msg.CustomerID
}

// charge adds the memory of b's last message to its sender's budget. Incomplete batches may use
// STEPAF_RECV_BUDGET_PEER bytes; beyond that, the older ones are dropped before the last one. The last one alone may
// use STEPAF_RECV_BUDGET. x.mu is held.
func (x *sender) charge(b *batchState, msg *van.Message) error {
	s := b.s
	size := 0
	if n := len(b.msgs); n > 0 && b.msgs[n-1] == msg {
		size = msg.PayloadLen()
	}
	x.openBytes += size
	c := s.node.Config()
	for x.openBytes > c.RecvBudgetPeer && len(x.open) > 1 && !failpoint.On("recv-budget") {
		old := x.open[0]
		if old == b {
			old = x.open[1]
		}
		x.refuse(old, fmt.Errorf("%w: %d bytes of batches that have not ended, want at most %d (STEPAF_RECV_BUDGET_PEER)", van.ErrQueueFull, x.openBytes, c.RecvBudgetPeer))
		s.node.Rarely("af: bytes of open batches").Warn("dropped a batch that has not ended: the unfinished batches of its worker are too large",
			"worker", s.node.PeerName(msg.Sender), "last timestamp", old.last, "limit (STEPAF_RECV_BUDGET_PEER)", c.RecvBudgetPeer)
	}
	if most, name := s.largest(); b.bytes > most && !failpoint.On("recv-budget") {
		before := ""
		if !b.single && msg.Head != van.BatchEnd {
			before = " before its end"
		}
		return fmt.Errorf("%w: a batch of %d bytes%s, want at most %d (%s)", van.ErrInvalid, b.bytes, before, most, name)
	}
	return nil
}

// refuse removes b from the open batches; accept notifies the worker. x.mu is held.
func (x *sender) refuse(b *batchState, why error) {
	x.remove(b)
	x.refusals = append(x.refusals, refused{b, why})
}

// keep queues a message that continues no open batch as pending. A message that was lost and sent again arrives after its successors. So
// does, over RDMA, a message with a new key from a C++ worker. Beyond the limits keep returns the oldest ones, whose batches were probably
// refused, or msg if it alone is too large. The caller refuses and releases them. x.mu is held.
func (x *sender) keep(msg *van.Message) (oldest []*van.Message) {
	limit, n := x.s.node.Config().RecvBudgetPeer, 0
	if msg.PayloadLen() > limit {
		return []*van.Message{msg.Retain()}
	}
	x.pending = append(x.pending, msg.Retain())
	for x.pendingBytes += msg.PayloadLen(); len(x.pending)-n > maxOpen || x.pendingBytes > limit; n++ {
		x.pendingBytes -= x.pending[n].PayloadLen()
	}
	oldest = slices.Clone(x.pending[:n])
	x.pending = slices.Delete(x.pending, 0, n)
	x.pendingCount.Add(int32(1 - n))
	return oldest
}

// unhold returns a pending message that is now the next one, or nil. The caller releases it.
func (x *sender) unhold() *van.Message {
	if x.pendingCount.Load() == 0 {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for i, m := range x.pending {
		for _, b := range x.open {
			if b.continuedBy(m) {
				x.pending = append(x.pending[:i], x.pending[i+1:]...)
				x.pendingBytes -= m.PayloadLen()
				x.pendingCount.Add(-1)
				return m
			}
		}
	}
	return nil
}

// remove removes b from the open batches. x.mu is held.
func (x *sender) remove(b *batchState) {
	if i := slices.Index(x.open, b); i >= 0 {
		x.open = slices.Delete(x.open, i, i+1)
		x.openBytes -= b.bytes
	}
}

// drop drops the incomplete batches and the pending messages that gone selects, and returns the number of batches.
func (x *sender) drop(gone func(epoch uint32, customer, ts int32) bool) int {
	x.mu.Lock()
	var open []*batchState
	for _, b := range slices.Clone(x.open) {
		if gone(b.epoch, b.customer, b.first) {
			x.remove(b)
			open = append(open, b)
		}
	}
	var held []*van.Message
	x.pending = slices.DeleteFunc(x.pending, func(m *van.Message) bool {
		if !gone(m.ProcessEpoch, m.CustomerID, m.Timestamp) {
			return false
		}
		x.pendingBytes -= m.PayloadLen()
		held = append(held, m)
		return true
	})
	x.mu.Unlock()
	x.pendingCount.Add(int32(-len(held)))
	for _, m := range held {
		m.Release()
	}
	for _, b := range open {
		b.unref()
	}
	return len(open)
}

// begin begins a batch. It fails if the server is shutting down.
func (x *sender) begin(msg *van.Message) (*batchState, error) {
	x.freeMu.Lock()
	var b *batchState
	if n := len(x.free); n > 0 {
		b, x.free = x.free[n-1], x.free[:n-1]
	}
	x.freeMu.Unlock()
	if b == nil {
		b = &batchState{s: x.s, x: x}
	}
	b.instance, b.epoch, b.customer, b.first = msg.Sender, msg.ProcessEpoch, msg.CustomerID, msg.Timestamp
	b.single, b.trace = msg.Head == van.Single, msg.RequestTrace
	b.pushes, b.pulls, b.msgs = b.pushes[:0], b.pulls[:0], b.msgs[:0]
	b.bytes, b.outs = 0, 0
	b.refs.Store(1)
	if err := x.s.inbound.Accept(&b.accepted, b.instance, b.epoch, b.customer, b.first); err != nil {
		b.unref()
		return nil, err
	}
	return b, nil
}
