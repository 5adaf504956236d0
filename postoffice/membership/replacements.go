package membership

// Registrations in a cluster that has formed, on the scheduler: the process replaces a dead member, or claims the
// address of a member that may be alive, or is refused.

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// replacements handles the registrations of processes that may replace members.
type replacements struct {
	core
	refusals *refusals
	barriers *barriers
	monitor  *monitor
	policies *policyList

	challenges   *challenges
	registeredAt map[int]int32         // timestamp of each member's registration
	claims       map[int]*registration // by id, registrations under the address of a member that may be alive
	replaced     []van.Node            // processes that were replaced, oldest first
}

// maxReplaced bounds the number of replaced processes that are remembered.
const maxReplaced = 256

// register handles a registration: the process may replace a dead member of its role.
func (p *replacements) register(now time.Duration, j *registration) {
	rec, stamp := j.node, j.stamp
	for i := range p.table.nodes {
		n := &p.table.nodes[i]
		if !sameAddr(n, &rec) || n.Role != rec.Role {
			continue
		}
		inc := incarnationOf(&rec)
		again := inc == 0 && stamp > p.registeredAt[n.ID] && !p.alive.isDead(n.ID)
		if again || inc != 0 && !differentProcess(n, &rec) {
			// The process registered a second time before it had the table.
			p.registeredAt[n.ID] = stamp
			if !p.out.conns[n.ID] { // an earlier scheduler admitted the process and died before it could say so
				n.IsRecovery = true
				p.out.connect(n.ID, *n)
				p.monitor.expectMessage(now, n.ID)
			}
			p.monitor.markAlive(now, n.ID, connLost|silent|declared)
			p.monitor.sendTable(n.ID)
			return
		}
		if p.barriers.departure.waiting() {
			break
		}
		if h := p.alive.peers[n.ID]; h.deadFor == 0 && (h.lost == 0 || h.lost < h.heard) && !j.proved {
			p.claim(now, n.ID, j)
			return
		}
		if p.challenges.required(j) {
			p.challenges.send(now, &rec)
			return
		}
		p.monitor.markDead(now, n.ID, connLost, restarted(&rec))
		if fitsRank(&rec, n.ID) {
			p.replaceMember(now, n.ID, rec, stamp)
			return
		}
		break
	}
	if p.barriers.departure.waiting() { // the process registers again with the next scheduler at this address
		p.out.emit(Warning{Text: describe(&rec) + " registers with a cluster that has ended"})
		return
	}
	if id := p.replaceable(&rec); id != van.Empty {
		if p.challenges.required(j) {
			p.challenges.send(now, &rec)
			return
		}
		p.replaceMember(now, id, rec, stamp)
		return
	}
	why, details := p.noMemberToReplace(&rec)
	p.refusals.refuse(now, &rec, why, details)
}

// claim stores a registration under the address of member id, which may be alive, while the registration may be
// false. A process of this library must prove that it listens there. The connection to the member and its heartbeats
// prove the member.
func (p *replacements) claim(now time.Duration, id int, j *registration) {
	p.claims[id] = &registration{node: j.node, stamp: j.stamp, since: now}
	if p.challenges.required(j) {
		p.challenges.send(now, &j.node)
	}
}

// fitsRank reports whether rec asks for id's rank, or for any.
func fitsRank(rec *van.Node, id int) bool { return rec.AuxID == -1 || rec.AuxID == van.RankOf(id) }

// replaceable returns the id of a dead member that rec can replace, or van.Empty.
func (p *replacements) replaceable(rec *van.Node) int {
	for i := range p.table.nodes {
		if n := &p.table.nodes[i]; n.Role == rec.Role && p.alive.isDead(n.ID) && fitsRank(rec, n.ID) {
			return n.ID
		}
	}
	return van.Empty
}

// mayReplace reports whether rec could be a restarted member although no member that it can replace is known to be
// dead. That is the case if
//  1. rec names a rank, and the member of that rank is not at rec's address, or
//  2. a member has not sent anything since it was admitted.
func (p *replacements) mayReplace(rec *van.Node) (may bool) {
	if p.replaceable(rec) != van.Empty {
		return false
	}
	for i := range p.table.nodes {
		n := &p.table.nodes[i]
		switch {
		case n.Role != rec.Role:
		case sameAddr(n, rec): // register decides by the address
			return false
		case fitsRank(rec, n.ID) && (rec.AuxID >= 0 || p.alive.peers[n.ID].heard == 0):
			may = true
		}
	}
	return may
}

// restarted is the cause of death of a member at whose address a new process has registered.
func restarted(rec *van.Node) error { return &lossError{text: "restarted at " + rec.Addr()} }

// replaceMember gives the id of a dead member to a new process.
func (p *replacements) replaceMember(now time.Duration, id int, rec van.Node, stamp int32) {
	p.recordReplaced(p.table.record(id))
	p.monitor.lastReplaced = max(now, 1)
	p.table.tableGeneration++
	claim := p.claims[id]
	delete(p.claims, id)
	rec.ID, rec.IsRecovery = id, true
	for i := range p.table.nodes {
		if n := &p.table.nodes[i]; n.ID == id { // one record for each customer
			customer := n.CustomerID
			*n = rec.Clone()
			n.CustomerID = customer
		}
	}
	p.registeredAt[id] = stamp
	p.table.learn(id, &rec)
	delete(p.out.startConns, id)
	p.alive.begin(now, id)
	p.barriers.replaced(now, id)
	p.out.connect(id, rec)
	for _, to := range p.table.ids() {
		switch {
		case to == id:
			p.monitor.sendTable(to)
			p.policies.sendTo(to, &p.core)
			p.monitor.expectMessage(now, to)
		case !p.alive.isDead(to):
			p.monitor.sendRecords(to, []van.Node{rec})
		}
	}
	p.out.emit(PeerReplaced{id, rec})
	p.barriers.recheck(now)
	if claim != nil && !sameAddr(&claim.node, &rec) { // else the claimant was restarted
		p.register(now, claim)
	}
}

