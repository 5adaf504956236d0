package collective

// Comm: creation, messages from other ranks, failure, Rebuild and Close.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/internal/streamqueue"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Comm is one node's end of a communicator. All methods are safe for concurrent use, but all ranks must make their
// calls in the same order.
type Comm struct {
	b         base
	bootstrap bootstrap
	calls     callWindow
	children  children
	pair      sync.Mutex // held while calls get their numbers; locked before base.mu
	stop      func()     // ends the subscriptions to peer events and node exit
}

// New creates this node's end of a communicator and waits until all ranks have created theirs: for Options.Timeout,
// unless ctx has a deadline. The error names the ranks that are missing.
func New(ctx context.Context, node *postoffice.Node, o Options) (*Comm, error) {
	const op = "new communicator"
	c := &Comm{b: base{node: (*cluster.Node)(node).App(), id: o.ID, timeout: o.Timeout, err: errNotJoined}}
	b := &c.b
	b.fail = c.fail
	b.early = o.Look && b.node.Role() == van.Worker
	if err := b.place(o.Ranks); err != nil {
		return nil, &van.Error{Op: op, Node: node.Name(), Detail: fmt.Sprintf("ID %d", o.ID), Err: err}
	}
	c.bootstrap = bootstrap{b: b, ranks: make([]rank, len(b.ids))}
	c.calls = callWindow{b: b, made: equip, asked: make([][maxInFlight]ask, len(b.ids)), copies: copies{b: b, queue: streamqueue.New(b.node.Backend(), b.node.Config().BusyPoll)}}
	b.revoker, _ = van.As[van.Invalidator]((*cluster.Node)(node).Van())
	if err := b.node.Link(b.ids); err != nil {
		return nil, err
	}
	var err error
	if b.customer, err = b.node.AddCustomer(appBase+o.ID, appBase+o.ID, c.receive); err != nil {
		e := &van.Error{Op: op, Node: node.Name(), Detail: fmt.Sprintf("ID %d", o.ID), Err: err}
		if errors.Is(err, van.ErrInvalid) { // a communicator with the ID exists
			e.Hint = "close this node's other communicator with that ID first"
		}
		return nil, e
	}
	unwatch, stay := b.node.OnPeer(c.peerChanged), b.node.OnExit(c.calls.copies.close)
	c.stop = func() { unwatch(); stay() }
	if err := c.join(ctx, op); err != nil {
		c.bootstrap.tell(c.bootstrap.round, err)
		_ = c.Shutdown(ctx)
		return nil, err
	}
	return c, nil
}

var errNotJoined = fmt.Errorf("%w: not all ranks have joined", ErrAborted)

// Rank returns this node's rank in the communicator, from 0.
func (c *Comm) Rank() int { return c.b.self }

// Size returns the number of ranks.
func (c *Comm) Size() int { return len(c.b.ids) }

// Rebuild makes a failed communicator usable again. All ranks call it: the surviving ranks call Rebuild, the
// replacement processes of lost ranks call New. Calls in flight fail. Rebuild waits as New does. When it returns, no
// other rank reads memory of this rank for failed calls.
func (c *Comm) Rebuild(ctx context.Context) error {
	c.fail(c.b.refused("rebuild communicator", errRebuild))
	if err := c.calls.await(ctx, "rebuild communicator"); err != nil {
		return err
	}
	c.bootstrap.awaitSent(ctx) // otherwise the others would learn only that this rank rebuilds, and not why it failed
	return c.join(ctx, "rebuild communicator")
}

// join sends a hello to all ranks, and waits until all ranks have answered and sent a hello themselves. A rank
// answers while it is in a round, that is in New or Rebuild. The new epoch is the largest one that any rank proposes.
// All ranks compute the same: a rank's proposal grows only after a round of its own has succeeded, and then the
// hellos of the others make it fail and rebuild.
func (c *Comm) join(ctx context.Context, op string) error {
	begun := clock.Now()
	ctx, limit, stop := c.b.limited(ctx)
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	own, waiting, err := c.bootstrap.beginRound(op, cancel)
	if err != nil {
		return err
	}
	for _, w := range waiting {
		c.b.answer(w, own.append(nil))
	}
	answers := make([]hello, len(c.b.ids))
	errs := make([]error, len(c.b.ids))
	var again []int // ranks whose handshake is to be made; at first all others
	for r := range c.b.ids {
		if r != c.b.self {
			again = append(again, r)
		}
	}
	answers[c.b.self] = own
	for {
		var wg sync.WaitGroup
		for _, r := range again {
			wg.Go(func() {
				if answers[r], errs[r] = c.bootstrap.handshake(ctx, r, own); final(errs[r]) {
					cancel(errs[r]) // there is no need to wait for the other ranks
				}
			})
		}
		wg.Wait()
		c.bootstrap.awaitHellos(ctx, errs)
		if again, err = c.joined(ctx, answers, errs); len(again) == 0 {
			break
		}
	}
	if err != nil {
		return &van.Error{Op: op, Node: c.b.node.Name(), Detail: fmt.Sprintf("communicator %d", c.b.id),
			Elapsed: clock.Since(begun), Limit: limit, Err: err}
	}
	return nil
}

