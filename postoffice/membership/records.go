package membership

// The scheduler's records, as a worker or server takes them: the table, with which it becomes
// part of the cluster, and later those of replacements.

import (
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

type records struct {
	base
	calls  *tickets
	beats  *beats
	links  *links
	latest map[int]int32 // timestamp of the scheduler's latest message about each node, see outdated
}

// step handles a message with records.
func (r *records) step(now time.Duration, msg *van.Meta) error {
	if err := r.table.checkRecords(msg); err != nil {
		return err
	}
	if r.life.phase == joining {
		return r.join(now, msg)
	}
	r.seen(msg)
	for i := range msg.Control.Nodes {
		if n := &msg.Control.Nodes[i]; n.Role != van.Scheduler && r.life.phase != failed && !r.outdated(n.ID, msg) {
			r.update(now, n)
		}
	}
	return nil
}

// outdated tells whether the scheduler has sent something newer than msg about id; if not,
// it notes msg as the latest. With PS_RESEND a lost message arrives after later ones.
func (r *records) outdated(id int, msg *van.Meta) bool {
	if !r.table.has(id) || msg.Timestamp == van.Empty {
		return false
	}
	if last, ok := r.latest[id]; ok && newer(last, msg.Timestamp) {
		return true
	}
	r.latest[id] = msg.Timestamp
	return false
}

// seen notes the generation of the table that msg has, or completes. Heartbeats carry
// it; the scheduler answers an old one with the whole table.
func (r *records) seen(msg *van.Meta) {
	whole := slices.ContainsFunc(msg.Control.Nodes, func(n van.Node) bool { return n.Role == van.Scheduler })
	if g := uint32(msg.Key); r.table.native(van.SchedulerID) && (whole || g == r.table.generation+1) {
		r.table.generation = g
	}
}

// join handles the full table: this node's id, and the nodes to connect to.
func (r *records) join(now time.Duration, msg *van.Meta) error {
	nodes := msg.Control.Nodes
	count := map[van.Role]int{}
	var own *van.Node
	for i := range nodes {
		n := &nodes[i]
		count[n.Role]++
		if own == nil && n.Role == r.table.self.Role && sameAddr(n, &r.table.self) && r.table.mine(n) {
			own = n
		}
	}
	if own == nil {
		return r.table.bad(van.SchedulerID, msg, "control.node", fmt.Sprintf("%d records", len(nodes)),
			fmt.Sprintf("one of them %s at %s", r.table.self.Role, r.table.self.Addr()))
	}
	workers, servers := r.cfg.instances(van.Worker), r.cfg.instances(van.Server)
	if count[van.Worker] != workers || count[van.Server] != servers {
		r.calls.end(&van.Error{Op: "start", Node: r.table.name(), Peer: r.table.peer(van.SchedulerID),
			Detail: fmt.Sprintf("the scheduler started a cluster of %d workers and %d servers, but here %s and %s",
				count[van.Worker], count[van.Server], r.cfg.formula(van.Worker), r.cfg.formula(van.Server)),
			Hint: "give all nodes the same numbers", Err: van.ErrInvalid})
		return nil
	}
	var table []van.Node
	at := map[int]int{}
	for i := range nodes {
		n := &nodes[i]
		if n.Role == van.Scheduler {
			continue
		}
		field := fmt.Sprintf("control.node[%d].id", i)
		if van.RankOf(n.ID) >= r.cfg.instances(n.Role) {
			return r.table.bad(van.SchedulerID, msg, field, n.ID, fmt.Sprintf("a rank below %d", r.cfg.instances(n.Role)))
		}
		if prev, again := at[n.ID]; again {
			if sameAddr(&table[prev], n) {
				continue // another customer of the same process
			}
			return r.table.bad(van.SchedulerID, msg, field, n.ID, "another, for this is "+table[prev].Addr())
		}
		at[n.ID] = len(table)
		table = append(table, n.Clone())
	}
	r.table.fill(table)
	r.table.shared = map[int]int{}
	for _, id := range r.cfg.members(van.WorkerGroup | van.ServerGroup) {
		if !r.table.has(id) {
			r.table.shared[id] = van.Empty // no node has this id
		}
	}
	if i := slices.IndexFunc(nodes, func(n van.Node) bool { return n.Role == van.Scheduler }); i >= 0 && !r.enter(&nodes[i]) {
		r.calls.end(&van.Error{Op: "start", Node: r.table.name(), Peer: r.table.peer(van.SchedulerID), Detail: "its STEPAF_CLUSTER_ID is another",
			Err: ErrRefused})
		return nil
	}
	r.seen(msg)
	for i := range table {
		r.table.learn(table[i].ID, &table[i])
		r.outdated(table[i].ID, msg)
	}
	r.table.self = *r.table.record(own.ID)
	r.table.sign(&r.table.self)
	r.life.phase, r.alive.lastCheck = ready, now
	r.beats.begin(now)
	r.out.emit(SetID{own.ID})
	r.out.emit(Assigned{ID: own.ID, Rank: van.RankOf(own.ID), Recovery: own.IsRecovery})
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
			r.out.first[n.ID] = true
			r.out.connect(n.ID, *r.table.record(n.ID))
		}
	}
	if !seen[van.SchedulerID] { // connect again, so that the scheduler learns this node's id
		r.alive.begin(now, van.SchedulerID)
		r.out.connect(van.SchedulerID, r.table.scheduler)
	}
	r.out.emit(Ready{})
	return nil
}

// enter joins the cluster of the scheduler with record n. It returns false if this node
// belongs to another cluster.
func (r *records) enter(n *van.Node) bool {
	who, ok := n.Identity()
	if !ok {
		return true
	}
	if own := r.table.own.Cluster; own != 0 && own != who.Cluster && !failpoint.On("cluster-id") {
		return false
	}
	r.table.own.Cluster = who.Cluster
	r.table.scheduler.Endpoint = slices.Clone(n.Endpoint)
	r.table.learn(van.SchedulerID, n)
	return true
}

// update handles one record after start-up: usually that of a replacement.
func (r *records) update(now time.Duration, n *van.Node) {
	i, ok := r.table.at[n.ID]
	if !ok {
		r.out.emit(Warning{Text: fmt.Sprintf("%s: the scheduler announced %s at %s, which was not in its table", r.table.name(),
			van.NodeName(n.ID), n.Addr())})
		return
	}
	old, h := &r.table.nodes[i], r.alive.peers[n.ID]
	moved := another(old, n)
	if n.ID == r.table.self.ID {
		if moved {
			r.calls.end(&van.Error{Op: "stay in the cluster", Node: r.table.name(), Peer: r.table.peer(van.SchedulerID),
				Detail: fmt.Sprintf("%s was taken for dead and its place given to %s", r.table.self.Addr(), n.Addr()),
				Err:    ErrRefused})
		}
		return
	}
	if !moved && (r.table.native(n.ID) || !n.IsRecovery || h.down == 0 && old.IsRecovery) {
		if r.life.rejoining {
			r.calls.peerUp(now, n.ID, declared)
		}
		return // known
	}
	r.table.nodes[i] = n.Clone()
	r.table.learn(n.ID, n)
	delete(r.out.first, n.ID)
	r.alive.begin(now, n.ID)
	r.calls.letGo(n.ID)
	r.links.relink(n.ID)
	r.out.emit(PeerReplaced{n.ID, r.table.nodes[i]})
}
