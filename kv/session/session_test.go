package session_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// ends are the results of the ranks' Serve.
type ends []chan error

// serve starts the ranks of a cluster with the functions that register gives them.
func serve(t *testing.T, c *testcluster.Cluster, register func(rank int, r *session.Rank)) ends {
	t.Helper()
	e := make(ends, len(c.Servers))
	for i, n := range c.Servers {
		e[i] = serveOne(t, func() (*session.Rank, error) { return session.NewRank(n, session.Options{}) }, i, register)
	}
	return e
}

func serveOne(t *testing.T, newRank func() (*session.Rank, error), rank int, register func(int, *session.Rank)) chan error {
	t.Helper()
	r, err := newRank()
	if err != nil {
		t.Fatal(err)
	}
	register(rank, r)
	ended := make(chan error, 1)
	go func() { ended <- r.Serve(context.Background()) }()
	return ended
}

// all waits for all of them.
func (e ends) all(t *testing.T) []error {
	t.Helper()
	l := make([]error, len(e))
	for i, c := range e {
		select {
		case l[i] = <-c:
		case <-time.After(30 * time.Second):
			t.Fatalf("Serve of rank %d does not end", i)
		}
	}
	return l
}

func open(t *testing.T, c *testcluster.Cluster) *session.Session {
	t.Helper()
	s, err := session.Open(limit(t), c.Workers[0], session.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func limit(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func register(t *testing.T, r *session.Rank, name string, f session.Function) {
	t.Helper()
	if err := r.Register(name, f); err != nil {
		t.Fatal(err)
	}
}

// standard are functions that most tests need.
func standard(t *testing.T) func(int, *session.Rank) {
	return func(rank int, r *session.Rank) {
		register(t, r, "rank", func(context.Context, []any) (any, error) { return int64(rank), nil })
		register(t, r, "same", func(_ context.Context, args []any) (any, error) { return args[0], nil })
		register(t, r, "sum", func(_ context.Context, args []any) (any, error) {
			var sum int64
			for _, a := range args {
				sum += a.(int64)
			}
			return sum, nil
		})
		register(t, r, "fail on", func(_ context.Context, args []any) (any, error) {
			if args[0] == int64(rank) {
				return nil, errors.New("no more of these")
			}
			return int64(1), nil
		})
		if rank != 1 {
			register(t, r, "not on 1", func(context.Context, []any) (any, error) { return nil, nil })
		}
	}
}

var over = []testcluster.Transport{testcluster.InProc, testcluster.TCP, testcluster.SHM}

// TestSession: everything that a session can do, in order.
func TestSession(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers, o.Group = 2, 2
		o.Workers = 1
		c := testcluster.Start(t, o)
		ended := serve(t, c, standard(t))
		s, ctx := open(t, c), limit(t)
		if s.Ranks() != 4 {
			t.Fatalf("%d ranks, want 4", s.Ranks())
		}
		ranks := must[*session.Handle](t)(s.Call(ctx, "rank"))
		sum := must[*session.Handle](t)(s.Call(ctx, "sum", ranks, 10, ranks))
		for r := range 4 {
			if v := must[any](t)(s.Get(ctx, sum, r)); v != int64(10+2*r) {
				t.Errorf("rank %d has %v, want %d", r, v, 10+2*r)
			}
		}
		array := must[session.Array](t)(session.NewArray([]float32{1, 2, 3, 4, 5, 6}, 2, 3))
		big := must[session.Array](t)(session.NewArray(make([]uint8, 3<<20)))
		for i := range big.Data {
			big.Data[i] = byte(i * 7)
		}
		for _, v := range []any{nil, true, false, int64(-5), 2.5, "text", []byte("bytes"), []byte{}, array, big,
			session.Array{Type: "bfloat16", Shape: []int{0, 7}, Data: []byte{}}, session.Array{Type: "datetime64[25ns]", Shape: []int{1}, Data: []byte("12345678")},
			session.Array{Type: "timedelta64", Shape: []int{}, Data: []byte("12345678")}} {
			same := must[*session.Handle](t)(s.Call(ctx, "same", v))
			for r := range 4 {
				if got := must[any](t)(s.Get(ctx, same, r)); !reflect.DeepEqual(got, v) {
					t.Errorf("rank %d has %.60v, want %.60v", r, got, v)
				}
			}
			x := must[*session.Handle](t)(s.CopyTo(ctx, v))
			y := must[*session.Handle](t)(s.Broadcast(ctx, x))
			z := must[*session.Handle](t)(s.Call(ctx, "same", y))
			if got := must[any](t)(s.Get(ctx, z, 3)); !reflect.DeepEqual(got, v) {
				t.Errorf("rank 3 has %.60v after a broadcast, want %.60v", got, v)
			}
			if got := must[any](t)(s.CopyFrom(ctx, x)); !reflect.DeepEqual(got, v) {
				t.Errorf("rank 0 has %.60v, want %.60v", got, v)
			}
			if _, err := s.Get(ctx, x, 2); err == nil || !strings.Contains(err.Error(), "rank 2 (server 2") {
				t.Errorf("rank 2 has what was copied to rank 0: %v", err)
			}
			s.Kill(same, x, y, z)
		}
		if err := s.Set(ctx, ranks, 2, int64(100)); err != nil {
			t.Fatal(err)
		}
		sum2 := must[*session.Handle](t)(s.Call(ctx, "sum", ranks))
		for r, want := range []int64{0, 1, 100, 3} {
			if v := must[any](t)(s.Get(ctx, sum2, r)); v != want {
				t.Errorf("rank %d has %v, want %d", r, v, want)
			}
		}
		s.Kill(sum, sum)
		if _, err := s.Call(ctx, "sum", sum); !errors.Is(err, van.ErrInvalid) {
			t.Errorf("a handle that was killed: %v", err)
		}
		if err := s.Sync(ctx); err != nil {
			t.Fatal(err)
		}
		for r := range 4 {
			if l := must[[]uint64](t)(s.Handles(ctx, r)); !slices.Equal(l, []uint64{ranks.ID(), sum2.ID()}) {
				t.Errorf("rank %d has handles %d, want %d and %d", r, l, ranks.ID(), sum2.ID())
			}
		}
		if err := s.Shutdown(ctx); err != nil {
			t.Fatal(err)
		}
		for r, err := range ended.all(t) {
			if err != nil {
				t.Errorf("Serve of rank %d: %v", r, err)
			}
		}
		if _, err := s.Call(ctx, "rank"); !errors.Is(err, van.ErrClosed) {
			t.Errorf("a call after Shutdown: %v", err)
		}
		c.Finalize(t)
	}, over...)
}

// TestErrors: a failure on one rank is an error of that call, which names the rank, and of calls that use its
// result. No other call has it.
func TestErrors(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 3})
	serve(t, c, func(rank int, r *session.Rank) {
		standard(t)(rank, r)
		register(t, r, "panic", func(_ context.Context, args []any) (any, error) { return args[7], nil })
		register(t, r, "a handle", func(context.Context, []any) (any, error) { return session.HandleID(7), nil })
		register(t, r, "chan", func(context.Context, []any) (any, error) { return make(chan int), nil })
	})
	s, ctx := open(t, c), limit(t)
	wants := func(err error, rank int, texts ...string) {
		t.Helper()
		var e *session.RankError
		if !errors.As(err, &e) || e.Rank != rank || e.Node != van.NodeName(van.ServerID(rank)) {
			t.Fatalf("%v, want an error of rank %d", err, rank)
		}
		for _, text := range texts {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%v, want it to name %q", err, text)
			}
		}
	}
	bad := must[*session.Handle](t)(s.Call(ctx, "fail on", 2))
	uses := must[*session.Handle](t)(s.Call(ctx, "sum", bad))
	wants(uses.Wait(ctx), 2, "argument 0", "fail on", "no more of these")
	wants(bad.Wait(ctx), 2, `"fail on"`, "rank 2 (server 2 (id 12))", "no more of these")
	if v := must[any](t)(s.Get(ctx, uses, 1)); v != int64(1) {
		t.Errorf("rank 1, where nothing has failed, has %v", v)
	}
	_, err := s.Get(ctx, uses, 2)
	wants(err, 2, "no more of these")
	wants(must[*session.Handle](t)(s.Call(ctx, "not on 1")).Wait(ctx), 1, `no function "not on 1"`, `"fail on" "panic"`)
	err = must[*session.Handle](t)(s.Call(ctx, "panic")).Wait(ctx)
	wants(err, 0, "panic", "index out of range", "rank 1", "rank 2")
	h := must[*session.Handle](t)(s.Call(ctx, "chan"))
	if err := h.Wait(ctx); err != nil {
		t.Errorf("a result that stays there: %v", err)
	}
	_, err = s.CopyFrom(ctx, h)
	wants(err, 0, "chan int", fmt.Sprintf("copy of handle %d:", h.ID()))
	// Sync returns the errors of calls without a Wait.
	if err := s.Sync(ctx); err != nil {
		t.Errorf("all errors are known: %v", err)
	}
	for range 40 {
		must[*session.Handle](t)(s.Call(ctx, "fail on", 0))
	}
	err = s.Sync(ctx)
	wants(err, 0, "24 more errors")
	if err := s.Sync(ctx); err != nil {
		t.Errorf("the same errors again: %v", err)
	}
	for _, v := range []any{make(chan int), session.Array{Type: "float32", Shape: []int{2}, Data: make([]byte, 7)},
		session.Array{Type: "float32", Shape: []int{2}, Data: make([]byte, 9)}, session.Array{Type: "object"}, session.Array{Type: "float128", Shape: []int{1}, Data: make([]byte, 16)},
		session.Array{Type: "datetime64[year]", Shape: []int{1}, Data: make([]byte, 8)},
		session.Array{Type: "int8", Shape: []int{-1, -1}, Data: []byte{1}}, &session.Handle{}, (*session.Handle)(nil)} {
		if _, err := s.Call(ctx, "same", 1, v); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "argument 1") {
			t.Errorf("argument %v: %v", v, err)
		}
	}
	if _, err := s.CopyTo(ctx, session.HandleID(1)); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("a handle as a value: %v", err)
	}
	h = must[*session.Handle](t)(s.Call(ctx, "a handle"))
	_, err = s.CopyFrom(ctx, h)
	wants(err, 0, "a handle cannot be stored")
	if h, err = s.Call(ctx, "same", session.HandleID(h.ID())); err != nil || h.Wait(ctx) != nil {
		t.Errorf("a handle by its number: %v", err)
	}
	if _, err := s.Get(ctx, h, 3); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("rank 3 of 3: %v", err)
	}
	if err := s.Err(); err != nil {
		t.Errorf("the session has failed: %v", err)
	}
}

