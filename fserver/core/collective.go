package core

// Communicators for Python. Calls that wait run in the background, and Python waits for them in slices.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Comms are the communicators of a node. All methods are safe for concurrent use.
type Comms struct {
	node *postoffice.Node

	mu      sync.Mutex            // guards the fields below
	group   *Comm                 // see Group
	closing map[int]chan struct{} // by id of a dropped communicator; closed when the communicator is closed
}

// Comm is a communicator among nodes of this session's role.
type Comm struct {
	*collective.Comm
	of   *Comms
	id   int
	made *Task

	limit time.Duration // of each call; negative means no limit
}

// Task is an operation that waits for other nodes, such as the creation of a communicator.
type Task struct {
	canceller
	done chan struct{}
	err  error
}

// canceller cancels an operation.
type canceller struct{ cancel context.CancelCauseFunc }

// Cancel ends the operation with van.ErrTimeout, unless it has ended already.
func (c canceller) Cancel() { c.cancel(van.ErrTimeout) }

// Interrupt ends the operation with errInterrupted, unless it has ended already.
func (c canceller) Interrupt() { c.cancel(errInterrupted) }

// newTask runs f in a goroutine. limit is the limit of f's context, with the cause van.ErrTimeout; a negative limit means
// none.
func newTask(limit time.Duration, f func(context.Context) error) *Task {
	return startTask(limit, van.ErrTimeout, f)
}

// startTask is newTask with another cause, or with the context's own if late is nil.
func startTask(limit time.Duration, late error, f func(context.Context) error) *Task {
	ctx, cancel := context.WithCancelCause(context.Background())
	t := &Task{canceller: canceller{cancel}, done: make(chan struct{})}
	ended := func() {}
	if limit >= 0 {
		ctx, ended = context.WithTimeoutCause(ctx, limit, late)
	}
	go func() {
		t.err = f(ctx)
		ended()
		cancel(nil)
		close(t.done)
	}()
	return t
}

// Wait waits for the end of the task. After slice it returns ErrPending. Wait may be called any number of times.
func (t *Task) Wait(slice time.Duration) error {
	if err := awaitSlice(t.done, slice); err != nil {
		return err
	}
	return t.err
}

// awaitSlice waits for a token of c, or until c is closed. After slice it returns ErrPending.
func awaitSlice(c <-chan struct{}, slice time.Duration) error {
	select {
	case <-c:
		return nil
	default:
	}
	select {
	case <-c:
		return nil
	case <-time.After(slice):
		return ErrPending
	}
}

// errInterrupted is the result of an operation that its caller has interrupted.
var errInterrupted = errors.New("interrupted by the caller")

// Drop notes that the caller will not wait for the task. The task continues.
func (t *Task) Drop() {}

// discard cancels t. If t succeeds all the same, closing closes what t has created.
func (t *Task) discard(closing func() error) {
	t.Cancel()
	go func() {
		if <-t.done; t.err == nil {
			_ = closing()
		}
	}()
}

// Awaited is an operation that Python waits for in slices: a Task or a Pending.
type Awaited interface {
	Wait(slice time.Duration) error
	Cancel()
	Interrupt()
	Drop()
}

// Pending is a call of a communicator. The waiting caller receives messages itself; there is no goroutine in between.
type Pending struct {
	canceller
	op    collective.Op
	ctx   context.Context
	turn  chan struct{} // the waiting caller holds its token
	ended bool          // guarded by the token
	err   error         // guarded by the token
}

func newPending(op collective.Op) *Pending {
	p := &Pending{op: op, turn: make(chan struct{}, 1)}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	p.turn <- struct{}{}
	return p
}

// Wait waits for the end of the call. After slice it returns ErrPending. Wait may be called any number of times.
func (p *Pending) Wait(slice time.Duration) error {
	if err := awaitSlice(p.turn, slice); err != nil { // another caller waits
		return err
	}
	defer func() { p.turn <- struct{}{} }()
	if !p.ended {
		err := p.op.WaitSlice(p.ctx, max(slice, time.Nanosecond))
		if err == ErrPending {
			return err
		}
		p.ended, p.err = true, err
		p.cancel(nil)
	}
	return p.err
}

// Drop notes that the caller will not wait for the call. The call continues until its limit.
func (p *Pending) Drop() {
	<-p.turn
	if p.ended {
		return
	}
	go func() {
		_ = p.op.Wait(context.Background())
		p.cancel(nil)
	}()
}

// New begins to create a communicator of those ranks; nil means the instances of this node's group. limit is the limit
// of the creation and of each call: 0 means the default, a negative limit means none. The communicator may be used
// after the task has ended without an error.
func (l *Comms) New(id int, ranks []int, limit time.Duration) (*Comm, *Task) {
	return l.begin(id, ranks, limit, noLimit)
}

// noLimit means the limit of the communicator.
const noLimit = -1

