package membership

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// Recovery from a restart of the scheduler. The new process knows nothing of the cluster.
// The nodes notice by its incarnation that it is a new process; their heartbeats, which
// have their records with id and cluster, tell it about them. When most have come back,
// it resumes the cluster.

const (
	// returnGrace is how long the scheduler waits for other nodes after the first one has
	// come back.
	returnGrace = 2 * time.Second
	// returnBeat is the time between two heartbeats of a node whose scheduler does not
	// know the cluster yet.
	returnBeat = time.Second
)

// comeback is a node of the cluster of a former scheduler process.
type comeback struct {
	node       van.Node
	cluster    uint32
	generation uint32
	temp       int
}

// returning is what a scheduler knows of a former one's cluster.
type returning struct {
	nodes map[int]*comeback // by id
	since time.Duration     // of the first one
	// table is the node table of one of them; it is requested when it is needed.
	table      []van.Node
	generation uint32 // of the table
	cluster    uint32 // of the table
	nextAsk    time.Duration
}

// beatKey is the key of a heartbeat to a scheduler of this library: the generation of the
// node's table, and the milliseconds between its heartbeats, 0 for none.
func beatKey(generation uint32, interval time.Duration) uint64 {
	return uint64(min(interval.Milliseconds(), math.MaxUint32))<<32 | uint64(generation)
}

func parseBeatKey(key uint64) (generation uint32, interval time.Duration) {
	return uint32(key), time.Duration(key>>32) * time.Millisecond
}

// comeBack handles, during start-up, the heartbeat of a node of a former scheduler's
// cluster.
func (m *Machine) comeBack(now time.Duration, rec *van.Node, who van.Identity, msg *van.Meta) {
	s := m.sched
	if failpoint.On("scheduler-back") || van.RankOf(rec.ID) >= m.cfg.instances(rec.Role) || who.Cluster == 0 {
		return
	}
	if m.cfg.NamedCluster && who.Cluster != m.table.own.Cluster && !failpoint.On("cluster-id") {
		m.refuse(now, rec, "its STEPAF_CLUSTER_ID is not that of the scheduler")
		return
	}
	if s.back == nil {
		s.back = &returning{nodes: map[int]*comeback{}, since: now, nextAsk: now + returnGrace}
		m.out.emit(Warning{Text: fmt.Sprintf("%s at %s belongs to the cluster (%08x) of an earlier scheduler: waiting for the rest of it, or for a new cluster",
			van.NodeName(rec.ID), rec.Addr(), who.Cluster)})
	}
	b := s.back
	generation, _ := parseBeatKey(msg.Key)
	c := b.nodes[rec.ID]
	switch {
	case c == nil:
		c = &comeback{}
		b.nodes[rec.ID] = c
	case !another(&c.node, rec):
	case generation <= c.generation:
		return // it has been replaced by the process that came first
	default:
		m.out.disconnect(c.temp)
		c.temp = 0
	}
	c.node, c.cluster, c.generation = *rec, who.Cluster, generation
	if c.temp == 0 {
		c.temp = m.out.reach(*rec)
	}
	if nodes := msg.Control.Nodes; len(nodes) > 1 && m.table.checkRecords(msg) == nil && (b.table == nil || generation > b.generation) {
		b.table, b.generation, b.cluster = nil, generation, who.Cluster
		for i := range nodes {
			b.table = append(b.table, nodes[i].Clone())
		}
	}
	m.answerReturn(c, "")
	m.resumeIfComplete(now)
}

// answerReturn tells a node that this scheduler is a new process. what is "table" to ask
// for the whole table.
func (m *Machine) answerReturn(c *comeback, what string) {
	meta := m.out.control(van.Heartbeat)
	meta.Control.Nodes = []van.Node{m.table.self}
	meta.Body = notice{verb: verbRejoin, text: what}.body()
	m.out.send(c.temp, meta)
}

