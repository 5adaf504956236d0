package membership

// The part of the scheduler: it handles the scheduler's messages, and forms its cluster.

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// scheduler is the role of the scheduler.
type scheduler struct {
	core
	pending       *pendingBarriers
	refusals      refusals
	barriers      barriers
	monitor       monitor
	policies      policyList
	registrations registrations
	recovery      schedulerRecovery
	replacements  replacements
	probes        probes

	challenges challenges
}

func newScheduler(b core, calls *pendingBarriers) *scheduler {
	s := &scheduler{core: b, pending: calls, refusals: refusals{core: b}}
	s.barriers = barriers{core: b, pending: calls, probes: &s.probes, open: map[barrierKey]*barrier{}, outcomes: map[int]map[barrierKey]barrierOutcome{},
		multiCustomer: map[int]bool{}, foreignStarts: map[int]*foreignStart{}, resumed: map[int]bool{}, released: map[barrierKey]bool{}}
	s.barriers.departure = departure{core: b}
	s.monitor = monitor{core: b, barriers: &s.barriers, unconfirmed: map[int]*unconfirmedTable{}}
	s.policies = policyList{core: b, refusals: &s.refusals, states: map[int]nodeStates{}}
	s.challenges = challenges{core: b}
	s.registrations = registrations{core: b, refusals: &s.refusals, challenges: &s.challenges}
	s.refusals.registrations = &s.registrations
	s.registrations.hosts, _ = hostOrder(b.cfg.OrderedHosts) // they were checked with the configuration
	s.replacements = replacements{core: b, refusals: &s.refusals, barriers: &s.barriers, monitor: &s.monitor, policies: &s.policies,
		challenges: &s.challenges, registeredAt: map[int]int32{}, claims: map[int]*registration{}}
	s.probes = probes{core: b, registrations: &s.registrations}
	s.recovery = schedulerRecovery{core: b, refusals: &s.refusals, monitor: &s.monitor, policies: &s.policies, registrations: &s.registrations, replacements: &s.replacements, challenges: &s.challenges}
	return s
}

func (s *scheduler) step(now time.Duration, from int, _ van.Origin, msg *van.Meta) error {
	if !s.genuine(from, msg) {
		if s.fromNonMember(now, from, msg) {
			return nil
		}
		return s.table.wrongProcess(from, msg)
	}
	c := &msg.Control
	if c.Cmd == van.Heartbeat && len(c.Nodes) > 0 {
		return s.heartbeat(now, from, msg)
	}
	s.monitor.heard(now, from)
	switch {
	case c.Cmd == van.AddNode:
		return s.register(now, from, msg)
	case c.Cmd == van.Heartbeat:
		return s.notice(now, from, msg)
	case msg.Request && (c.Cmd == van.Barrier || c.Cmd == van.InstanceBarrier):
		return s.barriers.request(now, from, msg)
	}
	return s.pending.release(now, from, msg)
}

// genuine reports whether msg is from the process that has its sender's id, and for this process.
func (s *scheduler) genuine(from int, msg *van.Meta) bool {
	own := s.table.own.Incarnation
	if own == 0 || from == van.Empty || failpoint.On("incarnation") {
		return true
	}
	by, to := msg.Incarnations()
	return by == s.table.incs[from] && (by == 0 || to == own) || failpoint.On("fencing") && s.life.phase == ready
}

