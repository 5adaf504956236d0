package cluster_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// over reports whether the channel is closed.
func over(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestDone: the channel of a call is closed by its last answer, or its failure, and stays closed after Wait and when the request
// is used again for another call, whose channel is another one.
func TestDone(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	x := customer(t, c)
	r := newRequest()
	open := func() {
		t.Helper()
		if err := x.Open(&r.Request, "test", r, 1, []int{van.ServerID(0)}); err != nil {
			t.Fatal(err)
		}
	}
	open()
	first := r.Call(time.Minute)
	done := first.Done()
	if over(done) || done != first.Done() {
		t.Error("before the answer: the channel is closed, or another one")
	}
	if err := x.Answer(van.ServerID(0), first.Timestamp()); err != nil {
		t.Fatal(err)
	}
	if !over(done) || !over(first.Done()) {
		t.Error("after the answer: the channel is open")
	}
	if err := first.Wait(t.Context()); err != nil || !over(first.Done()) {
		t.Errorf("after Wait: %v, closed %t; want nil, true", err, over(first.Done()))
	}
	<-r.finished
	<-r.recycled
	open()
	second := r.Call(time.Minute)
	if next := second.Done(); over(next) || !over(first.Done()) {
		t.Errorf("of a second call: closed %t, the first one's: closed %t; want false, true", over(next), over(first.Done()))
	}
	failed := second.Done()
	x.Abort(&r.Request, van.ErrInvalid)
	<-failed
	if err := second.Wait(t.Context()); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("got %v, want ErrInvalid", err)
	}
}

// TestExpire: requests without a Wait end at their limit, and the error names the peer that has not answered. A Wait has its own limit.
func TestExpire(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	x := customer(t, c)
	open := func() *request { return opened(t, x) }
	waits, answered, none := open(), open(), open()
	waited := make(chan error, 1)
	go func() { waited <- x.Wait(t.Context(), waits.First(), 20*time.Second) }()
	vantest.Eventually(t, 20*time.Second, "a call waits", waits.Waiting)
	waits.Expire(time.Millisecond)
	answered.Expire(time.Hour)
	none.Expire(-1)
	if err := x.Answer(van.ServerID(0), answered.First()); err != nil {
		t.Fatal(err)
	}
	if err := <-answered.finished; err != nil {
		t.Error(err)
	}
	for _, how := range []string{"Expire", "Done", "WaitSlice"} {
		r := open()
		switch how {
		case "Expire":
			r.Expire(20 * time.Millisecond)
		case "Done":
			<-r.Call(20 * time.Millisecond).Done()
		case "WaitSlice": // a wait that ends before the request
			slice := make(chan error, 1)
			go func() { slice <- x.WaitSlice(t.Context(), r.First(), 0, 50*time.Millisecond) }()
			vantest.Eventually(t, 20*time.Second, "the slice begins", func() bool { return r.Waiting() || len(slice) > 0 })
			r.Expire(20 * time.Millisecond)
			if err := <-slice; err != cluster.ErrPending {
				t.Errorf("WaitSlice: %v, want %v", err, cluster.ErrPending)
			}
		}
		vantest.Fails(t, <-r.finished, van.ErrTimeout, "handler", "no answer from server 0 (id 8)", "limit 20ms")
		vantest.Fails(t, x.Wait(t.Context(), r.First(), 0), van.ErrTimeout)
	}
	if !waits.Pending() || !none.Pending() {
		t.Errorf("in flight: %t with a Wait, %t without a limit, want true", waits.Pending(), none.Pending())
	}
	x.Abort(&waits.Request, van.ErrInvalid)
	vantest.Fails(t, <-waited, van.ErrInvalid)
	x.Close()
	vantest.Fails(t, <-none.finished, van.ErrClosed)
}
