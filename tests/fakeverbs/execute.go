package fakeverbs

// This file owns the states of queue pairs, and the execution of posted work requests.

import (
	"time"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

type qpState int

const (
	qpInit qpState = iota // accepts no work requests
	qpRTS                 // connected
	qpError
	qpGone
)

// stallReason is the reason why the first work request of a queue cannot be executed.
type stallReason int

const (
	notStalled stallReason = iota
	noPeer                 // the peer does not acknowledge
	noReceive
)

// qp implements verbs.QP. net.mu guards the fields that change.
type qp struct {
	net    *Net
	dev    *device
	id     *connID
	num    uint32
	opts   verbs.QPOptions
	inline int
	pinned bool

	state    qpState
	peer     *qp // set when the queue pair is connected
	retry    int
	rnr      int
	sq       fifo.Queue[work] // posted and not executed
	head     uint64           // work requests posted
	tail     uint64           // of them, known to be complete from a polled completion
	executed int
	sent     []sent
	free     int // receive requests posted
	stalled  stallReason
	stallSeq uint64 // changes with stalled
	silent   bool   // a stopped process broke it: the peer does not notice yet
}

// work is a posted work request.
type work struct {
	verbs.SendWR
	pos          uint64
	data         []byte // if it is inline
	whileStopped bool   // posted by a stopped process
}

func (q *qp) Handle() verbs.Handle { return verbs.Handle(q.num) }
func (q *qp) Num() uint32          { return q.num }
func (q *qp) MaxInline() int       { return q.inline }
func (q *qp) Pinned() bool         { return q.pinned }

func (q *qp) start(peer *qp, p verbs.ConnParam) {
	q.peer, q.retry, q.rnr = peer, p.RetryCount, p.RNRRetryCount
	if q.state == qpInit {
		q.state = qpRTS
	}
}

// breakDown moves q to the error state and flushes all posted requests.
func (q *qp) breakDown() {
	if q.state == qpError || q.state == qpGone {
		return
	}
	q.silent = q.dev.stack.stopped
	q.state = qpError
	q.stalled = notStalled
	q.stallSeq++
	for q.sq.Len() > 0 {
		w := q.sq.Take()
		q.done(&w, verbs.StatusFlushed)
	}
	for ; q.free > 0; q.free-- {
		q.flushReceive()
	}
	if q.peer != nil {
		q.peer.run()
	}
}

func (q *qp) flushReceive() {
	q.complete(entryCQ{Completion: verbs.Completion{Type: verbs.RecvFailed, Status: verbs.StatusFlushed,
		Cookie: q.opts.Cookie, QP: q.Handle()}, qp: q})
}

// end destroys q, and removes its completions.
func (q *qp) end() {
	n := q.net
	q.silent = q.silent || q.dev.stack.stopped && q.state == qpRTS
	q.state = qpGone
	q.sq = fifo.Queue[work]{}
	q.stalled = notStalled
	q.stallSeq++
	delete(n.qps, q.Handle())
	delete(n.heldPairs, q.num)
	for range q.dev.cq.Len() {
		if e := q.dev.cq.Take(); e.qp != q {
			q.dev.cq.Put(e)
		}
	}
	if q.peer != nil {
		q.peer.run()
	}
}

// repost posts a receive request of q again.
func (q *qp) repost() {
	switch q.state {
	case qpGone:
	case qpError:
		q.flushReceive()
	default:
		q.free++
		if q.peer != nil {
			q.peer.run()
		}
	}
}

// buffers are reusable buffers for inline data.
type buffers [][]byte

// get returns an empty buffer; put takes it back.
func (b *buffers) get() []byte {
	last := len(*b) - 1
	if last < 0 {
		return nil
	}
	x := (*b)[last]
	*b = (*b)[:last]
	return x[:0]
}

func (b *buffers) put(x []byte) {
	if cap(x) > 0 {
		*b = append(*b, x)
	}
}

// deliver executes the posted requests of q, now or, with Config.Jitter, after a delay.
func (q *qp) deliver() {
	n := q.net
	if n.cfg.Jitter <= 0 {
		q.run()
		return
	}
	n.schedule.after(time.Duration(n.rnd.Int64N(int64(n.cfg.Jitter))), func() { q.run() })
}

// run executes requests of q until one cannot be executed.
func (q *qp) run() {
	for q.sq.Len() > 0 && !q.net.held && !q.net.heldPairs[q.num] && q.step() {
	}
}

// runAll calls run for all queue pairs.
func (n *Net) runAll() {
	for _, q := range n.byAge() {
		q.run()
	}
}

// step executes the first work request of q, and reports whether it could.
func (q *qp) step() bool {
	n := q.net
	if q.state != qpRTS {
		return false
	}
	p := q.peer
	switch {
	case p.silent && p.dev.stack.stopped || q.dev.stack.stopped && q.sq.All()[0].whileStopped:
		return false
	case p.state == qpError || p.state == qpGone || p.dev.ended() || p.dev.host.absent || n.cuts.has(q.dev.host.addr, p.dev.host.addr):
		q.wait(noPeer)
		return false
	case p.state == qpInit: // the peer has not read the Established event
		return false
	}
	if q.sq.All()[0].Op != verbs.OpWrite && p.free == 0 {
		q.wait(noReceive)
		return false
	}
	w := q.next()
	q.executed++
	s := verbs.StatusOK
	if n.failWR != nil {
		s = n.failWR(WR{SendWR: w.SendWR, Stack: q.dev.stack, Local: q.id.local, Peer: q.id.remote, Num: q.num, N: q.executed})
	}
	if s == verbs.StatusOK {
		s = q.execute(p, &w)
	}
	switch {
	case s != verbs.StatusOK:
		q.fail(&w, s)
	case w.Flags&verbs.Signaled != 0:
		q.done(&w, s)
	}
	n.freeBuffers.put(w.data)
	return true
}

// next removes the first work request from the queue.
func (q *qp) next() work {
	w := q.sq.Take()
	q.stalled = notStalled
	q.stallSeq++
	return w
}

// execute carries out w. p is the peer's queue pair.
func (q *qp) execute(p *qp, w *work) verbs.Status {
	if w.Len > q.net.cfg.MaxMsg {
		return verbs.StatusLocalLength
	}
	src := w.data
	if w.Flags&verbs.Inline == 0 && w.Len > 0 {
		m := q.dev.lkeys[w.LKey]
		ok := m != nil
		if ok {
			src, ok = m.bytes(w.LocalAddr, w.Len)
		}
		if !ok {
			return verbs.StatusLocalProt
		}
	}
	c := verbs.Completion{Cookie: p.opts.Cookie, QP: p.Handle(), Imm: w.Imm, Len: w.Len}
	if w.Op == verbs.OpSendImm {
		c.Type = verbs.RecvSend
		if w.Len > verbs.RecvSize {
			c.Type, c.Status = verbs.RecvFailed, verbs.StatusLocalLength
			c.Imm, c.Len = 0, 0
			p.free--
			p.complete(entryCQ{Completion: c, qp: p})
			return verbs.StatusRemoteInvalid
		}
		copy(c.Data[:], src)
	} else {
		c.Type = verbs.RecvWrite
		if w.Len > 0 { // a NIC ignores the key of an empty write
			m := p.dev.rkeys[w.RKey]
			if m == nil || m.access&verbs.RemoteWrite == 0 {
				return verbs.StatusRemoteAccess
			}
			dst, ok := m.bytes(w.RemoteAddr, w.Len)
			if !ok {
				return verbs.StatusRemoteAccess
			}
			copy(dst, src)
		}
	}
	if w.Op != verbs.OpWrite {
		p.free--
		p.complete(entryCQ{Completion: c, qp: p})
	}
	return verbs.StatusOK
}

// complete adds a completion of q. If that overruns the completion queue, all its queue pairs break.
func (q *qp) complete(e entryCQ) {
	if !q.dev.enter(e) {
		return
	}
	for _, o := range q.net.byAge() {
		if o.dev == q.dev {
			o.breakDown()
		}
	}
}

// done adds the completion of w.
func (q *qp) done(w *work, s verbs.Status) {
	q.complete(entryCQ{Completion: verbs.Completion{Type: verbs.SendDone, Status: s, ID: w.ID}, qp: q, pos: w.pos})
}

// fail completes w with s and breaks q. It also breaks the peer's queue pair if the peer has detected the error.
func (q *qp) fail(w *work, s verbs.Status) {
	q.done(w, s)
	q.breakDown()
	switch s {
	case verbs.StatusRemoteInvalid, verbs.StatusRemoteAccess, verbs.StatusRemoteOp:
		q.peer.breakDown()
	}
}

// wait records why q is stalled, and makes its first request fail after the time limit for that reason.
func (q *qp) wait(why stallReason) {
	if q.stalled == why {
		return
	}
	q.stalled = why
	q.stallSeq++
	cfg := &q.net.cfg
	limit, s := cfg.Retry, verbs.StatusRetryExceeded
	if why == noPeer && cfg.SevenForever && q.retry == 7 {
		limit = 0
	}
	if why == noReceive {
		limit, s = cfg.RNR, verbs.StatusRNRExceeded
		if q.rnr == 7 {
			limit = 0
		}
	}
	if limit <= 0 {
		return
	}
	seq := q.stallSeq
	q.net.schedule.after(limit, func() {
		if q.stallSeq == seq && q.state == qpRTS {
			w := q.next()
			q.fail(&w, s)
		}
	})
}
