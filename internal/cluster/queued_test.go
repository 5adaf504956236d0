package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestOneExpiry: requests that are queued, taken and queued again, for any application, share one timer, which ends
// with the node.
func TestOneExpiry(t *testing.T) {
	var a apps
	a.expireIn(time.Hour)
	first := a.expiry
	a.expireIn(time.Hour)
	if first.Stop() {
		t.Error("the earlier timer still runs")
	}
	a.close()
	if a.expiry.Stop() {
		t.Error("a timer runs on after the end")
	}
}

// TestEachExpires: a request that was queued later expires later.
func TestEachExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := keptNode(&Config{StartTimeout: time.Second}, slog.New(slog.DiscardHandler))
		a := &n.apps
		keep := func(sender int) {
			a.mu.Lock()
			defer a.mu.Unlock()
			msg := (&van.Message{Sender: sender}).Retain()
			a.queued[appKey{7, 7}] = append(a.queued[appKey{7, 7}], queuedRequest{msg, clock.Now()})
			a.count(msg, 1)
		}
		kept := func() int {
			a.mu.Lock()
			defer a.mu.Unlock()
			return a.messages
		}
		keep(9)
		a.expireIn(time.Second)
		for _, sender := range []int{11, 13} {
			time.Sleep(300 * time.Millisecond)
			keep(sender)
		}
		time.Sleep(110 * time.Millisecond)
		for _, want := range []int{2, 1, 0} {
			time.Sleep(300 * time.Millisecond) // until a moment after the next one has expired
			synctest.Wait()
			if got := kept(); got != want {
				t.Errorf("%d requests are kept, want %d", got, want)
			}
		}
	})
}

// TestQueueLimits: a request of a member is compared with the budget of its own messages, a request of a process that is not a member
// yet with the budget of all such processes, to which members' requests do not count. A member waits at its budget, except for a request
// that is longer than the budget for all; the other is refused.
func TestQueueLimits(t *testing.T) {
	cfg := env.Default()
	cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 3, 1, 1
	cfg.StrangerBudget, cfg.RecvBudgetPeer, cfg.RecvBudget = 30000, 50000, 90000
	n := keptNode(cfg, slog.New(slog.DiscardHandler))
	n.processes.change(9, func(p *process) { p.known = true })
	message := func(sender, size int) *van.Message {
		m := &van.Message{Meta: van.Meta{Request: true}, Sender: sender}
		m.Body = make([]byte, size-weight(m))
		return m
	}
	a := &n.apps
	for _, c := range []struct {
		sender, size int
		refused      bool
		why          string // "" if it is queued
	}{
		{9, 55000, false, ""}, // the first one may exceed the budget of the peer
		{11, 15000, false, ""},
		{13, 15000, false, ""},
		{13, 2000, true, "this one has 2000 bytes, and 30000 of processes that are not members are queued already (STEPAF_STRANGER_BUDGET=30000)"},
		{9, 95000, true, "this one has 95000 bytes (STEPAF_RECV_BUDGET=90000)"},
		{9, 2000, false, "this one has 2000 bytes, and 55000 are queued already (STEPAF_RECV_BUDGET_PEER=50000)"},
		{8, 2000, true, "STEPAF_STRANGER_BUDGET"}, // of this node itself
		{15, 2000, true, "no member"}, // there is no such rank
	} {
		m := message(c.sender, c.size)
		a.mu.Lock()
		never := a.whyNever(m)
		why := cmp.Or(never, a.whyFull(m))
		if why == "" {
			a.count(m, 1)
		}
		a.mu.Unlock()
		if (why == "") != (c.why == "") || !strings.Contains(why, c.why) || (never != "") != c.refused {
			t.Errorf("%d bytes of %d: refused %t, %q, want %t, %q", c.size, c.sender, never != "", why, c.refused, c.why)
		}
	}
}

