package membership

import (
	"cmp"
	"slices"

	"github.com/stepaf/stepaf-go/van"
)

// sortJoins puts registered nodes into the order in which ids are given: hosts
// descending and ports ascending, or, with BYTEPS_ORDERED_HOSTS, hosts in that
// order. The original leaves equal hosts in any order there; here ports decide.
func sortJoins(nodes []van.Node, hosts map[string]int) {
	slices.SortStableFunc(nodes, func(a, b van.Node) int {
		byHost := cmp.Compare(b.Hostname, a.Hostname)
		if hosts != nil {
			byHost = cmp.Compare(hosts[a.Hostname], hosts[b.Hostname])
		}
		if byHost != 0 {
			return byHost
		}
		return cmp.Compare(a.Port, b.Port)
	})
}

// assignIDs gives every node of a sorted list its id: by preferred rank if the
// nodes have them, else by counting. The second record of one address, which is
// another customer of one process, gets the id of the first; the id that it
// would have had is returned in shared, with the one it stands for.
func assignIDs(nodes []van.Node) (shared map[int]int) {
	next := map[van.Role]int{}
	byAddr := map[string]int{}
	for i := range nodes {
		n := &nodes[i]
		rank := next[n.Role]
		next[n.Role]++
		if n.AuxID != -1 {
			rank = n.AuxID
		}
		id := van.ServerID(rank)
		if n.Role == van.Worker {
			id = van.WorkerID(rank)
		}
		if first, ok := byAddr[n.Addr()]; ok {
			if shared == nil {
				shared = map[int]int{}
			}
			shared[id] = first
			n.ID = first
			continue
		}
		byAddr[n.Addr()] = id
		n.ID = id
	}
	return shared
}
