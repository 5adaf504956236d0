package membership

// The part of a worker or server: it handles the node's messages, and lost connections.

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// rejoinHeartbeat is the time between two heartbeats of a node whose scheduler does not know the cluster yet.
const rejoinHeartbeat = time.Second

// A process that has registered asks after firstQuestion whether the scheduler knows it. The scheduler answers a
// queued registration before that. Each pause is twice the one before, up to maxQuestionPause: questions to a
// scheduler that does not run yet are queued on the connection.
const (
	firstQuestion    = maxQueueTime + 2*refusalTime
	maxQuestionPause = time.Minute
)

// node is the role of a worker or server.
type node struct {
	core
	pending          *pendingBarriers
	records          records
	policies         nodePolicies
	nextHeartbeat    time.Duration // when ready, if heartbeats are sent
	formerSchedulers []uint32      // incarnations of earlier scheduler processes

	// The following fields are used while joining. schedulerNotFound: why the scheduler's name has no address.
	// schedulerLost: why the connection to it is lost. schedulerNote: its last waiting notice.
	schedulerNotFound  error
	schedulerLost      error
	schedulerNote      string
	schedulerUp        bool           // the connection to it is open
	schedulerSince     time.Duration  // the time at which it was opened
	schedulerNative    bool           // the scheduler has answered on that connection and is one of this library
	pendingTables      []pendingTable // the scheduler's records without an incarnation, see checkOrigin, in order of arrival
	schedulerUnreached string         // the result of the last probe of its address
	nextProbe          time.Duration
	nextQuestion       time.Duration
	questionPause      time.Duration // from nextQuestion to the question after it
	proof              string        // of this node's address: the last one that the scheduler sent there, see proof.go
	pendingNotices     []*van.Meta   // notices of deaths that have arrived before the table: with PS_RESEND a table may be late
}

// pendingTable is a message with records that the node has not decided about.
type pendingTable struct {
	msg *van.Meta
	at  time.Duration
}

// maxPendingMessages bounds the number of pending messages with records, and of notices that have arrived before the table.
const maxPendingMessages = 256

func newNode(b core, calls *pendingBarriers) *node {
	return &node{core: b, pending: calls, policies: nodePolicies{core: b}, records: records{core: b, pending: calls, latest: map[int]latestRecord{}}}
}

// register sends this node's record to the scheduler.
func (n *node) register(now time.Duration) {
	n.questionPause = firstQuestion
	n.nextQuestion = now + n.questionPause
	n.nextProbe = now + probeDelay
	meta := n.out.control(van.AddNode)
	meta.Control.Nodes = []van.Node{n.table.self}
	if n.proof != "" {
		meta.Body = notice{verb: verbRegister, text: n.proof}.body()
	}
	n.out.send(van.SchedulerID, meta)
}

// askScheduler asks a scheduler of this library whether it knows this process, since its answer may be lost. C++
// StepMesh would count a second registration as another node's. It ignores a notice, but with PS_RESEND set a message
// whose sender has no id aborts it; with PS_RESEND no question is sent.
func (n *node) askScheduler(now time.Duration) {
	if n.life.phase != joining || now < n.nextQuestion {
		return
	}
	n.questionPause = min(2*n.questionPause, maxQuestionPause)
	n.nextQuestion = now + n.questionPause
	self := &n.table.self
	if who, ok := self.Extension(); ok && n.schedulerLost == nil && numeric(self.Hostname) && !who.Settings.Resend {
		n.out.notify(van.SchedulerID, notice{verb: verbRegistered, text: fmt.Sprintf("%d %s", who.Incarnation, self.Addr())})
	}
}

// probeScheduler requests probes of the scheduler's address while there is no connection to the scheduler.
func (n *node) probeScheduler(now time.Duration) {
	if n.life.phase == joining && now >= n.probeDue() {
		n.nextProbe = now + probePause
		n.out.emit(Probe{n.table.scheduler})
	}
}

