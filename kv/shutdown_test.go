package kv_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// TestShutdown: a server that shuts down answers the requests that it has accepted, and refuses all others at once: pushes, pulls, and
// requests of its SimpleApp. Shutdown does not wait for requests that their worker has canceled.
func TestShutdown(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		slow := make(chan kv.Request[float32], 2)
		s := serve(t, c.Servers[0], func(r kv.Request[float32]) {
			if r.Cmd > 0 {
				slow <- r
			} else if err := r.Respond(kv.Pairs[float32]{}); err != nil {
				t.Error(err)
			}
		})
		simple := make(chan kv.SimpleMessage, 1)
		s.SimpleApp().Handle(func(m kv.SimpleMessage) { simple <- m })
		w, other := newWorker[float32](t, c.Workers[0]), newWorker[float32](t, c.Workers[1])
		push := func(w *kv.Worker[float32], cmd kv.Cmd) kv.Call {
			call, err := w.Push([]kv.Key{1}, []float32{1}, cmd)
			if err != nil {
				t.Fatal(err)
			}
			return call
		}
		call := push(w, 1)
		r := <-slow
		canceled, cancel := context.WithCancel(t.Context())
		gone := push(other, 1)
		unwanted := <-slow
		cancel()
		vantest.Fails(t, gone.Wait(canceled), context.Canceled)
		<-unwanted.Context().Done() // this request gets no answer
		asked, err := other.SimpleApp().Request(5, nil, postoffice.ServerID(0))
		if err != nil {
			t.Fatal(err)
		}
		m := <-simple

		done := make(chan error, 1)
		go func() { done <- s.Shutdown(t.Context()) }()
		eventually(t, "the server refuses pushes", func() bool {
			err := push(other, 0).Wait(t.Context())
			if err != nil {
				fails(t, err, postoffice.ErrFinished, "server 0 (id 8)", "shuts down")
			}
			return err != nil
		})
		var vals []float32
		pull, err := w.Pull([]kv.Key{1}, &vals)
		if err != nil {
			t.Fatal(err)
		}
		fails(t, pull.Wait(t.Context()), postoffice.ErrFinished)
		again, err := other.SimpleApp().Request(6, nil, postoffice.ServerID(0))
		if err != nil {
			t.Fatal(err)
		}
		fails(t, again.Wait(t.Context()), postoffice.ErrFinished)

		if err := errors.Join(r.Context().Err(), m.Context().Err()); err != nil {
			t.Errorf("the contexts of requests that are to be answered: %v", err)
		}
		if err := r.Respond(kv.Pairs[float32]{}); err != nil {
			t.Error(err)
		}
		select {
		case err := <-done:
			t.Errorf("Shutdown has returned before the last answer: %v", err)
		default:
		}
		if err := m.Respond(nil); err != nil {
			t.Error(err)
		}
		for _, x := range []kv.Call{call, asked} {
			if err := x.Wait(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		fails(t, s.Handle(func(kv.Request[float32]) {}), van.ErrClosed)
	})
}

// TestShutdownEnds: when its context ends, Shutdown names the workers that wait, and the contexts of their requests end. The
// requests can still be answered.
func TestShutdownEnds(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	slow := make(chan kv.Request[float32])
	s := serve(t, c.Servers[0], func(r kv.Request[float32]) { slow <- r })
	w := newWorker[float32](t, c.Workers[0])
	call, err := w.Push([]kv.Key{1}, []float32{1})
	if err != nil {
		t.Fatal(err)
	}
	r := <-slow
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err = s.Shutdown(ctx)
	fails(t, err, postoffice.ErrTimeout, "server 0 (id 8): shutdown", "worker 0 (id 9)", "requests: 1")
	fails(t, err, context.DeadlineExceeded)
	fails(t, context.Cause(r.Context()), context.DeadlineExceeded) // this context is created after Shutdown has ended
	if err := r.Respond(kv.Pairs[float32]{}); err != nil {
		t.Error(err)
	}
	if err := errors.Join(call.Wait(t.Context()), s.Shutdown(t.Context())); err != nil {
		t.Error(err)
	}

	early, err := kv.NewServer[float32](c.Servers[0], kv.ServerOptions{AppID: 5})
	if err != nil {
		t.Fatal(err)
	}
	five, err := kv.NewWorker[float32](c.Workers[0], kv.WorkerOptions{AppID: 5})
	if err != nil {
		t.Fatal(err)
	}
	if call, err = five.Push([]kv.Key{1}, []float32{1}); err != nil {
		t.Fatal(err)
	}
	if err := early.Shutdown(t.Context()); err != nil {
		t.Errorf("a server without a handler: %v", err)
	}
	fails(t, call.Wait(t.Context()), postoffice.ErrFinished)
}