// joined ends a round, unless some handshakes must be repeated: it returns their ranks.
func (c *Comm) joined(ctx context.Context, answers []hello, errs []error) (again []int, err error) {
	b := &c.b
	b.mu.Lock()
	// In one critical section with the end of the round. Otherwise a hello that arrives in between would be answered,
	// and its sender would wait for a hello of this rank.
	if again = c.bootstrap.restarted(ctx, answers, errs); len(again) > 0 {
		b.mu.Unlock()
		return again, nil
	}
	var missing []string
	for r, e := range errs {
		if e == nil {
			continue
		}
		missing = append(missing, c.b.name(r))
		if err == nil || errors.Is(e, ErrMismatch) {
			err = e
		}
	}
	b.joining, c.bootstrap.endRound = false, nil
	if err == nil && b.closed {
		err = van.ErrClosed
	}
	if err != nil {
		if len(missing) > 0 && !errors.Is(err, ErrMismatch) {
			err = fmt.Errorf("no answer from %s: %w", strings.Join(missing, ", "), err)
		}
		kept := c.calls.takeAsked(func(*ask) bool { return true })
		b.mu.Unlock()
		b.refuseAll(kept, err)
		return nil, err
	}
	var epoch uint64
	for _, a := range answers {
		epoch = max(epoch, a.epoch)
	}
	b.epoch, b.err, b.left, c.calls.next, c.children.entered = epoch, nil, nil, 0, 0
	// Some ranks may have failed meanwhile.
	var over error
	for r := range c.bootstrap.ranks {
		p := &c.bootstrap.ranks[r]
		why := cmp.Or(p.abortReason(), p.down)
		if r == b.self || why == nil {
			continue
		}
		e := b.about(r, why)
		if errors.Is(p.abortReason(), van.ErrClosed) {
			b.left = e // as leave would have done a moment later
		} else {
			over = e
		}
	}
	why := cmp.Or(b.left, errRebuild)
	stale := c.calls.takeAsked(func(a *ask) bool { return a.epoch != epoch || b.left != nil })
	b.mu.Unlock()
	b.refuseAll(stale, why)
	if over != nil {
		c.fail(over)
	}
	return nil, over
}

// peerChanged is called when a peer is lost, or connected again.
func (c *Comm) peerChanged(id int, up bool, cause error) {
	rank, member := slices.BinarySearch(c.b.ids, id)
	if !up && !errors.Is(cause, van.ErrPeerLost) {
		cause = fmt.Errorf("%w: %w", van.ErrPeerLost, cause)
	}
	if !member || rank == c.b.self || c.bootstrap.down(rank, cause) || up {
		return
	}
	c.fail(c.b.about(rank, cause))
}

// Close is Shutdown with a limit of Options.Timeout, or of postoffice.DefaultTimeout if Options.Timeout is no limit.
func (c *Comm) Close() error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), c.b.node.Limit(max(c.b.timeout, 0)), van.ErrTimeout)
	defer cancel()
	return c.Shutdown(ctx)
}

// Shutdown ends the communicator on all ranks. On the other ranks, calls in flight that need this rank fail, and so do
// all later calls. A rank that makes a later call also ends its own calls in flight. Shutdown waits until no other rank
// reads memory of this rank: for Options.Timeout, unless ctx has a deadline. If a rank still reads, the error says so; Shutdown may be called again, to wait for longer.
func (c *Comm) Shutdown(ctx context.Context) error {
	b := &c.b
	b.mu.Lock()
	again, endRound, joining, round := b.closed, c.bootstrap.endRound, b.joining, c.bootstrap.round
	b.closed = true
	b.mu.Unlock()
	if again {
		return c.calls.await(ctx, "close communicator")
	}
	if endRound != nil {
		endRound(van.ErrClosed)
	}
	closed := b.refused("close communicator", van.ErrClosed)
	if joining { // fail has reported an earlier failure; ranks that joined since then would wait for this one
		c.bootstrap.tell(round, closed)
	}
	c.fail(closed)
	b.mu.Lock()
	b.err = b.refused("use communicator", van.ErrClosed)
	b.mu.Unlock()
	if c.stop != nil {
		c.stop()
	}
	c.calls.copies.close()
	err := c.calls.await(ctx, "close communicator")
	c.bootstrap.telling.Wait()
	if b.customer != nil {
		b.customer.Close()
	}
	return err
}