func (n *node) probeDue() time.Duration {
	if !n.cfg.CanProbe || n.schedulerUp || n.schedulerNotFound != nil {
		return math.MaxInt64
	}
	return n.nextProbe
}

// unreachedFrom describes the result of a probe of the scheduler's address.
func unreachedFrom(from string, err error) string {
	hint := "check DMLC_PS_ROOT_URI, the route and firewalls between the hosts"
	switch {
	case err == nil:
		return ""
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOENT):
		hint = "it does not run there (check DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT), or over another transport (DMLC_ENABLE_RDMA, DMLC_LOCAL), or has not started yet"
	case errors.Is(err, van.ErrMalformed), errors.Is(err, van.ErrTimeout):
		hint = "another program listens there: check DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
	}
	return fmt.Sprintf("cannot be reached from %s (%s): %s", from, err, hint)
}

func (n *node) step(now time.Duration, from int, origin van.Origin, msg *van.Meta) error {
	if why, keep := n.checkOrigin(now, from, origin, msg); keep {
		return n.deferTable(now, from, msg)
	} else if why != "" {
		by, _ := msg.Incarnations()
		return n.table.bad(from, msg, "incarnation", fmt.Sprintf("%08x", by), why)
	}
	if by, _ := msg.Incarnations(); by == 0 && from == van.SchedulerID {
		n.applyPendingTables(now) // the scheduler sent them before msg
	}
	return n.handle(now, from, msg)
}

// handle is step for a message that checkOrigin has accepted.
func (n *node) handle(now time.Duration, from int, msg *van.Meta) error {
	if !n.genuine(now, from, msg) {
		return n.table.wrongProcess(from, msg)
	}
	n.pending.heard(now, from)
	switch c := &msg.Control; {
	case c.Cmd == van.Heartbeat && len(c.Nodes) == 0:
		return n.notice(now, from, msg)
	case c.Cmd != van.AddNode && c.Cmd != van.Heartbeat:
		return n.pending.release(now, from, msg)
	case from != van.SchedulerID:
		return n.table.bad(from, msg, "sender", from, "the scheduler")
	case c.Cmd == van.Heartbeat:
		n.heartbeatAnswered(msg)
		return nil
	}
	joins := n.life.phase == joining
	if err := n.records.step(now, msg); err != nil || n.life.phase == failed {
		return err
	}
	if joins {
		n.schedulerLost, n.schedulerNote = nil, ""
		n.nextHeartbeat = now + n.cfg.HeartbeatInterval
		if n.cfg.NativeInterval || n.table.native(van.SchedulerID) { // at once: from then on the scheduler monitors this node
			n.nextHeartbeat = now
		}
	}
	n.schedulerResumed()
	early := n.pendingNotices
	n.pendingNotices = nil
	for _, msg := range early {
		_ = n.handle(now, van.SchedulerID, msg) // a notice of another scheduler process, or about an id that the table does not have, is dropped
	}
	return nil
}

// foreignDelay is the time from the connection to a scheduler of unknown kind to the first message that is accepted
// as one of C++ StepMesh: a scheduler of this library has answered before. It is also the longest time from that
// message to the transport's report of the connection.
const foreignDelay = time.Second

