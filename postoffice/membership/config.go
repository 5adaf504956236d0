package membership

// The configuration of a Machine and its checks, the members of a group, and the number of requests that release a
// barrier over it.

import (
	"cmp"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
)

// maxInstances keeps the ids of a role below van.Empty.
const maxInstances = (van.Empty - 9) / 2

const (
	defaultReportEvery = 5 * time.Second
	reportEarlier      = time.Second // the first report of a node that probes addresses is earlier: it names a wrong setting within 5 s
)

// Config describes a node and its cluster. The counts must be the same on all nodes.
type Config struct {
	// Role is Server, Worker or Scheduler. A joint process runs two machines.
	Role       van.Role
	NumWorkers int // DMLC_NUM_WORKER: groups
	NumServers int // DMLC_NUM_SERVER: groups
	GroupSize  int // DMLC_GROUP_SIZE: instances a group; 0 means 1

	// Self has the address that this node listens at and advertises, and in AuxID its preferred instance rank, or -1;
	// the scheduler's address is Scheduler. Its endpoint has the identity of this process; without one the node
	// behaves as a C++ StepMesh node.
	Self      van.Node
	Scheduler van.Node // host and port

	HeartbeatInterval time.Duration // PS_HEARTBEAT_INTERVAL; 0: none are sent
	HeartbeatTimeout  time.Duration // PS_HEARTBEAT_TIMEOUT; 0: silent nodes are not dead
	// With NativeInterval heartbeats are sent only to a scheduler of this library, the first one at once. With
	// NativeTimeout the timeout applies only to nodes that have sent a heartbeat.
	NativeInterval, NativeTimeout bool
	// NamedCluster: the cluster in Self's identity is that of STEPAF_CLUSTER_ID, which all nodes must have. Otherwise
	// the scheduler's is any number, and that of other nodes 0.
	NamedCluster bool
	// Foreign: nodes of C++ StepMesh, which have no identity, may be in a NamedCluster, or its scheduler may be one.
	Foreign      bool
	Nonce        uint64        // random, of the scheduler's process: see addressProof
	CanProbe     bool          // the transport can perform Probe and Reply
	StartTimeout time.Duration // limit of start-up; 0: none
	// ReplaceTimeout is the time for which a barrier waits for the replacement of a dead node, or for the scheduler,
	// when no live node is missing.
	ReplaceTimeout time.Duration
	BarrierTimeout time.Duration // limit of Barrier; 0: none
	// StopTimeout is the limit of a worker's Finalize; 0: none. It does not apply to servers and the scheduler, which
	// often call Finalize as soon as they run.
	StopTimeout time.Duration
	ReportEvery time.Duration // between two reports of missing nodes; 0 means 5 s

	// OrderedHosts is BYTEPS_ORDERED_HOSTS ("ip" or "ip:port"), used by the scheduler. If not empty, ranks follow it
	// and nodes on other hosts are refused.
	OrderedHosts []string
}

func (c *Config) instances(role van.Role) int {
	if role == van.Worker {
		return c.NumWorkers * c.GroupSize
	}
	return c.NumServers * c.GroupSize
}

// formula shows the variables that determine the number of nodes of a role.
func (c *Config) formula(role van.Role) string {
	name, n := "DMLC_NUM_SERVER", c.NumServers
	if role == van.Worker {
		name, n = "DMLC_NUM_WORKER", c.NumWorkers
	}
	return fmt.Sprintf("%s=%d x DMLC_GROUP_SIZE=%d", name, n, c.GroupSize)
}

func (c *Config) check() error {
	invalid := func(detail, hint string) error {
		return &van.Error{Op: "configure " + c.Role.String(), Detail: detail, Hint: hint, Err: van.ErrInvalid}
	}
	c.GroupSize = cmp.Or(c.GroupSize, 1)
	c.ReportEvery = cmp.Or(c.ReportEvery, defaultReportEvery)
	switch c.Role {
	case van.Worker, van.Server, van.Scheduler:
	default:
		return invalid(fmt.Sprintf("role %s: want worker, server or scheduler", c.Role), "")
	}
	if c.GroupSize < 1 || c.GroupSize > maxInstances {
		return invalid(fmt.Sprintf("DMLC_GROUP_SIZE=%d: want 1 to %d", c.GroupSize, maxInstances), "")
	}
	for _, n := range []struct {
		name string
		n    int
	}{{"DMLC_NUM_WORKER", c.NumWorkers}, {"DMLC_NUM_SERVER", c.NumServers}} {
		if n.n < 1 || n.n > maxInstances/c.GroupSize {
			return invalid(fmt.Sprintf("%s=%d: want 1 to %d", n.name, n.n, maxInstances/c.GroupSize), "")
		}
	}
	for _, d := range []struct {
		name string
		d    time.Duration
	}{{"HeartbeatInterval", c.HeartbeatInterval}, {"HeartbeatTimeout", c.HeartbeatTimeout},
		{"StartTimeout", c.StartTimeout}, {"StopTimeout", c.StopTimeout},
		{"ReplaceTimeout", c.ReplaceTimeout}, {"BarrierTimeout", c.BarrierTimeout}, {"ReportEvery", c.ReportEvery}} {
		if d.d < 0 {
			return invalid(fmt.Sprintf("%s=%s: want 0 or more", d.name, d.d), "")
		}
	}
	if err := checkAddr(&c.Scheduler, "scheduler address"); err != nil {
		return invalid(err.Error(), "set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT")
	}
	if c.Role != van.Scheduler {
		if err := checkNode(&c.Self, "own address"); err != nil {
			return invalid(err.Error(), "set DMLC_NODE_HOST")
		}
		n := c.instances(c.Role)
		if r := c.Self.AuxID; r < -1 || r >= n {
			return invalid(fmt.Sprintf("preferred rank %d of a %s: want 0 to %d, or -1 for any (%s)", r, c.Role, n-1,
				c.formula(c.Role)), "check DMLC_NODE_RANK, STEPMESH_GPU and DMLC_RANK_OFFSET")
		}
		if c.Self.AuxID == -1 && c.GroupSize > 1 {
			return invalid(fmt.Sprintf("no preferred rank with DMLC_GROUP_SIZE=%d", c.GroupSize), "set DMLC_NODE_RANK")
		}
	}
	_, err := hostOrder(c.OrderedHosts)
	return err
}

