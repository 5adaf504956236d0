package collective

// How ranks meet in New and Rebuild, and part: rounds, hellos, and that a rank has given the communicator up.

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

// Times of a hello: it is lost when the other rank is not linked yet.
const (
	firstHello = 250 * time.Millisecond // until it is repeated; then twice as long, and so on
	lastHello  = 4 * time.Second
	helloPause = 20 * time.Millisecond
)

// meeting is what a node knows of the other ranks. All but telling is guarded by base.mu.
type meeting struct {
	b       *base
	ranks   []rank
	round   uint64        // this node's
	propose uint64        // this node's proposal in that round
	unmet   int           // ranks that have not said hello in it
	met     chan struct{} // closed when there are none left
	refuted func(error)   // ends the round: a rank has another idea of the communicator
	misfit  error         // such a rank has said hello before the first round
	telling sync.WaitGroup
	told    chan struct{} // closed when the others have been sent why the communicator has failed; nil: never has
}

// rank is what a node knows of another one in New and Rebuild.
type rank struct {
	answered uint64    // the round of its hello that was answered
	proposed uint64    // the epoch that it said
	met      uint64    // the latest round of this node's in which that was
	epoch    uint32    // of the process that sent it, see van.Message
	waiting  *request  // its hello, until this node begins a round
	hello    hello     // what that says
	down     error     // why it is lost, or nil
	aborted  abort     // what it has said last
	told     *question // the last abort that it was sent
	misfit   uint64    // the round of its hello that named other ranks
}

// abort is that a rank has given the communicator up, of one of its rounds.
type abort struct {
	round uint64
	why   error
}

// gaveUp is why the rank has given up the round that this node has met it in, or nil. base.mu is held.
func (p *rank) gaveUp() error {
	if p.aborted.round == p.answered {
		return p.aborted.why
	}
	return nil
}

// final tells whether a rank that has answered so will not answer otherwise.
func final(err error) bool { return errors.Is(err, ErrMismatch) || errors.Is(err, van.ErrMalformed) }

