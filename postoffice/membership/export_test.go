package membership

import (
	"slices"

	"github.com/stepaf/stepaf-go/van"
)

// Rank is the node's instance rank, or -1 before it has one; 0 for the scheduler.
func (m *Machine) Rank() int {
	if m.table.self.ID == van.Empty {
		return -1
	}
	return van.RankOf(m.table.self.ID)
}

// KnownPeers returns the ids this node has a connection to, in the order of
// Members, dead ones too.
func (m *Machine) KnownPeers() []int {
	return slices.DeleteFunc(m.cfg.members(van.AllNodes), func(id int) bool { return !m.conns[id] })
}
