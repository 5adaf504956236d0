package af

// Batches in flight of a worker, from the check of their lists until their reuse. They do not know exchanges or
// graphs, only what these request to be notified of at the end.

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/streamqueue"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// calls creates the batches of a worker. All fields but free are constant once the worker is created.
type calls struct {
	node     cluster.App
	customer *cluster.Customer
	servers  []int           // node ids by server group rank, ascending
	revoker  van.Invalidator // nil if no peer writes into pull tensors

	queue *streamqueue.Queue // of batches with device tensors, and later ones

	mu   sync.Mutex
	free []*batch // under mu
}

// batch is one PushPull in flight.
type batch struct {
	cluster.Request
	c        *calls
	started  *atomic.Bool // of the Prepared that has started it, or nil
	byStream *rounds      // of the stream that has started it, or nil
	servers  []int        // node ids, ascending: c.servers, to, or those of a Prepared
	to       []int        // storage for a subset of servers
	pushes   []KeyTensor
	pulls    []KeyTensor // server-major: server*q + i
	p, q     int
	places   []span // storage for apart
	msg      van.Message
	queued   bool         // in the queue
	refs     atomic.Int32 // held by the request, by start, and by the queue while the batch is in it
}

// start sends b, whose tensors are checked and retained, or puts it into the queue. It takes ownership of b.
func (b *batch) start(device bool, o options) (Call, error) {
	c := b.c
	var event backend.Event
	if device {
		var err error
		if event, err = c.queue.RecordEvent(uintptr(o.stream)); err != nil {
			b.release()
			b.Recycle()
			return Call{}, &van.Error{Op: "push_pull", Node: c.node.Name(), Err: err}
		}
	}
	// A batch started by a stream is sent first: streams of other batches may wait for it.
	b.queued = event != nil || b.byStream == nil && c.queue.Busy()
	b.p, b.q = len(b.pushes), len(b.pulls)/len(b.servers)
	b.Pushes = b.p
	b.refs.Add(1) // from Open on, the request may fail and be recycled
	defer b.unref()
	if err := c.customer.Open(&b.Request, "push_pull", b, b.p+b.q, b.servers); err != nil {
		c.queue.ReturnEvent(event)
		b.queued = false
		b.Finished(err)
		b.Recycle()
		return Call{}, err
	}
	call := b.Call(o.limit)
	if !b.queued {
		if b.Begin() { // otherwise a server is lost: Wait returns that error, and the other servers get no batch that they could not answer
			b.sendAll(call.Timestamp())
			b.End()
		}
		return Call(call), nil
	}
	b.refs.Add(1)
	if !c.queue.Add(b, event) {
		b.SendNow(van.ErrClosed)
	}
	return Call(call), nil
}

// address sets the servers of b: those with the given ranks, or all.
func (b *batch) address(to To) error {
	all := b.c.servers
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
	return b.c.mayLeaveOut(to)
}

// mayLeaveOut returns an error for a call to a subset of the servers, unless all servers are of this library.
func (c *calls) mayLeaveOut(to To) error {
	if to == nil || len(to) == len(c.servers) {
		return nil
	}
	for _, id := range c.servers {
		if !c.node.Native(id) {
			return fmt.Errorf("%w: to servers %v of %d: %s is of another implementation, which waits for a batch of every worker; send to all",
				van.ErrInvalid, append([]int(nil), to...), len(c.servers), c.node.PeerName(id))
		}
	}
	return nil
}

// Canceled implements streamqueue.Entry.
func (b *batch) Canceled() bool { return !b.Pending() }

// SendNow implements streamqueue.Entry: it sends the batch unless it has failed meanwhile.
func (b *batch) SendNow(err error) {
	if b.Begin() {
		if err == nil {
			b.sendAll(b.First())
		} else {
			b.c.customer.Abort(&b.Request, &van.Error{Op: "push_pull", Node: b.c.node.Name(), Detail: fmt.Sprintf("handler %d", b.First()),
				Elapsed: b.c.customer.Elapsed(b.First()), Err: err})
		}
		b.End()
	}
	b.unref()
}

