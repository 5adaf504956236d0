package core

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// TestExchange: rounds of all rows and of some, waits in slices, and what is not waited for.
func TestExchange(t *testing.T) {
	worker, server := sessions(t)
	in, out := []byte{1, 2, 3}, make([]byte, 3)
	push, pull := []af.KeyTensor{{Key: 1, Val: tensor(t, in)}}, []af.KeyTensor{{Key: 1, Val: tensor(t, out)}}
	_, err := server.Prepare(nil, push, pull)
	vantest.Fails(t, err, ErrMisuse, "prepare", "only a worker")
	_, err = worker.Prepare([]int{1}, push, pull)
	vantest.Fails(t, err, van.ErrInvalid, "there is no server 1")
	x, err := worker.Prepare([]int{0}, push, pull)
	if err != nil {
		t.Fatal(err)
	}
	next := func() Item {
		t.Helper()
		items, err := server.GetBatch(nil, 20*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		return items[0]
	}
	answer := func(it Item) {
		t.Helper()
		if err := server.Respond(af.DefaultStream, it.ID, it.Pushes()); err != nil {
			t.Error(err)
		}
		it.Release()
	}
	vantest.Fails(t, x.Wait(time.Second, time.Second), ErrMisuse, "not started")
	for _, rows := range []int{AllRows, 2, 0} {
		clear(out)
		if _, err := x.Start(af.DefaultStream, rows); err != nil {
			t.Fatal(err)
		}
		if err := x.Wait(20*time.Second, time.Millisecond); err != ErrPending {
			t.Errorf("before the answer: %v", err)
		}
		_, err = x.Start(af.DefaultStream, AllRows)
		vantest.Fails(t, err, af.ErrStarted)
		answer(next())
		for err = ErrPending; err == ErrPending; {
			err = x.Wait(20*time.Second, 10*time.Millisecond)
		}
		want := []byte{1, 2, 3}
		if rows >= 0 {
			clear(want[rows:])
		}
		if err != nil || !bytes.Equal(out, want) {
			t.Errorf("%d rows: %v, %v", rows, out, err)
		}
		vantest.Fails(t, x.Wait(time.Second, time.Second), ErrMisuse, "not started")
	}
	if _, err := x.Start(af.DefaultStream, AllRows); err != nil {
		t.Fatal(err)
	}
	late := next()
	vantest.Fails(t, x.Wait(time.Millisecond, time.Second), van.ErrTimeout, "server 0")
	answer(late)
	h, err := x.Start(af.DefaultStream, AllRows) // also after an error
	if err != nil {
		t.Fatal(err)
	}
	x.Close()
	answer(next())
	if err := worker.waitFor(h); err != nil {
		t.Error(err)
	}
	if err := x.Wait(time.Second, time.Second); !errors.Is(err, postoffice.ErrUnknownHandler) {
		t.Errorf("after a wait by the handler: %v", err)
	}
	_, err = x.Start(af.DefaultStream, AllRows)
	vantest.Fails(t, err, van.ErrClosed)
}

// TestExchangeServers: servers are named in any order, in which their pulls are.
func TestExchangeServers(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	for s, n := range c.Servers {
		x, err := af.NewServer(n, af.ServerOptions{})
		if err == nil {
			err = x.Handle(func(b af.Batch) { _ = b.Respond([]af.KeyTensor{{Val: tensor(t, []byte{byte(s + 1)})}}) })
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	w, err := af.NewWorker(c.Workers[0], af.WorkerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	worker := &Session{node: c.Workers[0], worker: w}
	out := [2][]byte{{0}, {0}}
	x, err := worker.Prepare([]int{1, 0}, nil, []af.KeyTensor{{Key: 1, Val: tensor(t, out[0])}, {Key: 1, Val: tensor(t, out[1])}})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if _, err = x.Start(af.DefaultStream, AllRows); err == nil {
		err = x.Wait(20*time.Second, 20*time.Second)
	}
	if err != nil || out[0][0] != 2 || out[1][0] != 1 {
		t.Errorf("%v, %v", out, err)
	}
}

// TestTwoWait: of two that wait for one handler, or for one exchange, at once one is told
// so; neither returns before the answer has come, and the exchange can be started again.
func TestTwoWait(t *testing.T) {
	worker, server := sessions(t)
	in, out := []byte{1, 2, 3}, make([]byte, 3)
	push, pull := []af.KeyTensor{{Key: 1, Val: tensor(t, in)}}, []af.KeyTensor{{Key: 1, Val: tensor(t, out)}}
	x, err := worker.Prepare(nil, push, pull)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	for _, c := range []struct {
		name  string
		begin func() (wait func(slice time.Duration) error, err error)
	}{
		{"push_pull", func() (func(time.Duration) error, error) {
			h, err := worker.PushPull(af.DefaultStream, push, pull)
			return func(slice time.Duration) error { return worker.Wait(int64(h), 20*time.Second, slice) }, err
		}},
		{"exchange", func() (func(time.Duration) error, error) {
			_, err := x.Start(af.DefaultStream, AllRows)
			return func(slice time.Duration) error { return x.Wait(20*time.Second, slice) }, err
		}},
	} {
		for range 3 {
			clear(out)
			wait, err := c.begin()
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			results := make(chan error, 2)
			for range cap(results) {
				go func() { results <- wait(20 * time.Second) }()
			}
			vantest.Fails(t, <-results, postoffice.ErrOtherWaits, "another goroutine waits for it already")
			items, err := server.GetBatch(nil, 20*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if err := server.Respond(af.DefaultStream, items[0].ID, items[0].Pushes()); err != nil {
				t.Error(err)
			}
			items[0].Release()
			if err := <-results; err != nil || !bytes.Equal(out, in) {
				t.Errorf("%s: %v, got %v, want %v", c.name, err, out, in)
			}
		}
	}
}
