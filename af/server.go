package af

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// ErrAnswered: Response was called a second time for a batch.
var ErrAnswered = errors.New("batch answered already")

// Handler takes one complete batch of one worker. It may answer before it returns
// or later, from any goroutine. It may block: other workers are served meanwhile.
// A panic in it is not recovered: it ends the process, and is the loss of a peer
// for the others.
type Handler func(Batch)

// TensorServer collects the batches of all workers and sends their answers. All
// methods are safe for concurrent use.
type TensorServer struct {
	node    *postoffice.Node
	o       Options
	buffers *kv.RecvBuffers
	line    *line // of answers with tensors on the device, and those behind them
	late    *line // of batches that the device still reads

	handler  Handler
	customer *postoffice.Customer
	serving  atomic.Pointer[postoffice.Customer] // the same
	unwatch  func()
	unwanted atomic.Pointer[func(worker int)]
	early    atomic.Int32 // messages that senders hold
	reorders bool         // messages may overtake each other

	mu      sync.Mutex
	senders map[int]*sender
	free    []*work
}

// NewTensorServer makes a server on node, which must have the server role.
// Requests are kept until SetRequestHandle is called.
func NewTensorServer(node *postoffice.Node, o Options) (*TensorServer, error) {
	if node.Role() != van.Server {
		return nil, fmt.Errorf("%w: tensor server on %s, want a node with role server", van.ErrInvalid, node.Name())
	}
	s := &TensorServer{reorders: node.Config().Resend || node.VanType() == "ibverbs", node: node, o: o, buffers: kv.NewRecvBuffers(node), senders: map[int]*sender{},
		line: newLine(node.Backend(), node.Config().BusyPoll), late: newLine(node.Backend(), env.AlwaysBlock)}
	node.OnExit(s.late.close)
	node.OnExit(s.line.close)
	node.OnExit(s.dropSenders)
	return s, nil
}

// SetRequestHandle names the handler and begins to serve, first what has come
// before. It may be called once.
func (s *TensorServer) SetRequestHandle(h Handler) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.handler != nil {
		return fmt.Errorf("set request handle: %w: this server has one", van.ErrInvalid)
	}
	s.handler = h
	c, err := s.node.AddCustomer(s.o.AppID, s.o.AppID, s.receive)
	if err != nil {
		s.handler = nil
		return err
	}
	s.customer = c
	s.serving.Store(c)
	c.OnWithdrawn(s.giveUp)
	s.unwatch = s.node.OnPeer(func(id int, up bool, _ error) {
		if !up {
			s.dropSender(id)
		}
	})
	return nil
}

// RegisterRecvTensor splits t evenly over the entries of workerRanks (group
// ranks) and keys, and makes part i the place where pushes of that worker under
// that key land; the batch then holds views on it. A push overwrites what the
// last one under its key left there. Call it before the first such push.
//
// All parts are registered, or none: after an error t is the caller's again. Only
// when the transport refuses a part after others stay those registered, and the error
// says so. An owner of t's memory that is a backend.Holder is retained for good for
// each part that is registered.
func (s *TensorServer) RegisterRecvTensor(t Tensor, workerRanks []int, keys []uint64) error {
	n := len(keys)
	if n == 0 || len(workerRanks) != n || t.Len()%n != 0 {
		return &van.Error{Op: "register receive tensor", Node: s.node.Name(), Err: van.ErrInvalid,
			Detail: fmt.Sprintf("%d worker ranks, %d keys, %d bytes: want as many ranks as keys, and a size that they divide", len(workerRanks), n, t.Len())}
	}
	if err := backend.CheckDevice(s.node.Backend(), t.mem); err != nil {
		return &van.Error{Op: "register receive tensor", Node: s.node.Name(), Err: fmt.Errorf("%w: %w", van.ErrInvalid, err)}
	}
	part := t.Len() / n
	places := make([]kv.RecvPlace, n)
	for i, key := range keys {
		places[i] = kv.RecvPlace{Worker: workerRanks[i], Key: key, Dst: t.mem.Sub(i*part, part)}
	}
	if err := s.buffers.Register(places...); err != nil {
		return &van.Error{Op: "register receive tensor", Node: s.node.Name(), Err: err}
	}
	return nil
}