// sendAll sends the messages, or fails the request.
func (b *batch) sendAll(ts int32) {
	if err := b.sendMessages(ts); err != nil {
		b.c.customer.Abort(&b.Request, err)
	}
}

// fill copies the lists to b, and returns an error if they cannot be sent to b.servers. It reports whether a tensor is on the
// device.
func (b *batch) fill(push []KeyTensor, pull [][]KeyTensor) (device bool, err error) {
	if err := checkLists(push, pull, len(b.servers)); err != nil {
		return false, err
	}
	b.pushes, b.pulls = append(b.pushes[:0], push...), b.pulls[:0]
	for _, list := range pull {
		b.pulls = append(b.pulls, list...)
	}
	if err := b.apart(b.pushes, b.pulls); err != nil {
		return false, err
	}
	home := b.c.node.Backend()
	if i, at, err := onDevice(home, b.pushes); err != nil {
		return false, fmt.Errorf("%w: %s: %w", van.ErrInvalid, b.name("push", i), err)
	} else if at {
		device = true
	}
	i, at, err := onDevice(home, b.pulls)
	if err != nil {
		return false, fmt.Errorf("%w: %s: %w", van.ErrInvalid, b.name("pull", i), err)
	}
	return device || at, nil
}

// name names tensor i of b.pushes or b.pulls in errors.
func (b *batch) name(kind string, i int) string {
	if kind == "push" {
		return fmt.Sprintf("push tensor %d (key %d)", i, b.pushes[i].Key)
	}
	if n := len(b.servers); n > 1 {
		q := len(b.pulls) / n
		return fmt.Sprintf("pull tensor %d (key %d) of %s", i%q, b.pulls[i].Key, van.NodeName(b.servers[i/q]))
	}
	return fmt.Sprintf("pull tensor %d (key %d)", i, b.pulls[i].Key)
}

// span is the memory of a tensor: number i of the pushes or of the pulls.
type span struct {
	from, to uint64
	dev      backend.Device
	i        int32
	push     bool
}

// apart returns an error for pull tensors that share memory, since the later of two answers would overwrite the
// earlier one. With several servers, pull tensors may not share memory with push tensors either: one server may
// answer before another one has received the push.
func (b *batch) apart(push, pull []KeyTensor) error {
	if len(b.servers) == 1 || len(pull) == 0 {
		push = nil
	}
	if len(push)+len(pull) < 2 {
		return nil
	}
	l := b.places[:0]
	for i := range pull {
		if m := &pull[i].Val.mem; m.Len() > 0 {
			l = append(l, span{m.Addr(), m.Addr() + uint64(m.Len()), m.Device(), int32(i), false})
		}
	}
	pulls := len(l)
	for i := range push {
		if m := &push[i].Val.mem; m.Len() > 0 {
			l = append(l, span{m.Addr(), m.Addr() + uint64(m.Len()), m.Device(), int32(i), true})
		}
	}
	b.places = l
	if len(l) > fewTensors {
		return b.apartSorted()
	}
	for k := range l {
		x := &l[k]
		for j := range min(k, pulls) {
			if y := &l[j]; y.from < x.to && x.from < y.to && y.dev == x.dev {
				return b.shared(y, x)
			}
		}
	}
	return nil
}

// fewTensors is the number of tensors up to which all pairs are compared.
const fewTensors = 24

// apartSorted is apart for many tensors: it sorts them, and compares each one with the latest end of those before it.
func (b *batch) apartSorted() error {
	slices.SortFunc(b.places, func(x, y span) int {
		if x.dev != y.dev {
			return cmp.Or(cmp.Compare(x.dev.Type, y.dev.Type), cmp.Compare(x.dev.ID, y.dev.ID))
		}
		return cmp.Compare(x.from, y.from)
	})
	var lastPull, lastPush *span // of the tensors so far, the one with the latest end
	for k := range b.places {
		x := &b.places[k]
		if y := lastPull; y != nil && y.dev == x.dev && y.to > x.from {
			return b.shared(y, x)
		}
		if y := lastPush; y != nil && y.dev == x.dev && y.to > x.from && !x.push {
			return b.shared(x, y)
		}
		last := &lastPull // none of them reaches beyond x
		if x.push {
			if last = &lastPush; *last != nil && (*last).dev == x.dev && (*last).to > x.to {
				continue
			}
		}
		*last = x
	}
	return nil
}

