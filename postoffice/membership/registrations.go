package membership

// Registrations while the cluster has not formed: which nodes are present, which ones the scheduler cannot accept,
// whose connection broke, and the assignment of ids.

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
)

// registrations are the nodes that have registered with the scheduler before the cluster forms.
type registrations struct {
	core
	refusals *refusals

	challenges *challenges
	hosts      map[string]int  // BYTEPS_ORDERED_HOSTS, or nil
	list       []*registration // in order of arrival
	queued     []*registration // for which there is no place unless a node of list turns out to be dead
	vanished   []string        // the latest, for reports
	ended      []string        // texts of processes that ended before they registered
}

// registration is a node that has registered.
type registration struct {
	node  van.Node
	stamp int32
	temp  int           // temporary id, or 0
	since time.Duration // of a claim, or of a queued node
	lost  error         // not nil: the connection broke, so the node does not count
	// proved: the process has proved that it listens at its address, see proof.go.
	proved bool
}

// same reports whether o registered at the address of j, and not as another customer of one process.
func (j *registration) same(o *registration) bool {
	return sameAddr(&o.node, &j.node) && (o.node.Role != j.node.Role || o.node.CustomerID == j.node.CustomerID)
}

// maxQueueTime is the time for which a registration is queued while another node has its place. In that time the
// connection to the other node shows whether it has ended: both may be the same program, killed and started again.
const maxQueueTime = 2 * time.Second

// maxQueued bounds the number of queued registrations.
const maxQueued = 256

// register handles a registration. It returns true if the node counts.
func (s *registrations) register(now time.Duration, j *registration) bool {
	s.dequeue(j)
	i := slices.IndexFunc(s.list, j.same)
	if i >= 0 {
		old := s.list[i]
		a, b := incarnationOf(&old.node), incarnationOf(&j.node)
		if a != b && a != 0 && old.lost == nil && s.challenges.required(j) {
			s.challenges.send(now, &j.node)
			return false
		}
		if a != b || a == 0 && j.stamp <= old.stamp {
			s.out.emit(Warning{Text: fmt.Sprintf("%s registered again as %s: it was restarted, or two nodes advertise this address "+
				"(check DMLC_NODE_HOST)", j.node.Addr(), describe(&j.node))})
		}
		s.list = slices.Delete(s.list, i, i+1)
		if a == b && old.lost == nil {
			j.temp = old.temp
		} else {
			s.out.disconnect(old.temp) // it is tagged for the earlier process, or broken
		}
		if a == b && old.lost != nil {
			s.forgetVanished(old)
		}
	}
	if !s.admit(now, j) {
		return false
	}
	if i >= 0 { // keep its position
		s.list = slices.Insert(s.list, i, j)
	} else {
		s.list = append(s.list, j)
	}
	return true
}

// admit reports whether a node can be accepted. Otherwise the node is queued or refused.
func (s *registrations) admit(now time.Duration, j *registration) bool {
	why, details, rivals := s.conflict(&j.node)
	if why == "" {
		return true
	}
	if len(rivals) == 0 || !s.enqueue(now, j) {
		s.disconnect(j)
		s.refusals.refuse(now, &j.node, why, details)
		return false
	}
	for _, r := range rivals {
		s.connect(r) // the connection shows whether it still runs
	}
	return false
}

// enqueue queues a registration, unless its time is over.
func (s *registrations) enqueue(now time.Duration, j *registration) bool {
	if len(s.queued) == maxQueued || now-j.since >= maxQueueTime {
		return false
	}
	s.queued = append(s.queued, j)
	return true
}

// dequeue removes an earlier registration like j from the queue. If it is of the same process, j inherits its time and its connection.
func (s *registrations) dequeue(j *registration) {
	if i := slices.IndexFunc(s.queued, j.same); i >= 0 {
		if old := s.queued[i]; incarnationOf(&old.node) == incarnationOf(&j.node) {
			j.since, j.temp = old.since, old.temp
		} else {
			s.disconnect(old)
		}
		s.queued = slices.Delete(s.queued, i, i+1)
	}
}

