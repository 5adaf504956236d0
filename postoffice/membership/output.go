package membership

// The outputs of a Machine: what its caller does, and what the application is told.

import "github.com/stepaf/stepaf-go/van"

// Output is something that the caller must do with its van (Send, Connect, Disconnect,
// Rename, SetID), or a change that it, or the application, is told.
type Output interface{ output() }

// Send asks to send Meta to node To. When To is the node's own id, the caller
// gives it to Step instead.
type Send struct {
	To   int
	Meta van.Meta
}

// Connect asks to open, or to replace, the connection to ID. Negative ids are
// temporary, for nodes that have none yet.
type Connect struct {
	ID   int
	Node van.Node
}

// Disconnect asks to close the connection to ID after sending what is queued.
type Disconnect struct{ ID int }

// Rename asks to give the connection to Old the id New.
type Rename struct{ Old, New int }

// Probe asks to try whether the address of Node can be reached, and to give the result to Tried. It
// is emitted only with Config.Tries.
type Probe struct{ Node van.Node }

// Reply asks to send Meta to the process with that incarnation, which has no id yet, on the connection that it has
// made to this node, if there is one. It is emitted only with Config.Tries.
type Reply struct {
	Incarnation uint32
	Meta        van.Meta
}

// SetID tells the id under which connections are made from now on.
type SetID struct{ ID int }

// Assigned says that the scheduler has given this node its id. Recovery is true when it
// replaces a dead node.
type Assigned struct {
	ID, Rank int
	Recovery bool
}

// Ready says that start-up is complete: every node is known and connected.
type Ready struct{}

// Waiting says, every Config.ReportEvery while start-up is incomplete, which nodes are
// missing.
type Waiting struct{ Report Report }

// BarrierDone says that the barrier was released.
type BarrierDone struct{ Barrier int }

// BarrierFailed says that the barrier was not released. Err is a *van.Error that wraps
// van.ErrPeerLost, van.ErrTimeout, or the error of Failed.
type BarrierFailed struct {
	Barrier int
	Err     error
}

// PeerDead says that node ID is dead. Cause wraps van.ErrPeerLost. It is not repeated
// until the node is back or replaced.
type PeerDead struct {
	ID    int
	Cause error
}

// PeerAlive says that a node that was dead answers again under its old address.
type PeerAlive struct{ ID int }

// PeerReplaced says that Node has taken over the id of a dead node.
type PeerReplaced struct {
	ID   int
	Node van.Node
}

// Failed says that this node cannot be part of the cluster: the start-up deadline has
// passed, the scheduler has refused it, or it was replaced. It is the last output.
type Failed struct{ Err error }

// Warning is text worth a log line.
type Warning struct{ Text string }

func (Send) output()          {}
func (Connect) output()       {}
func (Disconnect) output()    {}
func (Rename) output()        {}
func (Probe) output()         {}
func (Reply) output()         {}
func (SetID) output()         {}
func (Assigned) output()      {}
func (Ready) output()         {}
func (Waiting) output()       {}
func (BarrierDone) output()   {}
func (BarrierFailed) output() {}
func (PeerDead) output()      {}
func (PeerAlive) output()     {}
func (PeerReplaced) output()  {}
func (Failed) output()        {}
func (Warning) output()       {}
