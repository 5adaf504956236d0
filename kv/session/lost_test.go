package session_test

// Tests of sessions whose messages are lost, refused, late, or cross each other.

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// once does v with the first message of a kind, and lets the others pass.
func once(head int32, request bool, v hooks.Verdict) func(*van.Message) hooks.Verdict {
	done := false
	return func(m *van.Message) hooks.Verdict {
		if done || m.Head != head || m.Request != request {
			return hooks.Pass
		}
		done = true
		return v
	}
}

// rankOf starts one rank.
func rankOf(t *testing.T, c *testcluster.Cluster, i int) chan error {
	t.Helper()
	return serveOne(t, func() (*session.Rank, error) {
		r, err := session.NewRank(c.Servers[i], session.Options{})
		if err == nil {
			r.SetConfirmTime(time.Minute) // longer than a busy machine delays a message
		}
		return r, err
	}, i, standard(t))
}

// works has a session run a call and shuts it down.
func works(t *testing.T, s *session.Session, ended ends) {
	t.Helper()
	h := must[*session.Handle](t)(s.Call(limit(t), "rank"))
	if err := h.Wait(limit(t)); err != nil {
		t.Error(err)
	}
	if err := s.Shutdown(limit(t)); err != nil {
		t.Error(err)
	}
	for rank, err := range ended.all(t) {
		if err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}

// TestOpenIsRepeated: an Open whose message, or its answer, is lost or refused succeeds, and the rank's
// Serve goes on.
func TestOpenIsRepeated(t *testing.T) {
	for name, v := range map[string]struct {
		answer bool
		hooks.Verdict
	}{"lost": {false, hooks.Lose}, "answer lost": {true, hooks.Lose}, "answer refused": {true, hooks.Refuse(van.ErrQueueFull)}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hook := &hooks.Van{}
			c := testcluster.Start(t, testcluster.Options{Servers: 2, Wrap: hook.Wrap("server", 0)})
			ended := serve(t, c, standard(t))
			if v.answer {
				hook.OnSend(once(session.WantOpen, false, v.Verdict))
			} else {
				hook.OnReceive(once(session.WantOpen, true, v.Verdict))
			}
			works(t, open(t, c), ended)
		})
	}
}

// TestOpenWhileServeEnds: an Open that arrives while a Serve ends finds the next one.
func TestOpenWhileServeEnds(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Wrap: hook.Wrap("worker", 0)})
	r := must[*session.Rank](t)(session.NewRank(c.Servers[0], session.Options{}))
	standard(t)(0, r)
	ctx, leave := context.WithCancel(t.Context())
	first, next := make(chan error, 1), make(chan error, 1)
	go func() {
		first <- r.Serve(ctx)
		next <- r.Serve(context.Background())
	}()
	s := open(t, c)
	hook.OnSend(once(session.WantLeave, false, hooks.Lose)) // so that the rank waits for the answer
	leave()
	<-s.Failed()
	s2, err := session.Open(limit(t), c.Workers[1], session.Options{})
	if err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, <-first, context.Canceled)
	works(t, s2, ends{next})
}

// endsWithServe tests that a session fails because the Serve of rank 0 has ended.
func endsWithServe(t *testing.T, s *session.Session) {
	t.Helper()
	select {
	case <-s.Failed():
	case <-limit(t).Done():
		t.Fatal("the controller was not notified that Serve has ended")
	}
	vantest.Fails(t, s.Err(), van.ErrPeerLost, "rank 0", "its Serve has ended")
}

// endsWithController tests that the Serve of a rank ends because the controller has ended the session.
func endsWithController(t *testing.T, ended ends) {
	t.Helper()
	if err := ended.all(t)[0]; err == nil || !strings.Contains(err.Error(), "the controller has ended the session") {
		t.Errorf("Serve: %v, want the end by the controller", err)
	}
}

// TestLeaveForALoss: a rank whose Serve ends because its program has lost another peer notifies the controller, which is
// not lost.
func TestLeaveForALoss(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	r := must[*session.Rank](t)(session.NewRank(c.Servers[0], session.Options{}))
	ctx, leave := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Serve(ctx) }()
	s := open(t, c)
	leave(fmt.Errorf("%w: rank 1 of a communicator", van.ErrPeerLost))
	vantest.Fails(t, <-ended, van.ErrPeerLost, "rank 1 of a communicator")
	endsWithServe(t, s)
}

