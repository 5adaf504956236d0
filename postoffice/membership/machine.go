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

type phase int

const (
	created phase = iota
	joining       // Start was called; nodes are missing
	ready
	failed
)

// Machine is one node's membership. Make it with New.
type Machine struct {
	cfg   Config
	phase phase
	self  van.Node // ID is van.Empty until the scheduler has given one

	started    time.Duration
	nextReport time.Duration // while joining
	nextBeat   time.Duration // when ready, if heartbeats are sent
	stamp      int32         // the control counter: timestamp of the next control message

	out   []Output
	conns map[int]bool // ids that Send may name, besides this node's

	// table holds all records in the scheduler's order; at finds them by id.
	// Both are empty until start-up is complete.
	table  []van.Node
	at     map[int]int
	shared map[int]int // ids without a node of their own, see assignIDs
	health map[int]*health
	news   map[int]int32 // timestamp of the scheduler's latest message about each node, see outdated

	first  map[int]bool // ids whose first connections end start-up
	linked []int        // of this node's role, see Link

	tickets    []*ticket
	withdrawn  []*ticket // given up; the scheduler is told not to count their requests
	lastTicket int

	// leaving: the final barrier is over, or Leaving was called, so peers may leave.
	// While a Finalize waits, losses are kept in held until it is known whether the
	// peers have left in order.
	leaving bool
	failure error // what ended the machine
	held    map[int]loss

	// own is this process's identity, with the cluster's when it is known; incs has the
	// incarnations of nodes of this library, by id. See identity.go.
	own              van.Identity
	incs             map[int]uint32
	generation       uint32   // of the table: how many replacements it has seen
	formerSchedulers []uint32 // incarnations
	recovered        bool     // on the scheduler: it has resumed an earlier one's cluster

	lastCheck time.Duration // when silence was last checked
	rejoining bool          // the scheduler is a new process, which does not know the cluster yet

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
	m := &Machine{cfg: cfg, conns: map[int]bool{}, at: map[int]int{}, health: map[int]*health{}, held: map[int]loss{}, incs: map[int]uint32{}, first: map[int]bool{}, news: map[int]int32{}}
	m.cfg.Scheduler = van.Node{Role: van.Scheduler, ID: van.SchedulerID, Hostname: cfg.Scheduler.Hostname,
		Port: cfg.Scheduler.Port, Ports: []int32{int32(cfg.Scheduler.Port)},
		DevTypes: []int32{int32(backend.CPU)}, DevIDs: []int32{0}, AuxID: -1}
	m.own, _ = cfg.Self.Identity()
	m.own.Local = slices.Clone(m.own.Local)
	if cfg.Role == van.Scheduler {
		m.self = m.cfg.Scheduler
		m.sign()
		m.learn(van.SchedulerID, &m.self)
		hosts, err := hostOrder(cfg.OrderedHosts)
		if err != nil {
			return nil, err
		}
		m.sched = newScheduler(hosts)
		return m, nil
	}
	m.self = cfg.Self.Clone()
	m.self.Role, m.self.ID, m.self.IsRecovery = cfg.Role, van.Empty, false
	if len(m.self.Ports) == 0 {
		m.self.Ports = []int32{int32(m.self.Port)}
	}
	return m, nil
}

// Start begins start-up: a worker or server connects to the scheduler and
// registers. A second call does nothing.
func (m *Machine) Start(now time.Duration) {
	if m.phase != created {
		return
	}
	m.phase, m.started, m.nextReport = joining, now, now+m.cfg.ReportEvery
	if m.sched == nil {
		m.connect(van.SchedulerID, m.cfg.Scheduler)
		m.register()
	}
}

// Step handles one control message from node from (van.Empty if it has no id). It
// does not keep msg. The error, which wraps van.ErrMalformed, names the sender and the
// invalid field; the message was dropped then, but counts as a sign of life. A failed
// machine ignores every message.
func (m *Machine) Step(now time.Duration, from int, msg *van.Meta) error {
	if m.phase == failed {
		return nil
	}
	if m.phase == created {
		return m.bad(from, msg, "control.cmd", msg.Control.Cmd, "nothing before Start")
	}
	if !m.genuine(now, from, msg) {
		if m.stray(now, from, msg) {
			return nil
		}
		by, to := msg.Incarnations()
		return m.bad(from, msg, "incarnations", fmt.Sprintf("%08x to %08x", by, to),
			fmt.Sprintf("%08x to %08x", m.incs[from], m.own.Incarnation))
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
		return m.bad(from, msg, "control.cmd", c.Cmd, "ADD_NODE, BARRIER, INSTANCE_BARRIER or HEARTBEAT")
	}
}

// ConnectFailed says that a Connect to id failed permanently. If start-up needs the
// connection, start-up fails, on all nodes that can be told; later the peer is lost until
// it is replaced. For a node without an id, whose address may be invalid, its registration
// is dropped.
func (m *Machine) ConnectFailed(now time.Duration, id int, cause error) {
	switch {
	case m.phase == failed || m.leaving:
	case id < 0:
		m.PeerLost(now, id, cause)
	case m.phase == joining && id == van.SchedulerID || m.first[id]:
		if m.sched != nil {
			m.tellAll(id, notice{verb: verbError, text: fmt.Sprintf("start-up has failed: the scheduler cannot connect to %s: %s", m.peer(id), cause)})
		}
		m.fail(&van.Error{Op: "start: connect", Node: m.name(), Peer: m.peer(id), Err: cause})
	default:
		m.PeerLost(now, id, cause)
	}
}

