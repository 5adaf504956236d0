package zmq

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// listenRaw returns a node that completes handshakes and then receives nothing.
func listenRaw(t *testing.T) (rec van.Node, accepted chan *raw) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accepted = make(chan *raw, 16)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r := &raw{c, t}
			if r.handshake("ROUTER", "") != nil { // the node ends, and so does the test; otherwise libzmq tries again
				_ = c.Close()
				continue
			}
			_ = r.SetDeadline(time.Time{})
			accepted <- r
		}
	}()
	t.Cleanup(func() { _ = l.Close() })
	return van.Node{Role: van.Server, ID: 8, Hostname: "127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port}, accepted
}

// TestSendBudget: if a peer receives nothing, Send refuses messages beyond the budget, explains the refusal, and
// keeps no memory of them. Control messages are still sent. When the peer receives again, Send succeeds
// again.
func TestSendBudget(t *testing.T) {
	for name, size := range map[string]int{"copied": 16, "lent": 200 << 10} {
		t.Run(name, func(t *testing.T) {
			const budget = 24 << 20
			rec, accepted := listenRaw(t)
			worker := newNode(t, 9, 7, nil, func(c *env.Config) { c.SendBudget = budget })
			if err := worker.Connect(t.Context(), 8, rec); err != nil {
				t.Fatal(err)
			}
			peer := <-accepted
			defer peer.Close()
			before := resident(t)
			vals := make([]byte, size)
			var done counter
			var refused error
			sent := 0
			for ; sent < 400_000 && refused == nil; sent++ {
				m := push(8, sent, vals)
				m.Done = &done
				refused = worker.Send(m)
			}
			vantest.Fails(t, refused, van.ErrQueueFull, "server 0 (id 8)", rec.Addr(), strconv.Itoa(budget), "STEPAF_SEND_BUDGET")
			if most := budget/(size+messageCost) + 16<<20/size; sent > most {
				t.Errorf("%d messages were taken, want at most %d", sent, most)
			}
			if grown := resident(t) - before; grown > 2*budget {
				t.Errorf("memory has grown by %d MiB, the budget is %d", grown>>20, budget>>20)
			}
			if n := worker.Stats().RefusedSends; n != 1 {
				t.Errorf("%d refused sends, want 1", n)
			}
			worker.says(t, "a message is refused: its receiver does not take what was sent before")
			if err := worker.Send(heartbeat(8, 0)); err != nil {
				t.Errorf("a control message: %v", err)
			}
			go io.Copy(io.Discard, peer)
			var c *conn = (*worker.peers.Load())[8]
			until(t, "end of what waits", func() bool { return c.acct.unsent() == 0 })
			until(t, "release of all", func() bool { return done.n.Load() == int64(sent-1) })
			if err := worker.Send(push(8, 0, vals)); err != nil {
				t.Errorf("once it has taken all: %v", err)
			}
		})
	}
}

// TestAccounts: an account is reused, but not while it counts unsent bytes of an earlier
// connection.
func TestAccounts(t *testing.T) {
	var a accounts
	defer a.free()
	first := a.open()
	first.take(1000, 0)
	a.close(first)
	second := a.open()
	if n := second.unsent(); second == first || n != 0 {
		t.Errorf("a new connection begins with %d bytes unsent", n)
	}
	first.take(-1000, 0)
	if third := a.open(); third != first {
		t.Error("an account that is even is not used again")
	}
}

// TestAccountLimit: a message of any length is accepted while the account is below the limit.
func TestAccountLimit(t *testing.T) {
	var a accounts
	defer a.free()
	x := a.open()
	for i, m := range []struct {
		n, limit int64
		taken    bool
	}{{999, 1000, true}, {5000, 1000, true}, {1, 1000, false}, {1, 5999, false}, {5000, 0, true}, {1, 11_000, true}, {-11_000, 0, true}, {5000, 1000, true}} {
		if got := x.take(m.n, m.limit); got != m.taken {
			t.Errorf("message %d, of %d bytes, with limit %d: taken %t, want %t", i, m.n, m.limit, got, m.taken)
		}
	}
	if n := x.unsent(); n != 5000 {
		t.Errorf("%d bytes are counted, want 5000", n)
	}
}

// TestOneLongMessage: a message longer than the budget is sent if no other message waits.
func TestOneLongMessage(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	worker := newNode(t, 9, 7, nil, func(c *env.Config) { c.SendBudget = 1 << 20 })
	link(t, server, worker)
	worker.must(t, push(8, 1, make([]byte, 8<<20)))
	server.next(t)
	until(t, "release", func() bool { return (*worker.peers.Load())[8].acct.unsent() == 0 })
}

