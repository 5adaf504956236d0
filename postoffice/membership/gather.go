package membership

// The barriers of the cluster, on the scheduler: counting requests, releasing or failing
// barriers, and telling waiting nodes which others are missing.

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

type gathers struct {
	base
	calls    *tickets // the scheduler's own
	leaves   departure
	open     map[gatherKey]*gather
	answers  map[int]map[gatherKey]answer // to each node
	several  map[int]bool                 // ids of processes that registered several customers
	starting map[int]*originalStart       // by id
	// Instance barriers that have been released: of those of start-up, processes that replace others
	// are released at once.
	passed map[gatherKey]bool
}

// originalStart describes a C++ StepMesh process that has replaced another one. If its program calls StartPS with its barrier,
// the process sends a request that is identical to the one of Finalize. The scheduler must not count that request for the barrier of
// Finalize, where others may wait already.
type originalStart struct {
	since  time.Duration // the time at which the scheduler sent it the node table
	asked  []int32       // the customers whose first request was counted for the barrier of StartPS
	passed time.Duration // the time at which the process alone was released from that barrier; 0: it was not
}

const (
	// startOfOriginal is the longest time from the node table to the request of StartPS; the process connects to all nodes in
	// between. A later first request is that of Finalize: the program called StartPS without its barrier.
	startOfOriginal = 10 * time.Second
	// endOfOriginal is the longest life of a process after its Finalize has ended. If a process ends within that time after its
	// first request was counted for StartPS, the request was that of Finalize.
	endOfOriginal = 5 * time.Second
)

// firstNews is after how long those who wait for a barrier are first told who is missing. It is not
// longer than the shortest limit that can be set (STEPAF_STOP_TIMEOUT).
const firstNews = 900 * time.Millisecond

type gatherKey struct {
	group    int
	instance bool
}

// finalKey is the barrier of Finalize, and of what comes before it.
var finalKey = gatherKey{van.AllNodes, true}

// gather is a barrier that was requested and is not complete.
type gather struct {
	came []arrival
	// stuck: since the time in since, only dead nodes are missing. After
	// Config.ReplaceTimeout the barrier fails and told is set: the nodes that can be told
	// have been told, once.
	stuck, told bool
	since       time.Duration
	begun       time.Duration // when the first request came
	// Of the last request: a release to a C++ StepMesh node has them.
	app, customer int32
	// nextNews is when the waiting nodes are told next which nodes are missing.
	nextNews time.Duration
}

// arrival is one counted request. customer is 0 unless several customers of one
// process registered, each of which is counted. stamp is the timestamp of the request,
// by which a release names it to nodes of this library.
type arrival struct {
	id, customer int
	stamp        int32
	final        bool // at the end of a program
	last         bool // as Finalize's: its node leaves then
	// unsure: the request may have been on its way for long, and given up meanwhile. The node was
	// asked, first at that time, whether it still waits. Until it says so the request does not count.
	unsure bool
	asked  time.Duration
	gone   bool // it has canceled the barrier of Finalize, or is known to have left: it needs no release
}

// answer is the last release for a node of this library, or the notice that the barrier has failed.
// A node that was down, or whose connection broke when it was sent, may not have it: it repeats its
// request when it is back. That is not counted for the next barrier.
type answer struct {
	stamp     int32
	withdrawn bool   // not released: the node has given the request up
	failed    string // not released: the reason that the node was told
}

