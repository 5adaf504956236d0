package cluster

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// freed owns the messages of a story.
type freed struct {
	mu sync.Mutex
	n  int
}

func (f *freed) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n
}

func (f *freed) Free(*van.Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n++
}

// TestMessageStories: messages of known, unknown, replaced and lost processes are sent to applications that exist, are
// made later, or are slow, in virtual time. The usage is always that of the queued messages, and in the end every
// message has been released. Messages of one moment arrive in any order; this has no golden file.
func TestMessageStories(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) { keptStory(t, rand.New(rand.NewPCG(seed, 1)), io.Discard) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// TestPendingMessagesExpire: messages under the id of a member from a process that does not become the member are queued
// for pendingTime, then released, and a log line reports it; the same holds for messages that arrive when none is
// queued any more.
func TestPendingMessagesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const said = "dropped messages of processes that did not become members"
		var logged vantest.Log
		cfg := env.Default()
		cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 1, 1, 1
		n := keptNode(cfg, logged.Logger())
		known(n, 9, 1)
		owner := &freed{}
		for i := range 3 {
			m := &van.Message{}
			m.Reset()
			m.Sender, m.Request, m.Push = 9, true, true
			m.SetIncarnations(2, n.incarnation)
			m.Adopt(owner, nil)
			n.receive(m)
			m.Release()
			time.Sleep(pendingTime - time.Nanosecond)
			synctest.Wait()
			if owner.count() != i || strings.Count(logged.String(), said) != i {
				t.Errorf("message %d: given back %d times before its time; logged: %q", i, owner.count(), logged.String())
			}
			time.Sleep(time.Millisecond)
			synctest.Wait()
			if owner.count() != i+1 || strings.Count(logged.String(), said) != i+1 {
				t.Errorf("message %d: given back %d times after its time; logged: %q", i, owner.count(), logged.String())
			}
		}
		if got, want := countersOf(n), (Counters{StrangerMessages: 3, StrangerBytes: 3 * 512}); got != want {
			t.Errorf("%+v is counted, want %+v", got, want)
		}
	})
}

// TestPendingMessagesExpireEach: messages of several unknown processes are dropped pendingTime after each arrived, not all
// with the last one.
func TestPendingMessagesExpireEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := env.Default()
		cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 4, 1, 1
		n := keptNode(cfg, slog.New(slog.DiscardHandler))
		owner := &freed{}
		const apart = 2 * time.Second
		for id := 9; id <= 15; id += 2 {
			m := &van.Message{}
			m.Reset()
			m.Sender, m.Request, m.Push = id, true, true
			m.SetIncarnations(2, n.incarnation)
			m.Adopt(owner, nil)
			n.receive(m)
			m.Release()
			time.Sleep(apart)
		}
		time.Sleep(pendingTime - 4*apart + time.Millisecond) // since the first
		for want := 1; want <= 4; want++ {
			synctest.Wait()
			if owner.count() != want {
				t.Errorf("%d messages are dropped %s after message %d, want %d", owner.count(), pendingTime, want, want)
			}
			time.Sleep(apart)
		}
	})
}

// TestBudgetAfterPendingMessages: messages of a process wait while a handler is busy with those from before it was known,
// when they use up the budget, and are counted once; they continue in order when the budget allows it.
func TestBudgetAfterPendingMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := env.Default()
		cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 1, 1, 1
		cfg.RecvBudgetPeer = 2 * 512
		var logged vantest.Log
		n := keptNode(cfg, logged.Logger())
		known(n, 9, 1)
		came, free := make(chan int32, 8), make(chan struct{})
		if _, err := n.App().AddCustomer(7, 7, func(m *van.Message) {
			came <- m.Timestamp
			<-free
		}); err != nil {
			t.Fatal(err)
		}
		send := func(ts int32) {
			m := &van.Message{}
			m.Reset()
			m.Sender, m.Request, m.AppID, m.Timestamp = 9, true, 7, ts
			m.SetIncarnations(2, n.incarnation)
			n.receive(m)
			m.Release()
		}
		send(0)
		send(1)
		known(n, 9, 2)
		synctest.Wait()
		send(2)
		returned := make(chan struct{})
		go func() {
			send(3)
			close(returned)
		}()
		synctest.Wait()
		select {
		case <-returned:
			t.Error("a message is kept beyond the budget")
		default:
		}
		if got, want := countersOf(n), (Counters{PausedReads: 1}); got != want || strings.Count(logged.String(), "a peer is not read for now") != 1 {
			t.Errorf("%+v is counted, want %+v; logged: %q", got, want, logged.String())
		}
		close(free)
		<-returned
		for want := range int32(4) {
			if ts := <-came; ts != want {
				t.Errorf("message %d comes, want %d", ts, want)
			}
		}
	})
}

