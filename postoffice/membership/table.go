package membership

// The table: the records of this node and of the others, the process that has each id, and the names of nodes in
// errors. Nodes of this library tag messages to each other with their incarnations, so that no message of an earlier
// process counts as one of its replacement process.

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// table has the records of all known nodes.
type table struct {
	cfg       *Config
	own       van.NodeExtension // of this process, with the cluster's name when it is known
	incs      map[int]uint32    // the incarnations of nodes of this library, by id
	self      van.Node          // ID is van.Empty until the scheduler has assigned one
	scheduler van.Node

	// nodes holds all records in the scheduler's order; at finds them by id. Both are empty until start-up is
	// complete.
	nodes           []van.Node
	at              map[int]int
	shared          map[int]int // ids without a node of their own, see assignIDs
	tableGeneration uint32      // number of replacements that the table includes
}

// newTable makes the table of a node that has not started: it knows itself and the scheduler.
func newTable(cfg *Config) *table {
	t := &table{cfg: cfg, incs: map[int]uint32{}}
	t.own, _ = cfg.Self.Extension()
	t.own.Local = slices.Clone(t.own.Local)
	t.scheduler = van.Node{Role: van.Scheduler, ID: van.SchedulerID, Hostname: cfg.Scheduler.Hostname,
		Port: cfg.Scheduler.Port, Ports: []int32{int32(cfg.Scheduler.Port)},
		DevTypes: []int32{int32(backend.CPU)}, DevIDs: []int32{0}, AuxID: -1}
	if cfg.Role == van.Scheduler {
		t.self = t.scheduler
		t.sign(&t.self)
		t.learn(van.SchedulerID, &t.self)
		return t
	}
	t.self = cfg.Self.Clone()
	t.self.Role, t.self.ID, t.self.IsRecovery = cfg.Role, van.Empty, false
	if len(t.self.Ports) == 0 {
		t.self.Ports = []int32{int32(t.self.Port)}
	}
	return t
}

// fill makes nodes the table; the first record of an id counts.
func (t *table) fill(nodes []van.Node) {
	t.nodes, t.at = nodes, map[int]int{}
	for i := range nodes {
		if _, again := t.at[nodes[i].ID]; !again {
			t.at[nodes[i].ID] = i
		}
	}
}

// ID is the node's id, or van.Empty before it has one.
func (t *table) ID() int { return t.self.ID }

// Node returns the record of a node. Before start-up is complete only this node's and the scheduler's are known.
func (t *table) Node(id int) (van.Node, bool) {
	switch i, ok := t.at[id]; {
	case id == t.self.ID && id != van.Empty:
		return t.self, true
	case id == van.SchedulerID:
		return t.scheduler, true
	case ok:
		return t.nodes[i], true
	}
	return van.Node{}, false
}

func (t *table) has(id int) bool {
	_, ok := t.at[id]
	return ok
}

// record returns the record of id, which must be in the table.
func (t *table) record(id int) *van.Node { return &t.nodes[t.at[id]] }

// whole returns all records, the scheduler's too, on the scheduler.
func (t *table) whole() []van.Node { return append(slices.Clone(t.nodes), t.self) }

// Members returns the ids of a group (1 to 7): workers by rank, servers by rank, the scheduler. A node id of 8 or
// more is a group of its own. It returns nil if this cluster has no such group.
func (t *table) Members(group int) []int {
	return slices.DeleteFunc(t.cfg.members(group), func(id int) bool { _, no := t.shared[id]; return no })
}

// ids lists the ids of all workers and servers.
func (t *table) ids() []int { return t.Members(van.WorkerGroup | van.ServerGroup) }

// idsOf is the number of ids that node id stands for.
func (t *table) idsOf(id int) int {
	n := 1
	for _, first := range t.shared {
		if first == id {
			n++
		}
	}
	return n
}

// learn records that the process of record n has id.
func (t *table) learn(id int, n *van.Node) {
	delete(t.incs, id)
	if inc := incarnationOf(n); inc != 0 && t.own.Incarnation != 0 { // else this node behaves as a C++ StepMesh node
		t.incs[id] = inc
	}
}

// Incarnation is the incarnation of the process that has id, or 0 for a C++ StepMesh node and for an unknown one.
func (t *table) Incarnation(id int) uint32 { return t.incs[id] }

// native reports whether id is a node of this library.
func (t *table) native(id int) bool { return t.incs[id] != 0 }

// isOwn reports whether a record with this node's address is that of this process. A C++ StepMesh scheduler may drop
// the identity.
func (t *table) isOwn(n *van.Node) bool {
	inc := incarnationOf(n)
	return inc == 0 || inc == t.own.Incarnation
}

