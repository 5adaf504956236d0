package session

// Rank: the process that runs functions.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Function is a function that a Rank runs. An argument is nil, a bool, int64, float64, string, []byte or Array; for a
// handle, it is the result of an earlier function or the value that the controller has set. Bytes and arrays belong
// to the rank. A result may have any type and is stored as it is. A result of another type than those above can be
// copied to the controller if it implements Valuer. A result that implements io.Closer is closed when its handle is
// released. ctx ends with the session.
type Function func(ctx context.Context, args []any) (any, error)

// Valuer is a result that determines the value copied to the controller.
type Valuer interface {
	Value() (any, error)
}

// Rank runs functions for the controller of a session. All methods are safe for concurrent
// use.
type Rank struct {
	node  cluster.App
	o     Options
	mu    sync.Mutex
	funcs map[string]Function
	now   bool // Serve is running

	confirmTime time.Duration // see the constant; tests set others
}

// NewRank makes a server node a rank. Its number is the node's Rank.
func NewRank(node *postoffice.Node, o Options) (*Rank, error) {
	r := &Rank{node: (*cluster.Node)(node).App(), o: o, funcs: map[string]Function{}, confirmTime: confirmTime}
	err := o.check()
	if err == nil && node.Role() != van.Server {
		err = fmt.Errorf("%w: ranks are servers", van.ErrInvalid)
	}
	if err != nil {
		return nil, wrong(r.node, "rank", err)
	}
	return r, nil
}

// Register registers a function under a name. Call it before Serve.
func (r *Rank) Register(name string, f Function) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case f == nil:
		return wrong(r.node, "register", fmt.Errorf("%w: no function for %q", van.ErrInvalid, name))
	case r.now:
		return wrong(r.node, "register", fmt.Errorf("%w: %q: the rank serves already", van.ErrInvalid, name))
	case r.funcs[name] != nil:
		return wrong(r.node, "register", fmt.Errorf("%w: %q is registered already", van.ErrInvalid, name))
	}
	r.funcs[name] = f
	return nil
}

// Serve waits for a controller and runs its calls. When the controller shuts the session down, Serve waits until all results are
// closed, or ctx ends, and returns nil. It returns an error with the reason when the session fails, the controller is lost, or
// ctx ends; it then does not wait for a running function. Serve may be called again, for another session.
//
// A controller whose program ends (Node.Shutdown, or Python's stop()) ends its session as Shutdown does. While no session
// is open, Serve ends if no worker can open one: with an error that wraps postoffice.ErrFinished if the programs of all
// workers have ended, and with an error that wraps postoffice.ErrPeerLost if all of them have been lost for
// STEPAF_REPLACE_TIMEOUT.
func (r *Rank) Serve(ctx context.Context) error {
	s := &serving{r: r, waits: map[uint64]pendingCall{}, work: make(chan pendingCall, maxWork), values: map[uint64]any{}}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	defer s.cancel(van.ErrClosed)
	r.mu.Lock()
	if r.now {
		r.mu.Unlock()
		return wrong(r.node, "serve", fmt.Errorf("%w: it runs already", van.ErrInvalid))
	}
	r.now, s.funcs = true, maps.Clone(r.funcs)
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.now = false
	}()
	changed := make(chan struct{}, 1)
	s.changed = changed
	defer r.node.OnEnded(func(int) { wake.Put(changed) })()
	defer r.node.OnPeer(func(id int, _ bool, cause error) {
		wake.Put(changed)
		if cause == nil { // it was not reported as lost
			cause = errors.New("it has connected again, or is another process now")
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.session != 0 && id == s.controller {
			// This is no knownEnd: the controller may not have noticed the loss, and may still wait for answers.
			s.cancel(fmt.Errorf("%w: the controller, %s: %w", van.ErrPeerLost, r.node.PeerName(id), cause))
		}
	})()
	app := appIDs + r.o.ID
	a, err := kv.NewSimpleApp((*postoffice.Node)(r.node.Node), kv.SimpleOptions{AppID: app, CustomerID: app, Timeout: -1, Handler: s.asked})
	if err != nil {
		return err
	}
	defer a.Close()
	resultsClosed := make(chan struct{})
	go func() {
		defer close(resultsClosed)
		s.run()
	}()
	go s.watch()
	select {
	case <-s.ctx.Done():
	case <-r.node.Ended():
		s.cancel(r.node.Alive())
	}
	cause := context.Cause(s.ctx)
	s.leave(a, cause)
	a.Close()
	if cause == errStopped {
		select {
		case <-resultsClosed:
		case <-ctx.Done():
		}
	}
	s.mu.Lock()
	last := s.last
	s.mu.Unlock()
	if last != nil {
		// Only now: when the controller receives the answer it may open the next session at once, and must then find no
		// Serve, or the next one.
		s.answer(*last, answer{})
	}
	if cause == errStopped {
		return nil
	}
	return wrong(r.node, "serve", van.TimedOut(cause))
}