// TestOrder: all ranks run the calls of several goroutines in one order, and more of them than
// may be under way.
func TestOrder(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 3
		c := testcluster.Start(t, o)
		logs := make([][]int64, 3)
		ended := serve(t, c, func(rank int, r *session.Rank) {
			register(t, r, "log", func(_ context.Context, args []any) (any, error) {
				logs[rank] = append(logs[rank], args[0].(int64))
				return nil, nil
			})
		})
		s, ctx := open(t, c), limit(t)
		var wg sync.WaitGroup
		for g := range 4 {
			wg.Go(func() {
				for i := range 700 {
					h, err := s.Call(ctx, "log", g*1000+i, make([]byte, i))
					if err != nil {
						t.Error(err)
						return
					}
					s.Kill(h)
				}
			})
		}
		wg.Wait()
		if err := s.Shutdown(ctx); err != nil {
			t.Fatal(err)
		}
		ended.all(t)
		if len(logs[0]) != 2800 || !slices.Equal(logs[0], logs[1]) || !slices.Equal(logs[0], logs[2]) {
			t.Fatalf("%d, %d and %d calls, or in different orders", len(logs[0]), len(logs[1]), len(logs[2]))
		}
		for g := range int64(4) {
			var own []int64
			for _, v := range logs[0] {
				if v/1000 == g {
					own = append(own, v)
				}
			}
			if !slices.IsSorted(own) {
				t.Errorf("calls of goroutine %d out of order", g)
			}
		}
	}, over...)
}

