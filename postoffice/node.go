package postoffice

// Node: a member of a cluster as programs see it.

import (
	"context"
	"log/slog"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Node is one member of a cluster. All methods are safe for concurrent use.
type Node cluster.Node

// core is the node as the packages of this library use it.
func (n *Node) core() *cluster.Node { return (*cluster.Node)(n) }

// ID is the node's id.
func (n *Node) ID() NodeID { return NodeID(n.core().ID()) }

// Role is the node's role: worker, server or scheduler.
func (n *Node) Role() Role { return n.core().Role() }

// Rank is the instance rank.
func (n *Node) Rank() int { return n.core().Rank() }

// Name is the node's name in logs and errors: "worker 0 (id 9)".
func (n *Node) Name() string { return n.core().Name() }

// Topology is the shape of the cluster, and this node's place in it. It does not change once the node has started.
func (n *Node) Topology() Topology { return Topology(n.core().Topology()) }

// Config is what the node was started with. Do not change it.
func (n *Node) Config() *Config { return n.core().Config() }

// Log is the node's logger; its lines carry role, rank and id.
func (n *Node) Log() *slog.Logger { return n.core().Log() }

// Backend is the memory of the node's device.
func (n *Node) Backend() backend.Backend { return n.core().Backend() }

// Alive returns nil, or why the node cannot be used: it has left, or failed.
func (n *Node) Alive() error { return n.core().Alive() }

// Ended returns a channel that is closed when the node has left or failed; Alive then returns the reason.
func (n *Node) Ended() <-chan struct{} { return n.core().App().Ended() }

// IsRecovery reports whether this node replaces a lost one.
func (n *Node) IsRecovery() bool { return n.core().IsRecovery() }

// OnPeer makes the node call f when a peer is lost (up false, with the cause) and when it or its replacement is back (up
// true). f must not block. To close the node, f starts a
// goroutine that calls Close, which waits for f. The returned function removes f.
func (n *Node) OnPeer(f func(id NodeID, up bool, cause error)) (stop func()) {
	return n.core().OnPeer(func(id int, up bool, cause error) { f(NodeID(id), up, cause) })
}

// PathTo returns how data goes to a peer: over which transport, or through shared memory. If that is not chosen yet, PathTo
// chooses it now, as the first tensor would. Stats shows paths without choosing any, and with reasons.
func (n *Node) PathTo(id NodeID) Path { return van.PathTo(n.core().Van(), int(id), false) }

// Path is how data goes to one peer.
type Path = van.Path

// Barrier waits until as many members of the group have called it as C++ StepMesh's group barrier counts: one for each group
// of instances. Only members that have called it are released. customer is usually 0. A call that ends with ctx does not
// count for the others, unless the scheduler is C++ StepMesh's, which cannot be notified. Barrier fails after
// STEPAF_BARRIER_TIMEOUT; or, when only lost members are missing, after the scheduler's STEPAF_REPLACE_TIMEOUT unless they
// are replaced.
func (n *Node) Barrier(ctx context.Context, customer int, group Group) error {
	return n.core().Barrier(ctx, customer, int(group))
}

// InstanceBarrier waits until every instance of the group has called it. It fails as Barrier does. The call of a node
// that died afterwards counts until a replacement joins, so the barrier can succeed without that node: OnPeer reports
// the loss.
func (n *Node) InstanceBarrier(ctx context.Context, customer int, group Group) error {
	return n.core().InstanceBarrier(ctx, customer, int(group))
}

// Shutdown waits until every node of the cluster has called it, then leaves. The wait is a barrier that errors and log lines
// call Finalize, as ps-lite does. Shutdown leaves and returns an error
//
//  1. when ctx ends;
//  2. when only lost nodes are missing and the scheduler's STEPAF_REPLACE_TIMEOUT passes without replacements;
//  3. on a worker, after STEPAF_STOP_TIMEOUT.
//
// A waiting Shutdown takes part in the instance barriers over all nodes that other nodes of this library call before
// theirs. Only the first call has an effect; others return its result.
func (n *Node) Shutdown(ctx context.Context) error { return n.core().Shutdown(ctx) }

// Close leaves at once, without waiting for other nodes. Requests in flight fail with ErrClosed, and so does a waiting
// Shutdown. Close waits up to 2 s for handlers and for messages that are being sent, so a handler must call it on another
// goroutine.
func (n *Node) Close() error { return n.core().Close() }
