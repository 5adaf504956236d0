package local

import (
	"bytes"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
)

// inUse is how many bytes of received values a node holds.
func (b *blocks) inUse() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for size, s := range b.of {
		n += size * s.out
	}
	return n
}

// heard is a message that has been delivered.
type heard struct{ from, number int }

func await(t *testing.T, got <-chan heard, want heard) {
	t.Helper()
	select {
	case h := <-got:
		if h != want {
			t.Fatalf("got message %d of node %d, want %d of node %d", h.number, h.from, want.number, want.from)
		}
	case <-time.After(limit):
		t.Fatalf("no message %d of node %d within %s", want.number, want.from, limit)
	}
}

// ways are those in which values reach a peer.
var ways = []struct {
	name string
	size int
	set  func(*Van)
}{
	{"read", 1 << 20, nil},
	{"stream", 1 << 20, func(v *Van) { v.acceptor.streamOnly = true }},
	{"inline", 10_000, nil},
}

// TestReceiveBudget: a peer whose handler is stuck is not read beyond the budget, so that
// this node does not hold what it sends; another one is served meanwhile, and then
// everything arrives.
func TestReceiveBudget(t *testing.T) {
	for _, mode := range ways {
		t.Run(mode.name, func(t *testing.T) {
			const budget = 8 << 20
			n := inproc.NewNetwork()
			worker, other := newNode(t, n, 9, nil), newNode(t, n, 11, nil)
			server := newNode(t, n, 8, func(v *Van) {
				v.rx.feed.Loop.Budget = engine.NewBudget(budget, 0)
				if mode.set != nil {
					mode.set(v)
				}
			})
			loop := server.rx.feed.Loop
			var heaviest, waited atomic.Int64 // one message; all that wait, at the worst
			weigh := loop.Weight
			loop.Weight = func(p *inbound) int {
				n := weigh(p)
				heaviest.Store(max(heaviest.Load(), int64(n)))
				return n
			}
			release, got := make(chan struct{}), make(chan heard, 1<<12)
			var held atomic.Int64
			server.Start(func(m *van.Message) {
				if m.Sender == 9 && m.Timestamp == 0 {
					<-release
				}
				held.Store(max(held.Load(), int64(server.rx.blocks.inUse())))
				waited.Store(max(waited.Load(), loop.Budget.Used())) // it has grown since the last delivery, if at all
				if m.Sender == 9 {
					if want := pattern(int(m.Timestamp)%7, mode.size); !bytes.Equal(m.Vals.Host(), want) {
						t.Errorf("values of message %d differ", m.Timestamp)
					}
				}
				got <- heard{m.Sender, int(m.Timestamp)}
			})
			worker.start()
			other.start()
			worker.connect(server)
			other.connect(server)
			server.connect(other)
			server.connect(worker)
			sent := 5 * budget / mode.size
			for i := range sent {
				worker.must(data(8, i, pattern(i%7, mode.size)))
			}
			eventually(t, "the peer is not read any more", func() bool { return server.Stats().PausedReads == 1 })
			server.says("a peer is not read for now: its handler is slow")
			for i := range 100 {
				other.must(data(8, i, pattern(i, 100)))
				await(t, got, heard{11, i})
			}
			// A peer is read while there is less than the budget: the last message may go beyond it. The
			// other one, whose handler is quick, has one message in the count at most.
			most := budget + heaviest.Load() + 2*messageBytes
			if n := loop.Budget.Used(); n < budget || n >= most {
				t.Errorf("%d bytes wait, want %d, and less than a message more", n, budget)
			}
			close(release)
			for i := range sent {
				await(t, got, heard{9, i})
			}
			if n := waited.Load(); n >= most {
				t.Errorf("%d bytes have waited at a time, want %d, and less than a message more", n, budget)
			}
			if n := held.Load(); n > budget+4<<20 {
				t.Errorf("the server has held up to %d bytes of received values, want %d and a few more", n, budget)
			}
			eventually(t, "everything pinned is given back", func() bool { return worker.Stats().LentValues == 0 })
		})
	}
}

// TestSendBudget: the memory queued for a peer that does not read is bounded; the error names the peer and the
// bound. When the peer goes on, so does the sender.
func TestSendBudget(t *testing.T) {
	for _, mode := range ways {
		t.Run(mode.name, func(t *testing.T) {
			const budget = 8 << 20
			worker, server := unread(t, func(v *Van) { v.tx.budget = budget }, mode.set)
			sent := 0
			var err error
			for ; err == nil; sent++ {
				err = worker.Send(data(8, sent, pattern(sent%7, mode.size)))
				if sent > 3*budget/mode.size {
					t.Fatal("there is no bound")
				}
			}
			sent--
			if !errors.Is(err, van.ErrQueueFull) || !strings.Contains(err.Error(), "server 0") || !strings.Contains(err.Error(), "STEPAF_SEND_BUDGET") {
				t.Errorf("%v, want %v that names the server and STEPAF_SEND_BUDGET", err, van.ErrQueueFull)
			}
			if least := budget / mode.size; sent < least {
				t.Errorf("%d messages were taken, want at least %d", sent, least)
			}
			if n := worker.Stats().RefusedSends; n != 1 {
				t.Errorf("%d refused messages are counted, want 1", n)
			}
			worker.says("a message was refused: its peer takes nothing")
			link := worker.peers.link(8)
			link.mu.Lock()
			if link.seen != link.progress() {
				t.Error("the next Send will wait again for a peer that has taken nothing")
			}
			link.mu.Unlock()
			server.start()
			for i := range sent {
				m := server.next()
				if int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), pattern(i%7, mode.size)) {
					t.Fatalf("message %d came when %d was due, or its values differ", m.Timestamp, i)
				}
				m.Release()
			}
			eventually(t, "nothing is unsent", func() bool {
				link.mu.Lock()
				defer link.mu.Unlock()
				return link.unsent() == 0
			})
			worker.must(data(8, sent, pattern(1, mode.size)))
			server.next().Release()
		})
	}
}

