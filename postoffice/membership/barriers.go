package membership

// The barriers of the cluster, on the scheduler: it counts requests, releases or fails barriers, and notifies waiting
// nodes of the missing ones.

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// barriers are all incomplete barriers, and the results that nodes may ask for again.
type barriers struct {
	core
	pending       *pendingBarriers // of the scheduler itself
	probes        *probes
	departure     departure
	open          map[barrierKey]*barrier
	outcomes      map[int]map[barrierKey]barrierOutcome // the latest one for each node
	multiCustomer map[int]bool                          // ids of processes that registered several customers
	foreignStarts map[int]*foreignStart                 // by id
	// resumed has the ids of the C++ StepMesh servers of an earlier scheduler's cluster. A C++ server calls Finalize
	// when its program is ready to serve: the earlier scheduler has received that request, and it is not repeated.
	resumed map[int]bool
	// released has the instance barriers that have been released. From a start-up barrier among them, replacement
	// processes are released at once.
	released map[barrierKey]bool
}

// foreignStart describes a C++ StepMesh process that has replaced another one. If its program calls StartPS with its
// barrier, the process sends a request that is identical to that of Finalize. The scheduler must not count that
// request for the barrier of Finalize, where other nodes may wait already.
type foreignStart struct {
	since      time.Duration // the time at which the scheduler sent it the node table
	counted    []int32       // the customers whose first request was counted for the barrier of StartPS
	releasedAt time.Duration // the time at which the process alone was released from that barrier; 0: it was not
}

const (
	// foreignStartLimit is the longest time from the node table to the request of StartPS; the process connects to
	// all nodes in between. A later first request is that of Finalize: the program called StartPS without its
	// barrier.
	foreignStartLimit = 10 * time.Second
	// foreignExitLimit is the longest life of a process after its Finalize has ended. If a process ends within that
	// time after its first request was counted for StartPS, the request was that of Finalize.
	foreignExitLimit = 5 * time.Second
	// resumedWait is the time for which all others wait in Finalize before the resumed C++ servers count: a request that
	// such a server sends after all has arrived by then.
	resumedWait = 3 * time.Second
)

// firstMissingNotice is the time until waiting nodes first receive the names of the missing ones. It is not longer
// than the shortest limit that can be set (STEPAF_STOP_TIMEOUT).
const firstMissingNotice = 900 * time.Millisecond

type barrierKey struct {
	group    int
	instance bool
}

// finalizeKey is the barrier of Finalize, and of the calls before it.
var finalizeKey = barrierKey{van.AllNodes, true}

// barrier is a barrier that was requested and is not complete.
type barrier struct {
	requests []barrierRequest
	// onlyDeadMissing: since stuckSince, only dead nodes are missing. After Config.ReplaceTimeout the barrier fails,
	// and failureSent is set: the nodes that can be notified have been notified, once.
	onlyDeadMissing, failureSent bool
	stuckSince                   time.Duration
	resumedSince                 time.Duration // the time since which only resumed C++ servers are missing; 0: others are
	openedAt                     time.Duration // the time of the first request
	// app and customer are those of the last request: a release to a C++ StepMesh node has them.
	app, customer int32
	// nextNotice is the time of the next notice of missing nodes to the waiting ones.
	nextNotice time.Duration
}

// barrierRequest is one counted request. customer is 0 unless several customers of one process registered, each of
// which is counted. stamp is the timestamp of the request, by which a release names it to nodes of this library.
type barrierRequest struct {
	id, customer int
	stamp        int32
	at           time.Duration // the time of its arrival
	ending       bool          // at the end of a program
	finalize     bool          // of Finalize: its node then leaves
	// unconfirmed: the request may have been delayed for long, and canceled meanwhile. At askedAt the node was first
	// asked whether it still waits. The request does not count until the node confirms it.
	unconfirmed bool
	askedAt     time.Duration
	left        bool // the node has canceled Finalize, or is known to have left: it needs no release
}

// barrierOutcome is the last release for a node of this library, or the notice that the barrier has failed. A node
// that was dead, or whose connection broke, may not have received it: the node repeats its request when it is back.
// The repeated request is not counted for the next barrier.
type barrierOutcome struct {
	stamp    int32
	at       time.Duration // the time at which the request arrived
	canceled bool          // not released: the node has canceled the request
	failed   string        // not released: the reason that was sent to the node
}

