package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// ask sends a request for an application from the first worker to the first server.
func ask(t testing.TB, c *testcluster.Cluster, app, ts, size int) {
	t.Helper()
	askFrom(t, c, 0, app, ts, size)
}

// askFrom is ask of another worker.
func askFrom(t testing.TB, c *testcluster.Cluster, worker, app, ts, size int) {
	t.Helper()
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Timestamp = van.ServerID(0), true, true, int32(ts)
	m.AppID, m.CustomerID = int32(app), int32(app)
	m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8)), backend.Bytes(make([]byte, size))
	m.DataTypes = []van.DataType{van.TypeUint64, van.TypeOther}
	if err := core(c.Workers[worker]).App().Send(m); err != nil {
		t.Fatal(err)
	}
}

// until waits until ok is true.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	vantest.Eventually(t, 20*time.Second, what, ok)
}

// TestOrderAfterQueuedRequests: messages that arrive while a handler is busy with queued ones wait their turn.
func TestOrderAfterQueuedRequests(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{}
		o.Wrap = hook.Wrap("server", 0)
		c := testcluster.Start(t, o)
		ask(t, c, 7, 0, 10)
		ask(t, c, 8, 0, 10) // it will not be taken: when it has arrived, the one before it is queued
		until(t, "the first request is kept", func() bool { return hook.Held() == 2 })
		var mu sync.Mutex
		var seen []int32
		entered, release := make(chan struct{}), make(chan struct{})
		all := make(chan struct{})
		_, err := core(c.Servers[0]).App().AddCustomer(7, 7, func(m *van.Message) {
			if m.Timestamp == 0 {
				close(entered)
				<-release
			}
			mu.Lock()
			defer mu.Unlock()
			if seen = append(seen, m.Timestamp); len(seen) == 4 {
				close(all)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		<-entered
		for ts := range 3 {
			ask(t, c, 7, ts+1, 10)
		}
		handed := func() int {
			mu.Lock()
			defer mu.Unlock()
			return len(seen)
		}
		until(t, "the others have come", func() bool { return hook.Held() == 5 || handed() > 0 })
		if n := handed(); n > 0 {
			t.Errorf("%d requests were handed over while the first one was", n)
		}
		close(release)
		select {
		case <-all:
		case <-time.After(20 * time.Second):
			t.Fatal("not all requests come")
		}
		if want := []int32{0, 1, 2, 3}; !slices.Equal(seen, want) {
			t.Errorf("requests came as %v, want %v", seen, want)
		}
		until(t, "only that of the other application is held", func() bool { return hook.Held() == 1 })
		c.Finalize(t)
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestQueuedRequestsReleaseTheirBudget: the budget of queued requests applies to the requests that are queued now,
// not to all requests that were ever queued.
func TestQueuedRequestsReleaseTheirBudget(t *testing.T) {
	const budget, size = 1 << 20, 700 << 10
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0), Set: func(c *postoffice.Config) {
		c.RecvBudgetPeer, c.RecvBudget = budget, budget
	}})
	for round := range 10 {
		ask(t, c, 7, round, size)
		until(t, "the request is kept", func() bool { return hook.Held() == 1 })
		came := make(chan struct{})
		x, err := core(c.Servers[0]).App().AddCustomer(7, 7, func(m *van.Message) {
			if m.Vals.Len() == size {
				close(came)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-came:
		case <-time.After(20 * time.Second):
			t.Fatalf("request %d is not there", round)
		}
		x.Close()
		until(t, "nothing is held", func() bool { return hook.Held() == 0 })
	}
	c.Finalize(t)
}

// TestQueuedRequestsAtTheEnd: a node that closes releases the requests for applications that were never made.
func TestQueuedRequestsAtTheEnd(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{}
		o.Wrap = hook.Wrap("server", 0)
		c := testcluster.Start(t, o)
		for ts := range 5 {
			ask(t, c, 7+ts%2, ts, 100)
		}
		until(t, "the requests are kept", func() bool { return hook.Held() == 5 })
		c.Servers[0].Close()
		if n := hook.Held(); n != 0 {
			t.Errorf("%d messages are held after Close, want none", n)
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// slowAnswer is a Request whose answer takes as long as the test wants.
type slowAnswer struct {
	cluster.Request
	entered, release, finished chan struct{}
}

func (r *slowAnswer) Answer(int, int, *van.Message) error {
	close(r.entered)
	<-r.release
	return nil
}
func (r *slowAnswer) Finished(error) { close(r.finished) }
func (r *slowAnswer) Recycle()       {}

// TestCanceledWhileAnswered: a caller that cancels a request while an answer is being handled gets the memory back
// after that, not before.
func TestCanceledWhileAnswered(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	if _, err := core(c.Servers[0]).App().AddCustomer(5, 5, func(m *van.Message) {
		a := &van.Message{}
		a.Reset()
		a.Receiver, a.Push, a.AppID, a.CustomerID, a.Timestamp = m.Sender, true, m.AppID, m.CustomerID, m.Timestamp
		if err := core(c.Servers[0]).App().Send(a); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	x := customer(t, c)
	for _, how := range []string{"context", "limit"} {
		r := &slowAnswer{entered: make(chan struct{}), release: make(chan struct{}), finished: make(chan struct{})}
		// Two answers are owed, and one arrives.
		if err := x.Open(&r.Request, "test", r, 2, []int{van.ServerID(0)}); err != nil {
			t.Fatal(err)
		}
		m := &van.Message{}
		m.Reset()
		m.Receiver, m.Request, m.Push, m.Timestamp, m.AppID, m.CustomerID = van.ServerID(0), true, true, r.First(), 5, 0
		if err := core(c.Workers[0]).App().Send(m); err != nil {
			t.Fatal(err)
		}
		select {
		case <-r.entered:
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: no answer comes", how)
		}
		if _, answered, ok, err := x.Batch(r.First()); answered || !ok || err != nil {
			t.Errorf("%s: an answer that is being taken counts as answered (%t, %t, %v)", how, answered, ok, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		limit := time.Duration(0)
		if how == "limit" {
			limit = time.Millisecond
		}
		waited := make(chan error, 1)
		go func() { waited <- x.Wait(ctx, r.First(), limit) }()
		if how == "context" {
			cancel()
		}
		select {
		case err := <-waited:
			t.Errorf("%s: Wait has returned %v while an answer is being taken", how, err)
			waited <- err
		case <-time.After(100 * time.Millisecond):
		}
		close(r.release)
		select {
		case err := <-waited:
			if !errors.Is(err, van.ErrTimeout) && !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", how, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: Wait does not return", how)
		}
		select {
		case <-r.finished:
		default:
			t.Errorf("%s: Wait has returned before Finished", how)
		}
		cancel()
	}
	c.Finalize(t)
}

// TestFinishedDuringAWait: a request that a Wait has found is recycled once, by that Wait, even if 4096 others finish
// meanwhile.
func TestFinishedDuringAWait(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.BusyPoll = env.SpinForever }}))
	opened := func() *request {
		r := newRequest()
		if err := x.Open(&r.Request, "test", r, 1, nil); err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := opened()
	r.DuringWait(sync.OnceFunc(func() {
		for range 4096 {
			opened()
		}
		if len(r.recycled) > 0 {
			t.Error("recycled during the wait")
		}
	}))
	if err := x.Wait(t.Context(), r.First(), time.Minute); err != nil {
		t.Error(err)
	}
	if len(r.recycled) != 1 {
		t.Error("not recycled after the wait")
	}
}

// TestFinishedRequestsAreRecycled: requests that are not waited for return to their owner, except for the newest
// 4096.
func TestFinishedRequestsAreRecycled(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	x := customer(t, c)
	const kept, more = 4096, 50
	var rs []*request
	for range kept + more {
		r := newRequest()
		if err := x.Open(&r.Request, "test", r, 1, nil); err != nil {
			t.Fatal(err)
		}
		rs = append(rs, r)
	}
	for i, r := range rs {
		select {
		case <-r.finished:
		default:
			t.Fatalf("request %d has not finished", i)
		}
		if got := len(r.recycled) == 1; got != (i < more) {
			t.Fatalf("request %d of %d: recycled %t, want %t", i, len(rs), got, i < more)
		}
	}
	if err := x.Wait(t.Context(), rs[0].First(), 0); !errors.Is(err, postoffice.ErrUnknownHandler) {
		t.Errorf("Wait for the oldest one: %v, want %v", err, postoffice.ErrUnknownHandler)
	}
	if err := x.Wait(t.Context(), rs[more].First(), 0); err != nil {
		t.Errorf("Wait for the oldest one that is kept: %v", err)
	}
}

// TestQueuedRequestsAreCounted: of small requests, 4096 of one sender are queued. The server does not read the others until
// the application is made, and then all arrive in order.
func TestQueuedRequestsAreCounted(t *testing.T) {
	const all = 4096 + 20
	c := testcluster.Start(t, testcluster.Options{})
	s := c.Servers[0]
	for ts := range all {
		ask(t, c, 7, ts, 1)
	}
	until(t, "4096 requests are queued, and one waits", func() bool { return s.Stats().QueuedRequests == 4096 && s.Stats().PausedReads == 1 })
	came := make(chan int32, all)
	if _, err := core(s).App().AddCustomer(7, 7, func(m *van.Message) { came <- m.Timestamp }); err != nil {
		t.Fatal(err)
	}
	for want := range int32(all) {
		select {
		case ts := <-came:
			if ts != want {
				t.Fatalf("request %d has arrived, want %d", ts, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("request %d has not arrived", want)
		}
	}
	testcluster.Counted(t, s, postoffice.Stats{PausedReads: 1})
}

// TestQueuedRequestsHaveABudget: the queued requests of one sender stay within its budget, which other senders do not
// use. The server does not read the others until the application is made.
func TestQueuedRequestsHaveABudget(t *testing.T) {
	const budget, size = 1 << 20, 100 << 10
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Log: logged.Logger(),
		Set: func(c *postoffice.Config) { c.RecvBudgetPeer = budget }})
	s := c.Servers[0]
	for worker := range c.Workers {
		for ts := range 20 {
			askFrom(t, c, worker, 7, ts, size)
		}
		until(t, "a part is queued, and the rest waits", func() bool {
			return s.Stats().QueuedRequests == (worker+1)*(budget/size) && s.Stats().PausedReads == uint64(worker+1)
		})
	}
	if !strings.Contains(logged.String(), "a peer is not read for now: its application does not exist yet") {
		t.Error("the log does not report that a peer is not read")
	}
	testcluster.Counted(t, s, postoffice.Stats{PausedReads: 2})
	came := make(chan int32, 40)
	if _, err := core(s).App().AddCustomer(7, 7, func(m *van.Message) { came <- m.Timestamp }); err != nil {
		t.Fatal(err)
	}
	until(t, "all requests arrive", func() bool { return len(came) == cap(came) })
}

// TestPlaces: only ids that the cluster has a place for may join it.
func TestPlaces(t *testing.T) {
	n := testcluster.Start(t, testcluster.Options{Workers: 2, Servers: 1}).Servers[0]
	for id, want := range map[int]bool{
		van.SchedulerID: true, van.ServerID(0): true, van.WorkerID(0): true, van.WorkerID(1): true,
		van.ServerID(1): false, van.WorkerID(2): false, 0: false, -1: false, van.AllNodes: false, van.Empty: false, 1 << 20: false,
	} {
		if got := core(n).MayJoin(id); got != want {
			t.Errorf("id %d: %t, want %t", id, got, want)
		}
	}
}

// TestUsedAgainAfterWait: a request that was waited for after its end is the caller's again: later ones that finish
// do not displace its next use.
func TestUsedAgainAfterWait(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	r := newRequest()
	if err := x.Open(&r.Request, "test", r, 1, nil); err != nil {
		t.Fatal(err)
	}
	if err := x.Wait(t.Context(), r.First(), 0); err != nil {
		t.Fatal(err)
	}
	<-r.finished
	<-r.recycled
	if err := x.Open(&r.Request, "test", r, 1, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	for range 4200 {
		o := newRequest()
		if err := x.Open(&o.Request, "test", o, 1, nil); err != nil {
			t.Fatal(err)
		}
	}
	if h, _, ok, err := x.Batch(r.First()); !ok || h != r.First() || err != nil || len(r.recycled) > 0 {
		t.Errorf("the request in flight is not there any more: found %t, %v; recycled %d times", ok, err, len(r.recycled))
	}
}

// TestAnswerOfAnother: an answer of a server that was not asked does not count, nor does a duplicate; log lines
// report both.
func TestAnswerOfAnother(t *testing.T) {
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Servers: 2, Log: logged.Logger()})
	x := customer(t, c)
	r := opened(t, x)
	answer := func(server int) {
		t.Helper()
		m := &van.Message{}
		m.Reset()
		m.Receiver, m.Push, m.Timestamp, m.AppID, m.CustomerID = van.WorkerID(0), true, r.First(), 5, 0
		if err := core(c.Servers[server]).App().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	before := testcluster.Stats(c.Workers[0]).ReceivedMessages
	answer(1)
	until(t, "the wrong answer has come", func() bool { return testcluster.Stats(c.Workers[0]).ReceivedMessages > before })
	if err := x.WaitSlice(t.Context(), r.First(), 0, 50*time.Millisecond); !errors.Is(err, postoffice.ErrPending) {
		t.Errorf("after the answer of another server: %v, want %v", err, postoffice.ErrPending)
	}
	answer(0)
	if err := x.Wait(t.Context(), r.First(), 20*time.Second); err != nil {
		t.Error(err)
	}
	answer(0)
	until(t, "lines about both", func() bool {
		return strings.Contains(logged.String(), "no request was sent to") && strings.Contains(logged.String(), "late or unknown answer") &&
			strings.Count(logged.String(), "dropped an answer") == 2
	})
}

// TestNotAcknowledged: with PS_RESEND, a request that is lost each time it is sent fails before its limit, and a log
// line reports it.
func TestNotAcknowledged(t *testing.T) {
	hook := &hooks.Van{}
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("worker", 0), Log: logged.Logger(), Set: func(c *postoffice.Config) {
		c.Resend, c.ResendTimeout = true, 10*time.Millisecond
	}})
	x := customer(t, c)
	r := opened(t, x)
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if m.IsControl() {
			return hooks.Pass
		}
		return hooks.Lose
	})
	if err := core(c.Workers[0]).App().Send(rawRequest(5, r.First(), 10)); err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, x.Wait(t.Context(), r.First(), time.Hour), van.ErrTimeout)
	hook.OnSend(nil)
	if !strings.Contains(logged.String(), "a message was not acknowledged") {
		t.Error("the log does not say that a message was given up")
	}
}

