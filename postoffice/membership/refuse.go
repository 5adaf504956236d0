package membership

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Nodes that the scheduler refuses. To tell a node the reason, the scheduler must connect
// to an address that the node has named. The rate of these connections is bounded, and
// only numeric addresses are used, since looking a name up may block.

const (
	refusalTime   = time.Second
	maxRefusing   = 32  // in refusalTime
	maxRefusalsIn = 256 // waiting to be sent
)

type refusals struct {
	recent  []refusal // in the last refusalTime
	waiting []refusal
}

type refusal struct {
	node van.Node
	why  string
	at   time.Duration
}

// refuse tells a node without an id that it cannot be part of the cluster. A process is told
// once in refusalTime; of the original's, which do not say which process they are, one at an
// address.
func (m *Machine) refuse(now time.Duration, rec *van.Node, why string) {
	r := &m.sched.refusals
	r.expire(now)
	n := refusal{node: rec.Clone(), why: why}
	m.remember(&m.sched.refused, describe(rec)+": "+why)
	switch {
	case !numeric(rec.Hostname) || slices.ContainsFunc(r.recent, n.sameProcess):
	case len(r.recent) < maxRefusing && !r.tooSoon(&n):
		m.tellStranger(now, n)
	default:
		if i := slices.IndexFunc(r.waiting, n.sameAddr); i >= 0 {
			r.waiting[i] = n // who asked before has gone, or asks again
		} else if len(r.waiting) < maxRefusalsIn {
			r.waiting = append(r.waiting, n)
		}
	}
	m.out.emit(Warning{Text: fmt.Sprintf("refused %s: %s", describe(rec), why)})
}

func (r *refusal) sameAddr(o refusal) bool { return sameAddr(&o.node, &r.node) }

// sameProcess tells whether o is known to be about the same process.
func (r *refusal) sameProcess(o refusal) bool {
	mine, ok := r.node.Identity()
	other, _ := o.node.Identity()
	return ok && r.sameAddr(o) && mine.Incarnation == other.Incarnation
}

// tooSoon tells whether n may be what has been answered at its address a moment ago.
func (r *refusals) tooSoon(n *refusal) bool {
	_, named := n.node.Identity()
	return !named && slices.ContainsFunc(r.recent, n.sameAddr)
}

func (m *Machine) tellStranger(now time.Duration, r refusal) {
	r.at = now
	m.sched.refusals.recent = append(m.sched.refusals.recent, r)
	temp := m.out.reach(r.node)
	m.out.tell(temp, notice{verb: verbError, text: describe(&r.node) + ": " + r.why})
	m.out.disconnect(temp)
}

func (r *refusals) expire(now time.Duration) {
	r.recent = slices.DeleteFunc(r.recent, func(o refusal) bool { return now >= o.at+refusalTime })
}

func (m *Machine) tickRefusals(now time.Duration) {
	if m.sched == nil || m.life.phase == failed {
		return
	}
	m.tickClaims(now)
	r := &m.sched.refusals
	if len(r.waiting) == 0 {
		return
	}
	r.expire(now)
	for i := 0; i < len(r.waiting) && len(r.recent) < maxRefusing; {
		if n := r.waiting[i]; r.tooSoon(&n) {
			i++
		} else {
			r.waiting = slices.Delete(r.waiting, i, i+1)
			m.tellStranger(now, n)
		}
	}
}

func (m *Machine) nextRefusal() time.Duration {
	next := time.Duration(math.MaxInt64)
	if m.sched == nil {
		return next
	}
	if r := &m.sched.refusals; len(r.waiting) > 0 && len(r.recent) > 0 {
		next = r.recent[0].at + refusalTime
	}
	for id := range m.sched.claims {
		next = min(next, m.claimEnd(id))
	}
	return next
}

// claimEnd is when the claim on member id's address is granted, unless the member is heard
// before.
func (m *Machine) claimEnd(id int) time.Duration {
	h, c := m.alive.peers[id], m.sched.claims[id]
	if h.down != 0 || h.heard > c.since || h.lost > c.since {
		return c.since
	}
	return c.since + 2*h.interval + time.Second
}

// tickClaims decides claims on the address of a member: the member keeps it if it has been
// heard since; otherwise the claimant replaces it. That its connection is back says nothing:
// it may lead to the claimant.
func (m *Machine) tickClaims(now time.Duration) {
	for _, id := range sortedIDs(m.sched.claims) {
		c := m.sched.claims[id]
		if c == nil {
			continue // who had it has got another place meanwhile
		}
		h := m.alive.peers[id]
		switch {
		case h.down == 0 && h.heard > c.since:
			delete(m.sched.claims, id)
			m.refuse(now, &c.node, fmt.Sprintf("%s has this address and is alive; do two nodes advertise it? (DMLC_NODE_HOST)", m.table.peer(id)))
		case now >= m.claimEnd(id):
			delete(m.sched.claims, id)
			m.markDown(now, id, connLost, &lossError{text: "restarted at " + c.node.Addr()})
			m.joinLate(now, c.node, c.stamp)
		}
	}
}
