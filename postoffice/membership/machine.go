package membership

// Machine: its state, its inputs, and how it sends.

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Machine is one node's membership. Make it with New.
type Machine struct {
	cfg   *Config
	life  *life
	table *table
	out   *sender
	alive *liveness

	nextReport time.Duration // while joining
	nextBeat   time.Duration // when ready, if heartbeats are sent

	news map[int]int32 // timestamp of the scheduler's latest message about each node, see outdated

	linked []int // of this node's role, see Link

	tickets    []*ticket
	withdrawn  []*ticket // given up; the scheduler is told not to count their requests
	lastTicket int

	// While a Finalize waits, losses are kept in held until it is known whether the
	// peers have left in order.
	held map[int]loss

	formerSchedulers []uint32 // incarnations

	schedulerLost error  // while joining
	schedulerSaid string // text of the last waiting notice, while joining

	policies policies

	sched *scheduler // nil on workers and servers
}

// New checks cfg and makes a machine that waits for Start. The error wraps
// van.ErrInvalid and names the variable that is wrong.
func New(cfg Config) (*Machine, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	t := &table{cfg: &cfg, identities: identities{incs: map[int]uint32{}}}
	m := &Machine{cfg: &cfg, life: &life{}, table: t, out: &sender{table: t, conns: map[int]bool{}, first: map[int]bool{}},
		held: map[int]loss{}, news: map[int]int32{}}
	m.alive = &liveness{cfg: &cfg, life: m.life, table: t, out: m.out, peers: map[int]*health{}}
	m.table.scheduler = van.Node{Role: van.Scheduler, ID: van.SchedulerID, Hostname: cfg.Scheduler.Hostname,
		Port: cfg.Scheduler.Port, Ports: []int32{int32(cfg.Scheduler.Port)},
		DevTypes: []int32{int32(backend.CPU)}, DevIDs: []int32{0}, AuxID: -1}
	m.table.own, _ = cfg.Self.Identity()
	m.table.own.Local = slices.Clone(m.table.own.Local)
	if cfg.Role == van.Scheduler {
		m.table.self = m.table.scheduler
		m.table.sign(&m.table.self)
		m.table.learn(van.SchedulerID, &m.table.self)
		hosts, err := hostOrder(cfg.OrderedHosts)
		if err != nil {
			return nil, err
		}
		m.sched = newScheduler(hosts)
		return m, nil
	}
	m.table.self = cfg.Self.Clone()
	m.table.self.Role, m.table.self.ID, m.table.self.IsRecovery = cfg.Role, van.Empty, false
	if len(m.table.self.Ports) == 0 {
		m.table.self.Ports = []int32{int32(m.table.self.Port)}
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
	if m.sched == nil {
		m.out.connect(van.SchedulerID, m.table.scheduler)
		m.register()
	}
}

// Step handles one control message from node from (van.Empty if it has no id). It
// does not keep msg. The error, which wraps van.ErrMalformed, names the sender and the
// invalid field; the message was dropped then, but counts as a sign of life. A failed
// machine ignores every message.
func (m *Machine) Step(now time.Duration, from int, msg *van.Meta) error {
	if m.life.phase == failed {
		return nil
	}
	if m.life.phase == created {
		return m.table.bad(from, msg, "control.cmd", msg.Control.Cmd, "nothing before Start")
	}
	if !m.genuine(now, from, msg) {
		if m.stray(now, from, msg) {
			return nil
		}
		by, to := msg.Incarnations()
		return m.table.bad(from, msg, "incarnations", fmt.Sprintf("%08x to %08x", by, to),
			fmt.Sprintf("%08x to %08x", m.table.incs[from], m.table.own.Incarnation))
	}
	if msg.Control.Cmd != van.Heartbeat || len(msg.Control.Nodes) == 0 {
		m.heard(now, from) // stepHeartbeat first checks that the record is the node's
	}
	switch c := &msg.Control; c.Cmd {
	case van.AddNode:
		if m.sched != nil {
			return m.stepJoin(now, from, msg)
		}
		return m.stepTable(now, from, msg)
	case van.Barrier, van.InstanceBarrier:
		if msg.Request {
			return m.stepRequest(now, from, msg)
		}
		return m.stepRelease(now, from, msg)
	case van.Heartbeat:
		if len(c.Nodes) == 0 {
			return m.stepNotice(now, from, msg)
		}
		return m.stepHeartbeat(now, from, msg)
	default:
		return m.table.bad(from, msg, "control.cmd", c.Cmd, "ADD_NODE, BARRIER, INSTANCE_BARRIER or HEARTBEAT")
	}
}

// ConnectFailed says that a Connect to id failed permanently. If start-up needs the
// connection, start-up fails, on all nodes that can be told; later the peer is lost until
// it is replaced. For a node without an id, whose address may be invalid, its registration
// is dropped.
func (m *Machine) ConnectFailed(now time.Duration, id int, cause error) {
	switch {
	case m.life.phase == failed || m.life.leaving:
	case id < 0:
		m.PeerLost(now, id, cause)
	case m.life.phase == joining && id == van.SchedulerID || m.out.first[id]:
		if m.sched != nil {
			m.tellAll(id, notice{verb: verbError, text: fmt.Sprintf("start-up has failed: the scheduler cannot connect to %s: %s", m.table.peer(id), cause)})
		}
		m.fail(&van.Error{Op: "start: connect", Node: m.table.name(), Peer: m.table.peer(id), Err: cause})
	default:
		m.PeerLost(now, id, cause)
	}
}

// Tick advances time. It may be called at any time, and need not be called before the
// time that NextTick returns.
func (m *Machine) Tick(now time.Duration) {
	switch m.life.phase {
	case joining:
		m.tickReturn(now)
		if m.life.phase == joining {
			m.tickStart(now)
		}
	case ready:
		m.tickTickets(now)
		m.tickBarriers(now)
		m.tickHealth(now)
		m.tickUnheard(now)
	}
	m.tickRefusals(now)
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
		next = min(next, m.nextReturnTick(), m.nextRefusal())
	case ready:
		next = min(m.nextTicketTick(), m.nextBarrierTick(), m.nextHealthTick(), m.nextRefusal(), m.nextUnheard())
	}
	return next, next != math.MaxInt64
}

