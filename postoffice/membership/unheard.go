package membership

import (
	"math"
	"time"
)

// Replacements that the scheduler has not heard of since it sent them the node table. The
// table may be lost: the connection to the process before, at the same address, may take
// the place of the new one after the table was written. A node that lacks it only waits, so
// it is sent again.

const (
	tableRepeats = 4               // at most
	tableRepeat  = 2 * time.Second // after the first time; each pause is twice the one before
)

// unheard is a replacement of this library that no message has come from.
type unheard struct {
	at    time.Duration // of the next table
	pause time.Duration
	left  int
}

// expect begins to wait for a message of id, which has been sent the table.
func (m *Machine) expect(now time.Duration, id int) {
	delete(m.sched.unheard, id)
	if m.table.native(id) { // C++ StepMesh takes a second table for other nodes'
		m.sched.unheard[id] = &unheard{at: now + tableRepeat, pause: tableRepeat, left: tableRepeats}
	}
}

func (m *Machine) tickUnheard(now time.Duration) {
	if m.sched == nil {
		return
	}
	for _, id := range sortedIDs(m.sched.unheard) {
		u := m.sched.unheard[id]
		switch {
		case m.alive.peers[id].heard > 0 || m.alive.isDown(id) || u.left == 0:
			delete(m.sched.unheard, id)
		case now >= u.at:
			m.sendTable(id, m.table.whole())
			m.tellDead(id)
			u.pause *= 2
			u.at, u.left = now+u.pause, u.left-1
		}
	}
}

func (m *Machine) nextUnheard() time.Duration {
	next := time.Duration(math.MaxInt64)
	if m.sched != nil {
		for _, u := range m.sched.unheard {
			next = min(next, u.at)
		}
	}
	return next
}