func checkAddr(n *van.Node, what string) error {
	if n.Hostname == "" || len(n.Hostname) > van.MaxHostnameLen ||
		strings.ContainsFunc(n.Hostname, func(r rune) bool { return !unicode.IsGraphic(r) || r == ' ' || r == '"' }) {
		return fmt.Errorf("%s: hostname %q: want 1 to %d bytes, printable, without spaces and quotes", what, n.Hostname, van.MaxHostnameLen)
	}
	if n.Port < 1 || n.Port > 65535 {
		return fmt.Errorf("%s: port %d: want 1 to 65535", what, n.Port)
	}
	return nil
}

// checkNode is checkAddr for a worker or server, to whose address other nodes connect.
func checkNode(n *van.Node, what string) error {
	err := checkAddr(n, what)
	if err != nil {
		return err
	}
	if err := hostaddr.Check(n.Hostname); err != nil {
		return fmt.Errorf("%s: hostname %q: %w", what, n.Hostname, err)
	}
	return nil
}

// hostOrder maps each host of BYTEPS_ORDERED_HOSTS to its position; ports are ignored, as in C++ StepMesh.
func hostOrder(hosts []string) (map[string]int, error) {
	if len(hosts) == 0 {
		return nil, nil
	}
	order := make(map[string]int, len(hosts))
	for i, h := range hosts {
		ip, _, _ := strings.Cut(strings.TrimSpace(h), ":")
		ip = hostaddr.Canonical(ip)
		if prev, dup := order[ip]; dup || ip == "" {
			detail := fmt.Sprintf("BYTEPS_ORDERED_HOSTS entry %d is %q", i, h)
			if dup {
				detail += fmt.Sprintf(", the host of entry %d", prev)
			}
			return nil, &van.Error{Op: "configure scheduler", Detail: detail, Hint: "list each host once", Err: van.ErrInvalid}
		}
		order[ip] = i
	}
	return order, nil
}

// members lists the node ids of a group: workers by rank, servers by rank, the
// scheduler. The id of a worker or server is a group of its own. It returns nil if
// this cluster has no such group.
func (c *Config) members(group int) (ids []int) {
	switch {
	case group < 1 || group > van.AllNodes && van.RankOf(group) >= c.instances(van.RoleOf(group)):
		return nil
	case group > van.AllNodes:
		return []int{group}
	}
	if group&van.WorkerGroup != 0 {
		for r := range c.instances(van.Worker) {
			ids = append(ids, van.WorkerID(r))
		}
	}
	if group&van.ServerGroup != 0 {
		for r := range c.instances(van.Server) {
			ids = append(ids, van.ServerID(r))
		}
	}
	if group&van.SchedulerID != 0 {
		ids = append(ids, van.SchedulerID)
	}
	return ids
}

func (c *Config) groupLen(group int) int { return len(c.members(group)) }

// expected is the number of requests that release a barrier over group 1 to 7.
func (c *Config) expected(group int, instance bool) int {
	n := c.groupLen(group)
	switch {
	case instance:
		return n
	case group == van.SchedulerID:
		return 1
	case group&van.SchedulerID != 0:
		return (n-1)/c.GroupSize + 1
	default:
		return n / c.GroupSize
	}
}

// trivial reports whether a barrier over group completes without any message.
func (c *Config) trivial(group int, instance bool) bool {
	n := c.groupLen(group)
	return n <= 1 || !instance && n <= c.GroupSize
}

// groupBit is the group that holds all nodes of a role.
func groupBit(r van.Role) int {
	switch r {
	case van.Worker:
		return van.WorkerGroup
	case van.Server:
		return van.ServerGroup
	default:
		return van.SchedulerID
	}
}

// groupName describes a group id: "group 6 (workers, servers)".
func groupName(group int) string {
	if group > van.AllNodes {
		return van.NodeName(group)
	}
	var names []string
	for _, g := range []struct {
		bit  int
		name string
	}{{van.WorkerGroup, "workers"}, {van.ServerGroup, "servers"}, {van.SchedulerID, "scheduler"}} {
		if group&g.bit != 0 {
			names = append(names, g.name)
		}
	}
	return fmt.Sprintf("group %d (%s)", group, strings.Join(names, ", "))
}

func barrierCommand(instance bool) van.Command {
	if instance {
		return van.InstanceBarrier
	}
	return van.Barrier
}

func kindName(instance bool) string {
	if instance {
		return "instance"
	}
	return "group"
}
