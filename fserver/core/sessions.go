package core

// Sessions (package kv/session) for a language without Go's types: handles are numbers, values are bytes that
// session.Encode has written.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// SessionOp selects the operation of a SessionCall.
type SessionOp int

// The calls of a controller, then those of a rank.
const (
	SessionOpen SessionOp = iota
	SessionRun
	SessionWait
	SessionCopyTo
	SessionBroadcast
	SessionGet
	SessionSet
	SessionHandles
	SessionSync
	SessionKill
	SessionShutdown
	SessionClose
	SessionServe // registers the functions whose names are Data, and returns at once
	SessionNext  // waits for a task
	SessionDone  // reports that the task is done, with its result
	SessionFail  // reports that the task has failed, with the text Name
	SessionLeave // ends SessionServe, for the reason Name
)

// sessionNames are the names of the functions that a program calls.
var sessionNames = [...]string{SessionOpen: "open", SessionRun: "call", SessionWait: "wait", SessionCopyTo: "copy_to", SessionBroadcast: "broadcast",
	SessionGet: "get", SessionSet: "set", SessionHandles: "handles", SessionSync: "sync", SessionKill: "kill", SessionShutdown: "shutdown",
	SessionClose: "close", SessionServe: "serve", SessionNext: "serve", SessionDone: "serve", SessionFail: "serve", SessionLeave: "serve"}

// SessionCall is one call and its result.
type SessionCall struct {
	Op     SessionOp
	Handle uint64 // SessionNext: the number of a result
	Rank   int    // SessionNext: a SessionTask
	Name   string
	Data   []byte

	undo    func() // undoes the call; undo and dropped are guarded by sessions.mu
	dropped bool   // the caller no longer waits for the result
}

// SessionTask is the kind of task that SessionNext returns in Rank.
type SessionTask int

// The kinds of tasks.
const (
	SessionTaskNone  SessionTask = iota // the session has ended
	SessionTaskRun                      // run the function Name with the arguments Data; handles among them are numbers of results
	SessionTaskValue                    // return the value of the result Handle
	SessionTaskDrop                     // release the result Handle
)

// sessionState has the session that this process controls, and the session that it serves.
type sessionState struct {
	node *postoffice.Node
	over *atomic.Bool // see Session.Finished

	mu      sync.Mutex // guards the fields below
	s       *session.Session
	handles map[uint64]*session.Handle
	serving *serving
}

// SessionCall begins a call. The result is in c when Wait has returned nil. waits is false if the call is complete
// already.
func (p *Process) SessionCall(limit time.Duration, c *SessionCall) (waits bool, err error) {
	s, err := p.Session()
	if err != nil {
		return false, err
	}
	switch c.Op {
	case SessionKill, SessionServe, SessionDone, SessionFail, SessionLeave:
		return false, s.sessions.callNow(c)
	}
	op := "session"
	if c.Op >= 0 && int(c.Op) < len(sessionNames) {
		op += "." + sessionNames[c.Op]
	}
	return true, p.begin(op, limit, func() (func(context.Context) error, error) {
		return func(ctx context.Context) error { return s.sessions.callAndWait(ctx, c) }, nil
	})
}

// SessionDrop undoes a call whose caller was interrupted and does not have the result. The call may still be under way.
func (p *Process) SessionDrop(c *SessionCall) {
	if s := p.session.Load(); s != nil {
		s.sessions.mu.Lock()
		c.dropped = true
		undo := c.undo
		s.sessions.mu.Unlock()
		if undo != nil {
			undo()
		}
	}
}

// setUndo records the function that undoes a call. If the call's caller no longer waits, setUndo calls it.
func (k *sessionState) setUndo(c *SessionCall, undo func()) {
	k.mu.Lock()
	c.undo = undo
	dropped := c.dropped
	k.mu.Unlock()
	if dropped {
		undo()
	}
}

