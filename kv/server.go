package kv

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Handler takes one request of one worker. It answers with Respond, or refuses with Refuse, before it returns or
// later, from any goroutine. It may block: other workers are served meanwhile,
// so it may run for several at once. The call of a worker whose request gets neither fails with postoffice.ErrTimeout. A handler
// that panics ends the process, as in any goroutine; its workers' calls fail with postoffice.ErrPeerLost. A handler that runs for a long
// time should watch Request.Context.
type Handler[V Value] func(Request[V])

// Server hands the requests of all workers to a handler. All methods are safe for
// concurrent use.
type Server[V Value] struct {
	node    cluster.App
	appID   int
	buffers *datamsg.RecvBuffers
	simple  *SimpleApp

	mu      sync.Mutex
	handler Handler[V]
}

// ServerOptions of NewServer. The zero value is what StepMesh uses.
type ServerOptions struct {
	AppID int

	// Timeout is how long waits for requests of the server's SimpleApp last, see
	// WorkerOptions.
	Timeout time.Duration
}

// NewServer makes a server on node, which must have the server role. Requests are
// kept until Handle is called.
func NewServer[V Value](node *postoffice.Node, o ServerOptions) (*Server[V], error) {
	if node.Role() != van.Server {
		return nil, fmt.Errorf("%w: key-value server on %s, want a node with role server", van.ErrInvalid, node.Name())
	}
	return &Server[V]{node: (*cluster.Node)(node).App(), appID: o.AppID, buffers: datamsg.NewRecvBuffers((*cluster.Node)(node)), simple: newSimpleApp(node, o.AppID, o.Timeout, nil)}, nil
}

// Handle sets the handler and begins to serve, first the requests that arrived before. It may be
// called once.
func (s *Server[V]) Handle(h Handler[V]) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h == nil {
		return &van.Error{Op: "handle", Node: s.node.Name(), Err: fmt.Errorf("%w: no handler (nil)", van.ErrInvalid)}
	}
	if err := s.simple.inbound.Draining(); err != nil {
		return &van.Error{Op: "handle", Node: s.node.Name(), Err: fmt.Errorf("%w: %w", van.ErrClosed, err)}
	}
	if s.handler != nil {
		return &van.Error{Op: "handle", Node: s.node.Name(), Err: fmt.Errorf("%w: this server has one", van.ErrInvalid)}
	}
	s.handler = h
	err := s.begin()
	if err != nil {
		s.handler = nil
	}
	return err
}

// begin makes the server's customer. s.mu is held.
func (s *Server[V]) begin() error {
	c, err := s.node.AddServer(s.appID, s.appID, s.simple.inbound, func(msg *van.Message) {
		if !s.simple.takes(msg) {
			s.receive(msg)
		}
	})
	if err == nil {
		s.simple.begin(c)
	}
	return err
}

// SimpleApp is the exchange of small messages under the server's application id.
// It serves from Handle on.
func (s *Server[V]) SimpleApp() *SimpleApp { return s.simple }

// RegisterRecvBuffer makes vals the receive memory for pushes that begin with key of the worker with the given group
// rank; a request's Vals are then a part of vals. The next such push overwrites it. Register before the first push. A
// push that does not fit is dropped.
func (s *Server[V]) RegisterRecvBuffer(workerRank int, key Key, vals []V) error {
	if err := s.buffers.Register(datamsg.RecvBuffer{Worker: workerRank, Key: key, Dst: backend.Slice(vals)}); err != nil {
		return &van.Error{Op: "register receive buffer", Node: s.node.Name(), Err: err}
	}
	return nil
}

// Shutdown ends the service in order. The server refuses all new requests, also requests of its SimpleApp: their calls
// fail at once with postoffice.ErrFinished. A C++ worker cannot be notified and waits for its limit. Shutdown returns nil when
// all handlers have returned and all requests that the server has accepted are answered or refused. Requests whose workers no longer
// wait do not count. If ctx ends first, the requests' contexts end, and the error wraps the cause of ctx and names the workers that wait.
//
// The server refuses requests until Close, or until the node has left. Requests that wait behind a running handler
// of their worker are not accepted yet, and are refused. A handler must call Shutdown on another goroutine. Shutdown may be called
// again, to wait for longer.
func (s *Server[V]) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.simple.inbound.Refuse()
	var err error
	if s.simple.customer.Load() == nil { // Handle was not called: requests wait for a handler
		err = s.begin()
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	return s.simple.inbound.Drain(ctx)
}

// Close unregisters the server from its node and ends the contexts of its requests. It does not wait for handlers,
// and returns nil.
func (s *Server[V]) Close() error {
	s.mu.Lock()
	c := s.simple.customer.Load()
	s.mu.Unlock()
	if c != nil {
		c.Close()
	}
	return nil
}

