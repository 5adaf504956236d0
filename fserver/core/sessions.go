package core

// Sessions (package kv/session) as a language without Go's types has them: handles are
// numbers, values bytes that session.Encode has written.

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

// SessionOp is what SessionCall does.
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
	SessionNext  // waits for what is to be done
	SessionDone  // says that it is, with what comes of it
	SessionFail  // or that it has failed, with the text Name
	SessionLeave // ends the serving, for the reason Name
)

// sessionNames are those of the functions that a program calls.
var sessionNames = [...]string{SessionOpen: "open", SessionRun: "call", SessionWait: "wait", SessionCopyTo: "copy_to", SessionBroadcast: "broadcast",
	SessionGet: "get", SessionSet: "set", SessionHandles: "handles", SessionSync: "sync", SessionKill: "kill", SessionShutdown: "shutdown",
	SessionClose: "close", SessionServe: "serve", SessionNext: "serve", SessionDone: "serve", SessionFail: "serve", SessionLeave: "serve"}

// SessionCall is one call, and its result.
type SessionCall struct {
	Op     SessionOp
	Handle uint64 // SessionNext: the number of a result
	Rank   int    // SessionNext: an SessionTask
	Name   string
	Data   []byte

	undo    func() // takes the result back; it and dropped are guarded by sessions.mu
	dropped bool   // nobody waits for the result any more
}

// SessionTask is what SessionNext returns in Rank.
type SessionTask int

// What there is to be done.
const (
	SessionTaskNone  SessionTask = iota // the session has ended
	SessionTaskRun                      // the function Name with the arguments Data, where handles are numbers of results
	SessionTaskValue                    // the value of the result Handle
	SessionTaskDrop                     // the result Handle is needed no more
)

// sessionState is what there is of sessions: the one that a process controls, and the one that it serves.
type sessionState struct {
	node *postoffice.Node
	over *atomic.Bool // see Session.Finished

	mu      sync.Mutex // of what follows
	s       *session.Session
	handles map[uint64]*session.Handle
	serving *serving
}

// SessionCall begins a call, whose result is in c when Wait has returned nil. waits is false when there
// is nothing to wait for.
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

// SessionDrop takes back what a call has made, or is about to: its caller was interrupted, and
// does not have it.
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

// made notes what takes the result of a call back. Where nobody waits for it any more that is done now.
func (k *sessionState) setUndo(c *SessionCall, undo func()) {
	k.mu.Lock()
	c.undo = undo
	dropped := c.dropped
	k.mu.Unlock()
	if dropped {
		undo()
	}
}

// callNow carries out a call that does not wait.
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
			<-v.ended // the controller has heard, or does not answer
			k.serving = nil
		}
		return nil
	}
	if v == nil || v.now == nil {
		return fmt.Errorf("session: %w: there is nothing to answer", ErrMisuse)
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
	k.setUndo(c, open.Close)
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

// serving is one run of Rank.Serve, whose functions another language runs: it asks for one
// sessionTask after the other and answers each.
type serving struct {
	tasks  chan *sessionTask
	cancel context.CancelCauseFunc
	ended  chan struct{} // closed when Serve has returned err
	err    error
	now    *sessionTask // has been given out; guarded by sessions.mu
}

type sessionTask struct {
	call  SessionCall
	reply chan reply // one
}

type reply struct {
	handle uint64
	data   []byte
	err    error
}

// serve registers functions and serves.
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

// ask has an sessionTask done. It ends with the session.
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

// run has a function run. What it returns stays where it is, under a number.
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

// object is a result that is the other language's.
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

// Close implements io.Closer. With the session all objects end.
func (o *object) Close() error {
	_, err := o.v.ask(SessionTaskDrop, o.number, "", nil)
	if errors.Is(err, errOver) {
		return nil
	}
	return err
}

// errOver: Serve has ended.
var errOver = errors.New("the session is over")

// finished records that serving has ended, since no worker can open a session any more.
func (k *sessionState) finished(why error) error {
	k.over.Store(true)
	return fmt.Errorf("%w: %s", ErrLoopOver, why)
}

// next waits for an sessionTask.
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
