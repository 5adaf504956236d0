package membership

// The scheduler's records on a worker or server: the table with which it joins the cluster, and later the records of
// replacement processes. Also connections to nodes of its own role, which C++ StepMesh nodes do not have.

import (
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// records handles the scheduler's node records.
type records struct {
	core
	pending     *pendingBarriers
	latest      map[int]latestRecord // the scheduler's latest message about each node, see outdated
	linked      []int                // nodes of this one's role, see Machine.Link
	awaitsTable bool                 // the table with which a restarted scheduler has resumed the cluster has not arrived: its members are alive
}

// latestRecord has the timestamp of a message and the time of its arrival.
type latestRecord struct {
	stamp int32
	at    time.Duration
}

func (r *records) step(now time.Duration, msg *van.Meta) error {
	if err := r.table.checkRecords(msg); err != nil {
		return err
	}
	if r.life.phase == joining {
		return r.join(now, msg)
	}
	complete := true // false if msg has an outdated record, which is skipped
	for i := range msg.Control.Nodes {
		switch n := &msg.Control.Nodes[i]; {
		case n.Role == van.Scheduler || r.life.phase == failed:
		case r.outdated(now, n.ID, msg, !r.table.native(n.ID) || differentProcess(r.table.record(n.ID), n)):
			complete = false
		default:
			r.update(now, n)
		}
	}
	if slices.ContainsFunc(msg.Control.Nodes, func(n van.Node) bool { return n.Role == van.Scheduler }) {
		r.awaitsTable = false
	}
	if complete { // otherwise the next heartbeats request the whole table
		r.noteGeneration(msg)
	}
	return nil
}

// outdated reports whether the scheduler has sent a newer message than msg about id. If not, and if isNews is set, it notes msg as the latest
// message about id. isNews is false if msg only repeats the record that the table has. With PS_RESEND a lost message can arrive after later ones.
func (r *records) outdated(now time.Duration, id int, msg *van.Meta, isNews bool) bool {
	if !r.table.has(id) || msg.Timestamp == van.Empty {
		return false
	}
	if last, ok := r.latest[id]; ok && newer(last.stamp, msg.Timestamp) && now-last.at <= maxLateness {
		return true
	}
	if isNews {
		r.latest[id] = latestRecord{msg.Timestamp, now}
	}
	return false
}

// noteGeneration notes the generation of the table that msg has, or completes, and the cluster of a whole table. Heartbeats
// carry both; the scheduler answers an old generation with the whole table.
func (r *records) noteGeneration(msg *van.Meta) {
	i := slices.IndexFunc(msg.Control.Nodes, func(n van.Node) bool { return n.Role == van.Scheduler })
	g := uint32(msg.Key)
	if !r.table.native(van.SchedulerID) || i < 0 && g != r.table.tableGeneration+1 {
		return
	}
	r.table.tableGeneration = g
	if i < 0 {
		return
	}
	if who, ok := msg.Control.Nodes[i].Extension(); ok {
		r.table.own.Cluster = who.Cluster
		r.table.sign(&r.table.self)
	}
}

// join handles the full table: this node's id, and the nodes to connect to. It checks the records before it
// changes the table.
func (r *records) join(now time.Duration, msg *van.Meta) error {
	own, err := r.ownRecord(msg)
	if err != nil {
		return err
	}
	if r.wrongCounts(msg.Control.Nodes) {
		return nil
	}
	table, err := r.uniqueRecords(msg)
	if err != nil {
		return err
	}
	r.table.fill(table)
	r.table.shared = map[int]int{}
	for _, id := range r.cfg.members(van.WorkerGroup | van.ServerGroup) {
		if !r.table.has(id) {
			r.table.shared[id] = van.Empty // no node has this id
		}
	}
	if !r.learnScheduler(msg.Control.Nodes) {
		return nil
	}
	r.noteGeneration(msg)
	for i := range table {
		r.table.learn(table[i].ID, &table[i])
		r.outdated(now, table[i].ID, msg, true)
	}
	r.table.self = *r.table.record(own.ID)
	r.table.sign(&r.table.self)
	r.life.phase, r.alive.lastCheck = ready, now
	r.out.emit(SetID{own.ID})
	r.out.emit(Assigned{ID: own.ID, Rank: van.RankOf(own.ID), Recovery: own.IsRecovery})
	r.connectAll(now, msg.Control.Nodes)
	r.out.emit(Ready{})
	return nil
}

// ownRecord returns this process's record in the table of msg.
func (r *records) ownRecord(msg *van.Meta) (*van.Node, error) {
	nodes := msg.Control.Nodes
	for i := range nodes {
		if n := &nodes[i]; n.Role == r.table.self.Role && sameAddr(n, &r.table.self) && r.table.isOwn(n) {
			return n, nil
		}
	}
	return nil, r.table.bad(van.SchedulerID, msg, "control.node", fmt.Sprintf("%d records", len(nodes)),
		fmt.Sprintf("one of them %s at %s", r.table.self.Role, r.table.self.Addr()))
}

// wrongCounts reports whether the table has other numbers of nodes than this node is configured for, and fails the
// machine then.
func (r *records) wrongCounts(nodes []van.Node) bool {
	count := map[van.Role]int{}
	for i := range nodes {
		count[nodes[i].Role]++
	}
	if count[van.Worker] == r.cfg.instances(van.Worker) && count[van.Server] == r.cfg.instances(van.Server) {
		return false
	}
	r.pending.failMachine(&van.Error{Op: "start", Node: r.table.name(), Peer: r.table.peer(van.SchedulerID),
		Detail: fmt.Sprintf("the scheduler started a cluster of %d workers and %d servers, but here %s and %s",
			count[van.Worker], count[van.Server], r.cfg.formula(van.Worker), r.cfg.formula(van.Server)),
		Hint: "give all nodes the same numbers", Err: van.ErrInvalid})
	return true
}

// uniqueRecords returns the records of workers and servers in the table of msg, one for each process.
func (r *records) uniqueRecords(msg *van.Meta) (table []van.Node, err error) {
	nodes := msg.Control.Nodes
	at := map[int]int{}
	for i := range nodes {
		n := &nodes[i]
		if n.Role == van.Scheduler {
			continue
		}
		field := fmt.Sprintf("control.node[%d].id", i)
		if van.RankOf(n.ID) >= r.cfg.instances(n.Role) {
			return nil, r.table.bad(van.SchedulerID, msg, field, n.ID, fmt.Sprintf("a rank below %d", r.cfg.instances(n.Role)))
		}
		if prev, again := at[n.ID]; again {
			if sameAddr(&table[prev], n) {
				continue // another customer of the same process
			}
			return nil, r.table.bad(van.SchedulerID, msg, field, n.ID, "another, for this is "+table[prev].Addr())
		}
		at[n.ID] = len(table)
		table = append(table, n.Clone())
	}
	return table, nil
}

// learnScheduler takes the scheduler's incarnation from the table, if it has one. If the scheduler's cluster is another one,
// learnScheduler fails the machine and returns false.
func (r *records) learnScheduler(nodes []van.Node) bool {
	i := slices.IndexFunc(nodes, func(n van.Node) bool { return n.Role == van.Scheduler })
	if i < 0 {
		return true
	}
	who, ok := nodes[i].Extension()
	if !ok {
		return true
	}
	if own := r.table.own.Cluster; own != 0 && own != who.Cluster && !failpoint.On("cluster-id") {
		r.pending.failMachine(r.table.refused("start", "its STEPAF_CLUSTER_ID is another"))
		return false
	}
	r.table.scheduler.Endpoint = slices.Clone(nodes[i].Endpoint)
	r.table.learn(van.SchedulerID, &nodes[i])
	return true
}

// connectAll connects to the scheduler and to the nodes of the other role.
func (r *records) connectAll(now time.Duration, nodes []van.Node) {
	seen := map[int]bool{}
	for i := range nodes {
		n := &nodes[i]
		if seen[n.ID] {
			continue
		}
		seen[n.ID] = true
		r.alive.begin(now, n.ID)
		switch {
		case n.Role == van.Scheduler:
			r.out.connect(van.SchedulerID, r.table.scheduler)
		case n.Role != r.table.self.Role:
			r.out.startConns[n.ID] = true
			r.out.connect(n.ID, *r.table.record(n.ID))
		}
	}
	if !seen[van.SchedulerID] { // connect again, so that the scheduler learns this node's id
		r.alive.begin(now, van.SchedulerID)
		r.out.connect(van.SchedulerID, r.table.scheduler)
	}
}

// update handles one record after start-up: usually that of a replacement process.
func (r *records) update(now time.Duration, n *van.Node) {
	i, ok := r.table.at[n.ID]
	if !ok {
		r.out.emit(Warning{Text: fmt.Sprintf("%s: the scheduler announced %s at %s, which was not in its table", r.table.name(),
			van.NodeName(n.ID), n.Addr())})
		return
	}
	old, h := &r.table.nodes[i], r.alive.peers[n.ID]
	moved := differentProcess(old, n)
	if n.ID == r.table.self.ID {
		if moved {
			r.pending.failMachine(r.table.refused("stay in the cluster", fmt.Sprintf("%s was declared dead and replaced by %s", r.table.self.Addr(), n.Addr())))
		}
		return
	}
	if !moved && (r.table.native(n.ID) || !n.IsRecovery || h.deadFor == 0 && old.IsRecovery) {
		if r.awaitsTable {
			r.pending.peerAlive(now, n.ID, declared)
		}
		return // unchanged
	}
	r.table.nodes[i] = n.Clone()
	r.table.learn(n.ID, n)
	delete(r.out.startConns, n.ID)
	r.alive.begin(now, n.ID)
	r.pending.deferred.remove(n.ID)
	r.relink(n.ID)
	r.out.emit(PeerReplaced{n.ID, r.table.nodes[i]})
}

func (r *records) link(ids []int) error {
	bad := func(id int, want string) error {
		return &van.Error{Op: "link", Node: r.table.name(), Peer: r.table.peer(id), Err: fmt.Errorf("%w: want %s", van.ErrInvalid, want)}
	}
	for _, id := range ids {
		switch {
		case id == r.table.self.ID:
		case !r.table.has(id) || van.RoleOf(id) != r.table.self.Role:
			return bad(id, "a "+r.table.self.Role.String()+" of this cluster")
		case !r.table.native(id):
			return bad(id, "a node of this library: C++ StepMesh nodes know none of their own role")
		}
	}
	for _, id := range ids {
		if id != r.table.self.ID && !r.out.conns[id] {
			r.linked = append(r.linked, id)
			r.out.connect(id, *r.table.record(id))
		}
	}
	return nil
}

// relink connects to the process that has replaced id, if this node must be connected to it.
func (r *records) relink(id int) {
	switch {
	case van.RoleOf(id) != r.table.self.Role, slices.Contains(r.linked, id) && r.table.native(id):
		r.out.connect(id, *r.table.record(id))
	case slices.Contains(r.linked, id):
		r.out.disconnect(id)
		r.linked = slices.DeleteFunc(r.linked, func(o int) bool { return o == id })
	}
}
