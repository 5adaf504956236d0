package rdma

import (
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// This file owns the invalidation of memory that peers may write to, and the cancellation of requests.

// Invalidate implements van.Invalidator.
func (v *rvan) Invalidate(m backend.Mem) {
	if m.Len() == 0 {
		return
	}
	var kept, sameRegion, native []*conn.Region // regions of StepMesh peers: with m itself, with other memory; regions of native peers
	for _, p := range v.allPeers() {
		p.mu.Lock()
		for k, x := range p.pulls {
			switch {
			case x.stepmesh && x.mem.Overlaps(m):
				kept = append(kept, x.region)
			case x.stepmesh && x.region.Mem.Overlaps(m):
				sameRegion = append(sameRegion, x.region)
			case x.mem.Overlaps(m):
				delete(p.pulls, k)
				native = append(native, x.region)
				x.region.Release()
			}
		}
		p.sender.Each(func(o *outgoing) {
			for i := range o.parts {
				if x := &o.parts[i]; x.into.Overlaps(m) {
					x.into, o.invalidated = backend.Mem{}, true
				}
			}
		})
		p.mu.Unlock()
	}
	if len(kept) > 0 {
		v.log.Warn("rdma: memory stays open for a late answer of a node of the C++ library, which would abort if it were refused",
			"bytes", m.Len(), "requests", len(kept))
	}
	for _, r := range sameRegion {
		if !slices.Contains(native, r) { // otherwise a late answer would be written to it
			kept = append(kept, r)
		}
	}
	for _, d := range *v.tables.devices.Load() {
		d.regions.Invalidate(m, kept)
	}
}

// Cancel implements van.Canceler. Messages that wait for their turn or for a slot are dropped. The device may be reading a posted message
// now, or read it again to repeat it. For a native peer, a flag in the trailer therefore says that the message is to be dropped. The device
// reads the trailer after the value.
func (v *rvan) Cancel(q van.Requests) {
	for _, p := range v.allPeers() {
		p.mu.Lock()
		p.sender.Each(func(o *outgoing) {
			if o.isZeroCopy() && o.id.in(&q) {
				o.canceled = true
			}
		})
		for _, l := range []*link{p.link, p.ending} {
			if l == nil {
				continue
			}
			l.queue.Each(func(m *sentMessage) {
				if m.flags != nil && m.id.in(&q) {
					m.flags[0] |= trailerCanceled
				}
			})
		}
		p.mu.Unlock()
	}
}
