package membership

// The outputs of a Machine: actions for its caller, and events for the application.

import (
	"github.com/stepaf/stepaf-go/van"
)

// Output is an action that the caller must perform with its van (Send, Connect, Disconnect, Rename, SetID, Probe,
// Reply), or an event.
type Output interface{ output() }

// Send asks to send Meta to node To. When To is the node's own id, the caller passes it to Step instead.
type Send struct {
	To   int
	Meta van.Meta
}

// Connect asks to open, or to replace, the connection to ID. Negative ids are temporary, for nodes that have none
// yet.
type Connect struct {
	ID   int
	Node van.Node
}

// Disconnect asks to close the connection to ID after the queued messages were sent.
type Disconnect struct{ ID int }

// Rename asks to give the connection to Old the id New.
type Rename struct{ Old, New int }

// Probe asks to test whether the address of Node can be reached, and to pass the result to Probed. It is emitted only
// with Config.CanProbe.
type Probe struct{ Node van.Node }

// Reply asks to send Meta to the process with that incarnation, which has no id yet, on the connection that it has
// made to this node, if there is one. It is emitted only with Config.CanProbe.
type Reply struct {
	Incarnation uint32
	Meta        van.Meta
}

// SetID sets the id under which connections are made from now on.
type SetID struct{ ID int }

// Assigned reports that the scheduler has assigned this node its id. Recovery is true when the node replaces a dead
// one.
type Assigned struct {
	ID, Rank int
	Recovery bool
}

// Ready reports that start-up is complete: every node is known and connected.
type Ready struct{}

// Waiting reports the missing nodes, every Config.ReportEvery while start-up is incomplete.
type Waiting struct{ Report Report }

// BarrierDone reports that the barrier with that number was released.
type BarrierDone struct{ Barrier int }

// BarrierFailed reports that the barrier was not released. Err is a *van.Error that wraps van.ErrPeerLost,
// van.ErrTimeout, or the error of Failed.
type BarrierFailed struct {
	Barrier int
	Err     error
}

// PeerDead reports that node ID is dead. Cause wraps van.ErrPeerLost. It is not repeated until the node is back or
// replaced.
type PeerDead struct {
	ID    int
	Cause error
}

// PeerAlive reports that a node that was dead answers again under its old address.
type PeerAlive struct{ ID int }

// PeerReplaced reports that Node has replaced the dead node ID.
type PeerReplaced struct {
	ID   int
	Node van.Node
}

// Failed reports that this node cannot be part of the cluster: start-up timed out, the scheduler has refused the
// node, or the node was replaced. It is the last output.
type Failed struct{ Err error }

// Warning is a text for the log.
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
