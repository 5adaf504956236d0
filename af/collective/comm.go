package collective

// Comm: its making, its failure and its end.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/streamqueue"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// ErrMismatch: ranks of a communicator have made different calls.
var ErrMismatch = errors.New("calls of ranks do not match")

// errMisfit: a rank has other ranks in its communicator.
var errMisfit = fmt.Errorf("%w: ranks were made with different ranks", ErrMismatch)

// ErrAborted: another rank has given the communicator up, for a reason of its own.
var ErrAborted = errors.New("given up by another rank")

// errRebuild: another rank is in Rebuild or New.
var errRebuild = fmt.Errorf("%w: it begins anew", ErrAborted)

// maxInFlight is how many calls of a communicator may be in flight, and so how many requests of
// a rank may wait for another one. A large AllReduce counts twice.
const maxInFlight = 64

// Options of New. All ranks must give the same.
type Options struct {
	ID    int   // tells the communicators of a node apart: 0 to 4095
	Ranks []int // instance ranks of the node's role, ascending; nil means the instances of its group

	// Timeout limits New and, counted from the call, each Op.Wait whose context has no
	// deadline. 0 is postoffice.DefaultTimeout, negative no limit.
	Timeout time.Duration
}

// Comm is a communicator: this node's end of one. All methods are safe for concurrent use,
// but all ranks must make their calls in the same order.
type Comm struct {
	node     postoffice.App
	customer *postoffice.Customer
	id       int
	ids      []int // node ids by rank of the communicator, ascending
	self     int   // this node's rank in it
	hash     uint64
	timeout  time.Duration
	revoker  van.Revoker        // nil when no peer writes into results
	looks    bool               // waits look for a while before they sleep
	stop     func()             // ends the watch for lost peers
	queue    *streamqueue.Queue // of calls with tensors on the device
	copiesMu sync.Mutex
	copies   uintptr // the device's stream for copies of own parts; 0 before the first
	noCopies bool    // there are no more of them

	pair sync.Mutex // held while calls get their numbers; taken before mu

	mu      sync.Mutex
	epoch   uint64
	next    uint32 // number of the next call
	err     error  // why there can be no calls before Rebuild
	left    error  // a rank has closed its end: calls in flight that do not need it go on
	closed  bool
	window  [maxInFlight]*op   // calls in flight, by number
	asked   [][maxInFlight]ask // by rank and number: requests for calls that this rank has not made yet; others were answered
	ranks   []rank
	round   uint64 // of join, this node's
	joining bool
	propose uint64        // this node's proposal in that round
	unmet   int           // ranks that have not said hello in it
	met     chan struct{} // closed when there are none left
	refuted func(error)   // ends the round: a rank has another idea of the communicator
	misfit  error         // such a rank has said hello before the first round
	free    []*op
	rooms   [][]uint64 // memory for reductions
	tenants []*Tenant  // what lasts until the communicator fails; replaced, never changed
	entered uint32     // how many there have been in this epoch
	sending int        // answers whose memory others may be reading
	telling sync.WaitGroup
	quiet   chan struct{} // closed when sending has become 0; nil when nobody waits
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

// gaveUp is why the rank has given up the round that this node has met it in, or nil. mu is held.
func (p *rank) gaveUp() error {
	if p.aborted.round == p.answered {
		return p.aborted.why
	}
	return nil
}

// New makes this node's end of a communicator and waits until all ranks have made theirs: for
// the limit of o, unless ctx has a deadline. The error names those that have not.
func New(ctx context.Context, node *postoffice.Node, o Options) (*Comm, error) {
	c := &Comm{node: node.App(), id: o.ID, timeout: o.Timeout, err: errNotJoined}
	if err := c.place(o.Ranks); err != nil {
		return nil, &van.Error{Op: "new communicator", Node: node.Name(), Detail: fmt.Sprintf("ID %d", o.ID), Err: err}
	}
	c.revoker, _ = van.As[van.Revoker](node.Van())
	if err := c.node.Link(c.ids); err != nil {
		return nil, err
	}
	customer, err := c.node.AddCustomer(appBase+o.ID, appBase+o.ID, c.receive)
	if err != nil {
		e := &van.Error{Op: "new communicator", Node: node.Name(), Detail: fmt.Sprintf("ID %d", o.ID), Err: err}
		if errors.Is(err, van.ErrInvalid) { // it exists
			e.Hint = "close this node's other communicator with that ID first"
		}
		return nil, e
	}
	c.customer = customer
	c.queue = streamqueue.New(c.node.Backend(), c.node.Config().BusyPoll)
	unwatch, stay := c.node.OnPeer(c.peerChanged), c.node.OnExit(c.endDevice)
	c.stop = func() { unwatch(); stay() }
	if err := c.join(ctx, "new communicator"); err != nil {
		c.tell(c.round, err)
		_ = c.Close(ctx)
		return nil, err
	}
	return c, nil
}

var errNotJoined = fmt.Errorf("%w: not all ranks have come", ErrAborted)

// place fills in the ranks.
func (c *Comm) place(ranks []int) error {
	t := c.node.Topology()
	role, n, id := c.node.Role(), t.NumServers*t.GroupSize, van.ServerID
	if role == van.Worker {
		n, id = t.NumWorkerInstances(), van.WorkerID
	}
	switch {
	case role != van.Worker && role != van.Server:
		return fmt.Errorf("%w: a %s, want a worker or server", van.ErrInvalid, role)
	case c.id < 0 || c.id > maxID:
		return fmt.Errorf("%w: ID %d, want 0 to %d", van.ErrInvalid, c.id, maxID)
	}
	if ranks == nil {
		for i := range t.GroupSize {
			ranks = append(ranks, t.GroupRank*t.GroupSize+i)
		}
	}
	h := fnv.New64a()
	for i, r := range ranks {
		switch {
		case r < 0 || r >= n:
			return fmt.Errorf("%w: rank %d, want 0 to %d: there are %d %ss", van.ErrInvalid, r, n-1, n, role)
		case i > 0 && r <= ranks[i-1]:
			return fmt.Errorf("%w: ranks %v, want them ascending, each once", van.ErrInvalid, ranks)
		}
		c.ids = append(c.ids, id(r))
		fmt.Fprintf(h, "%d ", id(r))
	}
	if c.self = slices.Index(c.ids, c.node.ID()); c.self < 0 {
		return fmt.Errorf("%w: ranks %v, want this node's, %d, among them", van.ErrInvalid, ranks, c.node.Rank())
	}
	if len(c.ids) > 1<<16 {
		return fmt.Errorf("%w: %d ranks, want at most %d", van.ErrInvalid, len(ranks), 1<<16)
	}
	c.hash = h.Sum64()
	// Ranks may all be on this machine, and who looks where there are more of them than
	// processors keeps the very rank that it waits for from its own.
	c.looks = len(ranks) <= runtime.NumCPU()
	c.ranks = make([]rank, len(c.ids))
	c.asked = make([][maxInFlight]ask, len(c.ids))
	return nil
}

// Rank is this node's rank in the communicator, from 0.
func (c *Comm) Rank() int { return c.self }

// Size is the number of ranks.
func (c *Comm) Size() int { return len(c.ids) }

// name names a rank and its node, for errors.
func (c *Comm) name(rank int) string {
	return fmt.Sprintf("rank %d (%s)", rank, c.node.PeerName(c.ids[rank]))
}

// limit is how long a wait may take, 0 for no limit.
func (c *Comm) limit(ctx context.Context) time.Duration {
	if _, has := ctx.Deadline(); has || c.timeout < 0 {
		return 0
	}
	if c.timeout == 0 {
		return postoffice.DefaultTimeout
	}
	return c.timeout
}

// peerChanged is called when a peer is lost or back.
func (c *Comm) peerChanged(id int, up bool, cause error) {
	rank, member := slices.BinarySearch(c.ids, id)
	if !member || rank == c.self {
		return
	}
	c.mu.Lock()
	p := &c.ranks[rank]
	p.down = cause // nil when up
	left := errors.Is(p.gaveUp(), van.ErrClosed)
	c.mu.Unlock()
	if up || left {
		return
	}
	if !errors.Is(cause, van.ErrPeerLost) {
		cause = fmt.Errorf("%w: %w", van.ErrPeerLost, cause)
	}
	c.fail(&van.Error{Op: "communicator", Node: c.node.Name(), Peer: c.name(rank), Err: cause})
}

// fail makes the communicator unusable until Rebuild: all calls in flight end with err, and
// the other ranks are told. Only the first error counts.
func (c *Comm) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	var ops []*op
	for i, o := range c.window {
		if o != nil {
			o.refs++
			ops = append(ops, o)
			c.window[i] = nil
		}
	}
	refused := c.takeAsked(func(a *ask) bool { return a.epoch <= c.epoch })
	c.telling.Add(1)
	round, tenants := c.round, c.tenants
	c.tenants = nil
	c.mu.Unlock()
	for _, t := range tenants {
		t.changed(-1, err)
	}
	for _, o := range ops {
		o.end(err)
		c.unref(o)
	}
	go func() { // this may be a goroutine that must not send
		defer c.telling.Done()
		for _, a := range refused {
			c.refuse(&a.request, err)
		}
		c.tell(round, err)
	}()
}

