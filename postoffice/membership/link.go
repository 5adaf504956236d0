package membership

// Connections between nodes of one role, which C++ StepMesh nodes do not have.

import (
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Link connects this node to others of its role, for as long as it is in the cluster: to
// their replacements as well. Ids that it is linked to already, and its own, change nothing.
// They do the same on their side, or cannot answer. An error wraps van.ErrInvalid; nothing
// was connected then.
func (m *Machine) Link(_ time.Duration, ids []int) error {
	bad := func(id int, want string) error {
		return &van.Error{Op: "link", Node: m.table.name(), Peer: m.table.peer(id), Err: fmt.Errorf("%w: want %s", van.ErrInvalid, want)}
	}
	switch {
	case m.life.phase == failed:
		return m.life.failure
	case m.life.phase != ready || m.sched != nil:
		return &van.Error{Op: "link", Node: m.table.name(), Detail: "only workers and servers are linked, once they have started", Err: van.ErrInvalid}
	}
	for _, id := range ids {
		_, member := m.table.at[id]
		switch {
		case id == m.table.self.ID:
		case !member || van.RoleOf(id) != m.table.self.Role:
			return bad(id, "a "+m.table.self.Role.String()+" of this cluster")
		case !m.table.native(id):
			return bad(id, "a node of this library: C++ StepMesh nodes know none of their own role")
		}
	}
	for _, id := range ids {
		if id != m.table.self.ID && !m.out.conns[id] {
			m.linked = append(m.linked, id)
			m.out.connect(id, m.table.nodes[m.table.at[id]])
		}
	}
	return nil
}

// relink connects to the process that has taken the place of id, if this node is to be
// connected to it.
func (m *Machine) relink(id int) {
	switch {
	case van.RoleOf(id) != m.table.self.Role, slices.Contains(m.linked, id) && m.table.native(id):
		m.out.connect(id, m.table.nodes[m.table.at[id]])
	case slices.Contains(m.linked, id):
		m.out.disconnect(id)
		m.linked = slices.DeleteFunc(m.linked, func(l int) bool { return l == id })
	}
}