func (l *Comms) begin(id int, ranks []int, limit, making time.Duration) (*Comm, *Task) {
	c := &Comm{of: l, id: id, limit: (*cluster.Node)(l.node).App().Limit(limit)}
	c.made = newTask(making, func(ctx context.Context) (err error) {
		if err = l.dropped(ctx, id); err == nil {
			c.Comm, err = collective.New(ctx, l.node, collective.Options{ID: id, Ranks: ranks, Timeout: limit, Look: true})
		}
		return err
	})
	return c, c.made
}

// dropped waits until a dropped communicator with that id is closed.
func (l *Comms) dropped(ctx context.Context, id int) error {
	l.mu.Lock()
	closing := l.closing[id]
	l.mu.Unlock()
	if closing == nil {
		return nil
	}
	select {
	case <-closing:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the communicator with ID %d that was dropped is not closed yet: %w", id, context.Cause(ctx))
	}
}

// Group is the communicator with ID 0, of the instances of this node's group. The first call begins to create it. If
// that failed, the next call begins again.
func (l *Comms) Group() (*Comm, *Task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.makeGroup(noLimit)
}

// makeGroup is Group. The caller holds mu.
func (l *Comms) makeGroup(making time.Duration) (*Comm, *Task) {
	if l.group == nil || l.group.failed() {
		l.group, _ = l.begin(0, nil, 0, making)
	}
	return l.group, l.group.made
}

// RebuildGroup begins to rebuild the group's communicator. If this node has none yet, RebuildGroup begins to create it:
// the Rebuild of the other ranks and the creation on this rank complete each other.
func (l *Comms) RebuildGroup(limit time.Duration) *Task {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.group != nil && l.group.made.Wait(0) == nil {
		return l.group.Rebuild(limit)
	}
	_, t := l.makeGroup(limit)
	return t
}

// failed reports whether the creation has failed.
func (c *Comm) failed() bool {
	err := c.made.Wait(0)
	return err != nil && err != ErrPending
}

// Drop closes, in the background, a communicator without users. Its creation may still be under way.
func (c *Comm) Drop() {
	c.made.Cancel()
	closed := make(chan struct{})
	c.of.mu.Lock()
	before := c.of.closing[c.id]
	c.of.closing[c.id] = closed
	c.of.mu.Unlock()
	go func() {
		if before != nil {
			<-before // this communicator has not waited for its end
		}
		<-c.made.done
		if c.Comm != nil {
			_ = c.Comm.Close() // the error names ranks that still read memory; the memory stays until they have ended
		}
		c.of.mu.Lock()
		if c.of.closing[c.id] == closed {
			delete(c.of.closing, c.id)
		}
		c.of.mu.Unlock()
		close(closed)
	}()
}

// Rebuild begins collective.Comm.Rebuild. Here and below, a negative limit means the limit of the communicator.
func (c *Comm) Rebuild(limit time.Duration) *Task { return newTask(limit, c.Comm.Rebuild) }

// Close begins collective.Comm.Shutdown.
func (c *Comm) Close(limit time.Duration) *Task { return newTask(limit, c.Comm.Shutdown) }

// Barrier begins collective.Comm.Barrier.
func (c *Comm) Barrier(limit time.Duration) *Task { return newTask(limit, c.Comm.Barrier) }

// Collective selects the operation of Call.
type Collective int

// Collectives, in the order of abi.h.
const (
	AllGather Collective = iota
	AllGatherV
	AllToAll
	Broadcast
	Gather
	Scatter
	ReduceScatter
	AllReduce
)

// reductions are the reductions by their Python names.
var reductions = map[string]collective.Reduction{"sum": collective.Sum, "min": collective.Min, "max": collective.Max, "product": collective.Product}

// Call begins a call. out and in are lists; a call with one tensor has it in a list of one, which is empty on a rank
// that has no such tensor. root and reduction are used by the calls that have them. If the tensors are on the device,
// the call begins after the work that is in stream.
func (c *Comm) Call(stream af.Stream, kind Collective, out, in []af.Tensor, root int, reduction string) (*Pending, error) {
	by, known := reductions[reduction]
	if (kind == ReduceScatter || kind == AllReduce) && !known {
		return nil, fmt.Errorf("%w: op is %q, want sum, min, max or product", van.ErrInvalid, reduction)
	}
	var op collective.Op
	var err error
	switch kind {
	case AllGather:
		op, err = c.AllGather(only(out), only(in), stream)
	case AllGatherV:
		op, err = c.AllGatherV(out, only(in), stream)
	case AllToAll:
		op, err = c.AllToAll(out, in, stream)
	case Broadcast:
		op, err = c.Broadcast(only(out), root, stream)
	case Gather:
		op, err = c.Gather(only(out), only(in), root, stream)
	case Scatter:
		op, err = c.Scatter(only(out), only(in), root, stream)
	case ReduceScatter:
		op, err = c.ReduceScatter(only(out), only(in), by)
	case AllReduce:
		op, err = c.AllReduce(only(out), only(in), by)
	default:
		err = errors.New("no such collective")
	}
	if err != nil {
		return nil, err
	}
	return newPending(op), nil
}

// only returns the tensor of a list of one, or no tensor.
func only(l []af.Tensor) (t af.Tensor) {
	if len(l) > 0 {
		t = l[0]
	}
	return t
}