// TestBacklogIsCounted: the messages after those that a busy handler works on count from the beginning: the budget of
// a sender is compared with them.
func TestBacklogIsCounted(t *testing.T) {
	n := &Node{nodeInfo: nodeInfo{cfg: &Config{}, rand: func() uint64 { return 0 }}}
	n.assemble()
	entered, release := make(chan struct{}, 3), make(chan struct{})
	c := newCustomer(n, 7, 7, 0, NewInbound(), func(*van.Message) {
		entered <- struct{}{}
		<-release
	})
	a := &n.apps
	k, each := appKey{7, 7}, 0
	a.mu.Lock()
	for ts := range int32(3) {
		msg := (&van.Message{Meta: van.Meta{Request: true, Timestamp: ts, Body: make([]byte, 1000)}, Sender: 9}).Retain()
		each = weight(msg)
		a.queued[k] = append(a.queued[k], queuedRequest{msg, clock.Now()})
		a.count(msg, 1)
	}
	c.deliverBacklog(a.takeQueued(k))
	a.mu.Unlock()
	<-entered
	c.backlogs.mu.Lock()
	if b := c.backlogs.queues[9]; b.bytes != 2*each {
		t.Errorf("%d bytes wait, want %d, those of two requests", b.bytes, 2*each)
	}
	c.backlogs.mu.Unlock()
	close(release)
}

// TestBudgetAfterABacklog: a receiver that waits since too many messages follow a busy handler continues when
// messages of its sender have been taken, and not before; it is counted as one waiting receiver.
func TestBudgetAfterABacklog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s backlogs
		request := func(ts int32) *van.Message {
			return (&van.Message{Meta: van.Meta{Request: true, Timestamp: ts}, Sender: 9}).Retain()
		}
		self := &nodeInfo{cfg: &Config{RecvBudgetPeer: 2 * weight(request(0))}, log: slog.New(slog.DiscardHandler)}
		s.init(self, new(overfull), func(*van.Message) {})
		s.fill([]queuedRequest{{msg: request(0)}, {msg: request(1)}, {msg: request(2)}})
		kept := make(chan bool, 1)
		go func() {
			kept <- s.enqueue(request(3))
		}()
		for ts := range int32(2) {
			synctest.Wait()
			if len(kept) > 0 {
				t.Fatalf("a message was queued behind %d others, more than the limit allows", 3-ts)
			}
			if m := s.next(9); m.Timestamp != ts {
				t.Fatalf("message %d is next, want %d", m.Timestamp, ts)
			}
		}
		synctest.Wait()
		if len(kept) == 0 {
			t.Error("the receiver waits though there is room")
			s.end()
		}
		if !<-kept {
			t.Error("the message overtakes the backlog")
		}
		if n := self.counts.paused.Load(); n != 1 {
			t.Errorf("counted %d times", n)
		}
	})
}

// TestEndOfABacklog: the end of a customer ends the wait of a receiver whose sender has too many messages behind a busy handler.
func TestEndOfABacklog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s backlogs
		request := func(ts int32) *van.Message {
			return (&van.Message{Meta: van.Meta{Request: true, Timestamp: ts}, Sender: 9}).Retain()
		}
		self := &nodeInfo{cfg: &Config{RecvBudgetPeer: weight(request(0))}, log: slog.New(slog.DiscardHandler)}
		refused := make(chan int32, 3) // timestamps
		s.init(self, new(overfull), func(m *van.Message) { refused <- m.Timestamp })
		s.fill([]queuedRequest{{msg: request(0)}, {msg: request(1)}})
		kept := make(chan bool, 1)
		go func() { kept <- s.enqueue(request(2)) }()
		synctest.Wait()
		if len(kept) > 0 {
			t.Fatal("the receiver does not wait")
		}
		s.end()
		synctest.Wait()
		if len(kept) == 0 {
			t.Error("the receiver waits after the end")
			s.changed.Broadcast()
		}
		if m := s.next(9); !<-kept || m != nil || len(refused) != 3 {
			t.Errorf("after the end: message %v is next and %d are refused; want none, and all 3", m, len(refused))
		}
	})
}

// sent is a van that records messages.
type sent struct {
	van.Van
	mu     sync.Mutex
	bodies []string
}

func (s *sent) Send(m *van.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bodies = append(s.bodies, string(m.Body))
	return nil
}

// all returns the bodies of the messages so far.
func (s *sent) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.bodies)
}

