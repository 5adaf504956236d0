package membership

// The scheduler: what becomes of the messages that it gets, and how its cluster forms, or goes on
// from a former scheduler's.

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

type scheduler struct {
	base
	calls    *tickets
	refusals refusals
	gathers  gathers
	watch    watch
	policies policyList
	joins    joins
	returns  returns
	places   places
}

func newScheduler(b base, calls *tickets) *scheduler {
	s := &scheduler{base: b, calls: calls, refusals: refusals{base: b}}
	s.gathers = gathers{base: b, calls: calls, open: map[gatherKey]*gather{}, answers: map[int]map[gatherKey]answer{},
		several: map[int]bool{}, starting: map[int][]int32{}}
	s.watch = watch{base: b, gathers: &s.gathers, unheard: map[int]*unheard{}}
	s.policies = policyList{base: b, refusals: &s.refusals, have: map[int]havePolicies{}}
	s.joins = joins{base: b, refusals: &s.refusals}
	s.joins.hosts, _ = hostOrder(b.cfg.OrderedHosts) // they were checked with the configuration
	s.returns = returns{base: b, refusals: &s.refusals, joins: &s.joins}
	s.places = places{base: b, refusals: &s.refusals, gathers: &s.gathers, watch: &s.watch, policies: &s.policies,
		stamps: map[int]int32{}, claims: map[int]*join{}}
	return s
}

// step handles one message.
func (s *scheduler) step(now time.Duration, from int, msg *van.Meta) error {
	if !s.genuine(from, msg) {
		if s.stray(now, from, msg) {
			return nil
		}
		return s.table.misdirected(from, msg)
	}
	c := &msg.Control
	if c.Cmd == van.Heartbeat && len(c.Nodes) > 0 {
		return s.heartbeat(now, from, msg)
	}
	s.watch.heard(now, from)
	switch c.Cmd {
	case van.AddNode:
		return s.register(now, from, msg)
	case van.Barrier, van.InstanceBarrier:
		if msg.Request {
			return s.gathers.request(now, from, msg)
		}
		return s.calls.release(from, msg)
	case van.Heartbeat:
		return s.notice(now, from, msg)
	}
	return s.table.unknown(from, msg)
}

// genuine tells whether msg comes from the process that has its sender's id, and is meant for
// this process.
func (s *scheduler) genuine(from int, msg *van.Meta) bool {
	own := s.table.own.Incarnation
	if own == 0 || from == van.Empty || failpoint.On("incarnation") {
		return true
	}
	by, to := msg.Incarnations()
	return by == s.table.incs[from] && (by == 0 || to == own) || failpoint.On("fencing") && s.life.phase == ready
}

// stray handles a message of a process that has no id in this cluster: it was replaced, or
// belongs to an earlier cluster, or to the former process of this scheduler. It returns
// false when the message does not have what an answer needs.
func (s *scheduler) stray(now time.Duration, from int, msg *van.Meta) bool {
	by, _ := msg.Incarnations()
	if by == 0 {
		return false
	}
	if msg.Control.Cmd == van.Heartbeat && len(msg.Control.Nodes) > 0 {
		rec := msg.Control.Nodes[0].Clone()
		who, ok := rec.Identity()
		if !ok || who.Incarnation != by || rec.ID != from || !isMember(&rec) || checkAddr(&rec, "address") != nil {
			return false
		}
		switch {
		case s.life.phase == joining:
			if s.returns.heartbeat(now, &rec, who, msg) {
				s.resume(now, s.returns.decide(now))
			}
		case by == s.table.incs[from] && who.Cluster == s.table.own.Cluster:
			s.places.back(now, &rec)
		default:
			s.refusals.refuse(now, &rec, s.places.whyNot(from, who.Cluster))
		}
		return true
	}
	if rec := s.places.formerly(by, from); rec != nil && s.life.phase == ready {
		s.refusals.refuse(now, rec, s.places.whyNot(from, s.table.own.Cluster))
		return true
	}
	return s.life.phase == joining // its heartbeat will have its record
}

