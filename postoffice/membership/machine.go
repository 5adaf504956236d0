package membership

// Machine: its inputs, and time. What becomes of them is in scheduler.go on the scheduler, and in
// node.go on workers and servers.

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Machine is one node's membership. Make it with New. Methods that its parts export are its own.
type Machine struct {
	cfg  *Config
	life *lifecycle
	*table
	*outputs
	*liveness
	*pendingBarriers

	role  role       // what the scheduler does otherwise than workers and servers
	sched *scheduler // role, or nil on workers and servers
	node  *node      // role, or nil on the scheduler

	nextReport time.Duration // while joining
}

// core is what all parts stand on.
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

// lifecycle is how far the node is, from New to its end.
type lifecycle struct {
	phase   phase
	started time.Duration
	failure error // what ended the machine

	// leaving: the final barrier is over, or Leaving was called, so peers may leave.
	leaving   bool
	rejoining bool // the scheduler is a new process, which does not know the cluster yet
	recovered bool // on the scheduler: it has resumed an earlier one's cluster
}

type role interface {
	step(now time.Duration, from int, origin van.Origin, msg *van.Meta) error
	lost(now time.Duration, id int, cause error)
	back(now time.Duration, id int)
	report(now time.Duration) Report
	tick(now time.Duration) // once start-up is complete
	next() time.Duration
}

