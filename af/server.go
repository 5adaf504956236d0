package af

// Server, and the dispatch of messages to the state of their workers.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/internal/streamqueue"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// Handler handles one complete batch of one worker. It may answer before it returns or later, from any goroutine. It
// may block: other workers are served meanwhile. A panic in it is not recovered: it ends the process, which is the
// loss of a peer for other nodes. A handler that runs for a long time should watch Batch.Context.
type Handler func(Batch)

// ServerOptions are the options of NewServer. The zero value is what StepMesh uses.
type ServerOptions struct {
	AppID int

	// OnUnwanted, if not nil, is called with the node id of a worker's instance after that worker has canceled some of its
	// batches, for which Batch.Wanted is false from then on. OnUnwanted must not block. Node.OnPeer reports the loss of a worker.
	OnUnwanted func(worker postoffice.NodeID)
}

// Server collects the batches of all workers and sends their answers. All methods are safe for concurrent use.
// Workers share no lock: each has a sender.
type Server struct {
	node     cluster.App
	app      int
	buffers  *datamsg.RecvBuffers
	inbound  *cluster.Inbound
	queue    *streamqueue.Queue // of answers with device tensors, and later ones
	late     *streamqueue.Queue // of batches that the device still reads
	senders  []*sender          // by instance rank of the worker
	reorders bool               // messages of a worker may overtake each other

	unwanted func(worker postoffice.NodeID) // see ServerOptions.OnUnwanted
	handler  Handler                        // set once, before the first message is received
	serving  atomic.Pointer[cluster.Customer]

	closed atomic.Bool

	mu     sync.Mutex // for Handle and Close
	forget func()     // unregisters the server from the node, except late
}

// NewServer creates a server on node, which must have the server role. Requests are queued until Handle is called.
func NewServer(node *postoffice.Node, o ServerOptions) (*Server, error) {
	if node.Role() != van.Server {
		return nil, fmt.Errorf("%w: tensor server on %s, want a node with role server", van.ErrInvalid, node.Name())
	}
	s := &Server{node: (*cluster.Node)(node).App(), app: o.AppID, unwanted: o.OnUnwanted, buffers: datamsg.NewRecvBuffers((*cluster.Node)(node)), inbound: cluster.NewInbound(),
		queue: streamqueue.New(node.Backend(), node.Config().BusyPoll), late: streamqueue.New(node.Backend(), env.AlwaysBlock)}
	if r, ok := van.As[van.Reorderer]((*cluster.Node)(node).Van()); ok {
		s.reorders = r.Reorders()
	}
	s.senders = make([]*sender, node.Topology().NumWorkerInstances())
	for i := range s.senders {
		s.senders[i] = &sender{s: s, id: van.WorkerID(i)}
	}
	return s, nil
}

