package membership

// Barriers that this node has called: their requests to the scheduler, how they end, and, on workers and servers, the
// effects of a peer's death on them.

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// leaveGrace is the delay of the report of a lost peer during Finalize: nodes close their connections right after the
// last barrier, perhaps before this node has its release.
const leaveGrace = time.Second

// firstProgressLog is the time until a program that waits at its start or end logs the missing nodes. The pauses between the
// next lines double, from firstProgressLog on.
const firstProgressLog = 4 * time.Second

// The key of a request names the purpose of its barrier. Only a scheduler of this library reads it.
const (
	finalizeRequest = 1 // the program ends: Finalize
	startRequest    = 2 // the program starts
	stopRequest     = 3 // the program ends, and a request of Finalize follows
)

// requestKey is the key by which a release or a notice names the request that it answers; 0 names none. C++ StepMesh
// nodes do not read the key.
func requestKey(stamp int32) uint64 { return uint64(uint32(stamp)) + 1 }

// pendingBarrier is one call of Barrier that has not ended.
type pendingBarrier struct {
	number   int
	customer int
	group    int
	instance bool
	finalize bool // the barrier of Finalize
	ending   bool // the barrier of Finalize, or of StopBarrier
	starting bool // a barrier of start-up
	sent     bool
	stamp    int32  // of the request, once it is sent
	missing  string // the scheduler's text about missing nodes
	since    time.Duration
	deadline time.Duration // 0: none
	nextLog  time.Duration // if the program starts or ends: time of the next log line about the missing nodes
	logPause time.Duration // from that line to the next one
}

func (t *pendingBarrier) name() string {
	return kindName(t.instance) + " barrier over " + groupName(t.group)
}

// logsProgress reports whether t is a barrier at the start or the end of a program, whose missing nodes are logged.
func (t *pendingBarrier) logsProgress() bool { return t.starting || t.ending }

func (t *pendingBarrier) cancelNotice() notice {
	return notice{verb: verbWithdraw, group: t.group, instance: t.instance}
}

// pendingBarriers are the node's pending barriers.
type pendingBarriers struct {
	core
	open     []*pendingBarrier // in the order of the calls
	canceled []*pendingBarrier // the scheduler must not count their requests
	last     int
	deferred deferredLosses
}

// deferredLosses are the connections, by peer, that were lost while a Finalize waits.
type deferredLosses map[int]deferredLoss

// deferredLoss is a connection that was lost while a Finalize waits: the peer may have died, or left in order.
type deferredLoss struct {
	cause error
	at    time.Duration
}

// Barrier starts a barrier of customer (usually 0) over a group (1 to 7, or this node's id) that this node belongs
// to, and returns the number that BarrierDone or BarrierFailed will have. With instance true it waits for every
// instance; otherwise for one request of each group of instances, as C++ StepMesh counts. A barrier that needs no
// other node is done at once.
//
// A release of a C++ StepMesh scheduler does not name its barrier. With such a scheduler, a barrier is requested only
// when no earlier barrier of the same kind over the same group or of the same customer is pending, and a release ends
// the oldest barrier of its customer and kind. A scheduler of this library names the request; only barriers over the
// same group wait for each other.
//
// The barrier ends after Config.BarrierTimeout at the latest. When the scheduler is lost, the barrier waits for
// Config.ReplaceTimeout. The request is repeated when the same scheduler is back. It fails when a new process has
// replaced the scheduler, which does not know of the request.
//
// The error wraps van.ErrInvalid, van.ErrPeerLost when the scheduler is lost, or van.ErrClosed.
func (c *pendingBarriers) Barrier(now time.Duration, customer, group int, instance bool) (int, error) {
	t := pendingBarrier{customer: customer, group: group, instance: instance}
	if d := c.cfg.BarrierTimeout; d > 0 {
		t.deadline = now + d
	}
	return c.start(now, t)
}

