package fakeverbs

import (
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// deliver executes what was posted to q, now or, with Config.Jitter, soon.
func (n *Net) deliver(q *qp) {
	if n.cfg.Jitter <= 0 {
		n.run(q)
		return
	}
	n.after(time.Duration(n.rnd.Int64N(int64(n.cfg.Jitter))), func() { n.run(q) })
}

// run executes what q has, as far as it can be.
func (n *Net) run(q *qp) {
	for q.sq.Len() > 0 && !n.held && !n.heldPairs[q.num] && n.step(q) {
	}
}

// step executes the first work request of q. It reports whether it could.
func (n *Net) step(q *qp) bool {
	if q.state != qpRTS {
		return false
	}
	p := q.peer
	switch {
	case p.asleep && p.dev.stack.stopped || q.dev.stack.stopped && q.sq.All()[0].late:
		return false
	case p.state == qpError || p.state == qpGone || p.dev.ended() || p.dev.host.absent || n.cut(q.dev.host.addr, p.dev.host.addr):
		q.wait(noPeer)
		return false
	case p.state == qpInit: // it has not read that it is connected
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
		s = n.execute(q, p, &w)
	}
	switch {
	case s != verbs.StatusOK:
		q.fail(&w, s)
	case w.Flags&verbs.Signaled != 0:
		q.done(&w, s)
	}
	n.recycle(w.data)
	return true
}

// next takes the first work request off the queue.
func (q *qp) next() work {
	w := q.sq.Take()
	q.stalled = moving
	q.stallSeq++
	return w
}

// execute does what w says, p being the queue pair of the peer.
func (n *Net) execute(q, p *qp, w *work) verbs.Status {
	if w.Len > n.cfg.MaxMsg {
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
			c.Type, c.Status, c.Vendor = verbs.RecvFailed, verbs.StatusLocalLength, vendor(verbs.StatusLocalLength)
			c.Imm, c.Len = 0, 0
			p.free--
			p.dev.complete(entryCQ{Completion: c, qp: p})
			return verbs.StatusRemoteInvalid
		}
		copy(c.Data[:], src)
	} else {
		c.Type = verbs.RecvWrite
		if w.Len > 0 { // a NIC does not look at the key otherwise
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
		p.dev.complete(entryCQ{Completion: c, qp: p})
	}
	return verbs.StatusOK
}

// done completes w.
func (q *qp) done(w *work, s verbs.Status) {
	q.dev.complete(entryCQ{Completion: verbs.Completion{Type: verbs.SendDone, Status: s, ID: w.ID, Vendor: vendor(s)}, qp: q, pos: w.pos})
}

// fail completes w with s and breaks q, and its peer when that is where s was found.
func (q *qp) fail(w *work, s verbs.Status) {
	q.done(w, s)
	q.net.breakQP(q)
	switch s {
	case verbs.StatusRemoteInvalid, verbs.StatusRemoteAccess, verbs.StatusRemoteOp:
		q.net.breakQP(q.peer)
	}
}

// wait notes why q does not move, and fails it when that lasts.
func (q *qp) wait(why stall) {
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
	q.net.after(limit, func() {
		if q.stallSeq == seq && q.state == qpRTS {
			w := q.next()
			q.fail(&w, s)
		}
	})
}