// knownEnd is an error that ends a Serve without a notice to the controller: the controller already knows that the session
// has ended.
type knownEnd struct{ error }

func (k knownEnd) Unwrap() error { return k.error }

// errStopped: the controller has shut the session down.
var errStopped error = knownEnd{errors.New("shut down")}

// maxWork is the maximum number of queued calls of a rank.
const maxWork = 2 * maxCalls

// serving is one run of Serve.
type serving struct {
	r      *Rank
	funcs  map[string]Function // a copy, since a function may still run after Serve
	ctx    context.Context
	cancel context.CancelCauseFunc

	changed <-chan struct{} // has a token after a worker was lost, was connected again, or has ended

	mu         sync.Mutex
	session    uint64                 // 0 without a controller
	controller int                    // its node id
	opened     kv.SimpleMessage       // its wantOpen
	joined     time.Time              // when this rank joined the session
	gone       uint64                 // the last session that was canceled before it began
	next       uint64                 // number of the next call
	waits      map[uint64]pendingCall // calls that arrived before their turn
	latest     kv.SimpleMessage       // the latest call that was passed to work; it may be answered already
	last       *pendingCall           // the request for the end, answered at the end
	work       chan pendingCall

	values map[uint64]any // by handle; used only by the goroutine that runs functions
}

// pendingCall is a request to be processed.
type pendingCall struct {
	m kv.SimpleMessage
	q request
}

// noValue is the value of a handle whose call has failed; it contains the error text.
type noValue string

// leave notifies the controller that Serve has ended, unless the cause why is a knownEnd. A cause that the program has
// given may wrap any error, also one of another Serve.
func (s *serving) leave(a *kv.SimpleApp, why error) {
	s.mu.Lock()
	session, to, latest := s.session, s.controller, s.latest
	s.mu.Unlock()
	if _, known := why.(knownEnd); session == 0 || known {
		return
	}
	q := request{session: session, text: van.TimedOut(why).Error()}
	body, err := q.append(nil, wantLeave)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout(s.r.node))
	defer cancel()
	notify(a, wantLeave, body, to)(ctx)
	if ctx.Err() != nil {
		// No answer has arrived: the controller may be considered lost. A refusal is sent when it is back, and fails the call and its
		// session.
		_ = latest.Refuse(why)
	}
}

// asked handles a request. A request for another session is refused.
func (s *serving) asked(m kv.SimpleMessage) {
	q, err := parseRequest(m.Head, m.Body)
	w := pendingCall{m, q}
	switch {
	case err != nil:
	case m.Head == wantForget:
		s.givenUp(w)
		s.answer(w, answer{})
	case m.Head == wantOpen:
		if err = s.open(w); err == nil {
			s.answer(w, answer{})
		}
	default:
		if err = s.accept(w); err == nil {
			runtime.Gosched() // run has work; this goroutine polls for messages and would keep the processor
		}
	}
	if err != nil && !errors.Is(err, errLater) {
		s.answer(w, answer{outcome: refused, text: err.Error()})
	}
}

