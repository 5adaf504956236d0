package af_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// refused makes calls until the server refuses one because it shuts down.
func refused(t *testing.T, w *af.Worker) {
	t.Helper()
	eventually(t, "the server refuses calls", func() bool {
		call, _ := ask(t, w, 1, "new")
		err := call.Wait(t.Context())
		if err != nil {
			vantest.Fails(t, err, postoffice.ErrFinished, "server 0 (id 8)", "shuts down")
		}
		return err != nil
	})
}

// TestShutdown: a server that shuts down answers the batches that have begun, one of which is still incomplete. It refuses all other
// batches at once. Shutdown returns when the last answer is sent.
func TestShutdown(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		batches := make(chan af.Batch, 2)
		s := serve(t, c.Servers[0], func(b af.Batch) {
			if string(b.Pushes()[0].Val.Bytes()) == "new" {
				echoes(t)(b)
				return
			}
			batches <- b
		})
		w, other := newWorker(t, c.Workers[0]), newWorker(t, c.Workers[1])
		call, _ := ask(t, w, 1, "slow")
		slow := <-batches
		app := (*cluster.Node)(c.Workers[0]).App()
		if err := app.Send(rawPush(1000, van.BatchStart, []byte("begun"))); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a batch has begun", func() bool { n, _ := af.OpenBatches(s, van.WorkerID(0)); return n == 1 })

		done := make(chan error, 2)
		for range 2 { // several goroutines may call Shutdown
			go func() { done <- s.Shutdown(t.Context()) }()
		}
		refused(t, other)
		refused(t, w)
		if err := app.Send(rawPush(1001, van.BatchEnd, []byte("end"))); err != nil {
			t.Fatal(err)
		}
		begun := <-batches
		if err := slow.Context().Err(); err != nil {
			t.Errorf("the context of a batch that is to be answered: %v", err)
		}
		if err := echo(slow); err != nil {
			t.Error(err)
		}
		if err := call.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		select {
		case err := <-done:
			t.Errorf("Shutdown has returned before the last answer: %v", err)
		default:
		}
		begun.Release()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		refused(t, w)
		if err := s.Shutdown(t.Context()); err != nil {
			t.Errorf("again: %v", err)
		}
		vantest.Fails(t, s.Handle(echoes(t)), van.ErrClosed, "shuts down")
		s.Close()
		serve(t, c.Servers[0], echoes(t)) // a new server replaces the closed one
		works(t, w, 1)
	}, all...)
}

// TestShutdownEnds: Shutdown waits for answers and for running handlers, until its context ends or the server is closed.
func TestShutdownEnds(t *testing.T) {
	enough := errors.New("enough")
	for name, test := range map[string]struct {
		answer  bool // the handler answers before it waits
		end     func(cancel context.CancelCauseFunc, s *af.Server, server *postoffice.Node)
		want    error
		waiting string
	}{
		"context":       {false, func(cancel context.CancelCauseFunc, _ *af.Server, _ *postoffice.Node) { cancel(enough) }, enough, "worker 0 (id 9) at "},
		"running":       {true, func(cancel context.CancelCauseFunc, _ *af.Server, _ *postoffice.Node) { cancel(enough) }, enough, "(running handlers: 1)"},
		"server closed": {false, func(_ context.CancelCauseFunc, s *af.Server, _ *postoffice.Node) { s.Close() }, van.ErrClosed, "(requests: 1)"},
		"node closed":   {false, func(_ context.CancelCauseFunc, _ *af.Server, n *postoffice.Node) { go n.Close() }, van.ErrClosed, "(requests: 1)"},
	} {
		t.Run(name, func(t *testing.T) {
			c := testcluster.Start(t, testcluster.Options{})
			batches, free := make(chan af.Batch, 1), make(chan struct{})
			s := serve(t, c.Servers[0], func(b af.Batch) {
				ctx := b.Context()
				if test.answer {
					echoes(t)(b)
				}
				batches <- b
				<-ctx.Done()
				if !test.answer && !errors.Is(context.Cause(ctx), test.want) {
					t.Errorf("the context of the batch: %v, want %v", context.Cause(ctx), test.want)
				}
				<-free
			})
			w := newWorker(t, c.Workers[0])
			call, _ := ask(t, w, 1, "slow")
			b := <-batches
			ctx, cancel := context.WithCancelCause(t.Context())
			done := make(chan error, 1)
			go func() { done <- s.Shutdown(ctx) }()
			test.end(cancel, s, c.Servers[0])
			vantest.Fails(t, <-done, test.want, "server 0 (id 8): shutdown", test.waiting)
			if test.want == enough && !test.answer {
				if err := echo(b); err != nil {
					t.Errorf("answer after Shutdown has ended: %v", err)
				}
			}
			close(free)
			if test.want == enough {
				if err := call.Wait(t.Context()); err != nil {
					t.Error(err)
				}
				if err := s.Shutdown(t.Context()); err != nil {
					t.Errorf("again: %v", err)
				}
			}
		})
	}
}

