// Package core is the Python module fserver_lib without Python: one node of a process, with a tensor worker or a queue
// of batches.
package core

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// ErrMisuse is the error of a call at the wrong time or in the wrong role.
var ErrMisuse = errors.New("wrong use")

// ErrPending is returned by calls that wait in slices. The caller calls again.
var ErrPending = postoffice.ErrPending

// ErrUnknownHandler is the error of a handler that does not exist or no longer exists.
var ErrUnknownHandler = postoffice.ErrUnknownHandler

// Session is a process's membership of a cluster, from Start to Stop. All methods are safe
// for concurrent use.
type Session struct {
	node   *postoffice.Node
	worker *af.Worker   // nil unless a worker
	server *af.Server   // nil unless a server
	queue  *queue       // nil unless a server
	over   *atomic.Bool // the loop of a server has ended because its workers have ended

	sessions sessionState
	comms    Comms
	streams  Streams
	shown    requestDescriptor
	first    firstSends
}

func newSession(node *postoffice.Node) *Session {
	over := &atomic.Bool{}
	s := &Session{node: node, over: over, sessions: sessionState{node: node, over: over}, streams: Streams{node: node},
		comms: Comms{node: node, closing: map[int]chan struct{}{}}}
	s.first.watch(node)
	return s
}

// Start reads the environment variables, starts the node, and waits for all other nodes as C++ StepMesh does: in a
// barrier of all nodes, then in a barrier of workers and servers. A server accepts requests before the second barrier.
func Start(ctx context.Context, lookup func(string) (string, bool), names func() []string) (*Session, error) {
	began := time.Now()
	cfg, err := env.LoadFrom(env.Source{Lookup: lookup, Names: names})
	if err != nil {
		return nil, err
	}
	if cfg.Role == "joint" {
		return nil, fmt.Errorf("init: %w: DMLC_ROLE=joint, want worker, server or scheduler: start one process for each role", van.ErrInvalid)
	}
	node, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, KeepBackend: true}) // Python may keep received tensors
	if err != nil {
		return nil, err
	}
	return open(ctx, node, cfg.StartTimeout-time.Since(began))
}

// Open makes the session of a started node. If Open fails, it closes the node.
func Open(ctx context.Context, node *postoffice.Node) (*Session, error) {
	return open(ctx, node, node.Config().StartTimeout)
}

// open is Open with a limit for the second barrier of start-up.
func open(ctx context.Context, node *postoffice.Node, limit time.Duration) (*Session, error) {
	s := newSession(node)
	if !failpoint.On("start-deadline") {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	if err := s.open(ctx); err != nil {
		node.Close()
		return nil, err
	}
	return s, nil
}

func (s *Session) open(ctx context.Context) (err error) {
	switch s.node.Role() {
	case van.Worker:
		s.worker, err = af.NewWorker(s.node, af.WorkerOptions{})
	case van.Server:
		s.queue = newQueue(s.node)
		s.queue.over = s.over
		if s.server, err = af.NewServer(s.node, af.ServerOptions{OnUnwanted: s.queue.onCanceled}); err == nil {
			err = s.server.Handle(s.queue.put)
		}
	default:
		return nil
	}
	if err != nil {
		return err
	}
	return (*cluster.Node)(s.node).App().StartBarrier(ctx, van.WorkerGroup|van.ServerGroup)
}

// Stop waits until every node has called Stop, then leaves the cluster. It leaves the cluster after an error, too.
func (s *Session) Stop(ctx context.Context) error { return s.stop(ctx, 0) }

// stop is Stop. thread is the calling thread of the program, or 0 if the thread is not known; see queue.leave.
func (s *Session) stop(ctx context.Context, thread uint64) error {
	if s.queue != nil {
		done := make(chan struct{})
		defer close(done)
		s.queue.leave(thread, done)
	}
	(*cluster.Node)(s.node).App().EndsAnyway()
	err := (*cluster.Node)(s.node).StopBarrier(ctx)
	if err != nil {
		s.node.Close()
		return err
	}
	return s.node.Shutdown(ctx)
}

// Name is the node's name, for errors.
func (s *Session) Name() string { return s.node.Name() }

// Close leaves the cluster without waiting for other nodes.
func (s *Session) Close() { s.node.Close() }

// Comms are the communicators of the node.
func (s *Session) Comms() *Comms { return &s.comms }

// Streams are the node's prepared GPU exchanges.
func (s *Session) Streams() *Streams { return &s.streams }

// Config is the configuration of the node.
func (s *Session) Config() *postoffice.Config { return s.node.Config() }

func wrongRole(s *Session, call, want string) error {
	return fmt.Errorf("%s: %w: this process is %s, and only a %s can do it", call, ErrMisuse, s.node.Name(), want)
}

// Device is the memory of the node's device.
func (s *Session) Device() backend.Backend { return s.node.Backend() }

// customer has the worker's requests in flight, which Python names by their timestamps.
func (s *Session) customer() *cluster.Customer { return (*cluster.Node)(s.node).App().Customer(0, 0) }

// PushPull is af.Worker.PushPull with servers in any order; the pulls are in the same order. nil means all servers.
// PushPull returns the first timestamp of the call.
func (s *Session) PushPull(stream af.Stream, servers []int, push, pull []af.KeyTensor) (int32, error) {
	if s.worker == nil {
		return 0, wrongRole(s, "push_pull", "worker")
	}
	var few [16][]af.KeyTensor // no allocation for up to 16 servers
	servers, pull = ascending(servers, pull)
	parts, err := perServer(s.node, few[:0], servers, pull)
	if err != nil {
		return 0, err
	}
	call, err := s.worker.PushPull(push, parts, stream, af.To(servers))
	if err == nil {
		s.first.done(servers...)
	}
	return call.Timestamp(), err
}

// perServer appends one list for each server to parts. The flat list pull has the same number of tensors for each of servers; nil
// means all servers.
func perServer(node *postoffice.Node, parts [][]af.KeyTensor, servers []int, pull []af.KeyTensor) ([][]af.KeyTensor, error) {
	n := len(servers)
	if servers == nil {
		n = node.Topology().NumServers
	}
	if n == 0 || len(pull) == 0 {
		return nil, nil
	}
	if len(pull)%n != 0 {
		return nil, fmt.Errorf("%s: %w: %d pull tensors for %d servers, want the same number for each", node.Name(), van.ErrInvalid, len(pull), n)
	}
	for q := len(pull) / n; len(pull) > 0; pull = pull[q:] {
		parts = append(parts, pull[:q])
	}
	return parts, nil
}

// ascending sorts servers, and the parts of pull that belong to them. It copies what it changes. If the lengths do not
// fit, ascending changes nothing, and PushPull returns the error.
func ascending(servers []int, pull []af.KeyTensor) ([]int, []af.KeyTensor) {
	if slices.IsSorted(servers) || len(pull)%len(servers) != 0 {
		return servers, pull
	}
	q := len(pull) / len(servers)
	order := make([]int, len(servers))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return servers[a] - servers[b] })
	to, parts := make([]int, 0, len(servers)), make([]af.KeyTensor, 0, len(pull))
	for _, i := range order {
		to, parts = append(to, servers[i]), append(parts, pull[i*q:(i+1)*q]...)
	}
	return to, parts
}

