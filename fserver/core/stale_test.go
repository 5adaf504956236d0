package core

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// openAll opens the sessions of all workers and of the server.
func openAll(t *testing.T, c *testcluster.Cluster) (workers []*Session, server *Session) {
	t.Helper()
	server = newSession(c.Servers[0])
	all := []*Session{server}
	for _, n := range c.Workers {
		all = append(all, newSession(n))
	}
	var opening sync.WaitGroup
	for _, s := range all {
		opening.Go(func() {
			if err := s.open(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	opening.Wait()
	return all[1:], server
}

// asked is a request that pushes one number and pulls another.
type asked struct {
	w    *Session
	h    int32
	pull []byte
}

func (s *Session) ask(t *testing.T, number byte, size int) *asked {
	t.Helper()
	r := &asked{w: s, pull: make([]byte, size)}
	h, err := s.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: 1, Val: tensor(t, bytes.Repeat([]byte{number}, size))}},
		[]af.KeyTensor{{Key: 2, Val: tensor(t, r.pull)}})
	if err != nil {
		t.Fatal(err)
	}
	r.h = h
	return r
}

// pulls waits for r and compares its pulled number.
func (r *asked) pulls(t *testing.T, want byte) {
	t.Helper()
	if err := r.w.waitFor(r.h); err != nil {
		t.Errorf("%s: %v", r.w.node.Name(), err)
	} else if want := bytes.Repeat([]byte{want}, len(r.pull)); !bytes.Equal(r.pull, want) {
		t.Errorf("%s pulled %d, want %d", r.w.node.Name(), r.pull[0], want[0])
	}
}

// await polls ok until it returns true.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("no %s", what)
		}
	}
}

// queued returns the number of a worker's queued batches, and their bytes.
func (s *Session) queued(rank int) (n, bytes int) {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return s.queue.workers[rank].Len(), s.queue.bytes[rank]
}