// request counts a request and releases the barrier when it is complete.
func (s *gathers) request(now time.Duration, from int, msg *van.Meta) error {
	group, instance := msg.Control.BarrierGroup, msg.Control.Cmd == van.InstanceBarrier
	switch {
	case s.life.phase != ready || !s.table.has(from) && from != van.SchedulerID:
		return s.table.bad(from, msg, "sender", from, "the id of a node of this cluster")
	case group < 1 || group > van.AllNodes:
		return s.table.bad(from, msg, "control.barrier_group", group, "1 to 7")
	}
	key := gatherKey{group, instance}
	a := arrival{id: from, stamp: msg.Timestamp}
	if s.table.native(from) {
		a.last = msg.Key == finalRequest
		a.final = a.last || msg.Key == stopRequest
	}
	if s.several[from] {
		a.customer = int(msg.CustomerID)
	}
	if instance && group == van.AllNodes && s.starts(now, from, msg) {
		s.out.release(from, instance, msg.AppID, msg.CustomerID, 0)
		return nil
	}
	g := s.open[key]
	if g == nil {
		g = s.begin(now)
		s.open[key] = g
	}
	same := func(o arrival) bool { return o.id == a.id && o.customer == a.customer }
	i := slices.IndexFunc(g.came, same)
	switch {
	case s.table.native(from) && s.answered(from, key, a.stamp):
		s.dropEmpty()
		return nil
	case s.passes(from, key, msg):
		s.again(from, key, a.stamp)
		s.dropEmpty()
		return nil
	case i >= 0 && g.came[i].stamp == a.stamp && s.table.native(from): // repeated
		if a := &g.came[i]; a.unsure { // the question, or its answer, may be lost
			s.askWhether(a.asked, key, a)
		}
		return nil
	case i >= 0 && s.table.native(from) && !newer(a.stamp, g.came[i].stamp): // given up, and overtaken by the next one
		return nil
	case i >= 0 && (instance || s.table.native(from)): // given up and requested anew
		g.came[i] = a
	default:
		i = len(g.came)
		g.came = append(g.came, a)
	}
	g.app, g.customer = msg.AppID, msg.CustomerID
	if s.table.native(from) && !a.final && s.alive.peers[from].doubtful() {
		s.askWhether(now, key, &g.came[i])
	}
	s.complete(now, key, g)
	return nil
}

// starts reports whether the request of a C++ StepMesh process is to be released at once. That is so if the process has replaced
// another one, and the request is that of its StartPS. If the others have not passed that barrier yet, the request counts there.
func (s *gathers) starts(now time.Duration, from int, msg *van.Meta) bool {
	st := s.starting[from]
	if st == nil {
		return false
	}
	others := slices.ContainsFunc(s.calls.open, func(t *ticket) bool { return t.starting })
	if slices.Contains(st.asked, msg.CustomerID) || now-st.since >= startOfOriginal && !others {
		delete(s.starting, from)
		return false
	}
	if st.asked = append(st.asked, msg.CustomerID); others {
		if len(st.asked) == s.table.places(from) {
			delete(s.starting, from)
		}
		return false
	}
	st.passed = now
	return true
}

// count counts the dead C++ StepMesh processes that are missing in g, the barrier of Finalize, if all of them ended within endOfOriginal
// after their only request was released: that request was their Finalize. It reports whether g is then complete.
func (s *gathers) count(now time.Duration, g *gather) bool {
	var ended []arrival
	for _, ids := range s.awaited(finalKey, g) {
		id := ids[0] // in an instance barrier each id is awaited
		st := s.starting[id]
		if st == nil || len(st.asked) < s.table.places(id) || s.alive.peers[id].since-st.passed > endOfOriginal {
			return false
		}
		for _, customer := range st.asked {
			a := arrival{id: id, gone: true}
			if s.several[id] {
				a.customer = int(customer)
			}
			ended = append(ended, a)
		}
		s.out.emit(Warning{Text: s.table.peer(id) + " has left after its first barrier, which counts as its Finalize: no other process has taken its place"})
	}
	g.came = append(g.came, ended...)
	s.complete(now, finalKey, g)
	return true
}

// begin makes a barrier without requests.
func (s *gathers) begin(now time.Duration) *gather {
	return &gather{begun: now, nextNews: now + min(s.cfg.ReportEvery, firstNews)}
}

