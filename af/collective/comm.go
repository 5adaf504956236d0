package collective

// Comm: its making, what it hears of other ranks, its failure and its end, and how it begins anew.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/internal/streamqueue"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Comm is a communicator: this node's end of one. All methods are safe for concurrent use,
// but all ranks must make their calls in the same order.
type Comm struct {
	b        base
	meeting  meeting
	flight   flight
	children children
	pair     sync.Mutex // held while calls get their numbers; taken before base.mu
	stop     func()     // ends the watch for lost peers
}

// New makes this node's end of a communicator and waits until all ranks have made theirs: for
// the limit of o, unless ctx has a deadline. The error names those that have not.
func New(ctx context.Context, node *postoffice.Node, o Options) (*Comm, error) {
	const op = "new communicator"
	c := &Comm{b: base{node: (*cluster.Node)(node).App(), id: o.ID, timeout: o.Timeout, err: errNotJoined}}
	b := &c.b
	b.fail = c.fail
	b.early = o.Look && b.node.Role() == van.Worker
	if err := b.place(o.Ranks); err != nil {
		return nil, &van.Error{Op: op, Node: node.Name(), Detail: fmt.Sprintf("ID %d", o.ID), Err: err}
	}
	c.meeting = meeting{b: b, ranks: make([]rank, len(b.ids))}
	c.flight = flight{b: b, made: equip, asked: make([][maxInFlight]ask, len(b.ids)), copies: copies{b: b, queue: streamqueue.New(b.node.Backend(), b.node.Config().BusyPoll)}}
	b.revoker, _ = van.As[van.Invalidator]((*cluster.Node)(node).Van())
	if err := b.node.Link(b.ids); err != nil {
		return nil, err
	}
	var err error
	if b.customer, err = b.node.AddCustomer(appBase+o.ID, appBase+o.ID, c.receive); err != nil {
		e := &van.Error{Op: op, Node: node.Name(), Detail: fmt.Sprintf("ID %d", o.ID), Err: err}
		if errors.Is(err, van.ErrInvalid) { // it exists
			e.Hint = "close this node's other communicator with that ID first"
		}
		return nil, e
	}
	unwatch, stay := b.node.OnPeer(c.peerChanged), b.node.OnExit(c.flight.copies.close)
	c.stop = func() { unwatch(); stay() }
	if err := c.join(ctx, op); err != nil {
		c.meeting.tell(c.meeting.round, err)
		_ = c.Close(ctx)
		return nil, err
	}
	return c, nil
}

var errNotJoined = fmt.Errorf("%w: not all ranks have come", ErrAborted)

// Rank is this node's rank in the communicator, from 0.
func (c *Comm) Rank() int { return c.b.self }

// Size is the number of ranks.
func (c *Comm) Size() int { return len(c.b.ids) }

// Rebuild makes a communicator that has failed usable again, when all ranks call it: those
// that are left and the processes that have taken the places of lost ones, which call New. Calls in
// flight fail. It waits as New does. When it returns no other rank reads memory of this one
// for calls that have failed.
func (c *Comm) Rebuild(ctx context.Context) error {
	c.fail(c.b.refused("rebuild communicator", errRebuild))
	if err := c.flight.await(ctx, "rebuild communicator"); err != nil {
		return err
	}
	c.meeting.awaitTold(ctx) // or they would hear only that this one begins anew
	return c.join(ctx, "rebuild communicator")
}

// join says hello to all ranks, and waits until all have answered and said hello themselves: each
// answers when it is in a round. The new epoch is the largest that any rank proposes. All take the same,
// since a rank's proposal grows only when a round of its own has succeeded, and then the
// others, who still ask, make it fail and begin anew.
func (c *Comm) join(ctx context.Context, op string) error {
	begun := clock.Now()
	ctx, limit, stop := c.b.limited(ctx)
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	own, waiting, err := c.meeting.beginRound(op, cancel)
	if err != nil {
		return err
	}
	for _, w := range waiting {
		c.b.answer(w, own.append(nil))
	}
	answers := make([]hello, len(c.b.ids))
	errs := make([]error, len(c.b.ids))
	var again []int // first all others
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
				if answers[r], errs[r] = c.meeting.greet(ctx, r, own); final(errs[r]) {
					cancel(errs[r]) // the others need not be waited for
				}
			})
		}
		wg.Wait()
		c.meeting.awaitHellos(ctx, errs)
		if again, err = c.joined(ctx, answers, errs); len(again) == 0 {
			break
		}
	}
	if err != nil {
		return &van.Error{Op: op, Node: c.b.node.Name(), Detail: fmt.Sprintf("communicator %d", c.b.id),
			Elapsed: time.Duration(clock.Now() - begun), Limit: limit, Err: err}
	}
	return nil
}

