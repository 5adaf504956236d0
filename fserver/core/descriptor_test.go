package core

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// sleep waits until fd is readable, as an event loop does, for limit at most. It reports whether fd is readable.
func sleep(t *testing.T, fd int, limit time.Duration) bool {
	t.Helper()
	for end := time.Now().Add(limit); ; {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		switch n, err := unix.Poll(fds, int(max(time.Until(end), 0)/time.Millisecond)); {
		case err == nil && n == 1:
			return fds[0].Revents == unix.POLLIN
		case err == nil:
			return false
		case !errors.Is(err, unix.EINTR):
			t.Fatal(err)
		}
	}
}

func readable(t *testing.T, fd int) bool {
	t.Helper()
	return sleep(t, fd, 0)
}

// becomesReadable fails the test unless fd becomes readable.
func becomesReadable(t *testing.T, fd int, why string) {
	t.Helper()
	if !sleep(t, fd, 20*time.Second) {
		t.Fatalf("the descriptor does not become readable: %s", why)
	}
}

func notReadable(t *testing.T, fd int, why string) {
	t.Helper()
	if readable(t, fd) {
		t.Errorf("the descriptor is readable: %s", why)
	}
}

func shows(t *testing.T, s *Session, any bool) int {
	t.Helper()
	fd, err := Descriptor(s, any)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Descriptor(s, any); again != fd || err != nil {
		t.Fatalf("the second call returns %d, %v, want %d", again, err, fd)
	}
	return fd
}