// Take removes and returns the outputs since the last call, oldest first. Node lists of
// several messages may share memory: do not modify them.
func (m *Machine) Take() []Output {
	return m.out.take()
}

// tickStart reports the missing nodes, or gives up.
func (m *Machine) tickStart(now time.Duration) {
	if d := m.cfg.StartTimeout; d > 0 && now-m.life.started >= d {
		err := &van.Error{Op: "start", Node: m.table.name(), Detail: m.Report(now).String(), Limit: d, Err: van.ErrTimeout}
		if m.sched != nil {
			m.tellJoining(notice{verb: verbError, text: "the scheduler gave up after " + d.String() + ": " + m.Report(now).String()})
		}
		m.fail(err)
		return
	}
	if now < m.nextReport {
		return
	}
	for m.nextReport <= now {
		m.nextReport += m.cfg.ReportEvery
	}
	r := m.Report(now)
	m.out.emit(Waiting{r})
	if m.sched != nil {
		m.tellJoining(notice{verb: verbWaiting, text: r.String()})
	}
}

// fail ends the machine.
func (m *Machine) fail(err error) {
	if m.life.phase == failed {
		return
	}
	m.failTickets(func(*ticket) bool { return true }, van.Error{Err: err})
	m.life.phase, m.life.failure = failed, err
	m.out.emit(Failed{err})
}

// ID is the node's id, or van.Empty before it has one.
func (m *Machine) ID() int { return m.table.self.ID }

// Ready tells whether start-up is complete and the node is part of the cluster.
func (m *Machine) Ready() bool { return m.life.phase == ready }

// IsRecovery tells whether this node replaces a dead one, or is a scheduler that has
// resumed the cluster of a former one. The others have passed the start-up barrier then.
func (m *Machine) IsRecovery() bool { return m.table.self.IsRecovery || m.life.recovered }

// Node returns the record of a node; before start-up is complete only this node's and the
// scheduler's are known.
func (m *Machine) Node(id int) (van.Node, bool) {
	return m.table.node(id)
}

// Members returns the ids of a group (1 to 7): workers by rank, servers by rank,
// the scheduler. A node id of 8 or more is a group of its own. It returns nil if this
// cluster has no such group.
func (m *Machine) Members(group int) []int {
	return m.table.members(group)
}

// Incarnation is that of the process that has id, or 0 for a C++ StepMesh node and for an
// unknown one.
func (m *Machine) Incarnation(id int) uint32 { return m.table.incs[id] }