// errLater: a wantOpen that is not answered. A controller that still waits sends it again.
var errLater = errors.New("not now")

// open joins the session of w, if the rank is free.
func (s *serving) open(w pendingCall) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.r.node.Members(van.ServerGroup)); int(w.q.ranks) != n || w.q.session == 0 {
		return fmt.Errorf("%w: %d ranks, want %d", van.ErrInvalid, w.q.ranks, n)
	}
	again := int(w.m.Sender) == s.controller
	switch {
	case s.ctx.Err() != nil || w.q.session == s.gone || !w.m.Wanted():
		return errLater
	case s.session == 0 || w.q.session == s.session && again:
	case s.idle() && (again || !s.opened.Wanted()):
		// A controller has one session at a time. It may have ended the last one without this rank's knowledge: its
		// notices do not wait for a rank that is not connected yet.
		s.dropSession("another one is opened")
	case again:
		s.cancel(knownEnd{fmt.Errorf("%w: it opens another one", errAborted)})
		return errLater // the next Serve answers
	case s.idle() && time.Since(s.joined) < s.r.confirmTime:
		return errLater
	default:
		return s.another()
	}
	if s.session != w.q.session {
		s.joined = time.Now()
	}
	s.session, s.controller, s.opened, s.next = w.q.session, int(w.m.Sender), w.m, max(s.next, 1)
	return nil
}

// confirmTime is how long a session without calls is provisional. During that time the rank leaves another controller's
// wantOpen unanswered, and that controller repeats it. Reason: messages of different nodes are not ordered, so the wantForget
// of a failed Open may arrive after another controller's wantOpen.
const confirmTime = time.Second

// another is the error that names the controller of the present session. s.mu is held.
func (s *serving) another() error {
	return fmt.Errorf("%w: this rank serves another session, of %s", van.ErrInvalid, s.r.node.PeerName(s.controller))
}

// accept queues w for its turn.
func (s *serving) accept(w pendingCall) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.session == 0:
		return fmt.Errorf("%w: no session is open on this rank", van.ErrInvalid)
	case w.q.session != s.session || int(w.m.Sender) != s.controller:
		return s.another()
	case w.m.Head == wantAbort:
		s.last = &w
		s.cancel(knownEnd{fmt.Errorf("%w: %s", errAborted, w.q.text)})
		return nil
	case w.q.seq < s.next:
		return fmt.Errorf("%w: call %d again, want %d", van.ErrMalformed, w.q.seq, s.next)
	case len(s.work)+len(s.waits) >= maxWork:
		return fmt.Errorf("%w: %d calls wait", van.ErrQueueFull, maxWork)
	}
	s.waits[w.q.seq] = w
	for w, due := s.waits[s.next]; due; w, due = s.waits[s.next] {
		delete(s.waits, s.next)
		s.next++
		s.latest = w.m
		s.work <- w // never blocks
	}
	return nil
}

// givenUp forgets the session of w, which has not begun. A later wantOpen of it is ignored.
func (s *serving) givenUp(w pendingCall) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = w.q.session
	if w.q.session == s.session && int(w.m.Sender) == s.controller && s.idle() {
		s.dropSession(w.q.text)
	}
}

// idle reports whether no call was made since the session was opened. s.mu is held.
func (s *serving) idle() bool { return s.next <= 1 && len(s.waits) == 0 }

// dropSession makes the rank free for the next controller. s.mu is held.
func (s *serving) dropSession(why string) {
	s.r.node.Log().Info("dropped a session that had not begun", "controller", s.r.node.PeerName(s.controller), "why", why)
	s.session, s.controller, s.next, s.opened = 0, 0, 0, kv.SimpleMessage{}
}