// TestRequestContext: the context of a request ends with the request, its worker, its server, and for no other reason.
func TestRequestContext(t *testing.T) {
	for name, test := range map[string]struct {
		end  func(t *testing.T, c *testcluster.Cluster, s *kv.Server[float32], r kv.Request[float32], m kv.SimpleMessage)
		want error
	}{
		"answered": {func(t *testing.T, _ *testcluster.Cluster, _ *kv.Server[float32], r kv.Request[float32], m kv.SimpleMessage) {
			if err := errors.Join(r.Respond(kv.Pairs[float32]{}), m.Respond(nil)); err != nil {
				t.Error(err)
			}
		}, postoffice.ErrAnswered},
		"refused": {func(t *testing.T, _ *testcluster.Cluster, _ *kv.Server[float32], r kv.Request[float32], m kv.SimpleMessage) {
			if err := errors.Join(r.Refuse(errors.New("no")), m.Refuse(errors.New("no"))); err != nil {
				t.Error(err)
			}
		}, context.Canceled}, // caused by the refusal, or by a cancellation of the refused worker
		"worker lost": {func(_ *testing.T, c *testcluster.Cluster, _ *kv.Server[float32], _ kv.Request[float32], _ kv.SimpleMessage) {
			c.Workers[0].Close()
		}, van.ErrPeerLost},
		"server closed": {func(_ *testing.T, _ *testcluster.Cluster, s *kv.Server[float32], _ kv.Request[float32], _ kv.SimpleMessage) {
			s.Close()
		}, van.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP})
			requests, simple := make(chan kv.Request[float32], 1), make(chan kv.SimpleMessage, 1)
			s := serve(t, c.Servers[0], func(r kv.Request[float32]) { requests <- r })
			s.SimpleApp().Handle(func(m kv.SimpleMessage) { simple <- m })
			w := newWorker[float32](t, c.Workers[0])
			if _, err := w.Push([]kv.Key{1}, []float32{1}); err != nil {
				t.Fatal(err)
			}
			if _, err := s.SimpleApp().Request(0, nil, postoffice.ServerID(0)); err != nil { // the server sends a request to itself
				t.Fatal(err)
			}
			own := <-simple
			if err := errors.Join(own.Context().Err(), own.Respond(nil)); err != nil {
				t.Fatal(err)
			}
			if _, err := w.SimpleApp().Request(1, nil, postoffice.ServerGroup); err != nil {
				t.Fatal(err)
			}
			r, m := <-requests, <-simple
			all := []context.Context{r.Context(), m.Context()}
			for _, ctx := range all {
				if err := ctx.Err(); err != nil {
					t.Fatal(err)
				}
			}
			test.end(t, c, s, r, m)
			for _, ctx := range all {
				select {
				case <-ctx.Done():
				case <-time.After(20 * time.Second):
					t.Fatal("the context has not ended")
				}
				fails(t, context.Cause(ctx), test.want)
			}
		})
	}
	if (kv.SimpleMessage{}).Context().Err() == nil {
		t.Error("the context of no message has not ended")
	}
}