// Pairs are keys with their values: the same number for each key, or Lens[i] for
// key i.
type Pairs[V Value] struct {
	Keys []Key
	Vals []V
	Lens []int32
}

// Request is a handle on one push or pull of one worker. It is a value that may
// be copied. The slices are views on receive memory, valid until the handler
// returns, or longer with Retain; they must not be written to. The rest, and the
// right to answer, stay.
type Request[V Value] struct {
	Worker    int // group rank of the worker
	Cmd       int32
	Push      bool
	Timestamp int32 // the worker's
	Keys      []Key // ascending, at least one
	Vals      []V   // of a push
	Lens      []int32

	s      *Server[V]
	reply  datamsg.Reply
	keys   int
	msg    *van.Message
	ticket *ticket
	gen    uint64
}

// ticket is the right to answer one request. It is used again for later ones.
type ticket struct {
	state    atomic.Uint64 // generation<<1 | answered
	accepted cluster.Accepted
}

var tickets = sync.Pool{New: func() any { return new(ticket) }}

// receive takes one request of a worker, whose call fails at once if the request is not one that s can take.
func (s *Server[V]) receive(msg *van.Message) {
	err := datamsg.CheckSender(s.node.Node, msg)
	if err == nil {
		in := s.simple.inbound
		in.Enter(msg.Sender)
		var r Request[V]
		if r, err = s.accept(msg); err == nil {
			s.handler(r)
			in.Exit(msg.Sender)
			return
		}
		in.Exit(msg.Sender)
		s.node.Refuse(msg.Sender, msg.ProcessEpoch, msg.AppID, msg.CustomerID, msg.Timestamp, cluster.RefusalReason(err))
	}
	level := slog.LevelWarn
	if errors.Is(err, van.ErrFinished) {
		level = slog.LevelInfo
	}
	s.node.Rarely("kv: "+logx.Kind(err)).Log(context.Background(), level, "dropped a request",
		"err", err, "from", s.node.PeerName(msg.Sender), "message", &msg.Meta)
}

// accept checks msg and makes it a request.
func (s *Server[V]) accept(msg *van.Message) (r Request[V], err error) {
	f, err := parse[V](msg)
	if err != nil {
		return r, err
	}
	if err := checkKeys(van.ErrMalformed, f.keys); err != nil {
		return r, err
	}
	if msg.Push {
		mem, _, err := s.buffers.Place(msg.Sender, f.keys[0], msg.Vals, msg.Placed)
		if err != nil {
			return r, err
		}
		f.vals = view[V](mem)
	}
	t := tickets.Get().(*ticket)
	if err := s.simple.inbound.Accept(&t.accepted, msg.Sender, msg.ProcessEpoch, msg.CustomerID, msg.Timestamp); err != nil {
		tickets.Put(t)
		return r, err
	}
	return Request[V]{
		Worker: van.RankOf(msg.Sender) / s.node.Config().GroupSize, Cmd: msg.Head, Push: msg.Push, Timestamp: msg.Timestamp,
		Keys: f.keys, Vals: f.vals, Lens: f.lens,
		s: s, reply: datamsg.ReplyTo(msg), keys: len(f.keys), msg: msg, ticket: t, gen: t.state.Load() >> 1,
	}, nil
}

// Context returns the context of the request. The context ends when the request is answered or refused, when its worker has canceled
// it or is lost, when the server or its node is closed, and when the context of Shutdown ends. context.Cause returns the reason. The
// first call for a request creates the context.
func (r Request[V]) Context() context.Context {
	return r.s.simple.inbound.Context(&r.ticket.accepted, r.reply.Sender, func() bool { return r.ticket.state.Load() == r.gen<<1 })
}

// Expected is the number of values for which the worker of a pull has room, 0 when
// it takes any number.
func (r Request[V]) Expected() int { return int(r.reply.ValLen) }

// Retain keeps the slices valid until a matching Release. Call it before the
// handler returns.
func (r Request[V]) Retain() Request[V] {
	r.msg.Retain()
	return r
}

// Release drops one reference acquired by Retain.
func (r Request[V]) Release() { r.msg.Release() }

