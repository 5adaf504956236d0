package membership

// Recovery from a restart of the scheduler, on the new process, which knows nothing of the cluster. The nodes notice
// by its incarnation that it is a new process. Their heartbeats carry their records with id and cluster. When most
// nodes have returned, the new scheduler resumes the cluster. The nodes' part is in node.go.

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// recoveryGrace is the time for which the scheduler waits for other nodes after the first one has returned.
const recoveryGrace = 2 * time.Second

// minTableRequestPause is the time between two requests for a table, however often new nodes register.
const minTableRequestPause = 100 * time.Millisecond

// schedulerRecovery collects the nodes of an earlier scheduler's cluster.
type schedulerRecovery struct {
	core
	refusals      *refusals
	monitor       *monitor
	policies      *policyList
	registrations *registrations
	replacements  *replacements
	nodes         map[int]*returnedNode // by id, those with proved addresses; nil if none has returned
	since         time.Duration         // time at which the first one returned
	// records is the node table of one of them; it is requested when it is needed.
	records               []van.Node
	cluster, generation   uint32        // of the records; after resume, the generation of the resumed table
	askedAt, nextDecision time.Duration // of and until a request for a table
	challenges            *challenges
}

// challenge sends the proof of its address to a node that has returned. The node then repeats its heartbeat with the
// proof.
func (r *schedulerRecovery) challenge(now time.Duration, rec *van.Node) {
	if !r.challenges.allow(now, rec) {
		return
	}
	temp := r.out.connectTemp(*rec)
	r.sendRejoin(temp, r.table.addressProof(rec))
	r.out.disconnect(temp)
}

// returnedNode is a node of the cluster of an earlier scheduler process.
type returnedNode struct {
	node                van.Node
	cluster, generation uint32
	temp                int
}

// heartbeat handles, during start-up, the heartbeat of a node of an earlier scheduler's cluster.
func (r *schedulerRecovery) heartbeat(now time.Duration, rec *van.Node, who van.NodeExtension, msg *van.Meta) {
	if failpoint.On("scheduler-back") || van.RankOf(rec.ID) >= r.cfg.instances(rec.Role) || who.Cluster == 0 {
		return
	}
	if r.cfg.NamedCluster && who.Cluster != r.table.own.Cluster && !failpoint.On("cluster-id") {
		r.refusals.refuse(now, rec, "its STEPAF_CLUSTER_ID is not that of the scheduler", "")
		return
	}
	if !r.table.hasProof(rec, msg, verbRejoin) {
		r.challenge(now, rec)
		return
	}
	if r.nodes == nil {
		r.nodes, r.since, r.nextDecision = map[int]*returnedNode{}, now, now+recoveryGrace
		r.out.emit(Warning{Text: fmt.Sprintf("%s at %s belongs to the cluster (%08x) of an earlier scheduler: waiting for the rest of it, or for a new cluster",
			van.NodeName(rec.ID), rec.Addr(), who.Cluster)})
	}
	generation, _ := parseHeartbeatKey(msg.Key)
	c := r.nodes[rec.ID]
	switch {
	case c == nil:
		c = &returnedNode{}
		r.nodes[rec.ID] = c
	case !differentProcess(&c.node, rec):
	case generation <= c.generation:
		return // it was replaced by the process that returned first
	default:
		r.out.disconnect(c.temp)
		c.temp = 0
	}
	c.node, c.cluster, c.generation = *rec, who.Cluster, generation
	if c.temp == 0 {
		c.temp = r.out.connectTemp(*rec)
	}
	if nodes := msg.Control.Nodes; len(nodes) > 1 && r.table.checkRecords(msg) == nil && (r.records == nil || generation > r.generation) {
		r.records, r.generation, r.cluster = nil, generation, who.Cluster
		for i := range nodes {
			r.records = append(r.records, nodes[i].Clone())
		}
	}
	r.sendRejoin(c.temp, "")
	r.decide(now)
}

// lost removes a returned node whose connection broke. If the node is alive, its next heartbeat adds it again.
func (r *schedulerRecovery) lost(temp int) {
	for id, c := range r.nodes {
		if c.temp == temp {
			r.out.disconnect(temp)
			delete(r.nodes, id)
		}
	}
	if len(r.nodes) == 0 {
		r.nodes = nil
	}
}