// TestSendBudgetWaits: a peer that keeps taking is waited for, however much is sent.
func TestSendBudgetWaits(t *testing.T) {
	n := inproc.NewNetwork()
	worker := newNode(t, n, 9, func(v *Van) { v.tx.budget, v.tx.roomTimeout = 4<<20, limit })
	server := newNode(t, n, 8, nil)
	worker.start()
	got := make(chan heard, 100)
	server.Start(func(m *van.Message) { got <- heard{m.Sender, int(m.Timestamp)} })
	worker.connect(server)
	server.connect(worker)
	for i := range 100 {
		worker.must(data(8, i, pattern(0, 1<<20)))
	}
	for i := range 100 {
		await(t, got, heard{9, i})
	}
}

// TestRoomWait: a sender waits for at most maxRoomWait while the peer makes progress within each timeout. The wait ends after a timeout without
// progress.
func TestRoomWait(t *testing.T) {
	const timeout = 10 * time.Millisecond
	for name, c := range map[string]struct {
		next  func(at time.Duration) progress // the peer's progress at a time
		ends  time.Duration
		idles bool
	}{
		"consumes nothing":           {func(time.Duration) progress { return progress{} }, timeout, true},
		"consumes records":           {func(at time.Duration) progress { return progress{head: uint64(at / (timeout / 2))} }, maxRoomWait, false},
		"acknowledges":               {func(at time.Duration) progress { return progress{acked: uint32(at / (timeout / 2))} }, maxRoomWait, false},
		"stops after five timeouts":  {func(at time.Duration) progress { return progress{head: uint64(min(at, 5*timeout))} }, 6 * timeout, true},
		"is slower than the timeout": {func(at time.Duration) progress { return progress{head: uint64(at / (2 * timeout))} }, timeout, true},
	} {
		t.Run(name, func(t *testing.T) {
			const begun, step = 12345, 100 * time.Microsecond
			w := roomWait{begun: begun, since: begun, last: c.next(0)}
			for at := step; ; at += step {
				over, idle := w.over(begun+uint64(at), c.next(at), timeout)
				if !over && at <= 2*maxRoomWait {
					continue
				}
				if at != c.ends+step || idle != c.idles || w.last != c.next(at) {
					t.Errorf("the wait ends after %s, idle %t, want %s, %t", at, idle, c.ends+step, c.idles)
				}
				return
			}
		})
	}
}

// TestOneLongValue: after a value that uses up the budget, a short message can still be sent, though the peer does
// not read yet.
func TestOneLongValue(t *testing.T) {
	worker, server := unread(t, func(v *Van) { v.tx.budget = 4 << 20 }, nil)
	worker.must(data(8, 0, pattern(0, 4<<20)))
	worker.must(data(8, 1, pattern(1, 8)))
	for _, size := range []int{streamFrom - 8, 4 << 20} {
		if err := worker.Send(data(8, 2, pattern(2, size))); !errors.Is(err, van.ErrQueueFull) {
			t.Errorf("a second long value, of %d bytes with its key of 8: %v, want %v", size, err, van.ErrQueueFull)
		}
	}
	server.start()
	for i := range 2 {
		m := server.next()
		if int(m.Timestamp) != i {
			t.Errorf("message %d came, want %d", m.Timestamp, i)
		}
		m.Release()
	}
}

// TestBatchBeyondTheBudget: a batch below the budget is accepted whole, of any length, though the peer does not read; the next request is
// refused. All accepted values arrive.
func TestBatchBeyondTheBudget(t *testing.T) {
	for _, mode := range ways {
		t.Run(mode.name, func(t *testing.T) {
			const budget = 1 << 20
			worker, server := unread(t, func(v *Van) { v.tx.budget = budget }, mode.set)
			n := 4 * budget / mode.size
			m := data(8, 0, nil)
			for i := range n {
				m.Parts = append(m.Parts, van.Part{Key: uint64(i), Push: true, Len: mode.size, Device: backend.Host, Vals: backend.Bytes(pattern(i%7, mode.size))})
			}
			m.WriteDirectory()
			worker.must(m)
			for _, size := range []int{8, mode.size} {
				vantest.Fails(t, worker.Send(data(8, n, pattern(0, size))), van.ErrQueueFull, "server 0", "STEPAF_SEND_BUDGET")
			}
			server.start()
			got := server.next()
			for i := range got.Parts {
				if p := &got.Parts[i]; int(p.Timestamp) != i || !bytes.Equal(p.Vals.Host(), pattern(i%7, mode.size)) {
					t.Fatalf("part %d has timestamp %d and %d bytes, or its values differ", i, p.Timestamp, p.Vals.Len())
				}
			}
			if len(got.Parts) != n {
				t.Errorf("%d parts, want %d", len(got.Parts), n)
			}
			got.Release()
		})
	}
}
