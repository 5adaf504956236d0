package zmq

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// TestPollKeepsOrder: a Poll does not deliver messages that arrived after a message that the loop is still
// delivering.
func TestPollKeepsOrder(t *testing.T) {
	entered, release := make(chan struct{}, 10), make(chan struct{})
	var mu sync.Mutex
	var order []int32
	var inside atomic.Int32
	server := newNode(t, 8, 5, nil, nil)
	worker := newNode(t, 9, 7, func(m *van.Message) {
		if inside.Add(1) > 1 {
			t.Error("two deliveries of one peer at once")
		}
		entered <- struct{}{}
		if m.Timestamp == 0 {
			<-release
		}
		mu.Lock()
		order = append(order, m.Timestamp)
		mu.Unlock()
		inside.Add(-1)
	}, nil)
	link(t, worker, server)
	worker.must(t, push(8, 0, nil))
	server.next(t)
	answer := func(ts int) {
		m := push(9, ts, make([]byte, 100))
		m.Request = false
		server.must(t, m)
	}
	answer(0)
	<-entered // the loop has it
	r := (*worker.peers.Load())[8].rx
	until(t, "the role's change", func() bool { return r.inHand.Load() == 1 })
	for ts := 1; ts <= 3; ts++ {
		answer(ts)
	}
	for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); {
		worker.engine.Poll(func() bool { return false })
	}
	close(release)
	for range 3 {
		<-entered
	}
	until(t, "all", func() bool { mu.Lock(); defer mu.Unlock(); return len(order) == 4 })
	for i, ts := range order {
		if int(ts) != i {
			t.Fatalf("delivered in the order %v", order)
		}
	}
}

// TestFailedSendIsNotDone: Done is not called for a message that was not taken.
func TestFailedSendIsNotDone(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	if err := server.Connect(t.Context(), 9, van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1}); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{0, 1, van.CopyBelow - 1, van.CopyBelow, 1 << 20} {
		var done counter
		m := push(9, 0, make([]byte, size))
		m.Request = false
		m.Done = &done
		if err := server.Send(m); !errors.Is(err, van.ErrPeerLost) { // no process has connected as 9
			t.Fatalf("%d bytes: %v, want %v", size, err, van.ErrPeerLost)
		}
		if n := done.n.Load(); n != 0 {
			t.Errorf("%d bytes: Done was called %d times", size, n)
		}
		if n := (*server.peers.Load())[9].acct.unsent(); n != 0 {
			t.Errorf("%d bytes: %d are counted as unsent", size, n)
		}
	}
}

// TestMissedLook: if a Poll keeps the loop from polling and the loop is not woken again, the loop does not miss messages
// that arrived in between.
func TestMissedLook(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	worker := newNode(t, 9, 7, nil, nil)
	link(t, worker, server)
	worker.must(t, push(8, 0, nil))
	server.next(t)
	r := (*worker.peers.Load())[8].rx
	for i, again := range []bool{true, false} {
		// As a Poll does that polls before the answer has arrived. The loop may have the source for a moment.
		until(t, "sleep, and a Poll that can receive", func() bool { return r.feed.Parked() && r.feed.Claim() })
		m := push(9, i, make([]byte, 100))
		m.Request = false
		server.must(t, m)
		// The state of the descriptor, and the request not to sleep, make the loop poll, and feed refuses it: the
		// descriptor will not wake the loop again.
		until(t, "look", func() bool { return !r.feed.Parked() })
		r.feed.Release(false, again)
		if m := worker.next(t); int(m.Timestamp) != i {
			t.Errorf("message %d, want %d", m.Timestamp, i)
		}
	}
}

// TestCloseBesideHandler: Close says when a handler runs longer than it may wait, as with other
// transports, and not when it is the handler's own.
func TestCloseBesideHandler(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	server := newNode(t, 8, 5, func(*van.Message) {
		close(entered)
		<-release
	}, nil)
	worker := newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	worker.must(t, push(8, 0, nil))
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := server.Close(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "a receiver still runs") {
		t.Errorf("Close beside a handler returns %v, want that a receiver still runs", err)
	}
	close(release)
}

// TestCloseBesideHandlers: Close waits for the handlers of all peers at once, not for one after the other.
func TestCloseBesideHandlers(t *testing.T) {
	const peers = 20 // engine.Loop.Stop gives each of them half a second
	entered, release := make(chan struct{}, peers), make(chan struct{})
	worker := newNode(t, 9, 7, func(*van.Message) {
		entered <- struct{}{}
		<-release
	}, nil)
	defer close(release)
	for i := range peers {
		server := newNode(t, van.ServerID(i), 5, nil, nil)
		link(t, server, worker)
		worker.must(t, push(server.self.ID, 0, nil))
		answer := push(9, 0, nil)
		server.next(t).Release()
		answer.Request = false
		server.must(t, answer)
		<-entered
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	if err := worker.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Close beside %d handlers returns %v, want %v", peers, err, context.Canceled)
	}
	if took := time.Since(began); took > peers*500*time.Millisecond/2 {
		t.Errorf("Close took %s beside %d handlers, want that of one", took, peers)
	}
}