// StartBarrier is an instance barrier over a group at the end of start-up. A replacement process passes it when the
// others have passed it. It fails at deadline, unless that is 0; on the scheduler this fails start-up on all nodes.
func (c *pendingBarriers) StartBarrier(now time.Duration, group int, deadline time.Duration) (int, error) {
	return c.start(now, pendingBarrier{group: group, instance: true, starting: true, deadline: deadline})
}

// skipped reports whether this process need not request a barrier of start-up: it has resumed a cluster, or it
// replaces another process, whose request a C++ StepMesh scheduler would count for the next barrier.
func (t *pendingBarrier) skipped(b *core) bool {
	return t.starting && (b.life.recovered || b.table.self.IsRecovery && !b.table.native(van.SchedulerID))
}

// Finalize starts the last barrier, over all instances of all nodes. When it is done the machine is leaving: peers
// may leave without being reported. Losses while it waits are reported only if it fails. A waiting Finalize also
// counts for the instance barriers over all nodes that other nodes of this library call before theirs. After a
// failure call Leaving before the van is closed.
func (c *pendingBarriers) Finalize(now time.Duration, customer int) (int, error) {
	t := pendingBarrier{customer: customer, group: van.AllNodes, instance: true, finalize: true, ending: true}
	if c.table.self.Role == van.Worker && c.cfg.StopTimeout > 0 {
		t.deadline = now + c.cfg.StopTimeout
	}
	return c.start(now, t)
}

// StopBarrier is a barrier over all instances of all nodes that a program calls before Finalize. As with Finalize,
// some nodes may call it as soon as they run: it has no limit, and is requested again from a new scheduler process.
func (c *pendingBarriers) StopBarrier(now time.Duration, customer int) (int, error) {
	return c.start(now, pendingBarrier{customer: customer, group: van.AllNodes, instance: true, ending: true})
}

func (c *pendingBarriers) start(now time.Duration, t pendingBarrier) (int, error) {
	refuse := func(detail string, err error) (int, error) {
		return 0, &van.Error{Op: t.name(), Node: c.table.name(), Detail: detail, Err: err}
	}
	switch {
	case c.life.phase == failed && !c.life.leaving:
		return refuse("", c.life.failure)
	case c.life.leaving:
		return refuse("", van.ErrClosed)
	case c.life.phase != ready:
		return refuse("start-up is not complete", van.ErrInvalid)
	case t.customer < 0 || t.customer > math.MaxInt32:
		return refuse(fmt.Sprintf("customer %d: want 0 or more", t.customer), van.ErrInvalid)
	case c.cfg.members(t.group) == nil:
		return refuse(fmt.Sprintf("group %d: want 1 to 7 or the id of a node", t.group), van.ErrInvalid)
	case t.group > van.AllNodes && t.group != c.table.self.ID,
		t.group <= van.AllNodes && t.group&groupBit(c.table.self.Role) == 0:
		return refuse("this node is not in it", van.ErrInvalid)
	}
	if c.alive.isDead(van.SchedulerID) && now >= c.alive.peers[van.SchedulerID].deadSince+c.cfg.ReplaceTimeout && t.needsScheduler(&c.core) {
		return 0, &van.Error{Op: t.name(), Node: c.table.name(), Peer: c.table.peer(van.SchedulerID),
			Err: c.alive.peers[van.SchedulerID].cause}
	}
	c.last++
	t.number, t.since, t.nextLog, t.logPause = c.last, now, now+firstProgressLog, firstProgressLog
	if c.cfg.trivial(t.group, t.instance) || t.skipped(&c.core) {
		c.out.emit(BarrierDone{t.number})
		return t.number, nil
	}
	c.open = append(c.open, &t)
	c.sendRequests()
	return t.number, nil
}