// TestWaitEnds: a wait that ends with its context names the ranks that owe an answer, and cancels nothing.
func TestWaitEnds(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	release := make(chan struct{})
	serve(t, c, func(rank int, r *session.Rank) {
		standard(t)(rank, r)
		register(t, r, "slow", func(context.Context, []any) (any, error) {
			if rank == 1 {
				<-release
			}
			return int64(rank), nil
		})
	})
	s, ctx := open(t, c), limit(t)
	h := must[*session.Handle](t)(s.Call(ctx, "slow"))
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	vantest.Fails(t, h.Wait(short), van.ErrTimeout, "slow", "rank 1 (server 1")
	vantest.Fails(t, s.Sync(short), van.ErrTimeout, "rank 1 (server 1")
	if v := must[any](t)(s.Get(ctx, h, 0)); v != int64(0) { // of a rank that is not held up
		t.Errorf("rank 0 has %v", v)
	}
	close(release)
	if err := h.Wait(ctx); err != nil {
		t.Error(err)
	}
	if v := must[any](t)(s.Get(ctx, h, 1)); v != int64(1) {
		t.Errorf("rank 1 has %v", v)
	}
}

// closer counts how often it is closed, and can be copied.
type closer struct{ n *atomic.Int32 }

func (c closer) Close() error {
	c.n.Add(1)
	return nil
}

