package collective

// What all parts of a communicator know of it: its ranks, whether it can be used, and how messages are sent.

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

// errMisfit: a rank has other ranks in its communicator.
var errMisfit = fmt.Errorf("%w: ranks were made with different ranks", ErrMismatch)

// ErrAborted: another rank has given the communicator up, for a reason of its own.
var ErrAborted = errors.New("given up by another rank")

// errRebuild: another rank is in Rebuild or New.
var errRebuild = fmt.Errorf("%w: it begins anew", ErrAborted)

// Options of New. All ranks must give the same.
type Options struct {
	ID    int   // tells the communicators of a node apart: 0 to 4095
	Ranks []int // instance ranks of the node's role, ascending; nil means the instances of its group

	// Timeout limits New and, counted from the call, each Op.Wait whose context has no
	// deadline. 0 is postoffice.DefaultTimeout, negative no limit.
	Timeout time.Duration

	// Look lets calls with tensors on a device receive in place of the transport, as waits do, before they return, for 10 microseconds or
	// so: others need not wait until a thread of this process is woken. Handlers of this node may run on the caller's goroutine
	// meanwhile, so it must hold no lock that one of them takes. Nodes that are servers do not look.
	Look bool
}

// base is a communicator as its parts know it. It has one lock, since it fails and begins anew as a whole: mu guards
// what follows it here, and what meeting, flight, op and children say that it does.
type base struct {
	node     cluster.App
	customer *cluster.Customer
	id       int
	ids      []int // node ids by rank of the communicator, ascending
	self     int   // this node's rank in it
	hash     uint64
	timeout  time.Duration
	revoker  van.Invalidator // nil when no peer writes into results
	looks    bool            // waits look for a while before they sleep
	early    bool            // and calls with tensors on a device before they return
	fail     func(error)     // Comm.fail: makes it unusable until Rebuild, and tells the other ranks

	mu      sync.Mutex
	epoch   uint64
	err     error // why there can be no calls before Rebuild
	left    error // a rank has closed its end: calls in flight that do not need it go on
	closed  bool
	joining bool // in New or Rebuild
}

// place fills in the ranks.
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
	// Ranks may all be on this machine, and who looks where there are more of them than
	// processors keeps the very rank that it waits for from its own.
	b.looks = len(ranks) <= runtime.NumCPU()
	return nil
}

// name names a rank and its node, for errors.
func (b *base) name(rank int) string {
	return fmt.Sprintf("rank %d (%s)", rank, b.node.PeerName(b.ids[rank]))
}

// limit is how long a wait may take, 0 for no limit.
func (b *base) limit(ctx context.Context) time.Duration {
	if _, has := ctx.Deadline(); has || b.timeout < 0 {
		return 0
	}
	return b.node.Limit(b.timeout)
}

// limited is ctx for as long as a wait may take, and how long that is, 0 for no limit.
func (b *base) limited(ctx context.Context) (_ context.Context, limit time.Duration, cancel context.CancelFunc) {
	if limit = b.limit(ctx); limit == 0 {
		return ctx, 0, func() {}
	}
	ctx, cancel = context.WithTimeoutCause(ctx, limit, van.ErrTimeout)
	return ctx, limit, cancel
}

// refused is the error of a call that is not made. Nothing fails by it.
func (b *base) refused(op string, err error) *van.Error {
	return &van.Error{Op: op, Node: b.node.Name(), Detail: fmt.Sprintf("communicator %d", b.id), Err: err}
}

// failed is the error of a call on a communicator that has failed.
func (b *base) failed(op string, err error) error {
	e := b.refused(op, err)
	if !errors.Is(err, van.ErrClosed) {
		e.Hint = "all ranks call Rebuild to go on"
	}
	return e
}

// check refuses a call that makes no sense here, before anything is sent.
func (b *base) check(k call, errs ...error) error {
	if err := cmp.Or(errs...); err != nil {
		return b.refused(kinds[k.kind], err)
	}
	return nil
}

// about is the error of the communicator that a rank is the reason of.
func (b *base) about(rank int, err error) *van.Error {
	return &van.Error{Op: fmt.Sprintf("communicator %d", b.id), Node: b.node.Name(), Peer: b.name(rank), Err: err}
}

// request is one of another rank's that has not been answered.
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

// answer answers a request with a body only. Who cannot be reached is lost.
func (b *base) answer(q *request, body []byte) {
	m := &van.Message{}
	q.reply.Fill(m)
	m.Body = body
	if err := b.node.Send(m); err != nil {
		b.node.Rarely("collective answer: "+logx.Kind(err)).Info("could not answer a rank",
			"communicator", b.id, "rank", q.rank, "err", err)
	}
}

// refuse answers a request with the reason why it gets nothing else.
func (b *base) refuse(q *request, why error) {
	b.answer(q, appendReason(nil, verbRefused, 0, why))
}
