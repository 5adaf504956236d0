package af

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// DefaultTimeout is how long Wait waits when its context has no deadline, counted
// from the push_pull. It is the original's default.
const DefaultTimeout = 10 * time.Second

// TensorWorker pushes tensors to all servers and pulls results back. All methods
// are safe for concurrent use.
type TensorWorker struct {
	// Timeout replaces DefaultTimeout; negative means none. Set it before use.
	Timeout time.Duration

	node     *postoffice.Node
	customer *postoffice.Customer
	servers  []int // node ids by server group rank, ascending
	traces   postoffice.Traces
	revoker  van.Revoker // nil when no peer writes into pull tensors

	line *line // of batches with tensors on the device, and those behind them

	mu   sync.Mutex
	free []*batch
}

// NewTensorWorker makes a worker on node, which must have the worker role. A
// cluster's servers must be known: call it after postoffice.Start.
func NewTensorWorker(node *postoffice.Node, o Options) (*TensorWorker, error) {
	if node.Role() != van.Worker {
		return nil, fmt.Errorf("%w: tensor worker on %s, want a node with role worker", van.ErrInvalid, node.Name())
	}
	w := &TensorWorker{node: node, servers: node.ServerInstances(), revoker: node.Revoker()}
	c, err := node.AddCustomer(o.AppID, o.CustomerID, func(msg *van.Message) {
		if n, speak := node.Rarely("af: request to a worker"); speak {
			node.Log().Warn("dropped a request: a tensor worker serves none", "from", van.NodeName(msg.Sender), "so far", n)
		}
	})
	if err != nil {
		return nil, err
	}
	w.customer = c
	w.line = newLine(node.Backend(), node.Config().BusyPoll)
	node.OnExit(w.line.close)
	return w, nil
}

// Options of a tensor worker or server. The zero value is what StepMesh uses.
type Options struct {
	AppID      int
	CustomerID int // workers only; servers use the AppID
}

// batch is one push_pull in flight.
type batch struct {
	postoffice.Request
	w      *TensorWorker
	pushes []KeyTensor
	pulls  []KeyTensor // server-major: server*q + i
	p, q   int
	keys   [][8]byte // key frames: pushes, then pulls
	skip   []bool    // by server: sending to it has failed
	msg    van.Message
	queued bool         // in the worker's line
	refs   atomic.Int32 // the request, and the line while it is there
}

// ZBatchPushPull sends every push tensor to every server, and asks server s for
// the pull tensors pull[s*Q : (s+1)*Q], where Q is len(pull) divided by the number
// of servers. It returns the handler: the first of P+Q consecutive timestamps,
// pushes first. Either list may be empty, not both.
//
// Keys of one list must differ (for pulls: those of one server). Tensors must
// stay as they are until Wait has returned for the handler. A pull tensor is
// filled by the time Wait returns nil; its size must be that of the answer.
//
// Batches are sent in the order of the calls. If a tensor lies on the node's device,
// the batch waits for the device's default stream, see ZBatchPushPullOn.
func (w *TensorWorker) ZBatchPushPull(push, pull []KeyTensor) (handler int32, err error) {
	return w.ZBatchPushPullOn(DefaultStream, push, pull)
}

// ZBatchPushPullOn is ZBatchPushPull for tensors on the node's device that the work in
// stream makes, or, if they are to be filled, uses. It does not wait for that work: a
// goroutine of the worker does, and sends then. When that work fails, so does Wait.
func (w *TensorWorker) ZBatchPushPullOn(stream Stream, push, pull []KeyTensor) (handler int32, err error) {
	device, err := w.check(push, pull)
	var event backend.Event
	if err == nil && device {
		event, err = w.line.mark(stream)
	}
	if err != nil {
		return 0, &van.Error{Op: "push_pull", Node: w.node.Name(), Err: err}
	}
	b := w.take()
	b.queued = event != nil || w.line.busy()
	b.pushes = append(b.pushes[:0], push...)
	b.pulls = append(b.pulls[:0], pull...)
	b.hold()
	b.p, b.q = len(push), len(pull)/len(w.servers)
	b.fillKeys()
	if err := w.customer.Open(&b.Request, "push_pull", b, b.p+b.q, w.servers); err != nil {
		w.line.unmark(event)
		b.queued = false
		b.Finished(err)
		b.Recycle()
		return 0, err
	}
	handler = b.First()
	if !b.queued {
		if b.Begin() { // else a server is away: Wait says so, and the others get nothing that they could not answer
			b.sendAll(handler)
			b.End()
		}
		return handler, nil
	}
	b.refs.Add(1)
	if !w.line.add(b, event) {
		b.send(van.ErrClosed)
	}
	return handler, nil
}

