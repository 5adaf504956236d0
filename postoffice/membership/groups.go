package membership

// Which nodes belong to a group, and how many requests release a barrier over it.

import (
	"fmt"
	"strings"

	"github.com/stepaf/stepaf-go/van"
)

// members lists the node ids of a group: workers by rank, servers by rank, the
// scheduler. The id of a worker or server is a group of its own. It returns nil if
// this cluster has no such group.
func (c *Config) members(group int) []int {
	workers, servers := c.instances(van.Worker), c.instances(van.Server)
	if group > van.AllNodes {
		n := servers
		if van.RoleOf(group) == van.Worker {
			n = workers
		}
		if van.RankOf(group) >= n {
			return nil
		}
		return []int{group}
	}
	if group < 1 {
		return nil
	}
	ids := make([]int, 0, c.groupLen(group))
	if group&van.WorkerGroup != 0 {
		for r := range workers {
			ids = append(ids, van.WorkerID(r))
		}
	}
	if group&van.ServerGroup != 0 {
		for r := range servers {
			ids = append(ids, van.ServerID(r))
		}
	}
	if group&van.SchedulerID != 0 {
		ids = append(ids, van.SchedulerID)
	}
	return ids
}

// groupLen is the number of members of group 1 to 7.
func (c *Config) groupLen(group int) int {
	n := 0
	if group&van.WorkerGroup != 0 {
		n += c.instances(van.Worker)
	}
	if group&van.ServerGroup != 0 {
		n += c.instances(van.Server)
	}
	if group&van.SchedulerID != 0 {
		n++
	}
	return n
}

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

// trivial tells whether a barrier over group is complete without any message.
func (c *Config) trivial(group int, instance bool) bool {
	n := 1
	if group <= van.AllNodes {
		n = c.groupLen(group)
	}
	if instance {
		return n <= 1
	}
	return n <= c.GroupSize
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

func kindName(instance bool) string {
	if instance {
		return "instance"
	}
	return "group"
}
