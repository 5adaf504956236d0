package cluster_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testcluster"
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