// TestContinuesBeyondTheBudget: while the peer receives nothing, a message that continues an accepted request is accepted, and so is
// a long message below the budget. Then data is refused, and after 16 MiB more, control messages are refused. The error names
// the configured budget.
func TestContinuesBeyondTheBudget(t *testing.T) {
	const budget, size = 8 << 20, 12 << 20
	for _, native := range []bool{true, false} {
		t.Run(fmt.Sprint("native=", native), func(t *testing.T) {
			rec, accepted := listenRaw(t)
			if native {
				rec.Endpoint = (&van.NodeExtension{Incarnation: 5, Bundles: true}).Encode()
			}
			worker := newNode(t, 9, 7, nil, func(c *env.Config) { c.SendBudget = budget })
			if err := worker.Connect(t.Context(), 8, rec); err != nil {
				t.Fatal(err)
			}
			peer := <-accepted
			defer peer.Close()
			worker.must(t, push(8, 0, make([]byte, 5000)))
			vals := make([]byte, size)
			for i := range 4 {
				m := push(8, 1+i, vals)
				m.More, m.Continues = i < 3, i > 0
				worker.must(t, m)
			}
			for _, n := range []int{0, size} {
				vantest.Fails(t, worker.Send(push(8, 5, vals[:n])), van.ErrQueueFull, "want less than "+strconv.Itoa(budget)+" (STEPAF_SEND_BUDGET)")
			}
			vantest.Fails(t, worker.Send(heartbeat(8, 0)), van.ErrQueueFull, "want less than "+strconv.Itoa(budget)+" (STEPAF_SEND_BUDGET)")
			go io.Copy(io.Discard, peer)
			c := (*worker.peers.Load())[8]
			until(t, "end of what waits", func() bool { return c.acct.unsent() == 0 })
			worker.must(t, push(8, 5, vals))
			until(t, "end of what waits", func() bool { return c.acct.unsent() == 0 })
		})
	}
}

// TestAnswersBudget: answers over the ROUTER count as well.
func TestAnswersBudget(t *testing.T) {
	server := newNode(t, 8, 0, nil, func(c *env.Config) { c.SendBudget = 8 << 20 })
	l, _ := listenRaw(t)
	if err := server.Connect(t.Context(), 9, van.Node{Role: van.Worker, ID: 9, Hostname: l.Hostname, Port: l.Port}); err != nil {
		t.Fatal(err)
	}
	r := dialRaw(t, server, "ps9")
	r.send(packed(t, push(8, 0, nil)))
	server.next(t)
	var err error
	for i := 0; i < 1000 && err == nil; i++ {
		m := push(9, i, make([]byte, 256<<10))
		m.Request = false
		err = server.Send(m)
	}
	vantest.Fails(t, err, van.ErrQueueFull, "worker 0 (id 9)")
	_ = r.Close() // libzmq drops its queued messages with the connection
	until(t, "release", func() bool { return (*server.peers.Load())[9].acct.unsent() < 8<<10 })
}

// TestSlowHandler: while the handler of a worker's messages blocks, these messages stay within the worker's budget, and
// another worker is served. When the handler continues, all messages arrive in order.
func TestSlowHandler(t *testing.T) {
	const budget, n = 128 << 20, 400
	release := make(chan struct{})
	var once sync.Once
	free := func() { once.Do(func() { close(release) }) }
	defer free()
	var next, wrong, most atomic.Int64
	other := make(chan int, 1000)
	var server *node
	server = newNode(t, 8, 5, func(m *van.Message) {
		if m.Sender != 9 {
			other <- int(m.Timestamp)
			return
		}
		<-release
		if m.IsControl() {
			return
		}
		most.Store(max(most.Load(), server.flow.senders.of(9).waiting.Load())) // it has grown since the last delivery, if at all
		if int64(m.Timestamp) != next.Load() {
			wrong.Add(1)
		}
		next.Add(1)
	}, func(c *env.Config) { c.RecvBudgetPeer = budget })
	server.flow.holdFor, server.flow.askEvery = holdFor, askEvery
	worker, second := newNode(t, 9, 7, nil, func(c *env.Config) { c.SendBudget = 1 << 30 }), newNode(t, 11, 9, nil, nil)
	link(t, server, worker)
	link(t, server, second)
	vals := make([]byte, 1<<20)
	before := resident(t)
	for i := range n {
		worker.must(t, push(8, i, vals))
	}
	s := server.flow.senders.of(9)
	until(t, "request to wait", s.asked.Load)
	for i, begun := 0, time.Now(); time.Since(begun) < holdFor+askEvery; i++ { // the other worker goes on, for longer than a request to wait lasts
		second.must(t, push(8, i, vals[:1000]))
		select {
		case got := <-other:
			if got != i {
				t.Fatalf("message %d, want %d", got, i)
			}
		case <-time.After(limit):
			t.Fatalf("the other worker's message %d did not come within %s", i, limit)
		}
	}
	c := (*worker.peers.Load())[8]
	until(t, "request to wait on", func() bool { return c.holdUntil.Load() > clock.Now()+uint64(holdFor-askEvery) })
	if w := s.waiting.Load(); w > budget {
		t.Errorf("%d MiB wait, the budget is %d", w>>20, budget>>20)
	}
	if grown := resident(t) - before; grown > budget+sendWindow {
		t.Errorf("memory has grown by %d MiB, the budget is %d", grown>>20, budget>>20)
	}
	worker.must(t, heartbeat(8, 0)) // does not wait behind data
	if server.Stats().PausedReads == 0 {
		t.Error("nothing was counted")
	}
	server.says(t, "a peer is asked to wait until the application has taken some of its messages")
	free()
	until(t, "the rest", func() bool { return next.Load() >= n })
	if w := most.Load(); w > budget {
		t.Errorf("%d bytes have waited at a time, the budget is %d", w, budget)
	}
	if w := wrong.Load(); w != 0 {
		t.Errorf("%d messages were out of order", w)
	}
	until(t, "end of what waits", func() bool { return server.flow.waiting.Load() == 0 && !s.asked.Load() })
	server.flow.mu.Lock()
	defer server.flow.mu.Unlock()
	if n := len(server.flow.asked); n != 0 {
		t.Errorf("%d workers will be asked to wait again", n)
	}
}