// Wait waits until the batch with the given handler is complete. limit counts from the push_pull; one call waits for
// slice at most. A handler from the middle of a batch waits for that timestamp only. If the batch has ended, Wait
// returns its result at once, as often as it is called. If two callers wait for one handler, one of them gets
// cluster.ErrOtherWaits. With a slice of 0, Wait does not wait, and returns ErrPending while another caller waits.
func (s *Session) Wait(handler int64, limit, slice time.Duration) error {
	if s.worker == nil {
		return wrongRole(s, "wait", "worker")
	}
	h := int32(handler)
	if int64(h) != handler || !s.customer().Given(h) {
		return fmt.Errorf("wait: %w: handler %d was not returned by push_pull: %w", ErrMisuse, handler, ErrUnknownHandler)
	}
	first, _, flying, _ := s.customer().Batch(h)
	switch {
	case !flying:
		return s.customer().Outcome(h)
	case first == h:
		var err error
		if slice <= 0 {
			err = s.customer().Try(h)
		} else {
			err = s.customer().WaitSlice(context.Background(), h, max(limit, time.Nanosecond), slice)
		}
		if errors.Is(err, ErrUnknownHandler) && !errors.Is(err, cluster.ErrOtherWaits) {
			return s.customer().Outcome(h) // the batch has ended between the two calls
		}
		return err
	}
	return s.waitOne(h, first, limit, slice)
}