// receive handles a request. It runs on a goroutine of the transport.
func (c *Comm) receive(msg *van.Message) {
	if err := c.handle(msg); err != nil {
		c.b.node.Rarely("collective: "+logx.Kind(err)).Warn("dropped a request to a communicator",
			"communicator", c.b.id, "from", c.b.node.PeerName(msg.Sender), "err", err)
	}
}

// handle handles a request. The error says why a request is malformed.
func (c *Comm) handle(msg *van.Message) error {
	b := &c.b
	rank, member := slices.BinarySearch(b.ids, msg.Sender)
	v, err := verbOf(msg.Body)
	switch {
	case err != nil:
		return err
	case msg.Push || rank == b.self && member:
		return fmt.Errorf("%w: a push, or a request of this node itself", van.ErrMalformed)
	}
	q := request{rank: rank, reply: datamsg.ReplyTo(msg)}
	stranger := func() error {
		return fmt.Errorf("%w: %s is not among the ranks of communicator %d at %s", errMisfit, van.NodeName(msg.Sender), b.id, b.node.Name())
	}
	switch v {
	case verbHello:
		h, err := parseHello(msg.Body)
		switch {
		case err != nil:
			return err
		case !member:
			c.bootstrap.reject(&q, stranger())
		default:
			c.bootstrap.receiveHello(rank, q, h)
		}
	case verbAsk:
		if !member {
			b.refuse(&q, stranger())
			return nil
		}
		return c.calls.receiveAsk(&q, msg)
	case verbAbort:
		round, why, err := parseReason(msg.Body)
		if err != nil {
			return err
		}
		b.answer(&q, []byte{version, byte(verbDone)})
		if !member {
			return nil
		}
		err = c.bootstrap.receiveAbort(rank, abort{round, why})
		switch {
		case errors.Is(err, van.ErrClosed):
			c.leave(rank, err)
		case err != nil:
			c.fail(err)
		}
	default:
		return &van.FieldError{Field: "body verb", Value: v, Want: "a request"}
	}
	return nil
}

// fail makes the communicator unusable until Rebuild: all calls in flight end with err, and the other ranks are
// notified. Only the first error counts.
func (c *Comm) fail(err error) {
	b, l := &c.b, &c.calls
	b.mu.Lock()
	if b.err != nil {
		b.mu.Unlock()
		return
	}
	b.err = err
	var ops []*op
	for i, o := range l.window {
		if o != nil {
			o.refs++
			ops = append(ops, o)
			l.window[i] = nil
		}
	}
	refused := l.takeAsked(func(a *ask) bool { return a.epoch <= b.epoch })
	c.bootstrap.telling.Add(1)
	told := make(chan struct{})
	c.bootstrap.told = told
	round, children := c.bootstrap.round, c.children.all
	c.children.all = nil
	b.mu.Unlock()
	for _, t := range children {
		t.changed(-1, err)
	}
	for _, o := range ops {
		o.end(err)
		l.unref(o)
	}
	go func() { // the caller may be a goroutine that must not send
		defer c.bootstrap.telling.Done()
		b.refuseAll(refused, err)
		calls := c.bootstrap.say(round, err)
		close(told)
		awaitAborts(calls)
	}()
}

// leave records that a rank has closed the communicator. Calls in flight that need the rank fail, and so do all later
// calls. Queued requests of other ranks for later calls are refused.
func (c *Comm) leave(rank int, err error) {
	b := &c.b
	b.mu.Lock()
	b.left = cmp.Or(b.left, err)
	needed := false
	for _, o := range c.calls.window {
		needed = needed || o != nil && o.needs(rank)
	}
	later := c.calls.takeAsked(func(a *ask) bool { return a.epoch == b.epoch && int32(a.seq-c.calls.next) >= 0 })
	children := c.children.all
	b.mu.Unlock()
	b.refuseAll(later, err)
	for _, t := range children {
		t.changed(rank, err)
	}
	if needed {
		c.fail(err)
	}
}
