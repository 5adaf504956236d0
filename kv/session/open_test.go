package session_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// TestOpen refuses invalid arguments, and its error names the ranks that do not serve.
func TestOpen(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2, Workers: 2})
	_, err := session.Open(t.Context(), c.Servers[0], session.Options{})
	vantest.Fails(t, err, van.ErrInvalid, "worker")
	_, err = session.Open(t.Context(), c.Workers[0], session.Options{ID: 256})
	vantest.Fails(t, err, van.ErrInvalid, "256")
	_, err = session.NewRank(c.Workers[0], session.Options{})
	vantest.Fails(t, err, van.ErrInvalid, "ranks are servers")
	r := must[*session.Rank](t)(session.NewRank(c.Servers[0], session.Options{}))
	register(t, r, "f", func(context.Context, []any) (any, error) { return nil, nil })
	vantest.Fails(t, r.Register("f", func(context.Context, []any) (any, error) { return nil, nil }), van.ErrInvalid, `"f"`)
	vantest.Fails(t, r.Register("g", nil), van.ErrInvalid, `"g"`)
	first := make(chan error, 1)
	go func() { first <- r.Serve(context.Background()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = session.Open(ctx, c.Workers[0], session.Options{})
	vantest.Fails(t, err, van.ErrTimeout, "rank 1 (server 1")
	ended := ends{first, rankOf(t, c, 1)}
	s := open(t, c) // rank 0 still serves
	_, err = session.Open(limit(t), c.Workers[1], session.Options{})
	vantest.Fails(t, err, session.ErrRefused, "another session", "worker 0")
	if err := s.Shutdown(limit(t)); err != nil {
		t.Errorf("the session that was there: %v", err)
	}
	for rank, err := range ended.all(t) {
		if err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}

// TestOpenFails: after a failed Open, ranks serve the next one. This includes ranks that start while the first
// Open is being canceled.
func TestOpenFails(t *testing.T) {
	for range 8 {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			c := testcluster.Start(t, testcluster.Options{Servers: 2, Workers: 2})
			for i := range 4 {
				ended := ends{rankOf(t, c, 0)}
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
				_, err := session.Open(ctx, c.Workers[0], session.Options{})
				cancel()
				vantest.Fails(t, err, van.ErrTimeout, "rank 1 (server 1")
				ended = append(ended, rankOf(t, c, 1))
				s, err := session.Open(limit(t), c.Workers[i%2], session.Options{})
				if err != nil {
					t.Fatal(err)
				}
				works(t, s, ended)
			}
		})
	}
}

// TestOpenAtOnce: ranks that serve again take part in the next session, however soon it is opened.
func TestOpenAtOnce(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 1, Servers: 2, Over: testcluster.TCP})
	ctx, stop := context.WithCancel(t.Context())
	var served sync.WaitGroup
	for _, n := range c.Servers {
		r := must[*session.Rank](t)(session.NewRank(n, session.Options{}))
		register(t, r, "nothing", func(context.Context, []any) (any, error) { return nil, nil })
		served.Go(func() {
			for ctx.Err() == nil {
				_ = r.Serve(ctx)
			}
		})
	}
	for i := range 60 {
		s := open(t, c)
		h := must[*session.Handle](t)(s.Call(limit(t), "nothing"))
		if err := h.Wait(limit(t)); err != nil {
			t.Fatalf("session %d: %v", i, err)
		}
		if i%2 == 0 {
			if err := s.Shutdown(limit(t)); err != nil {
				t.Fatal(err)
			}
		}
		s.Close()
	}
	stop()
	served.Wait()
}