// request counts a request and releases the barrier when it is complete.
func (s *barriers) request(now time.Duration, from int, msg *van.Meta) error {
	group, instance := msg.Control.BarrierGroup, msg.Control.Cmd == van.InstanceBarrier
	switch {
	case s.life.phase != ready || !s.table.has(from) && from != van.SchedulerID:
		return s.table.bad(from, msg, "sender", from, "the id of a node of this cluster")
	case group < 1 || group > van.AllNodes:
		return s.table.bad(from, msg, "control.barrier_group", group, "1 to 7")
	}
	key := barrierKey{group, instance}
	a := barrierRequest{id: from, stamp: msg.Timestamp, at: now}
	if s.table.native(from) {
		a.finalize = msg.Key == finalizeRequest
		a.ending = a.finalize || msg.Key == stopRequest
	}
	if s.multiCustomer[from] {
		a.customer = int(msg.CustomerID)
	}
	if instance && group == van.AllNodes && s.isForeignStart(now, from, msg) {
		s.out.release(from, instance, msg.AppID, msg.CustomerID, 0)
		return nil
	}
	g := s.open[key]
	if g == nil {
		g = s.newBarrier(now)
		s.open[key] = g
	}
	same := func(o barrierRequest) bool { return o.id == a.id && o.customer == a.customer }
	i := slices.IndexFunc(g.requests, same)
	switch {
	case s.table.native(from) && s.repeatOutcome(now, from, key, a.stamp):
		s.dropEmpty()
		return nil
	case s.alreadyReleased(from, key, msg):
		s.releaseAgain(from, key, barrierOutcome{stamp: a.stamp, at: now})
		s.dropEmpty()
		return nil
	case i >= 0 && g.requests[i].stamp == a.stamp && s.table.native(from): // repeated
		if a := &g.requests[i]; a.unconfirmed { // the question, or its answer, may be lost
			s.askIfWaiting(a.askedAt, key, a)
		}
		return nil
	case i >= 0 && s.table.native(from) && !newer(a.stamp, g.requests[i].stamp) && now-g.requests[i].at <= maxLateness: // canceled, and overtaken by the next one
		return nil
	case i >= 0 && (instance || s.table.native(from)): // canceled and requested again
		g.requests[i] = a
	default:
		i = len(g.requests)
		g.requests = append(g.requests, a)
	}
	g.app, g.customer = msg.AppID, msg.CustomerID
	if s.table.native(from) && !a.ending && s.alive.peers[from].mayBeDelayed() {
		s.askIfWaiting(now, key, &g.requests[i])
	}
	s.releaseIfComplete(now, key, g)
	return nil
}

// isForeignStart reports whether the request of a C++ StepMesh process must be released at once. That is so if the
// process has replaced another one, and the request is that of its StartPS. If the other nodes have not passed that
// barrier yet, the request counts there.
func (s *barriers) isForeignStart(now time.Duration, from int, msg *van.Meta) bool {
	st := s.foreignStarts[from]
	if st == nil {
		return false
	}
	others := slices.ContainsFunc(s.pending.open, func(t *pendingBarrier) bool { return t.starting })
	if slices.Contains(st.counted, msg.CustomerID) || now-st.since >= foreignStartLimit && !others {
		delete(s.foreignStarts, from)
		return false
	}
	if st.counted = append(st.counted, msg.CustomerID); others {
		if len(st.counted) == s.table.idsOf(from) {
			delete(s.foreignStarts, from)
		}
		return false
	}
	st.releasedAt = now
	return true
}

// countExitedForeign counts the dead C++ StepMesh processes that are missing in g, the barrier of Finalize, if all of
// them ended within foreignExitLimit after their only request was released: that request was their Finalize. It
// reports whether g is then complete.
func (s *barriers) countExitedForeign(now time.Duration, g *barrier) bool {
	var ended []barrierRequest
	for _, ids := range s.missingNodes(finalizeKey, g) {
		id := ids[0] // in an instance barrier each id is awaited
		st := s.foreignStarts[id]
		if st == nil || len(st.counted) < s.table.idsOf(id) || s.alive.peers[id].deadSince-st.releasedAt > foreignExitLimit {
			return false
		}
		for _, customer := range st.counted {
			a := barrierRequest{id: id, left: true}
			if s.multiCustomer[id] {
				a.customer = int(customer)
			}
			ended = append(ended, a)
		}
		s.out.emit(Warning{Text: s.table.peer(id) + " has left after its first barrier, which counts as its Finalize: no process has replaced it"})
	}
	g.requests = append(g.requests, ended...)
	s.releaseIfComplete(now, finalizeKey, g)
	return true
}

