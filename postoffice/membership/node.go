package membership

import (
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// The worker's and server's side of start-up and recovery.

// register sends this node's record to the scheduler.
func (m *Machine) register() {
	meta := m.out.control(van.AddNode)
	meta.Control.Nodes = []van.Node{m.table.self}
	m.out.send(van.SchedulerID, meta)
}

// stepTable handles the node table, or later the record of a replacement.
func (m *Machine) stepTable(now time.Duration, from int, msg *van.Meta) error {
	if from != van.SchedulerID {
		return m.table.bad(from, msg, "sender", from, "the scheduler")
	}
	if err := m.table.checkRecords(msg); err != nil {
		return err
	}
	if m.life.phase == joining {
		return m.join(now, msg)
	}
	m.tableSeen(msg)
	for i := range msg.Control.Nodes {
		if n := &msg.Control.Nodes[i]; n.Role != van.Scheduler && !m.outdated(n.ID, msg) {
			m.update(now, n)
		}
		if m.life.phase == failed {
			return nil
		}
	}
	m.resumed()
	return nil
}

// outdated tells whether the scheduler has sent something newer than msg about id; if not,
// it notes msg as the latest. With PS_RESEND a lost message arrives after later ones.
func (m *Machine) outdated(id int, msg *van.Meta) bool {
	if _, known := m.table.at[id]; !known || msg.Timestamp == van.Empty {
		return false
	}
	if last, ok := m.news[id]; ok && newer(last, msg.Timestamp) {
		return true
	}
	m.news[id] = msg.Timestamp
	return false
}

// tableSeen notes the generation of the table that msg has, or completes. Heartbeats carry
// it; the scheduler answers an old one with the whole table.
func (m *Machine) tableSeen(msg *van.Meta) {
	whole := slices.ContainsFunc(msg.Control.Nodes, func(n van.Node) bool { return n.Role == van.Scheduler })
	if g := uint32(msg.Key); m.table.native(van.SchedulerID) && (whole || g == m.table.generation+1) {
		m.table.generation = g
	}
}

// join handles the full table: this node's id, and the nodes to connect to.
func (m *Machine) join(now time.Duration, msg *van.Meta) error {
	nodes := msg.Control.Nodes
	count := map[van.Role]int{}
	var own *van.Node
	for i := range nodes {
		n := &nodes[i]
		count[n.Role]++
		if own == nil && n.Role == m.table.self.Role && sameAddr(n, &m.table.self) && m.table.mine(n) {
			own = n
		}
	}
	if own == nil {
		return m.table.bad(van.SchedulerID, msg, "control.node", fmt.Sprintf("%d records", len(nodes)),
			fmt.Sprintf("one of them %s at %s", m.table.self.Role, m.table.self.Addr()))
	}
	workers, servers := m.cfg.instances(van.Worker), m.cfg.instances(van.Server)
	if count[van.Worker] != workers || count[van.Server] != servers {
		m.fail(&van.Error{Op: "start", Node: m.table.name(), Peer: m.table.peer(van.SchedulerID),
			Detail: fmt.Sprintf("the scheduler started a cluster of %d workers and %d servers, but here %s and %s",
				count[van.Worker], count[van.Server], m.cfg.formula(van.Worker), m.cfg.formula(van.Server)),
			Hint: "give all nodes the same numbers", Err: van.ErrInvalid})
		return nil
	}
	var table []van.Node
	at := map[int]int{}
	for i := range nodes {
		n := &nodes[i]
		if n.Role == van.Scheduler {
			continue
		}
		field := fmt.Sprintf("control.node[%d].id", i)
		if van.RankOf(n.ID) >= m.cfg.instances(n.Role) {
			return m.table.bad(van.SchedulerID, msg, field, n.ID, fmt.Sprintf("a rank below %d", m.cfg.instances(n.Role)))
		}
		if prev, again := at[n.ID]; again {
			if sameAddr(&table[prev], n) {
				continue // another customer of the same process
			}
			return m.table.bad(van.SchedulerID, msg, field, n.ID, "another, for this is "+table[prev].Addr())
		}
		at[n.ID] = len(table)
		table = append(table, n.Clone())
	}
	m.table.fill(table)
	m.table.shared = map[int]int{}
	for _, id := range m.cfg.members(van.WorkerGroup | van.ServerGroup) {
		if _, ok := at[id]; !ok {
			m.table.shared[id] = van.Empty // no node has this id
		}
	}
	if i := slices.IndexFunc(nodes, func(n van.Node) bool { return n.Role == van.Scheduler }); i >= 0 && !m.enter(&nodes[i]) {
		m.fail(&van.Error{Op: "start", Node: m.table.name(), Peer: m.table.peer(van.SchedulerID), Detail: "its STEPAF_CLUSTER_ID is another",
			Err: ErrRefused})
		return nil
	}
	m.tableSeen(msg)
	for i := range table {
		m.table.learn(table[i].ID, &table[i])
		m.outdated(table[i].ID, msg)
	}
	m.table.self = m.table.nodes[m.table.at[own.ID]]
	m.table.sign(&m.table.self)
	m.life.phase, m.schedulerLost, m.schedulerSaid = ready, nil, ""
	m.nextBeat, m.alive.lastCheck = now+m.cfg.HeartbeatInterval, now
	if m.cfg.NativeInterval || m.table.native(van.SchedulerID) { // at once: from then on the scheduler watches this node
		m.nextBeat = now
	}
	m.out.emit(SetID{own.ID})
	m.out.emit(Assigned{ID: own.ID, Rank: van.RankOf(own.ID), Recovery: own.IsRecovery})
	seen := map[int]bool{}
	for i := range nodes {
		n := &nodes[i]
		if seen[n.ID] {
			continue
		}
		seen[n.ID] = true
		m.alive.begin(now, n.ID)
		switch {
		case n.Role == van.Scheduler:
			m.out.connect(van.SchedulerID, m.table.scheduler)
		case n.Role != m.table.self.Role:
			m.out.first[n.ID] = true
			m.out.connect(n.ID, m.table.nodes[m.table.at[n.ID]])
		}
	}
	if !seen[van.SchedulerID] { // connect again, so that the scheduler learns this node's id
		m.alive.begin(now, van.SchedulerID)
		m.out.connect(van.SchedulerID, m.table.scheduler)
	}
	m.out.emit(Ready{})
	return nil
}

// update handles one record after start-up: usually that of a replacement.
func (m *Machine) update(now time.Duration, n *van.Node) {
	i, ok := m.table.at[n.ID]
	if !ok {
		m.out.emit(Warning{Text: fmt.Sprintf("%s: the scheduler announced %s at %s, which was not in its table", m.table.name(),
			van.NodeName(n.ID), n.Addr())})
		return
	}
	old, h := &m.table.nodes[i], m.alive.peers[n.ID]
	moved := another(old, n)
	if n.ID == m.table.self.ID {
		if moved {
			m.fail(&van.Error{Op: "stay in the cluster", Node: m.table.name(), Peer: m.table.peer(van.SchedulerID),
				Detail: fmt.Sprintf("%s was taken for dead and its place given to %s", m.table.self.Addr(), n.Addr()),
				Err:    ErrRefused})
		}
		return
	}
	if !moved && (m.table.native(n.ID) || !n.IsRecovery || h.down == 0 && old.IsRecovery) {
		if m.life.rejoining {
			m.markUp(now, n.ID, declared)
		}
		return // known
	}
	m.table.nodes[i] = n.Clone()
	m.table.learn(n.ID, n)
	delete(m.out.first, n.ID)
	m.alive.begin(now, n.ID)
	delete(m.held, n.ID)
	m.relink(n.ID)
	m.out.emit(PeerReplaced{n.ID, m.table.nodes[i]})
}

// stepNotice handles a notice of the scheduler, and on the scheduler a withdrawal.
func (m *Machine) stepNotice(now time.Duration, from int, msg *van.Meta) error {
	if len(msg.Body) == 0 {
		return nil
	}
	if m.sched == nil && from != van.SchedulerID {
		return m.table.bad(from, msg, "sender", from, "notices come from the scheduler only")
	}
	n, err := parseNotice(msg.Body)
	if err != nil {
		return m.table.badErr(from, msg, err)
	}
	switch {
	case n.verb == verbPolicies:
		return m.stepPolicies(from, msg, n)
	case m.sched != nil && n.verb == verbHave:
		m.stepHave(from, n)
		return nil
	case m.sched != nil && n.verb == verbAsk:
		return m.stepAsk(now, from, msg, n)
	case m.sched != nil || n.verb == verbWithdraw:
		return m.stepWithdraw(now, from, msg, n)
	}
	switch n.verb {
	case verbError:
		m.fail(&van.Error{Op: "join the cluster", Node: m.table.name(), Peer: m.table.peer(van.SchedulerID), Detail: n.text,
			Err: ErrRefused})
	case verbWaiting:
		if m.life.phase == joining {
			m.schedulerSaid = n.text
		} else {
			m.barrierWaits(n.text, msg.Key)
		}
	case verbBarrier:
		m.barrierRefused(n, msg.Key)
	case verbDown:
		dead := n.ids()
		for _, id := range m.table.ids() {
			switch h := m.alive.peers[id]; {
			case id == m.table.self.ID || h == nil || m.outdated(id, msg):
			case slices.Contains(dead, id):
				m.markDown(now, id, declared, &lossError{text: "the scheduler says: it is dead"})
			case h.down&declared != 0:
				m.markUp(now, id, declared)
			}
		}
	case verbDead, verbCut, verbBack:
		if _, ok := m.table.at[n.id]; !ok {
			if m.life.phase == joining {
				return nil // notices after the table will say which nodes are dead
			}
			return m.table.bad(from, msg, "body "+n.verb, n.id, "the id of a node of this cluster")
		}
		if n.id == m.table.self.ID {
			if n.verb != verbBack {
				m.out.emit(Warning{Text: m.table.name() + ": the scheduler takes this node for dead: " + n.text})
			}
			return nil
		}
		if about, known := msg.Key, uint64(m.Incarnation(n.id)); about != 0 && known != 0 && about != known {
			return nil // about a process before or after the one in the table
		}
		if m.outdated(n.id, msg) {
			return nil
		}
		switch {
		case n.verb == verbBack:
			m.markUp(now, n.id, declared)
		case n.verb == verbCut && m.alive.peers[n.id] != nil && m.alive.peers[n.id].sameLoss(now):
		default:
			m.markDown(now, n.id, declared, &lossError{text: "the scheduler says: " + n.text})
		}
	}
	return nil
}
