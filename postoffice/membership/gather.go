package membership

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

// The scheduler's side of barriers: counting requests, releasing or failing barriers, and
// telling waiting nodes which others are missing.

type gatherKey struct {
	group    int
	instance bool
}

// gather is a barrier that was requested and is not complete.
type gather struct {
	came []arrival
	// stuck: since the time in since, only dead nodes are missing. After
	// Config.ReplaceTimeout the barrier fails and told is set: the nodes that can be told
	// have been told, once.
	stuck, told bool
	since       time.Duration
	// nextNews is when the waiting nodes are told next which nodes are missing.
	nextNews time.Duration
}

// arrival is one counted request. customer is 0 unless several customers of one
// process registered, each of which is counted. stamp is the timestamp of the request,
// by which a release names it to nodes of this library.
type arrival struct {
	id, customer int
	stamp        int32
	final        bool // at the end of a program; such a request may wait as long as the program runs
}

// finalRequest is the key of a request for a barrier that ends a program. Only a scheduler
// of this library reads it.
const finalRequest = 1

// answer is the last release that was sent to a node of this library for a barrier, or the
// notice that it has failed. A repeated request with that timestamp is not counted for the
// next barrier.
type answer struct {
	stamp     int32
	owed      bool   // not sent: the node was down
	withdrawn bool   // not released: the node has given the request up
	failed    string // not released: the reason that the node was told
}

// stepRequest counts a request and releases the barrier when it is complete.
func (m *Machine) stepRequest(now time.Duration, from int, msg *van.Meta) error {
	group, instance := msg.Control.BarrierGroup, msg.Control.Cmd == van.InstanceBarrier
	switch _, known := m.table.at[from]; {
	case m.sched == nil:
		return m.table.bad(from, msg, "request", true, "false: only the scheduler counts barriers")
	case m.life.phase != ready || !known && from != van.SchedulerID:
		return m.table.bad(from, msg, "sender", from, "the id of a node of this cluster")
	case group < 1 || group > van.AllNodes:
		return m.table.bad(from, msg, "control.barrier_group", group, "1 to 7")
	}
	key := gatherKey{group, instance}
	a := arrival{id: from, stamp: msg.Timestamp, final: m.table.native(from) && msg.Key == finalRequest}
	if m.sched.several[from] {
		a.customer = int(msg.CustomerID)
	}
	if asked, starts := m.sched.starting[from]; starts && instance && group == van.AllNodes && !slices.Contains(asked, msg.CustomerID) {
		if asked = append(asked, msg.CustomerID); len(asked) < m.table.places(from) {
			m.sched.starting[from] = asked
		} else {
			delete(m.sched.starting, from)
		}
		if !m.isStarting() { // else it is counted there
			meta := m.out.control(van.InstanceBarrier)
			meta.AppID, meta.CustomerID = msg.AppID, msg.CustomerID
			m.out.send(from, meta)
			return nil
		}
	}
	g := m.sched.gathers[key]
	if g == nil {
		g = &gather{nextNews: now + m.cfg.ReportEvery}
		m.sched.gathers[key] = g
	}
	same := func(o arrival) bool { return o.id == a.id && o.customer == a.customer }
	switch i := slices.IndexFunc(g.came, same); {
	case m.table.native(from) && m.answered(from, key, a.stamp):
		m.dropEmpty()
		return nil
	case i >= 0 && (instance || m.table.native(from)):
		g.came[i] = a // repeated, or given up and requested anew
		return nil
	}
	g.came = append(g.came, a)
	if len(g.came) < m.cfg.expected(group, instance) {
		g.told = false
		m.recheckBarriers(now)
		return nil
	}
	delete(m.sched.gathers, key)
	to := make([]int, 0, len(g.came))
	if instance {
		to = m.table.members(group)
	} else {
		for _, a := range g.came {
			to = append(to, a.id)
		}
	}
	for _, id := range to {
		owed := m.alive.isDown(id)
		i := slices.IndexFunc(g.came, func(a arrival) bool { return a.id == id })
		if i >= 0 && m.table.native(id) {
			m.sched.note(id, key, answer{stamp: g.came[i].stamp, owed: owed})
		}
		if owed {
			continue
		}
		meta := m.out.control(msg.Control.Cmd)
		meta.AppID, meta.CustomerID = msg.AppID, msg.CustomerID
		if i >= 0 && m.table.native(id) {
			meta.Key = named(g.came[i].stamp)
		}
		m.out.send(id, meta)
	}
	if t := m.finalizing(); t != nil && instance && group == t.group {
		m.Leaving(now) // the others leave when they have the release
	}
	return nil
}

// named returns the key by which a release or a notice names the request that it answers;
// 0 names none. C++ StepMesh nodes do not read the key.
func named(stamp int32) uint64 { return uint64(uint32(stamp)) + 1 }

