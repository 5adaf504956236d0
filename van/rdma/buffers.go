package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// bufferKey names a registered receive buffer.
type bufferKey struct {
	sender int
	key    uint64
}

// RegisterRecvBuffer implements van.BufferRegistrar.
func (v *rvan) RegisterRecvBuffer(sender int, key uint64, dst backend.Mem) error {
	if dst.Len() == 0 {
		return fmt.Errorf("register receive buffer: %w: 0 bytes for key %d of %s", van.ErrInvalid, key, van.NodeName(sender))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.buffers[bufferKey{sender, key}] = dst
	return nil
}

func (v *rvan) buffer(sender int, key uint64) (backend.Mem, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	m, ok := v.buffers[bufferKey{sender, key}]
	return m, ok
}

// Revoke implements van.Revoker.
func (v *rvan) Revoke(m backend.Mem) {
	if m.Len() == 0 {
		return
	}
	var kept []*conn.Region
	for _, p := range v.allPeers() {
		p.mu.Lock()
		for k, x := range p.pulls {
			switch {
			case !overlap(x.mem, m):
			case x.stepmesh:
				kept = append(kept, x.region)
			default:
				delete(p.pulls, k)
				x.region.Release()
			}
		}
		p.sender.Each(func(o *outgoing) {
			if overlap(o.into, m) {
				o.into, o.revoked = backend.Mem{}, true
			}
		})
		p.mu.Unlock()
	}
	if len(kept) > 0 {
		v.log.Warn("rdma: memory stays open for a late answer of a node of the C++ library, which would abort if it were refused",
			"bytes", m.Len(), "requests", len(kept))
	}
	for _, d := range *v.devices.Load() {
		d.regions.Revoke(m, kept)
	}
}

func overlap(x, y backend.Mem) bool {
	return x.Addr() < y.Addr()+uint64(y.Len()) && y.Addr() < x.Addr()+uint64(x.Len())
}
