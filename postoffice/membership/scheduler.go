package membership

// The scheduler's side of start-up and recovery: registrations, ids, and the node table.

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// maxRefusals bounds the lists in the scheduler's reports.
const maxRefusals = 16

// scheduler is the state that only the scheduler's machine has.
type scheduler struct {
	hosts   map[string]int // BYTEPS_ORDERED_HOSTS, or nil
	joins   []*join        // registered nodes without an id, in order of arrival
	stamps  map[int]int32  // timestamp of the ADD_NODE of each node
	several map[int]bool   // ids of processes that registered several customers
	gathers map[gatherKey]*gather
	answers map[int]map[gatherKey]answer
	// C++ StepMesh processes that have replaced others, of which not all customers have asked
	// for the barrier at the end of start-up, and those that have. They do, as nodes of this
	// library do not: counted, it would be taken for their vote in the barrier of Finalize,
	// where others may wait already.
	starting     map[int][]int32
	back         *returning       // a former scheduler's cluster, while joining
	former       []former         // processes that were replaced, oldest first
	claims       map[int]*join    // by id, registrations under the address of a member that may be alive
	unheard      map[int]*unheard // by id
	refusals     refusals
	lastReplaced time.Duration // when a node was last replaced; 0: never
	refused      []string
	vanished     []string
}

// join is a node that has registered and waits for the others.
type join struct {
	node  van.Node
	stamp int32
	temp  int           // temporary id, or 0
	since time.Duration // of a claim
	lost  error         // not nil: the connection broke, so the node does not count
}

func newScheduler(hosts map[string]int) *scheduler {
	return &scheduler{hosts: hosts, stamps: map[int]int32{}, several: map[int]bool{},
		gathers: map[gatherKey]*gather{}, answers: map[int]map[gatherKey]answer{}, starting: map[int][]int32{}, claims: map[int]*join{}, unheard: map[int]*unheard{}}
}

// present lists the nodes that have registered and count.
func (s *scheduler) present() (nodes []van.Node) {
	for _, j := range s.joins {
		if j.lost == nil {
			nodes = append(nodes, j.node)
		}
	}
	return nodes
}

// stepJoin handles the registration of a node.
func (m *Machine) stepJoin(now time.Duration, from int, msg *van.Meta) error {
	nodes := msg.Control.Nodes
	if from != van.Empty {
		return m.table.bad(from, msg, "sender", from, "a node without an id")
	}
	if len(nodes) != 1 {
		return m.table.bad(from, msg, "control.node_size", len(nodes), "1")
	}
	rec := nodes[0].Clone()
	rec.ID, rec.IsRecovery = van.Empty, false
	if err := checkAddr(&rec, "control.node[0]"); err != nil {
		return m.table.bad(from, msg, "control.node[0].address", rec.Addr(), err.Error())
	}
	switch {
	case rec.Role < van.Server || rec.Role > van.Joint:
		return m.table.bad(from, msg, "control.node[0].role", rec.Role, "server or worker")
	case rec.AuxID < -1:
		return m.table.bad(from, msg, "control.node[0].aux_id", rec.AuxID, "a rank, or -1")
	case rec.Role == van.Scheduler || rec.Role == van.Joint:
		m.refuse(now, &rec, fmt.Sprintf("a node cannot register as %s: the scheduler is %s; set DMLC_ROLE to worker or server",
			rec.Role, m.table.self.Addr()))
		return nil
	}
	if why := cmp.Or(m.ofThisCluster(&rec), m.unlike(&rec)); why != "" {
		m.refuse(now, &rec, why)
		return nil
	}
	if m.life.phase == ready {
		m.joinLate(now, rec, msg.Timestamp)
	} else {
		m.joinEarly(now, rec, msg.Timestamp)
	}
	return nil
}

