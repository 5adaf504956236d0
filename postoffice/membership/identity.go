package membership

// Which process has which id: nodes of this library mark messages to each other with their
// incarnations, so that no message of a former process counts as its successor's.

import (
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

type identities struct {
	own  van.Identity   // of this process, with the cluster's when it is known
	incs map[int]uint32 // the incarnations of nodes of this library, by id
}

// learn records that the process of record n has id.
func (i *identities) learn(id int, n *van.Node) {
	if i.own.Incarnation == 0 {
		return // this node behaves as a C++ StepMesh node
	}
	if inc := incarnationOf(n); inc != 0 {
		i.incs[id] = inc
	} else {
		delete(i.incs, id)
	}
}

// native tells whether id is a node of this library.
func (i *identities) native(id int) bool { return i.incs[id] != 0 }

// mine tells whether a record with this node's address is that of this process. A C++
// StepMesh scheduler may drop the identity.
func (i *identities) mine(n *van.Node) bool {
	inc := incarnationOf(n)
	return inc == 0 || inc == i.own.Incarnation
}

// sign puts this process's identity into its record.
func (i *identities) sign(n *van.Node) {
	if i.own.Incarnation != 0 {
		n.Endpoint = i.own.Encode()
	}
}

// maxFormer bounds how many replaced processes are remembered.
const maxFormer = 256

// former is a process whose id was given to another.
type former struct {
	incarnation uint32
	id          int
	node        van.Node
}

// enter joins the cluster of the scheduler with record n. It returns false if this node
// belongs to another cluster.
func (m *Machine) enter(n *van.Node) bool {
	who, ok := n.Identity()
	if !ok {
		return true
	}
	if m.table.own.Cluster != 0 && m.table.own.Cluster != who.Cluster && !failpoint.On("cluster-id") {
		return false
	}
	m.table.own.Cluster = who.Cluster
	m.table.scheduler.Endpoint = slices.Clone(n.Endpoint)
	m.table.learn(van.SchedulerID, n)
	return true
}

// genuine tells whether msg comes from the process that has its sender's id, and is meant
// for this process.
func (m *Machine) genuine(now time.Duration, from int, msg *van.Meta) bool {
	if m.table.own.Incarnation == 0 || from == van.Empty || failpoint.On("incarnation") {
		return true
	}
	by, to := msg.Incarnations()
	want := m.table.incs[from]
	if m.sched != nil {
		return by == want && (by == 0 || to == m.table.own.Incarnation) || failpoint.On("fencing") && m.life.phase == ready
	}
	switch {
	case from != van.SchedulerID:
		return true // the handlers refuse what only a scheduler may send
	case by == 0:
		return want == 0 && len(msg.Body) == 0 // C++ StepMesh sends no notices
	case to != m.table.own.Incarnation || slices.Contains(m.formerSchedulers, by):
		return false
	case want == by || m.life.phase == joining:
		return true
	case want == 0:
		return false
	}
	// A message of another scheduler process, which knows this process's incarnation.
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

// stray handles a message of a process that has no id in this cluster: it was replaced, or
// belongs to an earlier cluster, or to the former process of this scheduler. It returns
// false when the message does not have what an answer needs.
func (m *Machine) stray(now time.Duration, from int, msg *van.Meta) bool {
	s := m.sched
	by, _ := msg.Incarnations()
	if s == nil || by == 0 {
		return false
	}
	if msg.Control.Cmd == van.Heartbeat && len(msg.Control.Nodes) > 0 {
		rec := msg.Control.Nodes[0].Clone()
		who, ok := rec.Identity()
		if !ok || who.Incarnation != by || rec.ID != from || !isMember(&rec) || checkAddr(&rec, "address") != nil {
			return false
		}
		if m.life.phase == joining {
			m.comeBack(now, &rec, who, msg)
		} else if by == m.table.incs[from] && who.Cluster == m.table.own.Cluster {
			m.lateReturn(now, from, &rec)
		} else {
			m.refuse(now, &rec, m.whyStray(from, who.Cluster))
		}
		return true
	}
	if i := slices.IndexFunc(s.former, func(f former) bool { return f.incarnation == by && f.id == from }); i >= 0 && m.life.phase == ready {
		m.refuse(now, &s.former[i].node, m.whyStray(from, m.table.own.Cluster))
		return true
	}
	return m.life.phase == joining // its heartbeat will have its record
}

func (m *Machine) whyStray(from int, cluster uint32) string {
	if cluster != m.table.own.Cluster {
		return fmt.Sprintf("it belongs to another cluster (%08x): the scheduler was started again, and a new cluster (%08x) has formed",
			cluster, m.table.own.Cluster)
	}
	at := ""
	if n, ok := m.table.node(from); ok {
		at = n.Addr()
	}
	return fmt.Sprintf("it was taken for dead and its place as %s given to %s", van.NodeName(from), at)
}

// replaced remembers the process with record old as a former one.
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

// ofThisCluster returns "", or why a registering node belongs to another cluster.
func (m *Machine) ofThisCluster(rec *van.Node) string {
	who, ok := rec.Identity()
	switch {
	case !ok || failpoint.On("cluster-id"):
	case m.cfg.NamedCluster && who.Cluster != m.table.own.Cluster:
		return "its STEPAF_CLUSTER_ID is not that of the scheduler"
	case !m.cfg.NamedCluster && who.Cluster != 0:
		return "its STEPAF_CLUSTER_ID is set, that of the scheduler is not"
	}
	return ""
}

// unlike returns "", or what a registering node has that does not fit the scheduler's: with
// it the cluster would form, and fail later. Who speaks another version would be taken for a
// C++ StepMesh node, and would wait for what such a node is not told.
func (m *Machine) unlike(rec *van.Node) string {
	if v, ok := van.VersionOf(rec.Endpoint); ok && v != van.IdentityVersion && m.table.own.Incarnation != 0 {
		return fmt.Sprintf("its library speaks version %d of what nodes tell each other, that of the scheduler at %s version %d; "+
			"run one release of the library on all nodes", v, m.table.self.Addr(), van.IdentityVersion)
	}
	who, _ := rec.Identity()
	own, other := m.table.own.Settings, who.Settings
	switch {
	case !own.Known || !other.Known:
	case own.Resend != other.Resend:
		return fmt.Sprintf("its PS_RESEND is %d, that of the scheduler at %s is %d; a node that repeats messages needs peers that acknowledge them",
			bit(other.Resend), m.table.self.Addr(), bit(own.Resend))
	case other.Workers != 0 && own.Workers != 0 && other.Workers != own.Workers:
		return m.otherCount("DMLC_NUM_WORKER", other.Workers, own.Workers)
	case other.Servers != 0 && own.Servers != 0 && other.Servers != own.Servers:
		return m.otherCount("DMLC_NUM_SERVER", other.Servers, own.Servers)
	}
	return ""
}

func (m *Machine) otherCount(name string, its, own int) string {
	return fmt.Sprintf("its %s x DMLC_GROUP_SIZE is %d, that of the scheduler at %s is %d; give all nodes the same numbers", name, its, m.table.self.Addr(), own)
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}
