package cluster

// App: a node for packages that implement an application protocol on it, such as af and kv.

import (
	"context"
	"log/slog"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// App is a node with the methods that application packages need and programs do not: customers, messages, names of
// peers. It is a small value.
type App struct{ *Node }

// App returns the node for application packages.
func (n *Node) App() App { return App{n} }

// Members lists the node ids of a group (a sum of van.SchedulerID, ServerGroup,
// WorkerGroup, or a node id): workers by rank, then servers, then the scheduler.
func (a App) Members(group int) []int {
	a.control.mu.Lock()
	defer a.control.mu.Unlock()
	return a.control.machine.Members(group)
}

// Native reports whether the node with that id is known to be one of this library: only those understand an
// application's additions to ps-lite's protocol.
func (a App) Native(id int) bool { return a.processes.of(id).incarnation != 0 }

// PeerName names node id and its address: "server 1 (id 10) at 10.0.0.7:4021".
func (a App) PeerName(id int) string { return a.peerName(id) }

// PathNow returns the present path of data to node id, with the reason, as Stats does. It does not wait.
func (a App) PathNow(id int) van.Path { return pathTo(a.Node, id) }

// Addresses returns the port at which the node listens and the addresses of the peers
// that it is connected to, as "host:port".
func (a App) Addresses() (ports []int, peers []string) {
	a.peers.Range(func(_, addr any) bool {
		at := addr.(peerAddress)
		if peers = append(peers, at.node); at.data != "" {
			peers = append(peers, at.data)
		}
		return true
	})
	ports = []int{a.self.Port}
	if x, ok := a.self.Extension(); ok && x.DataPort != 0 {
		ports = append(ports, int(x.DataPort))
	}
	return ports, peers
}

// OnPeers registers f, in place of an earlier function, to run whenever the addresses of Addresses have changed. f
// must not block.
func (a App) OnPeers(f func()) { a.onPeers.Store(&f) }

// Rarely is the node's logger for events that peers cause, of which there may be a flood. It counts one more event of
// a cause, adds the count as "so far", and logs nothing for most events. Errors of one cause differ in numbers only.
func (a App) Rarely(cause string) *slog.Logger { return a.rarely(cause) }

// PausedRead counts that a handler is about to block because that many bytes of node id wait for the program, and
// logs text as Rarely does: the peer is not read meanwhile.
func (a App) PausedRead(id, bytes int, text string) { a.pausedRead(id, bytes, text) }

// Poll receives on the caller's goroutine, if the van can, until done returns true or no message has arrived for a
// short time. Handlers run on it, too, and must not block, except those of requests to a worker, which run on another
// goroutine. While a queue exceeds its limit, Poll returns at once.
func (a App) Poll(done func() bool) {
	if !a.apps.overfull.any() {
		a.transport.stack.Poll(done)
	}
}

// OnExit registers f to run after the node has left, in reverse order of registration. The returned function removes
// f.
func (a App) OnExit(f func()) (stop func()) {
	return addFunc(&a.control.mu, &a.lifetime.onExit, f)
}

// StartBarrier waits until every instance of the group has called it at the end of its start. A process that replaces
// a lost one passes it when the others have passed it. Its only limit is that of ctx.
func (a App) StartBarrier(ctx context.Context, group int) error {
	return a.control.await(ctx, "start barrier", func(t time.Duration) (int, error) { return a.control.machine.StartBarrier(t, group, 0) })
}

// Ended is closed when the node has left or failed; Alive returns the reason.
func (a App) Ended() <-chan struct{} { return a.lifetime.failed }

// Link connects the node to others of its role and to their replacements, for as long as it is in the cluster. C++
// StepMesh has no such connections: every one of ids must be a node of this library, any other is refused.
// Connections are made in the background. Until a message has been answered, Send may fail with van.ErrUnknownPeer,
// and a message may be lost, since the peer answers only after it has called Link, too.
func (a App) Link(ids []int) error {
	var err error
	a.control.step(func(t time.Duration) { err = a.control.machine.Link(t, ids) })
	return err
}