// register handles the registration of a node.
func (s *scheduler) register(now time.Duration, from int, msg *van.Meta) error {
	nodes := msg.Control.Nodes
	if from != van.Empty {
		return s.table.bad(from, msg, "sender", from, "a node without an id")
	}
	if len(nodes) != 1 {
		return s.table.bad(from, msg, "control.node_size", len(nodes), "1")
	}
	rec := nodes[0].Clone()
	rec.ID, rec.IsRecovery = van.Empty, false
	if err := checkAddr(&rec, "control.node[0]"); err != nil {
		return s.table.bad(from, msg, "control.node[0].address", rec.Addr(), err.Error())
	}
	switch {
	case rec.Role < van.Server || rec.Role > van.Joint:
		return s.table.bad(from, msg, "control.node[0].role", rec.Role, "server or worker")
	case rec.AuxID < -1:
		return s.table.bad(from, msg, "control.node[0].aux_id", rec.AuxID, "a rank, or -1")
	case rec.Role == van.Scheduler || rec.Role == van.Joint:
		s.refusals.refuse(now, &rec, fmt.Sprintf("a node cannot register as %s: the scheduler is %s; set DMLC_ROLE to worker or server",
			rec.Role, s.table.self.Addr()))
		return nil
	}
	if why := cmp.Or(s.joins.ofThisCluster(&rec), s.joins.unlike(&rec)); why != "" {
		s.refusals.refuse(now, &rec, why)
		return nil
	}
	if s.life.phase == ready {
		s.places.register(now, rec, msg.Timestamp)
	} else if s.joins.register(now, rec, msg.Timestamp) {
		s.form(now)
	}
	return nil
}

// form assigns the ids when all nodes have registered.
func (s *scheduler) form(now time.Duration) {
	present := s.joins.present()
	if len(present) < s.cfg.groupLen(van.WorkerGroup|van.ServerGroup) {
		return
	}
	sortJoins(present, s.joins.hosts)
	s.table.shared = assignIDs(present)
	for _, first := range s.table.shared {
		s.gathers.several[first] = true
	}
	s.returns.end()
	s.open(now, present)
	for i := range present {
		n := &present[i]
		if s.table.at[n.ID] != i {
			continue // another customer of the same process
		}
		j := s.joins.at(n)
		s.places.stamps[n.ID] = j.stamp
		if j.temp != 0 {
			s.out.rename(j.temp, n.ID)
		} else {
			s.out.connect(n.ID, *n)
		}
		s.out.first[n.ID] = true
	}
	for _, j := range s.joins.end() {
		if j.temp != 0 {
			s.out.disconnect(j.temp) // of those that vanished
		}
	}
	s.out.emit(Assigned{ID: van.SchedulerID})
	s.watch.recordsToAll()
	s.out.emit(Ready{})
}

// open begins the life of a cluster of these nodes.
func (s *scheduler) open(now time.Duration, nodes []van.Node) {
	s.life.phase, s.alive.lastCheck = ready, now
	s.table.fill(nodes)
	s.alive.begin(now, van.SchedulerID)
	for id, i := range s.table.at {
		s.alive.begin(now, id)
		s.table.learn(id, &nodes[i])
	}
}

// resume makes this the scheduler of a former one's cluster, if there is one.
func (s *scheduler) resume(now time.Duration, former *resumption) {
	if former == nil {
		return
	}
	s.table.own.Cluster, s.table.generation, s.life.recovered = former.cluster, former.generation, true
	s.table.sign(&s.table.self)
	s.policies.await = now + returnGrace
	s.open(now, former.table)
	s.out.emit(Assigned{ID: van.SchedulerID, Recovery: true})
	for _, id := range s.returns.settle(former) {
		s.alive.peers[id].beats = true
	}
	s.watch.recordsToAll()
	s.out.emit(Ready{})
	for _, id := range former.missing {
		s.watch.down(now, id, connLost, &lossError{text: "it has not come back to the scheduler, which was started again"})
	}
	for _, j := range s.joins.end() {
		if j.temp != 0 {
			s.out.disconnect(j.temp)
		}
		s.places.register(now, j.node, j.stamp)
	}
}