// dead implements job.
func (b *batch) dead() bool { return !b.Pending() }

// send implements job: it sends the batch unless it has failed meanwhile.
func (b *batch) send(err error) {
	if b.Begin() {
		if err == nil {
			b.sendAll(b.First())
		} else {
			b.w.customer.Abort(&b.Request, &van.Error{Op: "push_pull", Node: b.w.node.Name(), Detail: fmt.Sprintf("handler %d", b.First()),
				Elapsed: time.Duration(clock.Now() - b.Started()), Err: err})
		}
		b.End()
	}
	b.unref()
}

// sendAll sends the messages, or fails the request.
func (b *batch) sendAll(ts int32) {
	if err := b.sendMessages(ts); err != nil {
		b.w.customer.Abort(&b.Request, err)
		for _, id := range b.w.servers {
			b.w.node.Flush(id)
		}
	}
}

// check refuses what cannot be sent, before anything is. It tells whether a tensor
// lies on the device.
func (w *TensorWorker) check(push, pull []KeyTensor) (device bool, err error) {
	if err := w.checkLists(push, pull); err != nil {
		return false, err
	}
	a, err := onDevice(w.node.Backend(), push, "push")
	if err != nil {
		return false, err
	}
	b, err := onDevice(w.node.Backend(), pull, "pull")
	return a || b, err
}

func (w *TensorWorker) checkLists(push, pull []KeyTensor) error {
	n := len(w.servers)
	switch {
	case len(push)+len(pull) == 0:
		return fmt.Errorf("%w: no push and no pull tensors, want at least one", van.ErrInvalid)
	case len(pull)%n != 0:
		return fmt.Errorf("%w: %d pull tensors for %d servers, want the same number for each (server-major)", van.ErrInvalid, len(pull), n)
	case len(push)+len(pull)/n > MaxBatch:
		return fmt.Errorf("%w: %d tensors in one batch, want at most %d", van.ErrInvalid, len(push)+len(pull)/n, MaxBatch)
	}
	if err := distinct(push, "push"); err != nil {
		return err
	}
	for q, s := len(pull)/n, 0; q > 0 && s < n; s++ {
		if err := distinct(pull[s*q:(s+1)*q], "pull"); err != nil {
			return fmt.Errorf("%w for server %d", err, s)
		}
	}
	return nil
}

// MaxBatch is the largest number of tensors that one worker and one server
// exchange in a batch.
const MaxBatch = 16384

// distinct refuses lists in which a key stands twice: answers and receive buffers
// are found by key.
func distinct(l []KeyTensor, kind string) error {
	if len(l) > 32 {
		seen := make(map[uint64]int, len(l))
		for i := range l {
			if j, dup := seen[l[i].Key]; dup {
				return duplicate(kind, l[i].Key, j, i)
			}
			seen[l[i].Key] = i
		}
		return nil
	}
	for i := range l {
		for j := range i {
			if l[i].Key == l[j].Key {
				return duplicate(kind, l[i].Key, j, i)
			}
		}
	}
	return nil
}

func duplicate(kind string, key uint64, i, j int) error {
	return fmt.Errorf("%w: %s tensors %d and %d both have key %d, want different keys in a batch", van.ErrInvalid, kind, i, j, key)
}

func (w *TensorWorker) take() *batch {
	w.mu.Lock()
	var b *batch
	if n := len(w.free); n > 0 {
		b = w.free[n-1]
		w.free = w.free[:n-1]
	}
	w.mu.Unlock()
	if b == nil {
		b = &batch{w: w}
	}
	b.refs.Store(1)
	return b
}

// keepBatches bounds the batches that an idle worker keeps for use again.
const keepBatches = 256

// Recycle puts b back. It is called by the customer.
func (b *batch) Recycle() { b.unref() }