func (c closer) Value() (any, error) { return "the value", nil }

// TestResultsAreClosed when their handle is killed, replaced, or the session ends.
func TestResultsAreClosed(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	var n atomic.Int32
	ended := serve(t, c, func(_ int, r *session.Rank) {
		register(t, r, "make", func(context.Context, []any) (any, error) { return closer{&n}, nil })
	})
	s, ctx := open(t, c), limit(t)
	a, b := must[*session.Handle](t)(s.Call(ctx, "make")), must[*session.Handle](t)(s.Call(ctx, "make"))
	must[*session.Handle](t)(s.Call(ctx, "make"))
	if v := must[any](t)(s.CopyFrom(ctx, a)); v != "the value" || n.Load() != 0 {
		t.Errorf("%v, and %d closed", v, n.Load())
	}
	s.Kill(a)
	if err := s.Set(ctx, b, 0, nil); err != nil || n.Load() != 2 {
		t.Errorf("%v, %d closed, want 2", err, n.Load())
	}
	if err := s.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	ended.all(t)
	for limit := time.Now().Add(10 * time.Second); n.Load() != 3; {
		if time.Now().After(limit) {
			t.Fatalf("%d closed, want 3", n.Load())
		}
	}
}

// TestManyKilled: for any number of killed handles, ranks are notified of all of them, and of at most one
// message's capacity at once.
func TestManyKilled(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	ended := serve(t, c, standard(t))
	s, ctx := open(t, c), limit(t)
	const more = 10
	handles := make([]*session.Handle, session.MaxKills+more)
	for i := range handles {
		handles[i] = must[*session.Handle](t)(s.Call(ctx, "rank"))
	}
	kept := must[*session.Handle](t)(s.Call(ctx, "rank"))
	if err := s.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	s.Kill(handles...)
	if l := must[[]uint64](t)(s.Handles(ctx, 0)); len(l) != more+1 {
		t.Errorf("rank 0 has %d handles behind the next call, want %d", len(l), more+1)
	}
	if err := s.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	if l := must[[]uint64](t)(s.Handles(ctx, 0)); !slices.Equal(l, []uint64{kept.ID()}) {
		t.Errorf("rank 0 has %d handles, want that which was not killed, %d", len(l), kept.ID())
	}
	works(t, s, ended)
}