// checkOrigin returns the reason to reject a message from the scheduler's id without an incarnation, as C++ StepMesh
// sends them, or "". If keep is true, the decision is postponed.
//
// A scheduler of this library tags its messages with this node's incarnation, which only the registration has named.
// The tag proves that the sender listens at the scheduler's address. C++ StepMesh proves nothing. Its messages are
// accepted
//  1. unless STEPAF_CLUSTER_ID says that all nodes are of this library, and STEPAF_FOREIGN does not say otherwise;
//  2. if they arrive from the host of the scheduler's address; with STEPAF_FOREIGN, from any host, since the
//     scheduler may have several addresses. Only a transport without hosts (RDMA, shared memory, DMLC_LOCAL) may not
//     know the host;
//  3. if a process listens at the scheduler's address that has not answered as a scheduler of this library does.
func (n *node) checkOrigin(now time.Duration, from int, origin van.Origin, msg *van.Meta) (why string, keep bool) {
	by, to := msg.Incarnations()
	switch own := n.table.own.Incarnation; {
	case own == 0 || from != van.SchedulerID || failpoint.On("scheduler-origin"):
		return "", false
	case by != 0:
		if origin == van.OriginDialed && to == own && n.life.phase == joining {
			n.schedulerNative = true
			n.pendingTables = nil
		}
		return "", false
	case n.table.native(van.SchedulerID): // see genuine
		return "", false
	case n.cfg.NamedCluster && !n.cfg.Foreign:
		return "that of the scheduler, since STEPAF_CLUSTER_ID is set; set STEPAF_FOREIGN=1 here if the scheduler is one of C++ StepMesh", false
	case origin == van.OriginOther && !n.cfg.Foreign:
		return fmt.Sprintf("none only in messages from the host of the scheduler, %s; set STEPAF_FOREIGN=1 here if it is one of C++ StepMesh that uses another address", n.table.scheduler.Hostname), false
	case n.life.phase != joining || origin == van.OriginDialed:
		return "", false
	case n.schedulerNative:
		return "that of the scheduler, which is one of this library", false
	case !n.schedulerUp || now < n.schedulerSince+foreignDelay:
		return "", true
	}
	return "", false
}

// deferTable stores records until applyPendingTables decides about them: the latest table with this process, and
// the scheduler's later messages about processes that replace others.
func (n *node) deferTable(now time.Duration, from int, msg *van.Meta) error {
	if msg.Control.Cmd != van.AddNode {
		return nil
	}
	if _, err := n.records.ownRecord(msg); err == nil {
		n.pendingTables = nil
	}
	if len(n.pendingTables) == maxPendingMessages {
		return n.table.bad(from, msg, "control.node", fmt.Sprintf("%d records", len(msg.Control.Nodes)),
			fmt.Sprintf("none, since %d messages with records wait until it is known whose they are", maxPendingMessages))
	}
	t := pendingTable{new(van.Meta), now}
	t.msg.CopyFrom(msg)
	n.pendingTables = append(n.pendingTables, t)
	return nil
}

// accepts reports whether the connection to the scheduler was open when t arrived, or soon after.
func (n *node) accepts(t pendingTable) bool {
	return n.schedulerUp && n.schedulerSince <= t.at+foreignDelay
}

// pendingTablesDue is the time at which applyPendingTables decides about the first pending table.
func (n *node) pendingTablesDue() time.Duration {
	switch {
	case len(n.pendingTables) == 0:
		return math.MaxInt64
	case n.accepts(n.pendingTables[0]):
		return n.schedulerSince + foreignDelay
	}
	return n.pendingTables[0].at + foreignDelay
}

// applyPendingTables handles the pending tables that are due, in order of arrival, and drops those that it does not
// accept.
func (n *node) applyPendingTables(now time.Duration) {
	for now >= n.pendingTablesDue() {
		t := n.pendingTables[0]
		n.pendingTables = n.pendingTables[1:]
		if !n.accepts(t) {
			continue
		}
		if err := n.handle(now, van.SchedulerID, t.msg); err != nil {
			n.out.emit(Warning{Text: err.Error()})
		}
	}
}

