package local

import (
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van/engine"
)

// inRing is the receiving end of a ring: the mapped memory of the peer, the read position, and the
// acknowledgements for the peer. A message has a reference to it while some of its parts are in the
// peer's memory.
type inRing struct {
	seg    *segment
	bell   *bell   // the peer's
	source *remote // its memory; nil if it cannot be read
	head   uint64
	feed   *engine.Feed[*inbound]

	refs  atomic.Int32
	ackMu sync.Mutex
	acked uint32
	owes  atomic.Bool // the peer was not rung for the latest acknowledgements
}

// consume frees the record of size bytes at the head of the ring, and wakes a sender that waits for room. The
// ring has been written up to tail.
func (r *inRing) consume(size int, tail uint64) {
	r.head += uint64(size)
	r.seg.head().Store(r.head)
	if w := r.seg.wants(); w.Load() != 0 && (tail == r.head || tail-r.head < ringLen/2) && w.CompareAndSwap(1, 0) {
		r.bell.ring()
	}
}

// hold adds a reference to the ring, for unref.
func (r *inRing) hold() *inRing {
	r.refs.Add(1)
	return r
}

// acknowledge returns the parts in a slot to the sender. It rings the sender at once if the sender waits or the
// receiver sleeps; otherwise tell rings later, when this node is idle.
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

// tell rings the peer if it was not rung for the latest acknowledgements.
func (r *inRing) tell() {
	if r.owes.Load() && r.owes.Swap(false) {
		r.bell.ring()
	}
}

// unref releases one reference. The last one unmaps the ring.
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