// Respond answers the request: a push with empty Pairs, a pull with the values of
// its keys. Slices of res must not change until they have left, which only OnSent
// reports; slices of the request may be among them while those are valid.
//
// Pairs that do not fit the request are an error that wraps postoffice.ErrInvalid; then
// nothing was sent and the request can still be answered. If the transport does not take the answer, for example with
// postoffice.ErrQueueFull, the worker's call fails at once, and the request counts as answered: the call of a pull fails as after
// Refuse; the error of a push matches neither postoffice.ErrRequestRefused nor postoffice.ErrQueueFull, since the push was
// processed. A second Respond is postoffice.ErrAnswered.
func (r Request[V]) Respond(res Pairs[V], opts ...RespondOption) error {
	var done van.Completion
	for i, opt := range opts {
		switch opt := opt.(type) {
		case onSent:
			done = opt.done
		default:
			return r.wrap(fmt.Errorf("%w: option %d is nil", van.ErrInvalid, i))
		}
	}
	s := r.s
	if !r.ticket.state.CompareAndSwap(r.gen<<1, r.gen<<1|1) {
		return r.wrap(postoffice.ErrAnswered)
	}
	if err := r.check(&res); err != nil {
		r.ticket.state.Store(r.gen << 1)
		return r.wrap(err)
	}

	m := messages.Get().(*van.Message)
	r.reply.Fill(m)
	var hold *answer
	if !r.Push {
		datamsg.SetData(m, backend.Slice(res.Keys), backend.Slice(res.Vals), backend.Slice(res.Lens), typeOf[V]())
		m.Done = done
		if r.shares(m.Keys) || r.shares(m.Vals) || r.shares(m.Lens) {
			hold = answers.Get().(*answer)
			hold.msg, hold.done = r.msg.Retain(), done
			m.Done = hold
		}
	}
	err := s.node.Send(m)
	m.Reset() // holds on to nothing of the caller
	messages.Put(m)
	if err != nil && !errors.Is(err, van.ErrClosed) {
		why := cluster.Declined(err)
		if r.Push {
			why = cluster.Unanswered(err)
		}
		r.refuse(why)
	}
	r.end()
	switch {
	case err != nil && hold != nil:
		hold.done = nil
		hold.Sent()
	case err == nil && r.Push && done != nil:
		done.Sent()
	}
	return err
}

// Refuse ends the request without an answer: the worker's call fails at once, with postoffice.ErrRequestRefused and the text of
// why, up to about 900 bytes of it. It also matches postoffice.ErrInvalid or postoffice.ErrQueueFull if why does. If the request
// was one part of a call to several servers, the whole call fails. A C++ worker cannot be notified; it waits for
// its limit, and this server logs that.
//
// A request that was answered or refused before is postoffice.ErrAnswered.
func (r Request[V]) Refuse(why error) error {
	no := cluster.Declined(why)
	if why == nil {
		return r.wrap(no)
	}
	if !r.ticket.state.CompareAndSwap(r.gen<<1, r.gen<<1|1) {
		return r.wrap(postoffice.ErrAnswered)
	}
	r.refuse(no)
	r.end()
	return nil
}

// refuse notifies the worker that the request gets no answer.
func (r Request[V]) refuse(why error) {
	r.s.node.Refuse(r.reply.Sender, r.reply.ProcessEpoch, r.reply.AppID, r.reply.CustomerID, r.reply.Timestamp, why)
}

// end records that the request has its answer, and returns the ticket to the pool.
func (r Request[V]) end() {
	r.s.simple.inbound.Leave(&r.ticket.accepted)
	r.ticket.state.Store((r.gen + 1) << 1)
	tickets.Put(r.ticket)
}

func (r Request[V]) wrap(err error) error {
	return &van.Error{Op: "respond", Node: r.s.node.Name(), Peer: r.s.node.PeerName(r.reply.Sender),
		Detail: fmt.Sprintf("handler %d", r.Timestamp), Err: err}
}

// check refuses an answer that the worker could not take.
func (r Request[V]) check(res *Pairs[V]) error {
	if r.Push {
		if len(res.Keys)+len(res.Vals)+len(res.Lens) > 0 {
			return fmt.Errorf("%w: %d keys and %d values in the answer to a push, want none", van.ErrInvalid, len(res.Keys), len(res.Vals))
		}
		return nil
	}
	if len(res.Keys) != r.keys {
		return fmt.Errorf("%w: %d keys in the answer to a pull of %d", van.ErrInvalid, len(res.Keys), r.keys)
	}
	if bytes := 8*len(res.Keys) + sizeOf[V]()*len(res.Vals) + 4*len(res.Lens); bytes > maxPayload {
		return fmt.Errorf("%w: answer of %d bytes, want at most %d", van.ErrInvalid, bytes, maxPayload)
	}
	return checkShape(van.ErrInvalid, res.Keys, len(res.Vals), res.Lens)
}

// shares reports whether mem, a slice of an answer, has bytes of the request's slices.
func (r Request[V]) shares(mem backend.Mem) bool {
	return mem.Overlaps(backend.Slice(r.Keys)) || mem.Overlaps(backend.Slice(r.Vals)) || mem.Overlaps(backend.Slice(r.Lens))
}

// answer keeps a request's message until the answer that uses it has left.
type answer struct {
	msg  *van.Message
	done van.Completion
}

var answers = sync.Pool{New: func() any { return new(answer) }}

// Sent is called when the answer has left.
func (a *answer) Sent() {
	msg, done := a.msg, a.done
	a.msg, a.done = nil, nil
	answers.Put(a)
	msg.Release()
	if done != nil {
		done.Sent()
	}
}