// joined ends a round, unless there are ranks to be met again.
func (c *Comm) joined(ctx context.Context, answers []hello, errs []error) (again []int, err error) {
	b := &c.b
	b.mu.Lock()
	// With the end of the round: a hello that comes between would be answered, and its rank wait for this one's.
	if again = c.meeting.metAnew(ctx, answers, errs); len(again) > 0 {
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
	b.joining, c.meeting.refuted = false, nil
	if err == nil && b.closed {
		err = van.ErrClosed
	}
	if err != nil {
		if len(missing) > 0 && !errors.Is(err, ErrMismatch) {
			err = fmt.Errorf("no answer from %s: %w", strings.Join(missing, ", "), err)
		}
		kept := c.flight.takeAsked(func(*ask) bool { return true })
		b.mu.Unlock()
		for _, a := range kept {
			b.refuse(&a.request, err)
		}
		return nil, err
	}
	var epoch uint64
	for _, a := range answers {
		epoch = max(epoch, a.epoch)
	}
	b.epoch, b.err, b.left, c.flight.next, c.children.entered = epoch, nil, nil, 0, 0
	stale := c.flight.takeAsked(func(a *ask) bool { return a.epoch != epoch })
	// Some may have failed meanwhile.
	var over error
	for r := range c.meeting.ranks {
		p := &c.meeting.ranks[r]
		why := cmp.Or(p.gaveUp(), p.down)
		if r == b.self || why == nil {
			continue
		}
		e := b.about(r, why)
		if errors.Is(p.gaveUp(), van.ErrClosed) {
			b.left = e // as it would be had this rank heard of it a moment later
		} else {
			over = e
		}
	}
	b.mu.Unlock()
	for _, a := range stale {
		b.refuse(&a.request, errRebuild)
	}
	if over != nil {
		c.fail(over)
	}
	return nil, over
}

// peerChanged is called when a peer is lost or back.
func (c *Comm) peerChanged(id int, up bool, cause error) {
	rank, member := slices.BinarySearch(c.b.ids, id)
	if !up && !errors.Is(cause, van.ErrPeerLost) {
		cause = fmt.Errorf("%w: %w", van.ErrPeerLost, cause)
	}
	if !member || rank == c.b.self || c.meeting.down(rank, cause) || up {
		return
	}
	c.fail(c.b.about(rank, cause))
}

// Close ends the communicator on all ranks: calls in flight that need this rank fail there, and all
// later ones. It waits, for the communicator's limit unless ctx has a deadline, until nobody reads memory of
// this rank any more; the error says that somebody still does.
func (c *Comm) Close(ctx context.Context) error {
	b := &c.b
	b.mu.Lock()
	again, refuted, joining, round := b.closed, c.meeting.refuted, b.joining, c.meeting.round
	b.closed = true
	b.mu.Unlock()
	if again {
		return c.flight.await(ctx, "close communicator")
	}
	if refuted != nil {
		refuted(van.ErrClosed)
	}
	closed := b.refused("close communicator", van.ErrClosed)
	if joining { // fail has told of the failure before; those who have met this rank since would wait for it
		c.meeting.tell(round, closed)
	}
	c.fail(closed)
	b.mu.Lock()
	b.err = b.refused("use communicator", van.ErrClosed)
	b.mu.Unlock()
	if c.stop != nil {
		c.stop()
	}
	c.flight.copies.close()
	err := c.flight.await(ctx, "close communicator")
	c.meeting.telling.Wait()
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

// handle handles a request, or says why it makes no sense.
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
			c.meeting.refute(&q, stranger())
		default:
			c.meeting.receiveHello(rank, q, h)
		}
	case verbAsk:
		if !member {
			b.refuse(&q, stranger())
			return nil
		}
		return c.flight.receiveAsk(&q, msg)
	case verbAbort:
		round, why, err := parseReason(msg.Body)
		if err != nil {
			return err
		}
		b.answer(&q, []byte{version, byte(verbDone)})
		if !member {
			return nil
		}
		err = c.meeting.receiveAbort(rank, abort{round, why})
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

// fail makes the communicator unusable until Rebuild: all calls in flight end with err, and
// the other ranks are told. Only the first error counts.
func (c *Comm) fail(err error) {
	b, l := &c.b, &c.flight
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
	c.meeting.telling.Add(1)
	told := make(chan struct{})
	c.meeting.told = told
	round, children := c.meeting.round, c.children.all
	c.children.all = nil
	b.mu.Unlock()
	for _, t := range children {
		t.changed(-1, err)
	}
	for _, o := range ops {
		o.end(err)
		l.unref(o)
	}
	go func() { // this may be a goroutine that must not send
		defer c.meeting.telling.Done()
		for _, a := range refused {
			b.refuse(&a.request, err)
		}
		calls := c.meeting.say(round, err)
		close(told)
		heard(calls)
	}()
}

// leave notes that a rank has closed its end. Calls in flight that need it fail, and so do all
// later ones.
func (c *Comm) leave(rank int, err error) {
	b := &c.b
	b.mu.Lock()
	b.left = cmp.Or(b.left, err)
	needed := false
	for _, o := range c.flight.window {
		needed = needed || o != nil && o.needs(rank)
	}
	children := c.children.all
	b.mu.Unlock()
	for _, t := range children {
		t.changed(rank, err)
	}
	if needed {
		c.fail(err)
	}
}