// genuine reports whether msg is from the process that has its sender's id, and for this process.
func (n *node) genuine(now time.Duration, from int, msg *van.Meta) bool {
	own := n.table.own.Incarnation
	if own == 0 || from != van.SchedulerID || failpoint.On("incarnation") {
		return true // the handlers refuse messages that only a scheduler may send
	}
	by, to := msg.Incarnations()
	want := n.table.incs[from]
	switch {
	case by == 0:
		return want == 0 && len(msg.Body) == 0 // C++ StepMesh sends no notices
	case to != own || slices.Contains(n.formerSchedulers, by):
		return false
	case want == by || n.life.phase == joining:
		return true
	case want == 0:
		return false
	}
	// The message is from another scheduler process, which knows this process's incarnation.
	if n, err := parseNotice(msg.Body); err == nil && n.verb == verbError {
		return true
	}
	nodes := msg.Control.Nodes
	i := slices.IndexFunc(nodes, func(n van.Node) bool { return n.Role == van.Scheduler })
	if i < 0 || incarnationOf(&nodes[i]) != by || failpoint.On("scheduler-back") {
		return false
	}
	return n.schedulerChanged(now, &nodes[i])
}

// schedulerChanged handles a new scheduler process with the record rec. It returns false if the record has no
// identity, or start-up is not complete.
func (n *node) schedulerChanged(now time.Duration, rec *van.Node) bool {
	who, ok := rec.Extension()
	if !ok || n.alive.peers[van.SchedulerID] == nil {
		return false
	}
	n.formerSchedulers = appendBounded(n.formerSchedulers, n.table.incs[van.SchedulerID], maxReplaced)
	n.table.scheduler.Endpoint = slices.Clone(rec.Endpoint)
	n.table.incs[van.SchedulerID] = who.Incarnation
	n.life.rejoining, n.proof = true, ""
	n.nextHeartbeat = now + rejoinHeartbeat
	n.alive.peers[van.SchedulerID] = &peerHealth{seen: now, deadSince: now, cause: errNotResumed}
	n.out.connect(van.SchedulerID, n.table.scheduler)
	n.out.emit(PeerReplaced{van.SchedulerID, n.table.scheduler})
	clear(n.records.latest) // its timestamps begin anew
	n.records.awaitsTable = true
	n.pending.schedulerReplaced()
	return true
}

// sendHeartbeat sends a heartbeat with this node's record, and with all other records if whole is true.
func (n *node) sendHeartbeat(whole bool) {
	meta := n.out.control(van.Heartbeat)
	meta.Control.Nodes = []van.Node{n.table.self}
	if whole {
		others := slices.DeleteFunc(slices.Clone(n.table.nodes), func(r van.Node) bool { return r.ID == n.table.self.ID })
		meta.Control.Nodes = append(meta.Control.Nodes, others...)
	}
	if n.table.native(van.SchedulerID) {
		meta.Key = heartbeatKey(n.table.tableGeneration, n.cfg.HeartbeatInterval)
		if n.life.rejoining && n.proof != "" {
			meta.Body = notice{verb: verbRejoin, text: n.proof}.body()
		}
	}
	n.out.send(van.SchedulerID, meta)
}

func (n *node) heartbeatDue() time.Duration {
	if n.alive.sendsHeartbeats() || n.life.rejoining && !n.life.leaving {
		return n.nextHeartbeat
	}
	return math.MaxInt64
}

// schedulerResumed notes that a restarted scheduler has resumed the cluster.
func (n *node) schedulerResumed() {
	if n.life.rejoining {
		n.life.rejoining = false
		n.policies.sendTo(van.SchedulerID, &n.core)
		n.pending.sendRequests()
	}
}

// heartbeatAnswered handles the scheduler's answer to a heartbeat.
func (n *node) heartbeatAnswered(msg *van.Meta) {
	if len(msg.Body) == 0 || !n.table.native(van.SchedulerID) {
		n.schedulerResumed()
		if p := n.policies.policies; p.version > 0 {
			n.out.emit(Policies{p.version, p.list}) // more of them may be in force by now
		}
	} else if what, err := parseNotice(msg.Body); err == nil && what.verb == verbRejoin && n.life.rejoining && what.text != "" {
		if what.text != "table" {
			n.proof = what.text
		}
		n.sendHeartbeat(what.text == "table") // a new scheduler may lack some nodes' records
	}
}