// shared is the error of a pull tensor x that shares memory with y.
func (b *batch) shared(x, y *span) error {
	kind, why := "pull", "each is filled by an answer of its own"
	switch {
	case y.push:
		kind, why = "push", fmt.Sprintf("one of the %d servers may fill it while the push is on its way to another", len(b.servers))
	case x.i < y.i:
		x, y = y, x
	}
	return fmt.Errorf("%w: %s shares memory with %s, want memory of its own: %s", van.ErrInvalid, b.name("pull", int(x.i)), b.name(kind, int(y.i)), why)
}

// checkLists returns an error for lists that are invalid for n servers.
func checkLists(push []KeyTensor, pull [][]KeyTensor, n int) error {
	q := 0
	if len(pull) > 0 {
		if q = len(pull[0]); len(pull) != n {
			return fmt.Errorf("%w: %d lists of pull tensors for %d servers, want a list for each", van.ErrInvalid, len(pull), n)
		}
	}
	switch {
	case len(push)+q == 0:
		return fmt.Errorf("%w: no push and no pull tensors, want at least one", van.ErrInvalid)
	case len(push)+q > van.MaxParts:
		return fmt.Errorf("%w: %d tensors in one batch, want at most %d", van.ErrInvalid, len(push)+q, van.MaxParts)
	}
	if err := distinct(push, "push"); err != nil {
		return err
	}
	for s, list := range pull {
		if len(list) != q {
			return fmt.Errorf("%w: %d pull tensors of server 0 and %d of server %d, want the same number of each", van.ErrInvalid, q, len(list), s)
		}
		if err := distinct(list, "pull"); err != nil {
			return fmt.Errorf("%w for server %d", err, s)
		}
	}
	return nil
}

// distinct returns an error for a list that contains a key twice: answers and receive buffers are found by key.
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

func (c *calls) take() *batch {
	c.mu.Lock()
	var b *batch
	if n := len(c.free); n > 0 {
		b = c.free[n-1]
		c.free = c.free[:n-1]
	}
	c.mu.Unlock()
	if b == nil {
		b = &batch{c: c}
	}
	b.refs.Store(1)
	return b
}

// keepBatches is the maximum number of unused batches that a worker keeps for reuse.
const keepBatches = 256

// Recycle puts b back for reuse. The customer calls it after Wait, or when the call is forgotten.
func (b *batch) Recycle() {
	if b.started != nil && b.byStream == nil {
		b.started.Store(false)
	}
	b.started, b.byStream = nil, nil
	b.unref()
}

func (b *batch) unref() {
	if b.refs.Add(-1) > 0 {
		return
	}
	clear(b.pushes)
	clear(b.pulls)
	b.c.mu.Lock()
	defer b.c.mu.Unlock()
	if len(b.c.free) < keepBatches {
		b.c.free = append(b.c.free, b)
	}
}

// sendMessages sends a message to each server. An error for one server does not stop the others. It returns the first error.
func (b *batch) sendMessages(ts int32) (failed error) {
	m := &b.msg
	for s, id := range b.servers {
		m.Reset()
		m.Receiver, m.Request, m.Push, m.Timestamp = id, true, b.q == 0, ts
		m.AppID, m.CustomerID = int32(b.c.customer.AppID()), int32(b.c.customer.ID())
		for i := range b.pushes {
			b.pushes[i].addTo(m, true)
		}
		for i := range b.q {
			b.pulls[s*b.q+i].addTo(m, false)
		}
		m.Key, m.ValLen = m.Parts[0].Key, int32(m.Parts[0].Len)
		m.WriteDirectory()
		failed = cmp.Or(failed, b.c.node.Send(m))
	}
	m.Reset() // m keeps no reference to the tensors
	return failed
}

