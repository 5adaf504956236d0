package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// This file owns bundles: small messages that leave together for a node of this library, as the push and the pull of a
// call and the two answers, go in one write to one slot. The device and the receiver then do the work of one message.

// bundle is the last write of a link to which messages may be added until it is posted, or another one follows.
type bundle struct {
	record uint32
	end    int // of the last message, from the beginning of the write
	limit  int // 0: there is none
}

// maxBundle is more messages than a cell has room for.
const maxBundle = conn.CellSize/(rawMeta+trailerLen) + 1

// fits tells whether o may be added to b. The peer's lock is held.
func (b *bundle) fits(l *link, o *outgoing) bool {
	if b.limit == 0 || !o.fitsBundle() || l.queue.Last(b.record) == nil {
		return false
	}
	n, _ := l.dialect.layout(o)
	return aligned(b.end)+n <= b.limit
}

// add adds o, which b takes, to p's link's. p.mu is held.
func (b *bundle) add(p *peer, o *outgoing) {
	l := p.link
	from := aligned(b.end)
	n, inMeta := l.dialect.layout(o)
	all := l.queue.StageOf(b.record)[:from+n]
	meta := all[from:]
	copy(meta, o.meta)
	if o.destination.Len() > 0 {
		if err := p.registerDestination(l, o, meta); err != nil {
			p.failMessage(o, err)
			return
		}
	}
	t, _ := l.dialect.trailer(o, inMeta)
	t.previousEnd = b.end
	t.put(meta[n-trailerLen:])
	if inMeta {
		o.writeFrames(meta[aligned(len(o.meta)):])
	}
	b.end = len(all)
	wr := l.queue.Last(b.record)
	*wr = l.queue.Staged(*wr, all)
	p.recycle(o)
}

// writtenMessages is what was written to a slot: its messages, in order.
type writtenMessages [maxBundle][]byte

// parse finds the messages in the first n bytes of mem.
func (w *writtenMessages) parse(d inboundDialect, mem []byte, n int) ([][]byte, error) {
	if n < rawMeta || n > len(mem) {
		return nil, &van.FieldError{Field: "meta", Value: fmt.Sprintf("%d bytes", n), Want: fmt.Sprintf("%d to %d", rawMeta, len(mem))}
	}
	var ends [maxBundle]int // the last one first
	count := 0
	for end := n; count == 0 || end > 0; count++ {
		if count == maxBundle {
			return nil, &van.FieldError{Field: "messages in one write", Value: fmt.Sprint("more than ", count), Want: fmt.Sprintf("up to %d", count)}
		}
		ends[count] = end
		var err error
		if end, err = d.previousEnd(mem[:end]); err != nil {
			return nil, err
		}
	}
	from := 0
	for i := range count {
		end := ends[count-1-i]
		w[i], from = mem[from:end:end], aligned(end)
	}
	return w[:count], nil
}
