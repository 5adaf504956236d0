package membership

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// leaveGrace is how long a Finalize keeps the loss of a peer back: nodes close right
// after the last barrier, and its release may come on another connection.
const leaveGrace = time.Second

// reason says why a node is held for dead. Each is taken back on its own.
type reason uint8

const (
	connLost reason = 1 << iota // the transport lost the connection
	silent                      // no heartbeats
	declared                    // the scheduler said so
)

type health struct {
	seen  time.Duration // when it was last heard
	down  reason        // 0: alive
	since time.Duration // when it came down, or when the scheduler was replaced
	cause error

	lost     time.Duration // when its connection was last lost
	beats    bool          // it has sent a heartbeat
	interval time.Duration // between its heartbeats, as it says
	stale    bool          // its last heartbeat said that its table is old
}

// loss is a loss that may turn out to be orderly.
type loss struct {
	cause error
	at    time.Duration
}

func (m *Machine) isDown(id int) bool {
	h := m.health[id]
	return h != nil && h.down != 0
}

// heard notes a sign of life.
func (m *Machine) heard(now time.Duration, from int) {
	if h := m.health[from]; h != nil {
		h.seen = max(h.seen, now)
		if h.down&silent != 0 {
			m.markUp(now, from, silent)
		}
	}
}

// PeerLost tells that the transport lost the connection to id, a temporary id
// too. It means nothing after Leaving or the final barrier.
func (m *Machine) PeerLost(now time.Duration, id int, cause error) {
	if cause == nil {
		cause = van.ErrPeerLost
	}
	if m.phase == failed || m.leaving || id == m.self.ID {
		return
	}
	if m.sched != nil && id < 0 {
		m.joinLost(id, cause)
		return
	}
	if m.phase == joining && m.sched == nil && id == van.SchedulerID {
		m.schedulerLost = cause
		return
	}
	if m.health[id] == nil {
		return
	}
	m.health[id].lost = now
	err := &lossError{"connection lost: " + cause.Error(), cause}
	if m.sched == nil && m.finalizing() != nil {
		if _, known := m.held[id]; !known && !m.isDown(id) {
			m.held[id] = loss{err, now}
		}
		return
	}
	m.markDown(now, id, connLost, err)
}