// sign puts this process's identity into its record.
func (t *table) sign(n *van.Node) {
	if t.own.Incarnation != 0 {
		n.Endpoint = t.own.Encode()
	}
}

func (t *table) isScheduler() bool { return t.self.Role == van.Scheduler }

// name names this node, for errors.
func (t *table) name() string {
	if t.self.ID != van.Empty {
		return van.NodeName(t.self.ID)
	}
	return fmt.Sprintf("%s at %s", t.self.Role, t.self.Addr())
}

// peer names node id and its address, for errors.
func (t *table) peer(id int) string {
	if n, ok := t.Node(id); ok {
		return van.NodeName(id) + " at " + n.Addr()
	}
	return van.NodeName(id)
}

func (t *table) bad(from int, msg *van.Meta, field string, value any, want string) error {
	return t.badErr(from, msg, &van.FieldError{Field: field, Value: value, Want: want})
}

func (t *table) badErr(from int, msg *van.Meta, err error) error {
	return &van.Error{Op: "receive " + msg.Control.Cmd.String(), Node: t.name(), Peer: t.peer(from), Err: err}
}

// ErrRefused is wrapped by the error of Failed when the scheduler refuses this node.
var ErrRefused = errors.New("refused by the scheduler")

// refused is the error of a node that the scheduler does not admit to the cluster.
func (t *table) refused(op, detail string) error {
	return &van.Error{Op: op, Node: t.name(), Peer: t.peer(van.SchedulerID), Detail: detail, Err: ErrRefused}
}

// wrongProcess is the error for a message of, or for, another process.
func (t *table) wrongProcess(from int, msg *van.Meta) error {
	by, to := msg.Incarnations()
	return t.badErr(from, msg, &wrongProcessError{by, to, t.incs[from], t.own.Incarnation})
}

// wrongProcessError has the incarnations in a message, and those of its sender and receiver.
type wrongProcessError struct{ by, to, sender, receiver uint32 }

func (e *wrongProcessError) Error() string {
	return fmt.Sprintf("from or for a process that was replaced: incarnations %08x to %08x, want %08x to %08x", e.by, e.to, e.sender, e.receiver)
}

// Unwrap implements errors.Unwrap: the message was dropped like a malformed one.
func (e *wrongProcessError) Unwrap() error { return van.ErrMalformed }

// checkRecords returns an error if any record of msg is invalid.
func (t *table) checkRecords(msg *van.Meta) error {
	nodes := msg.Control.Nodes
	if len(nodes) == 0 {
		return t.bad(van.SchedulerID, msg, "control.node_size", 0, "1 or more")
	}
	for i := range nodes {
		n := &nodes[i]
		field := func(f string) string { return fmt.Sprintf("control.node[%d].%s", i, f) }
		check := checkNode
		if n.Role == van.Scheduler { // DMLC_PS_ROOT_URI as the scheduler has it, which may be unspecified; no node connects to it
			check = checkAddr
		}
		if err := check(n, field("address")); err != nil {
			return t.bad(van.SchedulerID, msg, field("address"), n.Addr(), err.Error())
		}
		switch n.Role {
		case van.Scheduler:
			if n.ID != van.SchedulerID {
				return t.bad(van.SchedulerID, msg, field("id"), n.ID, "1 for the scheduler")
			}
		case van.Worker, van.Server:
			if !isMember(n) {
				return t.bad(van.SchedulerID, msg, field("id"), n.ID, "the id of a "+n.Role.String())
			}
		default:
			return t.bad(van.SchedulerID, msg, field("role"), n.Role, "server, worker or scheduler")
		}
	}
	return nil
}

// isMember reports whether a record has the id of a worker or server.
func isMember(n *van.Node) bool {
	return n.ID >= 8 && n.ID < van.Empty && (n.Role == van.Worker || n.Role == van.Server) && van.RoleOf(n.ID) == n.Role
}

// sameAddr reports whether two records have the same address, in any spelling.
func sameAddr(a, b *van.Node) bool { return a.Port == b.Port && hostaddr.Same(a.Hostname, b.Hostname) }

func incarnationOf(n *van.Node) uint32 {
	who, _ := n.Extension()
	return who.Incarnation
}

// differentProcess reports whether two records are of different processes. Those of C++ StepMesh nodes are
// distinguished by the address only.
func differentProcess(a, b *van.Node) bool {
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

// numeric reports whether host is an address that needs no look-up. An address with a zone does not count: a zone may
// be any text.
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

// appendBounded appends to a list that keeps the latest most elements.
func appendBounded[T any](list []T, v T, most int) []T {
	if len(list) == most {
		list = slices.Delete(list, 0, 1)
	}
	return append(list, v)
}

func sortedIDs[V any](m map[int]V) []int { return slices.Sorted(maps.Keys(m)) }
