package membership

// The liveness of nodes: the time of each node's last message, and the reasons why it is dead. Other effects of a
// death or a return are in monitor.go for the scheduler, and in pending.go for workers and servers.

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

// deathReason is a set of reasons why a node is considered dead. Each reason is cleared on its own.
type deathReason uint8

const (
	connLost deathReason = 1 << iota // the transport lost the connection
	silent                           // no heartbeats
	declared                         // the scheduler declared it dead
)

// lossError is the reason why a node is considered dead. It wraps van.ErrPeerLost and the transport's error, if there
// is one.
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

// peerHealth is the liveness of one node.
type peerHealth struct {
	seen      time.Duration // time of its last message, or of its restored connection
	heard     time.Duration // time of its last message
	deadFor   deathReason   // 0: alive
	connBroke bool          // it was declared dead for a broken connection, even if messages arrived since
	deadSince time.Duration // time at which it died, or the scheduler was replaced
	cause     error

	answered        time.Duration // time of its transport's last answer to a probe, see ProbeAnswered; 0: none since its last message
	lost            time.Duration // time at which its connection was last lost
	back            time.Duration // time at which the connection was restored then; 0: not since
	sendsHeartbeats bool          // it has sent a heartbeat
	interval        time.Duration // between its heartbeats, as it announces
	gap             time.Duration // time of the first message after a silence longer than that; 0: never
	confirmed       time.Duration // time of the last question to it that it has answered; 0: none
	staleTable      bool          // its last heartbeat announced an old table
}

// sameLossTime limits the time between the restoration of this node's connection to a peer and a notice that another
// node has lost its own connection to that peer, if both losses are to count as one event. Each node notices a link
// that was cut when it next sends a message.
const sameLossTime = 5 * time.Second

// isSameLoss reports whether the scheduler's loss of its connection to a node is a loss that this node has noticed
// itself, and that is over. If the node has died since, this node's own connection shows it.
func (h *peerHealth) isSameLoss(now time.Duration) bool {
	return h.deadFor == 0 && h.back > 0 && now-h.back < sameLossTime
}

// mayBeDelayed reports whether messages of the node may have been in flight for long.
func (h *peerHealth) mayBeDelayed() bool { return h.gap > h.confirmed }

// liveness tracks the health of all nodes that this node knows.
type liveness struct {
	cfg       *Config
	life      *lifecycle
	table     *table
	out       *outputs
	peers     map[int]*peerHealth // of the scheduler and the table's nodes
	lastCheck time.Duration       // time of the last check for silent nodes
}

func (l *liveness) begin(now time.Duration, id int) { l.peers[id] = &peerHealth{seen: now} }

func (l *liveness) isDead(id int) bool {
	h := l.peers[id]
	return h != nil && h.deadFor != 0
}

// errNotResumed is the reason why a scheduler that is alive cannot be asked.
var errNotResumed = &lossError{text: "the scheduler was started again and has not resumed the cluster"}

// schedulerUnreachable reports whether the scheduler cannot be asked now. The cause in its peerHealth is the reason.
func (l *liveness) schedulerUnreachable() bool { return l.isDead(van.SchedulerID) || l.life.rejoining }

// heard notes a message of from, and reports whether from was considered silent.
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

// connectionLost notes that the connection to id was lost, and returns the error for it. quiet is true when id has
// been silent for too long, so that only the connection showed that it was alive.
func (l *liveness) connectionLost(now time.Duration, id int, cause error) (err *lossError, quiet bool) {
	h := l.peers[id]
	h.lost, h.back = now, 0
	err = &lossError{text: "connection lost: " + cause.Error(), cause: cause, cut: !errors.Is(cause, van.ErrTimeout) && !errors.Is(cause, syscall.ETIMEDOUT)}
	// The node has answered a probe, or has just timed out.
	return err, slices.Contains(l.watched(), id) && l.silentTooLong(now, id) && (h.answered > 0 || !l.wasPaused(now))
}