// joinEarly handles a registration during start-up.
func (m *Machine) joinEarly(now time.Duration, rec van.Node, stamp int32) {
	s := m.sched
	j := &join{node: rec, stamp: stamp}
	same := func(o *join) bool {
		return sameAddr(&o.node, &rec) && (o.node.Role != rec.Role || o.node.CustomerID == rec.CustomerID)
	}
	i := slices.IndexFunc(s.joins, same)
	if i >= 0 {
		old := s.joins[i]
		a, b := incarnationOf(&old.node), incarnationOf(&rec)
		if a != b || a == 0 && stamp <= old.stamp {
			m.out.emit(Warning{Text: fmt.Sprintf("%s registered again as %s: it was restarted, or two nodes advertise this address "+
				"(check DMLC_NODE_HOST)", rec.Addr(), describe(&rec))})
		}
		s.joins = slices.Delete(s.joins, i, i+1)
		if a == b {
			j.temp = old.temp
		} else if old.temp != 0 {
			m.out.disconnect(old.temp) // it is marked as for the process that was there
		}
	}
	if why, rival := m.misfit(&rec); why != "" {
		if rival != nil {
			m.reach(rival) // the connection shows whether it still runs
		}
		if j.temp != 0 {
			m.out.disconnect(j.temp)
		}
		m.refuse(now, &rec, why)
		return
	}
	if i >= 0 { // keep its position
		s.joins = slices.Insert(s.joins, i, j)
	} else {
		s.joins = append(s.joins, j)
	}
	m.complete(now)
}

// misfit returns "", or why a node cannot be accepted. rival is the registered node that
// it conflicts with, if there is one.
func (m *Machine) misfit(rec *van.Node) (why string, rival *join) {
	n := m.cfg.instances(rec.Role)
	if rec.AuxID >= n {
		return fmt.Sprintf("preferred rank %d of a %s, but there are only ranks 0 to %d (%s); check DMLC_NODE_RANK, "+
			"STEPMESH_GPU and DMLC_RANK_OFFSET", rec.AuxID, rec.Role, n-1, m.cfg.formula(rec.Role)), nil
	}
	if _, ok := m.sched.hosts[rec.Hostname]; m.sched.hosts != nil && !ok {
		return fmt.Sprintf("host %s is not in BYTEPS_ORDERED_HOSTS=%v", rec.Hostname, m.cfg.OrderedHosts), nil
	}
	count := 0
	for _, j := range m.sched.joins {
		o := &j.node
		if j.lost != nil {
			continue
		}
		if (o.AuxID == -1) != (rec.AuxID == -1) {
			return fmt.Sprintf("%s, but %s at %s registered with %s; give all nodes a preferred rank or none (DMLC_NODE_RANK)",
				rankText(rec), o.Role, o.Addr(), rankText(o)), j
		}
		if o.Role != rec.Role {
			continue
		}
		count++
		if rec.AuxID != -1 && o.AuxID == rec.AuxID {
			return fmt.Sprintf("%s %s and %s both want rank %d; give each its own DMLC_NODE_RANK, STEPMESH_GPU or "+
				"DMLC_RANK_OFFSET", rec.Role, o.Addr(), rec.Addr(), rec.AuxID), j
		}
	}
	if count >= n {
		return fmt.Sprintf("all %d places for a %s are taken (%s), by %s", n, rec.Role, m.cfg.formula(rec.Role),
			m.joinedText(rec.Role)), nil
	}
	return "", nil
}

// complete assigns the ids when all nodes have registered.
func (m *Machine) complete(now time.Duration) {
	s := m.sched
	present := s.present()
	if len(present) < m.cfg.groupLen(van.WorkerGroup|van.ServerGroup) {
		return
	}
	sortJoins(present, s.hosts)
	m.table.shared = assignIDs(present)
	for _, first := range m.table.shared {
		s.several[first] = true
	}
	m.noReturn()
	m.life.phase, m.alive.lastCheck = ready, now
	m.table.fill(present)
	m.alive.begin(now, van.SchedulerID)
	for i := range present {
		n := &present[i]
		if m.table.at[n.ID] != i {
			continue // another customer of the same process
		}
		m.alive.begin(now, n.ID)
		k := slices.IndexFunc(s.joins, func(j *join) bool { return j.lost == nil && sameAddr(&j.node, n) })
		s.stamps[n.ID] = s.joins[k].stamp
		m.table.learn(n.ID, n)
		if t := s.joins[k].temp; t != 0 {
			m.out.rename(t, n.ID)
		} else {
			m.out.connect(n.ID, *n)
		}
		m.out.first[n.ID] = true
	}
	joins := s.joins
	s.joins = nil
	for _, j := range joins {
		if j.temp != 0 {
			m.out.disconnect(j.temp) // of those that vanished
		}
	}
	m.out.emit(Assigned{ID: van.SchedulerID})
	all := m.table.whole()
	for _, id := range m.table.ids() {
		m.sendTable(id, all)
	}
	m.out.emit(Ready{})
}