// fromNonMember handles a message of a process that has no id in this cluster: it was replaced, or belongs to an
// earlier cluster, or to the earlier process of this scheduler. It returns false when the message lacks the data for
// an answer.
func (s *scheduler) fromNonMember(now time.Duration, from int, msg *van.Meta) bool {
	by, _ := msg.Incarnations()
	if by == 0 {
		return false
	}
	if msg.Control.Cmd == van.Heartbeat && len(msg.Control.Nodes) > 0 {
		rec := msg.Control.Nodes[0].Clone()
		who, ok := rec.Extension()
		if !ok || who.Incarnation != by || rec.ID != from || !isMember(&rec) || checkNode(&rec, "address") != nil {
			return false
		}
		generation, _ := parseHeartbeatKey(msg.Key)
		switch {
		case s.life.phase == joining:
			s.recovery.heartbeat(now, &rec, who, msg)
		case by == s.table.incs[from]: // a member, with the table of an earlier scheduler
			s.replacements.readmit(now, &rec)
		case s.recovery.isUnknownReplacement(from, who.Cluster, generation) && !s.barriers.departure.waiting():
			if s.table.hasProof(&rec, msg, verbRejoin) {
				s.replacements.replaceMember(now, from, rec, 0)
			} else {
				s.recovery.challenge(now, &rec)
			}
		default:
			why, details := s.replacements.whyFenced(from, who.Cluster)
			s.refusals.refuse(now, &rec, why, details)
		}
		return true
	}
	if rec := s.replacements.replacedProcess(by, from); rec != nil && s.life.phase == ready {
		why, details := s.replacements.whyFenced(from, s.table.own.Cluster)
		s.refusals.refuse(now, rec, why, details)
		return true
	}
	return s.life.phase == joining // its heartbeat will have its record
}

func (s *scheduler) register(now time.Duration, from int, msg *van.Meta) error {
	switch n := len(msg.Control.Nodes); {
	case from != van.Empty:
		return s.table.bad(from, msg, "sender", from, "a node without an id")
	case n != 1:
		return s.table.bad(from, msg, "control.node_size", n, "1")
	}
	rec := msg.Control.Nodes[0].Clone()
	rec.ID, rec.IsRecovery = van.Empty, false
	if err := checkNode(&rec, "control.node[0]"); err != nil {
		return s.table.bad(from, msg, "control.node[0].address", strconv.Quote(rec.Addr()), err.Error())
	}
	switch {
	case incarnationOf(&rec) != 0 && !numeric(rec.Hostname): // its address could not be proved
		return s.table.bad(from, msg, "control.node[0].hostname", strconv.Quote(rec.Hostname), "a numeric address, which every node of this library has")
	case rec.Role < van.Server || rec.Role > van.Joint:
		return s.table.bad(from, msg, "control.node[0].role", rec.Role, "server or worker")
	case rec.AuxID < -1:
		return s.table.bad(from, msg, "control.node[0].aux_id", rec.AuxID, "a rank, or -1")
	case rec.Role == van.Scheduler || rec.Role == van.Joint:
		s.refusals.refuse(now, &rec, fmt.Sprintf("a node cannot register as %s: the scheduler is %s; set DMLC_ROLE to worker or server",
			rec.Role, s.table.self.Addr()), "")
		return nil
	}
	s.refusals.dequeue(&rec)
	if why := s.registrations.mismatch(&rec); why != "" {
		s.refusals.refuse(now, &rec, why, "")
		return nil
	}
	j := &registration{node: rec, stamp: msg.Timestamp, since: now, proved: s.table.hasProof(&rec, msg, verbRegister)}
	text := describe(&rec) + " has registered"
	if s.life.phase == ready {
		s.registrations.dequeue(j)
		s.replaceOrQueue(now, j)
		s.probes.registered(now, &rec)
	} else if s.registrations.register(now, j) {
		s.probes.registered(now, &rec)
		if s.form(now); s.life.phase == joining {
			text += "; " + s.report(now).withoutAddresses()
		}
	}
	s.probes.notify(&rec, text, 0) // in any case: it shows the process that the scheduler is of this library
	return nil
}

// registered answers a process that waits to be admitted. If the scheduler does not know the process, its
// registration was lost, or its refusal was sent while it was stopped or cut off: it must register again. A process
// that has been admitted is sent the table, which may be lost as well.
func (s *scheduler) registered(now time.Duration, from int, msg *van.Meta, n notice) error {
	rec, rest, err := s.table.parseProcess(from, msg, n)
	switch {
	case err != nil:
		return err
	case rest != "":
		return s.table.bad(from, msg, "body "+n.verb, strconv.Quote(truncated(n.text)), "an incarnation and an address")
	}
	s.refusals.tick(now)
	inc := incarnationOf(&rec)
	for id, of := range s.table.incs {
		if of != inc || !s.table.has(id) {
			continue
		}
		if m := s.table.record(id); s.alive.peers[id].heard == 0 && s.refusals.mayAnswer(now) {
			s.replacements.register(now, &registration{node: m.Clone(), stamp: s.replacements.registeredAt[id]})
		}
		return nil
	}
	if s.willAnswer(inc) || !s.refusals.mayAnswer(now) {
		return nil
	}
	s.challenges.send(now, &rec)
	return nil
}