// sendRequests sends the requests that need not wait for an earlier barrier.
func (c *pendingBarriers) sendRequests() {
	if c.alive.schedulerUnreachable() {
		return
	}
	named := c.table.native(van.SchedulerID)
	for i, t := range c.open {
		held := slices.ContainsFunc(c.open[:i], func(e *pendingBarrier) bool {
			return e.instance == t.instance && (e.group == t.group || e.customer == t.customer && !named)
		})
		if t.sent || held {
			continue
		}
		t.sent, t.stamp = true, c.out.nextStamp()
		c.sendRequest(t)
		c.canceled = slices.DeleteFunc(c.canceled, func(e *pendingBarrier) bool {
			return e.instance == t.instance && e.group == t.group && e.customer == t.customer
		})
	}
}

func (c *pendingBarriers) sendRequest(t *pendingBarrier) {
	meta := controlAt(t.stamp, barrierCommand(t.instance))
	meta.Request, meta.AppID, meta.CustomerID = true, 0, int32(t.customer)
	meta.Control.BarrierGroup = t.group
	switch {
	case !c.table.native(van.SchedulerID):
	case t.finalize:
		meta.Key = finalizeRequest
	case t.ending:
		meta.Key = stopRequest
	case t.starting:
		meta.Key = startRequest
	}
	c.out.send(van.SchedulerID, meta)
}

// resendRequests repeats the requests whose answers may have been lost with the connection to the scheduler. They
// keep their timestamps, so that they are counted once. A C++ StepMesh scheduler would count them twice.
func (c *pendingBarriers) resendRequests() {
	if c.table.native(van.SchedulerID) && !c.life.rejoining {
		for _, t := range c.canceled {
			c.out.notifyAbout(van.SchedulerID, t.cancelNotice(), requestKey(t.stamp))
		}
		for _, t := range c.open {
			if t.sent {
				c.sendRequest(t)
			}
		}
	}
	c.sendRequests()
}

func (c *pendingBarriers) get(n int) *pendingBarrier {
	if i := slices.IndexFunc(c.open, func(t *pendingBarrier) bool { return t.number == n }); i >= 0 {
		return c.open[i]
	}
	return nil
}

// cancel ends a barrier that this node no longer waits for, after limit if there was one. missing names the missing
// nodes, as far as this node knows them; hint names the place where they are logged.
func (c *pendingBarriers) cancel(t *pendingBarrier, limit time.Duration, missing, hint string) {
	c.cancelRequest(t)
	c.fail(func(e *pendingBarrier) bool { return e == t }, van.Error{Limit: limit, Detail: missing, Err: van.ErrTimeout, Hint: hint})
}

// hint names the place where the missing nodes are logged, if this node does not know them. A scheduler of this
// library logs them when it handles the cancellation.
func (t *pendingBarrier) hint(b *core) string {
	if t.missing != "" || t.finalize || !t.sent || !b.table.native(van.SchedulerID) || b.alive.isDead(van.SchedulerID) {
		return ""
	}
	return "the scheduler's log names the missing nodes"
}

// cancelRequest notifies a scheduler of this library that t is canceled. The notice is repeated after a lost
// connection, until there is a new request for the barrier. The request of Finalize stays: the canceling node leaves,
// and the scheduler is notified of that.
func (c *pendingBarriers) cancelRequest(t *pendingBarrier) {
	switch {
	case !t.sent || c.life.leaving:
		return
	case t.finalize:
		t.notifyOver(&c.core)
		return
	case !c.table.isScheduler() && !c.table.native(van.SchedulerID) || failpoint.On("abandon"):
		return
	}
	c.canceled = append(c.canceled, t)
	if !c.alive.schedulerUnreachable() {
		c.out.notifyAbout(van.SchedulerID, t.cancelNotice(), requestKey(t.stamp))
	}
}

// notifyOver notifies a scheduler of this library, which stays until then, that t at the end of a program is over on
// b's node.
func (t *pendingBarrier) notifyOver(b *core) {
	if !b.table.isScheduler() && b.table.native(van.SchedulerID) && !b.alive.schedulerUnreachable() {
		b.out.notifyAbout(van.SchedulerID, notice{verb: verbReleased, group: t.group, instance: t.instance}, requestKey(t.stamp))
	}
}

