package core

// The process's only session, and the calls that wait for other nodes: init, stop, barrier.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
)

// Process is this process's membership of a cluster; a process can join once. Init, Stop and Barrier begin a job, one
// at a time, and return. Wait waits for the job in slices, so that the caller can handle signals between them. The zero
// value has not joined. All methods are safe for concurrent use.
type Process struct {
	open func(context.Context) (*Session, error) // replaces Start in tests

	// OnSockets, if not nil, is called with the sockets of the node: by Init, and by one goroutine whenever they
	// change. It is set before Init.
	OnSockets func(Sockets)

	session atomic.Pointer[Session]
	ended   atomic.Bool
	exits   atomic.Bool // Exit was called

	mu  sync.Mutex
	job *job // under way, or ended and its result not fetched yet
}

// job is a call that waits for other nodes.
type job struct {
	op string
	*Task
	left bool // canceled, and did not end in time; guarded by Process.mu
}

var (
	errNotStarted = fmt.Errorf("%w: the module is not initialized: call init() first", ErrMisuse)
	errEnded      = fmt.Errorf("%w: stop() was called: a process can take part once", ErrMisuse)
	errExits      = fmt.Errorf("%w: the interpreter is ending", ErrMisuse)
)

// Session returns the session. It exists from the end of Init to the end of Stop.
func (p *Process) Session() (*Session, error) {
	if s := p.session.Load(); s != nil {
		return s, nil
	}
	if err := p.over(); err != nil {
		return nil, err
	}
	return nil, errNotStarted
}

// over returns the reason why there is no session any more, or nil.
func (p *Process) over() error {
	switch {
	case p.exits.Load():
		return errExits
	case p.ended.Load():
		return errEnded
	}
	return nil
}

// begin makes the function that prepare returns the job, unless another job is under way. If prepare returns nil, begin
// starts nothing. prepare runs after all earlier jobs, and no other job begins while it runs. A negative limit means
// none.
func (p *Process) begin(op string, limit time.Duration, prepare func() (func(context.Context) error, error)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.job != nil && p.job.left {
		select {
		case <-p.job.done:
			p.job = nil
		default:
			return fmt.Errorf("%s: %w: %s() was interrupted and has not ended yet", op, ErrMisuse, p.job.op)
		}
	}
	f, err := prepare()
	switch {
	case err != nil || f == nil:
		return err
	case p.job != nil:
		return fmt.Errorf("%s: %w: another thread is in %s()", op, ErrMisuse, p.job.op)
	}
	p.job = &job{op: op, Task: startTask(limit, nil, f)}
	return nil
}

// Init begins Start.
func (p *Process) Init(limit time.Duration, lookup func(string) (string, bool), names func() []string) error {
	open := p.open
	if open == nil {
		open = func(ctx context.Context) (*Session, error) { return Start(ctx, lookup, names) }
	}
	return p.begin("init", limit, func() (func(context.Context) error, error) {
		switch err := p.over(); {
		case err != nil:
			return nil, err
		case p.session.Load() != nil:
			return nil, fmt.Errorf("%w: init() was called already", ErrMisuse)
		}
		return func(ctx context.Context) error {
			s, err := open(ctx)
			if err == nil {
				p.session.Store(s)
				if p.OnSockets != nil {
					s.watchSockets(p.OnSockets)
				}
			}
			return err
		}, nil
	})
}

// Stop begins Session.Stop, and reports whether it has begun: a second Stop does nothing. A negative limit means
// STEPAF_STOP_TIMEOUT on a worker, and no limit on servers and the scheduler: they often call Stop right after their
// start, and wait for the workers. thread is the calling thread, or 0 if it is not known; see Session.CalledBy.
func (p *Process) Stop(limit time.Duration, thread uint64) (begun bool, err error) {
	if s := p.session.Load(); limit < 0 && s != nil && s.Config().Role == "worker" {
		limit = s.Config().StopTimeout
	}
	err = p.begin("stop", limit, func() (func(context.Context) error, error) {
		s, err := p.Session()
		if errors.Is(err, errEnded) || errors.Is(err, errExits) {
			return nil, nil
		}
		begun = err == nil
		return func(ctx context.Context) error {
			p.ended.Store(true)
			err := s.stop(ctx, thread)
			p.session.Store(nil)
			return err
		}, err
	})
	return begun && err == nil, err
}

// Finish begins Session.Stop with the limit STEPAF_STOP_TIMEOUT, if the loop of this server has ended because its
// workers have ended and the program has not called Stop. It reports whether it has begun.
func (p *Process) Finish() (begun bool, err error) {
	s := p.session.Load()
	if s == nil || !s.Finished() {
		return false, nil
	}
	limit := s.Config().StopTimeout
	if limit <= 0 {
		limit = -1
	}
	return p.Stop(limit, 0)
}

// Barrier begins Session.Barrier.
func (p *Process) Barrier(limit time.Duration, servers, workers, instances bool) error {
	return p.begin("barrier", limit, func() (func(context.Context) error, error) {
		s, err := p.Session()
		return func(ctx context.Context) error { return s.Barrier(ctx, servers, workers, instances) }, err
	})
}

// current returns the job under way, or nil.
func (p *Process) current() *job {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.job
}

// remove removes j, if it is still the current job.
func (p *Process) remove(j *job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.job == j {
		p.job = nil
	}
}

// Wait waits for the job under way, for slice at most, and returns its error or ErrPending.
func (p *Process) Wait(slice time.Duration) error {
	j := p.current()
	if j == nil {
		return nil
	}
	err := j.Wait(slice)
	if err != ErrPending {
		p.remove(j)
	}
	return err
}

// Cancel cancels the job under way and waits until the job or ctx has ended: a transport or a driver may be in a call
// that cannot be interrupted. If the job has not ended, it continues in the background. This is safe: it remains the
// current job, so no other job begins, and when it ends, its work is either complete or undone.
func (p *Process) Cancel(ctx context.Context) error {
	j := p.current()
	if j == nil {
		return nil
	}
	j.cancel(nil)
	select {
	case <-j.done:
		p.remove(j)
		return nil
	case <-ctx.Done():
	}
	p.mu.Lock()
	j.left = true
	p.mu.Unlock()
	return fmt.Errorf("%s() was interrupted, but has not ended: it waits for the transport or the device%s, and continues in the background: %w", j.op, p.who(), ctx.Err())
}

func (p *Process) who() string {
	if s := p.session.Load(); s != nil {
		return " of " + s.node.Name()
	}
	return ""
}

// Exit leaves the cluster at once, because the process ends. It waits until it has left or ctx has ended. Unfinished
// work continues until the process ends. This is safe: Python does not free objects that the library refers to, not
// even at its end, and the operating system closes connections and devices.
func (p *Process) Exit(ctx context.Context) error {
	who := p.who()
	left := make(chan error, 1)
	go func() {
		err := p.Cancel(ctx)
		if p.session.Load() != nil && !p.ended.Load() {
			p.exits.Store(true) // before the session is removed
		}
		if s := p.session.Swap(nil); s != nil {
			p.ended.Store(true)
			s.Close()
		}
		left <- err
	}()
	select {
	case err := <-left:
		return err
	case <-ctx.Done():
		return fmt.Errorf("the process ends without waiting longer for the transport or the device%s to close: %w", who, ctx.Err())
	}
}

// Within calls f with a context that ends after limit. Within logs an error, since its caller cannot return one.
func Within(limit time.Duration, f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if err := f(ctx); err != nil {
		slog.New(slog.NewTextHandler(logx.Stderr, nil)).Error("fserver: "+err.Error(), "limit", limit)
	}
}
