package membership

// What node records say.

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// isMember tells whether a record has the id of a worker or server.
func isMember(n *van.Node) bool {
	return n.ID >= 8 && n.ID < van.Empty && (n.Role == van.Worker || n.Role == van.Server) && van.RoleOf(n.ID) == n.Role
}

func sameAddr(a, b *van.Node) bool { return a.Port == b.Port && a.Hostname == b.Hostname }

func incarnationOf(n *van.Node) uint32 {
	who, _ := n.Identity()
	return who.Incarnation
}

// another tells whether two records are of different processes. Those of C++ StepMesh
// nodes are distinguished by the address only.
func another(a, b *van.Node) bool {
	x, y := incarnationOf(a), incarnationOf(b)
	if failpoint.On("incarnation") {
		x, y = 0, 0
	}
	return x != y || x == 0 && !sameAddr(a, b)
}

// describe names a node without an id: "worker 10.0.0.1:4000 (rank 0)".
func describe(n *van.Node) string {
	return fmt.Sprintf("%s %s (%s)", n.Role, n.Addr(), rankText(n))
}

func rankText(n *van.Node) string {
	if n.AuxID == -1 {
		return "no preferred rank"
	}
	return fmt.Sprintf("rank %d", n.AuxID)
}

// numeric tells whether host is an address, which needs no look-up. One with a zone is none: a zone
// may be any text.
func numeric(host string) bool {
	a, err := netip.ParseAddr(host)
	return err == nil && a.Zone() == ""
}

// list joins names; after the first 20 it only counts.
func list(names []string) string {
	const most = 20
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

func sortedIDs[V any](m map[int]V) []int { return slices.Sorted(maps.Keys(m)) }