// release ends a barrier of this node. It handles every message that no other handler takes; any other than a release
// is an error.
func (c *pendingBarriers) release(now time.Duration, from int, msg *van.Meta) error {
	switch {
	case msg.Control.Cmd != van.Barrier && msg.Control.Cmd != van.InstanceBarrier:
		return c.table.bad(from, msg, "control.cmd", msg.Control.Cmd, "ADD_NODE, BARRIER, INSTANCE_BARRIER or HEARTBEAT")
	case msg.Request:
		return c.table.bad(from, msg, "request", true, "false: only the scheduler counts barriers")
	case from != van.SchedulerID:
		return c.table.bad(from, msg, "sender", from, "the scheduler")
	}
	instance := msg.Control.Cmd == van.InstanceBarrier
	at := func(fits func(*pendingBarrier) bool) int {
		return slices.IndexFunc(c.open, func(t *pendingBarrier) bool { return t.sent && t.instance == instance && fits(t) })
	}
	var i int
	if c.table.native(van.SchedulerID) {
		i = at(func(t *pendingBarrier) bool { return requestKey(t.stamp) == msg.Key })
	} else {
		// The release has the customer of the last request, which may be another node's.
		i = at(func(t *pendingBarrier) bool { return t.customer == int(msg.CustomerID) })
		if i < 0 {
			i = at(func(*pendingBarrier) bool { return true })
		}
	}
	if i < 0 {
		return nil // of a canceled barrier, or a duplicate
	}
	t := c.open[i]
	c.open = slices.Delete(c.open, i, i+1)
	if t.ending {
		t.notifyOver(&c.core)
	}
	if t.finalize {
		c.Leaving(now)
	}
	c.out.emit(BarrierDone{t.number})
	c.sendRequests()
	return nil
}

// setMissing handles the scheduler's notice of missing nodes.
func (c *pendingBarriers) setMissing(text string, request uint64) {
	for _, t := range c.open {
		if t.sent && requestKey(t.stamp) == request {
			t.missing = "the scheduler says: " + text
		}
	}
}

// matches reports whether a notice and its key name t's request.
func (t *pendingBarrier) matches(n notice, request uint64) bool {
	return t.sent && t.instance == n.instance && t.group == n.group && requestKey(t.stamp) == request
}

// failedByScheduler handles the scheduler's notice that a barrier cannot complete. request is the key of the request,
// see requestKey.
func (c *pendingBarriers) failedByScheduler(n notice, request uint64) {
	c.fail(func(t *pendingBarrier) bool { return t.matches(n, request) }, van.Error{Peer: c.table.peer(van.SchedulerID), Err: &lossError{text: n.text}})
}

// fail fails the barriers that which selects. If Finalize is among them, its deferred losses are reported.
func (c *pendingBarriers) fail(which func(*pendingBarrier) bool, why van.Error) {
	out := slices.DeleteFunc(slices.Clone(c.open), func(t *pendingBarrier) bool { return !which(t) })
	c.open = slices.DeleteFunc(c.open, which)
	for _, t := range out {
		e := why
		e.Op, e.Node = t.name(), c.table.name()
		c.out.emit(BarrierFailed{t.number, &e})
	}
	if len(out) == 0 {
		return
	}
	if !c.finalizing() {
		c.reportDeferred(math.MaxInt64)
	}
	c.sendRequests()
}

// finalizing reports whether a Finalize waits.
func (c *pendingBarriers) finalizing() bool {
	return slices.ContainsFunc(c.open, func(t *pendingBarrier) bool { return t.finalize })
}

// reportDeferred reports the losses that were noticed at least leaveGrace before now: if the peers had left in order,
// the release of the last barrier would have arrived.
func (c *pendingBarriers) reportDeferred(now time.Duration) {
	if len(c.deferred) == 0 {
		return
	}
	for _, id := range c.table.Members(van.AllNodes) {
		if l, ok := c.deferred[id]; ok && now >= l.at+leaveGrace {
			delete(c.deferred, id)
			c.peerDead(l.at, id, connLost, l.cause)
		}
	}
}