// complete releases a barrier when enough requests count.
func (s *gathers) complete(now time.Duration, key gatherKey, g *gather) {
	if g.counted() < s.cfg.expected(key.group, key.instance) {
		g.told = false
		s.recheck(now)
		return
	}
	delete(s.open, key)
	s.passed[key] = true // of use for instance barriers
	kept := s.keep(now, key, g)
	last := key == finalKey && s.calls.finalizing() && slices.ContainsFunc(g.came, func(a arrival) bool {
		return a.id == van.SchedulerID && (a.last || !s.table.native(a.id))
	})
	to := make([]int, 0, len(g.came))
	if key.instance {
		to = s.table.Members(key.group)
	} else {
		for _, a := range g.came {
			to = append(to, a.id)
		}
	}
	for _, id := range to {
		request := uint64(0)
		if i := slices.IndexFunc(g.came, func(a arrival) bool { return a.id == id }); i >= 0 && s.table.native(id) {
			s.note(id, key, answer{stamp: g.came[i].stamp})
			request = named(g.came[i].stamp)
		}
		if !s.alive.isDown(id) && !kept[id] && !(last && id == van.SchedulerID) {
			s.out.release(id, key.instance, g.app, g.customer, request)
		}
	}
	if last {
		s.calls.Leaving(now) // the others leave when they have the release
		s.leaves.begin(now, key, g.came)
	}
	if len(kept) > 0 { // those who are missing now may all be dead
		s.recheck(now)
	}
}

// keep takes the requests of Finalize out of g, which is complete, for the next barrier, if somebody is known to come to
// another one: whoever has called Finalize takes part in what the others call before it, as if it had called that too.
// It returns whose they are.
func (s *gathers) keep(now time.Duration, key gatherKey, g *gather) (kept map[int]bool) {
	goesOn := func(a arrival) bool { return !a.last && s.table.native(a.id) }
	if key != finalKey || !slices.ContainsFunc(g.came, goesOn) {
		return nil
	}
	kept = map[int]bool{}
	next := s.begin(now)
	g.came = slices.DeleteFunc(g.came, func(a arrival) bool {
		if a.last {
			kept[a.id] = true
			next.came = append(next.came, a)
		}
		return a.last
	})
	if len(kept) > 0 {
		s.open[key] = next
	}
	return kept
}

// counted returns how many requests count.
func (g *gather) counted() (n int) {
	for i := range g.came {
		if !g.came[i].unsure {
			n++
		}
	}
	return n
}

// askWhether asks a node whether it still waits for what it requested with a, which does not count
// until then: it may have been held up as long as nothing came from that node, and the word that it
// was given up comes after it. What ends a program is never given up.
func (s *gathers) askWhether(now time.Duration, key gatherKey, a *arrival) {
	a.unsure, a.asked = true, now
	s.out.tellAbout(a.id, notice{verb: verbWhether, group: key.group, instance: key.instance}, named(a.stamp))
}

// stillWaits handles the answer of a node that still waits.
func (s *gathers) stillWaits(now time.Duration, from int, msg *van.Meta, n notice) error {
	key := gatherKey{n.group, n.instance}
	g, h := s.open[key], s.alive.peers[from]
	switch {
	case s.life.phase != ready || h == nil || !s.table.native(from):
		return s.table.bad(from, msg, "sender", from, "a node of this cluster and of this library")
	case g == nil: // over meanwhile
		return nil
	}
	i := slices.IndexFunc(g.came, func(a arrival) bool { return a.id == from && a.unsure && named(a.stamp) == msg.Key })
	switch {
	case i < 0:
	case h.gap > g.came[i].asked: // the answer may have been held up, too
		s.askWhether(now, key, &g.came[i])
	default:
		g.came[i].unsure = false
		h.sure = max(h.sure, g.came[i].asked)
		s.complete(now, key, g)
	}
	return nil
}

// passes tells whether a request is for a barrier of start-up that the others have passed before its
// process came.
func (s *gathers) passes(from int, key gatherKey, msg *van.Meta) bool {
	return msg.Key == startRequest && from != van.SchedulerID && s.table.native(from) && s.table.record(from).IsRecovery &&
		(s.passed[key] || s.life.recovered)
}

