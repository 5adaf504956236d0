package membership

// Which nodes are alive: when each was last heard, and why it is down. What else follows from a
// death or a return is in watch.go for the scheduler, and in ticket.go for the others.

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

// deathReason is why a node is considered dead. Each reason is cleared on its own.
type deathReason uint8

const (
	connLost deathReason = 1 << iota // the transport lost the connection
	silent                           // no heartbeats
	declared                         // the scheduler says so
)

// lossError says why a node is considered dead. It wraps van.ErrPeerLost and the
// transport's error, if there is one.
type lossError struct {
	text  string
	cause error
	cut   bool // a connection broke: the node need not be dead
}

func (e *lossError) Error() string { return e.text }

func (e *lossError) Unwrap() []error {
	if e.cause == nil {
		return []error{van.ErrPeerLost}
	}
	return []error{van.ErrPeerLost, e.cause}
}

type peerHealth struct {
	seen      time.Duration // when it was last heard, or its connection came back
	heard     time.Duration // when its last message came
	deadFor   deathReason   // 0: alive
	connBroke bool          // it went down as its connection broke, whatever has come since
	deadSince time.Duration // when it went down, or when the scheduler was replaced
	cause     error

	answered        time.Duration // when its transport last answered for it, see Answers; 0: not since its last message
	lost            time.Duration // when its connection was last lost
	back            time.Duration // when it then came back; 0: not since
	sendsHeartbeats bool          // it has sent a heartbeat
	interval        time.Duration // between its heartbeats, as it says
	gap             time.Duration // when something came after nothing had for longer than that; 0: never
	confirmed       time.Duration // when it was sent a question that it has answered since; 0: never
	staleTable      bool          // its last heartbeat said that its table is old
}

// sameLossTime is how long after a peer's connection to this node came back a connection to it that
// another node has lost is taken for lost by the same event: a link that was cut is noticed by each when
// it next sends something.
const sameLossTime = 5 * time.Second

// isSameLoss tells whether the scheduler's loss of its connection to a node is what this node has seen
// itself, and is over. If the node has died since, this node's own connection shows it.
func (h *peerHealth) isSameLoss(now time.Duration) bool {
	return h.deadFor == 0 && h.back > 0 && now-h.back < sameLossTime
}

// mayBeDelayed tells whether what comes from the node may have been on its way for long.
func (h *peerHealth) mayBeDelayed() bool { return h.gap > h.confirmed }

type liveness struct {
	cfg       *Config
	life      *lifecycle
	table     *table
	out       *outputs
	peers     map[int]*peerHealth // of the scheduler and the table's nodes
	lastCheck time.Duration       // when silence was last checked
}

func (l *liveness) begin(now time.Duration, id int) { l.peers[id] = &peerHealth{seen: now} }

func (l *liveness) isDead(id int) bool {
	h := l.peers[id]
	return h != nil && h.deadFor != 0
}

// schedulerUnreachable tells whether the scheduler cannot be asked now.
func (l *liveness) schedulerUnreachable() bool { return l.isDead(van.SchedulerID) || l.life.rejoining }

// heard notes that a message of from has come, and tells whether from was taken for silent.
func (l *liveness) heard(now time.Duration, from int) bool {
	h := l.peers[from]
	if h == nil {
		return false
	}
	if h.interval > 0 && now-h.heard > h.interval*3/2 {
		h.gap = now
	}
	h.seen, h.heard, h.answered = max(h.seen, now), max(h.heard, now), 0
	return h.deadFor&silent != 0
}

// connectionLost notes that the connection to id was lost. The error says so; quiet is true when nothing
// but that connection spoke for id.
func (l *liveness) connectionLost(now time.Duration, id int, cause error) (err *lossError, quiet bool) {
	h := l.peers[id]
	h.lost, h.back = now, 0
	err = &lossError{text: "connection lost: " + cause.Error(), cause: cause, cut: !errors.Is(cause, van.ErrTimeout) && !errors.Is(cause, syscall.ETIMEDOUT)}
	// A node that has answered, or whose time was up a moment ago.
	return err, slices.Contains(l.watched(), id) && l.silentTooLong(now, id) && (h.answered > 0 || !l.wasPaused(now))
}

// markDead marks id as dead for reason r. If it was alive, the application is told and true
// returned: the rest is to be done, see watch.down and tickets.peerDown.
func (l *liveness) markDead(now time.Duration, id int, r deathReason, cause error) bool {
	h := l.peers[id]
	first := h.deadFor == 0
	if h.deadFor |= r; first {
		h.cause, h.deadSince, h.connBroke = cause, now, lossVerb(cause) == verbCut
	}
	if !first || l.life.leaving {
		return false
	}
	l.out.emit(PeerDead{id, cause})
	return true
}

// markAlive clears reasons. If none are left, id is alive again; the application is told and true
// returned, as by markDown.
func (l *liveness) markAlive(now time.Duration, id int, r deathReason) bool {
	h := l.peers[id]
	if r&connLost != 0 && h.deadFor&connLost != 0 {
		h.back = max(now, 1)
	}
	if h.deadFor == 0 || h.deadFor&^r != 0 {
		h.deadFor &^= r
		return false
	}
	h.seen, h.deadFor, h.cause = max(h.seen, now), 0, nil
	if !l.life.leaving {
		l.out.emit(PeerAlive{id})
	}
	return !l.life.leaving
}

// lossVerb is that of the notice about a node which is down for that cause.
func lossVerb(cause error) string {
	if l, ok := cause.(*lossError); ok && l.cut {
		return verbCut
	}
	return verbDead
}

