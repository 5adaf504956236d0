package membership

// Which nodes are alive: when each was last heard, and why it is down. What follows from a
// death or a return is the business of the callers, see watch.go and node.go.

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// reason is why a node is considered dead. Each reason is cleared on its own.
type reason uint8

const (
	connLost reason = 1 << iota // the transport lost the connection
	silent                      // no heartbeats
	declared                    // the scheduler says so
)

type health struct {
	seen  time.Duration // when it was last heard, or its connection came back
	heard time.Duration // when its last message came
	down  reason        // 0: alive
	since time.Duration // when it went down, or when the scheduler was replaced
	cause error

	answered time.Duration // when its transport last answered for it, see Answers; 0: not since its last message
	lost     time.Duration // when its connection was last lost
	back     time.Duration // when it then came back; 0: not since
	beats    bool          // it has sent a heartbeat
	interval time.Duration // between its heartbeats, as it says
	stale    bool          // its last heartbeat said that its table is old
}

// sameLossTime is how long after a peer's connection to this node came back a connection to it that
// another node has lost is taken for lost by the same event: a link that was cut is noticed by each when
// it next sends something.
const sameLossTime = 5 * time.Second

// sameLoss tells whether the scheduler's loss of its connection to a node is what this node has seen
// itself, and is over. If the node has died since, this node's own connection shows it.
func (h *health) sameLoss(now time.Duration) bool {
	return h.down == 0 && h.back > 0 && now-h.back < sameLossTime
}

type liveness struct {
	cfg   *Config
	life  *life
	table *table
	out   *sender

	peers     map[int]*health // of the scheduler and the table's nodes
	lastCheck time.Duration   // when silence was last checked
}

// begin takes the process that has got id for alive.
func (l *liveness) begin(now time.Duration, id int) { l.peers[id] = &health{seen: now} }

func (l *liveness) isDown(id int) bool {
	h := l.peers[id]
	return h != nil && h.down != 0
}

// heard notes that a message of from has come. It returns true if from was taken for dead
// until now.
func (l *liveness) heard(now time.Duration, from int) bool {
	h := l.peers[from]
	if h == nil {
		return false
	}
	h.seen, h.heard, h.answered = max(h.seen, now), max(h.heard, now), 0
	return h.down&silent != 0 && l.markUp(now, from, silent)
}

// broke notes that the connection to id was lost. The error says so. quiet is true when
// nothing but that connection spoke for id.
func (l *liveness) broke(now time.Duration, id int, cause error) (err *lossError, quiet bool) {
	h := l.peers[id]
	h.lost, h.back = now, 0
	return &lossError{text: "connection lost: " + cause.Error(), cause: cause, cut: !errors.Is(cause, van.ErrTimeout) && !errors.Is(cause, syscall.ETIMEDOUT)},
		h.answered > 0 && l.lapsed(now, id)
}

// mended notes that the connection to id is back.
func (l *liveness) mended(now time.Duration, id int) {
	if h := l.peers[id]; h.down&connLost != 0 {
		h.back = max(now, 1)
	}
}

// markDown marks id as dead for reason r. If it was alive until now, the application is told
// and it returns true.
func (l *liveness) markDown(now time.Duration, id int, r reason, cause error) bool {
	h := l.peers[id]
	first := h.down == 0
	h.down |= r
	if !first {
		return false
	}
	h.cause, h.since = cause, now
	if l.life.leaving {
		return false
	}
	l.out.emit(PeerDead{id, cause})
	return true
}

// lossVerb is that of the notice about a node which is down for that cause.
func lossVerb(cause error) string {
	if l, ok := cause.(*lossError); ok && l.cut {
		return verbCut
	}
	return verbDead
}

// markUp clears reasons; with none left, id is alive again. Then the application is told
// and it returns true.
func (l *liveness) markUp(now time.Duration, id int, r reason) bool {
	h := l.peers[id]
	if h.down == 0 || h.down&^r != 0 {
		h.down &^= r
		return false
	}
	h.seen, h.down, h.cause = max(h.seen, now), 0, nil
	if l.life.leaving {
		return false
	}
	l.out.emit(PeerAlive{id})
	return true
}

// maxSilence is how long id may be silent: the timeout, or three of the intervals that id
// announces, if that is longer.
func (l *liveness) maxSilence(id int) time.Duration {
	return max(l.cfg.HeartbeatTimeout, 3*l.peers[id].interval)
}

// lapsed tells whether id has been silent for too long, and is not known to have been.
func (l *liveness) lapsed(now time.Duration, id int) bool {
	h := l.peers[id]
	return h.down&silent == 0 && now-h.seen >= l.maxSilence(id)
}

// silence is why id is dead when it has been silent for too long.
func (l *liveness) silence(now time.Duration, id int) error {
	return &lossError{text: fmt.Sprintf("no heartbeat for %s (PS_HEARTBEAT_TIMEOUT=%s)", now-l.peers[id].seen, l.maxSilence(id))}
}

// suspects lists those of watched that check returns unless their transport answers for them. One
// whose connection broke after its last message is not among them: another process may answer
// at its address.
func (l *liveness) suspects(now time.Duration, watched []int) []int {
	return slices.DeleteFunc(watched, func(id int) bool {
		h := l.peers[id]
		return !l.lapsed(now, id) || h.heard <= h.lost
	})
}

// answers notes that the transport of id answers for it.
func (l *liveness) answers(now time.Duration, id int) {
	if h := l.peers[id]; h != nil {
		h.answered = now
	}
}

// check lists those of watched that have been silent for too long.
func (l *liveness) check(now time.Duration, watched []int) []int {
	overslept := len(watched) > 0 && now-l.lastCheck > l.cfg.HeartbeatTimeout/2
	l.lastCheck = now
	return slices.DeleteFunc(watched, func(id int) bool {
		h := l.peers[id]
		if overslept {
			// This process was stopped or starved: messages that came meanwhile may not
			// have been handled yet.
			h.seen = max(h.seen, now-l.cfg.HeartbeatTimeout/2)
		}
		return !l.lapsed(now, id) || h.answered >= now
	})
}

// next is when check is due.
func (l *liveness) next(watched []int) time.Duration {
	next, any := time.Duration(math.MaxInt64), false
	for _, id := range watched {
		if h := l.peers[id]; h.down&silent == 0 {
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

// dead lists the nodes that are known to be dead, and of those that this node hears the ones
// that have been silent for longer than t, if t is not 0.
func (l *liveness) dead(now, t time.Duration) (dead []int) {
	for _, id := range l.table.members(van.AllNodes) {
		h := l.peers[id]
		if h == nil || id == l.table.self.ID {
			continue
		}
		heard := l.table.isScheduler() || id == van.SchedulerID
		if h.down != 0 || heard && t > 0 && now-h.seen > t {
			dead = append(dead, id)
		}
	}
	return dead
}