// TestResendCancellations: a server that is back receives the cancellations of the meantime; its replacement process, which has
// none of the requests, does not.
func TestResendCancellations(t *testing.T) {
	out := &sent{}
	n := &Node{nodeInfo: nodeInfo{log: slog.New(slog.DiscardHandler)}, transport: transport{van: out}}
	n.assemble()
	n.processes.change(8, func(p *process) { p.known, p.incarnation, p.lost = true, 5, van.ErrPeerLost })
	n.notices.cancel(8, 7, Canceled{Customer: 1, First: 20, Count: 3})
	if len(out.bodies) > 0 {
		t.Fatalf("a lost server is told %q", out.bodies)
	}
	n.processes.change(8, func(p *process) { p.lost = nil })
	n.notices.resend(8)
	if len(out.bodies) != 1 || out.bodies[0] != "stepaf/1 given-up 7 1 20 3" {
		t.Fatalf("a server that is back is told %q", out.bodies)
	}
	n.processes.change(8, func(p *process) { p.incarnation = 6 })
	n.notices.resend(8)
	if len(out.bodies) != 1 {
		t.Errorf("another process is told %q", out.bodies[1:])
	}
}

// ending is a Sink that reports its end.
type ending chan error

func (e ending) Answer(int, int, *van.Message) error { return nil }
func (e ending) Finished(err error)                  { e <- err }
func (e ending) Recycle()                            {}

// TestOpenDuringALoss: requests that are opened while their peer is found lost end, each once. The race detector
// checks that.
func TestOpenDuringALoss(t *testing.T) {
	n := &Node{nodeInfo: nodeInfo{cfg: &Config{}, log: slog.New(slog.DiscardHandler), rand: func() uint64 { return 0 }}, transport: transport{van: &sent{}}}
	n.setName("the test's node")
	n.assemble()
	n.processes.change(8, func(p *process) { p.known, p.lost = true, van.ErrPeerLost })
	c := newCustomer(n, 7, 1, 0, NewInbound(), func(*van.Message) {})
	stop, losses := make(chan struct{}), sync.WaitGroup{}
	losses.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				c.peerLost(8, van.ErrPeerLost, math.MaxUint64)
			}
		}
	})
	for range 50_000 {
		r, end := new(Request), make(ending, 2)
		if err := c.Open(r, "ask", end, 1, []int{8}); err != nil {
			t.Fatal(err)
		}
		if err := r.Call(0).Wait(t.Context()); !errors.Is(err, van.ErrPeerLost) || len(end) != 1 {
			t.Fatalf("%v, ended %d times", err, len(end))
		}
	}
	close(stop)
	losses.Wait()
}

// TestEndWithASlice: a request that ends at the moment at which the slice of its waiter ends counts as finished, whichever of the two is
// noticed first. It has its result then. Time is virtual: both functions end at the same moment.
func TestEndWithASlice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Node{nodeInfo: nodeInfo{cfg: &Config{}, log: slog.New(slog.DiscardHandler), rand: func() uint64 { return 0 }}, lifetime: newLifetime(), transport: transport{van: &sent{}}}
		n.setName("the test's node")
		n.assemble()
		c := newCustomer(n, 7, 1, 0, NewInbound(), func(*van.Message) {})
		unreported := 0
		c.OnUnreported(func(n int) { unreported = n })
		for i := range 100 {
			r, err, ended := new(Request), make(chan error, 1), make(chan struct{})
			if err := c.Open(r, "ask", make(ending, 1), 1, []int{8}); err != nil {
				t.Fatal(err)
			}
			both := []func(){
				func() { err <- c.WaitSlice(t.Context(), r.First(), 0, time.Second) },
				func() { time.Sleep(time.Second); c.Abort(r, van.ErrInvalid); close(ended) },
			}
			go both[i%2]()
			synctest.Wait()
			go both[1-i%2]()
			<-ended
			got := <-err
			if got == ErrPending {
				if unreported != 1 {
					t.Fatalf("%d requests are finished and not waited for, want 1", unreported)
				}
				got = c.Try(r.First())
			}
			if !errors.Is(got, van.ErrInvalid) || unreported != 0 {
				t.Fatalf("got %v, want ErrInvalid; %d requests are not waited for", got, unreported)
			}
		}
	})
}