func (s *gathers) note(id int, key gatherKey, a answer) {
	if s.answers[id] == nil {
		s.answers[id] = map[gatherKey]answer{}
	}
	s.answers[id][key] = a
}

// answered tells whether a request of a node of this library belongs to a barrier that
// is over, and repeats the release if it is the last one.
func (s *gathers) answered(from int, key gatherKey, stamp int32) bool {
	last, ok := s.answers[from][key]
	if !ok || newer(stamp, last.stamp) {
		return false
	}
	switch {
	case stamp != last.stamp || last.withdrawn:
	case last.failed != "":
		s.tellFailed(from, key, last)
	default:
		s.again(from, key, last.stamp)
	}
	return true
}

// released handles the word of a node that a barrier which ends a program is over there.
func (s *gathers) released(from int, msg *van.Meta, n notice) error {
	if s.life.phase != ready || !s.table.has(from) || !s.table.native(from) {
		return s.table.bad(from, msg, "sender", from, "a node of this cluster and of this library")
	}
	key := gatherKey{n.group, n.instance}
	if g := s.open[key]; g != nil {
		for i := range g.came {
			a := &g.came[i]
			a.gone = a.gone || a.id == from && named(a.stamp) == msg.Key
		}
	}
	s.leaves.heard(from, key, msg.Key)
	return nil
}

// withdraw removes a request that was given up. If the request itself arrives later,
// repeated or overtaken by the notice, it is not counted either.
func (s *gathers) withdraw(now time.Duration, from int, msg *van.Meta, n notice) error {
	switch {
	case s.life.phase != ready || from != van.SchedulerID && (!s.table.has(from) || !s.table.native(from)):
		return s.table.bad(from, msg, "sender", from, "a node of this cluster and of this library")
	case msg.Key < 1 || msg.Key > math.MaxInt32+1:
		return s.table.bad(from, msg, "key", msg.Key, "1 to 2147483648: the name of a request")
	}
	key, stamp := gatherKey{n.group, n.instance}, int32(msg.Key-1)
	if last, ok := s.answers[from][key]; !ok || newer(stamp, last.stamp) {
		s.note(from, key, answer{stamp: stamp, withdrawn: true})
	}
	if g := s.open[key]; g != nil {
		if i := slices.IndexFunc(g.came, func(a arrival) bool { return a.id == from && a.stamp == stamp }); i >= 0 {
			if from != van.SchedulerID { // whose own error says it
				s.out.emit(Warning{Text: s.table.peer(from) + " no longer waits: " + s.missing(key, g)})
			}
			g.came = slices.Delete(g.came, i, i+1)
		}
		s.recheck(now)
	}
	return nil
}

// again repeats the release of a request.
func (s *gathers) again(id int, key gatherKey, stamp int32) {
	s.note(id, key, answer{stamp: stamp})
	s.out.release(id, key.instance, 0, 0, named(stamp))
}

// replaced removes the requests of the process that had id before.
func (s *gathers) replaced(now time.Duration, id int) {
	for _, g := range s.open {
		g.came = slices.DeleteFunc(g.came, func(a arrival) bool { return a.id == id })
	}
	s.dropEmpty()
	delete(s.answers, id)
	delete(s.starting, id)
	if !s.table.native(id) {
		s.starting[id] = &originalStart{since: now}
	}
}

func (s *gathers) dropEmpty() {
	maps.DeleteFunc(s.open, func(_ gatherKey, g *gather) bool { return len(g.came) == 0 })
}

// recheck finds the barriers at which only dead nodes are missing. Such a barrier
// fails after Config.ReplaceTimeout without a replacement; it fails at once, unless it is
// at the end of a program, if the nodes died by silence while it was open: it has waited for their
// heartbeats. One whose connection broke before is waited for, though it is silent, too, by and by.
// While a live member is missing a barrier does not fail: some nodes wait in the barrier
// of Finalize from the beginning, which must not end the work of the others. A barrier fails at once if a missing
// node already waits at the end of its program.
func (s *gathers) recheck(now time.Duration) {
	for _, key := range sortedKeys(s.open) {
		g := s.open[key]
		for s.look(now, key, g) { // for those who stay: the others may be dead as well
		}
	}
	s.dropEmpty()
}

