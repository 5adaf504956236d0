package af

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/streamqueue"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Call is a PushPull in flight, see postoffice.Call.
type Call = postoffice.Call

// WorkerOptions of NewWorker. The zero value is what StepMesh uses.
type WorkerOptions struct {
	AppID      int
	CustomerID int // tells the workers of one application on this node apart

	// Timeout is how long Call.Wait waits when its context has no deadline, counted from
	// the PushPull: 0 is postoffice.DefaultTimeout, negative no limit.
	Timeout time.Duration
}

// Worker pushes tensors to all servers and pulls results back. All methods are safe for
// concurrent use.
type Worker struct {
	node     postoffice.App
	customer *postoffice.Customer
	servers  []int // node ids by server group rank, ascending
	timeout  time.Duration
	revoker  van.Revoker // nil when no peer writes into pull tensors
	flusher  van.Flusher // nil when nothing is held

	queue  *streamqueue.Queue // of batches with tensors on the device, and those behind them
	graphs graphs             // exchanges that streams start

	mu   sync.Mutex
	free []*batch
}

// NewWorker makes a worker on node, which must have the worker role. A cluster's servers
// must be known: call it after postoffice.Start.
func NewWorker(node *postoffice.Node, o WorkerOptions) (*Worker, error) {
	if node.Role() != van.Worker {
		return nil, fmt.Errorf("%w: tensor worker on %s, want a node with role worker", van.ErrInvalid, node.Name())
	}
	w := &Worker{node: node.App(), servers: node.Topology().ServerInstances(), timeout: o.Timeout}
	w.revoker, _ = van.As[van.Revoker](node.Van())
	w.flusher, _ = van.As[van.Flusher](node.Van())
	c, err := w.node.AddCustomer(o.AppID, o.CustomerID, func(msg *van.Message) {
		if n, speak := w.node.Rarely("af: request to a worker"); speak {
			node.Log().Warn("dropped a request: a tensor worker serves none", "from", van.NodeName(msg.Sender), "so far", n)
		}
	})
	if err != nil {
		return nil, err
	}
	c.KeepTraces()
	w.customer = c
	w.queue = streamqueue.New(node.Backend(), node.Config().BusyPoll)
	w.graphs.w, w.graphs.spin = w, node.Config().BusyPoll.Spin()
	w.node.OnExit(w.queue.Close)
	w.node.OnExit(w.graphs.close)
	return w, nil
}

// batch is one PushPull in flight.
type batch struct {
	postoffice.Request
	w        *Worker
	x        *Exchange // that has started it, or nil
	byStream *replayed // by which a stream has started it, or nil
	servers  []int     // node ids, ascending: w.servers, to, or those of x
	to       []int     // room for some of them
	pushes   []KeyTensor
	pulls    []KeyTensor // server-major: server*q + i
	p, q     int
	keys     [][8]byte // key frames: pushes, then pulls
	skip     []bool    // by server: sending to it has failed
	msg      van.Message
	queued   bool         // in the worker's queue
	refs     atomic.Int32 // the request, and the queue while it is there
}

// PushPull sends every push tensor to every server, and asks server s for
// the pull tensors pull[s*Q : (s+1)*Q], where Q is len(pull) divided by the number
// of servers. It returns at once; the call has P+Q consecutive timestamps,
// pushes first. Either list may be empty, not both. Options are To, Within and a Stream.
//
// Keys of one list must differ (for pulls: those of one server). Tensors must
// stay as they are until Call.Wait has returned. A pull tensor is
// filled by the time Wait returns nil; its size must be that of the answer.
//
// Batches are sent in the order of the calls. A batch with tensors on the node's device
// waits for work on that device, see Stream; when that work fails, so does Wait.
func (w *Worker) PushPull(push, pull []KeyTensor, opts ...CallOption) (Call, error) {
	o, err := with(options{limit: w.timeout}, opts)
	b := w.take()
	if err == nil {
		err = b.address(o.to)
	}
	var device bool
	if err == nil {
		device, err = w.check(push, pull, len(b.servers))
	}
	if err != nil {
		b.unref()
		return Call{}, &van.Error{Op: "push_pull", Node: w.node.Name(), Err: err}
	}
	b.pushes = append(b.pushes[:0], push...)
	b.pulls = append(b.pulls[:0], pull...)
	b.hold()
	return b.start(device, o)
}

// start sends b, whose tensors are checked and held, or puts it into the queue. It takes b
// over.
func (b *batch) start(device bool, o options) (Call, error) {
	w := b.w
	var event backend.Event
	if device {
		var err error
		if event, err = w.queue.Mark(uintptr(o.stream)); err != nil {
			b.letGo()
			b.Recycle()
			return Call{}, &van.Error{Op: "push_pull", Node: w.node.Name(), Err: err}
		}
	}
	// What a stream has started goes first: the streams of others may wait for that one.
	b.queued = event != nil || b.byStream == nil && w.queue.Busy()
	b.p, b.q = len(b.pushes), len(b.pulls)/len(b.servers)
	b.fillKeys()
	if err := w.customer.Open(&b.Request, "push_pull", b, b.p+b.q, b.servers); err != nil {
		w.queue.Unmark(event)
		b.queued = false
		b.Finished(err)
		b.Recycle()
		return Call{}, err
	}
	call := b.Call(o.limit)
	if !b.queued {
		if b.Begin() { // else a server is away: Wait says so, and the others get nothing that they could not answer
			b.sendAll(call.Timestamp())
			b.End()
		}
		return call, nil
	}
	b.refs.Add(1)
	if !w.queue.Add(b, event) {
		b.SendNow(van.ErrClosed)
	}
	return call, nil
}