// row takes one batch of each worker.
func (s *Session) row(t *testing.T) (items []Item) {
	t.Helper()
	if err := later(t, func(slice time.Duration) (err error) {
		items, err = s.GetBatch(nil, slice)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return items
}

// numbers returns the pushed numbers.
func numbers(items []Item) (ns []byte) {
	for _, it := range items {
		ns = append(ns, it.Pushes()[0].Val.Bytes()[0])
	}
	return ns
}

// answer answers each batch with its number plus ten.
func (s *Session) answer(t *testing.T, items []Item) {
	t.Helper()
	for _, it := range items {
		x := it.Pushes()[0].Val.Bytes()
		if err := s.Respond(af.DefaultStream, it.ID, []af.KeyTensor{{Val: tensor(t, bytes.Repeat([]byte{x[0] + 10}, len(x)))}}); err != nil {
			t.Error(err)
		}
		it.Release()
	}
}

// replace ends worker 0 and starts a replacement.
func replace(t *testing.T, c *testcluster.Cluster, server *Session, end func() error) *Session {
	t.Helper()
	watch := func(n *postoffice.Node) <-chan bool {
		heard := make(chan bool, 16)
		t.Cleanup(n.OnPeer(func(id postoffice.NodeID, up bool, _ error) {
			if id == postoffice.WorkerID(0) {
				heard <- up
			}
		}))
		return heard
	}
	hear := func(heard <-chan bool, want bool) {
		t.Helper()
		select {
		case up := <-heard:
			if up != want {
				t.Fatalf("worker 0 is up: %t, want %t", up, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("nothing is heard of worker 0, want up: %t", want)
		}
	}
	atServer, atScheduler := watch(c.Servers[0]), watch(c.Scheduler)
	if err := end(); err != nil {
		t.Error(err)
	}
	hear(atServer, false)
	hear(atScheduler, false) // otherwise it refuses the replacement
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	n, err := c.Join(ctx, "worker", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	hear(atServer, true)
	w := newSession(n)
	if err := w.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	return w
}

// TestReplacedWorker: worker 0 is killed and replaced while get_batch waits for worker 1. Its earlier requests leave
// the queue, with a log line, and the replacement gets the answer to its own request.
func TestReplacedWorker(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		var logged vantest.Log
		o.Workers, o.Log = 2, logged.Logger()
		c := testcluster.Start(t, o)
		workers, server := openAll(t, c)
		workers[0].ask(t, 100, 64)
		await(t, "batch", func() bool { n, _ := server.queued(0); return n == 1 })
		fresh := replace(t, c, server, c.Workers[0].Close)
		if n, size := server.queued(0); n != 0 || size != 0 {
			t.Errorf("%d batches of the lost worker, %d bytes, are in the queue", n, size)
		}
		await(t, "line about what was dropped", func() bool {
			return strings.Contains(logged.String(), "dropped batches that their worker has canceled")
		})
		r0, r1 := fresh.ask(t, 7, 64), workers[1].ask(t, 8, 64)
		items := server.row(t)
		if got := numbers(items); got[0] != 7 || got[1] != 8 {
			t.Errorf("a row of %d, want 7 and 8", got)
		}
		server.answer(t, items)
		r0.pulls(t, 17)
		r1.pulls(t, 18)
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestGiveBackOfALostWorker: a batch without pulls, which GetBatch answers, is returned to the queue after its worker
// was lost. It is released once, as is a batch that waits for its answer.
func TestGiveBackOfALostWorker(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0)})
	workers, server := openAll(t, c)
	push := []af.KeyTensor{{Key: 1, Val: tensor(t, make([]byte, 64))}, {Key: 2, Val: tensor(t, make([]byte, 64))}}
	if _, err := workers[0].PushPull(af.DefaultStream, nil, push, nil); err != nil {
		t.Fatal(err)
	}
	items := server.row(t)
	workers[0].ask(t, 100, 64)
	items = append(items, server.row(t)...)
	replace(t, c, server, c.Workers[0].Close)
	if !items[0].acked || items[1].acked || items[0].Wanted() || items[1].Wanted() {
		t.Fatalf("answered %t and %t, wanted %t and %t", items[0].acked, items[1].acked, items[0].Wanted(), items[1].Wanted())
	}
	looking := []af.Batch{items[0].Retain(), items[1].Retain()} // another user of the batches
	before := hook.Held()
	server.GiveBack(items)
	if n := hook.Held(); n != before {
		t.Errorf("%d messages are held while somebody looks at their batches, want %d", n, before)
	}
	for _, b := range looking {
		b.Release()
	}
	await(t, "end of what is held", func() bool { return hook.Held() == 0 })
	if n, size := server.queued(0); n != 0 || size != 0 {
		t.Errorf("%d batches of the lost worker, %d bytes, are in the queue", n, size)
	}
}

// TestAnswerRefused: an answer that the transport refuses is an error; the caller may use the tensors again, and the
// batch counts as answered.
func TestAnswerRefused(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0)})
	workers, server := openAll(t, c)
	workers[0].ask(t, 1, 64)
	it := server.row(t)[0]
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
	out := []af.KeyTensor{{Val: tensor(t, make([]byte, 64))}}
	if told, err := server.Answer(af.DefaultStream, it.ID, out, nil); !told || !errors.Is(err, van.ErrQueueFull) {
		t.Errorf("an answer that is refused: %t, %v; want true, %v", told, err, van.ErrQueueFull)
	}
	hook.OnSend(nil)
	if err := server.Respond(af.DefaultStream, it.ID, out); !errors.Is(err, ErrMisuse) {
		t.Errorf("a second answer: %v, want %v", err, ErrMisuse)
	}
	it.Release()
}

// TestAnswersOfALostWorker: the application has a batch when its worker is lost. An answer is dropped, with a log line
// and without an error. Returning the batch to the queue releases it.
func TestAnswersOfALostWorker(t *testing.T) {
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Log: logged.Logger()})
	workers, server := openAll(t, c)
	var rows [2][]Item
	var living []*asked
	for i := range rows {
		workers[0].ask(t, 100, 64)
		living = append(living, workers[1].ask(t, 8, 64))
		rows[i] = server.row(t)
	}
	fresh := replace(t, c, server, c.Workers[0].Close)
	server.answer(t, rows[0])
	if !strings.Contains(logged.String(), "dropped an answer: its worker is lost") {
		t.Error("the log does not say that the answer was dropped")
	}
	server.GiveBack(rows[1])
	r := fresh.ask(t, 7, 64)
	items := server.row(t)
	if got := numbers(items); got[0] != 7 || got[1] != 8 {
		t.Errorf("a row of %d, want 7 and 8", got)
	}
	server.answer(t, items)
	r.pulls(t, 17)
	for _, r := range living {
		r.pulls(t, 18)
	}
}

// told counts the tensors that were sent or will not be sent.
type told struct{ n int }

func (c *told) Sent() { c.n++ }

