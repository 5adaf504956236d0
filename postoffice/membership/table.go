package membership

// The table: the records of this node and of the others, under their ids, and how errors
// name them.

import (
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van"
)

type table struct {
	cfg *Config
	identities
	self      van.Node // ID is van.Empty until the scheduler has given one
	scheduler van.Node

	// nodes holds all records in the scheduler's order; at finds them by id. Both are empty
	// until start-up is complete.
	nodes      []van.Node
	at         map[int]int
	shared     map[int]int // ids without a node of their own, see assignIDs
	generation uint32      // how many replacements the table has seen
}

// fill takes the records of all nodes; the first one of an id counts.
func (t *table) fill(nodes []van.Node) {
	t.nodes, t.at = nodes, map[int]int{}
	for i := range nodes {
		if _, again := t.at[nodes[i].ID]; !again {
			t.at[nodes[i].ID] = i
		}
	}
}

// node returns the record of id.
func (t *table) node(id int) (van.Node, bool) {
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

// has tells whether id is a worker or server of the table.
func (t *table) has(id int) bool {
	_, ok := t.at[id]
	return ok
}

// record returns the record of id, which the table has.
func (t *table) record(id int) *van.Node { return &t.nodes[t.at[id]] }

// whole returns all records, the scheduler's too, on the scheduler.
func (t *table) whole() []van.Node { return append(slices.Clone(t.nodes), t.self) }

// members lists the ids of a group that have a node of their own.
func (t *table) members(group int) []int {
	return slices.DeleteFunc(t.cfg.members(group), func(id int) bool { _, no := t.shared[id]; return no })
}

// ids lists those of all workers and servers.
func (t *table) ids() []int { return t.members(van.WorkerGroup | van.ServerGroup) }

// places is the number of ids that node id stands for.
func (t *table) places(id int) int {
	n := 1
	for _, first := range t.shared {
		if first == id {
			n++
		}
	}
	return n
}

// isScheduler tells whether this node is the scheduler.
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
	if n, ok := t.node(id); ok {
		return van.NodeName(id) + " at " + n.Addr()
	}
	return van.NodeName(id)
}

// bad is the error of Step for a message with a field that makes no sense.
func (t *table) bad(from int, msg *van.Meta, field string, value any, want string) error {
	return t.badErr(from, msg, &van.FieldError{Field: field, Value: value, Want: want})
}

func (t *table) badErr(from int, msg *van.Meta, err error) error {
	return &van.Error{Op: "receive " + msg.Control.Cmd.String(), Node: t.name(), Peer: t.peer(from), Err: err}
}

// checkRecords returns an error if any record of msg is invalid.
func (t *table) checkRecords(msg *van.Meta) error {
	nodes := msg.Control.Nodes
	if len(nodes) == 0 {
		return t.bad(van.SchedulerID, msg, "control.node_size", 0, "1 or more")
	}
	for i := range nodes {
		n := &nodes[i]
		field := func(f string) string { return fmt.Sprintf("control.node[%d].%s", i, f) }
		if err := checkAddr(n, field("address")); err != nil {
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
