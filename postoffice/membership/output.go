package membership

import (
	"github.com/stepaf/stepaf-go/van"
)

// Output is an Action or an Event, in the order in which they came about.
type Output interface{ output() }

// Action is something that the caller must do with its van.
type Action interface {
	Output
	action()
}

// Event is something that the caller or the application wants to know.
type Event interface {
	Output
	event()
}

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

// Disconnect asks to close the connection to ID after what was sent has left.
type Disconnect struct{ ID int }

// Rename asks to let the connection to Old serve New.
type Rename struct{ Old, New int }

// SetID tells the id under which connections are made from now on.
type SetID struct{ ID int }

// Assigned says that the scheduler has given this node its id. Recovery is true
// when it takes the place of a dead node.
type Assigned struct {
	ID, Rank int
	Recovery bool
}

// Ready says that start-up is complete: every node is known and connected.
type Ready struct{}

// Waiting says, every Config.ReportEvery while start-up is incomplete, who is
// missing.
type Waiting struct{ Report Report }

// BarrierDone says that everybody has come to the barrier.
type BarrierDone struct{ Ticket int }

// BarrierFailed says that the barrier will not be complete. Err is a
// *van.Error that wraps van.ErrPeerLost or van.ErrTimeout, or what ended the node.
type BarrierFailed struct {
	Ticket int
	Err    error
}

// PeerDead says that node ID is gone. Cause wraps van.ErrPeerLost. It comes once
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

// Failed says that this node cannot be part of the cluster: the start-up
// deadline, a refusal by the scheduler, or its place given to another. Nothing
// comes after it.
type Failed struct{ Err error }

// Warning is text worth a log line.
type Warning struct{ Text string }

func (Send) output()          {}
func (Connect) output()       {}
func (Disconnect) output()    {}
func (Rename) output()        {}
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

func (Send) action()       {}
func (Connect) action()    {}
func (Disconnect) action() {}
func (Rename) action()     {}
func (SetID) action()      {}

func (Assigned) event()      {}
func (Ready) event()         {}
func (Waiting) event()       {}
func (BarrierDone) event()   {}
func (BarrierFailed) event() {}
func (PeerDead) event()      {}
func (PeerAlive) event()     {}
func (PeerReplaced) event()  {}
func (Failed) event()        {}
func (Warning) event()       {}