// countResumed counts the resumed C++ StepMesh servers in g, the barrier of Finalize, if all other nodes have waited in
// Finalize for resumedWait. It reports whether g is then complete.
func (s *barriers) countResumed(now time.Duration, g *barrier) bool {
	missing := s.missingNodes(finalizeKey, g)
	awaited := func(ids []int) bool { return !s.resumed[ids[0]] || s.alive.isDead(ids[0]) }
	continues := func(a barrierRequest) bool { return a.unconfirmed || !a.finalize && s.table.native(a.id) }
	switch {
	case slices.ContainsFunc(missing, awaited) || slices.ContainsFunc(g.requests, continues):
		g.resumedSince = 0
		return false
	case g.resumedSince == 0:
		g.resumedSince = now
	}
	if now < g.resumedSince+resumedWait {
		return false
	}
	for _, ids := range missing { // in an instance barrier each id is awaited
		for range s.table.idsOf(ids[0]) {
			g.requests = append(g.requests, barrierRequest{id: ids[0]})
		}
		s.out.emit(Warning{Text: s.table.peer(ids[0]) + " counts as waiting in Finalize, like all others: the earlier scheduler received its request"})
	}
	s.releaseIfComplete(now, finalizeKey, g)
	return true
}

// newBarrier makes a barrier without requests.
func (s *barriers) newBarrier(now time.Duration) *barrier {
	return &barrier{openedAt: now, nextNotice: now + min(s.cfg.ReportEvery, firstMissingNotice)}
}

// releaseIfComplete releases a barrier when enough requests count.
func (s *barriers) releaseIfComplete(now time.Duration, key barrierKey, g *barrier) {
	if g.countedRequests() < s.cfg.expected(key.group, key.instance) {
		g.failureSent = false
		s.recheck(now)
		return
	}
	delete(s.open, key)
	s.released[key] = true // used for instance barriers only
	kept := s.carryOver(now, key, g)
	last := key == finalizeKey && s.pending.finalizing() && slices.ContainsFunc(g.requests, func(a barrierRequest) bool {
		return a.id == van.SchedulerID && (a.finalize || !s.table.native(a.id))
	})
	to := make([]int, 0, len(g.requests))
	if key.instance {
		to = s.table.Members(key.group)
	} else {
		for _, a := range g.requests {
			to = append(to, a.id)
		}
	}
	for _, id := range to {
		request := uint64(0)
		if i := slices.IndexFunc(g.requests, func(a barrierRequest) bool { return a.id == id }); i >= 0 && s.table.native(id) {
			s.setOutcome(id, key, barrierOutcome{stamp: g.requests[i].stamp, at: g.requests[i].at})
			request = requestKey(g.requests[i].stamp)
		}
		if !s.alive.isDead(id) && !kept[id] && !(last && id == van.SchedulerID) {
			s.out.release(id, key.instance, g.app, g.customer, request)
		}
	}
	if last {
		s.pending.Leaving(now) // the others leave when they have received the release
		s.departure.start(now, key, g.requests)
	}
	if len(kept) > 0 { // the nodes that are missing now may all be dead
		s.recheck(now)
	}
}

// carryOver moves the requests of Finalize out of g, which is complete, to the next barrier, if another node is known
// to call one: a node in Finalize takes part in the barriers that the others call before theirs, as if it had called
// these too. It returns the ids of the moved requests.
func (s *barriers) carryOver(now time.Duration, key barrierKey, g *barrier) (kept map[int]bool) {
	continues := func(a barrierRequest) bool { return !a.finalize && s.table.native(a.id) }
	if key != finalizeKey || !slices.ContainsFunc(g.requests, continues) {
		return nil
	}
	kept = map[int]bool{}
	next := s.newBarrier(now)
	g.requests = slices.DeleteFunc(g.requests, func(a barrierRequest) bool {
		if a.finalize {
			kept[a.id] = true
			next.requests = append(next.requests, a)
		}
		return a.finalize
	})
	if len(kept) > 0 {
		s.open[key] = next
	}
	return kept
}