// sendRejoin tells a node, to which temp is the connection, that this scheduler is a new process. request is "table"
// for the whole table, or the proof of the node's address.
func (r *schedulerRecovery) sendRejoin(temp int, request string) {
	meta := r.out.control(van.Heartbeat)
	meta.Control.Nodes = []van.Node{r.table.self}
	meta.Body = notice{verb: verbRejoin, text: request}.body()
	r.out.send(temp, meta)
}

// registered checks, when a new node has registered, whether it was the last one that an earlier scheduler's cluster
// waited for: this scheduler may be about to time out.
func (r *schedulerRecovery) registered(now time.Duration) {
	if r.nodes != nil {
		r.nextDecision = min(r.nextDecision, max(now, r.askedAt+minTableRequestPause))
		if r.decide(now); r.nodes != nil && r.nextDecision <= now {
			r.scheduleDecision(now)
		}
	}
}

// foreignNodes counts the C++ StepMesh nodes of an earlier scheduler's cluster by its table. They cannot be notified
// of the new scheduler process, and need not be. Most of them send no heartbeats.
func (r *schedulerRecovery) foreignNodes(cluster uint32) (count int) {
	if r.cluster != cluster {
		return 0
	}
	for i := range r.records {
		if incarnationOf(&r.records[i]) == 0 && isMember(&r.records[i]) {
			count++
		}
	}
	return count
}

// decide resumes an earlier scheduler's cluster if enough of its nodes of this library have returned:
//
//   - all; or
//   - after recoveryGrace, more than half, or any number if the cluster has a name; or
//   - if new nodes have registered for all the other ids: half of them after half of Config.ReplaceTimeout, and fewer
//     after three quarters of it. A new cluster would have been complete by then without them.
//
// After all of ReplaceTimeout the returned nodes would time out.
func (r *schedulerRecovery) decide(now time.Duration) {
	count, newest, current := map[uint32]int{}, map[uint32]uint32{}, 0
	var cluster uint32
	for _, id := range sortedIDs(r.nodes) {
		c := r.nodes[id]
		count[c.cluster]++
		newest[c.cluster] = max(newest[c.cluster], c.generation)
		if count[c.cluster] > count[cluster] {
			cluster = c.cluster
		}
	}
	for _, c := range r.nodes {
		if c.cluster == cluster && c.generation == newest[cluster] {
			current++
		}
	}
	known := r.records != nil && r.cluster == cluster && r.generation >= newest[cluster]
	all := r.cfg.groupLen(van.WorkerGroup|van.ServerGroup) - r.foreignNodes(cluster)
	if current == all {
		r.resume(now, cluster, newest[cluster])
		return
	}
	wait, waitOfFew := r.waitLimits()
	if 2*count[cluster] < all {
		wait = waitOfFew
	}
	switch {
	case now < r.since+recoveryGrace:
		return
	case 2*count[cluster] > all || r.cfg.NamedCluster:
	case !known: // without the table the C++ nodes, which cannot return, are not known
	case now < r.since+wait || !r.othersRegistered(cluster):
		return
	}
	if known {
		r.resume(now, cluster, newest[cluster])
		return
	}
	if now < r.nextDecision {
		return
	}
	r.askedAt = now
	r.scheduleDecision(now)
	for _, id := range sortedIDs(r.nodes) { // all that have the newest table
		if c := r.nodes[id]; c.cluster == cluster && c.generation == newest[cluster] {
			r.sendRejoin(c.temp, "table")
		}
	}
}