func (m *Machine) sendTable(id int, nodes []van.Node) {
	meta := m.out.control(van.AddNode)
	meta.Control.Nodes = nodes
	if m.table.native(id) {
		meta.Key = uint64(m.table.generation)
	}
	m.out.send(id, meta)
}

// joinLate handles a registration after start-up: the node may replace a dead one of its
// role.
func (m *Machine) joinLate(now time.Duration, rec van.Node, stamp int32) {
	id := 0
	for i := range m.table.nodes {
		n := &m.table.nodes[i]
		if !sameAddr(n, &rec) || n.Role != rec.Role {
			continue
		}
		inc := incarnationOf(&rec)
		again := inc == 0 && stamp > m.sched.stamps[n.ID] && !m.alive.isDown(n.ID)
		if again || inc != 0 && !another(n, &rec) {
			// It registered a second time before it had the table.
			m.sched.stamps[n.ID] = stamp
			if !m.out.conns[n.ID] { // a former scheduler gave it the place, and died before it knew
				n.IsRecovery = true
				m.out.connect(n.ID, *n)
				m.expect(now, n.ID)
			}
			m.markUp(now, n.ID, connLost|silent|declared)
			m.sendTable(n.ID, m.table.whole())
			m.tellDead(n.ID)
			return
		}
		if h := m.alive.peers[n.ID]; h.down == 0 && h.beats && m.cfg.HeartbeatTimeout > 0 && (h.lost == 0 || h.lost < h.heard) {
			// The member may be alive, and the registration false.
			m.sched.claims[n.ID] = &join{node: rec, stamp: stamp, since: now}
			return
		}
		m.markDown(now, n.ID, connLost, &lossError{text: "restarted at " + rec.Addr()})
		if rec.AuxID == -1 || rec.AuxID == van.RankOf(n.ID) {
			id = n.ID
		}
		break
	}
	for i := range m.table.nodes {
		n := &m.table.nodes[i]
		if id == 0 && n.Role == rec.Role && m.alive.isDown(n.ID) && (rec.AuxID == -1 || rec.AuxID == van.RankOf(n.ID)) {
			id = n.ID
		}
	}
	if id == 0 {
		m.refuse(now, &rec, m.noPlace(&rec))
		return
	}
	m.replaced(&m.table.nodes[m.table.at[id]])
	m.sched.lastReplaced = max(now, 1)
	m.table.generation++
	claim := m.sched.claims[id]
	delete(m.sched.claims, id)
	rec.ID, rec.IsRecovery = id, true
	for i := range m.table.nodes {
		if n := &m.table.nodes[i]; n.ID == id { // one record for each customer
			customer := n.CustomerID
			*n = rec.Clone()
			n.CustomerID = customer
		}
	}
	m.sched.stamps[id] = stamp
	m.table.learn(id, &rec)
	delete(m.out.first, id)
	m.alive.begin(now, id)
	m.forget(id) // the replacement has not requested any barrier
	if !m.table.native(id) {
		m.sched.starting[id] = nil
	}
	m.out.connect(id, rec)
	all, one := m.table.whole(), []van.Node{rec}
	for _, to := range m.table.ids() {
		switch {
		case to == id:
			m.sendTable(to, all)
			m.tellDead(to)
			m.sendPolicies(to)
			m.expect(now, to)
		case !m.alive.isDown(to):
			m.sendTable(to, one)
		}
	}
	m.out.emit(PeerReplaced{id, rec})
	m.recheckBarriers(now)
	if claim != nil && !sameAddr(&claim.node, &rec) { // else it was restarted
		m.joinLate(now, claim.node, claim.stamp)
	}
}

// noPlace says why a node cannot join a complete cluster.
func (m *Machine) noPlace(rec *van.Node) string {
	dead := ""
	for i := range m.table.nodes {
		if n := &m.table.nodes[i]; n.Role == rec.Role && m.alive.isDown(n.ID) {
			dead += ", " + van.NodeName(n.ID)
		}
	}
	if dead != "" {
		return fmt.Sprintf("it wants rank %d, but of the %ss only these are dead: %s", rec.AuxID, rec.Role, dead[2:])
	}
	var names []string
	for i := range m.table.nodes {
		if m.table.nodes[i].Role == rec.Role {
			names = append(names, fmt.Sprintf("%s rank %d", m.table.nodes[i].Addr(), van.RankOf(m.table.nodes[i].ID)))
		}
	}
	return fmt.Sprintf("the cluster is complete: all %d places for a %s are taken (%s) and none of its nodes is dead: %s",
		m.cfg.instances(rec.Role), rec.Role, m.cfg.formula(rec.Role), list(names))
}