// Tick advances time. It may be called at any time, and need not be called before the
// time that NextTick returns.
func (m *Machine) Tick(now time.Duration) {
	switch m.phase {
	case joining:
		m.tickReturn(now)
		if m.phase == joining {
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
	switch m.phase {
	case joining:
		next = m.nextReport
		if m.cfg.StartTimeout > 0 {
			next = min(next, m.started+m.cfg.StartTimeout)
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
	out := m.out
	m.out = nil
	return out
}

// tickStart reports the missing nodes, or gives up.
func (m *Machine) tickStart(now time.Duration) {
	if d := m.cfg.StartTimeout; d > 0 && now-m.started >= d {
		err := &van.Error{Op: "start", Node: m.name(), Detail: m.Report(now).String(), Limit: d, Err: van.ErrTimeout}
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
	m.emit(Waiting{r})
	if m.sched != nil {
		m.tellJoining(notice{verb: verbWaiting, text: r.String()})
	}
}

// fail ends the machine.
func (m *Machine) fail(err error) {
	if m.phase == failed {
		return
	}
	m.failTickets(func(*ticket) bool { return true }, van.Error{Err: err})
	m.phase, m.failure = failed, err
	m.emit(Failed{err})
}

// ID is the node's id, or van.Empty before it has one.
func (m *Machine) ID() int { return m.self.ID }

// Ready tells whether start-up is complete and the node is part of the cluster.
func (m *Machine) Ready() bool { return m.phase == ready }

// IsRecovery tells whether this node replaces a dead one, or is a scheduler that has
// resumed the cluster of a former one. The others have passed the start-up barrier then.
func (m *Machine) IsRecovery() bool { return m.self.IsRecovery || m.recovered }

// Node returns the record of a node; before start-up is complete only this node's and the
// scheduler's are known.
func (m *Machine) Node(id int) (van.Node, bool) {
	switch i, ok := m.at[id]; {
	case id == m.self.ID && id != van.Empty:
		return m.self, true
	case id == van.SchedulerID:
		return m.cfg.Scheduler, true
	case ok:
		return m.table[i], true
	}
	return van.Node{}, false
}

// Members returns the ids of a group (1 to 7): workers by rank, servers by rank,
// the scheduler. A node id of 8 or more is a group of its own. It returns nil if this
// cluster has no such group.
func (m *Machine) Members(group int) []int {
	ids := m.cfg.members(group)
	return slices.DeleteFunc(ids, func(id int) bool { _, no := m.shared[id]; return no })
}

func (m *Machine) emit(o Output) { m.out = append(m.out, o) }

// next returns the timestamp of the next control message.
func (m *Machine) next() int32 {
	if m.stamp == van.Empty {
		m.stamp++
	}
	t := m.stamp
	m.stamp = (m.stamp + 1) & math.MaxInt32
	return t
}

// control returns a control message with the next timestamp.
func (m *Machine) control(cmd van.Command) van.Meta {
	var meta van.Meta
	meta.Reset()
	meta.Timestamp = m.next()
	meta.Control.Cmd = cmd
	return meta
}

// send emits a message if there is a connection to the node.
func (m *Machine) send(to int, meta van.Meta) {
	if m.conns[to] || to == m.self.ID {
		if inc := m.incs[to]; inc != 0 {
			meta.SetIncarnations(m.own.Incarnation, inc)
		}
		m.emit(Send{to, meta})
	}
}

func (m *Machine) connect(id int, n van.Node) {
	m.conns[id] = true
	if id < 0 {
		m.learn(id, &n)
	}
	m.emit(Connect{id, n})
}

// rename gives the connection with a temporary id the id of a member.
func (m *Machine) rename(temp, id int) {
	delete(m.conns, temp)
	delete(m.incs, temp)
	m.conns[id] = true
	m.emit(Rename{temp, id})
}

func (m *Machine) disconnect(id int) {
	if m.conns[id] {
		delete(m.conns, id)
		delete(m.incs, id)
		m.emit(Disconnect{id})
	}
}

// name names this node, for errors.
func (m *Machine) name() string {
	if m.self.ID != van.Empty {
		return van.NodeName(m.self.ID)
	}
	return fmt.Sprintf("%s at %s", m.self.Role, m.self.Addr())
}

// peer names node id and its address, for errors.
func (m *Machine) peer(id int) string {
	if n, ok := m.Node(id); ok {
		return van.NodeName(id) + " at " + n.Addr()
	}
	return van.NodeName(id)
}

func (m *Machine) bad(from int, msg *van.Meta, field string, value any, want string) error {
	return m.badErr(from, msg, &van.FieldError{Field: field, Value: value, Want: want})
}

func (m *Machine) badErr(from int, msg *van.Meta, err error) error {
	return &van.Error{Op: "receive " + msg.Control.Cmd.String(), Node: m.name(), Peer: m.peer(from), Err: err}
}