// countedRequests returns the number of requests that count.
func (g *barrier) countedRequests() (n int) {
	for i := range g.requests {
		if !g.requests[i].unconfirmed {
			n++
		}
	}
	return n
}

// askIfWaiting asks a node whether it still waits for request a, which does not count until the node confirms it. The
// request may have been delayed for as long as the node was silent, and a cancellation may follow it. Requests at the
// end of a program are never canceled.
func (s *barriers) askIfWaiting(now time.Duration, key barrierKey, a *barrierRequest) {
	a.unconfirmed, a.askedAt = true, now
	s.out.notifyAbout(a.id, notice{verb: verbWhether, group: key.group, instance: key.instance}, requestKey(a.stamp))
}

// confirmWaiting handles the answer of a node that still waits.
func (s *barriers) confirmWaiting(now time.Duration, from int, msg *van.Meta, n notice) error {
	key := barrierKey{n.group, n.instance}
	g, h := s.open[key], s.alive.peers[from]
	switch {
	case s.life.phase != ready || h == nil || !s.table.native(from):
		return s.table.bad(from, msg, "sender", from, "a node of this cluster and of this library")
	case g == nil: // over meanwhile
		return nil
	}
	i := slices.IndexFunc(g.requests, func(a barrierRequest) bool { return a.id == from && a.unconfirmed && requestKey(a.stamp) == msg.Key })
	switch {
	case i < 0:
	case h.gap > g.requests[i].askedAt: // the answer may have been delayed, too
		s.askIfWaiting(now, key, &g.requests[i])
	default:
		g.requests[i].unconfirmed = false
		h.confirmed = max(h.confirmed, g.requests[i].askedAt)
		s.releaseIfComplete(now, key, g)
	}
	return nil
}

// alreadyReleased reports whether a request is for a start-up barrier that the others passed before its process
// registered.
func (s *barriers) alreadyReleased(from int, key barrierKey, msg *van.Meta) bool {
	return msg.Key == startRequest && from != van.SchedulerID && s.table.native(from) && s.table.record(from).IsRecovery &&
		(s.released[key] || s.life.recovered)
}

func (s *barriers) setOutcome(id int, key barrierKey, a barrierOutcome) {
	if s.outcomes[id] == nil {
		s.outcomes[id] = map[barrierKey]barrierOutcome{}
	}
	s.outcomes[id][key] = a
}

// repeatOutcome reports whether a request of a node of this library belongs to a barrier that is over, and repeats
// the outcome if it is the latest.
func (s *barriers) repeatOutcome(now time.Duration, from int, key barrierKey, stamp int32) bool {
	last, ok := s.outcomes[from][key]
	if !ok || newer(stamp, last.stamp) || stamp != last.stamp && now-last.at > maxLateness {
		return false
	}
	switch {
	case stamp != last.stamp || last.canceled:
	case last.failed != "":
		s.sendFailure(from, key, last)
	default:
		s.releaseAgain(from, key, last)
	}
	return true
}

// releaseConfirmed handles the notice of a node that a barrier at the end of a program is over there.
func (s *barriers) releaseConfirmed(from int, msg *van.Meta, n notice) error {
	if s.life.phase != ready || !s.table.has(from) || !s.table.native(from) {
		return s.table.bad(from, msg, "sender", from, "a node of this cluster and of this library")
	}
	key := barrierKey{n.group, n.instance}
	if g := s.open[key]; g != nil {
		for i := range g.requests {
			a := &g.requests[i]
			a.left = a.left || a.id == from && requestKey(a.stamp) == msg.Key
		}
	}
	s.departure.confirmed(from, key, msg.Key)
	return nil
}