func (n *node) notice(now time.Duration, from int, msg *van.Meta) error {
	if len(msg.Body) == 0 {
		return nil
	}
	if from != van.SchedulerID {
		return n.table.bad(from, msg, "sender", from, "notices come from the scheduler only")
	}
	what, err := parseNotice(msg.Body)
	if err != nil {
		return n.table.badErr(from, msg, err)
	}
	switch what.verb {
	case verbPolicies:
		return n.policies.take(from, msg, what)
	case verbWithdraw, verbWaits, verbReleased, verbRegistered, verbEnded:
		return n.table.bad(from, msg, "body", what.verb, "a notice for others than the scheduler")
	case verbError:
		n.pending.failMachine(n.table.refused("join the cluster", what.text))
	case verbWaiting:
		if n.life.phase == joining {
			n.schedulerNote = what.text
			if msg.Key == urgent {
				n.out.emit(Waiting{n.report(now)})
			}
		} else {
			n.pending.setMissing(what.text, msg.Key)
		}
	case verbRegister:
		if n.life.phase == joining {
			n.proof = what.text
			n.register(now)
		}
	case verbBarrier:
		n.pending.failedByScheduler(what, msg.Key)
	case verbWhether:
		n.answerIfWaiting(what, msg.Key)
	case verbDown:
		dead := what.ids()
		for _, id := range n.table.ids() {
			switch h := n.alive.peers[id]; {
			case id == n.table.self.ID || h == nil || n.records.outdated(now, id, msg, true):
			case slices.Contains(dead, id):
				n.pending.peerDead(now, id, declared, &lossError{text: "the scheduler says: it is dead"})
			case h.deadFor&declared != 0:
				n.pending.peerAlive(now, id, declared)
			}
		}
		n.pending.resendRequests() // The scheduler sends this notice after it had lost this node, perhaps with some answers.
	case verbDead, verbCut, verbBack:
		return n.deathNotice(now, msg, what)
	}
	return nil
}

// answerIfWaiting answers the scheduler's question whether this node still waits for a barrier.
func (n *node) answerIfWaiting(what notice, request uint64) {
	what.verb = verbWithdraw
	if slices.ContainsFunc(n.pending.open, func(t *pendingBarrier) bool { return t.matches(what, request) }) {
		what.verb = verbWaits
	}
	n.out.notifyAbout(van.SchedulerID, what, request)
}

// deathNotice handles the scheduler's notice that a node is dead or alive again.
func (n *node) deathNotice(now time.Duration, msg *van.Meta, what notice) error {
	id, h := what.id, n.alive.peers[what.id]
	about, known := msg.Key, uint64(n.table.incs[id])
	switch {
	case !n.table.has(id) && n.life.phase != joining:
		return n.table.bad(van.SchedulerID, msg, "body "+what.verb, id, "the id of a node of this cluster")
	case !n.table.has(id):
		early := &van.Meta{}
		early.CopyFrom(msg)
		n.pendingNotices = appendBounded(n.pendingNotices, early, maxPendingMessages)
	case id == n.table.self.ID:
		if what.verb != verbBack {
			n.out.emit(Warning{Text: n.table.name() + ": the scheduler has declared this node dead: " + what.text})
		}
	case n.records.outdated(now, id, msg, true):
	case about != 0 && known != 0 && about != known: // about another process than the one in the table; outdated refuses an older record of it from now on
	case what.verb == verbBack:
		n.pending.peerAlive(now, id, declared)
	case what.verb == verbCut && h != nil && h.isSameLoss(now):
	default:
		n.pending.peerDead(now, id, declared, &lossError{text: "the scheduler says: " + what.text})
	}
	return nil
}

