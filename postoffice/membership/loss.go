package membership

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// leaveGrace is how long the report of a lost peer is delayed during Finalize: nodes close
// their connections right after the last barrier, perhaps before this node has its release.
const leaveGrace = time.Second

// loss is a lost connection during Finalize: the peer may have died, or left in order.
type loss struct {
	cause error
	at    time.Duration
}

func (m *Machine) heard(now time.Duration, from int) {
	if m.alive.heard(now, from) {
		m.isUp(now, from)
	}
}

// PeerLost says that the transport lost the connection to id, which may be a temporary
// id. It is ignored after Leaving and after the final barrier. A node whose connection the
// scheduler refuses as it was replaced has failed.
func (m *Machine) PeerLost(now time.Duration, id int, cause error) {
	cause = cmp.Or(cause, van.ErrPeerLost)
	if m.life.phase == failed || m.life.leaving || id == m.table.self.ID {
		return
	}
	if m.sched == nil && id == van.SchedulerID && errors.Is(cause, van.ErrReplaced) { // it cannot be asked any more
		m.fail(&van.Error{Op: "connect", Node: m.table.name(), Peer: m.table.peer(id), Err: ErrRefused,
			Detail: fmt.Sprintf("%s was taken for dead and its place given to another process: %s", m.table.self.Addr(), cause)})
		return
	}
	if m.sched != nil && id < 0 {
		m.joinLost(id, cause)
		return
	}
	if m.life.phase == joining && m.sched == nil && id == van.SchedulerID {
		m.schedulerLost = cause
		return
	}
	if m.alive.peers[id] == nil {
		return
	}
	err, quiet := m.alive.broke(now, id, cause)
	finalizes := m.sched == nil && m.finalizing() != nil
	if !finalizes && quiet {
		m.markDown(now, id, silent, m.alive.silence(now, id))
	}
	if finalizes {
		if _, known := m.held[id]; !known && !m.alive.isDown(id) {
			m.held[id] = loss{err, now}
		}
		return
	}
	m.markDown(now, id, connLost, err)
}

// PeerBack says that the connection to id is back. It does nothing if it was not lost.
func (m *Machine) PeerBack(now time.Duration, id int) {
	if m.life.phase == failed {
		return
	}
	if m.sched != nil && id < 0 {
		m.joinBack(now, id)
		return
	}
	if m.life.phase == joining && m.sched == nil && id == van.SchedulerID {
		if m.schedulerLost != nil {
			m.schedulerLost = nil
			m.register()
		}
		return
	}
	_, held := m.held[id]
	delete(m.held, id)
	h := m.alive.peers[id]
	if h == nil {
		return
	}
	m.alive.mended(now, id)
	if m.sched == nil && id == van.SchedulerID && m.table.native(id) && !m.life.leaving && (held || h.down != 0) {
		m.beat([]van.Node{m.table.self}) // another process may listen there now; its answer tells
	}
	if held && id == van.SchedulerID {
		m.askAgain()
	}
	m.markUp(now, id, connLost)
}

// Leaving says that this node is about to leave: lost peers are no longer reported.
func (m *Machine) Leaving(time.Duration) {
	m.life.leaving = true
	clear(m.held)
}

func (m *Machine) markDown(now time.Duration, id int, r reason, cause error) {
	h := m.alive.peers[id]
	worse := m.sched != nil && !m.life.leaving && h.down != 0 && r == silent && lossVerb(h.cause) == verbCut
	switch first := m.alive.markDown(now, id, r, cause); {
	case worse: // a node that has passed over the cut must hear of this
		h.cause = cause
		m.tellAll(id, notice{verb: verbDead, id: id, text: cause.Error()})
	case !first:
	case m.sched != nil:
		delete(m.held, id)
		m.tellAll(id, notice{verb: lossVerb(cause), id: id, text: cause.Error()})
		m.recheckBarriers(now)
	default:
		delete(m.held, id)
		m.failWithoutScheduler(now)
	}
}

func (m *Machine) markUp(now time.Duration, id int, r reason) {
	if m.alive.markUp(now, id, r) {
		m.isUp(now, id)
	}
}

func (m *Machine) isUp(now time.Duration, id int) {
	if m.sched != nil {
		m.tellAll(id, notice{verb: verbBack, id: id})
		m.catchUp(id)
		m.owedReleases(id)
		m.recheckBarriers(now)
	} else if id == van.SchedulerID {
		m.askAgain()
	}
}

// watched lists the nodes to which the heartbeat timeout applies: on the scheduler all
// others, or those that have sent a heartbeat; elsewhere the scheduler, if this node sends
// heartbeats, which it answers.
func (m *Machine) watched() []int {
	if m.cfg.HeartbeatTimeout == 0 || m.life.leaving {
		return nil
	}
	if m.sched != nil {
		ids := m.table.ids()
		if m.cfg.NativeTimeout {
			ids = slices.DeleteFunc(ids, func(id int) bool { return !m.alive.peers[id].beats })
		}
		return ids
	}
	if !m.beats() {
		return nil
	}
	return []int{van.SchedulerID}
}