// TestNodeOfTheControllerEnds: a session without a call under way fails when the controller's node ends.
func TestNodeOfTheControllerEnds(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	serve(t, c, standard(t))
	s := open(t, c)
	c.Workers[0].Close()
	select {
	case <-s.Failed():
	case <-limit(t).Done():
		t.Fatal("the session has not failed")
	}
	vantest.Fails(t, s.Err(), van.ErrClosed, "worker 0")
}

// TestLostRank: the loss of a rank fails the session at once, and the others' Serve. A replacement process has no
// part in it, and a new session can be opened.
func TestLostRank(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 3
		c := testcluster.Start(t, o)
		hangs := func(rank int, r *session.Rank) {
			standard(t)(rank, r)
			register(t, r, "hang", func(ctx context.Context, _ []any) (any, error) {
				<-ctx.Done()
				return nil, context.Cause(ctx)
			})
		}
		ended := serve(t, c, hangs)
		s, ctx := open(t, c), limit(t)
		h := must[*session.Handle](t)(s.Call(ctx, "hang"))
		c.Servers[1].Close()
		vantest.Fails(t, h.Wait(ctx), van.ErrPeerLost, "server 1")
		<-s.Failed()
		_, err := s.Call(ctx, "rank")
		vantest.Fails(t, err, van.ErrPeerLost, "server 1")
		for r, err := range ended.all(t) {
			if err == nil || r != 1 && !strings.Contains(err.Error(), "server 1") {
				t.Errorf("Serve of rank %d: %v, want that the controller has given up because of server 1", r, err)
			}
		}
		s.Close()
		back := make(chan struct{}, 1)
		defer c.Workers[0].OnPeer(func(_ postoffice.NodeID, up bool, _ error) {
			if up {
				back <- struct{}{}
			}
		})()
		testcluster.Lost(t, c.Scheduler, van.ServerID(1))
		n, err := c.Join(ctx, "server", 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		<-back
		_, err = s.Call(ctx, "rank")
		vantest.Fails(t, err, van.ErrPeerLost, "server 1")
		c.Servers[1] = n
		ended = serve(t, c, hangs)
		s = open(t, c)
		h = must[*session.Handle](t)(s.Call(ctx, "rank"))
		if v := must[any](t)(s.Get(ctx, h, 1)); v != int64(1) {
			t.Errorf("the new rank 1 has %v", v)
		}
		if err := s.Shutdown(ctx); err != nil {
			t.Fatal(err)
		}
		ended.all(t)
	}, over...)
}

// TestServeEnds: Serve ends with the controller, its context, or its node, and when the controller closes. The
// controller gets an error if it did not request the end.
func TestServeEnds(t *testing.T) {
	for _, x := range []struct {
		name  string
		end   func(c *testcluster.Cluster, s *session.Session, cancel func())
		serve error
		text  string // a part of Serve's error
		heard string // a part of the controller's error
	}{
		{"controller lost", func(c *testcluster.Cluster, _ *session.Session, _ func()) { c.Workers[0].Close() }, van.ErrPeerLost, "worker 0", ""},
		{"closed", func(_ *testcluster.Cluster, s *session.Session, _ func()) { s.Close() }, nil, "the controller has ended the session", ""},
		{"context", func(_ *testcluster.Cluster, _ *session.Session, cancel func()) { cancel() }, context.Canceled, "", "rank 0 (server 0 (id 8)"},
		{"node", func(c *testcluster.Cluster, _ *session.Session, _ func()) { c.Servers[0].Close() }, van.ErrClosed, "", "server 0 (id 8)"},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := testcluster.Start(t, testcluster.Options{})
			r := must[*session.Rank](t)(session.NewRank(c.Servers[0], session.Options{}))
			running := make(chan struct{})
			register(t, r, "run", func(ctx context.Context, _ []any) (any, error) {
				close(running)
				<-ctx.Done()
				return nil, nil
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- r.Serve(ctx) }()
			s := open(t, c)
			h := must[*session.Handle](t)(s.Call(limit(t), "run"))
			<-running
			vantest.Fails(t, r.Register("late", func(context.Context, []any) (any, error) { return nil, nil }), van.ErrInvalid, "late", "serves already")
			x.end(c, s, cancel)
			err := ends{ended}.all(t)[0]
			if err == nil || x.serve != nil && !errors.Is(err, x.serve) || !strings.Contains(err.Error(), x.text) {
				t.Errorf("Serve: %v, want %v, %q", err, x.serve, x.text)
			}
			if err := h.Wait(limit(t)); err == nil || !strings.Contains(err.Error(), x.heard) {
				t.Errorf("the call: %v, want one that names %q", err, x.heard)
			}
		})
	}
}