// addTo adds a tensor to a request.
func (kt *KeyTensor) addTo(m *van.Message, push bool) {
	t := &kt.Val
	m.Parts = append(m.Parts, van.Part{Key: kt.Key, Push: push, Len: t.mem.Len(), Addr: t.mem.Addr(), Device: t.Device(),
		Dtype: int32(t.dtype), Dim: int32(t.rank()), Shape: t.shape})
	if p := &m.Parts[len(m.Parts)-1]; push {
		p.Vals = t.mem
	} else {
		p.Into = t.mem
	}
}

// Answer handles one message with an acknowledgement of pushes, the value of one pull, or the values of all pulls.
func (b *batch) Answer(i, from int, msg *van.Message) error {
	push := i < b.p
	switch {
	case msg.IsBatch() && (i != b.p || len(msg.Parts) != b.q):
		return fmt.Errorf("%w: answer with %d values to timestamp %d, want %d values to timestamp %d", van.ErrMalformed, len(msg.Parts),
			msg.Timestamp, b.q, b.First()+int32(b.p))
	case msg.Push != push:
		return fmt.Errorf("%w: answer to timestamp %d is for a push=%t, want %t", van.ErrMalformed, msg.Timestamp, msg.Push, push)
	case msg.AcksBatch() && (b.q > 0 || i != b.p-1):
		return fmt.Errorf("%w: acknowledgement of all pushes to timestamp %d, want one to timestamp %d, of a batch without pulls", van.ErrMalformed,
			msg.Timestamp, b.First()+int32(b.p)-1)
	case push:
		return nil
	}
	slots := b.pulls[from*b.q+i-b.p:]
	if !msg.IsBatch() {
		if msg.Frames < 2 || msg.Keys.Len() != 8 {
			return fmt.Errorf("%w: pull answer for key %d has %d data frames and %d key bytes, want 2 and 8", van.ErrMalformed, slots[0].Key, msg.Frames, msg.Keys.Len())
		}
		return b.fillPull(&slots[0], binary.LittleEndian.Uint64(msg.Keys.Host()), msg.Vals, msg.Placed)
	}
	for k := range msg.Parts {
		p := &msg.Parts[k]
		if err := b.fillPull(&slots[k], p.Key, p.Vals, p.Placed); err != nil {
			return err
		}
	}
	return nil
}

// fillPull copies an answer to its pull tensor, unless the transport has placed it there.
func (b *batch) fillPull(slot *KeyTensor, key uint64, vals backend.Mem, placed bool) error {
	if key != slot.Key {
		return fmt.Errorf("%w: pull answer has key %d, want %d", van.ErrMalformed, key, slot.Key)
	}
	if vals.Len() != slot.Val.Len() {
		return fmt.Errorf("%w: pull answer for key %d has %d bytes, the pull tensor %s has %d", van.ErrInvalid, slot.Key,
			vals.Len(), slot.Val.String(), slot.Val.Len())
	}
	if placed || vals.Len() == 0 {
		return nil
	}
	if len(b.servers) == 1 { // the answer may be written to a push tensor
		b.Arrived(b.p)
	}
	return b.c.node.Backend().Copy(slot.Val.mem, vals)
}

// retain retains the memory of the tensors until release.
func (b *batch) retain() {
	for _, l := range [...][]KeyTensor{b.pushes, b.pulls} {
		for i := range l {
			l[i].Val.mem.Retain()
		}
	}
}

// Finished is called when the batch has ended: the tensors are the caller's again.
func (b *batch) Finished(err error) {
	if b.queued && err != nil {
		b.c.queue.Cancel(b)
	}
	if r := b.c.revoker; r != nil && err != nil {
		for i := range b.pulls {
			r.Invalidate(b.pulls[i].Val.mem) // a late answer must not be written there
		}
	}
	b.release()
	if r := b.byStream; r != nil { // there is no Wait, which would permit the next round
		b.started.Store(false)
		r.finish(err)
	}
}

// release releases the memory that retain has retained.
func (b *batch) release() {
	for _, l := range [...][]KeyTensor{b.pushes, b.pulls} {
		for i := range l {
			l[i].Val.mem.Release()
		}
	}
}