func (n *node) lost(now time.Duration, id int, cause error) {
	switch {
	case id == van.SchedulerID && errors.Is(cause, van.ErrReplaced): // the connection is refused: the scheduler cannot send the reason
		n.pending.failMachine(n.table.refused("connect", fmt.Sprintf("%s was declared dead and replaced by another process: %s", n.table.self.Addr(), cause)))
		return
	case id == van.SchedulerID && n.life.phase == joining:
		n.schedulerLost, n.schedulerNote, n.schedulerUp, n.schedulerNative, n.pendingTables = cause, "", false, false, nil
		return
	case n.alive.peers[id] == nil:
		return
	}
	err, quiet := n.alive.connectionLost(now, id, cause)
	if n.pending.finalizing() {
		if !n.alive.isDead(id) {
			n.pending.deferred.add(now, id, err)
		}
		return
	}
	if quiet {
		n.pending.peerDead(now, id, silent, n.alive.silenceError(now, id))
	}
	n.pending.peerDead(now, id, connLost, err)
}

func (n *node) back(now time.Duration, id int) {
	if id == van.SchedulerID && n.life.phase == joining {
		if !n.schedulerUp {
			n.schedulerUp, n.schedulerSince = true, now
		}
		if n.schedulerLost != nil {
			n.schedulerLost = nil
			n.register(now)
		}
		return
	}
	held := n.pending.deferred.remove(id)
	h := n.alive.peers[id]
	if h == nil {
		return
	}
	if id == van.SchedulerID && n.table.native(id) && !n.life.leaving && (held || h.deadFor != 0) {
		n.sendHeartbeat(false) // another process may listen there now; its answer shows it
	}
	if id == van.SchedulerID && held {
		n.pending.resendRequests()
	}
	n.pending.peerAlive(now, id, connLost)
}

func (n *node) tick(now time.Duration) {
	for _, t := range n.pending.expired(now) {
		n.pending.cancel(t, t.deadline-t.since, t.missing, t.hint(&n.core))
	}
	n.pending.reportDeferred(now)
	n.pending.failWithoutScheduler(now)
	n.pending.failWithoutWorkers(now)
	n.pending.logProgress(now, func(t *pendingBarrier) string { return t.missingText(&n.core) })
	if now >= n.heartbeatDue() {
		n.nextHeartbeat = now + n.cfg.HeartbeatInterval
		if n.life.rejoining {
			n.nextHeartbeat = now + rejoinHeartbeat
		}
		n.sendHeartbeat(false)
	}
	for _, id := range n.alive.timedOut(now) {
		n.pending.peerDead(now, id, silent, n.alive.silenceError(now, id))
	}
}

func (n *node) next() time.Duration {
	return min(n.pending.next(), n.heartbeatDue(), n.alive.nextCheck())
}

func (n *node) report(now time.Duration) Report {
	r := n.alive.report(now)
	switch at := "the scheduler at " + n.table.scheduler.Addr(); {
	case r.Ready:
	case n.schedulerLost != nil:
		r.Note = fmt.Sprintf("the connection to %s broke: %s", at, n.schedulerLost)
	case n.schedulerNote != "":
		r.Note = "the scheduler says: " + n.schedulerNote
	case n.schedulerNotFound != nil:
		r.Note = fmt.Sprintf("%s has not answered to %s: %s; its name is looked up again (check DMLC_PS_ROOT_URI and the name service of this host)",
			at, describe(&n.table.self), n.schedulerNotFound)
	case n.schedulerUp:
		r.Note = fmt.Sprintf("%s is connected, and has not answered to %s: it cannot reach that address (a firewall or a missing route, or set DMLC_NODE_HOST or DMLC_INTERFACE here), "+
			"or it is another node than the scheduler (check DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT), or it waits for other nodes without saying so, as the C++ one does", at, describe(&n.table.self))
	case n.schedulerUnreached != "":
		r.Note = fmt.Sprintf("%s has not answered to %s: it %s", at, describe(&n.table.self), n.schedulerUnreached)
	default:
		r.Note = fmt.Sprintf("%s has not answered to %s; it does not run there (check DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT), or over another transport (DMLC_ENABLE_RDMA, DMLC_LOCAL), "+
			"or it waits for other nodes without saying so, as the C++ one does", at, describe(&n.table.self))
	}
	return r
}
