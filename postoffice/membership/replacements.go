package membership

// The places of a cluster that has formed, on the scheduler: who registers then gets the one
// of a dead node, or claims that of a node that may be alive, or is refused.

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

type replacements struct {
	core
	refusals *refusals
	barriers *barriers
	monitor  *monitor
	policies *policyList

	challenges   *challenges
	registeredAt map[int]int32         // timestamp of the registration of each node
	claims       map[int]*registration // by id, registrations under the address of a member that may be alive
	replaced     []van.Node            // processes that were replaced, oldest first
}

// maxReplaced bounds how many replaced processes are remembered.
const maxReplaced = 256

// register handles a registration: the node may replace a dead one of its role.
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
			// It registered a second time before it had the table.
			p.registeredAt[n.ID] = stamp
			if !p.out.conns[n.ID] { // a former scheduler gave it the place, and died before it knew
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
	if p.barriers.departure.waiting() { // it registers again with the next scheduler here
		p.out.emit(Warning{Text: describe(&rec) + " comes to a cluster that has ended"})
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

// claim keeps a registration under the address of member id, which may be alive, while the registration may be false. A
// process of this library is asked at that address for a proof. The connection to the member, and its heartbeats, answer for the member.
func (p *replacements) claim(now time.Duration, id int, j *registration) {
	p.claims[id] = &registration{node: j.node, stamp: j.stamp, since: now}
	if p.challenges.required(j) {
		p.challenges.send(now, &j.node)
	}
}

func fitsRank(rec *van.Node, id int) bool { return rec.AuxID == -1 || rec.AuxID == van.RankOf(id) }

// replaceable returns the id of a dead node whose place rec can have, or van.Empty.
func (p *replacements) replaceable(rec *van.Node) int {
	for i := range p.table.nodes {
		if n := &p.table.nodes[i]; n.Role == rec.Role && p.alive.isDead(n.ID) && fitsRank(rec, n.ID) {
			return n.ID
		}
	}
	return van.Empty
}

// mayReplace tells whether no node whose place rec can have is known to be dead, but one may be: the only one that rec
// can stand for, or one that has not been heard since it got the place. It may have been started again as rec.
func (p *replacements) mayReplace(rec *van.Node) (may bool) {
	if p.replaceable(rec) != van.Empty {
		return false
	}
	for i := range p.table.nodes {
		n := &p.table.nodes[i]
		switch {
		case n.Role != rec.Role:
		case sameAddr(n, rec): // register knows more of it
			return false
		case fitsRank(rec, n.ID) && (rec.AuxID >= 0 || p.alive.peers[n.ID].heard == 0):
			may = true
		}
	}
	return may
}

func restarted(rec *van.Node) error { return &lossError{text: "restarted at " + rec.Addr()} }

// replaceMember gives a new process the place of a dead one.
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
	if claim != nil && !sameAddr(&claim.node, &rec) { // else it was restarted
		p.register(now, claim)
	}
}

// noMemberToReplace says why there is no place for a node. The details have the addresses of the nodes that have the places.
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
		return fmt.Sprintf("it wants rank %d, but of the %ss only these are dead: %s", rec.AuxID, rec.Role, strings.Join(dead, ", ")), ""
	}
	return fmt.Sprintf("the cluster is complete: all %d places for a %s are taken (%s) and none of its nodes is dead",
		p.cfg.instances(rec.Role), rec.Role, p.cfg.formula(rec.Role)), ": " + list(names)
}

// readmit takes a node back that returns after the cluster was resumed without it, and sends the
// table again to one that has not had it yet. Its connection is not made again then: the table
// may be under way on it.
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

// recordReplaced notes the process with record old as a former one.
func (p *replacements) recordReplaced(old *van.Node) {
	if incarnationOf(old) != 0 {
		p.replaced = appendBounded(p.replaced, *old, maxReplaced)
	}
}

// replacedProcess returns the process with that incarnation which had id, nil if it is not known.
func (p *replacements) replacedProcess(incarnation uint32, id int) *van.Node {
	if i := slices.IndexFunc(p.replaced, func(n van.Node) bool { return n.ID == id && incarnationOf(&n) == incarnation }); i >= 0 {
		return &p.replaced[i]
	}
	return nil
}

// whyFenced says why a process of that cluster has no place as id. The name of the scheduler's cluster, which a process must
// know to join it, is only in the details.
func (p *replacements) whyFenced(id int, cluster uint32) (why, details string) {
	if own := p.table.own.Cluster; cluster != own {
		return "it belongs to another cluster: the scheduler was started again, and a new cluster has formed", fmt.Sprintf(" (%08x, and %08x)", cluster, own)
	}
	if n, ok := p.table.Node(id); ok {
		details = ", at " + n.Addr()
	}
	return fmt.Sprintf("it was taken for dead and its place as %s given to another process", van.NodeName(id)), details
}

// claimDeadline is when the claim on member id's address ends, unless the member is heard, or found dead, before.
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
// connection to it has broken since: that the connection is back says nothing, since it may lead to the claimant. The member keeps
// its address if it has been heard since, or if the connection has stood for as long as the claim is kept.
func (p *replacements) tick(now time.Duration) {
	for _, id := range sortedIDs(p.claims) {
		c := p.claims[id]
		if c == nil {
			continue // who had it has got another place meanwhile
		}
		h := p.alive.peers[id]
		switch {
		case h.deadFor == 0 && h.heard > c.since:
			delete(p.claims, id)
			p.refusals.refuse(now, &c.node, p.table.peer(id)+" has this address and is alive; do two nodes advertise it? (DMLC_NODE_HOST)", "")
		case now >= p.claimDeadline(id) && (h.deadFor != 0 || h.lost > c.since):
			delete(p.claims, id)
			if !p.challenges.required(c) { // else nothing is known of the process that has registered
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