// add defers the report of a lost peer until a Finalize has ended.
func (l deferredLosses) add(now time.Duration, id int, cause error) {
	if _, known := l[id]; !known {
		l[id] = deferredLoss{cause, now}
	}
}

// remove removes a loss that is over, and reports whether there was one.
func (l deferredLosses) remove(id int) bool {
	_, had := l[id]
	delete(l, id)
	return had
}

// peerDead and peerAlive are markDead and markAlive on workers and servers.
func (c *pendingBarriers) peerDead(now time.Duration, id int, r deathReason, cause error) {
	if c.alive.markDead(now, id, r, cause) {
		c.deferred.remove(id)
		c.failWithoutScheduler(now)
	}
}

func (c *pendingBarriers) peerAlive(now time.Duration, id int, r deathReason) {
	if c.alive.markAlive(now, id, r) && id == van.SchedulerID {
		c.resendRequests()
	}
}

func (c *pendingBarriers) heard(now time.Duration, id int) {
	if c.alive.heard(now, id) {
		c.peerAlive(now, id, silent)
	}
}

// schedulerReplaced fails the barriers that were requested from a scheduler process that has been replaced: it may
// have released them for others. Barriers at the end of a program are requested from the new process.
func (c *pendingBarriers) schedulerReplaced() {
	c.deferred.remove(van.SchedulerID)
	c.canceled = nil // the new process knows of no request
	for _, t := range c.open {
		if t.ending {
			t.sent = false
		}
	}
	c.fail(func(t *pendingBarrier) bool { return t.sent }, van.Error{Peer: c.table.peer(van.SchedulerID),
		Err: &lossError{text: "the scheduler was started again; whether others have passed this barrier is not known"}})
}

// Leaving reports that this node is about to leave: lost peers are no longer reported.
func (c *pendingBarriers) Leaving(time.Duration) {
	c.life.leaving = true
	clear(c.deferred)
}

// failMachine ends the machine, and all barriers with it.
func (c *pendingBarriers) failMachine(err error) {
	if c.life.phase == failed {
		return
	}
	c.fail(func(*pendingBarrier) bool { return true }, van.Error{Err: err})
	c.life.phase, c.life.failure = failed, err
	c.out.emit(Failed{err})
}

func (c *pendingBarriers) expired(now time.Duration) []*pendingBarrier {
	return slices.DeleteFunc(slices.Clone(c.open), func(t *pendingBarrier) bool { return t.deadline <= 0 || now < t.deadline })
}

// failWithoutScheduler fails the barriers that wait for a scheduler that has been lost for Config.ReplaceTimeout. A
// server's Finalize waits as long as a worker is alive: workers do not need the scheduler for their requests.
func (c *pendingBarriers) failWithoutScheduler(now time.Duration) {
	if now < c.schedulerDeadline() {
		return
	}
	for _, t := range c.open {
		if t.needsScheduler(&c.core) {
			c.cancelRequest(t)
		}
	}
	c.fail(func(t *pendingBarrier) bool { return t.needsScheduler(&c.core) }, van.Error{Peer: c.table.peer(van.SchedulerID), Err: c.alive.peers[van.SchedulerID].cause})
}

// schedulerDeadline is the time at which barriers that wait for a lost scheduler fail.
func (c *pendingBarriers) schedulerDeadline() time.Duration {
	if c.alive.schedulerUnreachable() && slices.ContainsFunc(c.open, func(t *pendingBarrier) bool { return t.needsScheduler(&c.core) }) {
		return c.alive.peers[van.SchedulerID].deadSince + c.cfg.ReplaceTimeout
	}
	return math.MaxInt64
}