// Pull is one request for a tensor.
type Pull struct {
	Key   uint64
	Len   int // bytes that the answer must have
	Dtype Dtype
	Shape []int64 // of the worker's pull tensor

	reply kv.ReplyTo
}

// Batch is a handle on what one worker sent in one call: its push tensors, and
// the pulls it wants answered. It is a small value. Push tensors are views on
// receive memory; they and the lists are valid until Response returns, or longer
// with Retain.
type Batch struct {
	*work
	gen uint64
}

// work is the state behind a Batch; it is used again for later ones.
type work struct {
	s        *TensorServer
	instance int    // node id of the worker's instance
	epoch    uint32 // of the worker's process, see van.Message
	customer int32  // the worker's
	single   bool
	first    int32 // timestamps
	last     int32
	pushes   []KeyTensor
	pulls    []Pull
	msgs     []*van.Message
	bytes    int           // of msgs
	ack      kv.ReplyTo    // of a single push
	state    atomic.Uint64 // generation<<1 | answered
	refs     atomic.Int32

	answers []KeyTensor // to the pulls, while the batch is in the server's line
	done    van.Completion
}

// SenderRank is the group rank of the worker.
func (b Batch) SenderRank() int { return van.RankOf(b.instance) / b.s.node.GroupSize() }

// Sender is the node id of the worker's group: 2*SenderRank + 9.
func (b Batch) Sender() int { return van.WorkerID(b.SenderRank()) }

// Single tells that the batch is one message, not marked as part of a batch.
func (b Batch) Single() bool { return b.single }

// LastTimestamp is the worker's timestamp of the last message of the batch.
func (b Batch) LastTimestamp() int32 { return b.last }

// Pushes are the push tensors in the order sent.
func (b Batch) Pushes() []KeyTensor { return b.pushes }

// Pulls are the wanted answers in the order asked for.
func (b Batch) Pulls() []Pull { return b.pulls }

// sender assembles the batches of one worker. Its messages come one at a time.
type sender struct {
	mu   sync.Mutex
	open []*work        // begun and not ended; the last one is the current one
	held []*van.Message // came before the message that they follow

	openBytes int // of the messages in open
	heldBytes int
}

// maxOpen bounds the batches that a worker may have begun and not ended, of which
// the oldest is given up then, and its messages that are held.
const maxOpen = 1024

// receive takes one request of a worker.
func (s *TensorServer) receive(msg *van.Message) {
	s.takeOne(msg)
	for s.early.Load() > 0 {
		next := s.sender(msg.Sender).unhold()
		if next == nil {
			return
		}
		s.early.Add(-1)
		s.takeOne(next)
		next.Release()
	}
}

// takeOne takes one message and says when it makes no sense.
func (s *TensorServer) takeOne(msg *van.Message) {
	if err := s.accept(msg); err != nil {
		if n, speak := s.node.Rarely("af: " + logx.Kind(err)); speak {
			s.node.Log().Warn("dropped a request", "err", err, "from", s.node.PeerName(msg.Sender), "message", msg.Meta.String(), "so far", n)
		}
	}
}

// accept adds msg to its batch and hands the batch on when it is complete.
func (s *TensorServer) accept(msg *van.Message) error {
	if err := kv.CheckSender(s.node, msg); err != nil {
		return err
	}
	if msg.SimpleApp || msg.Frames < 2 || msg.Keys.Len() != 8 {
		return fmt.Errorf("%w: tensor request with %d data frames and %d key bytes, want 2 and 8", van.ErrMalformed, msg.Frames, msg.Keys.Len())
	}
	if msg.Head < van.Single || msg.Head > van.BatchEnd {
		return fmt.Errorf("%w: batch flag %d, want 0 to 3", van.ErrMalformed, msg.Head)
	}
	x := s.sender(msg.Sender)
	x.mu.Lock()
	b, err := x.batchOf(s, msg)
	if err != nil {
		if s.reorders && x.hold(msg, s.node.Config().RecvBudgetPeer) {
			s.early.Add(1)
			err = nil
		}
		x.mu.Unlock()
		return err
	}
	err = b.add(msg)
	if err == nil {
		err = x.charge(b, msg)
	}
	if err != nil {
		x.remove(b)
		x.mu.Unlock()
		b.unref()
		return err
	}
	complete := b.single || msg.Head == van.BatchEnd
	if complete {
		x.remove(b)
	}
	x.mu.Unlock()

	// Pushes of a batch are acknowledged on arrival; a single one when the
	// application answers it.
	if msg.Push && !b.single {
		if err := s.acknowledge(msg); err != nil {
			if n, speak := s.node.Rarely("af: push not acknowledged: " + logx.Kind(err)); speak {
				s.node.Log().Warn("push not acknowledged", "err", err, "so far", n)
			}
		}
	}
	if complete {
		instance := b.instance
		s.handler(Batch{b, b.state.Load() >> 1})
		s.node.Flush(instance) // unless the answers have taken the acknowledgements along
	}
	return nil
}