// TestShutdownBeforeHandle: a server without a handler refuses the requests that wait for a handler.
func TestShutdownBeforeHandle(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	s, err := af.NewServer(c.Servers[0], af.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w := newWorker(t, c.Workers[0])
	call, _ := ask(t, w, 1, "early")
	if err := s.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, call.Wait(t.Context()), postoffice.ErrFinished, "shuts down")
	refused(t, w)
}

// TestBatchContext: the context of a batch ends with the batch, its worker, its server, and for no other reason.
func TestBatchContext(t *testing.T) {
	for name, test := range map[string]struct {
		end  func(t *testing.T, c *testcluster.Cluster, s *af.Server, b af.Batch, call af.Call)
		want error
	}{
		"answered": {func(t *testing.T, _ *testcluster.Cluster, _ *af.Server, b af.Batch, _ af.Call) { echoes(t)(b) }, postoffice.ErrAnswered},
		"refused": {func(t *testing.T, _ *testcluster.Cluster, _ *af.Server, b af.Batch, _ af.Call) {
			if err := b.Refuse(errors.New("no")); err != nil {
				t.Error(err)
			}
		}, context.Canceled}, // caused by the refusal, or by a cancellation of the refused worker
		"released": {func(_ *testing.T, _ *testcluster.Cluster, _ *af.Server, b af.Batch, _ af.Call) { b.Release() }, context.Canceled},
		"canceled": {func(t *testing.T, _ *testcluster.Cluster, _ *af.Server, _ af.Batch, call af.Call) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			vantest.Fails(t, call.Wait(ctx), context.Canceled)
		}, context.Canceled},
		"worker lost":   {func(_ *testing.T, c *testcluster.Cluster, _ *af.Server, _ af.Batch, _ af.Call) { c.Workers[0].Close() }, van.ErrPeerLost},
		"server closed": {func(_ *testing.T, _ *testcluster.Cluster, s *af.Server, _ af.Batch, _ af.Call) { s.Close() }, van.ErrClosed},
		"node closed":   {func(_ *testing.T, c *testcluster.Cluster, _ *af.Server, _ af.Batch, _ af.Call) { c.Servers[0].Close() }, van.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
				o.Workers = 2
				c := testcluster.Start(t, o)
				batches := make(chan af.Batch, 2)
				s := serve(t, c.Servers[0], func(b af.Batch) { batches <- b })
				call, _ := ask(t, newWorker(t, c.Workers[0]), 1, "one")
				b := <-batches
				other, _ := ask(t, newWorker(t, c.Workers[1]), 1, "two")
				of2 := <-batches
				ctx, ctx2 := b.Context(), of2.Context()
				if ctx != b.Context() || ctx == ctx2 || ctx.Err() != nil {
					t.Fatal("a batch has one context of its own, which has not ended")
				}
				test.end(t, c, s, b, call)
				select {
				case <-ctx.Done():
				case <-time.After(20 * time.Second):
					t.Fatal("the context has not ended")
				}
				vantest.Fails(t, context.Cause(ctx), test.want)
				if b.Context().Err() == nil {
					t.Error("a batch whose context has ended has another one")
				}
				if !errors.Is(test.want, van.ErrClosed) {
					if err := ctx2.Err(); err != nil {
						t.Errorf("the context of another worker's batch: %v", err)
					}
					echoes(t)(of2)
					if err := other.Wait(t.Context()); err != nil {
						t.Error(err)
					}
				}
			}, testcluster.InProc, testcluster.TCP)
		})
	}
}

// TestBlockedHandler: the context of a batch ends when its worker cancels the call, also while the handler of the batch blocks
// and keeps later batches of that worker waiting.
func TestBlockedHandler(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		begun, causes := make(chan struct{}), make(chan error, 1)
		serve(t, c.Servers[0], func(b af.Batch) {
			close(begun)
			select {
			case <-b.Context().Done():
				causes <- context.Cause(b.Context())
			case <-time.After(20 * time.Second):
				causes <- nil
			}
		})
		call, _ := ask(t, newWorker(t, c.Workers[0]), 1, "one")
		<-begun
		canceled, cancel := context.WithCancel(t.Context())
		cancel()
		vantest.Fails(t, call.Wait(canceled), context.Canceled)
		vantest.Fails(t, <-causes, context.Canceled, "the sender has canceled the request")
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}