// TestUnansweredIsFreed: the memory of a batch that was handed out and not answered is freed after its worker has
// canceled it or is lost, or the node has left, as soon as the program has released it. A later answer is dropped,
// once.
func TestUnansweredIsFreed(t *testing.T) {
	for name, end := range map[string]func(*testing.T, *testcluster.Cluster, *Session, *asked){
		"canceled": func(t *testing.T, _ *testcluster.Cluster, _ *Session, r *asked) {
			if err := r.w.Wait(int64(r.h), time.Millisecond, time.Second); !errors.Is(err, van.ErrTimeout) {
				t.Fatalf("%v, want %v", err, van.ErrTimeout)
			}
		},
		"lost": func(_ *testing.T, c *testcluster.Cluster, _ *Session, _ *asked) { c.Workers[0].Close() },
		"replaced": func(t *testing.T, c *testcluster.Cluster, server *Session, _ *asked) {
			replace(t, c, server, c.Workers[0].Close)
		},
		"left": func(_ *testing.T, _ *testcluster.Cluster, server *Session, _ *asked) { server.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			hook := &hooks.Van{}
			c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0)})
			workers, server := openAll(t, c)
			r := workers[0].ask(t, 100, 64)
			it := server.row(t)[0]
			view := it.Pushes()[0].Val.Bytes()
			end(t, c, server, r)
			q := server.queue
			vantest.Eventually(t, 20*time.Second, "the queue lets go of it, the program has it still", func() bool {
				q.mu.Lock()
				defer q.mu.Unlock()
				return len(q.out) == 0 && hook.Held() == 1
			})
			if view[63] != 100 {
				t.Errorf("the program has it still, and reads %d, want 100", view[63])
			}
			it.Release()
			vantest.Eventually(t, 20*time.Second, "no message to be held", func() bool { return hook.Held() == 0 }) // the queue releases what it has removed
			if _, ok := server.Retake(it.ID, nil); ok {
				t.Error("it can be given back")
			}
			out, done := []af.KeyTensor{{Val: tensor(t, make([]byte, 64))}}, &told{}
			if name == "left" {
				for range 2 {
					if told, err := server.Answer(af.DefaultStream, it.ID, out, done); told || err == nil || errors.Is(err, ErrMisuse) {
						t.Errorf("an answer: %t, %v; want false, and that the node has left", told, err)
					}
				}
				return
			}
			if err := server.CanRespond([]uint64{it.ID}, 1); err != nil {
				t.Error(err)
			}
			if told, err := server.Answer(af.DefaultStream, it.ID, out, done); !told || err != nil || done.n != 1 {
				t.Errorf("an answer: %t, %v, %d tensors are told; want true, no error, 1", told, err, done.n)
			}
			vantest.Fails(t, server.Respond(af.DefaultStream, it.ID, out), ErrMisuse, "answered already")
		})
	}
}

// TestCanceledAreKept: the queue keeps the ids of the latest canceled batches. A batch whose answer was refused, and
// that was canceled meanwhile, is among them.
func TestCanceledAreKept(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	workers, server := openAll(t, c)
	r := workers[0].ask(t, 100, 64)
	it := server.row(t)[0]
	if err := r.w.Wait(int64(r.h), time.Millisecond, time.Second); !errors.Is(err, van.ErrTimeout) {
		t.Fatalf("%v, want %v", err, van.ErrTimeout)
	}
	q := server.queue
	vantest.Eventually(t, 20*time.Second, "the batch is canceled", func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return len(q.canceled.of) == 1
	})
	if q.putBack(it.ID+1, it.Retain()); len(q.out) != 0 || len(q.canceled.of) != 2 {
		t.Errorf("%d handed out and %d canceled, want none and 2", len(q.out), len(q.canceled.of))
	}
	q.mu.Lock()
	for id := range uint64(2 * keepCanceled) {
		q.cancel(100+id, it.Retain())
	}
	n := len(q.canceled.of)
	q.mu.Unlock()
	if n != keepCanceled {
		t.Errorf("%d are remembered, want %d", n, keepCanceled)
	}
	it.Release()
	vantest.Fails(t, server.Respond(af.DefaultStream, it.ID, nil), ErrMisuse)
	if err := server.Respond(af.DefaultStream, 100+keepCanceled, nil); err != nil {
		t.Error(err)
	}
}

