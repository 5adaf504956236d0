package local

import (
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van/engine"
)

// inRing is the receiving end of a ring: what is mapped of the peer, how far the ring has
// been read, and the acknowledgements for the peer. Messages hold it while parts of theirs
// are still in the peer's memory.
type inRing struct {
	seg    *segment
	bell   *bell   // the peer's
	source *remote // its memory; nil if it cannot be read
	head   uint64
	feed   *engine.Feed[*inbound]

	refs  atomic.Int32
	ackMu sync.Mutex
	acked uint32
	owes  atomic.Bool // acknowledgements of which the peer has not been told
}

// consume frees the record of size bytes at the head, of a ring that has been written up to
// tail, and wakes a sender that waits for room.
func (r *inRing) consume(size int, tail uint64) {
	r.head += uint64(size)
	r.seg.head().Store(r.head)
	if w := r.seg.wants(); w.Load() != 0 && (tail == r.head || tail-r.head < ringLen/2) && w.CompareAndSwap(1, 0) {
		r.bell.ring()
	}
}

// hold keeps the ring until unref.
func (r *inRing) hold() *inRing {
	r.refs.Add(1)
	return r
}

// acknowledge gives the parts in a slot back to the sender. It is told when this
// node has nothing better to do, unless it waits.
func (r *inRing) acknowledge(slot uint32) {
	r.ackMu.Lock()
	r.seg.ack(r.acked).Store(slot)
	r.acked++
	r.seg.acked().Store(r.acked)
	r.ackMu.Unlock()
	r.owes.Store(true)
	if w := r.seg.wants(); w.Load() != 0 && w.CompareAndSwap(1, 0) || r.feed.Parked() {
		r.tell()
	}
}

// tell rings for acknowledgements.
func (r *inRing) tell() {
	if r.owes.Load() && r.owes.Swap(false) {
		r.bell.ring()
	}
}

// unref gives up one hold; after the last one the ring's memory goes.
func (r *inRing) unref() {
	if r.refs.Add(-1) > 0 {
		return
	}
	r.seg.unmap()
	r.bell.unmap()
	if r.source != nil {
		r.source.close()
	}
}