// callNow makes a call that does not wait.
func (k *sessionState) callNow(c *SessionCall) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c.Op == SessionKill {
		if h := k.handles[c.Handle]; h != nil {
			k.s.Kill(h)
			delete(k.handles, c.Handle)
		}
		return nil
	}
	if c.Op == SessionServe {
		if k.serving != nil {
			return fmt.Errorf("session: %w: this process serves already", ErrMisuse)
		}
		v, err := k.serve(c.Data)
		if err == nil {
			k.serving = v
		}
		return err
	}
	v := k.serving
	if c.Op == SessionLeave {
		if v != nil {
			v.cancel(errors.New(c.Name))
			<-v.ended // the controller has answered, or is lost
			k.serving = nil
		}
		return nil
	}
	if v == nil || v.now == nil {
		return fmt.Errorf("session: %w: there is no task to answer", ErrMisuse)
	}
	r := reply{c.Handle, c.Data, nil}
	if c.Op == SessionFail {
		r.err = errors.New(c.Name)
	}
	v.now.reply <- r
	v.now = nil
	return nil
}

// callAndWait makes a call that waits.
func (k *sessionState) callAndWait(ctx context.Context, c *SessionCall) error {
	switch c.Op {
	case SessionNext:
		return k.next(ctx, c)
	case SessionOpen:
		return k.openSession(ctx, c)
	}
	k.mu.Lock()
	open, h := k.s, k.handles[c.Handle]
	k.mu.Unlock()
	if open == nil {
		return fmt.Errorf("session: %w: no session is open", ErrMisuse)
	}
	args, err := c.arguments()
	if err != nil {
		return err
	}
	created, results, err := callSession(ctx, open, h, c, args)
	if err != nil {
		return err
	}
	if created != nil {
		k.addHandle(c, created)
	}
	c.Data, err = session.Encode(results...)
	return err
}

// openSession opens the session of a controller. An earlier session must have failed; openSession closes it.
func (k *sessionState) openSession(ctx context.Context, c *SessionCall) error {
	k.mu.Lock()
	old := k.s
	k.mu.Unlock()
	if old != nil {
		if old.Err() == nil {
			return fmt.Errorf("session: %w: a session is open already", ErrMisuse)
		}
		old.Close()
	}
	open, err := session.Open(ctx, k.node, session.Options{})
	if err != nil {
		return err
	}
	k.mu.Lock()
	k.s, k.handles = open, map[uint64]*session.Handle{}
	k.mu.Unlock()
	c.Rank = open.Ranks()
	k.setUndo(c, func() { _ = open.Close() })
	return nil
}

// arguments decodes Data.
func (c *SessionCall) arguments() ([]any, error) {
	if c.Data == nil {
		return nil, nil
	}
	args, err := session.Decode(c.Data)
	if err != nil {
		return nil, err
	}
	if (c.Op == SessionCopyTo || c.Op == SessionSet) && len(args) != 1 {
		return nil, fmt.Errorf("session: %w: %d values, want 1", ErrMisuse, len(args))
	}
	return args, nil
}

// callSession calls the method of the open session that c names. h is the handle that c names, or nil if there is none. The
// results are a new handle, or values.
func callSession(ctx context.Context, open *session.Session, h *session.Handle, c *SessionCall, args []any) (created *session.Handle, results []any, err error) {
	switch c.Op {
	case SessionRun:
		created, err = open.Call(ctx, c.Name, args...)
	case SessionWait:
		if h == nil {
			return nil, nil, fmt.Errorf("session: %w: handle %d was killed", ErrMisuse, c.Handle)
		}
		err = h.Wait(ctx)
	case SessionCopyTo:
		created, err = open.CopyTo(ctx, args[0])
	case SessionBroadcast:
		created, err = open.Broadcast(ctx, h)
	case SessionGet:
		var v any
		v, err = open.Get(ctx, h, c.Rank)
		results = []any{v}
	case SessionSet:
		err = open.Set(ctx, h, c.Rank, args[0])
	case SessionHandles:
		var ids []uint64
		ids, err = open.Handles(ctx, c.Rank)
		for _, id := range ids {
			results = append(results, int64(id))
		}
	case SessionSync:
		err = open.Sync(ctx)
	case SessionShutdown:
		err = open.Shutdown(ctx)
	case SessionClose:
		open.Close()
	default:
		err = fmt.Errorf("session: %w: call %d", ErrMisuse, c.Op)
	}
	return created, results, err
}

// addHandle makes a new handle the result of c.
func (k *sessionState) addHandle(c *SessionCall, h *session.Handle) {
	c.Handle = h.ID()
	k.mu.Lock()
	k.handles[c.Handle] = h
	k.mu.Unlock()
	k.setUndo(c, func() { _ = k.callNow(&SessionCall{Op: SessionKill, Handle: h.ID()}) })
}