// address sets the servers of b: those with the given ranks, or all.
func (b *batch) address(to To) error {
	all := b.w.servers
	if b.servers = all; to == nil {
		return nil
	}
	if err := to.check(len(all)); err != nil {
		return err
	}
	if len(to) == 0 {
		return fmt.Errorf("%w: to no server, want at least one", van.ErrInvalid)
	}
	b.to = b.to[:0]
	for _, r := range to {
		b.to = append(b.to, all[r])
	}
	b.servers = b.to
	return b.w.mayLeaveOut(to)
}

// mayLeaveOut refuses to send to some of the servers only, unless all are of this library.
func (w *Worker) mayLeaveOut(to To) error {
	if to == nil || len(to) == len(w.servers) {
		return nil
	}
	for _, id := range w.servers {
		if !w.node.Native(id) {
			return fmt.Errorf("%w: to servers %v of %d: %s is of another implementation, which waits for a batch of every worker; send to all",
				van.ErrInvalid, append([]int(nil), to...), len(w.servers), w.node.PeerName(id))
		}
	}
	return nil
}

// Dead implements streamqueue.Entry.
func (b *batch) Dead() bool { return !b.Pending() }

// SendNow implements streamqueue.Entry: it sends the batch unless it has failed meanwhile.
func (b *batch) SendNow(err error) {
	if b.Begin() {
		if err == nil {
			b.sendAll(b.First())
		} else {
			b.w.customer.Abort(&b.Request, &van.Error{Op: "push_pull", Node: b.w.node.Name(), Detail: fmt.Sprintf("handler %d", b.First()),
				Elapsed: b.w.customer.Elapsed(b.First()), Err: err})
		}
		b.End()
	}
	b.unref()
}

// sendAll sends the messages, or fails the request.
func (b *batch) sendAll(ts int32) {
	if err := b.sendMessages(ts); err != nil {
		b.w.customer.Abort(&b.Request, err)
		for _, id := range b.servers {
			flush(b.w.flusher, id)
		}
	}
}

// flush sends messages to node id that the transport holds because of More.
func flush(f van.Flusher, id int) {
	if f != nil {
		f.Flush(id)
	}
}

// check refuses what cannot be sent, before anything is. It tells whether a tensor
// lies on the device.
func (w *Worker) check(push, pull []KeyTensor, servers int) (device bool, err error) {
	if err := checkLists(push, pull, servers); err != nil {
		return false, err
	}
	a, err := onDevice(w.node.Backend(), push, "push")
	if err != nil {
		return false, err
	}
	b, err := onDevice(w.node.Backend(), pull, "pull")
	return a || b, err
}

// checkLists refuses lists that make no sense for n servers.
func checkLists(push, pull []KeyTensor, n int) error {
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

func (w *Worker) take() *batch {
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

// Recycle puts b back. It is called by the customer when the call is waited for or
// forgotten.
func (b *batch) Recycle() {
	if x := b.x; x != nil {
		if b.x = nil; b.byStream == nil {
			x.ready()
		}
		b.byStream = nil
	}
	b.unref()
}

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
	b.skip = append(b.skip[:0], make([]bool, len(b.servers))...)
	one := func(s int, push bool, i int, kt *KeyTensor, key []byte) {
		if b.skip[s] {
			return
		}
		if err := b.sendOne(b.servers[s], ts, push, b.flag(i), kt, key); err != nil {
			b.skip[s] = true
			failed = cmp.Or(failed, err)
		}
	}
	for i := range b.pushes {
		for s := range b.servers {
			one(s, true, i, &b.pushes[i], b.keys[i][:])
		}
		ts++
	}
	for i := range b.q {
		for s := range b.servers {
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

// hold keeps the memory of the tensors until letGo, if their owners count.
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
		b.w.queue.GiveUp(b)
	}
	if r := b.w.revoker; r != nil && err != nil {
		for i := range b.pulls {
			r.Revoke(b.pulls[i].Val.mem) // an answer that is late must not come there
		}
	}
	b.letGo()
	if r := b.byStream; r != nil { // nobody waits for it who would allow the next one
		b.x.ready()
		r.finish(err)
	}
}

// letGo ends hold.
func (b *batch) letGo() {
	for i := range b.pushes {
		b.pushes[i].Val.mem.Release()
	}
	for i := range b.pulls {
		b.pulls[i].Val.mem.Release()
	}
}

// Customer is the worker's share of its node. Bindings to other languages, which know a
// call by its timestamp, wait and look up traces with it.
func (w *Worker) Customer() *postoffice.Customer { return w.customer }

// InFlight is the number of calls that are not finished or not waited for. Of
// those finished that nobody waits for, the latest 4096 are remembered.
func (w *Worker) InFlight() int { return w.customer.InFlight() }

// Close fails what is in flight and takes the worker off its node.
func (w *Worker) Close() {
	w.customer.Close()
	w.graphs.close()
	w.queue.Close()
}