// TestLetGo: a worker that was asked to wait continues as soon as the server is below its limit, before the requested
// time is over.
func TestLetGo(t *testing.T) {
	release := make(chan struct{})
	server := newNode(t, 8, 5, func(*van.Message) { <-release }, func(c *env.Config) { c.RecvBudgetPeer = 8 << 20 })
	worker := newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	var done counter
	sent := int64(0)
	c := (*worker.peers.Load())[8]
	until(t, "request to wait", func() bool {
		if c.holdUntil.Load() != 0 {
			return true
		}
		m := push(8, int(sent), make([]byte, 256<<10))
		m.Done = &done
		worker.must(t, m)
		sent++
		return false
	})
	m := push(8, int(sent), make([]byte, 256<<10)) // it waits at the worker
	m.Done = &done
	worker.must(t, m)
	close(release)
	until(t, "release of all messages", func() bool { return done.n.Load() == sent+1 })
	until(t, "end of the wait", func() bool { return c.holdUntil.Load() == 0 })
}

// atLine is called with each line of a log.
type atLine func(line string)

func (f atLine) Write(b []byte) (int, error) {
	f(string(b))
	return len(b), nil
}

// TestDeliveredWhileAsked: all waiting messages of a worker may be delivered between the check of its limit and
// the moment when it counts as asked to wait. The worker must then be notified to continue at once: no later
// delivery does that.
func TestDeliveredWhileAsked(t *testing.T) {
	n := &shared{cfg: env.Default()}
	out := &outgoing{n: n}
	var f flow
	f.init(n, out)
	f.askEvery = time.Minute
	defer f.stop()
	c := &conn{incarnation: 7, sock: new(socket)} // it is closed, so that a line is logged in the middle of asking
	n.name(c, 9)
	n.peers.Store(&map[int]*conn{9: c})

	var messages pool
	defer messages.close()
	msg := messages.get()
	defer messages.Free(msg)
	msg.Sender = 9
	(*frames)(msg.Native()).setWeight(2*n.cfg.RecvBudgetPeer/holdShare, ofMember)
	s := f.senders.of(9)
	delivered := 0
	n.log = slog.New(slog.NewTextHandler(atLine(func(line string) {
		if !strings.Contains(line, "a notice was not sent") || delivered > 0 {
			return
		}
		delivered++
		if s.asked.Load() {
			t.Error("the worker is marked before it is asked")
		}
		f.left(msg)
	}), &slog.HandlerOptions{Level: slog.LevelDebug}))

	if !f.arrived(msg) || delivered != 1 {
		t.Fatalf("the message was delivered %d times while its worker was asked to wait, want once", delivered)
	}
	if w := s.waiting.Load(); w != 0 || s.asked.Load() || len(f.asked) != 0 {
		t.Errorf("%d bytes wait, asked to wait: %t, %d will be asked again; want none", w, s.asked.Load(), len(f.asked))
	}
}

// TestHeldAgain: messages that wait for a peer are sent each time when the peer lets this node continue.
func TestHeldAgain(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	c := (*worker.peers.Load())[8]
	ts := 0
	for range 3 {
		worker.noticed(c, []byte("stepaf/1 hold 60000"))
		for range 2 {
			worker.must(t, push(8, ts, make([]byte, 100)))
			ts++
		}
		worker.noticed(c, []byte("stepaf/1 go"))
		for want := ts - 2; want < ts; want++ {
			if m := server.next(t); int(m.Timestamp) != want {
				t.Errorf("message %d, want %d", m.Timestamp, want)
			}
		}
	}
}