// TestErrorsWaitedFor: Sync does not return an error that Wait has returned, also if there were more errors than
// Sync keeps.
func TestErrorsWaitedFor(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 1, Servers: 1, Over: testcluster.TCP})
	e := serve(t, c, func(_ int, r *session.Rank) {
		register(t, r, "fail", func(context.Context, []any) (any, error) { return nil, errors.New("as it must") })
		register(t, r, "nothing", func(context.Context, []any) (any, error) { return nil, nil })
	})
	s := open(t, c)
	var failed []*session.Handle
	for range 50 {
		failed = append(failed, must[*session.Handle](t)(s.Call(limit(t), "fail")))
	}
	if err := must[*session.Handle](t)(s.Call(limit(t), "nothing")).Wait(limit(t)); err != nil { // behind the others
		t.Fatal(err)
	}
	for _, h := range failed[1:] {
		if err := h.Wait(limit(t)); err == nil {
			t.Error("no error")
		}
	}
	err := s.Sync(limit(t))
	if err == nil || strings.Count(err.Error(), "as it must") != 1 || strings.Contains(err.Error(), "more errors") {
		t.Errorf("%v, want the one error that nobody has waited for", err)
	}
	if err := s.Shutdown(limit(t)); err != nil {
		t.Error(err)
	}
	e.all(t)
}

// TestCallsUnderWay: a call waits while 1000 others, or 64 MiB, are under way, until its context ends, and
// goes on when one of them has ended.
func TestCallsUnderWay(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	gate := make(chan struct{})
	ended := serve(t, c, func(rank int, r *session.Rank) {
		standard(t)(rank, r)
		register(t, r, "gate", func(ctx context.Context, _ []any) (any, error) {
			select {
			case <-gate:
			case <-ctx.Done():
			}
			return nil, nil
		})
	})
	s, ctx := open(t, c), limit(t)
	full := func(calls int, want string, args ...any) {
		t.Helper()
		vantest.Eventually(t, 20*time.Second, "no call is under way", func() bool { return s.Left() == "" }) // calls go a little later than they end
		for range calls {
			must[*session.Handle](t)(s.Call(ctx, "gate", args...))
		}
		short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		_, err := s.Call(short, "rank")
		vantest.Fails(t, err, van.ErrTimeout, want)
		next := make(chan error, 1)
		go func() {
			_, err := s.Call(ctx, "rank")
			next <- err
		}()
		gate <- struct{}{} // one call ends
		if err := <-next; err != nil {
			t.Error(err)
		}
		for range calls - 1 {
			gate <- struct{}{}
		}
		if err := s.Sync(ctx); err != nil {
			t.Fatal(err)
		}
	}
	full(1000, "1000 calls are under way")
	full(2, "2 calls are under way", make([]byte, 33<<20))
	works(t, s, ended)
}

