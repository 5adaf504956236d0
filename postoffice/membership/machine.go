package membership

// Machine: its inputs, and time. scheduler.go handles them on the scheduler, node.go on workers and servers.

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Machine is one node's membership. Make it with New. It also has the exported methods of its embedded parts.
type Machine struct {
	cfg  *Config
	life *lifecycle
	*table
	*outputs
	*liveness
	*pendingBarriers

	role  role       // the part that differs between the scheduler, and workers and servers
	sched *scheduler // role, or nil on workers and servers
	node  *node      // role, or nil on the scheduler

	nextReport time.Duration // while joining: time of the next Waiting
}

// core is the state that all parts of a Machine share.
type core struct {
	cfg   *Config
	life  *lifecycle
	table *table
	out   *outputs
	alive *liveness
}

type phase int

const (
	created phase = iota
	joining       // Start was called; nodes are missing
	ready
	failed
)

// lifecycle is the progress of the node from New to its end.
type lifecycle struct {
	phase   phase
	started time.Duration
	failure error // the error that ended the machine

	// leaving: the final barrier is over, or Leaving was called. Lost peers are no longer reported.
	leaving   bool
	rejoining bool // the scheduler is a new process and does not know the cluster yet
	recovered bool // on the scheduler: it has resumed the cluster of an earlier scheduler process
}

type role interface {
	step(now time.Duration, from int, origin van.Origin, msg *van.Meta) error
	lost(now time.Duration, id int, cause error)
	back(now time.Duration, id int)
	report(now time.Duration) Report
	tick(now time.Duration) // after start-up
	next() time.Duration
}

// New checks cfg and makes a machine that waits for Start. The error wraps van.ErrInvalid and names the variable that
// is wrong.
func New(cfg Config) (*Machine, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	b := core{cfg: &cfg, life: &lifecycle{}, table: newTable(&cfg)}
	b.out = &outputs{table: b.table, conns: map[int]bool{}, startConns: map[int]bool{}, temps: temporaryIDs{renamed: map[int]int{}}}
	b.alive = &liveness{cfg: b.cfg, life: b.life, table: b.table, out: b.out, peers: map[int]*peerHealth{}}
	m := &Machine{cfg: b.cfg, life: b.life, table: b.table, outputs: b.out, liveness: b.alive, pendingBarriers: &pendingBarriers{core: b, deferred: deferredLosses{}}}
	if cfg.Role == van.Scheduler {
		m.sched = newScheduler(b, m.pendingBarriers)
		m.role = m.sched
	} else {
		m.node = newNode(b, m.pendingBarriers)
		m.role = m.node
	}
	return m, nil
}

// Start begins start-up: a worker or server connects to the scheduler and registers. A second call does nothing.
func (m *Machine) Start(now time.Duration) {
	if m.life.phase != created {
		return
	}
	m.life.phase, m.life.started, m.nextReport = joining, now, now+m.cfg.ReportEvery
	if m.cfg.CanProbe {
		m.nextReport -= min(reportEarlier, m.cfg.ReportEvery/2) // the probes have ended by then
	}
	if m.node != nil {
		m.outputs.connect(van.SchedulerID, m.table.scheduler)
		m.node.register(now)
	}
}

// Step handles one control message from node from (van.Empty if it has no id). It does not keep msg. The error, which
// wraps van.ErrMalformed, names the sender and the invalid field. Such a message is dropped, but counts as a sign of
// life. A failed machine ignores every message. Step assumes that the message is authentic, see StepFrom.
func (m *Machine) Step(now time.Duration, from int, msg *van.Meta) error {
	return m.StepFrom(now, from, van.OriginDialed, msg)
}

// StepFrom is Step for a message of which the transport knows only the origin. C++ StepMesh does not tag messages
// with incarnations: where the scheduler may be one of C++ StepMesh, any host could send in its name.
func (m *Machine) StepFrom(now time.Duration, from int, origin van.Origin, msg *van.Meta) error {
	switch m.life.phase {
	case failed:
		return nil
	case created:
		return m.table.bad(from, msg, "control.cmd", msg.Control.Cmd, "nothing before Start")
	}
	return m.role.step(now, from, origin, msg)
}

