package collective

// The state that all parts of a communicator share: its ranks, its error, and how it sends messages.

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

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// ErrMismatch: ranks of a communicator have made different calls.
var ErrMismatch = errors.New("calls of ranks do not match")

// errMisfit: another rank created the communicator with a different list of ranks.
var errMisfit = fmt.Errorf("%w: the ranks gave different lists of ranks", ErrMismatch)

// ErrAborted: another rank aborted the communicator, for a reason of its own.
var ErrAborted = errors.New("aborted by another rank")

// errRebuild: another rank is in Rebuild or New.
var errRebuild = fmt.Errorf("%w: it rebuilds the communicator", ErrAborted)

// Options are the options of New. All ranks must give the same.
type Options struct {
	ID    int   // distinguishes the communicators of a node: 0 to 4095
	Ranks []int // instance ranks of the node's role, ascending; nil means the instances of its group

	// Timeout limits New and, counted from the call, each Op.Wait whose context has no
	// deadline. 0 is postoffice.DefaultTimeout, negative no limit.
	Timeout time.Duration

	// Look lets calls with device tensors poll for up to 10 microseconds before they return. The caller then receives
	// in place of the transport, as a wait does, so other ranks need not wait until a thread of this process is woken.
	// Handlers of this node may run on the caller's goroutine meanwhile, so the caller must hold no lock that a
	// handler takes. Servers ignore Look.
	Look bool
}

// base is the state that the parts of a communicator share. A communicator fails and is rebuilt as a whole, so
// base has one lock. mu guards the fields below it, and the fields that bootstrap, callWindow, op and children
// declare as guarded by it.
type base struct {
	node     cluster.App
	customer *cluster.Customer
	id       int
	ids      []int // node ids by rank of the communicator, ascending
	self     int   // this node's rank in it
	hash     uint64
	timeout  time.Duration
	revoker  van.Invalidator // nil if no peer writes into results
	polls    bool            // waits poll before they sleep
	early    bool            // calls with device tensors poll before they return
	fail     func(error)     // Comm.fail: makes the communicator unusable until Rebuild, and notifies the other ranks

	mu      sync.Mutex
	epoch   uint64
	err     error // why calls are refused until Rebuild
	left    error // a rank has closed the communicator: calls in flight that do not need the rank continue until this rank makes another call
	closed  bool
	joining bool // in New or Rebuild
}

// place computes ids, self and hash from the ranks of Options.
func (b *base) place(ranks []int) error {
	t := b.node.Topology()
	role, n, id := b.node.Role(), t.NumServers*t.GroupSize, van.ServerID
	if role == van.Worker {
		n, id = t.NumWorkerInstances(), van.WorkerID
	}
	switch {
	case role != van.Worker && role != van.Server:
		return fmt.Errorf("%w: a %s, want a worker or server", van.ErrInvalid, role)
	case b.id < 0 || b.id > maxID:
		return fmt.Errorf("%w: ID %d, want 0 to %d", van.ErrInvalid, b.id, maxID)
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
		b.ids = append(b.ids, id(r))
		fmt.Fprintf(h, "%d ", id(r))
	}
	if b.self = slices.Index(b.ids, b.node.ID()); b.self < 0 {
		return fmt.Errorf("%w: ranks %v, want this node's, %d, among them", van.ErrInvalid, ranks, b.node.Rank())
	}
	if len(b.ids) > 1<<16 {
		return fmt.Errorf("%w: %d ranks, want at most %d", van.ErrInvalid, len(ranks), 1<<16)
	}
	b.hash = h.Sum64()
	// All ranks may be on this machine. If there are more ranks than processors, a polling rank takes the processor
	// from the rank that it waits for.
	b.polls = len(ranks) <= runtime.NumCPU()
	return nil
}

// name describes a rank and its node in errors.
func (b *base) name(rank int) string {
	return fmt.Sprintf("rank %d (%s)", rank, b.node.PeerName(b.ids[rank]))
}

// limit returns how long a wait may take; 0 means no limit.
func (b *base) limit(ctx context.Context) time.Duration {
	if _, has := ctx.Deadline(); has || b.timeout < 0 {
		return 0
	}
	return b.node.Limit(b.timeout)
}

// limited returns ctx with the limit of a wait, and the limit; 0 means no limit.
func (b *base) limited(ctx context.Context) (_ context.Context, limit time.Duration, cancel context.CancelFunc) {
	if limit = b.limit(ctx); limit == 0 {
		return ctx, 0, func() {}
	}
	ctx, cancel = context.WithTimeoutCause(ctx, limit, van.ErrTimeout)
	return ctx, limit, cancel
}

// refused returns the error of a call that is not made. The communicator does not fail.
func (b *base) refused(op string, err error) *van.Error {
	return &van.Error{Op: op, Node: b.node.Name(), Detail: fmt.Sprintf("communicator %d", b.id), Err: err}
}

// failed returns the error of a call on a communicator that has failed.
func (b *base) failed(op string, err error) error {
	e := b.refused(op, err)
	if !errors.Is(err, van.ErrClosed) {
		e.Hint = "all ranks call Rebuild to go on"
	}
	return e
}

// failIfLeft returns err, the error of a call that reserve has refused. If the reason is that a rank has closed the communicator, it
// fails the communicator: the root of a Broadcast or Scatter waits for this rank, and requests nothing that could be refused.
func (b *base) failIfLeft(err error) error {
	b.mu.Lock()
	left := b.left
	b.mu.Unlock()
	if left != nil && errors.Is(err, left) {
		b.fail(left)
	}
	return err
}

// check returns the first of errs as the error of call k. It runs before anything is sent.
func (b *base) check(k call, errs ...error) error {
	if err := cmp.Or(errs...); err != nil {
		return b.refused(kinds[k.kind], err)
	}
	return nil
}

// about returns the error of the communicator that rank caused.
func (b *base) about(rank int, err error) *van.Error {
	return &van.Error{Op: fmt.Sprintf("communicator %d", b.id), Node: b.node.Name(), Peer: b.name(rank), Err: err}
}

// request is a request of another rank that is not answered yet.
type request struct {
	rank  int
	reply datamsg.Reply
}

// sendRequest sends a request without data.
func (b *base) sendRequest(id int, ts int32, body []byte) error {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Timestamp = id, true, ts
	m.AppID, m.CustomerID = int32(b.customer.AppID()), int32(b.customer.ID())
	m.Body = body
	return b.node.Send(m)
}

// answer answers a request with a body only, and reports whether the answer was sent. A rank that cannot be reached is
// reported as lost by its peers' connections.
func (b *base) answer(q *request, body []byte) bool {
	m := &van.Message{}
	q.reply.Fill(m)
	m.Body = body
	err := b.node.Send(m)
	if err != nil {
		b.node.Rarely("collective answer: "+logx.Kind(err)).Info("could not answer a rank",
			"communicator", b.id, "rank", q.rank, "err", err)
	}
	return err == nil
}

// refuse answers a request with a reason instead of a part. If the answer cannot be sent, a control message ends the
// request.
func (b *base) refuse(q *request, why error) {
	if r := &q.reply; !b.answer(q, appendReason(nil, verbRefused, 0, why)) {
		b.node.Refuse(r.Sender, r.ProcessEpoch, r.AppID, r.CustomerID, r.Timestamp, cluster.Declined(why))
	}
}

// refuseAll refuses requests.
func (b *base) refuseAll(l []ask, why error) {
	for i := range l {
		b.refuse(&l[i].request, why)
	}
}
