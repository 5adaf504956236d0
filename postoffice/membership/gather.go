package membership

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// This file is the scheduler's side of barriers: counting requests.

type gatherKey struct {
	group    int
	instance bool
}

// gather is a barrier that somebody has asked for.
type gather struct {
	came []arrival
	// stuck: only dead nodes have yet to come, since the time in since. When it has
	// lasted for Config.ReplaceTimeout those who can be told are told, once.
	stuck, told bool
	since       time.Duration
	// nextWord is when those who wait are told next who has not come.
	nextWord time.Duration
}

// arrival is one counted request. customer is 0 unless several customers of one
// process registered, each of which has a place of its own. stamp is the timestamp
// of the request, by which a release names it; only nodes of this library look at it.
type arrival struct {
	id, customer int
	stamp        int32
	final        bool // of the end of a program, which may wait from the first second
}

// finalRequest is the key of the request of a barrier that ends a program. See named for who looks at it.
const finalRequest = 1

// answer is the last release that a node of this library was sent for a barrier, or the
// word that it has failed, so that a request that comes again is not counted for the next one.
type answer struct {
	stamp     int32
	owed      bool   // the node was down then
	withdrawn bool   // there was no release: the node has given the request up
	failed    string // there was no release: the node was told why
}

// stepRequest counts a request and releases the barrier when it is complete.
func (m *Machine) stepRequest(now time.Duration, from int, msg *van.Meta) error {
	group, instance := msg.Control.BarrierGroup, msg.Control.Cmd == van.InstanceBarrier
	switch _, known := m.at[from]; {
	case m.sched == nil:
		return m.bad(from, msg, "request", true, "false: only the scheduler counts barriers")
	case m.phase != ready || !known && from != van.SchedulerID:
		return m.bad(from, msg, "sender", from, "the id of a node of this cluster")
	case group < 1 || group > van.AllNodes:
		return m.bad(from, msg, "control.barrier_group", group, "1 to 7")
	}
	key := gatherKey{group, instance}
	a := arrival{id: from, stamp: msg.Timestamp, final: m.native(from) && msg.Key == finalRequest}
	if m.sched.several[from] {
		a.customer = int(msg.CustomerID)
	}
	g := m.sched.gathers[key]
	if g == nil {
		g = &gather{nextWord: now + m.cfg.ReportEvery}
		m.sched.gathers[key] = g
	}
	same := func(o arrival) bool { return o.id == a.id && o.customer == a.customer }
	switch i := slices.IndexFunc(g.came, same); {
	case m.native(from) && m.answered(from, key, a.stamp):
		m.dropEmpty()
		return nil
	case i >= 0 && (instance || m.native(from)):
		g.came[i] = a // asked again, or given up and asked anew
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
		to = m.Members(group)
	} else {
		for _, a := range g.came {
			to = append(to, a.id)
		}
	}
	for _, id := range to {
		owed := m.isDown(id)
		i := slices.IndexFunc(g.came, func(a arrival) bool { return a.id == id })
		if i >= 0 && m.native(id) {
			m.sched.note(id, key, answer{stamp: g.came[i].stamp, owed: owed})
		}
		if owed {
			continue
		}
		meta := m.control(msg.Control.Cmd)
		meta.AppID, meta.CustomerID = msg.AppID, msg.CustomerID
		if i >= 0 && m.native(id) {
			meta.Key = named(g.came[i].stamp)
		}
		m.send(id, meta)
	}
	if t := m.finalizing(); t != nil && instance && group == t.group {
		m.Leaving(now) // the others go as soon as they have this
	}
	return nil
}

// named is what a release or a notice carries in its key, which nodes of the original
// pass over, to say which request it answers; 0 names none.
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

// newer compares timestamps, which count to 1<<31 and begin again.
func newer(a, b int32) bool { return (b-a)&math.MaxInt32 >= 1<<30 }

