package collective

// Bootstrap and abort: the rounds of New and Rebuild, hello messages, and notices that a rank has aborted the
// communicator.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
)

// Times of a hello. A hello is lost if the other rank is not connected yet.
const (
	firstHello = 250 * time.Millisecond // before the first repetition; the interval doubles up to lastHello
	lastHello  = 4 * time.Second
	helloPause = 20 * time.Millisecond
)

// bootstrap is what a node knows of the other ranks. All fields but telling are guarded by base.mu.
type bootstrap struct {
	b             *base
	ranks         []rank
	round         uint64        // number of this node's latest round
	propose       uint64        // this node's proposal in that round
	missingHellos int           // ranks without a hello in this round
	allHellos     chan struct{} // closed when missingHellos is 0
	endRound      func(error)   // ends the round with an error: a rank has a different list of ranks
	misfit        error         // such a rank sent a hello before the first round
	telling       sync.WaitGroup
	told          chan struct{} // closed when the reason of the last failure was sent to the others; nil if the communicator never failed
}

// rank is the state of another rank in New and Rebuild.
type rank struct {
	answered   uint64    // the round of its hello that was answered
	proposed   uint64    // the epoch that its hello proposed
	helloRound uint64    // this node's latest round in which the hello arrived
	epoch      uint32    // of the process that sent the hello, see van.Message
	waiting    *request  // its hello, until this node begins a round
	hello      hello     // contents of the waiting hello
	down       error     // why the rank is lost, or nil
	aborted    abort     // its latest abort
	told       *question // the latest abort that was sent to it
	misfit     uint64    // the round of its latest hello, if that had a different list of ranks; else 0
}

// abort is a rank's notice that it has aborted the communicator in one of its rounds.
type abort struct {
	round uint64
	why   error
}

// abortReason returns why the rank aborted the round of its latest hello, or nil. base.mu is held.
func (p *rank) abortReason() error {
	if p.aborted.round == p.answered {
		return p.aborted.why
	}
	return nil
}

// final reports whether a repeated hello would get the same answer.
func final(err error) bool { return errors.Is(err, ErrMismatch) || errors.Is(err, van.ErrMalformed) }

// restarted lists the ranks whose latest hello is of another round than their answer: the rank has started another
// round meanwhile, or was replaced. The list is empty if there are errors, or ctx has ended. base.mu is held.
func (m *bootstrap) restarted(ctx context.Context, answers []hello, errs []error) (l []int) {
	for r := range m.b.ids {
		switch {
		case errs[r] != nil:
			return nil
		case r == m.b.self || m.ranks[r].answered == answers[r].round:
		case ctx.Err() != nil:
			errs[r] = van.TimedOut(context.Cause(ctx))
			return nil
		default:
			l = append(l, r)
		}
	}
	return l
}

// beginRound begins a round. It returns this node's hello, and the pending hellos of other ranks, which are to be
// answered.
func (m *bootstrap) beginRound(op string, endRound func(error)) (own hello, waiting []*request, err error) {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	switch {
	case m.b.closed:
		return hello{}, nil, m.b.refused(op, van.ErrClosed)
	case m.misfit != nil:
		return hello{}, nil, m.b.refused(op, m.misfit)
	case m.b.joining:
		return hello{}, nil, m.b.refused(op, fmt.Errorf("%w: another Rebuild is under way", van.ErrInvalid))
	}
	m.b.joining, m.endRound = true, endRound
	m.round = max(m.round+1, clock.Now())
	if m.propose <= m.b.epoch { // the same until a round succeeds
		m.propose = max(m.b.epoch+1, clock.Now())
	}
	m.missingHellos, m.allHellos = len(m.b.ids)-1, make(chan struct{})
	if m.missingHellos == 0 {
		close(m.allHellos)
	}
	own = hello{m.propose, m.round, m.b.hash, uint32(len(m.b.ids))}
	for r := range m.ranks {
		p := &m.ranks[r]
		if q := p.waiting; q != nil && m.b.customer.IsAwaited(q.reply.Sender, q.reply.ProcessEpoch, q.reply.CustomerID, q.reply.Timestamp) {
			m.noteHello(p, p.hello, q.reply.ProcessEpoch)
			waiting = append(waiting, q)
		}
		p.waiting = nil
	}
	return own, waiting, nil
}

// noteHello records the hello of a rank. base.mu is held.
func (m *bootstrap) noteHello(p *rank, h hello, epoch uint32) {
	p.answered, p.proposed, p.epoch, p.misfit = h.round, h.epoch, epoch, 0
	if p.helloRound == m.round {
		return
	}
	p.helloRound = m.round
	if m.missingHellos--; m.missingHellos == 0 {
		close(m.allHellos)
	}
}

