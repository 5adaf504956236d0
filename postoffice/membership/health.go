package membership

import (
	"fmt"
	"math"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// leaveGrace is how long a Finalize still waits for its release when the
// scheduler has gone: the scheduler closes right after sending it, and the two
// come on different connections.
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
	cause error
}

func (m *Machine) isDown(id int) bool {
	h := m.health[id]
	return h != nil && h.down != 0
}

func (m *Machine) anyDown() bool {
	for _, h := range m.health {
		if h.down != 0 {
			return true
		}
	}
	return false
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
	err := &lossError{"connection lost: " + cause.Error(), cause}
	if m.sched == nil && m.finalizing() != nil {
		if _, known := m.held[id]; !known && !m.isDown(id) {
			m.held[id] = err
			if id == van.SchedulerID {
				m.heldAt = now
			}
		}
		return
	}
	m.markDown(id, connLost, err)
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
	delete(m.held, id)
	if m.health[id] != nil {
		m.markUp(now, id, connLost)
	}
}

// Leaving tells that this node is about to go, so that the loss of a peer is no
// failure any more.
func (m *Machine) Leaving(time.Duration) {
	m.leaving = true
	clear(m.held)
}

// markDown notes that id is dead for reason r and tells everybody who must know.
func (m *Machine) markDown(id int, r reason, cause error) {
	h := m.health[id]
	first := h.down == 0
	h.down |= r
	if !first {
		return
	}
	h.cause = cause
	if m.leaving {
		return
	}
	m.emit(PeerDead{id, cause})
	if m.sched != nil {
		m.tellAll(id, notice{verb: verbDead, id: id, text: cause.Error()})
		m.recheckBarriers()
	} else if id == van.SchedulerID {
		m.failTickets(func(*ticket) bool { return true }, van.Error{Peer: m.peer(van.SchedulerID), Err: cause})
	}
}

// markUp takes back reasons; without any left, id is alive again.
func (m *Machine) markUp(now time.Duration, id int, r reason) {
	h := m.health[id]
	if h.down == 0 || h.down&^r != 0 {
		h.down &^= r
		return
	}
	*h = health{seen: max(h.seen, now)}
	if m.leaving {
		return
	}
	m.emit(PeerAlive{id})
	if m.sched != nil {
		m.tellAll(id, notice{verb: verbBack, id: id})
	}
}

// watched lists the nodes whose silence counts: on the scheduler all others;
// elsewhere the scheduler, if it has heartbeats to answer.
func (m *Machine) watched() []int {
	if m.cfg.HeartbeatTimeout == 0 || m.leaving {
		return nil
	}
	if m.sched != nil {
		return m.Members(van.WorkerGroup | van.ServerGroup)
	}
	if m.cfg.HeartbeatInterval == 0 {
		return nil
	}
	return []int{van.SchedulerID}
}

func (m *Machine) beats() bool {
	return m.sched == nil && m.cfg.HeartbeatInterval > 0 && !m.leaving
}

func (m *Machine) tickHealth(now time.Duration) {
	if m.beats() && now >= m.nextBeat {
		for m.nextBeat <= now {
			m.nextBeat += m.cfg.HeartbeatInterval
		}
		meta := m.control(van.Heartbeat)
		meta.Control.Nodes = []van.Node{m.self}
		m.send(van.SchedulerID, meta)
	}
	for _, id := range m.watched() {
		if h := m.health[id]; h.down&silent == 0 && now-h.seen >= m.cfg.HeartbeatTimeout {
			m.markDown(id, silent, &lossError{text: fmt.Sprintf("no heartbeat for %s (PS_HEARTBEAT_TIMEOUT=%s)", now-h.seen,
				m.cfg.HeartbeatTimeout)})
		}
	}
}

func (m *Machine) nextHealthTick() time.Duration {
	next := time.Duration(math.MaxInt64)
	if m.beats() {
		next = m.nextBeat
	}
	for _, id := range m.watched() {
		if h := m.health[id]; h.down&silent == 0 {
			next = min(next, h.seen+m.cfg.HeartbeatTimeout)
		}
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
		return nil
	}
	for i := range msg.Control.Nodes {
		n := &msg.Control.Nodes[i]
		field := fmt.Sprintf("control.node[%d].id", i)
		at, ok := m.at[n.ID]
		if !ok {
			return m.bad(from, msg, field, n.ID, "the id of a node of this cluster")
		}
		if n.ID != from {
			return m.bad(from, msg, field, n.ID, fmt.Sprintf("the sender's, %d", from))
		}
		if cur := &m.table[at]; !sameAddr(cur, n) {
			m.refuse(n, fmt.Sprintf("it was taken for dead and its place as %s given to %s", van.NodeName(n.ID), cur.Addr()))
			continue
		}
		m.heard(now, from)
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