// failWithoutWorkers fails, on a server, the barriers at the end of a program when no worker has been alive for
// Config.StopTimeout. Such a barrier cannot complete, and a scheduler of C++ StepMesh does not report that.
func (c *pendingBarriers) failWithoutWorkers(now time.Duration) {
	var dead []string
	for _, id := range c.table.Members(van.WorkerGroup) {
		if h := c.alive.peers[id]; h != nil && h.deadFor != 0 {
			dead = append(dead, fmt.Sprintf("%s is dead: %s", c.table.peer(id), h.cause))
		}
	}
	c.fail(func(t *pendingBarrier) bool { return now >= t.workersDeadline(&c.core) }, van.Error{Limit: c.cfg.StopTimeout,
		Err: &lossError{text: "no worker is left, and the scheduler, one of C++ StepMesh, does not end the barrier: " + list(dead)}})
}

// workersDeadline is the time at which failWithoutWorkers fails t.
func (t *pendingBarrier) workersDeadline(b *core) time.Duration {
	if !t.ending || b.table.self.Role != van.Server || b.cfg.StopTimeout <= 0 || b.table.native(van.SchedulerID) {
		return math.MaxInt64
	}
	from := t.since
	for _, id := range b.table.Members(van.WorkerGroup) {
		if !b.alive.isDead(id) {
			return math.MaxInt64
		}
		from = max(from, b.alive.peers[id].deadSince)
	}
	return from + b.cfg.StopTimeout
}

// logProgress logs the nodes that the barriers at the start and at the end of a program wait for. missing returns the
// text about one barrier, or "" if it is normal that the barrier waits.
func (c *pendingBarriers) logProgress(now time.Duration, missing func(*pendingBarrier) string) {
	for _, t := range c.open {
		if !t.logsProgress() || now < t.nextLog {
			continue
		}
		text := missing(t)
		if text == "" {
			t.logPause, t.nextLog = firstProgressLog, now+firstProgressLog
			continue
		}
		in := "stop()"
		switch {
		case t.finalize:
			in = "Finalize"
		case t.starting:
			in = "the start barrier"
		}
		c.out.emit(Warning{Text: fmt.Sprintf("%s has waited in %s for %s: %s", c.table.name(), in, (now - t.since).Round(time.Second), text)})
		t.nextLog = now + t.logPause
		t.logPause *= 2
	}
}

// missingText names the nodes that t waits for, as far as a worker or server knows them. A server normally waits as
// long as its workers work. Its text is therefore empty unless a node is dead or the scheduler cannot be asked.
func (t *pendingBarrier) missingText(b *core) string {
	var text, dead string
	switch h := b.alive.peers[van.SchedulerID]; {
	case b.alive.schedulerUnreachable():
		text = fmt.Sprintf("%s cannot be asked: %s", b.table.peer(van.SchedulerID), h.cause)
	case t.missing != "":
		text = t.missing
	case b.table.native(van.SchedulerID):
		text = "the scheduler has not named the missing nodes"
	default:
		text = "the scheduler, one of C++ StepMesh, does not name the missing nodes"
	}
	for _, id := range b.table.ids() {
		if h := b.alive.peers[id]; id != b.table.self.ID && h != nil && h.deadFor != 0 {
			dead += fmt.Sprintf("; %s is dead: %s", b.table.peer(id), h.cause)
		}
	}
	if t.ending && b.table.self.Role == van.Server && dead == "" && !b.alive.schedulerUnreachable() {
		return ""
	}
	return text + dead
}

func (t *pendingBarrier) needsScheduler(b *core) bool {
	return !t.ending || b.table.self.Role != van.Server ||
		!slices.ContainsFunc(b.table.Members(van.WorkerGroup), func(id int) bool { return !b.alive.isDead(id) })
}

func (c *pendingBarriers) next() time.Duration {
	next := c.schedulerDeadline()
	for _, t := range c.open {
		if t.deadline > 0 {
			next = min(next, t.deadline)
		}
		if t.logsProgress() {
			next = min(next, t.nextLog)
		}
		if t.ending {
			next = min(next, t.workersDeadline(&c.core))
		}
	}
	for _, l := range c.deferred {
		next = min(next, l.at+leaveGrace)
	}
	return next
}