func (s *TensorServer) sender(id int) *sender {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.senders[id]
	if x == nil {
		x = &sender{}
		s.senders[id] = x
	}
	return x
}

// dropSender gives up the unfinished batches of a worker that is gone.
func (s *TensorServer) dropSender(id int) {
	if open := s.dropOpen(id); open > 0 {
		s.node.Log().Warn("gave up unfinished batches of a lost worker", "worker", s.node.PeerName(id), "batches", open)
	}
}

// dropOpen gives up the unfinished batches of a worker and returns their number.
func (s *TensorServer) dropOpen(id int) int {
	s.mu.Lock()
	x := s.senders[id]
	s.mu.Unlock()
	if x == nil {
		return 0
	}
	x.mu.Lock()
	open, held := x.open, x.held
	x.open, x.held = nil, nil
	x.openBytes, x.heldBytes = 0, 0
	x.mu.Unlock()
	s.early.Add(int32(-len(held)))
	for _, m := range held {
		m.Release()
	}
	for _, b := range open {
		b.unref()
	}
	return len(open)
}

// giveUp drops what has come of a request that its worker does not wait for any more.
func (s *TensorServer) giveUp(w postoffice.Withdrawn) {
	s.mu.Lock()
	x := s.senders[w.Sender]
	s.mu.Unlock()
	if x != nil {
		x.mu.Lock()
		var open []*work
		for _, b := range slices.Clone(x.open) {
			if w.Has(b.customer, b.first) {
				x.remove(b)
				open = append(open, b)
			}
		}
		held := 0
		x.held = slices.DeleteFunc(x.held, func(m *van.Message) bool {
			if !w.Has(m.CustomerID, m.Timestamp) {
				return false
			}
			x.heldBytes -= m.PayloadLen()
			m.Release()
			held++
			return true
		})
		x.mu.Unlock()
		s.early.Add(int32(-held))
		for _, b := range open {
			b.unref()
		}
	}
	if f := s.unwanted.Load(); f != nil {
		(*f)(w.Sender)
	}
}

// OnUnwanted makes f the function that is told, with the node id of the worker's
// instance, that some of its batches may not be Wanted any more: it has given them up.
// f must not block. That a worker is lost, Node.OnPeer tells.
func (s *TensorServer) OnUnwanted(f func(worker int)) { s.unwanted.Store(&f) }

// Wanted tells whether the worker still waits for the answer: it has not given the batch
// up, which workers of this library tell, is not lost, and was not replaced by another
// process.
func (b Batch) Wanted() bool {
	if b.state.Load()>>1 != b.gen {
		return false
	}
	c := b.s.serving.Load()
	return c == nil || c.Wanted(b.instance, b.epoch, b.customer, b.first)
}

// batchOf finds or begins the batch that msg belongs to: batches of one worker
// may interleave as long as the timestamps of each are consecutive. x.mu is held.
func (x *sender) batchOf(s *TensorServer, msg *van.Message) (*work, error) {
	if msg.Head == van.Single || msg.Head == van.BatchStart {
		if len(x.open) >= maxOpen { // nobody will end the oldest
			old := x.open[0]
			x.remove(old)
			last := old.last
			old.unref()
			if n, speak := s.node.Rarely("af: open batches"); speak {
				s.node.Log().Warn("gave up a batch that has not ended", "worker", s.node.PeerName(msg.Sender), "last timestamp", last, "begun since", maxOpen, "so far", n)
			}
		}
		b := s.take(msg)
		x.open = append(x.open, b)
		return b, nil
	}
	for i := len(x.open) - 1; i >= 0; i-- {
		if b := x.open[i]; b.last+1 == msg.Timestamp && b.epoch == msg.Epoch {
			return b, nil
		}
	}
	return nil, fmt.Errorf("%w: batch flag %d at timestamp %d continues none of the %d open batches", van.ErrMalformed, msg.Head, msg.Timestamp, len(x.open))
}

