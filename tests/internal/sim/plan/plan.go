// Package plan describes a test of a cluster as data: the shape of the cluster, its network,
// the loads, the faults (processes killed, stopped or cut off) and the expected
// results. The files are JSON (tests/plans). One runner carries a plan out in a simulation
// (internal/sim), another on real processes; docs/design/testing.md has the meaning of every
// field.
//
// A plan does not list the rules of all plans: no call returns wrong bytes, no
// call outlasts its limit, no push is seen twice, and when all faults are over, all
// live processes work again, and leave nothing behind.
package plan

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Plan is one test.
type Plan struct {
	Name    string `json:"name"`
	About   string `json:"about"`             // one sentence: the events, and the forbidden outcome
	Finding string `json:"finding,omitempty"` // class of faults that it was written for
	Only    string `json:"only,omitempty"`    // "simulation" or "processes"; both if empty

	// Promised tells that the documents promise the times of the plan: they are the same on
	// a slow machine.
	Promised bool `json:"promised,omitempty"`

	Cluster   Cluster   `json:"cluster"`
	Transport Transport `json:"transport"`
	Phases    []Phase   `json:"phases"`
	End       End       `json:"end"`
}

// Cluster is its shape at the beginning: all nodes start at once.
type Cluster struct {
	Workers int    `json:"workers"`
	Servers int    `json:"servers"`
	Group   int    `json:"group,omitempty"` // instances of each group, 1 if 0
	API     string `json:"api,omitempty"`   // "python" (get_batch), "tensor" (a handler), "kv" (push, then pull); tensor if empty

	// Foreign nodes behave like those of the original: they say nothing of
	// incarnations, and ignore notices.
	Foreign []Node `json:"foreign,omitempty"`

	// Env has further variables for all nodes, Nodes for some.
	Env   map[string]string          `json:"env,omitempty"`
	Nodes map[Node]map[string]string `json:"nodes,omitempty"`

	// FinalizeEarly lets scheduler and servers call Finalize (python: stop) as soon as
	// they have started, as most programs do. Else they do so at the end.
	FinalizeEarly bool `json:"finalize_early,omitempty"`

	// PlainScheduler: in Python programs the scheduler calls Finalize alone, as "stepaf scheduler" does, and the others
	// stop.
	PlainScheduler bool `json:"plain_scheduler,omitempty"`

	// LoopEnds: at the end the servers of Python programs stop when get_batch says that all workers have ended, not before.
	LoopEnds bool `json:"loop_ends,omitempty"`

	// Stuck is a node that stops at some time before StuckBy after its start: the
	// others must time out within STEPAF_START_TIMEOUT, or start. There are no phases then,
	// and nothing is expected of the end. On real processes, which take longer to begin, it
	// is the last one, and the time counts from when it connects to the scheduler.
	Stuck   Node     `json:"stuck,omitempty"`
	StuckBy Duration `json:"stuck_by,omitempty"`
}

// Transport is the network between the nodes. A runner on real processes takes Kind
// and Resend only.
type Transport struct {
	Kind      string   `json:"kind,omitempty"`      // "tcp", "shm", "rdma"; tcp if empty. A simulation has no shm and takes tcp
	Delay     Duration `json:"delay,omitempty"`     // of each message, one way; 100us if 0
	Jitter    Duration `json:"jitter,omitempty"`    // up to so much more
	Bandwidth int64    `json:"bandwidth,omitempty"` // bytes per second of each connection; no limit if 0
	Queue     int64    `json:"queue,omitempty"`     // bytes that may wait for one peer, then Send fails; no limit if 0
	Loss      float64  `json:"loss,omitempty"`      // share of messages that is lost; needs Resend
	Duplicate float64  `json:"duplicate,omitempty"` // share that comes twice; needs Resend
	Break     float64  `json:"break,omitempty"`     // share of messages after which the connection breaks
	Resend    bool     `json:"resend,omitempty"`    // PS_RESEND=1 on all nodes

	// Silence is how long a connection over a cut link stays up: until then no node
	// gets an event; 20s if 0.
	Silence Duration `json:"silence,omitempty"`
	// Backoff: when a cut ends, each direction of a connection over it waits up to as long again before it goes on,
	// as TCP does, which repeats ever more rarely. If that is longer than Silence from the cut's beginning on, the
	// connection breaks. Messages of a node that leaves are lost then.
	Backoff bool `json:"backoff,omitempty"`
}

// Phase is a part of a plan: its loads run for its whole time, its events happen at their
// times. The state at the end of a phase stays in the next.
type Phase struct {
	Name   string   `json:"name"`
	For    Duration `json:"for"`
	Loads  []Load   `json:"loads,omitempty"`
	Events []Event  `json:"events,omitempty"`
	Expect []Expect `json:"expect,omitempty"` // about this phase
}

