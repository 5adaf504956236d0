package collective

// New and Rebuild: all ranks meet, and agree on the number of a new epoch.

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
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Times of a hello: it is lost when the other rank is not linked yet.
const (
	firstHello = 250 * time.Millisecond // until it is repeated; then twice as long, and so on
	lastHello  = 4 * time.Second
	helloPause = 20 * time.Millisecond
)

// Rebuild makes a communicator that has failed usable again, when all ranks call it: those
// that are left and the processes that have taken the places of lost ones, which call New. Calls in
// flight fail. It waits as New does. When it returns no other rank reads memory of this one
// for calls that have failed.
func (c *Comm) Rebuild(ctx context.Context) error {
	c.fail(&van.Error{Op: "rebuild communicator", Node: c.node.Name(), Err: errRebuild})
	if err := c.await(ctx, "rebuild communicator"); err != nil {
		return err
	}
	return c.join(ctx, "rebuild communicator")
}

// join says hello to all ranks, and waits until all have answered and said hello themselves: each
// answers when it is in a round. The new epoch is the largest that any rank proposes. All take the same,
// since a rank's proposal grows only when a round of its own has succeeded, and then the
// others, who still ask, make it fail and begin anew.
func (c *Comm) join(ctx context.Context, op string) error {
	begun, limit := clock.Now(), c.limit(ctx)
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, van.ErrTimeout)
		defer cancel()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	own, waiting, err := c.beginRound(op, cancel)
	if err != nil {
		return err
	}
	for _, w := range waiting {
		c.answer(w, own.append(nil))
	}
	answers := make([]hello, len(c.ids))
	errs := make([]error, len(c.ids))
	var again []int // first all others
	for r := range c.ids {
		if r != c.self {
			again = append(again, r)
		}
	}
	for ; len(again) > 0; again = c.metAnew(ctx, answers, errs) {
		var wg sync.WaitGroup
		for _, r := range again {
			wg.Go(func() {
				if answers[r], errs[r] = c.greet(ctx, r, own); final(errs[r]) {
					cancel(errs[r]) // the others need not be waited for
				}
			})
		}
		wg.Wait()
		c.awaitHellos(ctx, errs)
	}
	answers[c.self] = own
	if err := c.joined(answers, errs); err != nil {
		return &van.Error{Op: op, Node: c.node.Name(), Detail: fmt.Sprintf("communicator %d", c.id),
			Elapsed: time.Duration(clock.Now() - begun), Limit: limit, Err: err}
	}
	return nil
}

// final tells whether a rank that has answered so will not answer otherwise.
func final(err error) bool { return errors.Is(err, ErrMismatch) || errors.Is(err, van.ErrMalformed) }

// metAnew lists the ranks whose latest hello is of another round than their answer: they have
// begun again meanwhile, or were replaced. There are none once there are errors, or ctx has ended.
func (c *Comm) metAnew(ctx context.Context, answers []hello, errs []error) (l []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for r := range c.ids {
		switch {
		case errs[r] != nil:
			return nil
		case r == c.self || c.ranks[r].answered == answers[r].round:
		case ctx.Err() != nil:
			errs[r] = timeout(context.Cause(ctx))
			return nil
		default:
			l = append(l, r)
		}
	}
	return l
}

// beginRound begins a round. It returns what to say, and the requests of those who wait for it.
func (c *Comm) beginRound(op string, refuted func(error)) (own hello, waiting []*request, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return hello{}, nil, c.refused(op, van.ErrClosed)
	case c.misfit != nil:
		return hello{}, nil, c.refused(op, c.misfit)
	case c.joining:
		return hello{}, nil, c.refused(op, fmt.Errorf("%w: another Rebuild is under way", van.ErrInvalid))
	}
	c.joining, c.refuted = true, refuted
	c.round = max(c.round+1, clock.Now())
	if c.propose <= c.epoch { // the same until a round succeeds
		c.propose = max(c.epoch+1, clock.Now())
	}
	c.unmet, c.met = len(c.ids)-1, make(chan struct{})
	if c.unmet == 0 {
		close(c.met)
	}
	own = hello{c.propose, c.round, c.hash, uint32(len(c.ids))}
	for r := range c.ranks {
		p := &c.ranks[r]
		if q := p.waiting; q != nil && c.customer.Wanted(q.reply.Sender, q.reply.Epoch, q.reply.CustomerID, q.reply.Timestamp) {
			c.meet(p, p.hello, q.reply.Epoch)
			waiting = append(waiting, q)
		}
		p.waiting = nil
	}
	return own, waiting, nil
}

