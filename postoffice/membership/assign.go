package membership

// Which id each registered node gets.

import (
	"cmp"
	"slices"

	"github.com/stepaf/stepaf-go/van"
)

// sortJoins puts registered nodes into the order in which they get ids: by host,
// descending, then by port; with BYTEPS_ORDERED_HOSTS hosts are in that order. There
// C++ StepMesh leaves the order of nodes on one host undefined; here ports decide it.
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

// assignIDs gives every node of a sorted list its id: by preferred rank if it has one,
// otherwise by counting. A second record with the same address, which is another
// customer of the same process, gets the first one's id; shared maps the id that it
// would have had to the one it got.
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
