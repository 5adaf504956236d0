package rdma

import (
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// This file owns bundles: small messages that leave together for a node of this library, as the push and the pull of a
// call and the two answers, go in one write to one slot. The device and the receiver then do the work of one message.

// bundle is the last write of a link to which messages may be added until it is posted, or another one follows.
type bundle struct {
	record uint32
	end    int // of the last message, from the beginning of the write
	room   int // 0: there is none
}

// maxBundle is more messages than a cell has room for.
const maxBundle = conn.CellSize/(rawMeta+trailerLen) + 1

// fitsBundle tells whether all of o lies in its meta's cell.
func (o *outgoing) fitsBundle() bool {
	return !o.oneShot && (o.inMeta || len(o.copies) == 0 && o.data == [len(o.data)]backend.Mem{})
}

// takes tells whether o may be added to b. The peer's lock is held.
func (b *bundle) takes(l *link, o *outgoing) bool {
	if b.room == 0 || !o.fitsBundle() || l.Last(b.record) == nil {
		return false
	}
	n, _ := l.dialect.layout(o)
	return aligned(b.end)+n <= b.room
}

// join adds o to the link's bundle, which takes it. p.mu is held.
func (p *peer) join(o *outgoing) {
	l := p.link
	if o.recalled {
		p.recycle(o)
		return
	}
	b := &l.bundle
	from := aligned(b.end)
	n, inMeta := l.dialect.layout(o)
	all := l.StageOf(b.record)[:from+n]
	meta := all[from:]
	copy(meta, o.meta)
	if o.into.Len() > 0 {
		if err := p.exposeDestination(l, o, meta); err != nil {
			p.failMessage(o, err)
			return
		}
	}
	t, _ := l.dialect.trailer(o, inMeta)
	t.before = b.end
	t.put(meta[n-trailerLen:])
	if inMeta {
		o.behind(meta[aligned(len(o.meta)):])
	}
	b.end = len(all)
	wr := l.Last(b.record)
	*wr = l.Staged(*wr, all)
	p.recycle(o)
}
