package fakeverbs

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

type qpState int

const (
	qpInit qpState = iota // takes no work requests
	qpRTS                 // works
	qpError
	qpGone
)

// stall is why the first work request of a queue cannot be executed.
type stall int

const (
	moving stall = iota
	noPeer       // nobody acknowledges
	noReceive
)

// qp implements verbs.QP. What changes is guarded by net.mu.
type qp struct {
	net    *Net
	dev    *device
	id     *connID
	num    uint32
	opts   verbs.QPOptions
	inline int
	pinned bool

	state    qpState
	peer     *qp // from when it works
	retry    int
	rnr      int
	sq       fifo.Queue[work] // posted and not executed
	head     uint64           // work requests posted
	tail     uint64           // of them, known to be complete by a polled completion
	executed int
	sent     []sent
	free     int // receive requests posted
	stalled  stall
	stallSeq uint64 // changes with stalled
	asleep   bool   // it was broken by a process that stands still: the peer does not notice yet
}

// work is a work request that waits.
type work struct {
	verbs.SendWR
	pos  uint64
	data []byte // when inline
	late bool   // posted by a process that stands still
}

func (q *qp) Handle() verbs.Handle { return verbs.Handle(q.num) }
func (q *qp) Num() uint32          { return q.num }
func (q *qp) MaxInline() int       { return q.inline }
func (q *qp) Pinned() bool         { return q.pinned }

func (id *connID) CreateQP(o verbs.QPOptions) (verbs.QP, error) {
	err := id.begin(Op{Kind: OpCreateQP}, bound, addrResolved, routeResolved, requested, failed)
	n := id.net
	defer n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	const op = "create queue pair"
	switch most := n.cfg.MaxWR; {
	case id.dev == nil:
		return nil, id.fault(op, syscall.EINVAL, "it is not on a device (yet)")
	case id.qp != nil:
		return nil, id.fault(op, syscall.EINVAL, fmt.Sprintf("it has queue pair %d", id.qp.num))
	case o.SendDepth < 0 || o.SendDepth > most || o.RecvDepth < 0 || o.RecvDepth > most || o.Inline < 0 || o.Port < 0:
		return nil, id.fault(op, syscall.EINVAL, fmt.Sprintf("%+v, want no number below 0, nor depths above %d", o, most))
	}
	n.lastQP++
	q := &qp{net: n, dev: id.dev, id: id, num: n.lastQP, opts: o, inline: min(o.Inline, n.cfg.MaxInline), free: o.RecvDepth}
	ports := len(n.info(id.dev.host).Ports)
	q.pinned = ports > 1 && o.Port >= 1 && o.Port <= ports
	n.qps[q.Handle()] = q
	id.qp = q
	id.stack.counters.QueuePairs++
	n.recordCM(id, EventCreateQP, nil)
	return q, nil
}

func (q *qp) start(peer *qp, p verbs.ConnParam) {
	q.peer, q.retry, q.rnr = peer, p.RetryCount, p.RNRRetryCount
	if q.state == qpInit {
		q.state = qpRTS
	}
}

// breakQP moves q to the error state: all that is posted is flushed.
func (n *Net) breakQP(q *qp) {
	if q.state == qpError || q.state == qpGone {
		return
	}
	q.asleep = q.dev.stack.stopped
	q.state = qpError
	q.stalled = moving
	q.stallSeq++
	for q.sq.Len() > 0 {
		w := q.sq.Take()
		q.done(&w, verbs.StatusFlushed)
	}
	for ; q.free > 0; q.free-- {
		q.flushReceive()
	}
	if q.peer != nil {
		n.run(q.peer)
	}
}

func (q *qp) flushReceive() {
	q.dev.complete(entryCQ{Completion: verbs.Completion{Type: verbs.RecvFailed, Status: verbs.StatusFlushed,
		Cookie: q.opts.Cookie, QP: q.Handle(), Vendor: vendor(verbs.StatusFlushed)}, qp: q})
}

// endQP destroys q with its completions.
func (n *Net) endQP(q *qp) {
	q.asleep = q.asleep || q.dev.stack.stopped && q.state == qpRTS
	q.state = qpGone
	q.sq = fifo.Queue[work]{}
	q.stalled = moving
	q.stallSeq++
	delete(n.qps, q.Handle())
	delete(n.heldPairs, q.num)
	for range q.dev.cq.Len() {
		if e := q.dev.cq.Take(); e.qp != q {
			q.dev.cq.Put(e)
		}
	}
	if q.peer != nil {
		n.run(q.peer)
	}
}

