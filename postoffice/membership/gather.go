package membership

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// This file is the scheduler's side of barriers: counting requests.

type gatherKey struct {
	group    int
	instance bool
}

// arrival is one counted request. customer is 0 unless several customers of one
// process registered, each of which has a place of its own.
type arrival struct{ id, customer int }

// stepRequest counts a request and releases the barrier when it is complete.
func (m *Machine) stepRequest(now time.Duration, from int, msg *van.Meta) error {
	group, instance := msg.Control.BarrierGroup, msg.Control.Cmd == van.InstanceBarrier
	switch _, known := m.at[from]; {
	case m.sched == nil:
		return m.bad(from, msg, "request", true, "false: only the scheduler counts barriers")
	case m.phase != ready || !known && from != van.SchedulerID:
		return m.bad(from, msg, "sender", from, "the id of a node of this cluster")
	case group < 1 || group > van.AllNodes:
		return m.bad(from, msg, "control.barrier_group", group, "1 to 7")
	}
	key := gatherKey{group, instance}
	a := arrival{id: from}
	if m.sched.several[from] {
		a.customer = int(msg.CustomerID)
	}
	came := m.sched.gathers[key]
	if instance && slices.Contains(came, a) {
		return nil // a resent request
	}
	came = append(came, a)
	m.sched.gathers[key] = came
	if len(came) < m.cfg.expected(group, instance) {
		m.recheckBarriers()
		return nil
	}
	delete(m.sched.gathers, key)
	to := make([]int, 0, len(came))
	if instance {
		to = m.Members(group)
	} else {
		for _, a := range came {
			to = append(to, a.id)
		}
	}
	for _, id := range to {
		if m.isDown(id) {
			continue
		}
		meta := m.control(msg.Control.Cmd)
		meta.AppID, meta.CustomerID = msg.AppID, msg.CustomerID
		m.send(id, meta)
	}
	if t := m.finalizing(); t != nil && instance && group == t.group {
		m.Leaving(now) // the others go as soon as they have this
	}
	return nil
}

// recheckBarriers fails the barriers that can no longer be complete.
func (m *Machine) recheckBarriers() {
	if !m.anyDown() {
		return
	}
	for _, key := range m.sched.openBarriers() {
		came := m.sched.gathers[key]
		possible := len(came)
		dead := ""
		for _, id := range m.Members(key.group) {
			missing := m.places(id)
			for _, a := range came {
				if a.id == id {
					missing--
				}
			}
			switch {
			case missing <= 0:
			case m.isDown(id):
				dead += fmt.Sprintf("; %s is dead: %s", m.peer(id), m.health[id].cause)
			default:
				possible += missing
			}
		}
		if dead == "" || possible >= m.cfg.expected(key.group, key.instance) {
			continue
		}
		text := strings.TrimPrefix(dead, "; ")
		delete(m.sched.gathers, key)
		told := map[int]bool{}
		for _, a := range came {
			if told[a.id] || m.isDown(a.id) {
				continue
			}
			told[a.id] = true
			n := notice{verb: verbBarrier, group: key.group, instance: key.instance, text: text}
			if a.id == van.SchedulerID {
				m.barrierRefused(n)
			} else {
				m.tell(a.id, n)
			}
		}
	}
}

// openBarriers lists the barriers that somebody waits for, in a fixed order.
func (s *scheduler) openBarriers() []gatherKey {
	keys := make([]gatherKey, 0, len(s.gathers))
	for k := range s.gathers {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b gatherKey) int {
		return cmp.Or(cmp.Compare(a.group, b.group), strings.Compare(kindName(a.instance), kindName(b.instance)))
	})
	return keys
}

// places is how many ids node id stands for.
func (m *Machine) places(id int) int {
	n := 1
	for _, first := range m.shared {
		if first == id {
			n++
		}
	}
	return n
}

// barriersText says who has not come to the barriers that are open.
func (m *Machine) barriersText() string {
	var parts []string
	for _, key := range m.sched.openBarriers() {
		came := m.sched.gathers[key]
		var missing []string
		for _, id := range m.Members(key.group) {
			if !slices.ContainsFunc(came, func(a arrival) bool { return a.id == id }) {
				missing = append(missing, m.peer(id))
			}
		}
		parts = append(parts, fmt.Sprintf("%s barrier over %s: %d of %d requests, not from %s", kindName(key.instance),
			groupName(key.group), len(came), m.cfg.expected(key.group, key.instance), list(missing)))
	}
	return strings.Join(parts, "; ")
}
