package core

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestExchange: rounds of all rows and of some rows, waits in slices, and rounds that no caller waits for.
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
	vantest.Fails(t, x.Wait(af.Complete, time.Second, time.Second), ErrMisuse, "not started")
	for _, rows := range []int{AllRows, 2, 0} {
		clear(out)
		if _, err := x.Start(af.Complete, true, rows); err != nil {
			t.Fatal(err)
		}
		if err := x.Wait(af.Complete, 20*time.Second, time.Millisecond); err != ErrPending {
			t.Errorf("before the answer: %v", err)
		}
		_, err = x.Start(af.Complete, true, AllRows)
		vantest.Fails(t, err, af.ErrStarted)
		answer(next())
		for err = ErrPending; err == ErrPending; {
			err = x.Wait(af.Complete, 20*time.Second, 10*time.Millisecond)
		}
		want := []byte{1, 2, 3}
		if rows >= 0 {
			clear(want[rows:])
		}
		if err != nil || !bytes.Equal(out, want) {
			t.Errorf("%d rows: %v, %v", rows, out, err)
		}
		vantest.Fails(t, x.Wait(af.Complete, time.Second, time.Second), ErrMisuse, "not started")
	}
	for _, limit := range []time.Duration{time.Millisecond, 0} {
		if _, err := x.Start(af.Complete, true, AllRows); err != nil {
			t.Fatal(err)
		}
		late := next()
		vantest.Fails(t, x.Wait(af.Complete, limit, time.Second), van.ErrTimeout, "server 0")
		answer(late)
	}
	h, err := x.Start(af.Complete, true, AllRows) // also after an error
	if err != nil {
		t.Fatal(err)
	}
	x.Close()
	answer(next())
	if err := worker.waitFor(h); err != nil {
		t.Error(err)
	}
	if err := x.Wait(af.Complete, time.Second, time.Second); !errors.Is(err, postoffice.ErrUnknownHandler) {
		t.Errorf("after a wait by the handler: %v", err)
	}
	_, err = x.Start(af.Complete, true, AllRows)
	vantest.Fails(t, err, van.ErrClosed)
}

// TestExchangeServers: servers are named in any order, and the pulls are in that order.
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
	if _, err = x.Start(af.Complete, true, AllRows); err == nil {
		err = x.Wait(af.Complete, 20*time.Second, 20*time.Second)
	}
	if err != nil || out[0][0] != 2 || out[1][0] != 1 {
		t.Errorf("%v, %v", out, err)
	}
}

// TestTwoWait: if two callers wait for one handler, or for one exchange, one of them gets an error. Neither returns
// before the answer has arrived, and the exchange can be started again.
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
			h, err := worker.PushPull(af.DefaultStream, nil, push, pull)
			return func(slice time.Duration) error { return worker.Wait(int64(h), 20*time.Second, slice) }, err
		}},
		{"exchange", func() (func(time.Duration) error, error) {
			_, err := x.Start(af.Complete, true, AllRows)
			return func(slice time.Duration) error { return x.Wait(af.Complete, 20*time.Second, slice) }, err
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
			vantest.Fails(t, <-results, cluster.ErrOtherWaits, "another goroutine waits for it already")
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

// TestExchangeInGraph: calls made while the stream is being captured go into the graph; other calls work as always.
func TestExchangeInGraph(t *testing.T) {
	dev := simgpu.New(0)
	c := testcluster.Start(t, testcluster.Options{Backend: func(role string, _ int) backend.Backend {
		return map[string]backend.Backend{"worker": dev}[role]
	}})
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	worker, server := open2(t, c)
	in, out := []byte{1, 2, 3}, make([]byte, 3)
	x, err := worker.Prepare(nil, []af.KeyTensor{{Key: 1, Val: deviceTensor(t, dev, in)}}, []af.KeyTensor{{Key: 1, Val: deviceTensor(t, dev, out)}})
	if err != nil {
		t.Fatal(err)
	}
	answer := func() {
		t.Helper()
		items, err := server.GetBatch(nil, 20*time.Second)
		if err == nil {
			err = server.Respond(af.DefaultStream, items[0].ID, items[0].Pushes())
			items[0].Release()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	settle := func() { t.Helper(); dev.Settle(t, 4) }
	g := dev.Capture(4)
	for _, captured := range []func() error{
		func() error { _, err := x.Start(4, true, 2); return err },
		func() error { return x.Wait(4, 20*time.Second, time.Second) },
	} {
		if err := captured(); err != ErrCaptured {
			t.Fatal(err)
		}
	}
	g.End()
	vantest.Fails(t, x.Wait(4, time.Second, time.Second), ErrMisuse, "not started")
	g.Replay(4)
	answer()
	settle()
	if err := x.Check(); err != nil || !bytes.Equal(out, []byte{1, 2, 0}) {
		t.Errorf("a replay: %v, %v", out, err)
	}
	if _, err := x.Start(4, true, AllRows); err != nil {
		t.Fatal(err)
	}
	g = dev.Capture(4)
	_, err = x.Start(4, false, AllRows)
	vantest.Fails(t, err, af.ErrStarted, "it is not of a graph")
	g.End()
	answer()
	for err = ErrPending; err == ErrPending; {
		err = x.Wait(4, 20*time.Second, time.Second)
	}
	if err != nil || !bytes.Equal(out, in) {
		t.Errorf("beside a graph: %v, %v", out, err)
	}
	g = dev.Capture(4)
	_, err1 := x.Start(4, false, AllRows)
	err2 := x.Wait(4, 1500*time.Millisecond, time.Second) // longer than the machine may be suspended
	g.End()
	if err1 != ErrCaptured || err2 != ErrCaptured {
		t.Fatal(err1, err2)
	}
	for _, tell := range []func() error{
		x.Check,
		func() error { return x.Wait(4, time.Second, time.Second) },
		func() error { _, err := x.Start(4, true, AllRows); return err },
	} {
		g.Replay(4)
		settle() // without an answer
		vantest.Fails(t, tell(), van.ErrTimeout, "round", "server 0")
	}
	x.Close()
	if err := x.Check(); err != nil {
		t.Error(err)
	}
}
