package postoffice

// Roles, node ids and groups.

import (
	"strings"

	"github.com/stepaf/stepaf-go/van"
)

// Role is what a node is for: worker, server or scheduler.
type Role = van.Role

// Roles. Joint is a setting of a process (DMLC_ROLE=joint), which runs a server node and a worker node, see StartJoint.
const (
	Server    = van.Server
	Worker    = van.Worker
	Scheduler = van.Scheduler
	Joint     = van.Joint
)

// NodeID is the id of one node. Servers have even ids from 8, workers odd ids from 9. A process that replaces a lost one
// gets the same id.
type NodeID int

// SchedulerID is the id of the scheduler.
const SchedulerID NodeID = van.SchedulerID

// ServerID returns the id of the server with the given rank.
func ServerID(rank int) NodeID { return NodeID(van.ServerID(rank)) }

// WorkerID returns the id of the worker with the given rank.
func WorkerID(rank int) NodeID { return NodeID(van.WorkerID(rank)) }

// Role returns the role of the node.
func (id NodeID) Role() Role { return van.RoleOf(int(id)) }

// Rank returns the instance rank of the node, 0 for the scheduler.
func (id NodeID) Rank() int { return van.RankOf(int(id)) }

// String returns the name that logs and errors use: "server 0 (id 8)".
func (id NodeID) String() string { return van.NodeName(int(id)) }

// Group names all nodes of some roles. Groups are added to name several roles.
type Group int

// Groups of nodes.
const (
	SchedulerGroup Group = van.SchedulerID
	ServerGroup    Group = van.ServerGroup
	WorkerGroup    Group = van.WorkerGroup
	AllNodes       Group = van.AllNodes
)

// String returns the roles of the group: "servers and workers".
func (g Group) String() string {
	var roles []string
	for _, x := range []struct {
		group Group
		name  string
	}{{SchedulerGroup, "scheduler"}, {ServerGroup, "servers"}, {WorkerGroup, "workers"}} {
		if g&x.group != 0 {
			roles = append(roles, x.name)
		}
	}
	if len(roles) == 0 {
		return "no nodes"
	}
	return strings.Join(roles, " and ")
}

// Target is the receiver of a message: a NodeID, or a Group for each of its members.
type Target interface{ target() }

func (NodeID) target() {}
func (Group) target()  {}
