package core

// Communicators as Python uses them: what waits does so in the background, and is waited for in slices.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Comms are the communicators of a node. All methods are safe for concurrent use.
type Comms struct {
	node *postoffice.Node

	mu      sync.Mutex            // of what follows
	group   *Comm                 // see Group
	closing map[int]chan struct{} // communicators that were dropped, by id; closed when they are
}

// Comm is a communicator among nodes of this session's role.
type Comm struct {
	*collective.Comm
	of   *Comms
	id   int
	made *Task

	limit time.Duration // of its calls; negative for none
}

// Task is something that waits for other ranks: a call of a communicator, or its making.
type Task struct {
	canceller
	done chan struct{}
	err  error
}

// canceller makes what waits end soon.
type canceller struct{ cancel context.CancelCauseFunc }

// Cancel makes it end soon, with van.ErrTimeout unless it has ended already.
func (c canceller) Cancel() { c.cancel(van.ErrTimeout) }

// Interrupt is Cancel for another reason than the time.
func (c canceller) Interrupt() { c.cancel(errInterrupted) }

// newTask runs f, whose context has that limit, none when it is negative.
func newTask(limit time.Duration, f func(context.Context) error) *Task {
	ctx, cancel := context.WithCancelCause(context.Background())
	t := &Task{canceller: canceller{cancel}, done: make(chan struct{})}
	ended := func() {}
	if limit >= 0 {
		ctx, ended = context.WithTimeoutCause(ctx, limit, van.ErrTimeout)
	}
	go func() {
		t.err = f(ctx)
		ended()
		cancel(nil)
		close(t.done)
	}()
	return t
}

// Wait waits for slice at most: then it returns ErrPending. It may be called as often as wanted.
func (t *Task) Wait(slice time.Duration) error {
	if err := awaitSlice(t.done, slice); err != nil {
		return err
	}
	return t.err
}

// awaitSlice waits for a token or the end of c, for slice at most: then it returns ErrPending.
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

// errInterrupted: who has made a call, and has to wait for it, has given it up.
var errInterrupted = errors.New("interrupted by the caller")

// Drop is told that nobody will wait for it any more. It goes on.
func (t *Task) Drop() {}

// abandon is for what t makes and nobody wants any more: it makes t end soon, and closes that if it is there then.
func (t *Task) abandon(closing func() error) {
	t.Cancel()
	go func() {
		if <-t.done; t.err == nil {
			_ = closing()
		}
	}()
}

// Awaited is what Python waits for in slices: a Task, or a Pending.
type Awaited interface {
	Wait(slice time.Duration) error
	Cancel()
	Interrupt()
	Drop()
}

// Pending is a call of a communicator. Who waits for it receives itself, without a goroutine between.
type Pending struct {
	canceller
	op    collective.Op
	ctx   context.Context
	turn  chan struct{} // its token is with who waits
	ended bool          // with the token
	err   error         // likewise
}

func newPending(op collective.Op) *Pending {
	p := &Pending{op: op, turn: make(chan struct{}, 1)}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	p.turn <- struct{}{}
	return p
}

// Wait waits for slice at most: then it returns ErrPending. It may be called as often as wanted.
func (p *Pending) Wait(slice time.Duration) error {
	if err := awaitSlice(p.turn, slice); err != nil { // another one waits
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

// Drop is told that nobody will wait for it any more. It goes on, until its limit.
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

// New begins to make a communicator of those ranks, nil for the instances of this node's group, whose
// calls have that limit, as its making has: 0 for the default, negative for none. It may be used
// when the task has ended without an error.
func (l *Comms) New(id int, ranks []int, limit time.Duration) (*Comm, *Task) {
	return l.begin(id, ranks, limit, noLimit)
}

// noLimit leaves the limit to the communicator.
const noLimit = -1

func (l *Comms) begin(id int, ranks []int, limit, making time.Duration) (*Comm, *Task) {
	c := &Comm{of: l, id: id, limit: l.node.App().Limit(limit)}
	c.made = newTask(making, func(ctx context.Context) (err error) {
		if err = l.dropped(ctx, id); err == nil {
			c.Comm, err = collective.New(ctx, l.node, collective.Options{ID: id, Ranks: ranks, Timeout: limit, Look: true})
		}
		return err
	})
	return c, c.made
}

// dropped waits until a communicator with that id that was dropped is closed.
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

// Group is the communicator with ID 0 of the instances of this node's group, which the first call
// begins to make, and the next one again if that has failed.
func (l *Comms) Group() (*Comm, *Task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.makeGroup(noLimit)
}

// makeGroup is Group. mu is held.
func (l *Comms) makeGroup(making time.Duration) (*Comm, *Task) {
	if l.group == nil || l.group.failed() {
		l.group, _ = l.begin(0, nil, 0, making)
	}
	return l.group, l.group.made
}

// RebuildGroup begins Rebuild of the group's communicator, or to make it where that has not been done:
// the others' Rebuild meets that.
func (l *Comms) RebuildGroup(limit time.Duration) *Task {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.group != nil && l.group.made.Wait(0) == nil {
		return l.group.Rebuild(limit)
	}
	_, t := l.makeGroup(limit)
	return t
}

// failed tells whether it could not be made.
func (c *Comm) failed() bool {
	err := c.made.Wait(0)
	return err != nil && err != ErrPending
}

// Drop closes a communicator that nobody uses any more, in the background, also one that is still being made.
func (c *Comm) Drop() {
	c.made.Cancel()
	closed := make(chan struct{})
	c.of.mu.Lock()
	before := c.of.closing[c.id]
	c.of.closing[c.id] = closed
	c.of.mu.Unlock()
	go func() {
		if before != nil {
			<-before // for which this one has not waited to its end
		}
		<-c.made.done
		if c.Comm != nil {
			_ = c.Comm.Close(context.Background()) // it names who still reads memory, which is kept until then
		}
		c.of.mu.Lock()
		if c.of.closing[c.id] == closed {
			delete(c.of.closing, c.id)
		}
		c.of.mu.Unlock()
		close(closed)
	}()
}

// Rebuild begins collective.Comm.Rebuild. A negative limit, here and below, is that of the communicator.
func (c *Comm) Rebuild(limit time.Duration) *Task { return newTask(limit, c.Comm.Rebuild) }

// Close begins collective.Comm.Close.
func (c *Comm) Close(limit time.Duration) *Task { return newTask(limit, c.Comm.Close) }

// Barrier begins collective.Comm.Barrier.
func (c *Comm) Barrier(limit time.Duration) *Task { return newTask(limit, c.Comm.Barrier) }

// Collective is which call Call makes.
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

// reductions are their names in Python.
var reductions = map[string]collective.Reduction{"sum": collective.Sum, "min": collective.Min, "max": collective.Max, "product": collective.Product}

// Call begins a call. Those with one tensor out or in have it in a list, which is empty where this
// rank has none. root and reduction are for calls that have them. With tensors on the device the call
// begins behind the work in stream.
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

// only is the tensor of a list of one, or none.
func only(l []af.Tensor) (t af.Tensor) {
	if len(l) > 0 {
		t = l[0]
	}
	return t
}