// markDead marks id as dead for reason r. If it was alive, the application is notified and true is returned: the
// caller does the rest, see monitor.markDead and pendingBarriers.peerDead.
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

// markAlive clears reasons. If none are left, id is alive again; the application is notified and true is returned, as
// by markDead.
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
	if id == van.SchedulerID && l.life.rejoining { // it still cannot be asked
		h.cause = errNotResumed
	}
	if !l.life.leaving {
		l.out.emit(PeerAlive{id})
	}
	return !l.life.leaving
}

// lossVerb is the verb of the notice about a node that is dead for that cause.
func lossVerb(cause error) string {
	if l, ok := cause.(*lossError); ok && l.cut {
		return verbCut
	}
	return verbDead
}

// sendsHeartbeats reports whether this node sends heartbeats, which the scheduler answers.
func (l *liveness) sendsHeartbeats() bool {
	return !l.table.isScheduler() && l.cfg.HeartbeatInterval > 0 && !l.life.leaving &&
		(!l.cfg.NativeInterval || l.table.native(van.SchedulerID)) && !failpoint.On("heartbeat")
}

// watched lists the nodes to which the heartbeat timeout applies: on the scheduler all others, or the nodes that
// have sent a heartbeat; elsewhere the scheduler, if heartbeats are sent to it.
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

// maxSilence is the longest time for which id may be silent: the timeout, or three of the intervals that id
// announces, if that is longer.
func (l *liveness) maxSilence(id int) time.Duration {
	return max(l.cfg.HeartbeatTimeout, 3*l.peers[id].interval)
}

// silentTooLong reports whether id has been silent for too long and is not yet marked as silent.
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

// Silent lists the nodes that Tick declares dead at that time for their silence, unless ProbeAnswered is called for
// them before. A node whose connection broke after its last message is not among them: another process may answer at
// its address.
func (l *liveness) Silent(now time.Duration) []int {
	if l.life.phase != ready {
		return nil
	}
	return slices.DeleteFunc(l.watched(), func(id int) bool {
		h := l.peers[id]
		return !l.silentTooLong(now, id) || h.heard <= h.lost
	})
}

// ProbeAnswered reports that the transport of id, which does not depend on its program, has answered a liveness probe
// within the limit: the node runs, and is only busy. The answer counts for this time, and must be reported before
// Tick.
func (l *liveness) ProbeAnswered(now time.Duration, id int) {
	if h := l.peers[id]; h != nil {
		h.answered = now
	}
}

// wasPaused reports whether this process was stopped or starved: messages that arrived meanwhile may not have been
// handled yet.
func (l *liveness) wasPaused(now time.Duration) bool {
	return now-l.lastCheck > l.cfg.HeartbeatTimeout/2
}

// timedOut lists the nodes that have been silent for too long.
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
	if any { // regular ticks: a late one shows that this process was paused, and silent nodes that answer probes are checked again
		next = min(next, l.lastCheck+l.cfg.HeartbeatTimeout/4+1)
	}
	return next
}

// DeadNodes lists, in the order of Members, the nodes that are known to be dead, and the nodes that have been
// silent for longer than t. The scheduler knows the silence of all nodes, others only that of the scheduler. With
// t = 0 silence does not count.
func (l *liveness) DeadNodes(now, t time.Duration) (dead []int) {
	if l.life.phase != ready {
		return nil
	}
	for _, id := range l.table.Members(van.AllNodes) {
		h := l.peers[id]
		if h == nil || id == l.table.self.ID {
			continue
		}
		if h.deadFor != 0 || t > 0 && l.Silence(now, id) > t {
			dead = append(dead, id)
		}
	}
	return dead
}

// Silence returns the time since the last message of node id, 0 if the node's heartbeats do not go to this node: they go
// to the scheduler, and the scheduler's to all.
func (l *liveness) Silence(now time.Duration, id int) time.Duration {
	h := l.peers[id]
	if h == nil || !l.table.isScheduler() && id != van.SchedulerID {
		return 0
	}
	return max(now-h.seen, 0)
}

// report is the part of a report that all nodes have in common.
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