// sendsHeartbeats tells whether this node sends heartbeats, which the scheduler answers.
func (l *liveness) sendsHeartbeats() bool {
	return !l.table.isScheduler() && l.cfg.HeartbeatInterval > 0 && !l.life.leaving &&
		(!l.cfg.NativeInterval || l.table.native(van.SchedulerID)) && !failpoint.On("heartbeat")
}

// watched lists the nodes to which the heartbeat timeout applies: on the scheduler all
// others, or those that have sent a heartbeat; elsewhere the scheduler, if it is sent them.
func (l *liveness) watched() []int {
	switch {
	case l.cfg.HeartbeatTimeout == 0 || l.life.leaving:
	case l.table.isScheduler():
		optional := l.cfg.NativeTimeout || l.cfg.HeartbeatInterval == 0
		return slices.DeleteFunc(l.table.ids(), func(id int) bool { return optional && !l.peers[id].sendsHeartbeats })
	case l.sendsHeartbeats():
		return []int{van.SchedulerID}
	}
	return nil
}

// maxSilence is how long id may be silent: the timeout, or three of the intervals that id
// announces, if that is longer.
func (l *liveness) maxSilence(id int) time.Duration {
	return max(l.cfg.HeartbeatTimeout, 3*l.peers[id].interval)
}

// silentTooLong tells whether id has been silent for too long, and is not known to have been.
func (l *liveness) silentTooLong(now time.Duration, id int) bool {
	h := l.peers[id]
	return h.deadFor&silent == 0 && now-h.seen >= l.maxSilence(id)
}

func (l *liveness) silenceError(now time.Duration, id int) error {
	limit := fmt.Sprintf("PS_HEARTBEAT_TIMEOUT=%s", l.cfg.HeartbeatTimeout)
	if every := l.peers[id].interval; 3*every > l.cfg.HeartbeatTimeout {
		limit += fmt.Sprintf(", but 3 times the %s between its heartbeats", every)
	}
	return &lossError{text: fmt.Sprintf("no heartbeat for %s (%s)", now-l.peers[id].seen, limit)}
}

// Silent lists the nodes that Tick takes for dead at that time, since nothing has come from
// them, unless Answers is called for them before. One whose connection broke after its last
// message is not among them: another process may answer at its address.
func (l *liveness) Silent(now time.Duration) []int {
	if l.life.phase != ready {
		return nil
	}
	return slices.DeleteFunc(l.watched(), func(id int) bool {
		h := l.peers[id]
		return !l.silentTooLong(now, id) || h.heard <= h.lost
	})
}

// ProbeAnswered says that the transport of id, which does not wait for what its program does, has
// answered within the limit: the node stands, and is only busy. It counts for this time, and
// must come before Tick.
func (l *liveness) ProbeAnswered(now time.Duration, id int) {
	if h := l.peers[id]; h != nil {
		h.answered = now
	}
}

// wasPaused tells whether this process was stopped or starved: messages that came meanwhile may
// not have been handled yet.
func (l *liveness) wasPaused(now time.Duration) bool {
	return now-l.lastCheck > l.cfg.HeartbeatTimeout/2
}

// timedOut lists those who have been silent for too long.
func (l *liveness) timedOut(now time.Duration) []int {
	watched, overslept := l.watched(), l.wasPaused(now)
	l.lastCheck = now
	return slices.DeleteFunc(watched, func(id int) bool {
		h := l.peers[id]
		if overslept {
			h.seen = max(h.seen, now-l.cfg.HeartbeatTimeout/2)
		}
		return !l.silentTooLong(now, id) || h.answered >= now
	})
}

func (l *liveness) nextCheck() time.Duration {
	next, any := time.Duration(math.MaxInt64), false
	for _, id := range l.watched() {
		if h := l.peers[id]; h.deadFor&silent == 0 {
			if at := h.seen + l.maxSilence(id); at > h.answered { // else with a regular tick
				next = min(next, at)
			}
			any = true
		}
	}
	if any { // regular ticks, so that one that comes too late is noticed, and who is silent and answers is looked at again
		next = min(next, l.lastCheck+l.cfg.HeartbeatTimeout/4+1)
	}
	return next
}

// DeadNodes lists, in the order of Members, the nodes that are known to be dead, and
// those that have been silent for longer than t, which the scheduler knows of all
// nodes and others only of the scheduler. With t = 0 silence does not count.
func (l *liveness) DeadNodes(now, t time.Duration) (dead []int) {
	if l.life.phase != ready {
		return nil
	}
	for _, id := range l.table.Members(van.AllNodes) {
		h := l.peers[id]
		if h == nil || id == l.table.self.ID {
			continue
		}
		hears := l.table.isScheduler() || id == van.SchedulerID
		if h.deadFor != 0 || hears && t > 0 && now-h.seen > t {
			dead = append(dead, id)
		}
	}
	return dead
}

// report is what all nodes report of the cluster.
func (l *liveness) report(now time.Duration) Report {
	r := Report{Elapsed: now - l.life.started, Ready: l.life.phase == ready, Present: slices.Clone(l.table.nodes)}
	if l.life.phase == created {
		r.Elapsed = 0
	}
	for _, id := range l.table.Members(van.AllNodes) {
		if l.isDead(id) {
			r.Dead = append(r.Dead, fmt.Sprintf("%s: %s", l.table.peer(id), l.peers[id].cause))
		}
	}
	return r
}