// charge puts what the last message of b keeps in memory on its sender's account. Batches
// that have not ended have STEPAF_RECV_BUDGET_PEER bytes, the older ones are given up
// before the last; that one alone may have STEPAF_RECV_BUDGET. x.mu is held.
func (x *sender) charge(b *work, msg *van.Message) error {
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
		x.remove(old)
		if n, speak := s.node.Rarely("af: bytes of open batches"); speak {
			s.node.Log().Warn("gave up a batch that has not ended: its worker has begun too much", "worker", s.node.PeerName(msg.Sender),
				"last timestamp", old.last, "limit (STEPAF_RECV_BUDGET_PEER)", c.RecvBudgetPeer, "so far", n)
		}
		old.unref()
	}
	if b.bytes > max(c.RecvBudget, c.RecvBudgetPeer) && !failpoint.On("recv-budget") {
		return fmt.Errorf("%w: a batch of %d bytes before its end, want at most %d (STEPAF_RECV_BUDGET)", van.ErrInvalid, b.bytes, max(c.RecvBudget, c.RecvBudgetPeer))
	}
	return nil
}

// hold keeps a message that continues no open batch, if there is room. One that was lost
// and sent again comes after those that follow it; so does, over RDMA, one with a new
// key of a worker of the original's. x.mu is held.
func (x *sender) hold(msg *van.Message, limit int) bool {
	if len(x.held) >= maxOpen || x.heldBytes+msg.PayloadLen() > limit {
		return false
	}
	x.heldBytes += msg.PayloadLen()
	x.held = append(x.held, msg.Retain())
	return true
}

// unhold returns a held message whose turn has come, or nil. The caller releases
// it.
func (x *sender) unhold() *van.Message {
	x.mu.Lock()
	defer x.mu.Unlock()
	for i, m := range x.held {
		for _, b := range x.open {
			if b.last+1 == m.Timestamp {
				x.held = append(x.held[:i], x.held[i+1:]...)
				x.heldBytes -= m.PayloadLen()
				return m
			}
		}
	}
	return nil
}

// remove takes b off the open batches. x.mu is held.
func (x *sender) remove(b *work) {
	for i := range x.open {
		if x.open[i] == b {
			x.open = append(x.open[:i], x.open[i+1:]...)
			x.openBytes -= b.bytes
			return
		}
	}
}

// take begins a batch.
func (s *TensorServer) take(msg *van.Message) *work {
	s.mu.Lock()
	var b *work
	if n := len(s.free); n > 0 {
		b, s.free = s.free[n-1], s.free[:n-1]
	}
	s.mu.Unlock()
	if b == nil {
		b = &work{s: s}
	}
	b.instance, b.epoch, b.customer, b.first = msg.Sender, msg.Epoch, msg.CustomerID, msg.Timestamp
	b.single = msg.Head == van.Single
	b.pushes, b.pulls, b.msgs = b.pushes[:0], b.pulls[:0], b.msgs[:0]
	b.bytes = 0
	b.refs.Store(1)
	return b
}