// serving is one run of Rank.Serve whose functions run in another language. The program asks for one task after the
// other, and answers each.
type serving struct {
	tasks  chan *sessionTask
	cancel context.CancelCauseFunc
	ended  chan struct{} // closed when Serve has returned err
	err    error
	now    *sessionTask // the task that the program works on; guarded by sessions.mu
}

type sessionTask struct {
	call  SessionCall
	reply chan reply // buffer for one
}

type reply struct {
	handle uint64
	data   []byte
	err    error
}

// serve registers the functions and starts Rank.Serve.
func (k *sessionState) serve(names []byte) (*serving, error) {
	r, err := session.NewRank(k.node, session.Options{})
	if err != nil {
		return nil, err
	}
	list, err := session.Decode(names)
	if err != nil {
		return nil, err
	}
	v := &serving{tasks: make(chan *sessionTask), ended: make(chan struct{})}
	for _, name := range list {
		text, is := name.(string)
		if !is {
			return nil, fmt.Errorf("session: %w: %v for a function's name, want a string", ErrMisuse, name)
		}
		if err := r.Register(text, func(_ context.Context, args []any) (any, error) { return v.run(text, args) }); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	v.cancel = cancel
	go func() {
		v.err = r.Serve(ctx)
		cancel(nil)
		close(v.ended)
	}()
	return v, nil
}

// ask gives a task to the program and returns its reply. It fails when the session ends.
func (v *serving) ask(what SessionTask, handle uint64, name string, data []byte) (reply, error) {
	e := &sessionTask{SessionCall{Op: SessionNext, Handle: handle, Rank: int(what), Name: name, Data: data}, make(chan reply, 1)}
	select {
	case v.tasks <- e:
	case <-v.ended:
		return reply{}, errOver
	}
	select {
	case r := <-e.reply:
		return r, r.err
	case <-v.ended:
		return reply{}, errOver
	}
}

// run has the program run a function. The result stays in the program, under a number.
func (v *serving) run(name string, args []any) (any, error) {
	for i, a := range args {
		if o, is := a.(*object); is {
			args[i] = session.HandleID(o.number)
		}
	}
	data, err := session.Encode(args...)
	if err != nil {
		return nil, err
	}
	r, err := v.ask(SessionTaskRun, 0, name, data)
	if err != nil {
		return nil, err
	}
	return &object{v, r.handle}, nil
}

// object is a result that the program of the other language holds.
type object struct {
	v      *serving
	number uint64
}

// Value implements session.Valuer.
func (o *object) Value() (any, error) {
	r, err := o.v.ask(SessionTaskValue, o.number, "", nil)
	if err != nil {
		return nil, err
	}
	l, err := session.Decode(r.data)
	if err == nil && len(l) != 1 {
		err = fmt.Errorf("session: %w: %d values, want 1", ErrMisuse, len(l))
	}
	if err != nil {
		return nil, err
	}
	return l[0], nil
}

// Close implements io.Closer. When the session ends, all objects end.
func (o *object) Close() error {
	_, err := o.v.ask(SessionTaskDrop, o.number, "", nil)
	if errors.Is(err, errOver) {
		return nil
	}
	return err
}

// errOver means that Serve has ended.
var errOver = errors.New("the session is over")

// finished records that Serve has ended because no worker can open a session any more.
func (k *sessionState) finished(why error) error {
	k.over.Store(true)
	return fmt.Errorf("%w: %s", ErrLoopOver, why)
}

// next waits for a task.
func (k *sessionState) next(ctx context.Context, c *SessionCall) error {
	k.mu.Lock()
	v := k.serving
	k.mu.Unlock()
	if v == nil {
		return fmt.Errorf("session: %w: this process does not serve", ErrMisuse)
	}
	select {
	case e := <-v.tasks:
		k.mu.Lock()
		v.now = e
		k.mu.Unlock()
		*c = e.call
	case <-v.ended:
		k.mu.Lock()
		k.serving = nil
		k.mu.Unlock()
		*c = SessionCall{Rank: int(SessionTaskNone)}
		if errors.Is(v.err, van.ErrFinished) {
			return k.finished(v.err)
		}
		return v.err
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}