// repost posts a receive request of q again.
func (n *Net) repost(q *qp) {
	switch q.state {
	case qpGone:
	case qpError:
		q.flushReceive()
	default:
		q.free++
		if q.peer != nil {
			n.run(q.peer)
		}
	}
}

// vendor is what a provider would add to a failure.
func vendor(s verbs.Status) uint32 {
	if s == verbs.StatusOK {
		return 0
	}
	return 0x80 + uint32(s)
}

// inlineBuffer returns an empty buffer for inline data; recycle takes it back.
func (n *Net) inlineBuffer() []byte {
	last := len(n.buffers) - 1
	if last < 0 {
		return nil
	}
	b := n.buffers[last]
	n.buffers = n.buffers[:last]
	return b[:0]
}

func (n *Net) recycle(b []byte) {
	if cap(b) > 0 {
		n.buffers = append(n.buffers, b)
	}
}

func (d *device) Post(wrs []verbs.SendWR) (int, error) {
	limit := len(wrs)
	var failed error
	for i := range wrs {
		if failed = d.stack.hook(Op{Kind: OpPost, Local: d.addr(), WR: &wrs[i]}); failed != nil {
			limit = i
			break
		}
	}
	n := d.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if d.ended() {
		return 0, fault("post", verbs.ErrClosed, "%s: %s", d.stack.name, d.host.name)
	}
	d.stack.counters.Posts++
	posted, chain := 0, 0
	touched := make([]*qp, 0, 8)
	for i := range wrs[:limit] {
		w := &wrs[i]
		if chain++; i == 0 || w.QP != wrs[i-1].QP {
			chain = 0
		}
		q, err := d.post(w, chain)
		if err != nil {
			failed = err
			break
		}
		posted++
		if !slices.Contains(touched, q) {
			touched = append(touched, q)
		}
	}
	d.stack.counters.WRs += posted
	for _, q := range touched {
		n.deliver(q)
	}
	return posted, failed
}

// post posts one work request. Nothing is executed yet.
func (d *device) post(w *verbs.SendWR, chain int) (*qp, error) {
	q := d.net.qps[w.QP]
	if q == nil || q.dev != d {
		return nil, fault("post", verbs.ErrClosed, "%s: queue pair %d", d.stack.name, w.QP)
	}
	bad := ""
	switch {
	case q.state == qpInit:
		bad = "it is not connected"
	case w.Op < verbs.OpSendImm || w.Op > verbs.OpWriteImm:
		bad = fmt.Sprintf("opcode %d, want 1 to 3", w.Op)
	case w.Flags&^(verbs.Signaled|verbs.Inline) != 0:
		bad = fmt.Sprintf("flags %#x, want 0 to 3", w.Flags)
	case w.ID >= 1<<63:
		bad = fmt.Sprintf("ID %#x, want it below 1<<63", w.ID)
	case w.Flags&verbs.Inline != 0 && int64(w.Len) > int64(q.inline):
		bad = fmt.Sprintf("%d bytes inline, want up to %d", w.Len, q.inline)
	}
	if bad != "" {
		return nil, fault("post", syscall.EINVAL, "%s: queue pair %d: %s", d.stack.name, q.num, bad)
	}
	if q.head-q.tail >= uint64(q.opts.SendDepth) {
		return nil, fault("post", verbs.ErrQueueFull, "%s: queue pair %d: %d work requests without a polled completion", d.stack.name,
			q.num, q.opts.SendDepth)
	}
	k := work{SendWR: *w, pos: q.head, late: d.stack.stopped}
	if w.Flags&verbs.Inline != 0 && w.Len > 0 {
		k.data = append(d.net.inlineBuffer(), at(w.LocalAddr, w.Len)...)
	}
	q.watch(&k)
	q.head++
	d.net.recordPost(q, &k, chain)
	if q.state == qpError {
		q.done(&k, verbs.StatusFlushed)
	} else {
		q.sq.Put(k)
	}
	return q, nil
}