// metAnew lists the ranks whose latest hello is of another round than their answer: they have
// begun again meanwhile, or were replaced. There are none once there are errors, or ctx has ended. base.mu is held.
func (m *meeting) metAnew(ctx context.Context, answers []hello, errs []error) (l []int) {
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

// beginRound begins a round. It returns what to say, and the requests of those who wait for it.
func (m *meeting) beginRound(op string, refuted func(error)) (own hello, waiting []*request, err error) {
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
	m.b.joining, m.refuted = true, refuted
	m.round = max(m.round+1, clock.Now())
	if m.propose <= m.b.epoch { // the same until a round succeeds
		m.propose = max(m.b.epoch+1, clock.Now())
	}
	m.unmet, m.met = len(m.b.ids)-1, make(chan struct{})
	if m.unmet == 0 {
		close(m.met)
	}
	own = hello{m.propose, m.round, m.b.hash, uint32(len(m.b.ids))}
	for r := range m.ranks {
		p := &m.ranks[r]
		if q := p.waiting; q != nil && m.b.customer.IsAwaited(q.reply.Sender, q.reply.ProcessEpoch, q.reply.CustomerID, q.reply.Timestamp) {
			m.meet(p, p.hello, q.reply.ProcessEpoch)
			waiting = append(waiting, q)
		}
		p.waiting = nil
	}
	return own, waiting, nil
}

// meet notes that a rank has said hello. base.mu is held.
func (m *meeting) meet(p *rank, h hello, epoch uint32) {
	p.answered, p.proposed, p.epoch = h.round, h.epoch, epoch
	if p.met == m.round {
		return
	}
	p.met = m.round
	if m.unmet--; m.unmet == 0 {
		close(m.met)
	}
}

// awaitHellos waits until all ranks have said hello, unless there are errors already.
func (m *meeting) awaitHellos(ctx context.Context, errs []error) {
	if slices.ContainsFunc(errs, func(err error) bool { return err != nil }) {
		return
	}
	for alive := time.NewTicker(aliveEvery); ; {
		select {
		case <-m.met:
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
			if r != m.b.self && m.ranks[r].met != m.round {
				errs[r] = cmp.Or(van.TimedOut(context.Cause(ctx)), m.b.node.Alive())
			}
		}
		return
	}
}

// question is a request whose answer is a body: a hello, or an abort.
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

// greet says hello to a rank until it answers or ctx ends.
func (m *meeting) greet(ctx context.Context, rank int, own hello) (hello, error) {
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
		if met, closed := m.metClosed(rank); closed {
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

// metClosed is what a rank has said in this round, and whether it has closed its end since: then its round
// has succeeded, so it has got this rank's hello, which it does not answer any more.
func (m *meeting) metClosed(rank int) (hello, bool) {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	p := &m.ranks[rank]
	return hello{p.proposed, p.answered, m.b.hash, uint32(len(m.b.ids))}, p.met == m.round && errors.Is(p.gaveUp(), van.ErrClosed)
}

// receiveHello handles a hello of a rank.
func (m *meeting) receiveHello(rank int, q request, h hello) {
	if h.ranks != m.b.hash || int(h.n) != len(m.b.ids) {
		err := fmt.Errorf("%w: communicator %d has %d ranks at %s and %d at %s, or others", errMisfit, m.b.id, len(m.b.ids), m.b.node.Name(), h.n, m.b.name(rank))
		m.b.mu.Lock()
		m.ranks[rank].misfit = h.round
		m.b.mu.Unlock()
		m.refute(&q, err)
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
			m.meet(p, h, q.reply.ProcessEpoch)
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

// refute refuses the hello of a rank that has another idea of the communicator, and ends this
// node's round, if there is one, in which it would wait in vain.
func (m *meeting) refute(q *request, err error) {
	m.b.mu.Lock()
	refuted := m.refuted
	if m.round == 0 {
		m.misfit = err // for the first round, as soon as it begins
	}
	m.b.mu.Unlock()
	if refuted != nil {
		refuted(err)
	}
	m.b.refuse(q, err)
}

// tellLimit is how long a rank may take to hear of an abort.
const tellLimit = 2 * time.Second

// tell tells the other ranks that the communicator has failed here, but those that have said
// so themselves, or have never met this one. It is the communicator of that round of this node's; an errMisfit is for the
// round of the other rank whose hello does not fit. Those who cannot be told
// will see that this node is lost.
func (m *meeting) tell(round uint64, why error) { heard(m.say(round, why)) }

// heard waits until they have been told. Who has not heard of it in time will be told when it asks for something.
func heard(calls []cluster.Call) {
	for _, call := range calls {
		_ = call.Wait(context.Background())
	}
}

// say does tell's sending.
func (m *meeting) say(round uint64, why error) (calls []cluster.Call) {
	for r, id := range m.b.ids {
		if r == m.b.self {
			continue
		}
		m.b.mu.Lock()
		about, concerned := round, m.ranks[r].answered != 0 // otherwise it has never met this rank
		if errors.Is(why, errMisfit) {
			about, concerned = m.ranks[r].misfit, m.ranks[r].misfit != 0
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
		knows := p.gaveUp() != nil && !errors.Is(why, errMisfit)
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

// awaitTold waits, for a short time, until the others have been sent why the communicator has failed: a hello that
// came before would be all that they hear.
func (m *meeting) awaitTold(ctx context.Context) {
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

// sendSoon is sendRequest to a rank whose connection may not have been made yet.
func (m *meeting) sendSoon(id int, ts int32, body []byte) error {
	for end := time.Now().Add(tellLimit); ; {
		err := m.b.sendRequest(id, ts, body)
		if !errors.Is(err, van.ErrUnknownPeer) || time.Now().After(end) {
			return err
		}
		<-time.After(helloPause)
	}
}

// receiveAbort handles that a rank has given the communicator up, and returns that as an error, or nil: what it says of a
// round that is over, or of another communicator before this one, is too late.
func (m *meeting) receiveAbort(rank int, a abort) error {
	err := m.b.about(rank, a.why)
	m.b.mu.Lock()
	if errors.Is(a.why, errMisfit) {
		refuted, ours := m.refuted, a.round == m.round
		m.b.mu.Unlock()
		if ours && refuted != nil {
			refuted(err)
		}
		return nil
	}
	p := &m.ranks[rank]
	p.aborted = a
	told := p.told
	p.told = nil
	ours := p.gaveUp() != nil && m.b.err == nil
	m.b.mu.Unlock()
	if told != nil {
		m.b.customer.Abort(&told.Request, err) // it does not answer any more
	}
	if ours {
		return err
	}
	return nil
}

// down notes that a rank is lost, or with nil that it is back. It tells whether it had closed its end.
func (m *meeting) down(rank int, cause error) (left bool) {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	p := &m.ranks[rank]
	p.down = cause
	return errors.Is(p.gaveUp(), van.ErrClosed)
}