func (s *scheduler) note(id int, key gatherKey, a answer) {
	if s.answers[id] == nil {
		s.answers[id] = map[gatherKey]answer{}
	}
	s.answers[id][key] = a
}

// answered tells whether a request of a node of this library belongs to a barrier that
// is over, and repeats the release if it is the last one.
func (m *Machine) answered(from int, key gatherKey, stamp int32) bool {
	last, ok := m.sched.answers[from][key]
	if !ok || newer(stamp, last.stamp) {
		return false
	}
	switch {
	case stamp != last.stamp || last.withdrawn:
	case last.failed != "":
		m.tellFailed(from, key, last)
	default:
		m.release(from, key, last.stamp)
	}
	return true
}

// newer compares timestamps, which wrap at 1<<31.
func newer(a, b int32) bool { return (b-a)&math.MaxInt32 >= 1<<30 }

// stepWithdraw removes a request that was given up. If the request itself arrives later,
// repeated or overtaken by the notice, it is not counted either.
func (m *Machine) stepWithdraw(now time.Duration, from int, msg *van.Meta, n notice) error {
	switch _, known := m.table.at[from]; {
	case n.verb != verbWithdraw:
		return m.table.bad(from, msg, "sender", from, "notices come from the scheduler only")
	case m.sched == nil:
		return m.table.bad(from, msg, "body", n.verb, "a notice for others than the scheduler")
	case m.life.phase != ready || from != van.SchedulerID && (!known || !m.table.native(from)):
		return m.table.bad(from, msg, "sender", from, "a node of this cluster and of this library")
	case msg.Key < 1 || msg.Key > math.MaxInt32+1:
		return m.table.bad(from, msg, "key", msg.Key, "1 to 2147483648: the name of a request")
	}
	key, stamp := gatherKey{n.group, n.instance}, int32(msg.Key-1)
	if last, ok := m.sched.answers[from][key]; !ok || newer(stamp, last.stamp) {
		m.sched.note(from, key, answer{stamp: stamp, withdrawn: true})
	}
	if g := m.sched.gathers[key]; g != nil {
		g.came = slices.DeleteFunc(g.came, func(a arrival) bool { return a.id == from && a.stamp == stamp })
		m.recheckBarriers(now)
	}
	return nil
}

// release repeats the release of a request.
func (m *Machine) release(id int, key gatherKey, stamp int32) {
	m.sched.note(id, key, answer{stamp: stamp})
	cmd := van.Barrier
	if key.instance {
		cmd = van.InstanceBarrier
	}
	meta := m.out.control(cmd)
	meta.AppID, meta.CustomerID, meta.Key = 0, 0, named(stamp)
	m.out.send(id, meta)
}

// owedReleases sends the releases that could not be sent while id was down.
func (m *Machine) owedReleases(id int) {
	for _, key := range sortedKeys(m.sched.answers[id]) {
		if a := m.sched.answers[id][key]; a.owed {
			m.release(id, key, a.stamp)
		}
	}
}

// forget removes the requests of a process that has been replaced.
func (m *Machine) forget(id int) {
	for _, g := range m.sched.gathers {
		g.came = slices.DeleteFunc(g.came, func(a arrival) bool { return a.id == id })
	}
	m.dropEmpty()
	delete(m.sched.answers, id)
	delete(m.sched.starting, id)
}

// isStarting tells whether this node waits in the barrier of start-up.
func (m *Machine) isStarting() bool {
	return slices.ContainsFunc(m.tickets, func(t *ticket) bool { return t.starting })
}

func (m *Machine) dropEmpty() {
	maps.DeleteFunc(m.sched.gathers, func(_ gatherKey, g *gather) bool { return len(g.came) == 0 })
}

// recheckBarriers finds the barriers at which only dead nodes are missing. Such a barrier
// fails after Config.ReplaceTimeout without a replacement; it fails at once, unless it is
// at the end of a program, if the nodes died by silence: their timeout has passed already.
// While a live member is missing a barrier does not fail: some nodes wait in the barrier
// of Finalize from the beginning, which must not end the work of the others.
func (m *Machine) recheckBarriers(now time.Duration) {
	for _, key := range m.sched.openBarriers() {
		g := m.sched.gathers[key]
		possible, living := len(g.came), 0
		dead, fell := "", false
		for _, id := range m.table.members(key.group) {
			missing := m.table.places(id)
			for _, a := range g.came {
				if a.id == id {
					missing--
				}
			}
			switch {
			case missing <= 0:
			case m.alive.isDown(id):
				fell = fell || m.alive.peers[id].down&silent == 0
				dead += fmt.Sprintf("; %s is dead: %s", m.table.peer(id), m.alive.peers[id].cause)
			default:
				living += missing
			}
		}
		possible += living
		hopeless := dead != "" && possible < m.cfg.expected(key.group, key.instance)
		// A group barrier needs one instance of each group, and does not wait for the
		// other instances.
		yetToCome := living > 0 && (key.instance || m.cfg.GroupSize == 1)
		if failpoint.On("barrier-death") {
			yetToCome = false
		}
		if !hopeless || yetToCome {
			g.stuck, g.told = false, false
			continue
		}
		if !g.stuck {
			g.stuck, g.since = true, now
		}
		wait := m.cfg.ReplaceTimeout
		if !fell && !slices.ContainsFunc(g.came, func(a arrival) bool { return a.final }) {
			wait = 0
		}
		if !g.told && (now-g.since >= wait || failpoint.On("barrier-death")) {
			m.failBarrier(key, g, strings.TrimPrefix(dead, "; "))
		}
	}
	m.dropEmpty()
}