// TestNoticesWithFullQueues: the notice that a session has ended reaches the other side although the send queue is full
// at first.
func TestNoticesWithFullQueues(t *testing.T) {
	for name, head := range map[string]int32{"worker": session.WantAbort, "server": session.WantLeave} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hook := &hooks.Van{}
			c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap(name, 0)})
			r := must[*session.Rank](t)(session.NewRank(c.Servers[0], session.Options{}))
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			ended := make(chan error, 1)
			go func() { ended <- r.Serve(ctx) }()
			s := open(t, c)
			hook.OnSend(once(head, true, hooks.Refuse(van.ErrQueueFull)))
			if name == "worker" {
				s.Close()
				endsWithController(t, ends{ended})
				return
			}
			leave()
			endsWithServe(t, s)
		})
	}
}

// TestPausesOfNotices: a session that is not closed does not notify a lost rank more than once a second without end. While the
// other side waits for a notice, notices are frequent.
func TestPausesOfNotices(t *testing.T) {
	attempts := func(from, to time.Duration) (n int) {
		for at := from; at < to; at += session.NotifyPause(at) {
			n++
		}
		return n
	}
	if n := attempts(0, 500*time.Millisecond); n < 10 {
		t.Errorf("%d attempts in 500 ms, want 10 or more", n)
	}
	if n := attempts(time.Minute, 2*time.Minute); n > 60 {
		t.Errorf("%d attempts in the second minute, want 60 or fewer", n)
	}
}

// asks sends a request to another node, and waits for the answer: messages that were sent before have then arrived.
func asks(t *testing.T, from, to *postoffice.Node) {
	t.Helper()
	var app *kv.SimpleApp
	for _, n := range []*postoffice.Node{to, from} {
		app = must[*kv.SimpleApp](t)(kv.NewSimpleApp(n, kv.SimpleOptions{AppID: 5, CustomerID: 5}))
		t.Cleanup(func() { _ = app.Close() })
	}
	c := must[kv.Call](t)(app.Request(0, nil, postoffice.NodeID(to.ID())))
	if err := c.Wait(limit(t)); err != nil {
		t.Fatal(err)
	}
}

// TestNoticesBehindASlowHandler: the notice that a session has ended reaches the other side although that side receives it
// only after the wait for its answer has ended.
func TestNoticesBehindASlowHandler(t *testing.T) {
	for receiver, head := range map[string]int32{"server": session.WantAbort, "worker": session.WantLeave} {
		t.Run(receiver, func(t *testing.T) {
			t.Parallel()
			hook := &hooks.Van{}
			c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap(receiver, 0)})
			r := must[*session.Rank](t)(session.NewRank(c.Servers[0], session.Options{}))
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			ended := make(chan error, 1)
			go func() { ended <- r.Serve(ctx) }()
			s := open(t, c)
			hook.OnReceive(once(head, true, hooks.Keep))
			if receiver == "server" {
				s.Close()
				asks(t, c.Workers[0], c.Servers[0])
				hook.DeliverKept()
				endsWithController(t, ends{ended})
				return
			}
			leave()
			<-ended
			asks(t, c.Servers[0], c.Workers[0])
			hook.DeliverKept()
			endsWithServe(t, s)
		})
	}
}

// TestForgetBehindASlowHandler: a rank that receives the notice of a failed Open after that Open has returned takes part in the
// session of another worker.
func TestForgetBehindASlowHandler(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Servers: 2, Wrap: hook.Wrap("server", 0)})
	ended := ends{rankOf(t, c, 0)}
	hook.OnReceive(once(session.WantForget, true, hooks.Keep))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := session.Open(ctx, c.Workers[0], session.Options{})
	vantest.Fails(t, err, van.ErrTimeout, "rank 1 (server 1")
	asks(t, c.Workers[0], c.Servers[0])
	hook.DeliverKept()
	ended = append(ended, rankOf(t, c, 1))
	s, err := session.Open(limit(t), c.Workers[1], session.Options{})
	if err != nil {
		t.Fatal(err)
	}
	works(t, s, ended)
}

