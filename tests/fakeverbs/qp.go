package fakeverbs

// This file owns the creation of queue pairs, and posting to them.

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

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
	ports := len(id.dev.host.info(&n.cfg).Ports)
	q.pinned = ports > 1 && o.Port >= 1 && o.Port <= ports
	n.qps[q.Handle()] = q
	id.qp = q
	id.stack.counters.QueuePairs++
	n.trace.cm(id, EventCreateQP, nil)
	return q, nil
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
		q.deliver()
	}
	return posted, failed
}

// post adds one work request to its queue. It does not execute it.
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
	k := work{SendWR: *w, pos: q.head, whileStopped: d.stack.stopped}
	if w.Flags&verbs.Inline != 0 && w.Len > 0 {
		k.data = append(d.net.freeBuffers.get(), at(w.LocalAddr, w.Len)...)
	}
	q.watch(&k)
	q.head++
	d.net.trace.post(q, &k, chain)
	if q.state == qpError {
		q.done(&k, verbs.StatusFlushed)
	} else {
		q.sq.Put(k)
	}
	return q, nil
}