func (b *batch) unref() {
	if b.refs.Add(-1) > 0 {
		return
	}
	clear(b.pushes)
	clear(b.pulls)
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	if len(b.w.free) < keepBatches {
		b.w.free = append(b.w.free, b)
	}
}

func (b *batch) fillKeys() {
	if need := len(b.pushes) + len(b.pulls); cap(b.keys) < need {
		b.keys = make([][8]byte, need)
	} else {
		b.keys = b.keys[:need]
	}
	for i := range b.pushes {
		binary.LittleEndian.PutUint64(b.keys[i][:], b.pushes[i].Key)
	}
	for i := range b.pulls {
		binary.LittleEndian.PutUint64(b.keys[len(b.pushes)+i][:], b.pulls[i].Key)
	}
}

// sendMessages sends the messages of the batch: each push to all servers, then each pull
// index to all servers. A server that cannot be sent to gets nothing more; the
// others get all of it, since a batch that does not end would stay with them. It
// returns the first error.
func (b *batch) sendMessages(ts int32) error {
	var failed error
	b.skip = append(b.skip[:0], make([]bool, len(b.w.servers))...)
	one := func(s int, push bool, i int, kt *KeyTensor, key []byte) {
		if b.skip[s] {
			return
		}
		if err := b.sendOne(b.w.servers[s], ts, push, b.flag(i), kt, key); err != nil {
			b.skip[s] = true
			if failed == nil {
				failed = err
			}
		}
	}
	for i := range b.pushes {
		for s := range b.w.servers {
			one(s, true, i, &b.pushes[i], b.keys[i][:])
		}
		ts++
	}
	for i := range b.q {
		for s := range b.w.servers {
			k := s*b.q + i
			one(s, false, b.p+i, &b.pulls[k], b.keys[b.p+k][:])
		}
		ts++
	}
	return failed
}

// flag is the head of timestamp index i. A batch of one timestamp has no end
// mark to wait for; the original sends only a start for one pull at several
// servers, and hangs.
func (b *batch) flag(i int) van.BatchFlag {
	switch total := b.p + b.q; {
	case total == 1:
		return van.Single
	case i == 0:
		return van.BatchStart
	case i == total-1:
		return van.BatchEnd
	default:
		return van.BatchMiddle
	}
}

func (b *batch) sendOne(id int, ts int32, push bool, flag van.BatchFlag, kt *KeyTensor, key []byte) error {
	m, t := &b.msg, &kt.Val
	m.Reset()
	m.Receiver = id
	m.Request, m.Push, m.Head, m.Timestamp = true, push, flag, ts
	m.More = flag == van.BatchStart || flag == van.BatchMiddle
	m.AppID, m.CustomerID = int32(b.w.customer.AppID()), int32(b.w.customer.ID())
	m.Key, m.Addr, m.ValLen, m.Option = kt.Key, t.mem.Addr(), int32(t.mem.Len()), 0
	m.IsTensor, m.Dtype, m.Dim, m.Shape = true, int32(t.dtype), int32(t.rank()), t.shape
	m.DataTypes = append(m.DataTypes, van.TypeUint64, van.TypeOther)
	m.Src, m.Dst = t.Device(), t.Device()
	m.Frames, m.Keys = 2, backend.Bytes(key)
	if push {
		m.Vals = t.mem
	} else {
		m.Into = t.mem
	}
	m.DataSize = int32(min(m.PayloadLen(), MaxTensorBytes))
	return b.w.node.Send(m)
}

// Answer takes one answer: the acknowledgement of a push, or a pull's value.
func (b *batch) Answer(i, from int, msg *van.Message) error {
	b.w.traces.Put(msg)
	push := i < b.p
	if msg.Push != push {
		return fmt.Errorf("%w: answer to timestamp %d is for a push=%t, want %t", van.ErrMalformed, msg.Timestamp, msg.Push, push)
	}
	if push {
		return nil
	}
	slot := &b.pulls[from*b.q+i-b.p]
	if msg.Frames < 2 || msg.Keys.Len() != 8 {
		return fmt.Errorf("%w: pull answer for key %d has %d data frames and %d key bytes, want 2 and 8", van.ErrMalformed, slot.Key, msg.Frames, msg.Keys.Len())
	}
	if key := binary.LittleEndian.Uint64(msg.Keys.Host()); key != slot.Key {
		return fmt.Errorf("%w: pull answer has key %d, want %d", van.ErrMalformed, key, slot.Key)
	}
	if msg.Vals.Len() != slot.Val.Len() {
		return fmt.Errorf("%w: pull answer for key %d has %d bytes, the pull tensor %s has %d", van.ErrInvalid, slot.Key,
			msg.Vals.Len(), slot.Val.String(), slot.Val.Len())
	}
	if msg.Placed || msg.Vals.Len() == 0 {
		return nil
	}
	return b.w.node.Backend().Copy(slot.Val.mem, msg.Vals)
}

