package fakeverbs

import (
	"hash/maphash"
	"syscall"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

var sourceSeed = maphash.MakeSeed()

// sent records the source of a work request without inline data.
type sent struct {
	pos    uint64
	id     uint64
	region *region
	addr   uint64
	size   uint32
	hash   uint64
}

// watch records the source of w, for Config.CheckSource.
func (q *qp) watch(w *work) {
	if !q.net.cfg.CheckSource || w.Flags&verbs.Inline != 0 {
		return
	}
	m := q.dev.lkeys[w.LKey]
	if m == nil {
		return
	}
	if b, ok := m.bytes(w.LocalAddr, w.Len); ok {
		q.sent = append(q.sent, sent{w.pos, w.ID, m, w.LocalAddr, w.Len, maphash.Bytes(sourceSeed, b)})
	}
}

// checkSent reports changed sources among the work requests up to pos, which are complete. It also reports a source that is no longer registered;
// since that memory may be unmapped, it is not read.
func (q *qp) checkSent(pos uint64) {
	for len(q.sent) > 0 && q.sent[0].pos <= pos {
		s := q.sent[0]
		q.sent = q.sent[1:]
		what := ""
		if q.dev.lkeys[s.region.lkey] != s.region {
			what = "deregistered"
		} else if b, _ := s.region.bytes(s.addr, s.size); maphash.Bytes(sourceSeed, b) != s.hash {
			what = "changed"
		}
		if what != "" {
			q.net.misuse.report(fault("check source", syscall.EBUSY, "%s: queue pair %d: work request %#x: its %d bytes at %#x were %s before its completion was polled",
				q.dev.stack.name, q.num, s.id, s.size, s.addr, what))
		}
	}
}
