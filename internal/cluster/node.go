package cluster

// Node: its parts, its barriers, and its end.

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/stack"
)

// Node is one member of a cluster. All methods are safe for concurrent use.
type Node struct {
	nodeInfo
	lifetime  lifetime
	control   control
	watchers  watchers
	processes processes
	pending   pendingMessages
	notices   notices
	apps      apps
	ending    programEnds
	transport transport
	device    nodeDevice
	self      van.Node // this node's record
	probes    probes
}

// transport is the node's van.
type transport struct {
	stack    *stack.Van
	van      van.Van      // of stack
	canceler van.Canceler // nil when the van does not read memory after Send
}

// Alive returns nil, or the reason why the node cannot be used: it has left, or failed.
func (n *Node) Alive() error { return n.lifetime.Alive() }

// OnPeer makes the node call f when a peer is lost (up false, with the cause) and when the peer or its replacement is back
// (up true). f must not block. To close the node, f starts a
// goroutine that calls Close, which waits for f. The returned function removes f.
func (n *Node) OnPeer(f func(id int, up bool, cause error)) (stop func()) {
	return n.watchers.add(f)
}

// nodeDevice is the node's device.
type nodeDevice struct {
	backend.Backend
	own bool // the node closes it
}

func (d *nodeDevice) close() error {
	if d.own {
		return d.Close()
	}
	return nil
}

// Backend is the memory of the node's device.
func (n *Node) Backend() backend.Backend { return n.device.Backend }

// Van is the node's transports. van.As finds their optional abilities, and van.PathTo the path to a peer. To send and
// to leave use the node's own methods.
func (n *Node) Van() van.Van { return n.transport.van }

// IsRecovery reports whether this node replaces a dead one.
func (n *Node) IsRecovery() bool {
	n.control.mu.Lock()
	defer n.control.mu.Unlock()
	return n.control.machine.IsRecovery()
}

// DeadNodes lists the nodes that have been silent for longer than t, or are known to be lost. The scheduler knows the
// silence of all nodes, the others only that of the scheduler.
func (n *Node) DeadNodes(t time.Duration) []int {
	n.control.mu.Lock()
	defer n.control.mu.Unlock()
	return n.control.machine.DeadNodes(now(), t)
}

// Barrier waits until as many members of the group have called it as C++ StepMesh's group barrier counts: one for
// each group of instances. Only members that have called it are released. customer is usually 0. A call that ends
// with ctx does not count for the others, unless the scheduler is one of C++ StepMesh, which cannot be notified.
// Barrier fails after STEPAF_BARRIER_TIMEOUT; or, when only lost members are missing, after STEPAF_REPLACE_TIMEOUT
// unless they are replaced.
func (n *Node) Barrier(ctx context.Context, customer, group int) error {
	return n.control.await(ctx, "barrier", func(t time.Duration) (int, error) { return n.control.machine.Barrier(t, customer, group, false) })
}

// InstanceBarrier waits until every instance of the group has called it.
func (n *Node) InstanceBarrier(ctx context.Context, customer, group int) error {
	return n.control.await(ctx, "instance barrier", func(t time.Duration) (int, error) {
		return n.control.machine.Barrier(t, customer, group, true)
	})
}

// StopBarrier is the instance barrier over all nodes that a program calls before
// Shutdown. The scheduler and servers may call it as soon as they have started, so it has
// no limit of its own: it waits as long as a live member is missing. If it fails on a worker, it returns when the servers were
// notified that the program ends, lingerTime later at most.
func (n *Node) StopBarrier(ctx context.Context) error {
	n.startEnding("stop()")
	err := n.control.await(ctx, "stop barrier", func(t time.Duration) (int, error) { return n.control.machine.StopBarrier(t, 0) })
	n.ending.awaitNotices(err)
	n.stopEnding(err)
	return err
}

// Shutdown waits until every node of the cluster has called it, then leaves. The wait is a barrier, ps-lite's Finalize.
// Shutdown leaves and returns an error
//
//  1. when ctx ends;
//  2. when only lost nodes are missing and STEPAF_REPLACE_TIMEOUT passes without replacements;
//  3. on a worker, after STEPAF_STOP_TIMEOUT.
//
// A waiting Shutdown also counts for the instance barriers over all nodes that other nodes of this library call
// before theirs. Only the first call has an effect; others return its result.
func (n *Node) Shutdown(ctx context.Context) error {
	n.lifetime.leaveOnce(func() error {
		n.startEnding("Finalize")
		err := n.control.await(ctx, "leave the cluster", func(t time.Duration) (int, error) { return n.control.machine.Finalize(t, 0) })
		n.ending.awaitNotices(err)
		return errors.Join(err, n.leave(ctx, lingerTime))
	})
	return n.lifetime.finalErr
}

// Close leaves at once, without waiting for other nodes. Requests in flight fail with van.ErrClosed, and so does a
// pending Shutdown. Close waits for handlers, for lingerTime at most, so a handler must call it on another goroutine. If
// the node has left before, Close returns nil.
func (n *Node) Close() error { return n.close(lingerTime) }

func (n *Node) close(linger time.Duration) (err error) {
	n.lifetime.closeOnce.Do(func() { close(n.lifetime.closing) })
	n.lifetime.leaveOnce(func() error {
		err = n.leave(context.Background(), linger)
		return err
	})
	return err
}

// Limits of the time in which a leaving node sends its last messages: normally, and when it has not started.
const (
	lingerTime  = 2 * time.Second
	shortLinger = 300 * time.Millisecond
)

// leave ends the node; leaveOnce calls it.
func (n *Node) leave(ctx context.Context, linger time.Duration) error {
	n.control.mu.Lock()
	if n.control.machine != nil {
		n.control.machine.Leaving(now())
	}
	n.lifetime.end(&van.Error{Op: "use", Node: n.Name(), Err: van.ErrClosed})
	n.control.mu.Unlock()

	close(n.lifetime.stop) // without waiting for tick: leave may run in a callback of it
	n.apps.failAll(&van.Error{Op: "wait", Node: n.Name(), Err: van.ErrClosed})
	n.control.queues.await(shortLinger)
	n.pending.close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), linger)
	defer cancel()
	err := n.transport.van.Close(ctx)
	awaitAll(ctx, &n.apps.deliveries)
	n.apps.close()
	for exit := n.lifetime.nextExit(&n.control.mu); exit != nil; exit = n.lifetime.nextExit(&n.control.mu) {
		(*exit)()
	}
	return errors.Join(err, n.apps.profile.close(), n.device.close())
}

// awaitAll waits until the goroutines of wg have returned, or ctx ends.
func awaitAll(ctx context.Context, wg *sync.WaitGroup) {
	returned := make(chan struct{})
	go func() {
		wg.Wait()
		close(returned)
	}()
	select {
	case <-returned:
	case <-ctx.Done():
	}
}