// TestDescriptors: both ends sleep on their descriptors only, so no caller receives. GetBatch and Poll do not wait, and make the
// descriptors unreadable.
func TestDescriptors(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		workers, server := openAll(t, testcluster.Start(t, o))
		atServer, atWorker := shows(t, server, false), shows(t, workers[0], false)
		for i := range byte(50) {
			notReadable(t, atServer, "there is no batch")
			_, err := server.GetBatch(nil, 0)
			vantest.Fails(t, err, ErrPending)
			r := workers[0].ask(t, i, 64)
			notReadable(t, atWorker, "there is no answer")
			vantest.Fails(t, Poll(workers[0], int64(r.h)), ErrPending)
			becomesReadable(t, atServer, "a batch is queued")
			items, err := server.GetBatch(nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			server.answer(t, items)
			becomesReadable(t, atWorker, "the answer has arrived")
			for range 2 {
				if err := Poll(workers[0], int64(r.h)); err != nil {
					t.Fatal(err)
				}
				notReadable(t, atWorker, "the only answer is reported")
			}
			r.pulls(t, i+10)
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestDescriptorsOfEachAndAny: one descriptor is for GetBatch, which needs a batch of each worker, and the other is for GetAny.
func TestDescriptorsOfEachAndAny(t *testing.T) {
	workers, server := openAll(t, testcluster.Start(t, testcluster.Options{Workers: 2}))
	each, some := shows(t, server, false), shows(t, server, true)
	if each == some {
		t.Fatal("there is only one descriptor")
	}
	workers[0].ask(t, 1, 64)
	becomesReadable(t, some, "worker 0 has sent a batch")
	notReadable(t, each, "worker 1 has sent no batch")
	workers[1].ask(t, 2, 64)
	becomesReadable(t, each, "each worker has sent a batch")
	items, err := server.GetAny(nil, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	notReadable(t, each, "one worker has a batch left")
	becomesReadable(t, some, "one worker has a batch left")
	server.GiveBack(items)
	becomesReadable(t, each, "the batch was given back")
	server.answer(t, server.row(t))
	notReadable(t, some, "all batches are taken")
	workers[0].ask(t, 3, 64)
	becomesReadable(t, some, "worker 0 has sent a batch")
	server.queue.refuseAll(true)
	notReadable(t, some, "the batch was refused")
}

// TestDescriptorOfACanceledBatch: a batch that its worker cancels makes the descriptor unreadable.
func TestDescriptorOfACanceledBatch(t *testing.T) {
	workers, server := openAll(t, testcluster.Start(t, testcluster.Options{}))
	fd := shows(t, server, false)
	r := workers[0].ask(t, 1, 64)
	becomesReadable(t, fd, "a batch is queued")
	vantest.Fails(t, workers[0].Wait(int64(r.h), time.Millisecond, time.Second), van.ErrTimeout)
	await(t, "cancellation", func() bool { n, _ := server.queued(0); return n == 0 })
	notReadable(t, fd, "the batch was canceled")
	vantest.Fails(t, Poll(workers[0], int64(r.h)), van.ErrTimeout)
	fd = shows(t, workers[0], false)
	notReadable(t, fd, "the error was reported before the descriptor was opened")
}

// TestDescriptorsOfLosses: a lost server makes the worker's descriptor readable. A lost worker makes the server's readable after
// STEPAF_REPLACE_TIMEOUT, and again when GetBatch repeats the error.
func TestDescriptorsOfLosses(t *testing.T) {
	const limit = 500 * time.Millisecond
	c := testcluster.Start(t, testcluster.Options{Servers: 2, Set: func(c *postoffice.Config) { c.ReplaceTimeout = limit }})
	worker := newSession(c.Workers[0])
	servers := []*Session{newSession(c.Servers[0]), newSession(c.Servers[1])}
	var opening sync.WaitGroup
	for _, s := range append(slices.Clone(servers), worker) {
		opening.Go(func() {
			if err := s.open(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	opening.Wait()
	atWorker := shows(t, worker, false)
	h, err := worker.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: 1, Val: tensor(t, make([]byte, 8))}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	notReadable(t, atWorker, "no server has answered")
	atServer := shows(t, servers[0], true)
	becomesReadable(t, atServer, "the batch has arrived")
	c.Servers[1].Close()
	becomesReadable(t, atWorker, "server 1 is lost")
	for range 2 {
		vantest.Fails(t, Poll(worker, int64(h)), van.ErrPeerLost, "server 1")
		notReadable(t, atWorker, "the loss was reported")
	}
	vantest.Eventually(t, 20*time.Second, "the batch is canceled", func() bool { return !readable(t, atServer) })
	for _, any := range []bool{false, true} {
		get := func() (err error) {
			if any {
				_, err = servers[0].GetAny(nil, 0, 0)
			} else {
				_, err = servers[0].GetBatch(nil, 0)
			}
			return err
		}
		fd := shows(t, servers[0], any)
		if !any {
			c.Workers[0].Close()
		}
		for range 3 {
			becomesReadable(t, fd, "worker 0 is lost")
			told := time.Now()
			vantest.Fails(t, get(), van.ErrPeerLost, "worker 0")
			if readable(t, fd) && time.Since(told) < limit {
				t.Error("the descriptor is readable: the loss was reported")
			}
		}
	}
}

// TestDescriptorsAtTheEnd: a server's descriptor becomes readable when its workers have ended. Those of both ends are readable when
// the nodes have left, and stay so.
func TestDescriptorsAtTheEnd(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	workers, server := openAll(t, c)
	atServer, some, atWorker := shows(t, server, false), shows(t, server, true), shows(t, workers[0], false)
	var stopping sync.WaitGroup
	stop := func(s *Session) {
		stopping.Go(func() {
			if err := s.Stop(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	stop(workers[0])
	becomesReadable(t, atServer, "the worker has ended")
	becomesReadable(t, some, "the worker has ended")
	for range 2 {
		_, err := server.GetBatch(nil, 0)
		vantest.Fails(t, err, ErrLoopOver)
	}
	becomesReadable(t, atServer, "each call returns the end")
	stop(server)
	stop(newSession(c.Scheduler))
	becomesReadable(t, atWorker, "the node has left")
	stopping.Wait()
	for _, fd := range []int{atServer, some, atWorker} {
		becomesReadable(t, fd, "the node has left")
	}
	_, err := server.GetBatch(nil, 0)
	vantest.Fails(t, err, van.ErrClosed)
}

// TestStopFails: a worker whose Stop fails leaves the cluster. Its server's loop ends, and does not wait for a replacement of a
// worker that has ended.
func TestStopFails(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.ReplaceTimeout = time.Hour }})
	workers, server := openAll(t, c)
	fd := shows(t, server, false)
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- workers[0].Stop(ctx) }()
	becomesReadable(t, fd, "the worker has ended")
	cancel()
	vantest.Fails(t, <-stopped, context.Canceled)
	testcluster.Lost(t, c.Servers[0], c.Workers[0].ID())
	_, err := server.GetBatch(nil, 0)
	vantest.Fails(t, err, ErrLoopOver)
}

// TestDescriptorsOfClosedNodes: nodes that leave without the others make their descriptors readable. The worker has no
// request that could fail and make its descriptor readable.
func TestDescriptorsOfClosedNodes(t *testing.T) {
	workers, server := openAll(t, testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.ReplaceTimeout = time.Hour }}))
	for _, s := range []*Session{workers[0], server} {
		fd := shows(t, s, false)
		notReadable(t, fd, "nothing has ended")
		s.Close()
		becomesReadable(t, fd, "the node has left")
	}
}

// TestDescriptorRoles: the scheduler has no descriptor, and a worker none for batches.
func TestDescriptorRoles(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	workers, server := openAll(t, c)
	_, err := Descriptor(newSession(c.Scheduler), false)
	vantest.Fails(t, err, ErrMisuse, "fileno", "scheduler")
	_, err = Descriptor(workers[0], true)
	vantest.Fails(t, err, van.ErrInvalid, "fileno", "any=True", "worker 0")
	vantest.Fails(t, Poll(server, 1), ErrMisuse, "poll", "server 0")
}

// TestPoll: Poll tells when a request, or one tensor of it, is complete. It does not disturb another caller that waits.
func TestPoll(t *testing.T) {
	workers, server := openAll(t, testcluster.Start(t, testcluster.Options{Over: testcluster.SHM}))
	w := workers[0]
	vantest.Fails(t, Poll(w, 1<<40), ErrUnknownHandler)
	r := w.ask(t, 1, 64)
	h := int64(r.h)
	vantest.Fails(t, Poll(w, h+2), ErrUnknownHandler)
	vantest.Fails(t, Poll(w, h+1), ErrPending) // the pull
	waits := make(chan error, 1)
	go func() {
		err := cluster.ErrOtherWaits
		for errors.Is(err, cluster.ErrOtherWaits) {
			err = w.Wait(h, 20*time.Second, time.Hour)
		}
		waits <- err
	}()
	await(t, "waiting caller", func() bool {
		vantest.Fails(t, Poll(w, h), ErrPending)
		err := w.Wait(h, time.Hour, time.Nanosecond)
		return errors.Is(err, cluster.ErrOtherWaits)
	})
	vantest.Fails(t, Poll(w, h), ErrPending)
	server.answer(t, server.row(t))
	if err := <-waits; err != nil {
		t.Error(err)
	}
	for _, handler := range []int64{h, h + 1, h} {
		if err := Poll(w, handler); err != nil {
			t.Error(err)
		}
	}
	r = w.ask(t, 2, 64)
	server.answer(t, server.row(t))
	await(t, "pulled tensor", func() bool { return Poll(w, int64(r.h)+1) == nil })
	await(t, "request", func() bool { return Poll(w, int64(r.h)) == nil })
	r.pulls(t, 12)
}

// TestGetBatchWithoutWaiting: with a slice of 0 GetBatch and GetAny do not receive.
func TestGetBatchWithoutWaiting(t *testing.T) {
	_, server := openAll(t, testcluster.Start(t, testcluster.Options{}))
	receives := 0
	server.queue.poll = func() bool { receives++; return true }
	server.queue.pollAny = server.queue.poll
	for _, slice := range []time.Duration{0, time.Nanosecond} {
		_, err := server.GetBatch(nil, slice)
		vantest.Fails(t, err, ErrPending)
		_, err = server.GetAny(nil, 0, slice)
		vantest.Fails(t, err, ErrPending)
		if want := map[time.Duration]int{0: 0, time.Nanosecond: 2}[slice]; receives != want {
			t.Errorf("with a slice of %s %d calls receive, want %d", slice, receives, want)
		}
	}
}

// TestDescriptorsUnderLoad: two workers with several requests in flight, and two threads of a server, sleep on their descriptors
// only. Every request is answered, and no wake-up is lost.
func TestDescriptorsUnderLoad(t *testing.T) {
	const each, flight = 400, 8
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		workers, server := openAll(t, testcluster.Start(t, o))
		var all, serving sync.WaitGroup
		done := make(chan struct{})
		fd := shows(t, server, true)
		for most := range 2 {
			serving.Go(func() {
				for {
					sleep(t, fd, 20*time.Second)
					select {
					case <-done:
						return
					default:
					}
					items, err := server.GetAny(nil, 3*most, 0)
					if err != nil && !errors.Is(err, ErrPending) { // the other thread was faster
						t.Error(err)
						return
					}
					server.answer(t, items)
				}
			})
		}
		for i, w := range workers {
			all.Go(func() {
				fd := shows(t, w, false)
				flying := map[int]*asked{} // by number; one may be in flight while a hundred later ones end
				for sent := 0; sent < each || len(flying) > 0; {
					for ; sent < each && len(flying) < flight; sent++ {
						flying[sent] = w.ask(t, byte(100*i+sent%100), 64)
					}
					if !sleep(t, fd, 20*time.Second) {
						t.Errorf("worker %d sleeps with %d requests in flight", i, len(flying))
						return
					}
					for sent, r := range flying {
						switch err := Poll(w, int64(r.h)); {
						case err == nil:
							r.pulls(t, byte(100*i+sent%100+10))
							delete(flying, sent)
						case !errors.Is(err, ErrPending):
							t.Error(err)
							return
						}
					}
				}
				notReadable(t, fd, "all requests are reported")
			})
		}
		all.Wait()
		close(done)
		server.queue.mu.Lock()
		server.queue.shown.any.show(true) // wakes the threads
		server.queue.mu.Unlock()
		serving.Wait()
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}
