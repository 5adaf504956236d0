package membership

// Connections between workers, or between servers, which C++ StepMesh nodes do not have.

import (
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van"
)

type links struct {
	base
	ids []int // that this node is linked to
}

// link connects this node to others of its role.
func (l *links) link(ids []int) error {
	bad := func(id int, want string) error {
		return &van.Error{Op: "link", Node: l.table.name(), Peer: l.table.peer(id), Err: fmt.Errorf("%w: want %s", van.ErrInvalid, want)}
	}
	for _, id := range ids {
		switch {
		case id == l.table.self.ID:
		case !l.table.has(id) || van.RoleOf(id) != l.table.self.Role:
			return bad(id, "a "+l.table.self.Role.String()+" of this cluster")
		case !l.table.native(id):
			return bad(id, "a node of this library: C++ StepMesh nodes know none of their own role")
		}
	}
	for _, id := range ids {
		if id != l.table.self.ID && !l.out.conns[id] {
			l.ids = append(l.ids, id)
			l.out.connect(id, *l.table.record(id))
		}
	}
	return nil
}

// relink connects to the process that has taken the place of id, if this node is to be
// connected to it.
func (l *links) relink(id int) {
	switch {
	case van.RoleOf(id) != l.table.self.Role, slices.Contains(l.ids, id) && l.table.native(id):
		l.out.connect(id, *l.table.record(id))
	case slices.Contains(l.ids, id):
		l.out.disconnect(id)
		l.ids = slices.DeleteFunc(l.ids, func(o int) bool { return o == id })
	}
}