// TestWhatEndsADrain: the last answer, the return of the last handler, a cancellation and the loss of the sender each end a Drain that
// waits for them, and the end of the customer ends it with an error.
func TestWhatEndsADrain(t *testing.T) {
	gone := errors.New("gone")
	for _, x := range []struct {
		name          string
		request, runs bool
		end           func(c *Customer, in *Inbound, r *Accepted)
		want          error
	}{
		{"answer", true, false, func(_ *Customer, in *Inbound, r *Accepted) { in.Leave(r) }, nil},
		{"return", false, true, func(_ *Customer, in *Inbound, _ *Accepted) { in.Exit(9) }, nil},
		{"answer and return", true, true, func(_ *Customer, in *Inbound, r *Accepted) { in.Leave(r); synctest.Wait(); in.Exit(9) }, nil},
		{"return and answer", true, true, func(_ *Customer, in *Inbound, r *Accepted) { in.Exit(9); synctest.Wait(); in.Leave(r) }, nil},
		{"cancellation", true, false, func(_ *Customer, in *Inbound, _ *Accepted) { in.cancel(Canceled{Sender: 9, First: 4, Count: 1}, 1) }, nil},
		{"loss", true, false, func(c *Customer, _ *Inbound, _ *Accepted) {
			c.node.processes.setLost(9, gone)
			c.peerLost(9, gone, math.MaxUint64)
		}, nil},
		{"end of the customer", true, true, func(c *Customer, _ *Inbound, _ *Accepted) { c.Close() }, van.ErrClosed},
	} {
		t.Run(x.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &Node{nodeInfo: nodeInfo{cfg: &Config{NumWorkers: 1, GroupSize: 1}, log: slog.New(slog.DiscardHandler), rand: func() uint64 { return 0 }}, lifetime: newLifetime(), transport: transport{van: &sent{}}}
				n.setName("the test's node")
				n.assemble()
				in, r, done := NewInbound(), new(Accepted), make(chan error, 1)
				c := newCustomer(n, 7, 7, 0, in, func(*van.Message) {})
				if x.runs {
					in.Enter(9)
				}
				if x.request {
					if err := in.Accept(r, 9, 1, 0, 4); err != nil {
						t.Fatal(err)
					}
				}
				go func() { done <- in.Drain(t.Context()) }()
				if synctest.Wait(); len(done) > 0 {
					t.Fatalf("Drain does not wait: %v", <-done)
				}
				x.end(c, in, r)
				if synctest.Wait(); len(done) == 0 {
					t.Error("Drain still waits")
					in.close(gone)
				}
				if err := <-done; !errors.Is(err, x.want) || x.want == nil && err != nil {
					t.Errorf("%v, want %v", err, x.want)
				}
			})
		})
	}
}

// TestFailsItsOwnRequest: an error for a timestamp fails no later request in the same slot of the table.
func TestFailsItsOwnRequest(t *testing.T) {
	n := &Node{nodeInfo: nodeInfo{cfg: &Config{}, log: slog.New(slog.DiscardHandler), rand: func() uint64 { return 0 }}, lifetime: newLifetime(), transport: transport{van: &sent{}}}
	n.setName("the test's node")
	n.assemble()
	n.processes.change(8, func(p *process) { p.known = true })
	c, err := n.App().AddCustomer(7, 7, func(*van.Message) {})
	if err != nil {
		t.Fatal(err)
	}
	c.Skip(1024 + 5)
	r, end := new(Request), make(ending, 2)
	if err := c.Open(r, "ask", end, 2, []int{8}); err != nil {
		t.Fatal(err)
	}
	fail := func(ts int32, from int) {
		n.apps.failRequest(&van.Meta{AppID: 7, CustomerID: 7, Timestamp: ts}, from, van.ErrTimeout)
	}
	fail(5, 8)
	fail(6, 8)
	fail(7, 8)
	fail(1024+7, 8)
	fail(1024+5, 10)
	if !r.Pending() {
		t.Fatalf("it has failed: %v", <-end)
	}
	fail(1024+6, 8)
	if err := c.Wait(t.Context(), r.First(), 0); !errors.Is(err, van.ErrTimeout) || len(end) != 1 {
		t.Errorf("%v, ended %d times", err, len(end))
	}
}