// resumeIfComplete resumes a former scheduler's cluster if enough of its nodes have come
// back: all; or, after returnGrace, more than half, or any number if the cluster has a
// name; or, if new nodes have registered for all the other ids, half of them after half of
// Config.ReplaceTimeout, and fewer after three quarters of it: a new cluster would have
// been complete by then without them. After all of ReplaceTimeout the returned nodes would
// give up.
func (m *Machine) resumeIfComplete(now time.Duration) {
	b := m.sched.back
	if b == nil {
		return
	}
	count, newest, current := map[uint32]int{}, map[uint32]uint32{}, 0
	var cluster uint32
	for _, id := range sortedIDs(b.nodes) {
		c := b.nodes[id]
		count[c.cluster]++
		newest[c.cluster] = max(newest[c.cluster], c.generation)
		if count[c.cluster] > count[cluster] {
			cluster = c.cluster
		}
	}
	for _, c := range b.nodes {
		if c.cluster == cluster && c.generation == newest[cluster] {
			current++
		}
	}
	all := m.cfg.groupLen(van.WorkerGroup | van.ServerGroup)
	if current == all {
		m.resume(now, cluster, newest[cluster])
		return
	}
	wait, waitOfFew := m.returnWaits()
	if 2*count[cluster] < all {
		wait = waitOfFew
	}
	switch {
	case now < b.since+returnGrace:
		return
	case 2*count[cluster] > all || m.cfg.NamedCluster:
	case now < b.since+wait || !m.othersCame(cluster):
		return
	}
	if b.table != nil && b.cluster == cluster && b.generation >= newest[cluster] {
		m.resume(now, cluster, newest[cluster])
		return
	}
	if now < b.nextAsk {
		return
	}
	b.nextAsk = now + returnBeat
	for _, id := range sortedIDs(b.nodes) { // all that have the newest table
		if c := b.nodes[id]; c.cluster == cluster && c.generation == newest[cluster] {
			m.answerReturn(c, "table")
		}
	}
}

// returnWaits is how long the scheduler waits for the others when half of a former cluster's
// nodes have come back, and when fewer have.
func (m *Machine) returnWaits() (half, few time.Duration) {
	return m.cfg.ReplaceTimeout / 2, m.cfg.ReplaceTimeout * 3 / 4
}

// othersCame tells whether a new node has registered for each id of a former scheduler's
// cluster whose node has not come back, so that no more nodes are expected.
func (m *Machine) othersCame(cluster uint32) bool {
	joins := m.sched.present()
	for _, id := range m.cfg.members(van.WorkerGroup | van.ServerGroup) {
		if c := m.sched.back.nodes[id]; c != nil && c.cluster == cluster {
			continue
		}
		i := slices.IndexFunc(joins, func(n van.Node) bool {
			return n.Role == van.RoleOf(id) && (n.AuxID == -1 || n.AuxID == van.RankOf(id))
		})
		if i < 0 {
			return false
		}
		joins = slices.Delete(joins, i, i+1)
	}
	return true
}

func sortedIDs[V any](m map[int]V) []int { return slices.Sorted(maps.Keys(m)) }

// resume makes this the scheduler of a former one's cluster.
func (m *Machine) resume(now time.Duration, cluster, generation uint32) {
	s, b := m.sched, m.sched.back
	known := map[int]van.Node{}
	if b.cluster == cluster {
		for _, n := range b.table {
			known[n.ID] = n
		}
	}
	var table []van.Node
	var missing []int
	for _, id := range m.cfg.members(van.WorkerGroup | van.ServerGroup) {
		rec, isKnown := known[id]
		c := b.nodes[id]
		here := c != nil && c.cluster == cluster && (!isKnown || c.generation >= b.generation || !another(&rec, &c.node))
		switch {
		case here:
			rec = c.node
		case isKnown:
			missing = append(missing, id)
		default:
			return // no record of it is known
		}
		table = append(table, rec)
	}
	m.table.own.Cluster, m.table.generation, m.life.recovered = cluster, generation, true
	m.table.sign(&m.table.self)
	m.life.phase = ready
	m.table.fill(table)
	m.alive.lastCheck, m.policies.await = now, now+returnGrace
	m.alive.begin(now, van.SchedulerID)
	for i := range table {
		n := &table[i]
		m.alive.begin(now, n.ID)
		m.table.learn(n.ID, n)
	}
	m.out.emit(Assigned{ID: van.SchedulerID, Recovery: true})
	for _, id := range sortedIDs(b.nodes) {
		c := b.nodes[id]
		if slices.Contains(missing, id) || c.cluster != cluster {
			m.out.disconnect(c.temp)
			continue
		}
		m.out.rename(c.temp, id)
		m.out.conns[id] = true
		m.alive.peers[id].beats = true
	}
	joins := s.joins
	s.joins, s.back = nil, nil
	full := m.table.whole()
	for _, id := range m.table.ids() {
		m.sendTable(id, full)
	}
	m.out.emit(Ready{})
	for _, id := range missing {
		m.markDown(now, id, connLost, &lossError{text: "it has not come back to the scheduler, which was started again"})
	}
	for _, j := range joins {
		if j.temp != 0 {
			m.out.disconnect(j.temp)
		}
		m.joinLate(now, j.node, j.stamp)
	}
}

