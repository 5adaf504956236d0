package membership

// Which nodes are alive: lost connections, heartbeats, and what the scheduler says.

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// leaveGrace is how long the report of a lost peer is delayed during Finalize: nodes close
// their connections right after the last barrier, perhaps before this node has its release.
const leaveGrace = time.Second

// reason is why a node is considered dead. Each reason is cleared on its own.
type reason uint8

const (
	connLost reason = 1 << iota // the transport lost the connection
	silent                      // no heartbeats
	declared                    // the scheduler says so
)

type health struct {
	seen  time.Duration // when it was last heard, or its connection came back
	heard time.Duration // when its last message came
	down  reason        // 0: alive
	since time.Duration // when it went down, or when the scheduler was replaced
	cause error

	answered time.Duration // when its transport last answered for it, see Answers; 0: not since its last message
	lost     time.Duration // when its connection was last lost
	back     time.Duration // when it then came back; 0: not since
	beats    bool          // it has sent a heartbeat
	interval time.Duration // between its heartbeats, as it says
	stale    bool          // its last heartbeat said that its table is old
}

// sameLossTime is how long after a peer's connection to this node came back a connection to it that
// another node has lost is taken for lost by the same event: a link that was cut is noticed by each when
// it next sends something.
const sameLossTime = 5 * time.Second

// sameLoss tells whether the scheduler's loss of its connection to a node is what this node has seen
// itself, and is over. If the node has died since, this node's own connection shows it.
func (h *health) sameLoss(now time.Duration) bool {
	return h.down == 0 && h.back > 0 && now-h.back < sameLossTime
}

// loss is a lost connection during Finalize: the peer may have died, or left in order.
type loss struct {
	cause error
	at    time.Duration
}

func (m *Machine) isDown(id int) bool {
	h := m.health[id]
	return h != nil && h.down != 0
}

// heard notes that a message of from has come.
func (m *Machine) heard(now time.Duration, from int) {
	if h := m.health[from]; h != nil {
		h.seen, h.heard, h.answered = max(h.seen, now), max(h.heard, now), 0
		if h.down&silent != 0 {
			m.markUp(now, from, silent)
		}
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
	if m.health[id] == nil {
		return
	}
	h := m.health[id]
	h.lost, h.back = now, 0
	finalizes := m.sched == nil && m.finalizing() != nil
	if !finalizes && h.answered > 0 && m.lapsed(now, id) { // nothing but that connection spoke for it
		m.fallSilent(now, id)
	}
	err := &lossError{text: "connection lost: " + cause.Error(), cause: cause, cut: !errors.Is(cause, van.ErrTimeout) && !errors.Is(cause, syscall.ETIMEDOUT)}
	if finalizes {
		if _, known := m.held[id]; !known && !m.isDown(id) {
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
	h := m.health[id]
	if h == nil {
		return
	}
	if h.down&connLost != 0 {
		h.back = max(now, 1)
	}
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

// markDown marks id as dead for reason r and, if it was alive, tells the application and,
// on the scheduler, the other nodes.
func (m *Machine) markDown(now time.Duration, id int, r reason, cause error) {
	h := m.health[id]
	first := h.down == 0
	h.down |= r
	if !first {
		if m.sched != nil && !m.life.leaving && r == silent && lossVerb(h.cause) == verbCut { // a node that has passed over the cut must hear of this
			h.cause = cause
			m.tellAll(id, notice{verb: verbDead, id: id, text: cause.Error()})
		}
		return
	}
	h.cause, h.since = cause, now
	delete(m.held, id)
	if m.life.leaving {
		return
	}
	m.out.emit(PeerDead{id, cause})
	if m.sched != nil {
		m.tellAll(id, notice{verb: lossVerb(cause), id: id, text: cause.Error()})
		m.recheckBarriers(now)
	} else {
		m.failWithoutScheduler(now)
	}
}

// lossVerb is that of the notice about a node which is down for that cause.
func lossVerb(cause error) string {
	if l, ok := cause.(*lossError); ok && l.cut {
		return verbCut
	}
	return verbDead
}

// markUp clears reasons; with none left, id is alive again.
func (m *Machine) markUp(now time.Duration, id int, r reason) {
	h := m.health[id]
	if h.down == 0 || h.down&^r != 0 {
		h.down &^= r
		return
	}
	h.seen, h.down, h.cause = max(h.seen, now), 0, nil
	if m.life.leaving {
		return
	}
	m.out.emit(PeerAlive{id})
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
			ids = slices.DeleteFunc(ids, func(id int) bool { return !m.health[id].beats })
		}
		return ids
	}
	if !m.beats() {
		return nil
	}
	return []int{van.SchedulerID}
}

// maxSilence is how long id may be silent: the timeout, or three of the intervals that id
// announces, if that is longer.
func (m *Machine) maxSilence(id int) time.Duration {
	return max(m.cfg.HeartbeatTimeout, 3*m.health[id].interval)
}

// lapsed tells whether id has been silent for too long, and is not known to have been.
func (m *Machine) lapsed(now time.Duration, id int) bool {
	h := m.health[id]
	return h.down&silent == 0 && now-h.seen >= m.maxSilence(id)
}

// Silent lists the nodes that Tick takes for dead at that time, since nothing has come from
// them, unless Answers is called for them before. One whose connection broke after its last
// message is not among them: another process may answer at its address.
func (m *Machine) Silent(now time.Duration) []int {
	if m.life.phase != ready {
		return nil
	}
	return slices.DeleteFunc(m.watched(), func(id int) bool {
		h := m.health[id]
		return !m.lapsed(now, id) || h.heard <= h.lost
	})
}

// Answers says that the transport of id, which does not wait for what its program does, has
// answered within the limit: the node stands, and is only busy. It counts for this time, and
// must come before Tick.
func (m *Machine) Answers(now time.Duration, id int) {
	if h := m.health[id]; h != nil {
		h.answered = now
	}
}

func (m *Machine) fallSilent(now time.Duration, id int) {
	m.markDown(now, id, silent, &lossError{text: fmt.Sprintf("no heartbeat for %s (PS_HEARTBEAT_TIMEOUT=%s)", now-m.health[id].seen,
		m.maxSilence(id))})
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
	watched := m.watched()
	if len(watched) == 0 {
		m.lastCheck = now
		return
	}
	overslept := now-m.lastCheck > m.cfg.HeartbeatTimeout/2
	m.lastCheck = now
	for _, id := range watched {
		h := m.health[id]
		if overslept {
			// This process was stopped or starved: messages that came meanwhile may not
			// have been handled yet.
			h.seen = max(h.seen, now-m.cfg.HeartbeatTimeout/2)
		}
		if m.lapsed(now, id) && h.answered < now {
			m.fallSilent(now, id)
		}
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
	any := false
	for _, id := range m.watched() {
		if h := m.health[id]; h.down&silent == 0 {
			if at := h.seen + m.maxSilence(id); at > h.answered { // else with a regular tick
				next = min(next, at)
			}
			any = true
		}
	}
	if any { // regular ticks, so that one that comes too late is noticed, and who is silent and answers is looked at again
		next = min(next, m.lastCheck+m.cfg.HeartbeatTimeout/4+1)
	}
	return next
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
		h := m.health[from]
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
	var dead []int
	if m.life.phase != ready {
		return nil
	}
	for _, id := range m.table.members(van.AllNodes) {
		h := m.health[id]
		if h == nil || id == m.table.self.ID {
			continue
		}
		watched := m.sched != nil || id == van.SchedulerID
		if h.down != 0 || watched && t > 0 && now-h.seen > t {
			dead = append(dead, id)
		}
	}
	return dead
}