// finished names the nodes that will not take part in a barrier, since they wait at the end of their programs. A node in stop() or
// Finalize takes part in instance barriers over all nodes only. It returns "" if there are none, or the barrier has failed.
func (s *gathers) finished(key gatherKey, g *gather) string {
	end := s.open[finalKey]
	if key == finalKey || end == nil || g.told {
		return ""
	}
	ends := func(id int) bool {
		return slices.ContainsFunc(end.came, func(a arrival) bool { return a.id == id && a.final && !a.gone })
	}
	if !key.instance {
		// Any members' requests complete a group barrier, as C++ StepMesh counts: several of one group, too.
		left := 0
		for _, id := range s.table.Members(key.group) {
			if !ends(id) && !slices.ContainsFunc(g.came, func(a arrival) bool { return a.id == id }) {
				left++
			}
		}
		if g.counted()+left >= s.cfg.expected(key.group, false) {
			return ""
		}
	}
	var names []string
	for _, ids := range s.awaited(key, g) {
		some := slices.ContainsFunc(ids, ends)
		if some && !slices.ContainsFunc(ids, func(id int) bool { return !ends(id) && !s.alive.isDown(id) }) {
			names = append(names, s.table.peer(ids[0]))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return list(names) + ": in stop() or Finalize, where a node takes part in no other barrier"
}

// look is recheck of one barrier. It tells whether that has failed, but not for all.
func (s *gathers) look(now time.Duration, key gatherKey, g *gather) (some bool) {
	if text := s.finished(key, g); text != "" {
		return s.fail(key, g, text)
	}
	dead, fell, living := "", false, false
	for _, ids := range s.awaited(key, g) {
		if slices.ContainsFunc(ids, func(id int) bool { return !s.alive.isDown(id) }) {
			living = true
			continue
		}
		for _, id := range ids {
			h := s.alive.peers[id]
			fell = fell || h.cut || h.down&silent == 0 || g.begun > h.since
			dead += fmt.Sprintf("; %s is dead: %s", s.table.peer(id), h.cause)
		}
	}
	if dead == "" || living && !failpoint.On("barrier-death") {
		g.stuck, g.told = false, false
		return false
	}
	if !g.stuck {
		g.stuck, g.since = true, now
	}
	wait := s.cfg.ReplaceTimeout
	if !fell && !slices.ContainsFunc(g.came, func(a arrival) bool { return a.final }) {
		wait = 0
	}
	if g.told || now-g.since < wait && !failpoint.On("barrier-death") {
		return false
	}
	if key == finalKey && s.count(now, g) {
		return false
	}
	return s.fail(key, g, strings.TrimPrefix(dead, "; "))
}

// fail tells the waiting nodes of this library that a barrier cannot be complete,
// and removes their requests. Requests of C++ StepMesh nodes stay: they cannot be told,
// and do not repeat them. Requests of Finalize stay if it is the barrier of others that they
// took part in, as some tells.
func (s *gathers) fail(key gatherKey, g *gather, text string) (some bool) {
	some = key == finalKey && slices.ContainsFunc(g.came, func(a arrival) bool { return !a.final && s.table.native(a.id) })
	g.told, g.stuck = !some, !some
	var told []arrival
	g.came = slices.DeleteFunc(g.came, func(a arrival) bool {
		if a.id != van.SchedulerID && !s.table.native(a.id) && !failpoint.On("foreign-barrier") {
			return false
		}
		if some && a.last {
			return false
		}
		told = append(told, a)
		return true
	})
	if len(g.came) == 0 {
		delete(s.open, key)
	}
	for _, a := range told {
		if a.id != van.SchedulerID && !s.alive.isDown(a.id) {
			failed := answer{stamp: a.stamp, failed: text}
			s.note(a.id, key, failed)
			s.tellFailed(a.id, key, failed)
		}
	}
	for _, a := range told { // the scheduler last: it may leave then
		if a.id == van.SchedulerID {
			s.calls.refused(failedNotice(key, text), named(a.stamp))
		}
	}
	return some && len(g.came) > 0
}

func failedNotice(key gatherKey, text string) notice {
	return notice{verb: verbBarrier, group: key.group, instance: key.instance, text: text}
}

// tellFailed tells a node of this library that what it has asked for cannot be complete.
func (s *gathers) tellFailed(id int, key gatherKey, a answer) {
	s.out.tellAbout(id, failedNotice(key, a.failed), named(a.stamp))
}

// tick also tells the nodes that wait for a barrier which nodes are missing: they say so in their
// error if they give up.
func (s *gathers) tick(now time.Duration) {
	if now < s.next() {
		return
	}
	s.leaves.tick(now)
	s.recheck(now)
	for _, key := range sortedKeys(s.open) {
		g := s.open[key]
		if now < g.nextNews {
			continue
		}
		for g.nextNews <= now {
			g.nextNews += s.cfg.ReportEvery
		}
		for _, a := range g.came {
			switch {
			case !s.tells(a) || s.alive.isDown(a.id):
			case a.unsure: // the question may be lost
				s.askWhether(a.asked, key, &a)
			default:
				s.out.tellAbout(a.id, notice{verb: verbWaiting, text: s.missing(key, g)}, named(a.stamp))
			}
		}
	}
}

func (s *gathers) tells(a arrival) bool {
	return a.id != van.SchedulerID && s.table.native(a.id)
}

func (s *gathers) next() time.Duration {
	next := s.leaves.next()
	for _, g := range s.open {
		if g.stuck && !g.told {
			next = min(next, g.since+s.cfg.ReplaceTimeout)
		}
		if slices.ContainsFunc(g.came, s.tells) {
			next = min(next, g.nextNews)
		}
	}
	return next
}

func sortedKeys[V any](m map[gatherKey]V) []gatherKey {
	return slices.SortedFunc(maps.Keys(m), func(a, b gatherKey) int {
		return cmp.Or(cmp.Compare(a.group, b.group), strings.Compare(kindName(a.instance), kindName(b.instance)))
	})
}

// text lists the missing nodes of all open barriers.
func (s *gathers) text() string {
	var parts []string
	for _, key := range sortedKeys(s.open) {
		parts = append(parts, s.missing(key, s.open[key]))
	}
	if t := s.leaves.text(); t != "" {
		parts = append(parts, t)
	}
	return strings.Join(parts, "; ")
}

// delayed reports whether a worker waits in the barrier at the end of programs, or a dead node may delay that barrier.
func (s *gathers) delayed() bool {
	g := s.open[finalKey]
	return g != nil && (slices.ContainsFunc(g.came, func(a arrival) bool { return van.RoleOf(a.id) == van.Worker }) ||
		slices.ContainsFunc(s.table.Members(van.AllNodes), s.alive.isDown))
}

func (s *gathers) missing(key gatherKey, g *gather) string {
	var missing []string
	for _, ids := range s.awaited(key, g) {
		for _, id := range ids {
			missing = append(missing, s.table.peer(id))
		}
	}
	return fmt.Sprintf("%s barrier over %s: %d of %d requests, not from %s", kindName(key.instance),
		groupName(key.group), g.counted(), s.cfg.expected(key.group, key.instance), list(missing))
}

// awaited lists whose requests have yet to come. Each element is one node, or, for a group barrier,
// the instances of one group, one of which is to ask.
func (s *gathers) awaited(key gatherKey, g *gather) (all [][]int) {
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
	for _, a := range g.came {
		if !a.unsure {
			came[a.id]++
		}
	}
	return slices.DeleteFunc(all, func(ids []int) bool {
		return slices.ContainsFunc(ids, func(id int) bool { return came[id] >= s.table.places(id) })
	})
}
