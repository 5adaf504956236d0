package membership

import (
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// This file is about which process speaks: nodes of this library mark what they send
// each other with their incarnations, so that nothing of an earlier process counts as
// its successor's.

// maxFormer bounds what the scheduler remembers of processes that were replaced.
const maxFormer = 256

// former is a process whose place was given to another.
type former struct {
	incarnation uint32
	id          int
	node        van.Node
}

func incarnationOf(n *van.Node) uint32 {
	who, _ := n.Identity()
	return who.Incarnation
}

// learn notes which process has the id of n's record now.
func (m *Machine) learn(id int, n *van.Node) {
	if m.own.Incarnation == 0 {
		return // this node speaks as one of the original
	}
	if inc := incarnationOf(n); inc != 0 {
		m.incs[id] = inc
	} else {
		delete(m.incs, id)
	}
}

// native tells whether id is a node of this library.
func (m *Machine) native(id int) bool { return m.incs[id] != 0 }

// mine tells whether a record with this node's address is that of this process. A
// scheduler of the original may leave out what it does not know.
func (m *Machine) mine(n *van.Node) bool {
	inc := incarnationOf(n)
	return inc == 0 || inc == m.own.Incarnation
}

// Incarnation is that of the process that has id, or 0 for a node of the original or
// one that is not known.
func (m *Machine) Incarnation(id int) uint32 { return m.incs[id] }

// Cluster is the identity of the cluster, or 0 before it is known or under a scheduler of
// the original.
func (m *Machine) Cluster() uint32 { return m.own.Cluster }

// another tells whether two records are of two processes. What nodes of the original
// register is told apart by the address only.
func another(a, b *van.Node) bool {
	x, y := incarnationOf(a), incarnationOf(b)
	if failpoint.On("incarnation") {
		x, y = 0, 0
	}
	return x != y || x == 0 && !sameAddr(a, b)
}

// join the cluster of the scheduler that has sent its record; false says that it is
// another one than this node belongs to.
func (m *Machine) enter(n *van.Node) bool {
	who, ok := n.Identity()
	if !ok {
		return true
	}
	if m.own.Cluster != 0 && m.own.Cluster != who.Cluster && !failpoint.On("cluster-id") {
		return false
	}
	m.own.Cluster = who.Cluster
	m.cfg.Scheduler.Endpoint = slices.Clone(n.Endpoint)
	m.learn(van.SchedulerID, n)
	return true
}

// sign puts the own identity into the own record.
func (m *Machine) sign() {
	if m.own.Incarnation != 0 {
		m.self.Endpoint = m.own.Encode()
	}
}

// genuine tells whether msg comes from the process that has the id it is sent under, and
// is meant for this one.
func (m *Machine) genuine(now time.Duration, from int, msg *van.Meta) bool {
	if m.own.Incarnation == 0 || from == van.Empty || failpoint.On("incarnation") {
		return true
	}
	by, to := msg.Incarnations()
	want := m.incs[from]
	if m.sched != nil {
		return by == want && (by == 0 || to == m.own.Incarnation) || failpoint.On("fencing") && m.phase == ready
	}
	switch {
	case from != van.SchedulerID:
		return true // what is wrong with it is said elsewhere
	case by == 0:
		return want == 0 && len(msg.Body) == 0 // nodes of the original send no notices
	case to != m.own.Incarnation || slices.Contains(m.formerSchedulers, by):
		return false
	case want == by || m.phase == joining:
		return true
	case want == 0:
		return false
	}
	// Another scheduler, and it knows who this is.
	if n, err := parseNotice(msg.Body); err == nil && n.verb == verbError {
		return true
	}
	nodes := msg.Control.Nodes
	i := slices.IndexFunc(nodes, func(n van.Node) bool { return n.Role == van.Scheduler })
	if i < 0 || incarnationOf(&nodes[i]) != by || failpoint.On("scheduler-back") {
		return false
	}
	return m.schedulerChanged(now, &nodes[i])
}

// stray takes what a process says that has no place here: one that was replaced, one of
// an earlier cluster, or one whose scheduler this is the successor of. It reports false
// when the message says too little to answer it.
func (m *Machine) stray(now time.Duration, from int, msg *van.Meta) bool {
	s := m.sched
	by, _ := msg.Incarnations()
	if s == nil || by == 0 {
		return false
	}
	if msg.Control.Cmd == van.Heartbeat && len(msg.Control.Nodes) > 0 {
		rec := cloneNode(msg.Control.Nodes[0])
		who, ok := rec.Identity()
		if !ok || who.Incarnation != by || rec.ID != from || !isMember(&rec) || checkAddr(&rec, "address") != nil {
			return false
		}
		if m.phase == joining {
			m.comeBack(now, &rec, who, msg)
		} else if by == m.incs[from] && who.Cluster == m.own.Cluster {
			m.lateReturn(now, from, &rec)
		} else {
			m.refuse(now, &rec, m.whyStray(from, who.Cluster))
		}
		return true
	}
	if i := slices.IndexFunc(s.former, func(f former) bool { return f.incarnation == by && f.id == from }); i >= 0 && m.phase == ready {
		m.refuse(now, &s.former[i].node, m.whyStray(from, m.own.Cluster))
		return true
	}
	return m.phase == joining // its heartbeat will say who it is
}

// isMember tells whether a record has the id of a worker or server.
func isMember(n *van.Node) bool {
	return n.ID >= 8 && n.ID < van.Empty && (n.Role == van.Worker || n.Role == van.Server) && van.RoleOf(n.ID) == n.Role
}

func (m *Machine) whyStray(from int, cluster uint32) string {
	if cluster != m.own.Cluster {
		return fmt.Sprintf("it belongs to another cluster (%08x): the scheduler was started again, and a new cluster (%08x) has formed",
			cluster, m.own.Cluster)
	}
	at := ""
	if n, ok := m.Node(from); ok {
		at = n.Addr()
	}
	return fmt.Sprintf("it was taken for dead and its place as %s given to %s", van.NodeName(from), at)
}

// replaced notes that the process with the id of old has lost its place.
func (m *Machine) replaced(old *van.Node) {
	inc := incarnationOf(old)
	if inc == 0 {
		return
	}
	s := m.sched
	if len(s.former) == maxFormer {
		s.former = slices.Delete(s.former, 0, 1)
	}
	s.former = append(s.former, former{inc, old.ID, *old})
}

// ofThisCluster says why a registering node is of another cluster, or "".
func (m *Machine) ofThisCluster(rec *van.Node) string {
	who, ok := rec.Identity()
	switch {
	case !ok || failpoint.On("cluster-id"):
	case m.cfg.NamedCluster && who.Cluster != m.own.Cluster:
		return "its STEPAF_CLUSTER_ID is not that of the scheduler"
	case !m.cfg.NamedCluster && who.Cluster != 0:
		return "its STEPAF_CLUSTER_ID is set, that of the scheduler is not"
	}
	return ""
}