// waitOne waits for one timestamp of a batch. It polls, since only the end of the whole batch is signaled.
func (s *Session) waitOne(h, first int32, limit, slice time.Duration) error {
	for end := time.Now().Add(slice); ; {
		_, answered, flying, err := s.customer().Batch(h)
		if !flying {
			return s.customer().Outcome(h)
		}
		if answered {
			return err
		}
		if elapsed := s.customer().Elapsed(h); elapsed >= limit {
			return &van.Error{Op: "wait", Node: s.node.Name(), Detail: fmt.Sprintf("handler %d of batch %d", h, first),
				Elapsed: elapsed, Limit: limit, Err: van.ErrTimeout}
		}
		if slice <= 0 || time.Now().After(end) {
			return ErrPending
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// AllHandlers returns the number of timestamps of the push_pull in flight whose first timestamp is handler. For other
// handlers it returns 1, as C++ StepMesh does.
func (s *Session) AllHandlers(handler int64) (int, error) {
	if s.worker == nil {
		return 0, wrongRole(s, "get_all_handlers", "worker")
	}
	n := 1 // for an unknown handler
	if h := int32(handler); int64(h) == handler {
		n = max(s.customer().Timestamps(h), 1)
	}
	return n, nil
}

// FetchTrace returns the eight time stamps of a handler. They are 0 until the answer has arrived.
func (s *Session) FetchTrace(handler int64) (stamps [8]uint64, err error) {
	if s.worker == nil {
		return stamps, wrongRole(s, "fetch_trace", "worker")
	}
	h := int32(handler)
	if int64(h) != handler || !s.customer().Given(h) {
		return stamps, fmt.Errorf("fetch_trace: %w: handler %d was not returned by push_pull: %w", ErrMisuse, handler, ErrUnknownHandler)
	}
	t, ok := s.customer().Trace(h)
	if !ok {
		if _, answered, flying, _ := s.customer().Batch(h); flying && !answered {
			return stamps, nil
		}
		return stamps, &van.Error{Op: "fetch_trace", Node: s.node.Name(), Detail: fmt.Sprintf("handler %d", h), Err: ErrUnknownHandler,
			Hint: "traces of the last 4096 answered handlers are kept"}
	}
	q, r := &t.Request, &t.Response
	return [8]uint64{q.Start, q.PostSend, q.PostRecv, q.Process, r.Start, r.PostSend, r.PostRecv, r.Process}, nil
}

// RegisterRecvBuffer is af.Server.RegisterRecvTensor.
func (s *Session) RegisterRecvBuffer(t af.Tensor, workerRanks []int, keys []uint64) error {
	if s.server == nil {
		return wrongRole(s, "register_recv_buffer", "server")
	}
	return s.server.RegisterRecvTensor(t, workerRanks, keys)
}

// Barrier waits for all instances of the chosen roles. If instances is false, it waits for one instance of each group.
// The caller must have one of the roles.
func (s *Session) Barrier(ctx context.Context, servers, workers, instances bool) error {
	group := 0
	if servers {
		group |= van.ServerGroup
	}
	if workers {
		group |= van.WorkerGroup
	}
	own := map[van.Role]int{van.Server: van.ServerGroup, van.Worker: van.WorkerGroup}[s.node.Role()]
	if group&own == 0 {
		return fmt.Errorf("barrier: %w: include_server=%t, include_client=%t leave out the caller, %s", van.ErrInvalid, servers, workers, s.node.Name())
	}
	if instances {
		return s.node.InstanceBarrier(ctx, 0, postoffice.Group(group))
	}
	return s.node.Barrier(ctx, 0, postoffice.Group(group))
}

// Nanosecond is the clock of the traces.
func Nanosecond() uint64 { return clock.Now() }

// GetBatch appends the oldest batch of every worker group to items, in the order of ranks. If a worker has no batch
// within slice, GetBatch returns ErrPending.
func (s *Session) GetBatch(items []Item, slice time.Duration) ([]Item, error) {
	if s.queue == nil {
		return items, wrongRole(s, "get_batch", "server")
	}
	return s.queue.await(items, eachOne, slice)
}

// GetAny appends the queued batches of all workers to items, oldest first, at most most of them (0: no limit). If there
// is no batch within slice, GetAny returns ErrPending.
func (s *Session) GetAny(items []Item, most int, slice time.Duration) ([]Item, error) {
	if s.queue == nil {
		return items, wrongRole(s, "get_batch", "server")
	}
	s.queue.eager.Store(true) // from now on each batch signals q.anyReady
	return s.queue.await(items, most, slice)
}

// BatchTimeout returns the error of a caller whose GetBatch was pending for limit.
func (s *Session) BatchTimeout(limit time.Duration) error {
	if s.queue == nil {
		return wrongRole(s, "get_batch", "server")
	}
	return &van.Error{Op: "get_batch", Node: s.node.Name(), Detail: "no batch of " + strings.Join(s.queue.missing(), ", "),
		Limit: limit, Elapsed: limit, Err: van.ErrTimeout, Hint: "received batches stay queued; call get_batch again"}
}

// Answer answers the batch with that id. tensors are in the order of the batch's pulls; their keys do not matter. The
// tensors must not change until their owners are released. Tensors on the device are sent after the work that is in
// stream.
//
// If the worker is lost or replaced, or has canceled the request, Answer drops the answer, logs it, and returns no
// error, since the program continues to serve other workers.
//
// done, if not nil, is called once for each tensor when the library no longer uses it: it was sent, or will not be.
// told reports whether done is called: it is not after errors that leave the batch unanswered.
func (s *Session) Answer(stream af.Stream, id uint64, tensors []af.KeyTensor, done van.Completion) (told bool, err error) {
	if s.queue == nil {
		return false, wrongRole(s, "respond", "server")
	}
	rank, first := workerOf(s, id)
	told, err = s.queue.answer(stream, id, tensors, done)
	if first && err == nil {
		s.first.done(rank)
	}
	return told, err
}

// Refuse ends the batch with that id without an answer; see af.Batch.Refuse.
func (s *Session) Refuse(id uint64, why string) error {
	if s.queue == nil {
		return wrongRole(s, "refuse", "server")
	}
	why = strings.ReplaceAll(why, "\x00", "?")
	return s.queue.refuse(id, errors.New(cmp.Or(why, "no reason was given")))
}

// CanRespond returns the error with which Answer would refuse this number of tensors for one of the batches.
func (s *Session) CanRespond(ids []uint64, tensors int) error {
	if s.queue == nil {
		return wrongRole(s, "respond", "server")
	}
	return s.queue.canRespond(ids, tensors)
}