// TestNotAcknowledgedByALostPeer: with PS_RESEND, messages that a server has not acknowledged are canceled when it
// has left, long before the last try, and a log line reports it.
func TestNotAcknowledgedByALostPeer(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{}
		var logged vantest.Log
		o.Wrap, o.Log, o.Servers = hook.Wrap("worker", 0), logged.Logger(), 2
		o.Set = func(c *postoffice.Config) { c.Resend, c.ResendTimeout = true, time.Minute }
		c := testcluster.Start(t, o)
		x := customer(t, c)
		r := opened(t, x)
		hook.OnSend(func(m *van.Message) hooks.Verdict {
			if m.IsControl() {
				return hooks.Pass
			}
			return hooks.Lose
		})
		m := rawRequest(5, r.First(), 10)
		m.CustomerID = 0
		if err := core(c.Workers[0]).App().Send(m); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(logged.String(), "a message was not acknowledged") {
			t.Error("a message is given up before its receiver has gone")
		}
		c.Scheduler.Close() // it might report first that the server has left
		c.Servers[0].Close()
		vantest.Fails(t, x.Wait(t.Context(), r.First(), time.Hour), van.ErrPeerLost, "server 0 (id 8)")
		given := slices.DeleteFunc(strings.Split(logged.String(), "\n"), func(l string) bool {
			return !strings.Contains(l, "a message was not acknowledged") || !strings.Contains(l, "push request")
		})
		if len(given) != 1 || !strings.Contains(given[0], "server 0 (id 8)") || !strings.Contains(given[0], van.ErrPeerLost.Error()) {
			t.Errorf("%d lines say that the request was given up, want one that names server 0 and says %q: %q", len(given), van.ErrPeerLost, given)
		}
	}, testcluster.InProc, testcluster.TCP)
}