// stepWithdraw takes back a request that its caller has given up. One that comes again
// afterwards, or that the notice has overtaken, does not count either.
func (m *Machine) stepWithdraw(now time.Duration, from int, msg *van.Meta, n notice) error {
	switch _, known := m.at[from]; {
	case n.verb != verbWithdraw:
		return m.bad(from, msg, "sender", from, "notices come from the scheduler only")
	case m.sched == nil:
		return m.bad(from, msg, "body", n.verb, "a notice for others than the scheduler")
	case m.phase != ready || from != van.SchedulerID && (!known || !m.native(from)):
		return m.bad(from, msg, "sender", from, "a node of this cluster and of this library")
	case msg.Key < 1 || msg.Key > math.MaxInt32+1:
		return m.bad(from, msg, "key", msg.Key, "1 to 2147483648: the name of a request")
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

// release repeats a release.
func (m *Machine) release(id int, key gatherKey, stamp int32) {
	m.sched.note(id, key, answer{stamp: stamp})
	cmd := van.Barrier
	if key.instance {
		cmd = van.InstanceBarrier
	}
	meta := m.control(cmd)
	meta.AppID, meta.CustomerID, meta.Key = 0, 0, named(stamp)
	m.send(id, meta)
}

// owedReleases sends what could not be sent while id was down.
func (m *Machine) owedReleases(id int) {
	for _, key := range sortedKeys(m.sched.answers[id]) {
		if a := m.sched.answers[id][key]; a.owed {
			m.release(id, key, a.stamp)
		}
	}
}

// forget takes back what a process that has been replaced had asked for.
func (m *Machine) forget(id int) {
	for _, g := range m.sched.gathers {
		g.came = slices.DeleteFunc(g.came, func(a arrival) bool { return a.id == id })
	}
	m.dropEmpty()
	delete(m.sched.answers, id)
}

func (m *Machine) dropEmpty() {
	for key, g := range m.sched.gathers {
		if len(g.came) == 0 {
			delete(m.sched.gathers, key)
		}
	}
}

// recheckBarriers looks which barriers only dead nodes keep from being complete. Each
// waits for a replacement for Config.ReplaceTimeout; then it fails for those who can be
// told. One other than that of Finalize does not wait any more for a node that has been
// silent for so long that it is held for dead. While a living member has yet to come there is time: a barrier over all nodes
// in which some wait from the first second, as that of Finalize, is no reason to end the
// others' work.
func (m *Machine) recheckBarriers(now time.Duration) {
	for _, key := range m.sched.openBarriers() {
		g := m.sched.gathers[key]
		possible, living := len(g.came), 0
		dead, fell := "", false
		for _, id := range m.Members(key.group) {
			missing := m.places(id)
			for _, a := range g.came {
				if a.id == id {
					missing--
				}
			}
			switch {
			case missing <= 0:
			case m.isDown(id):
				fell = fell || m.health[id].down&silent == 0
				dead += fmt.Sprintf("; %s is dead: %s", m.peer(id), m.health[id].cause)
			default:
				living += missing
			}
		}
		possible += living
		hopeless := dead != "" && possible < m.cfg.expected(key.group, key.instance)
		// Of a group only one instance need come to a group barrier: the others are not
		// waited for.
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
			wait = 0 // those who wait have waited for all of the silence
		}
		if !g.told && (now-g.since >= wait || failpoint.On("barrier-death")) {
			m.failBarrier(key, g, strings.TrimPrefix(dead, "; "))
		}
	}
	m.dropEmpty()
}

// failBarrier tells those who wait, as far as they can read it, that a barrier cannot be
// complete. What nodes of the original have asked for stays asked for: they cannot be
// told, and do not ask again.
func (m *Machine) failBarrier(key gatherKey, g *gather, text string) {
	g.told = true
	var told []arrival
	g.came = slices.DeleteFunc(g.came, func(a arrival) bool {
		if a.id != van.SchedulerID && !m.native(a.id) && !failpoint.On("foreign-barrier") {
			return false
		}
		told = append(told, a)
		return true
	})
	if len(g.came) == 0 {
		delete(m.sched.gathers, key)
	}
	for _, a := range told {
		if a.id != van.SchedulerID && !m.isDown(a.id) {
			failed := answer{stamp: a.stamp, failed: text}
			m.sched.note(a.id, key, failed)
			m.tellFailed(a.id, key, failed)
		}
	}
	for _, a := range told { // the scheduler last: it may leave as soon as it knows
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
	m.tellAbout(id, failedNotice(key, a.failed), named(a.stamp))
}

func (m *Machine) tickBarriers(now time.Duration) {
	if m.sched == nil || now < m.nextBarrierTick() {
		return
	}
	m.recheckBarriers(now)
	for _, key := range m.sched.openBarriers() {
		if g := m.sched.gathers[key]; now >= g.nextWord {
			for g.nextWord <= now {
				g.nextWord += m.cfg.ReportEvery
			}
			m.sayWhoIsMissing(key, g)
		}
	}
}

// sayWhoIsMissing tells those who wait for a barrier, other than that of Finalize, so that
// they can say it when they give up.
func (m *Machine) sayWhoIsMissing(key gatherKey, g *gather) {
	for _, a := range g.came {
		if a.id != van.SchedulerID && !a.final && m.native(a.id) && !m.isDown(a.id) {
			m.tellAbout(a.id, notice{verb: verbWaiting, text: m.barrierText(key, g)}, named(a.stamp))
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
		if slices.ContainsFunc(g.came, func(a arrival) bool { return !a.final && m.native(a.id) && a.id != van.SchedulerID }) {
			next = min(next, g.nextWord)
		}
	}
	return next
}

// openBarriers lists the barriers that somebody waits for, in a fixed order.
func (s *scheduler) openBarriers() []gatherKey {
	return sortedKeys(s.gathers)
}

func sortedKeys[V any](m map[gatherKey]V) []gatherKey {
	keys := make([]gatherKey, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b gatherKey) int {
		return cmp.Or(cmp.Compare(a.group, b.group), strings.Compare(kindName(a.instance), kindName(b.instance)))
	})
	return keys
}

// places is how many ids node id stands for.
func (m *Machine) places(id int) int {
	n := 1
	for _, first := range m.shared {
		if first == id {
			n++
		}
	}
	return n
}

// barriersText says who has not come to the barriers that are open.
func (m *Machine) barriersText() string {
	var parts []string
	for _, key := range m.sched.openBarriers() {
		parts = append(parts, m.barrierText(key, m.sched.gathers[key]))
	}
	return strings.Join(parts, "; ")
}

func (m *Machine) barrierText(key gatherKey, g *gather) string {
	var missing []string
	for _, id := range m.Members(key.group) {
		if !slices.ContainsFunc(g.came, func(a arrival) bool { return a.id == id }) {
			missing = append(missing, m.peer(id))
		}
	}
	return fmt.Sprintf("%s barrier over %s: %d of %d requests, not from %s", kindName(key.instance),
		groupName(key.group), len(g.came), m.cfg.expected(key.group, key.instance), list(missing))
}