// PeerLost reports that the transport lost the connection to id, which may be a temporary id. It is ignored after
// Leaving and after the final barrier. If the scheduler refuses the connection because this node was replaced, the
// machine fails.
func (m *Machine) PeerLost(now time.Duration, id int, cause error) {
	id = m.outputs.currentID(id)
	if m.life.phase != failed && !m.life.leaving && id != m.table.self.ID {
		m.role.lost(now, id, cmp.Or(cause, van.ErrPeerLost))
	}
}

// DataFrom reports that a data message of node id arrived over its own connection. A C++ StepMesh process that was
// declared dead counts as alive again: it was paused. Its requests reach the other nodes before the scheduler notices
// that it is alive. A node of this library sends no requests to a node that considers it dead.
func (m *Machine) DataFrom(now time.Duration, id int) {
	if m.node != nil && m.life.phase == ready && m.table.has(id) && !m.table.native(id) {
		m.pendingBarriers.peerAlive(now, id, declared)
	}
}

// SchedulerNotFound sets the reason why the scheduler's name has no address yet, for reports; nil once it has one.
func (m *Machine) SchedulerNotFound(err error) {
	if m.node != nil {
		m.node.schedulerNotFound = err
	}
}

// Probed takes the result of a Probe. from is the address of this host that the probe used. err is nil if n's address
// can be reached from there, else the cause.
func (m *Machine) Probed(_ time.Duration, n *van.Node, from string, err error) {
	switch {
	case m.life.phase == failed:
	case m.sched != nil:
		m.sched.probes.probed(n, from, err)
	default:
		m.node.schedulerUnreached = unreachedFrom(from, err)
	}
}

// PeerBack reports that the connection to id is open again. It does nothing if the connection was not lost.
func (m *Machine) PeerBack(now time.Duration, id int) {
	if m.life.phase != failed {
		m.role.back(now, m.outputs.currentID(id))
	}
}

// ConnectFailed reports that a Connect to id failed permanently. If start-up needs the connection, start-up fails on
// all nodes that can be notified. After start-up the peer is lost until it is replaced. The registration of a node
// without an id, whose address may be invalid, is dropped.
func (m *Machine) ConnectFailed(now time.Duration, id int, cause error) {
	id = m.outputs.currentID(id)
	switch {
	case m.life.phase == failed || m.life.leaving:
	case m.life.phase == joining && id == van.SchedulerID || m.outputs.startConns[id]:
		if m.sched != nil {
			m.sched.monitor.notifyOthers(id, notice{verb: verbError, text: fmt.Sprintf("start-up has failed: the scheduler cannot connect to %s: %s", m.table.peer(id), cause)})
		}
		m.pendingBarriers.failMachine(&van.Error{Op: "start: connect", Node: m.table.name(), Peer: m.table.peer(id), Err: cause})
	default:
		m.PeerLost(now, id, cause)
	}
}

// Tick advances time. It may be called at any time, and must be called at the time that NextTick returns.
func (m *Machine) Tick(now time.Duration) {
	switch m.life.phase {
	case joining:
		if m.sched != nil {
			m.sched.recovery.tick(now)
		}
		if m.life.phase == joining {
			m.tickStart(now)
		}
		if m.node != nil {
			m.node.askScheduler(now)
			m.node.probeScheduler(now)
			m.node.applyPendingTables(now)
		}
	case ready:
		m.role.tick(now)
	}
	if m.sched != nil && m.life.phase != failed {
		m.sched.retryQueued(now)
		m.sched.replacements.tick(now)
		m.sched.refusals.tick(now)
		m.sched.probes.tick(now)
	}
}