// Silent lists the nodes that Tick takes for dead at that time, since nothing has come from
// them, unless Answers is called for them before. One whose connection broke after its last
// message is not among them: another process may answer at its address.
func (m *Machine) Silent(now time.Duration) []int {
	if m.life.phase != ready {
		return nil
	}
	return m.alive.suspects(now, m.watched())
}

// Answers says that the transport of id, which does not wait for what its program does, has
// answered within the limit: the node stands, and is only busy. It counts for this time, and
// must come before Tick.
func (m *Machine) Answers(now time.Duration, id int) {
	m.alive.answers(now, id)
}

func (m *Machine) beats() bool {
	return m.sched == nil && m.cfg.HeartbeatInterval > 0 && !m.life.leaving &&
		(!m.cfg.NativeInterval || m.table.native(van.SchedulerID)) && !failpoint.On("heartbeat")
}

// beat sends a heartbeat with these records, this node's first.
func (m *Machine) beat(nodes []van.Node) {
	meta := m.out.control(van.Heartbeat)
	meta.Control.Nodes = nodes
	if m.table.native(van.SchedulerID) {
		meta.Key = beatKey(m.table.generation, m.cfg.HeartbeatInterval)
	}
	m.out.send(van.SchedulerID, meta)
}

func (m *Machine) tickHealth(now time.Duration) {
	if (m.beats() || m.life.rejoining && !m.life.leaving) && now >= m.nextBeat {
		m.nextBeat = now + m.beatInterval()
		m.beat([]van.Node{m.table.self})
	}
	for _, id := range m.alive.check(now, m.watched()) {
		m.markDown(now, id, silent, m.alive.silence(now, id))
	}
}

func (m *Machine) beatInterval() time.Duration {
	if m.life.rejoining {
		return returnBeat
	}
	return m.cfg.HeartbeatInterval
}

func (m *Machine) nextHealthTick() time.Duration {
	next := time.Duration(math.MaxInt64)
	if m.beats() || m.life.rejoining && !m.life.leaving {
		next = m.nextBeat
	}
	return min(next, m.alive.next(m.watched()))
}

// stepHeartbeat notes a heartbeat; the scheduler answers it with its own record.
func (m *Machine) stepHeartbeat(now time.Duration, from int, msg *van.Meta) error {
	if m.sched == nil {
		if from != van.SchedulerID {
			return m.table.bad(from, msg, "sender", from, "the scheduler")
		}
		m.heard(now, from)
		if len(msg.Body) == 0 || !m.table.native(from) {
			m.resumed()
			if p := &m.policies; p.version > 0 {
				m.out.emit(Policies{p.version, p.list}) // more of them may be in force by now
			}
			return nil
		}
		n, err := parseNotice(msg.Body)
		if err == nil && n.verb == verbRejoin {
			m.stepRejoin(n)
		}
		return nil
	}
	nodes := msg.Control.Nodes
	if m.table.native(from) {
		nodes = nodes[:1] // the others are for a restarted scheduler
	}
	for i := range nodes {
		n := &nodes[i]
		field := fmt.Sprintf("control.node[%d].id", i)
		at, ok := m.table.at[n.ID]
		if !ok {
			return m.table.bad(from, msg, field, n.ID, "the id of a node of this cluster")
		}
		if n.ID != from {
			return m.table.bad(from, msg, field, n.ID, fmt.Sprintf("the sender's, %d", from))
		}
		if cur := &m.table.nodes[at]; another(cur, n) && !failpoint.On("fencing") {
			m.refuse(now, n, m.whyStray(from, m.table.own.Cluster))
			continue
		}
		m.heard(now, from)
		h := m.alive.peers[from]
		h.beats = true
		if m.table.native(from) {
			var generation uint32
			generation, h.interval = parseBeatKey(msg.Key)
			old := generation != m.table.generation
			if old && h.stale { // two in a row: it has missed a record
				m.sendTable(from, m.table.whole())
				m.tellDead(from)
			}
			h.stale = old
		}
		meta := m.out.control(van.Heartbeat)
		meta.Control.Nodes = []van.Node{m.table.self}
		m.out.send(n.ID, meta)
		m.policiesBeat(from)
	}
	return nil
}

// DeadNodes lists, in the order of Members, the nodes that are known to be dead, and
// those that have been silent for longer than t, which the scheduler knows of all
// nodes and others only of the scheduler. With t = 0 silence does not count.
func (m *Machine) DeadNodes(now, t time.Duration) []int {
	if m.life.phase != ready {
		return nil
	}
	return m.alive.dead(now, t)
}