// errAborted: the controller has ended the session.
var errAborted = errors.New("the controller has ended the session")

func (s *serving) answer(w pendingCall, a answer) {
	a.session, a.seq = w.q.session, w.q.seq
	b, err := a.append(make([]byte, 0, 64), w.m.Head)
	if err == nil {
		err = w.m.Respond(b)
	}
	// A controller repeats a wantOpen, and does not wait for the answer to a wantForget. Other requests would wait
	// without end.
	awaited := w.m.Head != wantOpen && w.m.Head != wantForget
	if err != nil && awaited && a.outcome == done { // for example, the answer is too long
		a.outcome, a.text = failed, err.Error()
		if b, err = a.append(nil, w.m.Head); err == nil {
			err = w.m.Respond(b)
		}
	}
	if err != nil {
		if awaited {
			_ = w.m.Refuse(err) // ends the call: the queue may be too full for the notice of leave, too
		}
		s.mu.Lock()
		if awaited && a.outcome != refused && w.q.session == s.session {
			s.cancel(fmt.Errorf("a call could not be answered: %w", err))
		}
		s.mu.Unlock()
		s.r.node.Rarely("session: not answered").Warn("call not answered", "err", err)
	}
}

// run processes calls until the session ends.
func (s *serving) run() {
	var w pendingCall
	defer func() {
		// This has no effect unless a function has ended this goroutine: later calls would not be processed.
		s.cancel(fmt.Errorf("call %d, %q, has ended the goroutine of calls (runtime.Goexit)", w.q.seq, w.q.text))
		s.drop(slices.Collect(maps.Keys(s.values))...)
	}()
	for {
		select {
		case <-s.ctx.Done():
			return
		case w = <-s.work:
			if s.ctx.Err() != nil {
				return
			}
			s.drop(w.q.kills...)
			a := s.do(w)
			switch {
			case s.ctx.Err() != nil:
				return
			case w.m.Head == wantOver:
				s.cancel(errStopped)
			case w.m.Head == wantStop:
				last := w
				s.mu.Lock()
				s.last = &last
				s.mu.Unlock()
				s.cancel(errStopped)
			default:
				s.answer(w, a)
			}
		}
	}
}

// do processes one call.
func (s *serving) do(w pendingCall) (a answer) {
	var err error
	switch w.m.Head {
	case wantCall:
		var v any
		if v, err = s.call(w.q.text, w.q.values); err != nil {
			v = noValue(fmt.Sprintf("call %d, %q, has failed: %s", w.q.seq, w.q.text, textOf(err)))
		}
		s.values[w.q.handle] = v
	case wantSet:
		s.drop(w.q.handle)
		s.values[w.q.handle] = w.q.values[0]
	case wantGet:
		var v any
		if v, err = s.value(w.q.handle); err == nil {
			a.value, err = s.plainly(v)
		}
	case wantList:
		for id, v := range s.values {
			if _, none := v.(noValue); !none {
				a.handles = append(a.handles, id)
			}
		}
		slices.Sort(a.handles)
	}
	if err != nil {
		a.outcome, a.text = failed, textOf(err)
	}
	return a
}

// wantOver is a Head that no request has. It is the last call of a session whose controller's program has ended.
const wantOver = -1

// watch ends Serve if no worker can open a session, and ends the session if the program of its controller has ended.
func (s *serving) watch() {
	lost := map[int]time.Time{}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		s.mu.Lock()
		session, controller := s.session, s.controller
		s.mu.Unlock()
		again, err := s.nobody(lost)
		switch {
		case session != 0 && s.r.node.HasEnded(controller):
			select {
			case s.work <- pendingCall{m: kv.SimpleMessage{Head: wantOver}, q: request{session: session}}: // after the calls of the session
			case <-s.ctx.Done():
			}
			return
		case session != 0:
			again = time.Hour // the loss or the end of the controller puts another token into changed
		case err != nil:
			s.cancel(err)
			return
		}
		timer.Reset(again)
		select {
		case <-s.changed:
		case <-timer.C:
		case <-s.ctx.Done():
			return
		}
	}
}