// meet notes that a rank has said hello. mu is held.
func (c *Comm) meet(p *rank, h hello, epoch uint32) {
	p.answered, p.proposed, p.epoch = h.round, h.epoch, epoch
	if p.met == c.round {
		return
	}
	p.met = c.round
	if c.unmet--; c.unmet == 0 {
		close(c.met)
	}
}

// awaitHellos waits until all ranks have said hello, unless there are errors already.
func (c *Comm) awaitHellos(ctx context.Context, errs []error) {
	if slices.ContainsFunc(errs, func(err error) bool { return err != nil }) {
		return
	}
	for alive := time.NewTicker(aliveEvery); ; {
		select {
		case <-c.met:
			alive.Stop()
			return
		case <-alive.C:
			if err := c.node.Alive(); err == nil {
				continue
			}
		case <-ctx.Done():
		}
		alive.Stop()
		c.mu.Lock()
		defer c.mu.Unlock()
		for r := range c.ranks {
			if r != c.self && c.ranks[r].met != c.round {
				errs[r] = cmp.Or(timeout(context.Cause(ctx)), c.node.Alive())
			}
		}
		return
	}
}

// aliveEvery is how often who waits looks whether the node still is.
const aliveEvery = 500 * time.Millisecond

// joined ends a round.
func (c *Comm) joined(answers []hello, errs []error) error {
	var missing []string
	var err error
	for r, e := range errs {
		if e == nil {
			continue
		}
		missing = append(missing, c.name(r))
		if err == nil || errors.Is(e, ErrMismatch) {
			err = e
		}
	}
	c.mu.Lock()
	c.joining, c.refuted = false, nil
	if err != nil {
		kept := c.takeAsked(func(*ask) bool { return true })
		c.mu.Unlock()
		for _, a := range kept {
			c.refuse(&a.request, err)
		}
		if errors.Is(err, ErrMismatch) || len(missing) == 0 {
			return err
		}
		return fmt.Errorf("no answer from %s: %w", strings.Join(missing, ", "), err)
	}
	if c.closed {
		c.mu.Unlock()
		return van.ErrClosed
	}
	var epoch uint64
	for _, a := range answers {
		epoch = max(epoch, a.epoch)
	}
	c.epoch, c.next, c.err, c.left, c.entered = epoch, 0, nil, nil, 0
	stale := c.takeAsked(func(a *ask) bool { return a.epoch != epoch })
	// Some may have failed meanwhile.
	var over error
	for r := range c.ranks {
		p := &c.ranks[r]
		why := cmp.Or(p.gaveUp(), p.down)
		if r == c.self || why == nil {
			continue
		}
		e := &van.Error{Op: "communicator", Node: c.node.Name(), Peer: c.name(r), Err: why}
		if errors.Is(p.gaveUp(), van.ErrClosed) {
			c.left = e // as it would be had this rank heard of it a moment later
		} else {
			over = e
		}
	}
	c.mu.Unlock()
	for _, a := range stale {
		c.refuse(&a.request, errRebuild)
	}
	if over != nil {
		c.fail(over)
	}
	return over
}

// question is a request whose answer is a body: a hello, or an abort.
type question struct {
	postoffice.Request
	got hello
}