// telling is a van that calls a function for each sent message.
type telling struct {
	van.Van // nil: an unexpected call panics
	send    func(*van.Message)
}

func (v telling) Send(m *van.Message) error { v.send(m); return nil }

// keptNode is the server of a story. Its machine has not started.
func keptNode(cfg *Config, log *slog.Logger) *Node {
	n := &Node{nodeInfo: nodeInfo{cfg: cfg, role: van.Server, incarnation: 77}, lifetime: newLifetime()}
	n.rand = func() uint64 { return 5 }
	n.id.Store(8)
	n.setName("server 0")
	n.log = log
	m, err := membership.New(membership.Config{Role: van.Server, NumWorkers: 3, NumServers: 1, GroupSize: 1,
		Self:      van.Node{Role: van.Server, ID: van.Empty, Hostname: "127.0.0.1", Port: 9001},
		Scheduler: van.Node{Role: van.Scheduler, ID: van.SchedulerID, Hostname: "127.0.0.1", Port: 9000}})
	if err != nil {
		panic(err)
	}
	n.assemble()
	n.control.machine = m
	return n
}

func keptStory(t *testing.T, rng *rand.Rand, w io.Writer) {
	cfg := env.Default()
	cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 3, 1, 1
	cfg.RecvBudgetPeer, cfg.RecvBudget, cfg.StrangerBudget = 6000, []int{0, 12_000}[rng.IntN(2)], 5000
	cfg.StartTimeout = []time.Duration{0, time.Minute}[rng.IntN(2)]
	n := keptNode(cfg, slog.New(slog.DiscardHandler))
	ids := []int{9, 11, 13, 15} // the last one is impossible
	var mu sync.Mutex
	var came []string
	n.notices.van = telling{send: func(m *van.Message) { // that it refuses a request
		mu.Lock()
		defer mu.Unlock()
		came = append(came, fmt.Sprint("told ", m.Receiver, " ", string(m.Body)))
	}}
	slow := map[int]chan struct{}{}
	handler := func(app int) func(*van.Message) {
		return func(m *van.Message) {
			mu.Lock()
			wait := slow[app]
			mu.Unlock()
			if wait != nil {
				<-wait
			}
			mu.Lock()
			defer mu.Unlock()
			came = append(came, fmt.Sprint(m.Sender, "/", app, "/", m.Timestamp, "/", m.ProcessEpoch))
		}
	}
	owner := &freed{}
	made := 0
	lanes := map[int]chan *van.Message{}
	var all sync.WaitGroup
	for _, id := range ids { // each peer's messages arrive in order
		c := make(chan *van.Message, 1000)
		lanes[id] = c
		all.Go(func() {
			for m := range c {
				n.receive(m)
				m.Release()
			}
		})
	}
	ts := map[int]int32{}
	incarnations := map[int]uint32{}
	message := func(id int) *van.Message {
		m := &van.Message{}
		m.Reset()
		m.Sender = id
		from := incarnations[id]
		switch rng.IntN(6) {
		case 0:
			from = uint32(rng.IntN(4))
		case 1:
			from = uint32(1 + rng.IntN(3))
		}
		m.SetIncarnations(from, []uint32{77, 77, 77, 77, 77, 77, 78, 0}[rng.IntN(8)])
		m.Adopt(owner, nil)
		made++
		return m
	}
	customers := map[int]*Customer{}
	for range 160 {
		id := ids[rng.IntN(len(ids))]
		switch k := rng.IntN(24); {
		case k < 10:
			m := message(id)
			ts[id]++
			m.Request, m.Push, m.Timestamp, m.AppID, m.CustomerID = rng.IntN(12) > 0, true, ts[id], int32(rng.IntN(3)), int32(rng.IntN(2))
			m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8)), backend.Bytes(make([]byte, []int{0, 100, 1500, 3000}[rng.IntN(4)]))
			lanes[id] <- m
		case k < 12: // it cancels some
			m := message(id)
			m.Control.Cmd = van.Heartbeat
			m.Body = fmt.Appendf(nil, "%s%d %d %d %d", cancelPrefix, rng.IntN(3), rng.IntN(2), max(ts[id]-int32(rng.IntN(5)), 0), rng.IntN(4))
			lanes[id] <- m
		case k < 14:
			incarnation := uint32(rng.IntN(4))
			incarnations[id] = incarnation
			n.pending.setProcess(id, incarnation, rng.IntN(3) == 0)
			if rng.IntN(3) > 0 {
				n.pending.connected(id, nil)
			}
			fmt.Fprintln(w, "note", id, incarnation)
		case k == 14:
			cause := errors.New("lost")
			n.processes.setLost(id, cause)
			n.apps.peerLost(id, cause, math.MaxUint64)
			fmt.Fprintln(w, "lost", id)
		case k == 15, k == 16:
			n.processes.setLost(id, nil)
			n.pending.deliverPending(id)
			fmt.Fprintln(w, "admit", id)
		case k == 17, k == 18:
			app := rng.IntN(3)
			if customers[app] != nil {
				break
			}
			c, err := n.App().AddCustomer(app, app, handler(app))
			fmt.Fprintln(w, "customer", app, golden.Err(err))
			if err == nil {
				c.OnCanceled(func(x Canceled) {
					mu.Lock()
					defer mu.Unlock()
					came = append(came, fmt.Sprint("given up ", app, x))
				})
				customers[app] = c
			}
		case k == 19:
			app := rng.IntN(3)
			if c := customers[app]; c != nil && rng.IntN(3) == 0 {
				c.Close()
				delete(customers, app)
				fmt.Fprintln(w, "closed", app)
			}
		case k < 22: // a handler is slow, or goes on
			app := rng.IntN(3)
			mu.Lock()
			if c := slow[app]; c != nil {
				close(c)
				delete(slow, app)
			} else {
				slow[app] = make(chan struct{})
			}
			mu.Unlock()
		case k == 22:
			time.Sleep(time.Duration(rng.IntN(5000)) * time.Millisecond)
		case rng.IntN(4) == 0:
			time.Sleep([]time.Duration{pendingTime, 2*pendingTime + time.Second, time.Minute, queueTime + 1}[rng.IntN(4)])
		}
		synctest.Wait()
		mu.Lock()
		slices.Sort(came) // different peers send concurrently
		fmt.Fprintln(w, came)
		came = nil
		mu.Unlock()
		n.look(t, w, ids)
		mu.Lock()
		for app, c := range customers {
			for back := range int32(4) {
				for _, epoch := range []uint32{1, 2, 3} {
					if c.IsAwaited(id, epoch, 0, ts[id]-back) {
						came = append(came, fmt.Sprint("wanted ", app, epoch, back))
					}
				}
			}
		}
		slices.Sort(came)
		fmt.Fprintln(w, came, owner.count())
		came = nil
		mu.Unlock()
	}
	mu.Lock()
	for app, c := range slow {
		close(c)
		delete(slow, app)
	}
	mu.Unlock()
	if rng.IntN(2) == 0 {
		synctest.Wait()
		n.look(t, w, ids)
	}
	n.apps.failAll(van.ErrClosed)
	n.pending.close()
	for _, c := range lanes {
		close(c)
	}
	all.Wait()
	n.apps.close()
	synctest.Wait()
	n.look(t, w, ids)
	if got := owner.count(); got != made {
		t.Errorf("%d of %d messages were given back", got, made)
	}
	n.apps.mu.Lock()
	defer n.apps.mu.Unlock()
	n.pending.mu.Lock()
	defer n.pending.mu.Unlock()
	if n.apps.overfull.any() {
		t.Error("a queue is overfull at the end")
	}
	if n.apps.messages != 0 || n.apps.bytes != 0 || len(n.apps.queued) != 0 || len(n.apps.usage) != 0 || n.pending.bytes != 0 {
		t.Errorf("kept at the end: %d messages, %d bytes, and %d bytes of strangers", n.apps.messages, n.apps.bytes, n.pending.bytes)
	}
}