// TestWhatEndsAWaitForAnApplication: a request that waits because its sender's queue is full is delivered when its application
// is made, and refused when the limit of time has passed. Its receiver continues, too, when the request or queued ones are
// canceled, when the sender is lost, and when this node's program or the node ends.
func TestWhatEndsAWaitForAnApplication(t *testing.T) {
	const limit = time.Minute
	refused := "stepaf/1 refused 7 0 1 refused no such application: server 0 has not made application 7 within 1m0s (STEPAF_START_TIMEOUT)"
	cancel := func(n *Node, ts int32) {
		n.apps.cancel(7, Canceled{Sender: 9, First: ts, Count: 1}, n.processes.of(9).epoch)
	}
	for _, x := range []struct {
		name string
		end  func(t *testing.T, n *Node)
		came string // the timestamps of the requests that the application gets, if it is made afterwards
		told string // a notice to the sender
	}{
		{"application", func(*testing.T, *Node) {}, "[1 2]", ""},
		{"limit", func(*testing.T, *Node) { time.Sleep(limit + 2*time.Millisecond) }, "[]", refused},
		{"queued request canceled", func(_ *testing.T, n *Node) { cancel(n, 1) }, "[2]", ""},
		{"request canceled", func(_ *testing.T, n *Node) { cancel(n, 2) }, "[1]", ""},
		{"sender lost", func(_ *testing.T, n *Node) {
			n.processes.setLost(9, van.ErrPeerLost)
			n.apps.peerLost(9, van.ErrPeerLost, math.MaxUint64)
		}, "[]", ""},
		{"end of the program", func(_ *testing.T, n *Node) { n.apps.refuseNew(func() string { return "stop" }) }, "[]", "stepaf/1 refused 7 0 2 finished"},
		{"end of the node", func(_ *testing.T, n *Node) { n.apps.failAll(van.ErrClosed) }, "[]", ""},
	} {
		t.Run(x.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := env.Default()
				cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 1, 1, 1
				cfg.RecvBudgetPeer, cfg.StartTimeout = 1000, limit
				n := keptNode(cfg, slog.New(slog.DiscardHandler))
				out := &sent{}
				n.notices.van = out
				known(n, 9, 2)
				done := make(chan struct{}, 2)
				go func() {
					for ts := range int32(2) {
						m := &van.Message{}
						m.Reset()
						m.Sender, m.Request, m.AppID, m.CustomerID, m.Timestamp = 9, true, 7, 0, ts+1
						m.SetIncarnations(2, n.incarnation)
						n.receive(m)
						done <- struct{}{}
					}
				}()
				synctest.Wait()
				if len(done) != 1 || n.counts.paused.Load() != 1 {
					t.Fatalf("%d of 2 requests are queued, want 1, and the other one waits", len(done))
				}
				x.end(t, n)
				synctest.Wait()
				if waits := x.name == "application"; waits != (len(done) == 1) {
					t.Fatalf("the request waits: %t, want %t", len(done) == 1, waits)
				}
				came := []int32{}
				_, err := n.App().AddCustomer(7, 7, func(m *van.Message) { came = append(came, m.Timestamp) })
				if ended := x.name == "end of the node"; ended != (err != nil) {
					t.Errorf("the node has ended: %t, making the application: %v", ended, err)
				}
				synctest.Wait()
				if len(done) != 2 {
					t.Error("the request waits for its application, which exists")
				}
				if got := fmt.Sprint(came); got != x.came {
					t.Errorf("the application gets %s, want %s", got, x.came)
				}
				if x.told == "" && len(out.bodies) > 0 || x.told != "" && !slices.ContainsFunc(out.bodies, func(s string) bool { return strings.HasPrefix(s, x.told) }) {
					t.Errorf("the sender gets the notices %q, want %q", out.bodies, x.told)
				}
				n.apps.close()
			})
		})
	}
}