// TestHeldLeavesTheCount: messages that are held for a Flush count as queued until they are sent, and no longer. That
// count limits the bytes that libzmq gets.
func TestHeldLeavesTheCount(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	s := (*worker.peers.Load())[8].sock
	for i := range 3 {
		for k := range 10 {
			m := push(8, 10*i+k, make([]byte, 1000))
			m.More = true
			worker.must(t, m)
		}
		if n := s.c.queued; n < 10_000 {
			t.Errorf("%d bytes wait, want those of ten messages", n)
		}
		worker.Flush(8)
		for range 10 {
			server.next(t).Release()
		}
		if n := s.c.queued; n != 0 {
			t.Errorf("%d bytes wait after all has left", n)
		}
	}
}

// TestSlowHandlerOfOriginal: a worker of the original cannot be asked to wait. Its messages
// stay within the budget for all.
func TestSlowHandlerOfOriginal(t *testing.T) {
	const budget, n = 32 << 20, 400
	release := make(chan struct{})
	var got atomic.Int64
	server := newNode(t, 8, 5, func(*van.Message) { <-release; got.Add(1) }, func(c *env.Config) { c.RecvBudget = budget })
	worker := newNode(t, 9, 0, nil, func(c *env.Config) { c.SendBudget = 1 << 30 })
	link(t, server, worker)
	vals := make([]byte, 256<<10)
	for i := range n {
		worker.must(t, push(8, i, vals))
	}
	until(t, "pause", func() bool { return server.Stats().PausedReads > 0 })
	if w := server.flow.waiting.Load(); w > budget+1<<20 {
		t.Errorf("%d MiB wait, the budget is %d", w>>20, budget>>20)
	}
	close(release)
	until(t, "the rest", func() bool { return got.Load() == n })
}

// TestHoldEnds: a peer that was asked to wait continues by itself if the request is not repeated, and if the
// connection breaks.
func TestHoldEnds(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	worker.must(t, push(8, 0, make([]byte, 100)))
	server.next(t)
	c := (*worker.peers.Load())[8]
	at := time.Now()
	if !worker.noticed(c, []byte("stepaf/1 hold 1500")) {
		t.Fatal("the notice was not taken")
	}
	worker.must(t, push(8, 1, make([]byte, 100)))
	worker.must(t, heartbeat(8, 7))
	if m := server.next(t); m.Timestamp != 7 {
		t.Errorf("got message %d, want the control message", m.Timestamp)
	}
	if m := server.next(t); m.Timestamp != 1 || time.Since(at) < 1450*time.Millisecond {
		t.Errorf("got message %d after %s, want 1 after 1.5 s", m.Timestamp, time.Since(at))
	}
	for _, s := range []string{"stepaf/1 hold", "stepaf/1 hold x", "stepaf/1 hold -1", "stepaf/1 hold 99999999999999", "stepaf/1 error x", "", "stepaf/1 goo"} {
		if worker.noticed(c, []byte(s)) {
			t.Errorf("%q was taken for a notice", s)
		}
	}
	worker.flow.holdFor = holdFor
	if !worker.noticed(c, []byte("stepaf/1 hold 4294967295")) {
		t.Fatal("the notice was not taken")
	}
	if d := time.Duration(c.holdUntil.Load() - clock.Now()); d > holdFor {
		t.Errorf("a peer makes this node wait for %s, want at most %s", d, holdFor)
	}
	c.goOn()
}

// TestCloseSendsWhatWaits: Close sends the messages that wait because the peer has asked for that.
func TestCloseSendsWhatWaits(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	worker.must(t, push(8, 0, make([]byte, 100)))
	server.next(t)
	worker.noticed((*worker.peers.Load())[8], []byte("stepaf/1 hold 2000"))
	for i := range 100 {
		worker.must(t, push(8, 1+i, make([]byte, 100<<10)))
	}
	if err := worker.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if m := server.next(t); int(m.Timestamp) != 1+i {
			t.Fatalf("got message %d, want %d", m.Timestamp, 1+i)
		}
	}
}

// TestNoticeIsNotForStrangers: only a notice of the peer itself makes a node wait.
func TestNoticeIsNotForStrangers(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	for _, id := range []string{"", "ps8", "ps8.00000006", "ps1"} {
		r := dialRaw(t, worker, id)
		m := heartbeat(9, 0)
		m.Body = []byte("stepaf/1 hold 2000")
		r.send(packed(t, m))
		worker.next(t) // handed up, for others to judge
	}
	if until := (*worker.peers.Load())[8].holdUntil.Load(); until != 0 {
		t.Error("a stranger made the worker wait")
	}
}