// Load is work: each of the nodes makes a push_pull of all servers and waits for it,
// again and again. Processes that join in the phase take part.
type Load struct {
	Nodes  Nodes    `json:"nodes"`            // workers
	Every  Duration `json:"every,omitempty"`  // from the end of one call to the next; at once if 0
	Size   int      `json:"size,omitempty"`   // bytes of each tensor, 64 at least; 1024 if 0
	Pushes int      `json:"pushes,omitempty"` // tensors; 1 if 0 and no pulls
	Pulls  int      `json:"pulls,omitempty"`  // from each server; 1 if 0
	Window int      `json:"window,omitempty"` // calls in flight at once; 1 if 0
	Limit  Duration `json:"limit,omitempty"`  // of one call; 5s if 0
	Rounds int      `json:"rounds,omitempty"` // at most so many; no limit if 0
	// Barrier makes every so many rounds an instance barrier of all workers.
	Barrier int `json:"barrier,omitempty"`
	// Collectives makes the nodes, which are all workers or all servers, ranks of a communicator:
	// instead of push_pull they make one collective after the other, and the communicator anew when one
	// has failed. Pushes, Pulls, Rounds and Barrier mean nothing then.
	Collectives bool `json:"collectives,omitempty"`
}

// Event is something that happens at a time of its phase.
type Event struct {
	At   Duration `json:"at"`
	Do   Action   `json:"do"`
	Node Node     `json:"node,omitempty"`
	Peer Node     `json:"peer,omitempty"` // the other end: cut, heal, slow-link, break
	For  Duration `json:"for,omitempty"`  // it ends by itself after so long: stop, cut, slow-handler, slow-link

	Fork      bool  `json:"fork,omitempty"`      // kill: a child of the process keeps its sockets open
	NewHost   bool  `json:"new_host,omitempty"`  // join: at another address
	Bandwidth int64 `json:"bandwidth,omitempty"` // slow-link: bytes per second

	// Env has further variables of the process that joins. If it is refused, the next one
	// has them no more.
	Env map[string]string `json:"env,omitempty"`
}

// Action is the kind of an Event.
type Action string

// Actions.
const (
	Kill        Action = "kill"         // SIGKILL of a node's process
	Stop        Action = "stop"         // SIGSTOP
	Wake        Action = "wake"         // SIGCONT
	Join        Action = "join"         // a new process with the role and rank of the node
	Leave       Action = "leave"        // the process ends its part without waiting (Close), then ends
	Finalize    Action = "finalize"     // Finalize; python: stop
	Barrier     Action = "barrier"      // the node calls InstanceBarrier of all workers and servers
	Cut         Action = "cut"          // nothing crosses the link of two nodes, no node gets an event. No peer: of the node and all others
	Heal        Action = "heal"         // the end of a cut
	Break       Action = "break"        // the connections of two nodes break, both get an event, and they connect again. No peer: all of the node's
	SlowLink    Action = "slow-link"    // the link of two nodes has Bandwidth only
	SlowHandler Action = "slow-handler" // the server's handler (python: the caller of get_batch) blocks
)

var actions = []Action{Kill, Stop, Wake, Join, Leave, Finalize, Barrier, Cut, Heal, Break, SlowLink, SlowHandler}

// Expect is a requirement that goes beyond those of every plan.
type Expect struct {
	// Nodes are the processes that it is about: the processes of these ranks that lived at the
	// end of the phase, or, with Replaced, their replaced processes.
	Nodes    Nodes `json:"nodes"`
	Replaced bool  `json:"replaced,omitempty"`

	// Rounds of the phase: "all" (at least one, and none failed), "some", "none"
	// succeeded; "any" or empty says nothing. After leaves out those that began before
	// that time of the phase.
	Rounds string   `json:"rounds,omitempty"`
	After  Duration `json:"after,omitempty"`

	// Barriers that the nodes called in the phase: "pass", "fail", "end" (either).
	Barriers string `json:"barriers,omitempty"`

	// Within is the longest that a failed call of the phase took, or a barrier, passed or not.
	Within Duration `json:"within,omitempty"`

	// Error is a text that every error of a failed call must contain.
	Error string `json:"error,omitempty"`

	// SomeError is a text that an error of at least one failed call must contain.
	SomeError string `json:"some_error,omitempty"`
}

// End describes the steps after the last phase. By default all links are healed, stopped
// processes woken and dead nodes replaced; then all nodes with loads must work, and all nodes
// finalize.
type End struct {
	Settle  Duration `json:"settle,omitempty"`  // from the end of all faults until everything must work; 30s if 0
	Rounds  int      `json:"rounds,omitempty"`  // of each worker, none of which may fail; 3 if 0
	Abandon bool     `json:"abandon,omitempty"` // no replacements and no rounds: all are closed as they are
}

// Node names a process by role and instance rank, "worker 0", or "scheduler".
type Node string

// Nodes is one node, or "workers", "servers", or "all".
type Nodes string

// Duration is a time.Duration that is a string such as "1.5s" in JSON.
type Duration time.Duration