// TestCloseWhileFailing: while the ranks are being notified that a session fails, it may be closed by several
// goroutines. All ranks are still notified.
func TestCloseWhileFailing(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Servers: 3, Wrap: hook.Wrap("worker", 0)})
	r := must[*session.Rank](t)(session.NewRank(c.Servers[1], session.Options{}))
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() { left <- r.Serve(ctx) }()
	ended := ends{rankOf(t, c, 0), left, rankOf(t, c, 2)}
	s := open(t, c)
	telling, goOn, told := make(chan struct{}), make(chan struct{}), false
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if m.Head == session.WantAbort && !told {
			told = true
			close(telling)
			<-goOn
		}
		return hooks.Pass
	})
	leave()
	<-telling
	closed := make(chan struct{}, 2)
	for range 2 {
		go func() {
			s.Close()
			closed <- struct{}{}
		}()
	}
	select {
	case <-closed:
		t.Error("Close has returned while ranks were not told")
	case <-time.After(100 * time.Millisecond):
	}
	close(goOn)
	for rank, err := range ended.all(t) {
		if err == nil {
			t.Errorf("Serve of rank %d has ended without an error", rank)
		}
	}
	<-closed
	<-closed
}

// TestAnswerNotSent: if a rank can send neither the answer to a call nor the notice that its Serve has ended, the call fails.
func TestAnswerNotSent(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0)})
	ended := serve(t, c, standard(t))
	s := open(t, c)
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
	h := must[*session.Handle](t)(s.Call(limit(t), "rank"))
	vantest.Fails(t, h.Wait(limit(t)), van.ErrRequestRefused, `call 1, "rank"`, "rank 0 (server 0")
	err := ended.all(t)[0]
	if err == nil || !strings.Contains(err.Error(), "the controller has ended the session") { // its notice was faster
		vantest.Fails(t, err, van.ErrQueueFull, "a call could not be answered: ")
	}
	hook.OnSend(nil)
}

// TestForgetNotAnswered: if a rank cannot answer a worker that cancels its Open, another worker's session is not
// affected.
func TestForgetNotAnswered(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Wrap: hook.Wrap("server", 0)})
	ended := serve(t, c, standard(t))
	s := open(t, c)
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if m.Head == session.WantForget {
			return hooks.Refuse(van.ErrQueueFull)
		}
		return hooks.Pass
	})
	_, err := session.Open(limit(t), c.Workers[1], session.Options{})
	vantest.Fails(t, err, session.ErrRefused, "worker 0")
	works(t, s, ended)
}

// TestForgetLost: with PS_RESEND, lost messages to a rank are sent again before the controller leaves.
func TestForgetLost(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Servers: 2, Wrap: hook.Wrap("server", 0),
		Set: func(c *postoffice.Config) { c.Resend, c.ResendTimeout = true, 600*time.Millisecond }})
	ended := ends{rankOf(t, c, 0)}
	hook.OnReceive(once(session.WantForget, true, hooks.Lose))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := session.Open(ctx, c.Workers[0], session.Options{})
	vantest.Fails(t, err, van.ErrTimeout, "rank 1 (server 1")
	ended = append(ended, rankOf(t, c, 1))
	s, err := session.Open(limit(t), c.Workers[1], session.Options{})
	if err != nil {
		t.Fatal(err)
	}
	works(t, s, ended)
}

// TestForgetAfterAnotherOpen: a rank that receives the notice of a failed Open only after another worker's Open takes part
// in the session of that worker.
func TestForgetAfterAnotherOpen(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Servers: 2, Wrap: hook.Wrap("server", 0),
		Set: func(c *postoffice.Config) { c.Resend, c.ResendTimeout = true, 30*time.Second }}) // worker 0 waits for the answer to its notice
	ended := ends{rankOf(t, c, 0)}
	first := c.Workers[0].ID()
	var opens atomic.Int32
	hook.OnReceive(func(m *van.Message) hooks.Verdict {
		switch {
		case m.Head == session.WantForget && opens.Load() < 2:
			return hooks.Keep
		case m.Head == session.WantOpen && m.Request && m.Sender != int(first):
			if opens.Add(1) == 2 { // the first one was not answered
				go hook.DeliverKept()
			}
		}
		return hooks.Pass
	})
	var joined atomic.Bool
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		joined.Store(joined.Load() || m.Head == session.WantOpen)
		return hooks.Pass
	})
	joining, cancel := context.WithCancel(t.Context())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		_, err := session.Open(joining, c.Workers[0], session.Options{})
		failed <- err
	}()
	vantest.Eventually(t, 30*time.Second, "rank 0 has joined", func() bool { return joined.Load() && testcluster.InFlight(c.Workers[0]) < 2 })
	cancel()
	vantest.Eventually(t, 30*time.Second, "the notice has arrived", func() bool { return hook.Waiting() == 1 })
	ended = append(ended, rankOf(t, c, 1))
	s, err := session.Open(limit(t), c.Workers[1], session.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if n := opens.Load(); n < 2 || hook.Waiting() != 0 {
		t.Errorf("%d messages asked rank 0 to join, %d notices wait; want 2 at least, and none", n, hook.Waiting())
	}
	works(t, s, ended)
	c.Workers[0].Close() // its Open still waits for rank 1, which did not serve when the notice arrived
	vantest.Fails(t, <-failed, context.Canceled)
}