// look writes the retained state, and compares the accounts with it.
func (n *Node) look(t *testing.T, w io.Writer, ids []int) {
	t.Helper()
	a, s := &n.apps, &n.pending
	a.mu.Lock()
	defer a.mu.Unlock()
	by, messages, bytes := map[int]usage{}, 0, 0
	for _, l := range a.queued {
		for _, e := range l {
			x := by[e.msg.Sender]
			by[e.msg.Sender] = usage{x.messages + 1, x.bytes + weight(e.msg), a.usage[e.msg.Sender].since, a.usage[e.msg.Sender].over}
			messages, bytes = messages+1, bytes+weight(e.msg)
		}
	}
	if a.messages != messages || a.bytes != bytes || len(a.usage) != len(by) {
		t.Errorf("%d messages of %d bytes of %d senders are counted, %d of %d of %d are kept", a.messages, a.bytes, len(a.usage), messages, bytes, len(by))
	}
	for id, x := range by {
		if a.usage[id] != x {
			t.Errorf("%v of sender %d is counted, %v is kept", a.usage[id], id, x)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	total, unknown, refused := 0, 0, 0
	for _, id := range ids {
		if v := s.senders[id]; v != nil {
			held := 0
			for incarnation, q := range v.queues {
				sum := 0
				for _, e := range q.messages {
					if e.refused == nil {
						sum += weight(e.msg)
					} else {
						refused++
					}
				}
				if q.bytes != sum || len(q.messages) == 0 {
					t.Errorf("%d bytes of %d.%d are counted, %d are held in %d messages", q.bytes, id, incarnation, sum, len(q.messages))
				}
				total += sum
				if incarnation != n.processes.of(id).incarnation {
					unknown += sum
				}
				held += len(q.messages)
			}
			if v.messages != held {
				t.Errorf("%d messages of %d are counted, %d are held", v.messages, id, held)
			}
			fmt.Fprint(w, id, " holds ", held, " ", v.delivering, "; ")
		}
		p := n.processes.of(id)
		fmt.Fprint(w, p.epoch, p.incarnation, p.known, p.hasPending, p.lost != nil, p.lostEpoch, " ")
	}
	if s.refused != refused {
		t.Errorf("%d refusals are counted, %d are queued", s.refused, refused)
	}
	if s.bytes != unknown {
		t.Errorf("%d bytes of strangers are counted, %d are held", s.bytes, unknown)
	}
	fmt.Fprintln(w, messages, bytes, total, len(s.cancellations))
	for app := range int32(3) {
		if c := (*a.table.Load())[appKey{app, app}]; c != nil {
			c.backlogs.mu.Lock()
			for _, id := range ids {
				if b := c.backlogs.queues[id]; b != nil {
					sum := 0
					for _, m := range b.queue {
						sum += weight(m)
					}
					if b.bytes != sum {
						t.Errorf("%d bytes behind application %d are counted, %d wait", b.bytes, app, sum)
					}
					fmt.Fprint(w, "behind ", app, id, len(b.queue), " ")
				}
			}
			if c.backlogs.active.Load() != (len(c.backlogs.queues) > 0) {
				t.Errorf("application %d: behind %t, %d backlogs", app, c.backlogs.active.Load(), len(c.backlogs.queues))
			}
			c.backlogs.mu.Unlock()
			for _, id := range ids {
				if g := c.inbound.known(id); g != nil {
					if int(g.canceled.Load()) != len(g.cancellations) {
						t.Errorf("%d withdrawals are counted, %d kept", g.canceled.Load(), len(g.cancellations))
					}
					fmt.Fprint(w, "gave up ", id, len(g.cancellations), " ")
				}
			}
		}
	}
	fmt.Fprintln(w)
}