// willAnswer reports whether the process with this incarnation, which is not admitted, will receive an answer, or was
// refused a moment ago.
func (s *scheduler) willAnswer(incarnation uint32) bool {
	is := func(rec *van.Node) bool { return incarnationOf(rec) == incarnation }
	waits := func(j *registration) bool { return j.lost == nil && is(&j.node) }
	told := func(r refusal) bool { return r.reason != "" && is(&r.node) }
	for _, c := range s.replacements.claims {
		if waits(c) {
			return true
		}
	}
	return slices.ContainsFunc(s.registrations.list, waits) || slices.ContainsFunc(s.registrations.queued, waits) ||
		slices.ContainsFunc(s.refusals.recent, told) || slices.ContainsFunc(s.refusals.queued, told)
}

// form assigns the ids when all nodes have registered. Until then an earlier scheduler's cluster may have waited for
// the last one.
func (s *scheduler) form(now time.Duration) {
	present := s.registrations.present()
	if len(present) < s.cfg.groupLen(van.WorkerGroup|van.ServerGroup) {
		s.recovery.registered(now)
		return
	}
	sortByAddress(present, s.registrations.hosts)
	s.table.shared = assignIDs(present)
	for _, first := range s.table.shared {
		s.barriers.multiCustomer[first] = true
	}
	s.recovery.end()
	s.monitor.openCluster(now, present)
	joins := s.registrations.list
	s.registrations.list = nil
	for i := range present {
		n := &present[i]
		if s.table.at[n.ID] != i {
			continue // another customer of the same process
		}
		j := joins[slices.IndexFunc(joins, func(j *registration) bool { return j.lost == nil && sameAddr(&j.node, n) })]
		s.replacements.registeredAt[n.ID] = j.stamp
		if j.temp != 0 {
			s.out.rename(j.temp, n.ID)
		} else {
			s.out.connect(n.ID, *n)
		}
		s.out.startConns[n.ID] = true
	}
	for _, j := range joins {
		s.out.disconnect(j.temp) // of nodes that disconnected
	}
	s.out.emit(Assigned{ID: van.SchedulerID})
	s.monitor.sendTableToAll()
	s.out.emit(Ready{})
}

// heartbeat records the heartbeat of a node, and answers it with this node's record.
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
		case differentProcess(s.table.record(from), n) && !failpoint.On("fencing"):
			why, details := s.replacements.whyFenced(from, s.table.own.Cluster)
			s.refusals.refuse(now, n, why, details)
			continue
		}
		s.monitor.heard(now, from)
		if !s.out.conns[from] { // the cluster was resumed without the node, which knew this scheduler already
			s.replacements.readmit(now, s.table.record(from))
		}
		h := s.alive.peers[from]
		h.sendsHeartbeats = true
		if s.table.native(from) {
			generation, interval := parseHeartbeatKey(msg.Key)
			old := generation != s.table.tableGeneration
			if old && h.staleTable { // two in a row: it has missed a record
				s.monitor.sendTable(from)
			}
			h.staleTable, h.interval = old, interval
		}
		meta := s.out.control(van.Heartbeat)
		meta.Control.Nodes = []van.Node{s.table.self}
		s.out.send(from, meta)
		s.policies.heartbeat(from)
	}
	return nil
}

// notice handles a notice of a node, or of a process that is not a node.
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
		return s.policies.adopt(from, msg, n)
	case verbHave:
		s.policies.recordStates(from, n)
		return nil
	case verbRegistered:
		return s.registered(now, from, msg, n)
	case verbEnded:
		s.registrations.nodeEnded(n.text)
		return nil
	case verbAsk:
		return s.policies.ask(now, from, msg, n, s.report)
	case verbWithdraw:
		return s.barriers.cancelRequest(now, from, msg, n)
	case verbWaits:
		return s.barriers.confirmWaiting(now, from, msg, n)
	case verbReleased:
		return s.barriers.releaseConfirmed(from, msg, n)
	}
	return s.table.bad(from, msg, "sender", from, "notices come from the scheduler only")
}