// cancelRequest removes a canceled request. If the request itself arrives later, repeated or overtaken by the notice,
// it is not counted either.
func (s *barriers) cancelRequest(now time.Duration, from int, msg *van.Meta, n notice) error {
	switch {
	case s.life.phase != ready || from != van.SchedulerID && (!s.table.has(from) || !s.table.native(from)):
		return s.table.bad(from, msg, "sender", from, "a node of this cluster and of this library")
	case msg.Key < 1 || msg.Key > math.MaxInt32+1:
		return s.table.bad(from, msg, "key", msg.Key, "1 to 2147483648: the name of a request")
	}
	key, stamp := barrierKey{n.group, n.instance}, int32(msg.Key-1)
	if last, ok := s.outcomes[from][key]; !ok || newer(stamp, last.stamp) {
		s.setOutcome(from, key, barrierOutcome{stamp: stamp, at: now, canceled: true})
	}
	if g := s.open[key]; g != nil {
		if i := slices.IndexFunc(g.requests, func(a barrierRequest) bool { return a.id == from && a.stamp == stamp }); i >= 0 {
			if from != van.SchedulerID { // its own error says it
				s.out.emit(Warning{Text: s.table.peer(from) + " no longer waits: " + s.missingText(key, g)})
			}
			s.setOutcome(from, key, barrierOutcome{stamp: stamp, at: g.requests[i].at, canceled: true})
			g.requests = slices.Delete(g.requests, i, i+1)
		}
		s.recheck(now)
	}
	return nil
}

// releaseAgain repeats the release of a request.
func (s *barriers) releaseAgain(id int, key barrierKey, a barrierOutcome) {
	s.setOutcome(id, key, a)
	s.out.release(id, key.instance, 0, 0, requestKey(a.stamp))
}

// replaced removes the requests of the earlier process of id.
func (s *barriers) replaced(now time.Duration, id int) {
	for _, g := range s.open {
		g.requests = slices.DeleteFunc(g.requests, func(a barrierRequest) bool { return a.id == id })
		g.resumedSince = 0
	}
	s.dropEmpty()
	delete(s.outcomes, id)
	delete(s.foreignStarts, id)
	delete(s.resumed, id)
	if !s.table.native(id) {
		s.foreignStarts[id] = &foreignStart{since: now}
	}
}

func (s *barriers) dropEmpty() {
	maps.DeleteFunc(s.open, func(_ barrierKey, g *barrier) bool { return len(g.requests) == 0 })
}

// recheck finds the barriers at which only dead nodes are missing. Such a barrier fails
//  1. after Config.ReplaceTimeout without a replacement process;
//  2. at once, unless it is at the end of a program, if all the dead nodes were silent while the barrier was open: it has
//     waited for their heartbeats. A node whose connection broke before is waited for, though it is later silent, too;
//  3. at once if a missing node already waits at the end of its program.
//
// While a live member is missing the barrier does not fail: some nodes wait in the barrier of Finalize from the
// beginning, and must not end the work of the others.
func (s *barriers) recheck(now time.Duration) {
	for _, key := range sortedKeys(s.open) {
		g := s.open[key]
		for s.recheckOne(now, key, g) { // again for the requests that stay: the other members may be dead as well
		}
	}
	s.dropEmpty()
}