// Answer implements postoffice.Sink.
func (q *question) Answer(_, _ int, msg *van.Message) error {
	v, err := verbOf(msg.Body)
	if err != nil {
		return err
	}
	switch v {
	case verbHello:
		q.got, err = parseHello(msg.Body)
	case verbRefused:
		err = refusal(msg.Body)
	case verbDone:
	default:
		err = &van.FieldError{Field: "body verb", Value: v, Want: "an answer"}
	}
	return err
}

// Finished implements postoffice.Sink.
func (*question) Finished(error) {}

// Recycle implements postoffice.Sink.
func (*question) Recycle() {}

// greet says hello to a rank until it answers or ctx ends.
func (c *Comm) greet(ctx context.Context, rank int, own hello) (hello, error) {
	body := own.append(nil)
	var last error
	for limit := firstHello; ; limit = min(2*limit, lastHello) {
		q := &question{}
		if err := c.customer.Open(&q.Request, "hello", q, 1, c.ids[rank:rank+1]); err != nil {
			return hello{}, err
		}
		call := q.Call(limit)
		if err := c.sendRequest(c.ids[rank], q.First(), body); err != nil {
			c.customer.Abort(&q.Request, err)
		}
		limited, cancel := context.WithTimeoutCause(ctx, limit, van.ErrTimeout)
		err := call.Wait(limited)
		cancel()
		if err == nil {
			return q.got, nil
		}
		if met, closed := c.metClosed(rank); closed {
			return met, nil
		}
		if final(err) || c.node.Alive() != nil {
			return hello{}, err
		}
		if last == nil || !errors.Is(err, context.Canceled) {
			last = err
		}
		pause := time.NewTimer(helloPause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			if cause := context.Cause(ctx); errors.Is(cause, van.ErrTimeout) || errors.Is(cause, context.DeadlineExceeded) {
				return hello{}, fmt.Errorf("%w: %w", timeout(cause), last)
			}
			return hello{}, context.Cause(ctx)
		}
	}
}

// metClosed is what a rank has said in this round, and whether it has closed its end since: then its round
// has succeeded, so it has got this rank's hello, which it does not answer any more.
func (c *Comm) metClosed(rank int) (hello, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := &c.ranks[rank]
	return hello{p.proposed, p.answered, c.hash, uint32(len(c.ids))}, p.met == c.round && errors.Is(p.gaveUp(), van.ErrClosed)
}

// receiveHello handles a hello of a rank.
func (c *Comm) receiveHello(rank int, q request, h hello) {
	if h.ranks != c.hash || int(h.n) != len(c.ids) {
		err := fmt.Errorf("%w: communicator %d has %d ranks at %s and %d at %s, or others", errMisfit, c.id, len(c.ids), c.node.Name(), h.n, c.name(rank))
		c.mu.Lock()
		c.ranks[rank].misfit = h.round
		c.mu.Unlock()
		c.refute(&q, err)
		return
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		c.refuse(&q, van.ErrClosed)
		return
	}
	p := &c.ranks[rank]
	again := p.answered == h.round && p.epoch == q.reply.Epoch
	if c.joining || again {
		if c.joining {
			c.meet(p, h, q.reply.Epoch)
		}
		own := hello{c.propose, c.round, c.hash, uint32(len(c.ids))}
		c.mu.Unlock()
		c.answer(&q, own.append(nil))
		return
	}
	p.waiting, p.hello = &q, h
	running := c.err == nil
	c.mu.Unlock()
	if running {
		c.fail(&van.Error{Op: "communicator", Node: c.node.Name(), Peer: c.name(rank), Err: errRebuild})
	}
}

// refute refuses the hello of a rank that has another idea of the communicator, and ends this
// node's round, if there is one, in which it would wait in vain.
func (c *Comm) refute(q *request, err error) {
	c.mu.Lock()
	refuted := c.refuted
	if c.round == 0 {
		c.misfit = err // for the first round, as soon as it begins
	}
	c.mu.Unlock()
	if refuted != nil {
		refuted(err)
	}
	c.refuse(q, err)
}
