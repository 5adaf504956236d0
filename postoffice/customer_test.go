package postoffice_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// request is a Request whose answers nobody looks at.
type request struct {
	postoffice.Request
	finished, recycled chan error
}

func newRequest() *request {
	return &request{finished: make(chan error, 1), recycled: make(chan error, 1)}
}

func (r *request) Answer(int, int, *van.Message) error { return nil }
func (r *request) Finished(err error)                  { r.finished <- err }
func (r *request) Recycle()                            { r.recycled <- nil }

// customer makes a customer on the first worker of c.
func customer(t testing.TB, c *testcluster.Cluster) *postoffice.Customer {
	t.Helper()
	x, err := c.Workers[0].App().AddCustomer(5, 0, func(*van.Message) {})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// TestTimestampsWrap: after the largest timestamp come the small ones, and those
// of one request stay together.
func TestTimestampsWrap(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	x.SetNext(math.MaxInt32 - 5)
	var firsts []int32
	for range 4 {
		r := newRequest()
		if err := x.Open(&r.Request, "test", r, 3, nil); err != nil {
			t.Fatal(err)
		}
		firsts = append(firsts, r.First())
		if err := x.Wait(t.Context(), r.First(), time.Second); err != nil {
			t.Fatal(err)
		}
	}
	if want := []int32{math.MaxInt32 - 5, 0, 3, 6}; [4]int32(firsts) != [4]int32(want) {
		t.Errorf("first timestamps are %v, want %v", firsts, want)
	}
}

// TestTwoWaits: of two who wait for one request at once one is refused, and the other one gets its result.
func TestTwoWaits(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	r := newRequest()
	if err := x.Open(&r.Request, "test", r, 1, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	results := make(chan error, 2)
	for range cap(results) {
		go func() { results <- x.Wait(t.Context(), r.First(), 20*time.Second) }()
	}
	vantest.Fails(t, <-results, postoffice.ErrOtherWaits, "another goroutine waits for it already")
	x.Abort(&r.Request, van.ErrQueueFull)
	vantest.Fails(t, <-results, van.ErrQueueFull)
}

// TestTimestampsInFlight: 4,194,304 timestamps may be in flight, one more is refused until some have ended.
func TestTimestampsInFlight(t *testing.T) {
	const most = 1 << 22
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	open := func(n int) (*request, error) {
		r := newRequest()
		return r, x.Open(&r.Request, "test", r, n, []int{van.ServerID(0)})
	}
	all, err := open(most)
	if err != nil {
		t.Fatal(err)
	}
	_, err = open(1)
	vantest.Fails(t, err, van.ErrQueueFull, "4194304 timestamps in flight", "want at most 4194304")
	x.Abort(&all.Request, van.ErrClosed)
	vantest.Fails(t, x.Wait(t.Context(), all.First(), 20*time.Second), van.ErrClosed)
	if _, err := open(1); err != nil {
		t.Error(err)
	}
}

// TestCustomerOfANodeThatHasLeft: a node that has left takes no customers.
func TestCustomerOfANodeThatHasLeft(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	c.Finalize(t)
	for _, n := range append(c.Workers, c.Servers...) {
		_, err := n.App().AddCustomer(5, 0, func(*van.Message) {})
		vantest.Fails(t, err, van.ErrClosed, "add customer")
	}
}

// TestOneRequestWithoutAnswer: a request that is never answered, and that nobody
// waits for, does not keep the others from going on for ever.
func TestOneRequestWithoutAnswer(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	x.SetNext(0) // the first timestamp is at random
	stuck := newRequest()
	if err := x.Open(&stuck.Request, "test", stuck, 2, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	r := newRequest()
	for next := 1023; next > 0 && next < math.MaxInt32; next = 2*next + 1 { // each meets the place of the stuck one
		x.SetNext(int32(next))
		if err := x.Open(&r.Request, "test", r, 3, nil); err != nil {
			t.Fatalf("from timestamp %d: %v", next, err)
		}
		ts := r.First()
		if _, _, ok, _ := x.Batch(ts + 2); !ok {
			t.Errorf("timestamp %d is not in flight", ts+2)
		}
		if err := x.Wait(t.Context(), ts, time.Second); err != nil {
			t.Fatal(err)
		}
		<-r.finished
		<-r.recycled
	}
	if n := x.Places(); n > 4096 {
		t.Errorf("the table has %d places for 2 timestamps in flight", n)
	}
	if h, answered, ok, err := x.Batch(stuck.First() + 1); h != stuck.First() || answered || !ok || err != nil {
		t.Errorf("the stuck request is %d, answered %t, in flight %t, %v", h, answered, ok, err)
	}
}

// TestLimitCountsFromTheBegin: the limit of a request is not that of each wait for it.
func TestLimitCountsFromTheBegin(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	r := newRequest()
	if err := x.Open(&r.Request, "test", r, 1, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	r.Age(time.Hour)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := x.Wait(ctx, r.First(), 30*time.Minute); !errors.Is(err, van.ErrTimeout) || ctx.Err() != nil {
		t.Errorf("a wait with a limit that has passed: %v (%v)", err, ctx.Err())
	}
}

// TestSlicesOfASpinningWait: a wait in slices ends with its slice, also when waits
// spin for ever.
func TestSlicesOfASpinningWait(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Set: func(c *postoffice.Config) { c.BusyPoll = env.SpinForever }}))
	r := newRequest()
	if err := x.Open(&r.Request, "test", r, 1, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	begun := time.Now()
	if err := x.WaitSlice(ctx, r.First(), 0, 10*time.Millisecond); !errors.Is(err, postoffice.ErrPending) {
		t.Errorf("a wait for 10 ms ends with %v, want %v", err, postoffice.ErrPending)
	}
	if d := time.Since(begun); d > 5*time.Second {
		t.Errorf("a wait for 10 ms takes %s", d)
	}
}

// TestCloseEndsFinalize: Close does not wait for a Finalize that waits for others.
func TestCloseEndsFinalize(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	done := make(chan error, 1)
	began := make(chan struct{})
	go func() {
		close(began)
		done <- c.Servers[0].Finalize(context.Background())
	}()
	<-began
	c.Servers[0].Close()
	select {
	case err := <-done:
		if err != nil && !errors.Is(err, van.ErrClosed) { // nil when Close came first
			t.Errorf("Finalize ends with %v, want %v", err, van.ErrClosed)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Finalize still waits")
	}
}