func (s *scheduler) lost(now time.Duration, id int, cause error) {
	switch {
	case id < 0:
		s.registrations.lost(id, cause)
		s.recovery.lost(id)
	case s.alive.peers[id] != nil:
		err, quiet := s.alive.connectionLost(now, id, cause)
		if quiet {
			s.monitor.markDead(now, id, silent, s.alive.silenceError(now, id))
		}
		s.monitor.markDead(now, id, connLost, err)
	}
	s.retryQueued(now)
}

// retryQueued decides about the queued registrations.
func (s *scheduler) retryQueued(now time.Duration) {
	if s.life.phase != ready {
		if s.registrations.retryQueued(now) {
			s.form(now)
		}
		return
	}
	held := s.registrations.queued
	s.registrations.queued = nil
	for _, j := range held {
		s.replaceOrQueue(now, j)
	}
}

// replaceOrQueue handles a registration in a cluster that has formed: the process replaces a dead member, is queued
// while a member may be dead, or is refused.
func (s *scheduler) replaceOrQueue(now time.Duration, j *registration) {
	s.registrations.disconnect(j) // it may have been queued before the cluster formed
	if !s.replacements.mayReplace(&j.node) || !s.registrations.enqueue(now, j) {
		s.replacements.register(now, j)
	}
}

func (s *scheduler) back(now time.Duration, id int) {
	if id < 0 && s.registrations.back(now, id) {
		s.form(now)
	} else if s.alive.peers[id] != nil { // not with an id below 0
		s.monitor.markAlive(now, id, connLost)
		s.barriers.departure.repeat(id)
	}
}

func (s *scheduler) report(now time.Duration) Report {
	r := s.alive.report(now)
	r.Unreached = s.probes.unreached()
	r.Vanished, r.Refused = slices.Clone(s.registrations.vanished), slices.Clone(s.refusals.texts)
	r.Ended, r.Barriers = slices.Clone(s.registrations.ended), s.barriers.missingOfAll()
	if !r.Ready {
		r.Present = append(r.Present, s.registrations.present()...)
		r.Missing = s.registrations.missing(r.Present)
		if n := len(s.recovery.nodes); n > 0 {
			r.Returned = fmt.Sprintf("%d of the %d nodes of an earlier scheduler's cluster have returned", n, s.cfg.groupLen(van.WorkerGroup|van.ServerGroup))
		}
	}
	return r
}

func (s *scheduler) tick(now time.Duration) {
	for _, t := range s.pending.expired(now) {
		limit, missing := t.deadline-t.since, s.barriers.withReasons(s.barriers.missingOfAll())
		if t.starting {
			text := fmt.Sprintf("the start barrier timed out on the scheduler after %s: %s", limit, missing)
			s.monitor.notifyOthers(van.SchedulerID, notice{verb: verbError, text: text})
		}
		s.pending.cancel(t, limit, missing, "")
	}
	s.pending.logProgress(now, s.missingText)
	s.barriers.tick(now)
	s.monitor.tick(now)
}

// missingText names the nodes that t, a barrier of the scheduler's own program, waits for. At the end of the program it
// does so if a worker waits there too, or a node is dead. Otherwise the cluster still works, and the text is "". The
// steps after the release of the barrier have log lines of their own.
func (s *scheduler) missingText(t *pendingBarrier) string {
	if t.starting {
		return s.barriers.withReasons(s.barriers.missingOfAll())
	}
	if s.barriers.departure.waiting() || !s.barriers.mayDelayScheduler() {
		return ""
	}
	return s.barriers.missingOfAll()
}

func (s *scheduler) next() time.Duration {
	return min(s.pending.next(), s.barriers.next(), s.monitor.next(), s.registrations.next(), s.replacements.next(), s.refusals.next(), s.probes.next())
}