// Handle sets the handler and begins to serve, queued requests first. It may be called once.
func (s *Server) Handle(h Handler) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h == nil {
		return &van.Error{Op: "handle", Node: s.node.Name(), Err: fmt.Errorf("%w: no handler (nil)", van.ErrInvalid)}
	}
	if err := s.inbound.Draining(); err != nil {
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

// begin registers the server. s.mu is held.
func (s *Server) begin() error {
	late := s.node.OnExit(s.late.Close) // after the next
	stay := s.node.OnExit(func() {
		s.dropSenders()
		s.queue.Close()
	})
	c, err := s.node.AddServer(s.app, s.app, s.inbound, s.receive)
	if err != nil {
		stay()
		late()
		return err
	}
	s.serving.Store(c)
	c.OnCanceled(s.cancel)
	unwatch := s.node.OnPeer(func(id int, _ bool, _ error) { s.dropSender(id) })
	s.forget = func() { unwatch(); stay() }
	return nil
}

// RegisterRecvTensor splits t evenly, in parts of whole elements, over the entries of
// workerRanks (group ranks) and keys, and makes part i the place where pushes of that worker
// under that key land; the batch then holds views on it. A push overwrites what the
// last one under its key left there. Call it before the first such push.
//
// All parts are registered, or none: after an error t is the caller's again. Only
// when the transport refuses a part after others stay those registered, and the error
// says so. An owner of t's memory that is a backend.Holder is retained permanently for
// each part that is registered.
func (s *Server) RegisterRecvTensor(t Tensor, workerRanks []int, keys []uint64) error {
	n := len(keys)
	if n == 0 || len(workerRanks) != n || t.Len()%n != 0 {
		return &van.Error{Op: "register receive tensor", Node: s.node.Name(), Err: van.ErrInvalid,
			Detail: fmt.Sprintf("%d worker ranks, %d keys, %d bytes: want as many ranks as keys, and a size that they divide", len(workerRanks), n, t.Len())}
	}
	if t.Len()/n%t.dtype.Size() != 0 {
		return &van.Error{Op: "register receive tensor", Node: s.node.Name(), Err: van.ErrInvalid,
			Detail: fmt.Sprintf("%s has %d bytes for each of %d keys, want whole elements", t.String(), t.Len()/n, n)}
	}
	if err := backend.CheckDevice(s.node.Backend(), t.mem); err != nil {
		return &van.Error{Op: "register receive tensor", Node: s.node.Name(), Err: fmt.Errorf("%w: %w", van.ErrInvalid, err)}
	}
	part := t.Len() / n
	parts := make([]datamsg.RecvBuffer, n)
	for i, key := range keys {
		parts[i] = datamsg.RecvBuffer{Worker: workerRanks[i], Key: key, Dst: t.mem.Sub(i*part, part)}
	}
	if err := s.buffers.Register(parts...); err != nil {
		return &van.Error{Op: "register receive tensor", Node: s.node.Name(), Err: err}
	}
	return nil
}

// sender returns the state of the worker instance with that node id, nil if the cluster has none.
func (s *Server) sender(id int) *sender {
	if van.RoleOf(id) != van.Worker || van.RankOf(id) >= len(s.senders) {
		return nil
	}
	return s.senders[van.RankOf(id)]
}

// receive handles one request of a worker. After a message of ps-lite, it handles pending ones that follow it.
func (s *Server) receive(msg *van.Message) {
	if err := datamsg.CheckSender(s.node.Node, msg); err != nil {
		s.refuse(msg, err)
		s.dropped(msg, err)
		return
	}
	x := s.senders[van.RankOf(msg.Sender)]
	if msg.IsBatch() {
		if err := x.acceptBatch(msg); err != nil {
			s.dropped(msg, err)
		}
		return
	}
	for m := msg; m != nil; m = x.unhold() {
		if err := x.accept(m); err != nil {
			s.dropped(m, err)
		}
		if m != msg {
			m.Release()
		}
	}
}

// dropped logs a message that is malformed or too late.
func (s *Server) dropped(msg *van.Message, err error) {
	level := slog.LevelWarn
	if errors.Is(err, errNoBatch) && s.node.Native(msg.Sender) || errors.Is(err, van.ErrClosed) || errors.Is(err, van.ErrFinished) {
		level = slog.LevelInfo // workers of this library cancel requests
	}
	s.node.Rarely("af: "+level.String()+logx.Kind(err)).Log(context.Background(), level, "dropped a request",
		"err", err, "from", s.node.PeerName(msg.Sender), "message", &msg.Meta)
}

// dropSender drops the incomplete batches that a worker's processes will not complete: a process of this library that is
// lost, and each process that was replaced. A replacement process may have begun some by now.
func (s *Server) dropSender(id int) {
	x, c := s.sender(id), s.serving.Load()
	if x == nil {
		return
	}
	if open := x.drop(func(epoch uint32, customer, ts int32) bool { return !c.MaySendRest(id, epoch, customer, ts) }); open > 0 {
		s.node.Log().Warn("dropped unfinished batches of a lost worker", "worker", s.node.PeerName(id), "batches", open)
	}
}

// cancel drops the received part of a request that its worker has canceled.
func (s *Server) cancel(w cluster.Canceled) {
	if x := s.sender(w.Sender); x != nil {
		x.drop(func(_ uint32, customer, ts int32) bool { return w.Has(customer, ts) })
	}
	if f := s.unwanted; f != nil {
		f(postoffice.NodeID(w.Sender))
	}
}

// Shutdown ends the service in order. The server refuses all new batches: their calls fail at once with postoffice.ErrFinished. A
// C++ worker cannot be notified and waits for its limit. Shutdown returns nil when all handlers have returned and all batches
// that have begun are answered, refused or released. Batches whose workers no longer wait do not count. If ctx ends first, the
// batches' contexts end, and the error wraps the cause of ctx and names the workers that wait.
//
// The server refuses batches until Close, or until the node has left. Batches that wait behind a running handler of their worker have
// not begun, and are refused. A handler must call Shutdown on another goroutine. Shutdown may be
// called again, to wait for longer.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.inbound.Refuse()
	var err error
	if s.serving.Load() == nil { // Handle was not called: requests wait for a handler
		err = s.begin()
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	return s.inbound.Drain(ctx)
}

// Close unregisters the server from its node. Incomplete batches are dropped, and the contexts of all other batches end.
// Close does not wait for handlers, and returns nil.
func (s *Server) Close() error {
	s.mu.Lock()
	c, forget := s.serving.Load(), s.forget
	s.mu.Unlock()
	if c == nil {
		return nil
	}
	c.Close()
	s.closed.Store(true) // a message that is being received begins no batch after dropSenders
	s.queue.Close()      // s.late continues until the node has left: other endpoints may receive on it
	s.dropSenders()
	forget()
	return nil
}

// dropSenders drops the incomplete batches of all workers: a worker whose connection broke may never complete its
// batch.
func (s *Server) dropSenders() {
	for _, x := range s.senders {
		x.drop(func(uint32, int32, int32) bool { return true })
	}
}