// leave notes that a rank has closed its end. Calls in flight that need it fail, and so do all
// later ones.
func (c *Comm) leave(rank int, err error) {
	c.mu.Lock()
	c.left = cmp.Or(c.left, err)
	needed := false
	for _, o := range c.window {
		needed = needed || o != nil && o.needs(rank)
	}
	tenants := c.tenants
	c.mu.Unlock()
	for _, t := range tenants {
		t.changed(rank, err)
	}
	if needed {
		c.fail(err)
	}
}

// takeAsked removes the kept requests that f picks. mu is held.
func (c *Comm) takeAsked(f func(*ask) bool) (taken []ask) {
	for r := range c.asked {
		for i := range c.asked[r] {
			if a := &c.asked[r][i]; a.kept && f(a) {
				taken = append(taken, *a)
				*a = ask{}
			}
		}
	}
	return taken
}

// tellLimit is how long a rank may take to hear of an abort.
const tellLimit = 2 * time.Second

// tell tells the other ranks that the communicator has failed here, but those that have said
// so themselves, or have never met this one. It is the communicator of that round of this node's; an errMisfit is for the
// round of the other rank whose hello does not fit. Those who cannot be told
// will see that this node is lost.
func (c *Comm) tell(round uint64, why error) {
	var calls []postoffice.Call
	for r, id := range c.ids {
		if r == c.self {
			continue
		}
		c.mu.Lock()
		about, concerned := round, c.ranks[r].answered != 0 // otherwise it has never met this rank
		if errors.Is(why, errMisfit) {
			about, concerned = c.ranks[r].misfit, c.ranks[r].misfit != 0
		}
		c.mu.Unlock()
		if !concerned {
			continue
		}
		q := &question{}
		if c.customer.Open(&q.Request, "abort communicator", q, 1, []int{id}) != nil {
			break // the node has ended
		}
		c.mu.Lock()
		p := &c.ranks[r]
		p.told = q
		knows := p.gaveUp() != nil && !errors.Is(why, errMisfit)
		c.mu.Unlock()
		calls = append(calls, q.Call(tellLimit))
		err := why
		if !knows {
			err = c.sendSoon(id, q.First(), appendReason(nil, verbAbort, about, why))
		}
		if err != nil {
			c.customer.Abort(&q.Request, err)
		}
	}
	for _, call := range calls {
		_ = call.Wait(context.Background()) // who has not heard of it will be told when it asks for something
	}
}