// D is the duration.
func (d Duration) D() time.Duration { return time.Duration(d) }

// Or is d, or def if it is 0.
func (d Duration) Or(def time.Duration) time.Duration { return cmp.Or(d.D(), def) }

// UnmarshalJSON reads the format of time.ParseDuration.
func (d *Duration) UnmarshalJSON(b []byte) error {
	s, err := strconv.Unquote(string(b))
	if err != nil {
		return fmt.Errorf("%s: want a duration in quotes, such as \"1.5s\"", b)
	}
	x, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("%q: want a duration, such as \"1.5s\"", s)
	}
	*d = Duration(x)
	return nil
}

// MarshalJSON writes what UnmarshalJSON reads.
func (d Duration) MarshalJSON() ([]byte, error) {
	return []byte(strconv.Quote(time.Duration(d).String())), nil
}

// NodeOf names a node.
func NodeOf(role string, rank int) Node {
	if role == "scheduler" {
		return "scheduler"
	}
	return Node(fmt.Sprintf("%s %d", role, rank))
}

// Role is "worker", "server" or "scheduler".
func (n Node) Role() string {
	role, _, _ := strings.Cut(string(n), " ")
	return role
}

// Rank is the instance rank; 0 for the scheduler.
func (n Node) Rank() int {
	_, rank, _ := strings.Cut(string(n), " ")
	r, _ := strconv.Atoi(rank)
	return r
}

// Has tells whether n is one of s.
func (s Nodes) Has(n Node) bool {
	switch s {
	case "all":
		return true
	case "workers":
		return n.Role() == "worker"
	case "servers":
		return n.Role() == "server"
	}
	return string(s) == string(n)
}

// All lists the nodes of the cluster, the scheduler first.
func (c *Cluster) All() []Node {
	all := []Node{"scheduler"}
	g := max(c.Group, 1)
	for r := range c.Servers * g {
		all = append(all, NodeOf("server", r))
	}
	for r := range c.Workers * g {
		all = append(all, NodeOf("worker", r))
	}
	return all
}

// IsForeign tells whether n behaves like a node of the original.
func (c *Cluster) IsForeign(n Node) bool { return slices.Contains(c.Foreign, n) }

// Length is the time of all phases, plus the time in which starts that cannot succeed time out.
func (p *Plan) Length() (d time.Duration) {
	if p.Cluster.Stuck != "" {
		seconds, _ := strconv.Atoi(p.Cluster.Env["STEPAF_START_TIMEOUT"])
		d = time.Duration(seconds) * time.Second
	}
	for i := range p.Phases {
		d += p.Phases[i].For.D()
	}
	return d
}

// Slower is p for a machine that is n times as slow: everything happens n times as late, and may
// take n times as long. The nodes' own times that a plan is about go with it, also those that it
// does not name. Of a plan whose times are promised nothing is slower but the rate of its calls,
// and all may take longer to settle after its end.
func (p *Plan) Slower(n int) *Plan {
	by, q := Duration(n), *p
	q.End.Settle = Duration(p.End.Settle.Or(30*time.Second)) * by
	q.Phases = slices.Clone(p.Phases)
	for i := range q.Phases {
		ph := &q.Phases[i]
		ph.Loads = slices.Clone(ph.Loads)
		for k := range ph.Loads {
			ph.Loads[k].Every *= by
		}
	}
	if p.Promised {
		return &q
	}
	q.Cluster.Env = maps.Clone(p.Cluster.Env)
	if q.Cluster.Env == nil {
		q.Cluster.Env = map[string]string{}
	}
	for name, def := range map[string]string{"PS_HEARTBEAT_INTERVAL": "", "PS_HEARTBEAT_TIMEOUT": "10", "STEPAF_REPLACE_TIMEOUT": "10",
		"STEPAF_START_TIMEOUT": ""} {
		if _, set := q.Cluster.Env["PS_HEARTBEAT_INTERVAL"]; set && name == "PS_HEARTBEAT_TIMEOUT" {
			def = "" // it follows from that
		}
		if seconds, err := strconv.Atoi(cmp.Or(p.Cluster.Env[name], def)); err == nil {
			q.Cluster.Env[name] = strconv.Itoa(seconds * n)
		}
	}
	q.Cluster.StuckBy *= by
	for i := range q.Phases {
		ph := &q.Phases[i]
		ph.For *= by
		ph.Events, ph.Expect = slices.Clone(ph.Events), slices.Clone(ph.Expect)
		for k := range ph.Loads {
			l := &ph.Loads[k]
			l.Limit = Duration(l.Limit.Or(5*time.Second)) * by
		}
		for k := range ph.Events {
			e := &ph.Events[k]
			e.At, e.For = e.At*by, e.For*by
		}
		for k := range ph.Expect {
			e := &ph.Expect[k]
			e.After, e.Within = e.After*by, e.Within*by
		}
	}
	return &q
}