// TestGetBatchWaitsForAReplacement: get_batch fails only after a lost worker was not replaced for
// STEPAF_REPLACE_TIMEOUT.
func TestGetBatchWaitsForAReplacement(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.ReplaceTimeout = time.Hour }})
	_, server := openAll(t, c)
	fresh := replace(t, c, server, func() error {
		err := c.Workers[0].Close()
		await(t, "loss", func() bool {
			_, err := server.GetBatch(nil, time.Millisecond)
			vantest.Fails(t, err, ErrPending)
			server.queue.mu.Lock()
			defer server.queue.mu.Unlock()
			return len(server.queue.lost) == 1
		})
		return err
	})
	r := fresh.ask(t, 7, 64)
	server.answer(t, server.row(t))
	r.pulls(t, 17)
}

// TestLossIsReportedAgain: after an error about a lost worker, get_batch waits as long as before until it returns the
// error again; a second if that time is 0.
func TestLossIsReportedAgain(t *testing.T) {
	for limit, want := range map[time.Duration]time.Duration{0: time.Second, 300 * time.Millisecond: 300 * time.Millisecond} {
		c := testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.ReplaceTimeout = limit }})
		_, server := openAll(t, c)
		c.Workers[0].Close()
		for name, get := range map[string]func(time.Duration) ([]Item, error){
			"one of each": func(slice time.Duration) ([]Item, error) { return server.GetBatch(nil, slice) },
			"any":         func(slice time.Duration) ([]Item, error) { return server.GetAny(nil, 0, slice) },
		} {
			var told, called time.Time // the start of the last call that returned the error, and of the last call
			for range 3 {
				err := later(t, func(slice time.Duration) error {
					called = time.Now()
					_, err := get(slice)
					return err
				})
				vantest.Fails(t, err, van.ErrPeerLost, "get_batch", "worker 0")
				if spent := time.Since(told); spent < want {
					t.Errorf("limit %s, %s: told again after %s, want %s", limit, name, spent, want)
				}
				told = called
			}
		}
	}
}

// TestStalledWorker: batches that worker 0 canceled while worker 1 was stopped are not handed out: each row has the
// current requests of both.
func TestStalledWorker(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		workers, server := openAll(t, c)
		for i := range byte(3) {
			r := workers[0].ask(t, 100+i, 64)
			await(t, "batch", func() bool { n, _ := server.queued(0); return n > 0 })
			if err := workers[0].Wait(int64(r.h), time.Millisecond, time.Second); !errors.Is(err, van.ErrTimeout) {
				t.Fatalf("%v, want %v", err, van.ErrTimeout)
			}
			await(t, "the canceled batches leave the queue", func() bool { n, size := server.queued(0); return n == 0 && size == 0 })
		}
		for round := range byte(3) {
			r0, r1 := workers[0].ask(t, 10*round, 64), workers[1].ask(t, 10*round+1, 64)
			items := server.row(t)
			if got := numbers(items); got[0] != 10*round || got[1] != 10*round+1 {
				t.Errorf("a row of %d, want %d and %d", got, 10*round, 10*round+1)
			}
			server.answer(t, items)
			r0.pulls(t, 10*round+10)
			r1.pulls(t, 10*round+11)
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestQueueBudget: the node stops reading a worker that has used up its budget, and logs that. It reads other workers,
// and all batches are served in the end.
func TestQueueBudget(t *testing.T) {
	const size, count, budget = 300 << 10, 12, 1 << 20
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		var logged vantest.Log
		o.Workers, o.Log = 2, logged.Logger()
		o.Set = func(c *postoffice.Config) { c.RecvBudgetPeer = budget }
		c := testcluster.Start(t, o)
		workers, server := openAll(t, c)
		var first, second []*asked
		for i := range byte(count) {
			first = append(first, workers[0].ask(t, i, size))
		}
		await(t, "full budget", func() bool { _, n := server.queued(0); return n >= budget })
		await(t, "line about it", func() bool { return strings.Contains(logged.String(), "a worker's batches wait for get_batch") })
		testcluster.Counted(t, c.Servers[0], postoffice.Stats{PausedReads: 1})
		for i := range byte(count) {
			second = append(second, workers[1].ask(t, 100+i, size))
			if _, n := server.queued(0); n > budget+2*size {
				t.Fatalf("%d bytes of one worker are in the queue, want at most %d and a batch", n, budget)
			}
		}
		for i := range byte(count) {
			items := server.row(t)
			if got := numbers(items); got[0] != i || got[1] != 100+i {
				t.Errorf("row %d is of %d", i, got)
			}
			server.answer(t, items)
		}
		for i := range byte(count) {
			first[i].pulls(t, i+10)
			second[i].pulls(t, i+110)
		}
		if _, n := server.queued(0); n != 0 {
			t.Errorf("%d bytes are in an empty queue", n)
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}