// heard is a context that closes waits when its Done is first called.
type heard struct {
	context.Context
	once  *sync.Once
	waits chan struct{}
}

func (h heard) Done() <-chan struct{} {
	h.once.Do(func() { close(h.waits) })
	return h.Context.Done()
}

// TestWaitsForRoomAlone: a caller that waits until fewer calls are under way does not delay another one whose
// context ends earlier.
func TestWaitsForRoomAlone(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	gate := make(chan struct{})
	ended := serve(t, c, func(rank int, r *session.Rank) {
		standard(t)(rank, r)
		register(t, r, "gate", func(context.Context, []any) (any, error) { <-gate; return nil, nil })
	})
	s, ctx := open(t, c), limit(t)
	must[*session.Handle](t)(s.Call(ctx, "gate", make([]byte, 64<<20)))
	first := heard{ctx, new(sync.Once), make(chan struct{})}
	waited := make(chan error, 2)
	go func() {
		_, err := s.Call(first, "rank")
		waited <- err
	}()
	<-first.waits
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	late := make(chan error, 1)
	go func() {
		_, err := s.Call(short, "rank")
		late <- err
	}()
	select {
	case err := <-late:
		vantest.Fails(t, err, van.ErrTimeout, "1 calls are under way")
	case <-time.After(10 * time.Second):
		t.Error("a call waits for longer than its context lasts")
	}
	close(gate)
	if err := <-waited; err != nil {
		t.Error(err)
	}
	works(t, s, ended)
}

// TestGoexit: a function that ends its goroutine, as FailNow of a test does, ends the session with an error that
// says so, because no goroutine would carry out the later calls.
func TestGoexit(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	ended := serve(t, c, func(rank int, r *session.Rank) {
		standard(t)(rank, r)
		register(t, r, "exit on", func(_ context.Context, args []any) (any, error) {
			if args[0] == int64(rank) {
				runtime.Goexit()
			}
			return nil, nil
		})
	})
	s, ctx := open(t, c), limit(t)
	h := must[*session.Handle](t)(s.Call(ctx, "exit on", 1))
	vantest.Fails(t, h.Wait(ctx), van.ErrPeerLost, "rank 1", `call 1, "exit on"`, "Goexit")
	errs := ended.all(t)
	for rank, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "Goexit") {
			t.Errorf("rank %d: Serve returned %v, want why the session has ended", rank, err)
		}
	}
}

// fault is an error that cannot be asked what it says when it is nil.
type fault struct{ text string }

func (f *fault) Error() string { return f.text }

// badValue is a result that fails with such an error wherever it is asked.
type badValue struct{}

func (badValue) Value() (any, error) { return nil, (*fault)(nil) }
func (badValue) Close() error        { return (*fault)(nil) }

// TestNilFault: an error that is a nil pointer is an error of its call; asking it what it says would end the process.
func TestNilFault(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	ended := serve(t, c, func(rank int, r *session.Rank) {
		standard(t)(rank, r)
		register(t, r, "nil fault", func(context.Context, []any) (any, error) { return nil, (*fault)(nil) })
		register(t, r, "bad value", func(context.Context, []any) (any, error) { return badValue{}, nil })
	})
	s, ctx := open(t, c), limit(t)
	const says = "an error of type *session_test.fault, whose Error panics"
	failed := must[*session.Handle](t)(s.Call(ctx, "nil fault"))
	behind := must[*session.Handle](t)(s.Call(ctx, "same", failed))
	for _, h := range []*session.Handle{failed, behind} {
		var e *session.RankError
		if err := h.Wait(ctx); !errors.As(err, &e) || !strings.Contains(e.Text, says) {
			t.Errorf("got %v, want that it says %q", err, says)
		}
	}
	bad := must[*session.Handle](t)(s.Call(ctx, "bad value"))
	if _, err := s.CopyFrom(ctx, bad); err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("got %v, want that it says %q", err, says)
	}
	s.Kill(bad)
	works(t, s, ended)
}