// TestRefused: a worker is notified that its request will not be answered, and its call fails at once; others do not.
func TestRefused(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 2
		c := testcluster.Start(t, o)
		w, s := c.Workers[0], c.Servers[0]
		x := customer(t, c)
		var rs []*request
		for range 4 {
			rs = append(rs, opened(t, x))
		}
		epoch, why := core(s).Epoch(int(w.ID())), &van.Error{Op: "test", Detail: "it has 12 bytes", Err: van.ErrQueueFull}
		refuse := func(s *postoffice.Node, r *request, epoch uint32, why error) {
			core(s).App().Refuse(int(w.ID()), epoch, 5, 0, r.First(), why)
		}
		refuse(c.Servers[1], rs[0], epoch, why) // a server that was not asked
		refuse(s, rs[0], epoch+1, why)
		refuse(s, rs[0], epoch, van.ErrMalformed)
		say := func(body string, from, to uint32) {
			t.Helper()
			m := &van.Message{}
			m.Reset()
			m.Sender, m.Receiver, m.Control.Cmd, m.Timestamp, m.Body = int(s.ID()), int(w.ID()), van.Heartbeat, 1, []byte(body)
			m.SetIncarnations(from, to)
			if err := core(s).Van().Send(m); err != nil {
				t.Fatal(err)
			}
		}
		body := fmt.Sprintf("stepaf/1 refused 5 0 %d full ", rs[0].First())
		say(body+"of another process", core(s).Incarnation()^1, core(w).Incarnation())
		say(body+"to another process", core(s).Incarnation(), core(w).Incarnation()^1)
		say("stepaf/1 refused 5 0 x full nonsense", core(s).Incarnation(), core(w).Incarnation())
		refuse(s, rs[1], epoch, why)
		vantest.Fails(t, x.Wait(t.Context(), rs[1].First(), 0), van.ErrQueueFull, "test with server 0", "refused there", "it has 12 bytes")
		refuse(s, rs[1], epoch, why) // it is over
		refuse(s, rs[2], epoch, fmt.Errorf("%w: 13 bytes", van.ErrInvalid))
		vantest.Fails(t, x.Wait(t.Context(), rs[2].First(), 0), van.ErrInvalid, "refused there: 13 bytes")
		for _, i := range []int{0, 3} {
			if !rs[i].Pending() {
				t.Errorf("request %d has failed: %v", i, <-rs[i].finished)
			}
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestLongQueuedRequest: the first request for an application that does not exist yet is queued and delivered,
// also if it is longer than STEPAF_RECV_BUDGET_PEER. The next one waits. A request that is longer than STEPAF_RECV_BUDGET
// fails at once, and its error has its length and the reason.
func TestLongQueuedRequest(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		const budget = 1 << 20
		o.Set = func(c *postoffice.Config) { c.RecvBudgetPeer, c.RecvBudget = budget, 4*budget }
		c := testcluster.Start(t, o)
		x := customer(t, c)
		send := func(size int) *request {
			r := opened(t, x)
			m := rawRequest(5, r.First(), size)
			m.CustomerID = 0
			if err := core(c.Workers[0]).App().Send(m); err != nil {
				t.Fatal(err)
			}
			return r
		}
		vantest.Fails(t, x.Wait(within(t, 20*time.Second), send(5*budget).First(), 0), van.ErrQueueFull, "no such application",
			fmt.Sprint("this one has ", 5*budget+520, " bytes (STEPAF_RECV_BUDGET=", 4*budget))
		first := send(3 * budget)
		second := send(10)
		until(t, "the second request waits", func() bool { return c.Servers[0].Stats().PausedReads == 1 })
		came := make(chan int, 3)
		if _, err := core(c.Servers[0]).App().AddCustomer(5, 5, func(m *van.Message) { came <- m.Vals.Len() }); err != nil {
			t.Fatal(err)
		}
		for _, want := range []int{3 * budget, 10} {
			select {
			case n := <-came:
				if n != want {
					t.Errorf("%d bytes have arrived, want %d", n, want)
				}
			case <-time.After(20 * time.Second):
				t.Fatalf("the request of %d bytes has not arrived", want)
			}
		}
		if !first.Pending() || !second.Pending() {
			t.Error("a request has failed")
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}