// New checks cfg and makes a machine that waits for Start. The error wraps
// van.ErrInvalid and names the variable that is wrong.
func New(cfg Config) (*Machine, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	b := core{cfg: &cfg, life: &lifecycle{}, table: newTable(&cfg)}
	b.out = &outputs{table: b.table, conns: map[int]bool{}, startConns: map[int]bool{}}
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

// Start begins start-up: a worker or server connects to the scheduler and
// registers. A second call does nothing.
func (m *Machine) Start(now time.Duration) {
	if m.life.phase != created {
		return
	}
	m.life.phase, m.life.started, m.nextReport = joining, now, now+m.cfg.ReportEvery
	if m.cfg.CanProbe {
		m.nextReport -= min(reportEarlier, m.cfg.ReportEvery/2) // the trials have ended by then
	}
	if m.node != nil {
		m.outputs.connect(van.SchedulerID, m.table.scheduler)
		m.node.register(now)
	}
}

// Step handles one control message from node from (van.Empty if it has no id). It
// does not keep msg. The error, which wraps van.ErrMalformed, names the sender and the
// invalid field; the message was dropped then, but counts as a sign of life. A failed
// machine ignores every message. Step is StepFrom for a message that certainly is from's.
func (m *Machine) Step(now time.Duration, from int, msg *van.Meta) error {
	return m.StepFrom(now, from, van.OriginDialed, msg)
}

// StepFrom is Step for a message of which the transport knows only its origin. C++ StepMesh marks no messages: if the
// scheduler may be one of C++ StepMesh, anybody could speak in its name.
func (m *Machine) StepFrom(now time.Duration, from int, origin van.Origin, msg *van.Meta) error {
	switch m.life.phase {
	case failed:
		return nil
	case created:
		return m.table.bad(from, msg, "control.cmd", msg.Control.Cmd, "nothing before Start")
	}
	return m.role.step(now, from, origin, msg)
}

// PeerLost says that the transport lost the connection to id, which may be a temporary
// id. It is ignored after Leaving and after the final barrier. A node whose connection the
// scheduler refuses as it was replaced has failed.
func (m *Machine) PeerLost(now time.Duration, id int, cause error) {
	if m.life.phase != failed && !m.life.leaving && id != m.table.self.ID {
		m.role.lost(now, id, cmp.Or(cause, van.ErrPeerLost))
	}
}

// DataFrom reports that a data message of node id arrived over its own connection. A C++ StepMesh process that was
// declared dead counts as alive again: it was paused. Its requests reach the other nodes before the scheduler
// notices that it is alive. A node of this library sends no requests to a node that takes it for dead.
func (m *Machine) DataFrom(now time.Duration, id int) {
	if m.node != nil && m.life.phase == ready && m.table.has(id) && !m.table.native(id) {
		m.pendingBarriers.peerAlive(now, id, declared)
	}
}

// SchedulerNotFound says why the scheduler's name has no address yet, for reports; nil once it
// has one.
func (m *Machine) SchedulerNotFound(err error) {
	if m.node != nil {
		m.node.schedulerNotFound = err
	}
}

// Probed takes the result of Try. err is nil if the address can be reached from from, an address of this host, else err
// has the cause.
func (m *Machine) Probed(_ time.Duration, n *van.Node, from string, err error) {
	switch {
	case m.life.phase == failed:
	case m.sched != nil:
		m.sched.probes.probed(n, from, err)
	default:
		m.node.schedulerUnreached = unreachedFrom(from, err)
	}
}

// PeerBack says that the connection to id is back. It does nothing if it was not lost.
func (m *Machine) PeerBack(now time.Duration, id int) {
	if m.life.phase != failed {
		m.role.back(now, id)
	}
}

// ConnectFailed says that a Connect to id failed permanently. If start-up needs the
// connection, start-up fails, on all nodes that can be told; later the peer is lost until
// it is replaced. For a node without an id, whose address may be invalid, its registration
// is dropped.
func (m *Machine) ConnectFailed(now time.Duration, id int, cause error) {
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

// Tick advances time. It may be called at any time, and need not be called before the
// time that NextTick returns.
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
			m.node.applyPendingTable(now)
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

// NextTick returns when Tick must be called next. It is false when time alone changes
// nothing.
func (m *Machine) NextTick() (time.Duration, bool) {
	next := time.Duration(math.MaxInt64)
	switch m.life.phase {
	case joining:
		next = m.nextReport
		if m.cfg.StartTimeout > 0 {
			next = min(next, m.life.started+m.cfg.StartTimeout)
		}
		if m.node != nil {
			next = min(next, m.node.nextQuestion, m.node.probeDue(), m.node.pendingTableDue())
		}
		if m.sched != nil {
			next = min(next, m.sched.recovery.next(), m.sched.registrations.next(), m.sched.replacements.next(), m.sched.refusals.next(), m.sched.probes.next())
		}
	case ready:
		next = m.role.next()
	}
	return next, next != math.MaxInt64
}

// tickStart reports the missing nodes, or gives up.
func (m *Machine) tickStart(now time.Duration) {
	if d := m.cfg.StartTimeout; d > 0 && now-m.life.started >= d {
		r := m.Report(now)
		if m.sched != nil {
			m.sched.registrations.notifyAll(notice{verb: verbError, text: "the scheduler gave up after " + d.String() + ": " + r.withoutAddresses()})
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

// CancelBarrier gives up waiting: a BarrierFailed with van.ErrTimeout follows. A scheduler
// of this library is told, and no longer counts this node's request; a C++ StepMesh one
// cannot be told. An unknown ticket, or one that has ended, is ignored.
func (m *Machine) CancelBarrier(n int) {
	if t := m.pendingBarriers.get(n); t != nil {
		who, hint := m.Missing(n)
		m.pendingBarriers.cancel(t, 0, who, hint)
	}
}

// Missing lists the missing nodes of a barrier that waits, as far as this node knows, or else says
// where to look, if anywhere.
func (m *Machine) Missing(n int) (who, hint string) {
	t := m.pendingBarriers.get(n)
	switch {
	case t == nil:
		return "", ""
	case m.sched != nil:
		return m.sched.barriers.missingOfAll(), ""
	}
	return t.missing, t.hint(&m.pendingBarriers.core)
}

// Link connects this node to others of its role, for as long as it is in the cluster: to
// their replacements as well. Ids that it is linked to already, and its own, change nothing.
// They do the same on their side, or cannot answer. An error wraps van.ErrInvalid; nothing
// was connected then.
func (m *Machine) Link(_ time.Duration, ids []int) error {
	switch {
	case m.life.phase == failed:
		return m.life.failure
	case m.life.phase != ready || m.node == nil:
		return &van.Error{Op: "link", Node: m.table.name(), Detail: "only workers and servers are linked, once they have started", Err: van.ErrInvalid}
	}
	return m.node.records.link(ids)
}

// PoliciesAre says what this node has of the list of that version: a State for each. The
// scheduler is told, if it is new.
func (m *Machine) PoliciesAre(_ time.Duration, version uint32, states string) {
	if m.node != nil {
		m.node.policies.reportStates(version, states)
	}
}

// Ready tells whether start-up is complete and the node is part of the cluster.
func (m *Machine) Ready() bool { return m.life.phase == ready }

// IsRecovery tells whether this node replaces a dead one, or is a scheduler that has
// resumed the cluster of a former one. The others have passed the start-up barrier then.
func (m *Machine) IsRecovery() bool { return m.table.self.IsRecovery || m.life.recovered }

// Report describes the present state.
func (m *Machine) Report(now time.Duration) Report { return m.role.report(now) }