// heartbeat notes that of a node, and answers it with this node's record.
func (s *scheduler) heartbeat(now time.Duration, from int, msg *van.Meta) error {
	nodes := msg.Control.Nodes
	if s.table.native(from) {
		nodes = nodes[:1] // the others are for a restarted scheduler
	}
	for i := range nodes {
		n := &nodes[i]
		field := fmt.Sprintf("control.node[%d].id", i)
		switch {
		case !s.table.has(n.ID):
			return s.table.bad(from, msg, field, n.ID, "the id of a node of this cluster")
		case n.ID != from:
			return s.table.bad(from, msg, field, n.ID, fmt.Sprintf("the sender's, %d", from))
		case another(s.table.record(from), n) && !failpoint.On("fencing"):
			s.refusals.refuse(now, n, s.places.whyNot(from, s.table.own.Cluster))
			continue
		}
		s.watch.heard(now, from)
		h := s.alive.peers[from]
		h.beats = true
		if s.table.native(from) {
			var generation uint32
			generation, h.interval = parseBeatKey(msg.Key)
			old := generation != s.table.generation
			if old && h.stale { // two in a row: it has missed a record
				s.watch.introduce(from)
			}
			h.stale = old
		}
		meta := s.out.control(van.Heartbeat)
		meta.Control.Nodes = []van.Node{s.table.self}
		s.out.send(from, meta)
		s.policies.beat(from)
	}
	return nil
}

// notice handles a notice of a node, or of a process that is none.
func (s *scheduler) notice(now time.Duration, from int, msg *van.Meta) error {
	if len(msg.Body) == 0 {
		return nil
	}
	n, err := parseNotice(msg.Body)
	if err != nil {
		return s.table.badErr(from, msg, err)
	}
	switch n.verb {
	case verbPolicies:
		return s.policies.take(from, msg, n)
	case verbHave:
		s.policies.note(from, n)
		return nil
	case verbAsk:
		return s.policies.ask(now, from, msg, n, s.report)
	case verbWithdraw:
		return s.gathers.withdraw(now, from, msg, n)
	}
	return s.table.bad(from, msg, "sender", from, "notices come from the scheduler only")
}

func (s *scheduler) lost(now time.Duration, id int, cause error) {
	switch {
	case id < 0:
		s.joins.lost(id, cause)
	case s.alive.peers[id] != nil:
		err, quiet := s.alive.broke(now, id, cause)
		if quiet {
			s.watch.down(now, id, silent, s.alive.silence(now, id))
		}
		s.watch.down(now, id, connLost, err)
	}
}

func (s *scheduler) back(now time.Duration, id int) {
	switch {
	case id < 0:
		if s.joins.back(now, id) {
			s.form(now)
		}
	case s.alive.peers[id] != nil:
		s.watch.up(now, id, connLost)
	}
}

func (s *scheduler) missing(*ticket) string { return s.gathers.text() }

func (s *scheduler) report(now time.Duration) Report {
	r := s.alive.report(now)
	r.Vanished, r.Refused = slices.Clone(s.joins.vanished), slices.Clone(s.refusals.texts)
	r.Barriers = s.gathers.text()
	if !r.Ready {
		r.Present = append(r.Present, s.joins.present()...)
		r.Missing = s.joins.missing(r.Present)
		r.Returned = s.returns.text()
	}
	return r
}

// tick advances time in a cluster that has formed.
func (s *scheduler) tick(now time.Duration) {
	for _, t := range s.calls.expired(now) {
		limit, missing := t.deadline-t.since, s.gathers.text()
		if t.starting {
			text := fmt.Sprintf("the scheduler gave up the start barrier after %s: %s", limit, missing)
			s.watch.tellAll(van.SchedulerID, notice{verb: verbError, text: text})
		}
		s.calls.giveUp(t, limit, missing)
	}
	s.gathers.tick(now)
	s.watch.tick(now)
}

func (s *scheduler) next() time.Duration {
	return min(s.calls.next(), s.gathers.next(), s.watch.next(), s.places.next(), s.refusals.next())
}