// hold keeps the memory of the tensors until Finished, if their owners count.
func (b *batch) hold() {
	for i := range b.pushes {
		b.pushes[i].Val.mem.Retain()
	}
	for i := range b.pulls {
		b.pulls[i].Val.mem.Retain()
	}
}

// Finished is called when the batch is over: the tensors are the caller's again.
func (b *batch) Finished(err error) {
	if b.queued && err != nil {
		b.w.line.giveUp(b)
	}
	if r := b.w.revoker; r != nil && err != nil {
		for i := range b.pulls {
			r.Revoke(b.pulls[i].Val.mem) // an answer that is late must not come there
		}
	}
	for i := range b.pushes {
		b.pushes[i].Val.mem.Release()
	}
	for i := range b.pulls {
		b.pulls[i].Val.mem.Release()
	}
}

// Wait waits until all servers have answered everything of the batch that
// ZBatchPushPull returned handler for, and forgets it: its tensors are the
// caller's again. Without a deadline in ctx it waits for w.Timeout from the
// push_pull. Errors wrap van.ErrTimeout, van.ErrPeerLost, van.ErrClosed,
// van.ErrMalformed, postoffice.ErrUnknownHandler, or ctx's error, and name the
// servers concerned.
func (w *TensorWorker) Wait(ctx context.Context, handler int32) error {
	limit := w.Timeout
	if limit == 0 {
		limit = DefaultTimeout
	}
	if _, has := ctx.Deadline(); has || limit < 0 {
		limit = 0
	}
	return w.customer.Wait(ctx, handler, limit)
}

// WaitFor is Wait with a limit counted from the push_pull, as the original's Wait
// counts it.
func (w *TensorWorker) WaitFor(ctx context.Context, handler int32, limit time.Duration) error {
	return w.customer.Wait(ctx, handler, max(limit, time.Nanosecond))
}

// WaitSlice is WaitFor for those who have to look after something else now and
// then: when slice passes first it returns postoffice.ErrPending, and the batch
// stays in flight. A limit of 0 is none.
func (w *TensorWorker) WaitSlice(ctx context.Context, handler int32, limit, slice time.Duration) error {
	return w.customer.WaitSlice(ctx, handler, limit, slice)
}

// Customer is the worker's share of its node, which knows its requests in flight.
func (w *TensorWorker) Customer() *postoffice.Customer { return w.customer }

// GetAllHandlers returns the timestamps of the batch with the given handler:
// pushes, then pull indices. For a handler that has been waited for, or is
// unknown, it returns just that handler, as the original does.
func (w *TensorWorker) GetAllHandlers(handler int32) []int32 {
	n := max(w.customer.Timestamps(handler), 1)
	hs := make([]int32, n)
	for i := range hs {
		hs[i] = handler + int32(i)
	}
	return hs
}

// FetchTrace returns the stamps of the request and of the answer for one
// timestamp, with several servers those of the last answer. Worker stamps are on
// this host's clock, server stamps on the server's. Traces of the last 4096
// timestamps are kept; others, and those without an answer yet, are an error that
// wraps postoffice.ErrUnknownHandler.
func (w *TensorWorker) FetchTrace(handler int32) (request, response van.Trace, err error) {
	return w.traces.Fetch(w.node, handler)
}

// InFlight is the number of push_pulls that are not finished or not waited for. Of
// those finished that nobody waits for, the latest 4096 are remembered.
func (w *TensorWorker) InFlight() int { return w.customer.InFlight() }

// Close fails what is in flight and takes the worker off its node.
func (w *TensorWorker) Close() {
	w.customer.Close()
	w.line.close()
}