// joinLost discounts a registered node whose connection broke.
func (m *Machine) joinLost(temp int, cause error) {
	for _, j := range m.sched.joins {
		if j.temp == temp && j.lost == nil {
			j.lost = cause
			m.remember(&m.sched.vanished, gone(j, cause))
			m.out.emit(Warning{Text: fmt.Sprintf("%s vanished before the cluster was complete: %s", describe(&j.node), cause)})
		}
	}
}

func gone(j *join, cause error) string { return fmt.Sprintf("%s (%s)", describe(&j.node), cause) }

// joinBack counts a node again whose connection is back, if it can still be accepted.
func (m *Machine) joinBack(now time.Duration, temp int) {
	for i, j := range m.sched.joins {
		if j.temp != temp || j.lost == nil {
			continue
		}
		if why, _ := m.misfit(&j.node); why != "" {
			m.sched.joins = slices.Delete(m.sched.joins, i, i+1)
			m.out.disconnect(temp)
			m.refuse(now, &j.node, why)
			return
		}
		m.sched.vanished = slices.DeleteFunc(m.sched.vanished, func(s string) bool { return s == gone(j, j.lost) })
		j.lost = nil
		m.complete(now)
		return
	}
}

// reach gives a registered node a temporary id and a connection.
func (m *Machine) reach(j *join) {
	if j.temp == 0 {
		j.temp = m.out.reach(j.node)
	}
}

func (m *Machine) remember(list *[]string, what string) {
	if slices.Contains(*list, what) {
		return
	}
	if len(*list) == maxRefusals {
		*list = slices.Delete(*list, 0, 1)
	}
	*list = append(*list, what)
}

// tellJoining sends a notice to every node that waits for its id.
func (m *Machine) tellJoining(n notice) {
	for _, j := range m.sched.joins {
		if j.lost == nil {
			m.reach(j)
			m.out.tell(j.temp, n)
		}
	}
}

// tellAll sends a notice about one worker or server to every other live one. Its key names
// the process that it is about, since it may arrive after the record of the next one.
func (m *Machine) tellAll(about int, n notice) {
	for _, id := range m.table.ids() {
		if id != about && !m.alive.isDown(id) {
			m.out.tellAbout(id, n, uint64(m.Incarnation(about)))
		}
	}
}

// catchUp tells a node that is back what it may have missed: notices and records that were
// sent while its connection was down, or were under way when it broke.
func (m *Machine) catchUp(id int) {
	replaced := m.sched.lastReplaced > 0 && m.sched.lastReplaced >= m.alive.peers[id].since-time.Second
	if !m.table.native(id) {
		if replaced {
			m.repeatRecords(id)
		}
		return
	}
	if replaced {
		m.sendTable(id, m.table.whole())
	}
	var dead []string
	for _, o := range m.table.ids() {
		if o != id && m.alive.isDown(o) {
			dead = append(dead, strconv.Itoa(o))
		}
	}
	m.out.tell(id, notice{verb: verbDown, text: strings.Join(dead, ",")})
}

// repeatRecords sends a C++ StepMesh node the records of all live replacements, each in a
// message of its own, as at first. The node ignores those whose address it is connected to.
func (m *Machine) repeatRecords(to int) {
	for i := range m.table.nodes {
		if n := &m.table.nodes[i]; n.ID != to && n.IsRecovery && !m.alive.isDown(n.ID) {
			m.sendTable(to, []van.Node{*n})
		}
	}
}

// tellDead tells a newcomer which nodes of the table are dead.
func (m *Machine) tellDead(to int) {
	for _, id := range m.table.ids() {
		if id != to && m.alive.isDown(id) {
			m.out.tellAbout(to, notice{verb: lossVerb(m.alive.peers[id].cause), id: id, text: m.alive.peers[id].cause.Error()}, uint64(m.Incarnation(id)))
		}
	}
}