// failBarrier tells the waiting nodes of this library that a barrier cannot be complete,
// and removes their requests. Requests of C++ StepMesh nodes stay: they cannot be told,
// and do not repeat them.
func (m *Machine) failBarrier(key gatherKey, g *gather, text string) {
	g.told = true
	var told []arrival
	g.came = slices.DeleteFunc(g.came, func(a arrival) bool {
		if a.id != van.SchedulerID && !m.table.native(a.id) && !failpoint.On("foreign-barrier") {
			return false
		}
		told = append(told, a)
		return true
	})
	if len(g.came) == 0 {
		delete(m.sched.gathers, key)
	}
	for _, a := range told {
		if a.id != van.SchedulerID && !m.alive.isDown(a.id) {
			failed := answer{stamp: a.stamp, failed: text}
			m.sched.note(a.id, key, failed)
			m.tellFailed(a.id, key, failed)
		}
	}
	for _, a := range told { // the scheduler last: it may leave then
		if a.id == van.SchedulerID {
			m.barrierRefused(failedNotice(key, text), named(a.stamp))
		}
	}
}

func failedNotice(key gatherKey, text string) notice {
	return notice{verb: verbBarrier, group: key.group, instance: key.instance, text: text}
}

// tellFailed tells a node of this library that what it has asked for cannot be complete.
func (m *Machine) tellFailed(id int, key gatherKey, a answer) {
	m.out.tellAbout(id, failedNotice(key, a.failed), named(a.stamp))
}

func (m *Machine) tickBarriers(now time.Duration) {
	if m.sched == nil || now < m.nextBarrierTick() {
		return
	}
	m.recheckBarriers(now)
	for _, key := range m.sched.openBarriers() {
		if g := m.sched.gathers[key]; now >= g.nextNews {
			for g.nextNews <= now {
				g.nextNews += m.cfg.ReportEvery
			}
			m.sendMissing(key, g)
		}
	}
}

// sendMissing tells the nodes that wait for a barrier, other than one at the end of a
// program, which nodes are missing: they say so in their error if they give up.
func (m *Machine) sendMissing(key gatherKey, g *gather) {
	for _, a := range g.came {
		if a.id != van.SchedulerID && !a.final && m.table.native(a.id) && !m.alive.isDown(a.id) {
			m.out.tellAbout(a.id, notice{verb: verbWaiting, text: m.barrierText(key, g)}, named(a.stamp))
		}
	}
}

func (m *Machine) nextBarrierTick() time.Duration {
	next := time.Duration(math.MaxInt64)
	if m.sched == nil {
		return next
	}
	for _, g := range m.sched.gathers {
		if g.stuck && !g.told {
			next = min(next, g.since+m.cfg.ReplaceTimeout)
		}
		if slices.ContainsFunc(g.came, func(a arrival) bool { return !a.final && m.table.native(a.id) && a.id != van.SchedulerID }) {
			next = min(next, g.nextNews)
		}
	}
	return next
}

// openBarriers lists the requested barriers in a fixed order.
func (s *scheduler) openBarriers() []gatherKey { return sortedKeys(s.gathers) }

func sortedKeys[V any](m map[gatherKey]V) []gatherKey {
	return slices.SortedFunc(maps.Keys(m), func(a, b gatherKey) int {
		return cmp.Or(cmp.Compare(a.group, b.group), strings.Compare(kindName(a.instance), kindName(b.instance)))
	})
}

// barriersText lists the missing nodes of all open barriers.
func (m *Machine) barriersText() string {
	var parts []string
	for _, key := range m.sched.openBarriers() {
		parts = append(parts, m.barrierText(key, m.sched.gathers[key]))
	}
	return strings.Join(parts, "; ")
}

func (m *Machine) barrierText(key gatherKey, g *gather) string {
	var missing []string
	for _, id := range m.table.members(key.group) {
		if !slices.ContainsFunc(g.came, func(a arrival) bool { return a.id == id }) {
			missing = append(missing, m.table.peer(id))
		}
	}
	return fmt.Sprintf("%s barrier over %s: %d of %d requests, not from %s", kindName(key.instance),
		groupName(key.group), len(g.came), m.cfg.expected(key.group, key.instance), list(missing))
}