// PeerBack tells that the connection to id stands again. It is harmless for one
// that never broke.
func (m *Machine) PeerBack(now time.Duration, id int) {
	if m.phase == failed {
		return
	}
	if m.sched != nil && id < 0 {
		m.joinBack(now, id)
		return
	}
	if m.phase == joining && m.sched == nil && id == van.SchedulerID {
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
	if m.sched == nil && id == van.SchedulerID && m.native(id) && !m.leaving && (held || h.down != 0) {
		m.beat([]van.Node{m.self}) // it may be another process now
	}
	if held && id == van.SchedulerID {
		m.askAgain()
	}
	m.markUp(now, id, connLost)
}

// Leaving tells that this node is about to go, so that the loss of a peer is no
// failure any more.
func (m *Machine) Leaving(time.Duration) {
	m.leaving = true
	clear(m.held)
}

// markDown notes that id is dead for reason r and tells everybody who must know.
func (m *Machine) markDown(now time.Duration, id int, r reason, cause error) {
	h := m.health[id]
	first := h.down == 0
	h.down |= r
	if !first {
		return
	}
	h.cause, h.since = cause, now
	delete(m.held, id)
	if m.leaving {
		return
	}
	m.emit(PeerDead{id, cause})
	if m.sched != nil {
		m.tellAll(id, notice{verb: verbDead, id: id, text: cause.Error()})
		m.recheckBarriers(now)
	} else {
		m.failWithoutScheduler(now)
	}
}

// markUp takes back reasons; without any left, id is alive again.
func (m *Machine) markUp(now time.Duration, id int, r reason) {
	h := m.health[id]
	if h.down == 0 || h.down&^r != 0 {
		h.down &^= r
		return
	}
	h.seen, h.down, h.cause = max(h.seen, now), 0, nil
	if m.leaving {
		return
	}
	m.emit(PeerAlive{id})
	if m.sched != nil {
		m.tellAll(id, notice{verb: verbBack, id: id})
		m.catchUp(id)
		m.owedReleases(id)
		m.recheckBarriers(now)
	} else if id == van.SchedulerID {
		m.askAgain()
	}
}

// watched lists the nodes whose silence counts: on the scheduler all others, or those that
// have sent a heartbeat; elsewhere the scheduler, if it has heartbeats to answer.
func (m *Machine) watched() []int {
	if m.cfg.HeartbeatTimeout == 0 || m.leaving {
		return nil
	}
	if m.sched != nil {
		ids := m.Members(van.WorkerGroup | van.ServerGroup)
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

// patience is how long id may be silent. One that says that it sends heartbeats more
// rarely than is expected here is given more time.
func (m *Machine) patience(id int) time.Duration {
	return max(m.cfg.HeartbeatTimeout, 3*m.health[id].interval)
}

func (m *Machine) beats() bool {
	return m.sched == nil && m.cfg.HeartbeatInterval > 0 && !m.leaving &&
		(!m.cfg.NativeInterval || m.native(van.SchedulerID)) && !failpoint.On("heartbeat")
}

// beat sends a heartbeat with the own record and perhaps others.
func (m *Machine) beat(nodes []van.Node) {
	meta := m.control(van.Heartbeat)
	meta.Control.Nodes = nodes
	if m.native(van.SchedulerID) {
		meta.Key = beatKey(m.generation, m.cfg.HeartbeatInterval)
	}
	m.send(van.SchedulerID, meta)
}

func (m *Machine) tickHealth(now time.Duration) {
	if (m.beats() || m.rejoining && !m.leaving) && now >= m.nextBeat {
		m.nextBeat = now + m.beatInterval()
		m.beat([]van.Node{m.self})
	}
	watched := m.watched()
	if len(watched) == 0 {
		m.lastLook = now
		return
	}
	overslept := now-m.lastLook > m.cfg.HeartbeatTimeout/2
	m.lastLook = now
	for _, id := range watched {
		h := m.health[id]
		if overslept {
			// This process was stopped, or had no processor: what the others sent
			// meanwhile may not have been read yet.
			h.seen = max(h.seen, now-m.cfg.HeartbeatTimeout/2)
		}
		if h.down&silent == 0 && now-h.seen >= m.patience(id) {
			m.markDown(now, id, silent, &lossError{text: fmt.Sprintf("no heartbeat for %s (PS_HEARTBEAT_TIMEOUT=%s)", now-h.seen,
				m.patience(id))})
		}
	}
}

func (m *Machine) beatInterval() time.Duration {
	if m.rejoining {
		return returnBeat
	}
	return m.cfg.HeartbeatInterval
}

func (m *Machine) nextHealthTick() time.Duration {
	next := time.Duration(math.MaxInt64)
	if m.beats() || m.rejoining && !m.leaving {
		next = m.nextBeat
	}
	any := false
	for _, id := range m.watched() {
		if h := m.health[id]; h.down&silent == 0 {
			next = min(next, h.seen+m.patience(id))
			any = true
		}
	}
	if any { // so that a look that comes too late is noticed
		next = min(next, m.lastLook+m.cfg.HeartbeatTimeout/4+1)
	}
	return next
}

// stepHeartbeat notes a heartbeat; the scheduler answers it with its own record.
func (m *Machine) stepHeartbeat(now time.Duration, from int, msg *van.Meta) error {
	if m.sched == nil {
		if from != van.SchedulerID {
			return m.bad(from, msg, "sender", from, "the scheduler")
		}
		m.heard(now, from)
		if len(msg.Body) == 0 || !m.native(from) {
			m.resumed()
			return nil
		}
		n, err := parseNotice(msg.Body)
		if err == nil && n.verb == verbRejoin {
			m.stepRejoin(n)
		}
		return nil
	}
	nodes := msg.Control.Nodes
	if m.native(from) {
		nodes = nodes[:1] // the rest is for a scheduler that was started again
	}
	for i := range nodes {
		n := &nodes[i]
		field := fmt.Sprintf("control.node[%d].id", i)
		at, ok := m.at[n.ID]
		if !ok {
			return m.bad(from, msg, field, n.ID, "the id of a node of this cluster")
		}
		if n.ID != from {
			return m.bad(from, msg, field, n.ID, fmt.Sprintf("the sender's, %d", from))
		}
		if cur := &m.table[at]; another(cur, n) && !failpoint.On("fencing") {
			m.refuse(now, n, m.whyStray(from, m.own.Cluster))
			continue
		}
		m.heard(now, from)
		h := m.health[from]
		h.beats = true
		if m.native(from) {
			var generation uint32
			generation, h.interval = parseBeatKey(msg.Key)
			old := generation != m.generation
			if old && h.stale { // it has missed a record
				m.sendTable(from, m.fullTable())
				m.tellDead(from)
			}
			h.stale = old
		}
		meta := m.control(van.Heartbeat)
		meta.Control.Nodes = []van.Node{m.self}
		m.send(n.ID, meta)
	}
	return nil
}

// DeadNodes lists the nodes that are known to be dead or were not heard for t,
// in the order of Members: on the scheduler of all workers and servers, elsewhere
// of all nodes known to be dead, and the scheduler if silent. With t = 0 silence
// does not count.
func (m *Machine) DeadNodes(now, t time.Duration) []int {
	var dead []int
	if m.phase != ready {
		return nil
	}
	for _, id := range m.Members(van.AllNodes) {
		h := m.health[id]
		if h == nil || id == m.self.ID {
			continue
		}
		watched := m.sched != nil || id == van.SchedulerID
		if h.down != 0 || watched && t > 0 && now-h.seen > t {
			dead = append(dead, id)
		}
	}
	return dead
}