// resume makes this the scheduler of that cluster, unless the record of a node is not known.
func (r *schedulerRecovery) resume(now time.Duration, cluster, generation uint32) {
	known := map[int]van.Node{}
	if r.cluster == cluster {
		for _, n := range r.records {
			known[n.ID] = n
		}
	}
	var table []van.Node
	var missing, originals []int
	for _, id := range r.cfg.members(van.WorkerGroup | van.ServerGroup) {
		rec, isKnown := known[id]
		c := r.nodes[id]
		here := c != nil && c.cluster == cluster && (!isKnown || c.generation >= r.generation || !differentProcess(&rec, &c.node))
		switch {
		case here:
			rec = c.node
		case isKnown && incarnationOf(&rec) == 0: // if it is dead, the connection to it fails
			originals = append(originals, id)
		case isKnown:
			missing = append(missing, id)
		default:
			return
		}
		table = append(table, rec)
	}
	r.table.own.Cluster, r.table.tableGeneration, r.generation, r.life.recovered = cluster, generation, generation, true
	r.table.sign(&r.table.self)
	r.policies.waitUntil = now + recoveryGrace
	r.monitor.openCluster(now, table)
	r.out.emit(Assigned{ID: van.SchedulerID, Recovery: true})
	for _, id := range sortedIDs(r.nodes) {
		if c := r.nodes[id]; slices.Contains(missing, id) || c.cluster != cluster {
			r.out.disconnect(c.temp)
		} else {
			r.out.rename(c.temp, id)
			r.alive.peers[id].sendsHeartbeats = true
		}
	}
	for _, id := range originals {
		r.out.connect(id, *r.table.record(id))
		if van.RoleOf(id) == van.Server {
			r.monitor.barriers.resumed[id] = true
		}
	}
	joins := r.registrations.list
	r.registrations.list, r.nodes = nil, nil
	whole := r.table.whole()
	for _, id := range r.table.ids() {
		if r.table.native(id) { // C++ StepMesh would take a second table for the records of new nodes
			r.monitor.sendRecords(id, whole)
		}
	}
	r.out.emit(Ready{})
	for _, id := range missing {
		r.monitor.markDead(now, id, connLost, &lossError{text: "it has not returned to the restarted scheduler"})
	}
	for _, j := range joins {
		r.out.disconnect(j.temp)
		if j.lost == nil {
			r.replacements.register(now, j)
		}
	}
}

// isUnknownReplacement reports whether a process with a table of that generation, which returns after resume, replaced member id
// under the earlier scheduler, and none of the nodes that returned before received its record. Fenced processes have older tables.
func (r *schedulerRecovery) isUnknownReplacement(id int, cluster, generation uint32) bool {
	return r.life.recovered && cluster == r.table.own.Cluster && generation > r.generation && r.alive.isDead(id)
}

// waitLimits returns the scheduler's wait for the other nodes when half of an earlier cluster's nodes have returned,
// and when fewer have.
func (r *schedulerRecovery) waitLimits() (half, few time.Duration) {
	limit := r.cfg.ReplaceTimeout
	if start := r.cfg.StartTimeout; start > 0 { // then this scheduler times out
		limit = min(limit, start)
	}
	return limit / 2, limit * 3 / 4
}

// othersRegistered reports whether a new node has registered for each id of an earlier scheduler's cluster whose node
// has not returned, so that no more nodes are expected.
func (r *schedulerRecovery) othersRegistered(cluster uint32) bool {
	joins := r.registrations.present()
	for _, id := range r.cfg.members(van.WorkerGroup | van.ServerGroup) {
		if c := r.nodes[id]; c != nil && c.cluster == cluster {
			continue
		}
		i := slices.IndexFunc(joins, func(n van.Node) bool {
			return n.Role == van.RoleOf(id) && (n.AuxID == -1 || n.AuxID == van.RankOf(id))
		})
		if i < 0 {
			return false
		}
		joins = slices.Delete(joins, i, i+1)
	}
	return true
}

// end ends the wait for an earlier scheduler's cluster, since a new one has formed. Later messages of the earlier
// cluster's nodes are refused.
func (r *schedulerRecovery) end() {
	for _, id := range sortedIDs(r.nodes) {
		r.out.disconnect(r.nodes[id].temp)
	}
	r.nodes = nil
}

func (r *schedulerRecovery) next() time.Duration {
	if r.nodes == nil {
		return math.MaxInt64
	}
	return max(r.since+recoveryGrace, r.nextDecision)
}

func (r *schedulerRecovery) tick(now time.Duration) {
	if now < r.next() {
		return
	}
	r.decide(now)
	if r.nodes == nil || r.nextDecision > now {
		return
	}
	r.scheduleDecision(now)
}

// scheduleDecision sets the time of the next decision, if no event triggers one before.
func (r *schedulerRecovery) scheduleDecision(now time.Duration) {
	r.nextDecision = now + rejoinHeartbeat
	half, few := r.waitLimits()
	for _, wait := range []time.Duration{half, few} { // the returned nodes may time out soon after
		if at := r.since + wait; at > now {
			r.nextDecision = min(r.nextDecision, at)
		}
	}
}