// awaitHellos waits until all ranks have sent a hello, unless there are errors already.
func (m *bootstrap) awaitHellos(ctx context.Context, errs []error) {
	if slices.ContainsFunc(errs, func(err error) bool { return err != nil }) {
		return
	}
	for alive := time.NewTicker(aliveEvery); ; {
		select {
		case <-m.allHellos:
			alive.Stop()
			return
		case <-alive.C:
			if err := m.b.node.Alive(); err == nil {
				continue
			}
		case <-ctx.Done():
		}
		alive.Stop()
		m.b.mu.Lock()
		defer m.b.mu.Unlock()
		for r := range m.ranks {
			if r != m.b.self && m.ranks[r].helloRound != m.round {
				errs[r] = cmp.Or(van.TimedOut(context.Cause(ctx)), m.b.node.Alive())
			}
		}
		return
	}
}

// question is a request that is answered with a body: a hello, or an abort.
type question struct {
	cluster.Request
	got hello
}

// Answer implements cluster.Sink.
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

// Finished implements cluster.Sink.
func (*question) Finished(error) {}

// Recycle implements cluster.Sink.
func (*question) Recycle() {}

// handshake sends a hello to a rank until the rank answers or ctx ends.
func (m *bootstrap) handshake(ctx context.Context, rank int, own hello) (hello, error) {
	body := own.append(nil)
	var last error
	for limit := firstHello; ; limit = min(2*limit, lastHello) {
		q := &question{}
		if err := m.b.customer.Open(&q.Request, "hello", q, 1, m.b.ids[rank:rank+1]); err != nil {
			return hello{}, err
		}
		call := q.Call(limit)
		if err := m.b.sendRequest(m.b.ids[rank], q.First(), body); err != nil {
			m.b.customer.Abort(&q.Request, err)
		}
		limited, cancel := context.WithTimeoutCause(ctx, limit, van.ErrTimeout)
		err := call.Wait(limited)
		cancel()
		if err == nil {
			return q.got, nil
		}
		if met, closed := m.closedAfterHello(rank); closed {
			return met, nil
		}
		if final(err) || m.b.node.Alive() != nil {
			return hello{}, err
		}
		if last == nil || !errors.Is(err, context.Canceled) {
			last = err
		}
		select {
		case <-time.After(helloPause):
		case <-ctx.Done():
			if cause := context.Cause(ctx); errors.Is(cause, van.ErrTimeout) || errors.Is(cause, context.DeadlineExceeded) {
				return hello{}, fmt.Errorf("%w: %w", van.TimedOut(cause), last)
			}
			return hello{}, context.Cause(ctx)
		}
	}
}

// closedAfterHello returns what the rank sent in this round, and whether the rank has closed the communicator since.
// In that case the rank's round has succeeded: it has received this rank's hello, and does not answer any more.
func (m *bootstrap) closedAfterHello(rank int) (hello, bool) {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	p := &m.ranks[rank]
	return hello{p.proposed, p.answered, m.b.hash, uint32(len(m.b.ids))}, p.helloRound == m.round && errors.Is(p.abortReason(), van.ErrClosed)
}

// receiveHello handles the hello of a rank.
func (m *bootstrap) receiveHello(rank int, q request, h hello) {
	if h.ranks != m.b.hash || int(h.n) != len(m.b.ids) {
		err := fmt.Errorf("%w: communicator %d has %d ranks at %s and %d at %s, or different ones", errMisfit, m.b.id, len(m.b.ids), m.b.node.Name(), h.n, m.b.name(rank))
		m.b.mu.Lock()
		m.ranks[rank].misfit = h.round
		m.b.mu.Unlock()
		m.reject(&q, err)
		return
	}
	m.b.mu.Lock()
	if m.b.closed {
		m.b.mu.Unlock()
		m.b.refuse(&q, van.ErrClosed)
		return
	}
	p := &m.ranks[rank]
	again := p.answered == h.round && p.epoch == q.reply.ProcessEpoch
	if m.b.joining || again {
		if m.b.joining {
			m.noteHello(p, h, q.reply.ProcessEpoch)
		}
		own := hello{m.propose, m.round, m.b.hash, uint32(len(m.b.ids))}
		m.b.mu.Unlock()
		m.b.answer(&q, own.append(nil))
		return
	}
	p.waiting, p.hello = &q, h
	running := m.b.err == nil
	m.b.mu.Unlock()
	if running {
		m.b.fail(m.b.about(rank, errRebuild))
	}
}

