package zmq

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
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
	for name, size := range map[string]int{"short": 16, "long": 200 << 10} {
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

// TestAccountOutlivesConnection: the bytes of an earlier connection do not count for the next one to the same node, and libzmq can release
// the messages of that connection when Go has no reference to its account any more.
func TestAccountOutlivesConnection(t *testing.T) {
	rec, accepted := listenRaw(t)
	worker := newNode(t, 9, 7, nil, nil)
	if err := worker.Connect(t.Context(), 8, rec); err != nil {
		t.Fatal(err)
	}
	first := <-accepted
	defer first.Close()
	for i := range 100 {
		worker.must(t, push(8, i, make([]byte, 1<<20)))
	}
	collected := make(chan struct{})
	runtime.AddCleanup((*worker.peers.Load())[8].acct, func(c chan struct{}) { close(c) }, collected)
	if n := (*worker.peers.Load())[8].acct.unsent(); n < 50<<20 {
		t.Errorf("%d bytes are unsent, want more than half of 100 MiB", n)
	}
	next, acceptedNext := listenRaw(t)
	if err := worker.Connect(t.Context(), 8, next); err != nil {
		t.Fatal(err)
	}
	defer (<-acceptedNext).Close()
	if n := (*worker.peers.Load())[8].acct.unsent(); n != 0 {
		t.Errorf("a new connection begins with %d bytes unsent", n)
	}
	until(t, "collection", func() bool {
		runtime.GC()
		select {
		case <-collected:
			return true
		default:
			return false
		}
	})
}

// TestAccountLimit: a message of any length is accepted while the account is below the limit.
func TestAccountLimit(t *testing.T) {
	x := newAccount()
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

// TestBatchBeyondTheBudget: while the peer receives nothing, a batch below the budget is accepted, of any length, in one message or in
// several. Then data is refused, and after 16 MiB more, control messages are refused. The error names
// the configured budget.
func TestBatchBeyondTheBudget(t *testing.T) {
	const budget, size = 8 << 20, 12 << 20
	for _, native := range []bool{true, false} {
		t.Run(fmt.Sprint("native=", native), func(t *testing.T) {
			rec, accepted := listenRaw(t)
			if native {
				rec.Endpoint = (&van.NodeExtension{Incarnation: 5}).Encode()
			}
			worker := newNode(t, 9, 7, nil, func(c *env.Config) { c.SendBudget = budget })
			if err := worker.Connect(t.Context(), 8, rec); err != nil {
				t.Fatal(err)
			}
			peer := <-accepted
			defer peer.Close()
			worker.must(t, push(8, 0, make([]byte, 5000)))
			vals := make([]byte, size)
			m := &van.Message{}
			m.Reset()
			m.Receiver, m.AppID, m.CustomerID, m.Timestamp, m.Request = 8, 0, 0, 1, true
			for i := range 4 {
				m.Parts = append(m.Parts, van.Part{Key: uint64(i), Push: true, Len: size, Device: backend.Host, Vals: backend.Bytes(vals)})
			}
			m.WriteDirectory()
			worker.must(t, m)
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

// TestSlowHandler: while a handler blocks, the messages that have arrived stay within the budget for all. When it continues, all
// arrive.
func TestSlowHandler(t *testing.T) {
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
	if w := server.flow.router.Used(); w > budget+1<<20 {
		t.Errorf("%d MiB wait, the budget is %d", w>>20, budget>>20)
	}
	close(release)
	until(t, "the rest", func() bool { return got.Load() == n })
}