// refused is the error of a call that is not made. Nothing fails by it.
func (c *Comm) refused(op string, err error) *van.Error {
	return &van.Error{Op: op, Node: c.node.Name(), Detail: fmt.Sprintf("communicator %d", c.id), Err: err}
}

// failed is the error of a call on a communicator that has failed.
func (c *Comm) failed(op string, err error) error {
	e := c.refused(op, err)
	if !errors.Is(err, van.ErrClosed) {
		e.Hint = "all ranks call Rebuild to go on"
	}
	return e
}

// Close ends the communicator on all ranks: calls in flight that need this rank fail there, and all
// later ones. It waits, for the communicator's limit unless ctx has a deadline, until nobody reads memory of
// this rank any more; the error says that somebody still does.
func (c *Comm) Close(ctx context.Context) error {
	c.mu.Lock()
	again, refuted := c.closed, c.refuted
	c.closed = true
	c.mu.Unlock()
	if again {
		return c.await(ctx, "close communicator")
	}
	if refuted != nil {
		refuted(van.ErrClosed)
	}
	c.fail(&van.Error{Op: "close communicator", Node: c.node.Name(), Err: van.ErrClosed})
	c.mu.Lock()
	c.err = &van.Error{Op: "use communicator", Node: c.node.Name(), Err: van.ErrClosed}
	c.mu.Unlock()
	if c.stop != nil {
		c.stop()
	}
	c.endDevice()
	err := c.await(ctx, "close communicator")
	c.telling.Wait()
	if c.customer != nil {
		c.customer.Close()
	}
	return err
}

// await waits until nobody reads memory of this rank any more.
func (c *Comm) await(ctx context.Context, op string) error {
	c.mu.Lock()
	if c.sending == 0 {
		c.mu.Unlock()
		return nil
	}
	if c.quiet == nil {
		c.quiet = make(chan struct{})
	}
	quiet := c.quiet
	c.mu.Unlock()
	begun, limit := clock.Now(), c.limit(ctx)
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, van.ErrTimeout)
		defer cancel()
	}
	select {
	case <-quiet:
		return nil
	case <-ctx.Done():
		return &van.Error{Op: op, Node: c.node.Name(), Detail: "others are still reading memory of this rank",
			Elapsed: time.Duration(clock.Now() - begun), Limit: limit, Err: timeout(context.Cause(ctx))}
	}
}

// timeout makes the end of a context's time van.ErrTimeout.
func timeout(cause error) error {
	if errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", van.ErrTimeout, cause)
	}
	return cause
}