// TestTooLong: a call whose message exceeds the longest length fails on its own. The handles that its message was
// to release are released by the next one.
func TestTooLong(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	ended := serve(t, c, standard(t))
	s := open(t, c)
	h := must[*session.Handle](t)(s.Call(limit(t), "rank"))
	s.SetLongest(1000)
	s.Kill(h)
	_, err := s.Call(limit(t), "same", make([]byte, 600), make([]byte, 600))
	vantest.Fails(t, err, van.ErrInvalid, "at most 1000")
	if l := must[[]uint64](t)(s.Handles(limit(t), 0)); len(l) != 0 {
		t.Errorf("rank 0 has handles %d, want none", l)
	}
	works(t, s, ended)
}

// TestLostRankIsNamed: the error of a session whose rank is lost while a call is under way names the rank and the call, as
// soon as its request has failed.
func TestLostRankIsNamed(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Servers: 2, Wrap: hook.Wrap("server", 1)})
	began := make(chan struct{}, 2)
	ended := serve(t, c, func(_ int, r *session.Rank) {
		register(t, r, "wait", func(ctx context.Context, _ []any) (any, error) {
			began <- struct{}{}
			<-ctx.Done()
			return nil, nil
		})
	})
	s := open(t, c)
	h := must[*session.Handle](t)(s.Call(limit(t), "wait"))
	for range 2 {
		<-began
	}
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if m.Head == session.WantLeave {
			return hooks.Lose // the rank leaves without a message
		}
		return hooks.Pass
	})
	c.Servers[1].Close()
	vantest.Fails(t, h.Wait(limit(t)), van.ErrPeerLost, `call 1, "wait"`, "rank 1 (server 1")
	ended.all(t)
}

// watchedVan is a van whose peers a test reports as lost and as back.
type watchedVan struct {
	van.Van
	report func(id int, up bool, cause error)
}

func (v *watchedVan) Unwrap() van.Van { return v.Van }

func (v *watchedVan) WatchPeers(f func(id int, up bool, cause error)) {
	v.report = f
	if w, ok := van.As[van.PeerWatcher](v.Van); ok {
		w.WatchPeers(f)
	}
}

// TestLossOnOneSide: if only one side considers the other one lost, and it is back, the session ends on both sides. A rank that finds the
// controller again only after the time for its notice refuses the call in flight.
func TestLossOnOneSide(t *testing.T) {
	for _, c := range []struct {
		role string
		late bool
	}{{"worker", false}, {"server", false}, {"server", true}} {
		role, late := c.role, c.late
		t.Run(fmt.Sprintf("%s late=%t", role, late), func(t *testing.T) {
			t.Parallel()
			v := &watchedVan{}
			c := testcluster.Start(t, testcluster.Options{Wrap: func(r string, _ int, f van.Factory) van.Factory {
				if r != role {
					return f
				}
				return func(o van.Options) (inner van.Van, err error) {
					v.Van, err = f(o)
					return v, err
				}
			}})
			began := make(chan struct{})
			ended := serve(t, c, func(_ int, r *session.Rank) {
				register(t, r, "wait", func(ctx context.Context, _ []any) (any, error) {
					close(began)
					<-ctx.Done()
					return nil, nil
				})
			})
			s := open(t, c)
			h := must[*session.Handle](t)(s.Call(limit(t), "wait"))
			<-began
			if role == "worker" {
				rank := int(c.Servers[0].ID())
				v.report(rank, false, van.ErrPeerLost) // the first notice has failed when it returns
				v.report(rank, true, nil)
			} else {
				v.report(int(c.Workers[0].ID()), false, van.ErrPeerLost)
				if late {
					vantest.Fails(t, ended.all(t)[0], van.ErrPeerLost, "the controller")
				}
				v.report(int(c.Workers[0].ID()), true, nil)
			}
			if late {
				vantest.Fails(t, h.Wait(limit(t)), van.ErrRequestRefused, "rank 0", `call 1, "wait"`, "the controller, worker 0")
				return
			}
			vantest.Fails(t, h.Wait(limit(t)), van.ErrPeerLost, "rank 0")
			if err := ended.all(t)[0]; err == nil {
				t.Error("Serve has ended without an error")
			}
		})
	}
}
