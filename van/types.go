package van

// The fields of a message as Go types: roles, ids, commands, node records and the Meta.

import (
	"fmt"
	"log/slog"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Empty is ps-lite's "not set" value for head, app id, customer id, timestamp,
// node id and port.
const Empty = 32767

// MaxFrames is the largest number of data frames in a message: keys, values, lengths.
const MaxFrames = 3

// MaxDims is the maximum number of dimensions of a shape.
const MaxDims = 8

// Role is the role of a node. The values travel in node records.
type Role int32

// Roles as they appear on the wire. Joint does not travel: a joint process runs a
// server node and a worker node, each with an id of its own.
const (
	Server    Role = 0
	Worker    Role = 1
	Scheduler Role = 2
	Joint     Role = 3
)

var roleNames = [...]string{Server: "server", Worker: "worker", Scheduler: "scheduler", Joint: "joint"}

// String returns the role as DMLC_ROLE spells it.
func (r Role) String() string {
	if r >= 0 && int(r) < len(roleNames) {
		return roleNames[r]
	}
	return fmt.Sprintf("role(%d)", int32(r))
}

// Ids of nodes and groups. A group id is a bit; sums are unions.
const (
	SchedulerID    = 1
	ServerGroup    = 2
	WorkerGroup    = 4
	AllNodes       = SchedulerID | ServerGroup | WorkerGroup
	firstServerID  = 8
	firstWorkerID  = 9
	idsBetweenRank = 2
)

// ServerID returns the node id of the server with instance rank r.
func ServerID(r int) int { return r*idsBetweenRank + firstServerID }

// WorkerID returns the node id of the worker with instance rank r.
func WorkerID(r int) int { return r*idsBetweenRank + firstWorkerID }

// RankOf returns the instance rank of a node id; 0 for the scheduler.
func RankOf(id int) int { return max((id-firstServerID)/idsBetweenRank, 0) }

// RoleOf returns the role that an assigned node id implies.
func RoleOf(id int) Role {
	switch {
	case id < firstServerID:
		return Scheduler
	case id%2 == 1:
		return Worker
	default:
		return Server
	}
}

// NodeName returns the name of node id for logs and errors: "server 0 (id 8)".
func NodeName(id int) string {
	switch {
	case id == SchedulerID:
		return "scheduler (id 1)"
	case id == Empty:
		return "a node without an id"
	case id < firstServerID:
		return fmt.Sprintf("pending node %d", id)
	}
	return fmt.Sprintf("%s %d (id %d)", RoleOf(id), RankOf(id), id)
}

// Command is the command of a control message. EmptyCmd is that of a data message.
type Command int32

// Commands as they appear on the wire. Bootstrap, AddrRequest and AddrResolved
// belong to transports that this library does not have.
const (
	EmptyCmd        Command = 0
	Terminate       Command = 1
	AddNode         Command = 2
	Barrier         Command = 3
	Ack             Command = 4
	Heartbeat       Command = 5
	Bootstrap       Command = 6
	AddrRequest     Command = 7
	AddrResolved    Command = 8
	InstanceBarrier Command = 9
)

var commandNames = [...]string{"EMPTY", "TERMINATE", "ADD_NODE", "BARRIER", "ACK", "HEARTBEAT",
	"BOOTSTRAP", "ADDR_REQUEST", "ADDR_RESOLVED", "INSTANCE_BARRIER"}

// String returns the name that ps-lite gives the command.
func (c Command) String() string {
	if c.Valid() {
		return commandNames[c]
	}
	return fmt.Sprintf("command(%d)", int32(c))
}

// Valid reports whether the protocol defines the command.
func (c Command) Valid() bool { return c >= 0 && int(c) < len(commandNames) }

// DataType is the element type of a data frame. A message has one for each frame.
type DataType int32

// Data types as they appear on the wire.
const (
	TypeChar   DataType = 0
	TypeInt8   DataType = 1
	TypeInt16  DataType = 2
	TypeInt32  DataType = 3
	TypeInt64  DataType = 4
	TypeUint8  DataType = 5
	TypeUint16 DataType = 6
	TypeUint32 DataType = 7
	TypeUint64 DataType = 8
	TypeFloat  DataType = 9
	TypeDouble DataType = 10
	TypeOther  DataType = 11
)

var dataTypeNames = [...]string{"char", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64", "other"}

// String returns the name of the element type.
func (t DataType) String() string {
	if t >= 0 && int(t) < len(dataTypeNames) {
		return dataTypeNames[t]
	}
	return fmt.Sprintf("datatype(%d)", int32(t))
}

// BatchFlag is the head of a tensor message: the position of a message of ps-lite in its batch, or WholeBatch.
type BatchFlag = int32

// The batch flags.
const (
	Single      BatchFlag = 0
	BatchStart  BatchFlag = 1
	BatchMiddle BatchFlag = 2
	BatchEnd    BatchFlag = 3
	WholeBatch  BatchFlag = 4 // the message is a batch, see Part, or acknowledges one; C++ nodes never get it
)

// Limits of a node record.
const (
	MaxPorts        = 32
	MaxHostnameLen  = 63
	MaxEndpointName = 64
)

// Node is a node record: the node's role and id, and the address where it listens.
type Node struct {
	Role     Role
	ID       int // Empty until the scheduler has assigned an id
	Hostname string
	// Ports has at most MaxPorts entries. Port is the port that the node has bound;
	// connections use this one.
	Ports      []int32
	Port       int
	DevTypes   []int32 // parallel to Ports; meaningless over ZMQ
	DevIDs     []int32
	IsRecovery bool
	CustomerID int
	// Endpoint is an opaque transport address (at most MaxEndpointName bytes).
	Endpoint []byte
	// AuxID is the preferred instance rank, or -1.
	AuxID int
}

// Addr returns "host:port".
func (n *Node) Addr() string { return fmt.Sprintf("%s:%d", n.Hostname, n.Port) }

// Clone returns a deep copy of n. To keep the node of a received message, keep a
// clone: the transport reuses the message's own.
func (n *Node) Clone() Node {
	var c Node
	c.copyFrom(n)
	return c
}

// copyFrom makes n a deep copy of src. It reuses the capacity of n's slices.
func (n *Node) copyFrom(src *Node) {
	ports, types, ids, endpoint := n.Ports[:0], n.DevTypes[:0], n.DevIDs[:0], n.Endpoint[:0]
	*n = *src
	n.Ports = append(ports, src.Ports...)
	n.DevTypes = append(types, src.DevTypes...)
	n.DevIDs = append(ids, src.DevIDs...)
	n.Endpoint = append(endpoint, src.Endpoint...)
}

// Control is the control part of a message; all zero in data messages.
type Control struct {
	Cmd          Command
	BarrierGroup int    // only BARRIER and INSTANCE_BARRIER carry it
	MsgSig       uint64 // only ACK carries it
	Nodes        []Node
}

// Trace holds timestamps of one direction of a request, in nanoseconds of CLOCK_MONOTONIC
// of the host that took the timestamp.
type Trace struct {
	PreStart uint64 // in a request both incarnations, see SetIncarnations; otherwise not used
	Start    uint64 // the application called Send
	PostSend uint64 // the transport got the message
	PostRecv uint64 // the peer's transport delivered the message
	Process  uint64 // the peer's application got the message
}

// Now returns the time for a timestamp in a Trace. It reads the clock once, without a system call.
func Now() uint64 { return clock.Now() }

// Meta is a message without its data frames, sender and receiver. It
// mirrors ps-lite's Meta; see the package documentation for the layout.
type Meta struct {
	Head       int32
	AppID      int32
	CustomerID int32
	Timestamp  int32
	Request    bool
	Push       bool
	SimpleApp  bool
	Body       []byte
	DataTypes  []DataType // one for each data frame
	Src, Dst   backend.Device
	DataSize   int32 // bytes of all data frames
	Key        uint64
	Addr       uint64
	ValLen     int32 // bytes for tensors, elements for plain key-value messages
	Option     int32
	Sid        int32

	IsTensor bool
	Dtype    int32 // PyTorch's scalar type code
	Dim      int32
	Shape    [MaxDims]int64

	RequestTrace  Trace
	ResponseTrace Trace

	SlaveQPCounter [2]uint64
	SlaveQPNum     int32

	Control Control
}

// The largest capacities that Reset keeps: bytes of a body, node records.
const (
	keepBody  = 64 << 10
	keepNodes = 256
)

// Reset sets m to ps-lite's defaults for a new message. It keeps the capacity of
// short slices, so that reusing a Meta does not allocate. It releases long slices, so that one
// large message does not occupy memory forever.
func (m *Meta) Reset() {
	body, types, nodes := m.Body[:0], m.DataTypes[:0], m.Control.Nodes[:0]
	if cap(body) > keepBody {
		body = nil
	}
	if cap(nodes) > keepNodes {
		nodes = nil
	}
	*m = Meta{} // clears in place; a literal with values would be built elsewhere and copied
	m.Head, m.AppID, m.CustomerID, m.Timestamp = Empty, Empty, Empty, Empty
	m.Src.ID, m.Dst.ID = -1, -1
	m.Body, m.DataTypes = body, types
	m.Control.Nodes = nodes
}

// CopyFrom makes m a deep copy of src. It reuses the capacity of m's slices, so
// that copying into the same Meta repeatedly does not allocate.
func (m *Meta) CopyFrom(src *Meta) {
	body, types, nodes := m.Body[:0], m.DataTypes[:0], m.Control.Nodes[:0]
	*m = *src
	m.Body = append(body, src.Body...)
	m.DataTypes = append(types, src.DataTypes...)
	for i := range src.Control.Nodes {
		if len(nodes) < cap(nodes) {
			nodes = nodes[:len(nodes)+1]
		} else {
			nodes = append(nodes, Node{})
		}
		nodes[i].copyFrom(&src.Control.Nodes[i])
	}
	m.Control.Nodes = nodes
}

// ShapeSlice returns the dimensions as a slice of m's own array.
func (m *Meta) ShapeSlice() []int64 { return m.Shape[:m.Dim] }

// Trace returns the trace of the message's direction.
func (m *Meta) Trace() *Trace {
	if m.Request {
		return &m.RequestTrace
	}
	return &m.ResponseTrace
}

// IsControl reports whether m is a control message.
func (m *Meta) IsControl() bool { return m.Control.Cmd != EmptyCmd }

// LogValue implements slog.LogValuer: it returns String, which is computed only for a line that is logged.
func (m *Meta) LogValue() slog.Value { return slog.StringValue(m.String()) }

// String describes the message on one line, for logs at PS_VERBOSE=2.
func (m *Meta) String() string {
	if m.IsControl() {
		return fmt.Sprintf("%s request=%t ts=%d customer=%d group=%d nodes=%d", m.Control.Cmd, m.Request, m.Timestamp,
			m.CustomerID, m.Control.BarrierGroup, len(m.Control.Nodes))
	}
	kind := "pull"
	if m.Push {
		kind = "push"
	}
	if m.SimpleApp {
		kind = "simple"
	}
	way := "response"
	if m.Request {
		way = "request"
	}
	return fmt.Sprintf("%s %s app=%d customer=%d ts=%d head=%d key=%d len=%d data=%d", kind, way, m.AppID, m.CustomerID,
		m.Timestamp, m.Head, m.Key, m.ValLen, m.DataSize)
}