// retryQueued handles the queued registrations again. It returns true if some count now.
func (s *registrations) retryQueued(now time.Duration) (counts bool) {
	held := s.queued
	s.queued = nil
	for _, j := range held {
		if s.admit(now, j) {
			s.list, counts = append(s.list, j), true
		}
	}
	return counts
}

func (s *registrations) next() time.Duration {
	next := time.Duration(math.MaxInt64)
	for _, j := range s.queued {
		next = min(next, j.since+maxQueueTime)
	}
	return next
}

// conflict returns the reason why a node cannot be accepted, or "". The details have the addresses of others. rivals
// are the registered nodes without which it could be accepted, if there are such.
func (s *registrations) conflict(rec *van.Node) (why, details string, rivals []*registration) {
	n := s.cfg.instances(rec.Role)
	if rec.AuxID >= n {
		return fmt.Sprintf("preferred rank %d of a %s, but there are only ranks 0 to %d (%s); check DMLC_NODE_RANK, "+
			"STEPMESH_GPU and DMLC_RANK_OFFSET", rec.AuxID, rec.Role, n-1, s.cfg.formula(rec.Role)), "", nil
	}
	if _, ok := s.hosts[hostaddr.Canonical(rec.Hostname)]; s.hosts != nil && !ok {
		return fmt.Sprintf("host %q is not in BYTEPS_ORDERED_HOSTS=%v", rec.Hostname, s.cfg.OrderedHosts), "", nil
	}
	var taken []string
	var same []*registration
	for _, j := range s.list {
		o := &j.node
		if j.lost != nil {
			continue
		}
		if (o.AuxID == -1) != (rec.AuxID == -1) {
			return fmt.Sprintf("%s, but a %s registered with %s; give all nodes a preferred rank or none (DMLC_NODE_RANK)",
				rankText(rec), o.Role, rankText(o)), ": the " + o.Role.String() + " at " + o.Addr(), []*registration{j}
		}
		if o.Role != rec.Role {
			continue
		}
		taken, same = append(taken, o.Addr()), append(same, j)
		if rec.AuxID != -1 && o.AuxID == rec.AuxID && n > 1 {
			return fmt.Sprintf("%s and another %s both want rank %d; give each its own DMLC_NODE_RANK, STEPMESH_GPU or "+
				"DMLC_RANK_OFFSET", rec.Addr(), rec.Role, rec.AuxID), ": the other one is at " + o.Addr(), []*registration{j}
		}
	}
	if len(taken) >= n {
		return fmt.Sprintf("all %d places for a %s are taken (%s); check its DMLC_ROLE", n, rec.Role, s.cfg.formula(rec.Role)), ", by " + list(taken), same
	}
	return "", "", nil
}

// present lists the nodes that have registered and count.
func (s *registrations) present() (nodes []van.Node) {
	for _, j := range s.list {
		if j.lost == nil {
			nodes = append(nodes, j.node)
		}
	}
	return nodes
}

// maxLostRegistrations bounds the number of registrations whose connection is broken.
const maxLostRegistrations = 256

// lost handles a broken connection. A queued registration is removed. A registered node is no longer counted; of more than
// maxLostRegistrations such nodes the oldest is removed. A removed node has to register again.
func (s *registrations) lost(temp int, cause error) {
	s.queued = slices.DeleteFunc(s.queued, func(j *registration) bool {
		if j.temp != temp {
			return false
		}
		s.disconnect(j)
		s.out.emit(Warning{Text: fmt.Sprintf("%s disconnected while it was queued for the rank of another node: %s", describe(&j.node), cause)})
		return true
	})
	for _, j := range s.list {
		if j.temp == temp && j.lost == nil {
			j.lost = cause
			appendRecent(&s.vanished, vanishedText(j, cause))
			s.out.emit(Warning{Text: fmt.Sprintf("%s disconnected before the cluster was complete: %s", describe(&j.node), cause)})
		}
	}
	if len(s.list)-len(s.present()) > maxLostRegistrations {
		i := slices.IndexFunc(s.list, func(j *registration) bool { return j.lost != nil })
		s.out.disconnect(s.list[i].temp)
		s.list = slices.Delete(s.list, i, i+1)
	}
}