// NextTick returns the time of the next call of Tick. It is false when time alone changes nothing.
func (m *Machine) NextTick() (time.Duration, bool) {
	next := time.Duration(math.MaxInt64)
	switch m.life.phase {
	case joining:
		next = m.nextReport
		if m.cfg.StartTimeout > 0 {
			next = min(next, m.life.started+m.cfg.StartTimeout)
		}
		if m.node != nil {
			next = min(next, m.node.nextQuestion, m.node.probeDue(), m.node.pendingTablesDue())
		}
		if m.sched != nil {
			next = min(next, m.sched.recovery.next(), m.sched.registrations.next(), m.sched.replacements.next(), m.sched.refusals.next(), m.sched.probes.next())
		}
	case ready:
		next = m.role.next()
	}
	return next, next != math.MaxInt64
}

// tickStart reports the missing nodes, or fails start-up at its deadline.
func (m *Machine) tickStart(now time.Duration) {
	if d := m.cfg.StartTimeout; d > 0 && now-m.life.started >= d {
		r := m.Report(now)
		if m.sched != nil {
			m.sched.registrations.notifyAll(notice{verb: verbError, text: "start-up timed out on the scheduler after " + d.String() + ": " + r.withoutAddresses()})
		}
		m.pendingBarriers.failMachine(&van.Error{Op: "start", Node: m.table.name(), Detail: r.String(), Limit: d, Err: van.ErrTimeout})
		return
	}
	if now < m.nextReport {
		return
	}
	for m.nextReport <= now {
		m.nextReport += m.cfg.ReportEvery
	}
	r := m.Report(now)
	m.outputs.emit(Waiting{r})
	if m.sched != nil {
		m.sched.registrations.notifyAll(notice{verb: verbWaiting, text: r.withoutAddresses()})
	}
}

// CancelBarrier cancels this node's wait: a BarrierFailed with van.ErrTimeout follows. A scheduler of this library is
// notified and no longer counts this node's request; one of C++ StepMesh cannot be notified. The number of an unknown
// or ended barrier is ignored.
func (m *Machine) CancelBarrier(n int) {
	if t := m.pendingBarriers.get(n); t != nil {
		who, hint := m.Missing(n)
		m.pendingBarriers.cancel(t, 0, who, hint)
	}
}

// Missing lists the missing nodes of a pending barrier, as far as this node knows them. Otherwise the hint names the
// place where they are logged, if there is one.
func (m *Machine) Missing(n int) (who, hint string) {
	t := m.pendingBarriers.get(n)
	switch {
	case t == nil:
		return "", ""
	case m.sched != nil:
		return m.sched.barriers.withReasons(m.sched.barriers.missingOfAll()), ""
	}
	return t.missing, t.hint(&m.pendingBarriers.core)
}

// Link connects this node to others of its role and to their replacements, for as long as it is in the cluster. Its
// own id, and ids that it is linked to already, change nothing. A peer must call Link as well to be able to answer.
// An error wraps van.ErrInvalid; nothing was connected then.
func (m *Machine) Link(_ time.Duration, ids []int) error {
	switch {
	case m.life.phase == failed:
		return m.life.failure
	case m.life.phase != ready || m.node == nil:
		return &van.Error{Op: "link", Node: m.table.name(), Detail: "only workers and servers are linked, once they have started", Err: van.ErrInvalid}
	}
	return m.node.records.link(ids)
}

// PoliciesAre reports a State of this node for each policy of the list of that version. The scheduler is notified if
// something has changed.
func (m *Machine) PoliciesAre(_ time.Duration, version uint32, states string) {
	if m.node != nil {
		m.node.policies.reportStates(version, states)
	}
}

// Ready reports whether start-up is complete and the node is part of the cluster.
func (m *Machine) Ready() bool { return m.life.phase == ready }

// IsRecovery reports whether this node replaces a dead one, or is a scheduler that has resumed the cluster of an
// earlier scheduler process. The other nodes have then passed the start-up barrier already.
func (m *Machine) IsRecovery() bool { return m.table.self.IsRecovery || m.life.recovered }

// Report describes the present state.
func (m *Machine) Report(now time.Duration) Report { return m.role.report(now) }