// reject refuses the hello of a rank with a different list of ranks, and ends this node's round, if there is one,
// since that rank would never join it.
func (m *bootstrap) reject(q *request, err error) {
	m.b.mu.Lock()
	endRound := m.endRound
	if m.round == 0 {
		m.misfit = err // reported when the first round begins
	}
	m.b.mu.Unlock()
	if endRound != nil {
		endRound(err)
	}
	m.b.refuse(q, err)
}

// tellLimit is the time limit for delivering an abort to a rank.
const tellLimit = 2 * time.Second

// tell notifies the other ranks that the communicator has failed here, in this node's round. Ranks that have reported
// a failure themselves, or have never sent a hello, are skipped. For a rank whose hello does not fit, an errMisfit refers
// to the round of that hello. A rank that cannot be notified will notice that this node is lost.
func (m *bootstrap) tell(round uint64, why error) { awaitAborts(m.say(round, why)) }

// awaitAborts waits until the aborts are acknowledged. A rank that has not acknowledged in time is refused at its
// next request.
func awaitAborts(calls []cluster.Call) {
	for _, call := range calls {
		_ = call.Wait(context.Background())
	}
}

// say sends the aborts of tell.
func (m *bootstrap) say(round uint64, why error) (calls []cluster.Call) {
	for r, id := range m.b.ids {
		if r == m.b.self {
			continue
		}
		m.b.mu.Lock()
		about, concerned := round, m.ranks[r].answered != 0 // a rank without a hello is not notified
		misfit := m.ranks[r].misfit != 0 && errors.Is(why, errMisfit)
		if misfit {
			about, concerned = m.ranks[r].misfit, true
		}
		m.b.mu.Unlock()
		if !concerned {
			continue
		}
		q := &question{}
		if m.b.customer.Open(&q.Request, "abort communicator", q, 1, []int{id}) != nil {
			break // the node has ended
		}
		m.b.mu.Lock()
		p := &m.ranks[r]
		p.told = q
		knows := p.abortReason() != nil && !misfit
		m.b.mu.Unlock()
		calls = append(calls, q.Call(tellLimit))
		err := why
		if !knows {
			err = m.sendSoon(id, q.First(), appendReason(nil, verbAbort, about, why))
		}
		if err != nil {
			m.b.customer.Abort(&q.Request, err)
		}
	}
	return calls
}

// awaitSent waits, for at most firstHello, until the reason of the failure was sent to the others. A hello that
// arrives before it would be all that they learn.
func (m *bootstrap) awaitSent(ctx context.Context) {
	m.b.mu.Lock()
	told := m.told
	m.b.mu.Unlock()
	if told == nil {
		return
	}
	select {
	case <-told:
	case <-time.After(firstHello):
	case <-ctx.Done():
	}
}

// sendSoon is sendRequest to a rank that may not be connected yet: it retries for tellLimit.
func (m *bootstrap) sendSoon(id int, ts int32, body []byte) error {
	for end := time.Now().Add(tellLimit); ; {
		err := m.b.sendRequest(id, ts, body)
		if !errors.Is(err, van.ErrUnknownPeer) || time.Now().After(end) {
			return err
		}
		<-time.After(helloPause)
	}
}

// receiveAbort handles the abort of a rank, and returns it as an error. It returns nil if the abort is outdated: it
// is about an earlier round, or about an earlier communicator with the same ID.
func (m *bootstrap) receiveAbort(rank int, a abort) error {
	err := m.b.about(rank, a.why)
	m.b.mu.Lock()
	if errors.Is(a.why, errMisfit) && a.round == m.round {
		endRound := m.endRound
		m.b.mu.Unlock()
		if endRound != nil {
			endRound(err)
		}
		return nil
	}
	p := &m.ranks[rank]
	p.aborted = a
	told := p.told
	p.told = nil
	ours := p.abortReason() != nil && m.b.err == nil
	m.b.mu.Unlock()
	if told != nil {
		m.b.customer.Abort(&told.Request, err) // the rank does not answer any more
	}
	if ours {
		return err
	}
	return nil
}

// down records that a rank is lost, or, if cause is nil, connected again. It reports whether the rank had closed the
// communicator.
func (m *bootstrap) down(rank int, cause error) (left bool) {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	p := &m.ranks[rank]
	p.down = cause
	return errors.Is(p.abortReason(), van.ErrClosed)
}