// TestPollsDoNotWaitForAnApplication: a request that a Poll delivers is queued beyond the budget of its sender, up to that of all.
// No further Poll begins then until the queued requests of that sender are below its budget.
func TestPollsDoNotWaitForAnApplication(t *testing.T) {
	cfg := env.Default()
	cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 1, 1, 1
	cfg.RecvBudgetPeer, cfg.RecvBudget = 1000, 3*512
	n := keptNode(cfg, slog.New(slog.DiscardHandler))
	known(n, 9, 2)
	var refused []string
	for ts := range int32(4) {
		m := (&van.Message{Meta: van.Meta{Request: true, AppID: 7, Timestamp: ts}, Sender: 9}).Retain()
		m.ProcessEpoch = n.processes.of(9).epoch
		_, why := n.apps.tryEnqueue(appKey{7, 7}, m, true)
		m.Release()
		refused = append(refused, why)
		if got, want := n.apps.overfull.any(), ts > 0; got != want {
			t.Errorf("after request %d: overfull %t, want %t", ts, got, want)
		}
	}
	if n.apps.messages != 3 || strings.Join(refused[:3], "") != "" || !strings.Contains(refused[3], "512 bytes, and 1536 are queued already (STEPAF_RECV_BUDGET_PEER") {
		t.Errorf("%d requests are queued, want 3; refused: %q, want the last one", n.apps.messages, refused)
	}
	for ts, over := range []bool{true, false} {
		n.apps.cancel(7, Canceled{Sender: 9, First: int32(ts), Count: 1}, n.processes.of(9).epoch)
		if n.apps.overfull.any() != over {
			t.Errorf("request %d is canceled: overfull %t, want %t", ts, !over, over)
		}
	}
	n.apps.close()
}

// TestMissingApplicationDelaysOthers: a request that waits for its application delays its sender's requests for an application that
// this server has for maxDelay at most, then it is refused, and so are the following ones that the queue cannot hold. If no other
// request of the sender can be delayed, the wait has no such limit.
func TestMissingApplicationDelaysOthers(t *testing.T) {
	const told = "stepaf/1 refused 7 0 %d full no such application: server 0 has not made application 7, " +
		"and requests of this sender have waited for 10s: this one has 512 bytes, and 512 are queued already (STEPAF_RECV_BUDGET_PEER=1000)"
	for _, x := range []struct {
		name     string
		sender   int
		has      func(App) error // makes the other application
		refused  bool
		overload int // requests for the missing application beyond the queue
	}{
		{"a server's other application", 9, func(a App) error {
			_, err := a.AddServer(8, 8, NewInbound(), func(*van.Message) {})
			return err
		}, true, 3},
		{"no application", 9, func(App) error { return nil }, false, 1},
		{"an application that accepts no requests", 9, func(a App) error {
			_, err := a.AddCustomer(8, 8, func(*van.Message) {})
			return err
		}, false, 1},
		{"a sender of the same role", 10, func(a App) error {
			_, err := a.AddServer(8, 8, NewInbound(), func(*van.Message) {})
			return err
		}, false, 1},
	} {
		t.Run(x.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := env.Default()
				cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 1, 2, 1
				cfg.RecvBudgetPeer, cfg.StartTimeout = 1000, time.Hour
				n := keptNode(cfg, slog.New(slog.DiscardHandler))
				out := &sent{}
				n.notices.van = out
				known(n, x.sender, 2)
				if err := x.has(n.App()); err != nil {
					t.Fatal(err)
				}
				done := make(chan int32, 8)
				requests := make(chan int32, 8)
				go func() {
					for ts := range requests {
						m := &van.Message{}
						m.Reset()
						m.Sender, m.Request, m.AppID, m.CustomerID, m.Timestamp = x.sender, true, 7, 0, ts
						m.SetIncarnations(2, n.incarnation)
						n.receive(m)
						done <- ts
					}
				}()
				for ts := range int32(1 + x.overload) {
					requests <- ts
				}
				time.Sleep(maxDelay - time.Millisecond)
				synctest.Wait()
				if len(done) != 1 || len(out.all()) > 0 {
					t.Errorf("before the limit: %d requests have been handled, want 1; refused: %q", len(done), out.all())
				}
				time.Sleep(2 * time.Millisecond)
				synctest.Wait()
				var want []string
				if x.refused {
					for ts := range x.overload {
						want = append(want, fmt.Sprintf(told, ts+1))
					}
				}
				if !slices.Equal(out.all(), want) || len(done) != 1+len(want) {
					t.Errorf("after the limit: %d requests have been handled, want %d; refused: %q, want %q", len(done), 1+len(want), out.all(), want)
				}
				if got := n.QueuedRequests(); got != 1 {
					t.Errorf("%d requests are queued, want 1", got)
				}
				close(requests)
				n.apps.failAll(van.ErrClosed)
				n.apps.close()
			})
		})
	}
}