// add adds one message to the batch.
func (b *work) add(msg *van.Message) error {
	if len(b.pushes)+len(b.pulls) >= MaxBatch {
		return fmt.Errorf("%w: batch of more than %d tensors", van.ErrMalformed, MaxBatch)
	}
	b.last = msg.Timestamp
	key := binary.LittleEndian.Uint64(msg.Keys.Host())
	d := Dtype(msg.Dtype)
	if !msg.Push {
		size, err := byteSize(d, msg.ShapeSlice())
		if err != nil || size != int(msg.ValLen) {
			return fmt.Errorf("%w: pull of key %d: %s%v is not the announced %d bytes (%w)", van.ErrMalformed, key, d, msg.ShapeSlice(), msg.ValLen, errOr(err))
		}
		p := b.growPulls()
		p.Key, p.Len, p.Dtype, p.reply = key, size, d, kv.ReplyOf(msg)
		p.Shape = append(p.Shape[:0], msg.ShapeSlice()...)
		return nil
	}
	mem, owned, err := b.s.buffers.Place(msg, key)
	if err != nil {
		return err
	}
	size, err := byteSize(d, msg.ShapeSlice())
	if err != nil || size != mem.Len() {
		return fmt.Errorf("%w: push of key %d: %s%v is not the %d bytes that came (%w)", van.ErrMalformed, key, d, msg.ShapeSlice(), mem.Len(), errOr(err))
	}
	t := Tensor{mem: mem, dtype: d, ndim: int8(msg.Dim), shape: msg.Shape}
	b.pushes = append(b.pushes, KeyTensor{Key: key, Val: t})
	if b.single {
		b.ack = kv.ReplyOf(msg)
	}
	if !owned {
		b.bytes += msg.PayloadLen()
		b.msgs = append(b.msgs, msg.Retain())
	}
	return nil
}

var errSizes = errors.New("sizes differ")

func errOr(err error) error {
	if err == nil {
		return errSizes
	}
	return err
}

// growPulls appends an entry whose shape slice is used again.
func (b *work) growPulls() *Pull {
	if n := len(b.pulls); n < cap(b.pulls) {
		b.pulls = b.pulls[:n+1]
	} else {
		b.pulls = append(b.pulls, Pull{})
	}
	return &b.pulls[len(b.pulls)-1]
}

// Retain keeps the push tensors valid until a matching Release, also beyond
// Response. Call it before Response.
func (b Batch) Retain() Batch {
	b.refs.Add(1)
	return b
}

// Release gives up one hold on the batch. Response gives up the first one; call
// Release only after Retain, or for a batch that will never be answered. It does
// nothing once all holds are given up.
func (b Batch) Release() {
	if b.state.Load()>>1 == b.gen {
		b.unref()
	}
}

// ReleaseOn is Release when work in stream still reads push tensors that lie on the
// node's device: it returns at once, and the hold ends with that work.
func (b Batch) ReleaseOn(stream Stream) {
	if b.state.Load()>>1 != b.gen {
		return
	}
	device := false
	for i := range b.pushes {
		device = device || !b.pushes[i].Val.mem.OnHost()
	}
	if !device {
		b.unref()
		return
	}
	event, err := b.s.late.mark(stream)
	switch {
	case errors.Is(err, backend.ErrUnsupported): // a graph has captured the use of the memory
		b.s.node.Log().Warn("received tensors are never used again", "worker", b.s.node.PeerName(b.instance), "err", err)
	case err != nil:
		b.unref() // the device is lost
	case event == nil && !b.s.late.busy(): // the work is done
		b.unref()
	case !b.s.late.add((*reading)(b.work), event):
		b.unref() // the node has left; its device's memory is freed after that work
	}
}

// reading is a batch that the device still reads.
type reading work

func (*reading) dead() bool   { return false }
func (r *reading) send(error) { (*work)(r).unref() }

// unref gives up one hold; after the last one the state is used again.
func (b *work) unref() {
	if b.refs.Add(-1) > 0 {
		return
	}
	b.state.Store((b.state.Load()>>1 + 1) << 1)
	for i, m := range b.msgs {
		m.Release()
		b.msgs[i] = nil
	}
	clear(b.pushes)
	s := b.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.free) < keepBatches {
		s.free = append(s.free, b)
	}
}

// Sent is called when an answer has left.
func (b *work) Sent() { b.unref() }

// Close takes the server off its node. Unfinished batches are dropped.
func (s *TensorServer) Close() {
	s.mu.Lock()
	c, unwatch := s.customer, s.unwatch
	s.mu.Unlock()
	if c == nil {
		return
	}
	unwatch()
	c.Close()
	s.line.close() // s.late goes on until the node has left: others may receive on it
	s.dropSenders()
}

// dropSenders gives up the unfinished batches of all workers: a worker whose connection
// broke in the middle of a batch may never have ended it.
func (s *TensorServer) dropSenders() {
	s.mu.Lock()
	ids := slices.Collect(maps.Keys(s.senders))
	s.mu.Unlock()
	for _, id := range ids {
		s.dropOpen(id)
	}
}
