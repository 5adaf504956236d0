package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// This file owns bundles. A bundle is one write of several small messages to one slot, for example the push and the pull of a call, or
// the answers to two pulls. The device and the receiver then do the work of one message. Only nodes of this library receive bundles.

// bundle is the last write that was added to a link. Messages may be added to it until it is posted or another write follows.
type bundle struct {
	record uint32
	end    int // offset of the last message's end in the write
	limit  int // the most bytes that the write may have; 0: there is no bundle
}

// maxBundle is one more than the number of messages that fit into a cell.
const maxBundle = conn.CellSize/(rawMeta+trailerLen) + 1

// fits reports whether o may be added to b. The peer's lock is held.
func (b *bundle) fits(l *link, o *outgoing) bool {
	if b.limit == 0 || !o.fitsBundle() || l.queue.Last(b.record) == nil {
		return false
	}
	n, _ := l.dialect.layout(o)
	return aligned(b.end)+n <= b.limit
}

// add adds o, which fits, to b, the bundle of p's link. p.mu is held.
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

// writtenMessages are the messages of one write to a slot, in order.
type writtenMessages [maxBundle][]byte

// parse splits the first n bytes of mem into messages. Each trailer says where the message before it ends, so it starts with the last.
func (w *writtenMessages) parse(d inboundDialect, mem []byte, n int) ([][]byte, error) {
	if n < rawMeta || n > len(mem) {
		return nil, &van.FieldError{Field: "meta", Value: fmt.Sprintf("%d bytes", n), Want: fmt.Sprintf("%d to %d", rawMeta, len(mem))}
	}
	var ends [maxBundle]int // from the last message to the first
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
