package streams

// The exchanges of a node, from creation to end, and the messages of peers about them.

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// New creates the Ends of node, a worker or a server. Call it after postoffice.Start; peers may call Prepare earlier.
// It does not use the device before Prepare.
func New(node *postoffice.Node) (*Ends, error) {
	e := &Ends{node: (*cluster.Node)(node).App(), all: map[name]*Exchange{}, offers: map[name]*note{}, changed: make(chan struct{}), ended: make(chan struct{})}
	if r := node.Role(); r != van.Worker && r != van.Server {
		return nil, fmt.Errorf("%w: exchanges in streams on %s, want a node with role worker or server", van.ErrInvalid, node.Name())
	}
	e.last.Store(random.Uint64())
	var err error
	if e.customer, err = e.node.AddCustomer(app, app, e.receive); err != nil {
		return nil, err
	}
	e.unwatch = e.node.OnPeer(e.peerChanged)
	e.stopExit = e.node.OnExit(func() { e.end(cmp.Or(e.node.Alive(), van.ErrClosed)) })
	return e, nil
}

// Prepare creates this node's end of an exchange, and waits until all peers have created theirs: until ctx ends, or
// for postoffice.DefaultTimeout if ctx has no deadline. ctx does not limit calls of the device's driver, which may block
// while a stream waits. peers are group ranks of servers or workers, ascending; nil means all. All tensors are in memory
// of the node's device. Their meaning depends on the role:
//
//   - On a worker, each push tensor goes to every server, and server s, counted among peers, fills the pull tensors
//     pull[s*Q : (s+1)*Q]: one list for all servers, unlike that of af.Worker.PushPull.
//   - On a server, worker w fills push[w*P : (w+1)*P], and receives pull[w*Q : (w+1)*Q].
//
// The ends are matched by their keys: the keys of a worker's pushes, and of its pulls from one server, must be those
// of the server for that worker, in the same order. Ends with equal keys are matched in call order. Different lengths
// are an error on both sides, and so are more than 256 tensors for one peer in one direction. Tensors are retained
// until Close; those of captured exchanges are never released.
//
// A round of a worker has a time limit, see Limit.
func (e *Ends) Prepare(ctx context.Context, peers []int, push, pull []af.KeyTensor, opts ...Option) (*Exchange, error) {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, e.node.Limit(0), van.ErrTimeout)
		defer cancel()
	}
	x, err := newExchange(e, peers, push, pull, opts)
	if err == nil {
		if err = x.connect(ctx); err == nil {
			x.path = pathOf(x)
			err = e.begin(x)
		}
		if err != nil {
			x.cancel(err)
		}
	}
	if err != nil {
		return nil, &van.Error{Op: "prepare exchange", Node: e.node.Name(), Err: err}
	}
	e.node.Rarely("streams: path: "+x.path).Info("prepared an exchange", "path", x.path, "exchange", x.describe())
	return x, nil
}

// begin makes an exchange usable, unless it has ended.
func (e *Ends) begin(x *Exchange) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over != nil && x.failed.Load() == nil { // its end begins now
		return e.over
	}
	if err := x.ending.Begin(&x.failed); err != nil {
		return err
	}
	if !e.watching {
		e.watching = true
		e.failing.Go(e.watch)
	}
	return nil
}

// Close ends all exchanges, and notifies the peers. It waits up to 2 s for the peers, and for calls of the device's
// driver, and returns nil; Exchange.Check returns the errors of exchanges.
func (e *Ends) Close() error {
	e.unwatch()
	e.end(fmt.Errorf("%w: this node's exchanges in streams", van.ErrClosed))
	e.stopExit()
	e.customer.Close()
	return nil
}

// end calls stop, and waits up to 2 s until the exchanges have ended. The device may be closed afterwards, unless goroutines
// are still blocked in its driver.
func (e *Ends) end(err error) {
	e.stop(err)
	done := make(chan struct{})
	go func() { e.failing.Wait(); close(done) }()
	if !gpusync.AwaitClose(done) { // for the peers
		gpusync.AwaitClose(done) // for the driver
	}
}