// lateReturn takes a node back that returns after the cluster was resumed without it, and
// sends the table again to one that has not had it yet. Its connection is not made again
// then: the table may be under way on it.
func (m *Machine) lateReturn(now time.Duration, id int, rec *van.Node) {
	if m.alive.isDown(id) || !m.out.conns[id] {
		m.table.nodes[m.table.at[id]] = *rec
		m.out.connect(id, *rec)
	}
	m.alive.peers[id].beats = true
	m.sendTable(id, m.table.whole())
	m.tellDead(id)
	m.markUp(now, id, connLost|silent|declared)
}

// noReturn ends the wait for a former scheduler's cluster, since a new one has formed.
// Later messages of the former cluster's nodes are refused.
func (m *Machine) noReturn() {
	if b := m.sched.back; b != nil {
		for _, id := range sortedIDs(b.nodes) {
			m.out.disconnect(b.nodes[id].temp)
		}
		m.sched.back = nil
	}
}

func (m *Machine) nextReturnTick() time.Duration {
	if m.sched == nil || m.sched.back == nil {
		return math.MaxInt64
	}
	return max(m.sched.back.since+returnGrace, m.sched.back.nextAsk)
}

func (m *Machine) tickReturn(now time.Duration) {
	if m.sched == nil || m.sched.back == nil || now < m.nextReturnTick() {
		return
	}
	m.resumeIfComplete(now)
	b := m.sched.back
	if b == nil || b.nextAsk > now {
		return
	}
	b.nextAsk = now + returnBeat
	half, few := m.returnWaits()
	for _, wait := range []time.Duration{half, few} { // the returned nodes may give up soon after
		if at := b.since + wait; at > now {
			b.nextAsk = min(b.nextAsk, at)
		}
	}
}

// schedulerChanged handles that the scheduler is a new process, with the record n. Barriers
// that were requested from the former one fail, since it may have released them for
// others; those at the end of a program are requested from the new one. It returns false
// if n has no identity, or start-up is not complete.
func (m *Machine) schedulerChanged(now time.Duration, n *van.Node) bool {
	who, ok := n.Identity()
	if !ok || m.alive.peers[van.SchedulerID] == nil {
		return false
	}
	old := m.table.incs[van.SchedulerID]
	if len(m.formerSchedulers) == maxFormer {
		m.formerSchedulers = slices.Delete(m.formerSchedulers, 0, 1)
	}
	m.formerSchedulers = append(m.formerSchedulers, old)
	m.table.scheduler.Endpoint = slices.Clone(n.Endpoint)
	m.table.incs[van.SchedulerID] = who.Incarnation
	m.life.rejoining = true
	m.nextBeat = now + returnBeat
	delete(m.held, van.SchedulerID)
	*m.alive.peers[van.SchedulerID] = health{seen: now, since: now,
		cause: &lossError{text: "the scheduler was started again and has not resumed the cluster"}}
	m.out.connect(van.SchedulerID, m.table.scheduler)
	m.out.emit(PeerReplaced{van.SchedulerID, m.table.scheduler})
	m.withdrawn = nil // the new process knows of no request
	clear(m.news)     // its timestamps begin anew
	for _, t := range m.tickets {
		if t.ending {
			t.sent = false
		}
	}
	m.failTickets(func(t *ticket) bool { return t.sent }, van.Error{Peer: m.table.peer(van.SchedulerID),
		Err: &lossError{text: "the scheduler was started again; whether others have passed this barrier is not known"}})
	return true
}

// stepRejoin sends the table to a restarted scheduler that has asked for it.
func (m *Machine) stepRejoin(n notice) {
	if n.text == "table" && m.life.rejoining {
		others := slices.DeleteFunc(slices.Clone(m.table.nodes), func(r van.Node) bool { return r.ID == m.table.self.ID })
		m.beat(append([]van.Node{m.table.self}, others...))
	}
}

// resumed notes that the scheduler knows the cluster again.
func (m *Machine) resumed() {
	if m.life.rejoining {
		m.life.rejoining = false
		m.sendPolicies(van.SchedulerID)
		m.ask()
	}
}