// nodesInFinalize names the nodes that will not take part in a barrier, since they wait at the end of their programs.
// A node in stop() or Finalize takes part in instance barriers over all nodes only. The result is "" if there are no
// such nodes, or the barrier has failed.
func (s *barriers) nodesInFinalize(key barrierKey, g *barrier) string {
	end := s.open[finalizeKey]
	if key == finalizeKey || end == nil || g.failureSent {
		return ""
	}
	ends := func(id int) bool {
		return slices.ContainsFunc(end.requests, func(a barrierRequest) bool { return a.id == id && a.ending && !a.left })
	}
	if !key.instance {
		// Requests of any members complete a group barrier, as C++ StepMesh counts, even several of one group.
		left := 0
		for _, id := range s.table.Members(key.group) {
			if !ends(id) && !slices.ContainsFunc(g.requests, func(a barrierRequest) bool { return a.id == id }) {
				left++
			}
		}
		if g.countedRequests()+left >= s.cfg.expected(key.group, false) {
			return ""
		}
	}
	var names []string
	for _, ids := range s.missingNodes(key, g) {
		some := slices.ContainsFunc(ids, ends)
		if some && !slices.ContainsFunc(ids, func(id int) bool { return !ends(id) && !s.alive.isDead(id) }) {
			names = append(names, s.table.peer(ids[0]))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return list(names) + ": in stop() or Finalize, where a node takes part in no other barrier"
}

// recheckOne is recheck of one barrier. It reports whether the barrier has failed, but not for all.
func (s *barriers) recheckOne(now time.Duration, key barrierKey, g *barrier) (some bool) {
	if text := s.nodesInFinalize(key, g); text != "" {
		return s.fail(key, g, text)
	}
	if key == finalizeKey && len(s.resumed) > 0 && s.countResumed(now, g) {
		return false
	}
	dead, fell, living := "", false, false
	for _, ids := range s.missingNodes(key, g) {
		if slices.ContainsFunc(ids, func(id int) bool { return !s.alive.isDead(id) }) {
			living = true
			continue
		}
		for _, id := range ids {
			h := s.alive.peers[id]
			fell = fell || h.connBroke || h.deadFor&silent == 0 || g.openedAt > h.deadSince
			dead += fmt.Sprintf("; %s is dead: %s", s.table.peer(id), h.cause)
		}
	}
	if dead == "" || living && !failpoint.On("barrier-death") {
		g.onlyDeadMissing, g.failureSent = false, false
		return false
	}
	if !g.onlyDeadMissing {
		g.onlyDeadMissing, g.stuckSince = true, now
	}
	wait := s.cfg.ReplaceTimeout
	if !fell && !slices.ContainsFunc(g.requests, func(a barrierRequest) bool { return a.ending }) {
		wait = 0
	}
	if g.failureSent || now-g.stuckSince < wait && !failpoint.On("barrier-death") {
		return false
	}
	if key == finalizeKey && s.countExitedForeign(now, g) {
		return false
	}
	return s.fail(key, g, strings.TrimPrefix(dead, "; "))
}

// fail notifies the waiting nodes of this library that a barrier cannot complete, and removes their requests.
// Requests of C++ StepMesh nodes stay: these nodes cannot be notified, and do not repeat them. Requests of Finalize
// stay if they counted for another barrier of other nodes; some reports that.
func (s *barriers) fail(key barrierKey, g *barrier, text string) (some bool) {
	some = key == finalizeKey && slices.ContainsFunc(g.requests, func(a barrierRequest) bool { return !a.ending && s.table.native(a.id) })
	g.failureSent, g.onlyDeadMissing = !some, !some
	var told []barrierRequest
	g.requests = slices.DeleteFunc(g.requests, func(a barrierRequest) bool {
		if a.id != van.SchedulerID && !s.table.native(a.id) && !failpoint.On("foreign-barrier") {
			return false
		}
		if some && a.finalize {
			return false
		}
		told = append(told, a)
		return true
	})
	if len(g.requests) == 0 {
		delete(s.open, key)
	}
	for _, a := range told {
		if a.id != van.SchedulerID && !s.alive.isDead(a.id) {
			failed := barrierOutcome{stamp: a.stamp, at: a.at, failed: text}
			s.setOutcome(a.id, key, failed)
			s.sendFailure(a.id, key, failed)
		}
	}
	for _, a := range told { // the scheduler last: it may leave then
		if a.id == van.SchedulerID {
			s.pending.failedByScheduler(failedNotice(key, text), requestKey(a.stamp))
		}
	}
	return some && len(g.requests) > 0
}

func failedNotice(key barrierKey, text string) notice {
	return notice{verb: verbBarrier, group: key.group, instance: key.instance, text: text}
}

// sendFailure notifies a node of this library that its barrier cannot complete.
func (s *barriers) sendFailure(id int, key barrierKey, a barrierOutcome) {
	s.out.notifyAbout(id, failedNotice(key, a.failed), requestKey(a.stamp))
}

// tick also sends the names of missing nodes to the nodes that wait for a barrier. These put them into their error if
// they time out.
func (s *barriers) tick(now time.Duration) {
	if now < s.next() {
		return
	}
	s.departure.tick(now)
	s.recheck(now)
	for _, key := range sortedKeys(s.open) {
		g := s.open[key]
		if now < g.nextNotice {
			continue
		}
		for g.nextNotice <= now {
			g.nextNotice += s.cfg.ReportEvery
		}
		text := ""
		for _, a := range g.requests {
			switch {
			case !s.isNotified(a) || s.alive.isDead(a.id):
			case a.unconfirmed: // the question may be lost
				s.askIfWaiting(a.askedAt, key, &a)
			default:
				if text == "" {
					text = s.withReasons(s.missingText(key, g))
				}
				s.out.notifyAbout(a.id, notice{verb: verbWaiting, text: text}, requestKey(a.stamp))
			}
		}
	}
}

func (s *barriers) isNotified(a barrierRequest) bool {
	return a.id != van.SchedulerID && s.table.native(a.id)
}

func (s *barriers) next() time.Duration {
	next := s.departure.next()
	for _, g := range s.open {
		if g.onlyDeadMissing && !g.failureSent {
			next = min(next, g.stuckSince+s.cfg.ReplaceTimeout)
		}
		if g.resumedSince != 0 {
			next = min(next, g.resumedSince+resumedWait)
		}
		if slices.ContainsFunc(g.requests, s.isNotified) {
			next = min(next, g.nextNotice)
		}
	}
	return next
}

func sortedKeys[V any](m map[barrierKey]V) []barrierKey {
	return slices.SortedFunc(maps.Keys(m), func(a, b barrierKey) int {
		return cmp.Or(cmp.Compare(a.group, b.group), strings.Compare(kindName(a.instance), kindName(b.instance)))
	})
}

// missingOfAll lists the missing nodes of all open barriers.
func (s *barriers) missingOfAll() string {
	var parts []string
	for _, key := range sortedKeys(s.open) {
		parts = append(parts, s.missingText(key, s.open[key]))
	}
	if t := s.departure.waitingFor(); t != "" {
		parts = append(parts, t)
	}
	return strings.Join(parts, "; ")
}

// withReasons appends to the text about missing nodes the reasons why registered nodes cannot be reached, three at most.
// Such a node has no table, so barriers wait for it.
func (s *barriers) withReasons(missing string) string {
	reasons := s.probes.unreached()
	if more := len(reasons) - 3; more > 0 {
		reasons = append(reasons[:3], fmt.Sprintf("and %d more nodes", more))
	}
	if missing != "" {
		reasons = append([]string{missing}, reasons...)
	}
	return strings.Join(reasons, "; ")
}

// mayDelayScheduler reports whether a worker waits in the barrier at the end of programs, or a dead node may delay
// that barrier.
func (s *barriers) mayDelayScheduler() bool {
	g := s.open[finalizeKey]
	return g != nil && (slices.ContainsFunc(g.requests, func(a barrierRequest) bool { return van.RoleOf(a.id) == van.Worker }) ||
		slices.ContainsFunc(s.table.Members(van.AllNodes), s.alive.isDead))
}

func (s *barriers) missingText(key barrierKey, g *barrier) string {
	var missing []string
	for _, ids := range s.missingNodes(key, g) {
		for _, id := range ids {
			missing = append(missing, s.table.peer(id))
		}
	}
	return fmt.Sprintf("%s barrier over %s: %d of %d requests, not from %s", kindName(key.instance),
		groupName(key.group), g.countedRequests(), s.cfg.expected(key.group, key.instance), list(missing))
}

// missingNodes lists the nodes whose requests are missing. Each element is one node, or, for a group barrier, the
// instances of one group, one of which must send a request.
func (s *barriers) missingNodes(key barrierKey, g *barrier) (all [][]int) {
	size := s.cfg.GroupSize
	if key.instance {
		size = 1
	}
	for _, id := range s.table.Members(key.group) {
		if n := len(all); n > 0 && van.RoleOf(all[n-1][0]) == van.RoleOf(id) && van.RankOf(all[n-1][0])/size == van.RankOf(id)/size {
			all[n-1] = append(all[n-1], id)
		} else {
			all = append(all, []int{id})
		}
	}
	came := map[int]int{}
	for _, a := range g.requests {
		if !a.unconfirmed {
			came[a.id]++
		}
	}
	return slices.DeleteFunc(all, func(ids []int) bool {
		return slices.ContainsFunc(ids, func(id int) bool { return came[id] >= s.table.idsOf(id) })
	})
}