// stop begins the end of all exchanges, and refuses new ones.
func (e *Ends) stop(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over != nil {
		return
	}
	e.over = err
	for _, x := range e.all {
		e.failing.Go(func() { x.fail(err) })
	}
	close(e.ended)
	clear(e.offers)
	e.wake()
}

// peerChanged is called when a peer is lost, or when it or its replacement process is connected. It must not block.
func (e *Ends) peerChanged(id int, up bool, cause error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.wake()
	if up {
		return
	}
	for n := range e.offers {
		if n.worker == id {
			delete(e.offers, n)
		}
	}
	if !errors.Is(cause, van.ErrPeerLost) {
		cause = fmt.Errorf("%w: %w", van.ErrPeerLost, cause)
	}
	for _, x := range e.all {
		i := x.with(id)
		switch {
		case i < 0:
		case x.connecting:
			x.peers[i].offered, x.peers[i].said = false, nil
		default:
			x.ending.Over(i)
			if e.over != nil {
				break
			}
			e.failing.Go(func() { x.fail(&van.Error{Op: "exchange", Peer: e.node.PeerName(id), Err: cause}) })
		}
	}
}

// receive handles a message. It runs on a goroutine of the transport.
func (e *Ends) receive(msg *van.Message) {
	n, err := parse(msg.Body)
	if err == nil {
		err = e.take(msg.Sender, &n)
	}
	if err != nil {
		e.node.Rarely("streams: "+logx.Kind(err)).Warn("refused a message about an exchange in streams",
			"from", e.node.PeerName(msg.Sender), "err", err)
	}
}

// take handles a message of a peer.
func (e *Ends) take(from int, n *note) error {
	want := van.Worker
	if e.node.Role() == van.Worker {
		want = van.Server
	}
	if from == van.Empty || van.RoleOf(from) != want {
		return fmt.Errorf("%w: a message of %s, want one of a %s", van.ErrMalformed, van.NodeName(from), want)
	}
	of := name{from, n.id}
	if want == van.Server {
		of.worker = e.node.ID()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.all[of]
	switch {
	case n.verb == verbOver && x != nil:
		i := x.with(from)
		if i < 0 {
			return fmt.Errorf("%w: the end of exchange %d, which is with others", van.ErrMalformed, n.id)
		}
		x.ending.Over(i)
		if e.over == nil {
			e.failing.Go(func() { x.left(from, n.text) })
		}
	case e.over != nil:
		return nil
	case n.verb == verbOver:
		delete(e.offers, of)
	case n.verb == verbOffer && want == van.Worker:
		return e.offered(of, n)
	case n.verb == verbAccept && want == van.Server && x != nil:
		return x.accepted(from, n)
	case n.verb == verbAccept && want == van.Server: // the exchange is over here, and the server may have been notified before the offer
		e.failing.Go(func() { _ = e.send(from, &note{verb: verbOver, id: n.id, text: "it was over before this answer"}) })
		return nil
	default:
		return &van.FieldError{Field: "body verb", Value: n.verb, Want: "what a " + want.String() + " says"}
	}
	e.wake()
	return nil
}

// watch ends exchanges whose rounds exceed their limit, and all exchanges when the node has failed.
func (e *Ends) watch() {
	var all []*Exchange
	ended := gpusync.Watch(func() {
		e.mu.Lock()
		all = all[:0]
		for _, x := range e.all {
			if x.timing.limit > 0 && x.host == nil && x.ending.Begun() {
				all = append(all, x)
			}
		}
		e.mu.Unlock()
		now := clock.Now()
		for _, x := range all {
			x.check(now)
		}
	}, e.ended, e.node.Ended())
	if ended {
		e.stop(cmp.Or(e.node.Alive(), van.ErrClosed))
	}
}