// nobody returns an error if no worker can open another session. Otherwise it returns the time after which this may
// change. lost holds the times at which workers were found lost.
func (s *serving) nobody(lost map[int]time.Time) (again time.Duration, err error) {
	node := s.r.node
	dead, now := node.DeadNodes(0), time.Now()
	var ended, gone []string
	for _, id := range node.Members(van.WorkerGroup) {
		if !slices.Contains(dead, id) {
			delete(lost, id)
		} else if _, known := lost[id]; !known {
			lost[id] = now
		}
		at, is := lost[id]
		switch left := node.Config().ReplaceTimeout - now.Sub(at); {
		case node.HasEnded(id):
			ended = append(ended, node.PeerName(id))
		case !is:
			return time.Hour, nil
		case left > 0:
			again = max(again, left)
		default:
			gone = append(gone, node.PeerName(id))
		}
	}
	switch {
	case again > 0:
	case len(ended) > 0:
		err = fmt.Errorf("%w: no worker can open a session: in stop() or Finalize: %s", van.ErrFinished, strings.Join(ended, ", "))
		if len(gone) > 0 {
			err = fmt.Errorf("%w; lost: %s", err, strings.Join(gone, ", "))
		}
	default:
		err = fmt.Errorf("%w: no worker is left to open a session, and none was replaced within %s (STEPAF_REPLACE_TIMEOUT): %s",
			van.ErrPeerLost, node.Config().ReplaceTimeout, strings.Join(gone, ", "))
	}
	return again, err
}

// textOf returns the text of a function's error. Its Error method may panic, for example on a nil pointer.
func textOf(err error) (text string) {
	defer func() {
		if p := recover(); p != nil {
			text = fmt.Sprintf("an error of type %T, whose Error panics: %v", err, p)
		}
	}()
	return err.Error()
}

// value returns the value of a handle.
func (s *serving) value(id uint64) (any, error) {
	v, has := s.values[id]
	if why, none := v.(noValue); none {
		return nil, fmt.Errorf("handle %d: %s", id, why)
	}
	if !has {
		return nil, fmt.Errorf("%w: handle %d has no value on this rank", van.ErrInvalid, id)
	}
	return v, nil
}

// plainly returns the value that the controller receives for v.
func (s *serving) plainly(v any) (value any, err error) {
	defer s.caught(&err)
	if x, is := v.(Valuer); is {
		v, err = x.Value()
	}
	return v, err
}

// call runs a function.
func (s *serving) call(name string, args []any) (v any, err error) {
	f := s.funcs[name]
	if f == nil {
		return nil, fmt.Errorf("%w: no function %q is registered on this rank, which has: %q", van.ErrInvalid, name, slices.Sorted(maps.Keys(s.funcs)))
	}
	for i, a := range args {
		if id, is := a.(HandleID); is {
			if args[i], err = s.value(uint64(id)); err != nil {
				return nil, fmt.Errorf("argument %d: %w", i, err)
			}
		}
	}
	defer s.caught(&err)
	return f(s.ctx, args)
}

// caught converts a panic to an error, and logs its stack.
func (s *serving) caught(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("panic: %v", p)
		s.r.node.Log().Error("a function of a session panicked", "panic", p, "stack", string(debug.Stack()))
	}
}

// drop releases values.
func (s *serving) drop(handles ...uint64) {
	for _, id := range handles {
		v, has := s.values[id]
		delete(s.values, id)
		if c, is := v.(io.Closer); has && is {
			if err := s.closed(c); err != nil {
				s.r.node.Log().Warn("a result's Close has failed", "handle", id, "err", err)
			}
		}
	}
}

func (s *serving) closed(c io.Closer) (err error) {
	defer s.caught(&err)
	return c.Close()
}
