package core

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// waited waits for the job that begun belongs to, and returns its result.
func (p *Process) waited(begun error) error {
	for err := begun; ; {
		if err != nil {
			return err
		}
		if err = p.Wait(10 * time.Millisecond); !errors.Is(err, ErrPending) {
			return err
		}
		err = nil
	}
}

// over returns a context that has ended.
func over(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// TestOneInit: if threads call Init at the same time, repeatedly, one of them starts a node.
func TestOneInit(t *testing.T) {
	s := &Session{node: testcluster.Start(t, testcluster.Options{}).Workers[0]}
	for range 300 {
		var starts, done atomic.Int32
		p := &Process{open: func(context.Context) (*Session, error) {
			starts.Add(1)
			return s, nil
		}}
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for done.Load() == 0 {
					if p.waited(p.Init(-1, nil, nil)) == nil {
						done.Add(1)
					}
				}
				if err := p.waited(p.Init(-1, nil, nil)); !errors.Is(err, ErrMisuse) {
					t.Errorf("a second Init: %v, want %v", err, ErrMisuse)
				}
			})
		}
		all.Wait()
		if starts.Load() != 1 || done.Load() != 1 {
			t.Fatalf("%d nodes were started, and %d calls succeeded, want one", starts.Load(), done.Load())
		}
	}
}

// TestOneStop: if threads call Stop at the same time, they stop the session once.
func TestOneStop(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	p := &Process{}
	p.session.Store(newSession(c.Workers[0]))
	var others sync.WaitGroup
	for _, n := range c.Nodes()[:2] {
		others.Go(func() {
			if err := newSession(n).Stop(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	var stops atomic.Int32
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for {
				begun, err := p.Stop(-1, 0)
				if begun {
					err = p.waited(nil)
					stops.Add(1)
				}
				if err == nil {
					break
				}
				if !errors.Is(err, ErrMisuse) {
					t.Error(err)
					break
				}
			}
		})
	}
	all.Wait()
	others.Wait()
	if n := stops.Load(); n != 1 {
		t.Errorf("the session was stopped %d times, want once", n)
	}
	for _, err := range []error{p.Init(-1, nil, nil), p.Barrier(-1, true, true, true)} {
		vantest.Fails(t, err, ErrMisuse, "stop() was called")
	}
	if err := p.Exit(t.Context()); err != nil {
		t.Error(err)
	}
	_, err := p.Session()
	vantest.Fails(t, err, ErrMisuse, "stop() was called")
}

// TestCancelHasALimit: Cancel stops waiting for a job that does not end, and its error names the job. No other job
// begins meanwhile, and after the job has ended all calls work again.
func TestCancelHasALimit(t *testing.T) {
	s := &Session{node: testcluster.Start(t, testcluster.Options{}).Workers[0]}
	for _, fails := range []bool{true, false} {
		stuck := make(chan struct{})
		p := &Process{open: func(ctx context.Context) (*Session, error) {
			<-stuck
			if fails {
				return nil, ctx.Err()
			}
			return s, nil
		}}
		if err := p.Init(-1, nil, nil); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			vantest.Fails(t, p.Cancel(over(t)), context.Canceled, "init()", "continues")
		}
		vantest.Fails(t, p.Init(-1, nil, nil), ErrMisuse, "init() was interrupted and has not ended yet")
		close(stuck)
		<-p.current().done
		if fails {
			p.open = func(context.Context) (*Session, error) { return s, nil }
			if err := p.waited(p.Init(-1, nil, nil)); err != nil {
				t.Errorf("Init after one that was interrupted: %v", err)
			}
		} else {
			vantest.Fails(t, p.Init(-1, nil, nil), ErrMisuse, "init() was called already")
		}
		if _, err := p.Session(); err != nil {
			t.Error(err)
		}
		if err := p.Cancel(over(t)); err != nil {
			t.Errorf("nothing to cancel: %v", err)
		}
	}
}

// TestCancel ends a job, and waits for it.
func TestCancel(t *testing.T) {
	p := &Process{open: func(ctx context.Context) (*Session, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	for range 3 {
		if err := p.Init(-1, nil, nil); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(time.Millisecond); !errors.Is(err, ErrPending) {
			t.Errorf("under way: %v, want %v", err, ErrPending)
		}
		vantest.Fails(t, p.Init(-1, nil, nil), ErrMisuse, "another thread is in", "init()")
		if err := p.Cancel(t.Context()); err != nil {
			t.Error(err)
		}
		if err := p.Wait(time.Minute); err != nil {
			t.Errorf("after Cancel: %v", err)
		}
	}
	if err := p.waited(p.Init(0, nil, nil)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without time: %v, want %v", err, context.DeadlineExceeded)
	}
}

// TestExit: Exit leaves the cluster, and does not wait for a job that does not end.
func TestExit(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	p := &Process{}
	if err := p.Exit(t.Context()); err != nil {
		t.Errorf("before Init: %v", err)
	}
	p.session.Store(newSession(c.Workers[0]))
	if err := p.Exit(t.Context()); err != nil {
		t.Error(err)
	}
	if c.Workers[0].Alive() == nil {
		t.Error("the node has not left")
	}
	_, err := p.Session()
	for _, err := range []error{err, p.Init(-1, nil, nil), p.Barrier(-1, true, true, true)} {
		vantest.Fails(t, err, ErrMisuse, "the interpreter is ending")
	}
	if begun, err := p.Stop(-1, 0); begun || err != nil {
		t.Errorf("stop() then: %t, %v; want that there is nothing to do", begun, err)
	}

	stuck, ended := make(chan struct{}), make(chan struct{})
	(*cluster.Node)(c.Servers[0]).App().OnExit(func() {
		<-stuck
		close(ended)
	})
	p = &Process{}
	p.session.Store(newSession(c.Servers[0]))
	vantest.Fails(t, p.Exit(over(t)), context.Canceled, "server 0", "transport or the device")
	close(stuck)
	<-ended
}

// TestDropWaitsForTheOneBefore: if two communicators with one id are dropped one after the other, the id is used again
// only after both are closed.
func TestDropWaitsForTheOneBefore(t *testing.T) {
	l := &Comms{closing: map[int]chan struct{}{}}
	gate := make(chan struct{})
	first := &Comm{of: l, id: 3, made: newTask(noLimit, func(context.Context) error {
		<-gate
		return van.ErrTimeout
	})}
	second := &Comm{of: l, id: 3, made: newTask(noLimit, func(context.Context) error { return van.ErrTimeout })}
	first.Drop()
	second.Drop()
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := l.dropped(short, 3); err == nil {
		t.Error("the id is free while the first one is not closed")
	}
	close(gate)
	if err := l.dropped(t.Context(), 3); err != nil {
		t.Error(err)
	}
}