// noMemberToReplace returns the reason why rec can replace no member. The details have the addresses of the members.
func (p *replacements) noMemberToReplace(rec *van.Node) (why, details string) {
	var names, dead []string
	for i := range p.table.nodes {
		if n := &p.table.nodes[i]; n.Role == rec.Role {
			names = append(names, fmt.Sprintf("%s rank %d", n.Addr(), van.RankOf(n.ID)))
			if p.alive.isDead(n.ID) {
				dead = append(dead, van.NodeName(n.ID))
			}
		}
	}
	if len(dead) > 0 {
		return fmt.Sprintf("it asks for rank %d, and only these %ss are dead: %s", rec.AuxID, rec.Role, strings.Join(dead, ", ")), ""
	}
	return fmt.Sprintf("the cluster is complete: all %d places for a %s are taken (%s) and none of its nodes is dead",
		p.cfg.instances(rec.Role), rec.Role, p.cfg.formula(rec.Role)), ": " + list(names)
}

// readmit admits a member that returns after the cluster was resumed without it, and sends the table again to a
// member that has not received it. In the latter case it does not connect again: the table may be in flight on the
// connection.
func (p *replacements) readmit(now time.Duration, rec *van.Node) {
	id := rec.ID
	if p.alive.isDead(id) || !p.out.conns[id] {
		*p.table.record(id) = *rec
		p.out.connect(id, *rec)
	}
	p.alive.peers[id].sendsHeartbeats = true
	p.monitor.sendTable(id)
	p.monitor.markAlive(now, id, connLost|silent|declared)
}

// recordReplaced remembers the replaced process with record old.
func (p *replacements) recordReplaced(old *van.Node) {
	if incarnationOf(old) != 0 {
		p.replaced = appendBounded(p.replaced, *old, maxReplaced)
	}
}

// replacedProcess returns the record of the process with that incarnation which had id, nil if it is not known.
func (p *replacements) replacedProcess(incarnation uint32, id int) *van.Node {
	if i := slices.IndexFunc(p.replaced, func(n van.Node) bool { return n.ID == id && incarnationOf(&n) == incarnation }); i >= 0 {
		return &p.replaced[i]
	}
	return nil
}

// whyFenced returns the reason why a process of that cluster may no longer act as id. The name of the scheduler's
// cluster, which a process must know to join it, is only in the details.
func (p *replacements) whyFenced(id int, cluster uint32) (why, details string) {
	if own := p.table.own.Cluster; cluster != own {
		return "it belongs to another cluster: the scheduler was started again, and a new cluster has formed", fmt.Sprintf(" (%08x, and %08x)", cluster, own)
	}
	if n, ok := p.table.Node(id); ok {
		details = ", at " + n.Addr()
	}
	return fmt.Sprintf("it was declared dead, and another process has replaced it as %s", van.NodeName(id)), details
}

// claimDeadline is the time at which the claim on member id's address ends, unless the member sends something or is
// found dead before.
func (p *replacements) claimDeadline(id int) time.Duration {
	h, c := p.alive.peers[id], p.claims[id]
	switch {
	case h.deadFor != 0 || h.heard > c.since || h.lost > c.since:
		return c.since
	case p.cfg.HeartbeatTimeout > 0 && slices.Contains(p.alive.watched(), id): // the member is dead before
		return c.since + p.alive.maxSilence(id) + time.Second
	}
	return c.since + p.cfg.ReplaceTimeout
}

// tick decides claims on the address of a member. The claimant replaces the member if the member is dead, or if the
// connection to it has broken since. A restored connection proves nothing, since it may lead to the claimant. The
// member keeps its address if it has sent something since, or if the connection has not broken until the deadline of
// the claim.
func (p *replacements) tick(now time.Duration) {
	for _, id := range sortedIDs(p.claims) {
		c := p.claims[id]
		if c == nil {
			continue // its claimant has replaced another member meanwhile
		}
		h := p.alive.peers[id]
		switch {
		case h.deadFor == 0 && h.heard > c.since:
			delete(p.claims, id)
			p.refusals.refuse(now, &c.node, p.table.peer(id)+" has this address and is alive; do two nodes advertise it? (DMLC_NODE_HOST)", "")
		case now >= p.claimDeadline(id) && (h.deadFor != 0 || h.lost > c.since):
			delete(p.claims, id)
			if !p.challenges.required(c) { // else nothing is known of the claimant
				p.monitor.markDead(now, id, connLost, restarted(&c.node))
			}
			p.register(now, c)
		case now >= p.claimDeadline(id):
			delete(p.claims, id)
			p.refusals.refuse(now, &c.node, p.table.peer(id)+" has this address, and the connection to it stands; do two nodes advertise it? (DMLC_NODE_HOST)", "")
		}
	}
}

func (p *replacements) next() time.Duration {
	next := time.Duration(math.MaxInt64)
	for id := range p.claims {
		next = min(next, p.claimDeadline(id))
	}
	return next
}