// maxEndedText bounds the text in which a process reports why it ends.
const maxEndedText = 500

// nodeEnded records the text of a process that ends before it has registered.
func (s *registrations) nodeEnded(text string) {
	text = strings.ToValidUTF8(text[:min(len(text), maxEndedText)], "")
	appendRecent(&s.ended, text)
	s.out.emit(Warning{Text: fmt.Sprintf("a node has ended before it registered: %q", text)}) // quoted: see logx.PeerKind
}

// Ended is the body of the message to the scheduler from a process that ends before it has registered. The text names
// the node and the cause.
func Ended(text string) []byte { return notice{verb: verbEnded, text: text}.body() }

// forgetVanished removes a node from the reported disconnected ones.
func (s *registrations) forgetVanished(j *registration) {
	s.vanished = slices.DeleteFunc(s.vanished, func(v string) bool { return v == vanishedText(j, j.lost) })
}

func vanishedText(j *registration, cause error) string {
	return fmt.Sprintf("%s (%s)", describe(&j.node), cause)
}

// back counts a node again whose connection is restored, if it can still be accepted. It returns true if it counts.
func (s *registrations) back(now time.Duration, temp int) bool {
	for i, j := range s.list {
		if j.temp != temp || j.lost == nil {
			continue
		}
		if why, details, _ := s.conflict(&j.node); why != "" {
			s.list = slices.Delete(s.list, i, i+1)
			s.out.disconnect(temp)
			s.refusals.refuse(now, &j.node, why, details)
			return false
		}
		s.forgetVanished(j)
		j.lost = nil
		return true
	}
	return false
}

// connect gives a registered node a temporary id and a connection.
func (s *registrations) connect(j *registration) {
	if j.temp == 0 {
		j.temp = s.out.connectTemp(j.node)
	}
}

// disconnect ends the connection of a registered node.
func (s *registrations) disconnect(j *registration) {
	s.out.disconnect(j.temp)
	j.temp = 0
}

// notifyAll sends a notice to every node that waits for its id.
func (s *registrations) notifyAll(n notice) {
	for _, j := range slices.Concat(s.list, s.queued) {
		if j.lost == nil {
			s.connect(j)
			s.out.notify(j.temp, n)
		}
	}
}

// missing lists, by role, how many nodes and which ranks have not registered.
func (s *registrations) missing(present []van.Node) []string {
	var out []string
	for _, role := range []van.Role{van.Worker, van.Server} {
		n := s.cfg.instances(role)
		missing, ranked, has := n, false, map[int]bool{}
		for i := range present {
			if p := &present[i]; p.Role == role {
				missing--
				has[p.AuxID] = true
			}
			ranked = ranked || present[i].AuxID != -1
		}
		if missing == 0 {
			continue
		}
		text := fmt.Sprintf("%d of %d %ss", missing, n, role)
		if ranked {
			var ranks []string
			for r := range n {
				if !has[r] {
					ranks = append(ranks, fmt.Sprint(r))
				}
			}
			text += " (rank " + list(ranks) + ")"
		}
		out = append(out, text)
	}
	return out
}

