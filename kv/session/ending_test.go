package session_test

// The end of Serve when no worker can open another session.

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// replaced sets STEPAF_REPLACE_TIMEOUT.
func replaced(after time.Duration) func(*postoffice.Config) {
	return func(c *postoffice.Config) { c.ReplaceTimeout = after }
}

// finalizes calls Finalize of a node, which must succeed.
func finalizes(t *testing.T, nodes ...*postoffice.Node) {
	t.Helper()
	results := make(chan error, len(nodes))
	for _, n := range nodes {
		go func() { results <- n.Shutdown(limit(t)) }()
	}
	for range nodes {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

// TestServeWithoutWorkers: Serve without a session ends when the workers are lost and not replaced.
func TestServeWithoutWorkers(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Servers: 2, Set: replaced(200 * time.Millisecond)})
	ended := serve(t, c, standard(t))
	c.Workers[0].Close()
	select {
	case err := <-ended[0]:
		t.Fatalf("Serve has ended while a worker lived: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	c.Workers[1].Close()
	for rank, err := range ended.all(t) {
		if !errors.Is(err, van.ErrPeerLost) || errors.Is(err, van.ErrFinished) {
			t.Errorf("rank %d: %v, want an error that wraps van.ErrPeerLost", rank, err)
		}
	}
}

// TestLossOfAReturnedWorker: a worker that has returned and is lost again has all of STEPAF_REPLACE_TIMEOUT from its second loss.
func TestLossOfAReturnedWorker(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 1, Servers: 1, Set: replaced(time.Minute)})
	id := c.Workers[0].ID()
	lost := map[int]time.Time{int(id): time.Now().Add(-time.Hour)} // its first loss
	if again, err := session.Nobody(c.Servers[0], lost); again != time.Hour || err != nil {
		t.Errorf("with a worker: %s, %v; want %s, nil", again, err, time.Hour)
	}
	c.Workers[0].Close()
	vantest.Eventually(t, 30*time.Second, "the worker is lost", func() bool { return slices.Contains(testcluster.Dead(c.Servers[0]), id) })
	if again, err := session.Nobody(c.Servers[0], lost); again <= 0 || again > time.Minute || err != nil {
		t.Errorf("after its second loss: %s, %v; want at most %s, nil", again, err, time.Minute)
	}
}

// TestServeEndsWithTheWorkers: Serve without a session ends when the programs of all workers have ended.
func TestServeEndsWithTheWorkers(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 3, Servers: 2, Set: replaced(100 * time.Millisecond)})
	ended := serve(t, c, standard(t))
	c.Workers[2].Close() // and is not replaced
	left := make(chan error, 2)
	go func() { left <- testcluster.StopBarrier(limit(t), c.Workers[0]) }()
	go func() { left <- testcluster.StopBarrier(limit(t), c.Workers[1]) }()
	for rank, err := range ended.all(t) {
		if !errors.Is(err, van.ErrFinished) {
			t.Errorf("rank %d: %v, want an error that wraps van.ErrFinished", rank, err)
		}
	}
}

// TestServeEndsWithTheController: when the program of a controller ends, its session is shut down after its pending calls have
// finished.
func TestServeEndsWithTheController(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	begun, end := make(chan struct{}, 2), make(chan struct{})
	ended := serve(t, c, func(_ int, r *session.Rank) {
		register(t, r, "slow", func(context.Context, []any) (any, error) {
			begun <- struct{}{}
			<-end
			return nil, nil
		})
	})
	must[*session.Handle](t)(open(t, c).Call(limit(t), "slow"))
	<-begun
	<-begun
	left := make(chan error, 1)
	go func() { left <- c.Workers[0].Shutdown(limit(t)) }()
	select {
	case err := <-ended[0]:
		t.Fatalf("Serve has ended before the call: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	close(end)
	for rank, err := range ended.all(t) {
		if err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	finalizes(t, c.Servers[0], c.Servers[1], c.Scheduler)
	if err := <-left; err != nil {
		t.Error(err)
	}
}

// slowCloser is a result whose Close waits.
type slowCloser struct{ begun, end chan struct{} }

func (c slowCloser) Close() error {
	close(c.begun)
	<-c.end
	return nil
}

// TestShutdownClosesResults: Shutdown and Serve return after the results of the session were closed.
func TestShutdownClosesResults(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	x := slowCloser{make(chan struct{}), make(chan struct{})}
	ended := serve(t, c, func(_ int, r *session.Rank) {
		register(t, r, "slow", func(context.Context, []any) (any, error) { return x, nil })
	})
	s := open(t, c)
	must[*session.Handle](t)(s.Call(limit(t), "slow"))
	shut := make(chan error, 1)
	go func() { shut <- s.Shutdown(limit(t)) }()
	<-x.begun
	select {
	case err := <-shut:
		t.Fatalf("Shutdown has returned before the result was closed: %v", err)
	case err := <-ended[0]:
		t.Fatalf("Serve has returned before the result was closed: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	close(x.end)
	if err := ended.all(t)[0]; err != nil {
		t.Error(err)
	}
	if err := <-shut; err != nil {
		t.Error(err)
	}
}

// TestOpenAfterTheEnd: Open fails at once when a rank's program has ended, and says so.
func TestOpenAfterTheEnd(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	rankOf(t, c, 0)
	stops, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- testcluster.StopBarrier(stops, c.Servers[1]) }()
	_, err := session.Open(limit(t), c.Workers[0], session.Options{})
	if !errors.Is(err, van.ErrFinished) {
		t.Errorf("Open: %v, want an error that wraps van.ErrFinished", err)
	}
	cancel()
	<-stopped
	rankOf(t, c, 1) // the program of this rank continues
	open(t, c).Close()
}