// mismatch returns "", or the reason why a registering node does not belong to this cluster or is configured
// differently from the scheduler: with it the cluster would form, and fail later. A node of another protocol version
// would be taken for a C++ StepMesh node, and would wait for messages that such nodes do not receive.
func (s *registrations) mismatch(rec *van.Node) string {
	who, ok := rec.Extension()
	_, ours := van.ExtensionVersionOf(rec.Endpoint)
	switch {
	case failpoint.On("cluster-id"):
	case !ours && s.cfg.NamedCluster && !s.cfg.Foreign && !failpoint.On("foreign"):
		return "it does not say which cluster it belongs to, as nodes of C++ StepMesh do not, and the scheduler has a STEPAF_CLUSTER_ID; " +
			"set STEPAF_FOREIGN=1 at the scheduler to accept such nodes"
	case !ok:
	case s.cfg.NamedCluster && who.Cluster != s.table.own.Cluster:
		return "its STEPAF_CLUSTER_ID is not that of the scheduler"
	case !s.cfg.NamedCluster && who.Cluster != 0:
		return "its STEPAF_CLUSTER_ID is set, that of the scheduler is not"
	}
	if v, ok := van.ExtensionVersionOf(rec.Endpoint); ok && v != van.ExtensionVersion && s.table.own.Incarnation != 0 {
		return fmt.Sprintf("its library speaks version %d of the protocol between nodes, that of the scheduler at %s version %d; "+
			"run one release of the library on all nodes", v, s.table.self.Addr(), van.ExtensionVersion)
	}
	own, other, bit := s.table.own.Settings, who.Settings, map[bool]int{true: 1}
	switch {
	case !own.Known || !other.Known:
	case own.Resend != other.Resend:
		return fmt.Sprintf("its PS_RESEND is %d, that of the scheduler at %s is %d; a node that repeats messages needs peers that acknowledge them",
			bit[other.Resend], s.table.self.Addr(), bit[own.Resend])
	case own.TLS != other.TLS:
		return fmt.Sprintf("its STEPAF_TLS is %d, that of the scheduler at %s is %d; set the same on all nodes, so that all data over TCP is encrypted or none",
			bit[other.TLS], s.table.self.Addr(), bit[own.TLS])
	case other.Workers != 0 && own.Workers != 0 && other.Workers != own.Workers:
		return s.otherCount("DMLC_NUM_WORKER", other.Workers, own.Workers)
	case other.Servers != 0 && own.Servers != 0 && other.Servers != own.Servers:
		return s.otherCount("DMLC_NUM_SERVER", other.Servers, own.Servers)
	}
	return ""
}

func (s *registrations) otherCount(name string, its, own int) string {
	return fmt.Sprintf("its %s x DMLC_GROUP_SIZE is %d, that of the scheduler at %s is %d; give all nodes the same numbers", name, its, s.table.self.Addr(), own)
}

// sortByAddress puts registered nodes into the order in which they get ids: by host, descending, then by port; with
// BYTEPS_ORDERED_HOSTS hosts are in that order. C++ StepMesh leaves the order of nodes on one host undefined there;
// here ports decide it.
func sortByAddress(nodes []van.Node, hosts map[string]int) {
	slices.SortStableFunc(nodes, func(a, b van.Node) int {
		byHost := cmp.Compare(b.Hostname, a.Hostname)
		if hosts != nil {
			byHost = cmp.Compare(hosts[hostaddr.Canonical(a.Hostname)], hosts[hostaddr.Canonical(b.Hostname)])
		}
		if byHost != 0 {
			return byHost
		}
		return cmp.Compare(a.Port, b.Port)
	})
}

// assignIDs gives every node of a sorted list its id: by preferred rank if it has one, otherwise by counting. A
// second record with the same address, which is another customer of the same process, gets the first one's id; shared
// maps the id that it would have had to the id that it got.
func assignIDs(nodes []van.Node) (shared map[int]int) {
	next := map[van.Role]int{}
	type place struct {
		host string
		port int
	}
	byAddr := map[place]int{}
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
		at := place{hostaddr.Canonical(n.Hostname), n.Port}
		if first, ok := byAddr[at]; ok {
			if shared == nil {
				shared = map[int]int{}
			}
			shared[id] = first
			n.ID = first
			continue
		}
		byAddr[at] = id
		n.ID = id
	}
	return shared
}
