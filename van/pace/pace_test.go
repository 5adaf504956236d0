package pace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// sink is an inner van that records the keys of its messages.
type sink struct {
	van.Van // nil: a call that a test does not expect panics

	mu     sync.Mutex
	got    []string
	last   *van.Message
	full   int           // number of messages that get ErrQueueFull
	err    error         // the error of all other messages
	came   chan string   // if not nil, gets each key
	hold   chan struct{} // if not nil, Send waits for it
	closed bool
}

func (s *sink) Send(m *van.Message) error {
	if s.hold != nil {
		<-s.hold
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.full > 0 {
		s.full--
		return van.ErrQueueFull
	}
	if s.err != nil {
		return s.err
	}
	what := name(m)
	s.got, s.last = append(s.got, what), m
	if s.came != nil {
		s.came <- what
	}
	if m.Done != nil {
		m.Done.Sent()
	}
	return nil
}

func (s *sink) Connect(context.Context, int, van.Node) error { return nil }
func (s *sink) Disconnect(int)                               {}
func (s *sink) Close(context.Context) error                  { s.closed = true; return nil }

func (s *sink) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.got)
}

// await waits until the inner van has n messages.
func (s *sink) await(t *testing.T, n int) []string {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(30 * time.Second); ; {
		if got := s.all(); len(got) >= n {
			return got
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("only %v after 30 s, want %d messages", s.all(), n)
		}
	}
}

func name(m *van.Message) string {
	if m.IsControl() {
		return "control"
	}
	return fmt.Sprintf("%d/%d/%d", m.Receiver, m.AppID, m.Timestamp)
}

func message(peer, app, ts, n int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.AppID, m.Timestamp, m.CustomerID, m.Request = peer, int32(app), int32(ts), 0, true
	m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8)), backend.Bytes(make([]byte, n))
	return m
}

func send(t *testing.T, v *Van, m *van.Message) {
	t.Helper()
	if err := v.Send(m); err != nil {
		t.Fatal(err)
	}
}

type completion struct{ c chan struct{} }

func (c completion) Sent() { close(c.c) }

const slow = 10 // bytes per second: a message queued at this rate waits for the whole test

// TestNothingSet: without a rate for them, messages pass unchanged.
func TestNothingSet(t *testing.T) {
	s := &sink{}
	v := New(s, Options{})
	for i, r := range []Rates{{}, {Peers: map[int]int64{8: slow}}, {Apps: map[int32]int64{7: slow}}, {}} {
		v.SetRates(r)
		m := message(9, 5, i, 1<<20)
		send(t, v, m)
		if s.last != m {
			t.Errorf("%v: another message than that of the caller came", r)
		}
	}
	if v.table.Load() != nil {
		t.Error("a table is left when no rate is")
	}
	if n := testing.AllocsPerRun(100, func() { _ = v.Send(s.last) }); n > 1 { // the sink's own
		t.Errorf("%v allocations", n)
	}
}

// TestRate: bytes take the time of their rate, for any message sizes, and arrive in order.
func TestRate(t *testing.T) {
	for _, c := range []struct {
		rates Rates
		count int
		size  int
	}{
		{Rates{Peers: map[int]int64{9: 1_000_000}}, 32, 62500},
		{Rates{Peers: map[int]int64{9: 1_000_000}}, 2, 1_000_000},
		{Rates{Apps: map[int32]int64{5: 1_000_000}}, 4, 500_000},
		{Rates{Peers: map[int]int64{9: 1_000_000}, Apps: map[int32]int64{5: 5_000_000}}, 4, 500_000},
		{Rates{Peers: map[int]int64{9: 5_000_000}, Apps: map[int32]int64{5: 1_000_000}}, 4, 500_000},
	} {
		t.Run(fmt.Sprint(c.rates, " ", c.count), func(t *testing.T) {
			t.Parallel()
			s := &sink{}
			v := New(s, Options{})
			v.SetRates(c.rates)
			start := time.Now()
			var want []string
			for i := range c.count {
				m := message(9, 5, i, c.size)
				want = append(want, name(m))
				send(t, v, m)
			}
			if took := time.Since(start); took > 20*time.Second {
				t.Errorf("Send has waited: %v", took)
			}
			send(t, v, message(10, 4, 0, 1<<20)) // of another peer and application
			control := message(9, 5, 0, 0)
			control.Control.Cmd = van.Barrier
			send(t, v, control)
			if got := s.all(); !slices.Contains(got, "control") {
				t.Errorf("%v: control messages do not wait", got)
			}
			got := s.await(t, c.count+2)
			if took := time.Since(start); took < 1800*time.Millisecond {
				t.Errorf("2 MB at 1 MB in a second took %v", took)
			}
			if got = slices.DeleteFunc(got, func(k string) bool { return k == "control" || k == "10/4/0" }); !slices.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
		})
	}
}

// TestQueueFull: the queued bytes of each peer are limited, except for one message of any length.
func TestQueueFull(t *testing.T) {
	s := &sink{}
	v := New(s, Options{Budget: 10000})
	v.SetRates(Rates{Peers: map[int]int64{9: slow, 11: slow}})
	for _, peer := range []int{9, 11} {
		send(t, v, message(peer, 5, 1, 20000))
		err := v.Send(message(peer, 5, 2, 10))
		if !errors.Is(err, van.ErrQueueFull) {
			t.Errorf("peer %d: %v, want ErrQueueFull", peer, err)
		}
	}
	v.SetRates(Rates{})
	s.await(t, 2)
	send(t, v, message(9, 5, 3, 20000))
	s.await(t, 3)
}

// TestChange: a change of rates applies to queued messages. Messages of an application arrive in
// order, and those of another application do not wait for them.
func TestChange(t *testing.T) {
	s := &sink{}
	v := New(s, Options{})
	v.SetRates(Rates{Peers: map[int]int64{9: slow}})
	for i := range 10 {
		send(t, v, message(9, 5+i%2, i, 10000))
	}
	if got := s.all(); len(got) > 0 {
		t.Fatalf("%v left at once", got)
	}
	v.SetRates(Rates{Apps: map[int32]int64{5: slow}})
	for i := 10; i < 20; i++ {
		send(t, v, message(9, 5+i%2, i, 10000))
	}
	of := func(app int, got []string) (l []string) {
		for i := range 20 {
			if k := fmt.Sprintf("9/%d/%d", app, i); slices.Contains(got, k) {
				l = append(l, k)
			}
		}
		return l
	}
	if got := s.await(t, 10); !slices.Equal(got, of(6, got)) {
		t.Errorf("%v: want those of application 6, in order", got)
	}
	v.SetRates(Rates{Peers: map[int]int64{9: slow}, Apps: map[int32]int64{6: slow}})
	v.SetRates(Rates{})
	send(t, v, message(9, 5, 20, 10)) // behind the queued messages
	got := s.await(t, 21)[10:]
	if want := append(of(5, got), "9/5/20"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(30 * time.Second); v.table.Load() != nil; {
		select {
		case <-tick.C:
		case <-end:
			t.Fatal("a table is left when no rate is, and nothing waits")
		}
	}
}

// TestCancel: a canceled message is not sent, and its memory is the caller's again.
func TestCancel(t *testing.T) {
	s := &sink{}
	v := New(s, Options{})
	v.SetRates(Rates{Peers: map[int]int64{9: slow}})
	done := make(chan struct{})
	for i := range 3 {
		m := message(9, 5, i, 10000)
		if i == 1 {
			m.Done = completion{done}
		}
		send(t, v, m)
	}
	v.Cancel(van.Requests{App: 5, Customer: 0, First: 1, Count: 1})
	select {
	case <-done:
	default:
		t.Error("Done was not called")
	}
	v.SetRates(Rates{})
	if got := s.await(t, 2); !slices.Equal(got, []string{"9/5/0", "9/5/2"}) {
		t.Errorf("%v came", got)
	}
}

// TestCancelWaits: Cancel returns when the inner van has the message that is being forwarded.
func TestCancelWaits(t *testing.T) {
	s := &sink{hold: make(chan struct{})}
	v := New(s, Options{})
	v.SetRates(Rates{Peers: map[int]int64{9: quick}})
	send(t, v, message(9, 5, 0, quick/10)) // due soon
	s.hold <- struct{}{}
	send(t, v, message(9, 5, 1, quick/10))
	l := v.table.Load().queues[9]
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(30 * time.Second); ; {
		l.mu.Lock()
		sending := l.current != nil && l.current.msg.Timestamp == 1
		l.mu.Unlock()
		if sending {
			break
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatal("it is not forwarded")
		}
	}
	recalled := make(chan struct{})
	go func() {
		v.Cancel(van.Requests{App: 5, First: 1, Count: 1})
		close(recalled)
	}()
	for { // until it is removed from the queue
		l.mu.Lock()
		n := l.rest.queue.Len()
		l.mu.Unlock()
		if n == 0 {
			break
		}
		<-tick.C
	}
	select {
	case <-recalled:
		t.Error("Cancel returned while the van inside was given the message")
	default:
	}
	close(s.hold)
	<-recalled
	if got := s.await(t, 2); len(got) != 2 {
		t.Errorf("%v", got)
	}
}

// quick is a rate at which a tenth of a second's bytes takes longer than the burst.
const quick = 1_000_000

// TestAnotherProcess: queued messages do not go to a process that replaces the peer.
func TestAnotherProcess(t *testing.T) {
	for what, do := range map[string]func(*Van) error{
		"connect":    func(v *Van) error { return v.Connect(t.Context(), 9, van.Node{}) },
		"disconnect": func(v *Van) error { v.Disconnect(9); return nil },
	} {
		s := &sink{}
		v := New(s, Options{})
		v.SetRates(Rates{Peers: map[int]int64{9: slow, 11: slow}})
		done := make(chan struct{})
		m := message(9, 5, 0, 10000)
		m.Done = completion{done}
		send(t, v, m)
		send(t, v, message(11, 5, 0, 10000))
		if err := do(v); err != nil {
			t.Fatal(err)
		}
		<-done
		v.SetRates(Rates{})
		if got := s.await(t, 1); !slices.Equal(got, []string{"11/5/0"}) {
			t.Errorf("%s: %v came", what, got)
		}
	}
}

// TestNoRoom: a message is not lost if the inner van's queue is full, and a message that cannot be
// sent is reported.
func TestNoRoom(t *testing.T) {
	s := &sink{full: 3}
	failed := make(chan error, 1)
	v := New(s, Options{OnFail: func(peer int, m *van.Meta, err error) { failed <- fmt.Errorf("%d/%d: %w", peer, m.Timestamp, err) }})
	v.SetRates(Rates{Peers: map[int]int64{9: quick}})
	for i := range 3 {
		send(t, v, message(9, 5, i, quick/10))
	}
	if got := s.await(t, 3); !slices.Equal(got, []string{"9/5/0", "9/5/1", "9/5/2"}) {
		t.Errorf("%v", got)
	}
	s.mu.Lock()
	s.err = van.ErrPeerLost
	s.mu.Unlock()
	done := make(chan struct{})
	m := message(9, 5, 3, quick/10)
	m.Done = completion{done}
	send(t, v, m)
	if err := <-failed; !errors.Is(err, van.ErrPeerLost) || err.Error()[:4] != "9/3:" {
		t.Error(err)
	}
	<-done
}

// TestClose: Close sends the queued messages, and later rates have no effect.
func TestClose(t *testing.T) {
	s := &sink{}
	v := New(s, Options{})
	v.SetRates(Rates{Peers: map[int]int64{9: slow}})
	for i := range 5 {
		send(t, v, message(9, 5, i, 10000))
	}
	if err := v.Close(t.Context()); err != nil || len(s.all()) != 5 || !s.closed {
		t.Errorf("%v: %v left, closed %t", err, s.all(), s.closed)
	}
	v.SetRates(Rates{Peers: map[int]int64{9: slow}})
	send(t, v, message(9, 5, 5, 10000))
	if got := s.all(); len(got) != 6 {
		t.Errorf("%v", got)
	}
}

// connecting is an inner van whose Send waits for a connection until Close.
type connecting struct {
	sink
	sends, closes chan struct{}
}

func (c *connecting) Send(*van.Message) error {
	c.sends <- struct{}{}
	<-c.closes
	return van.ErrClosed
}

func (c *connecting) Close(context.Context) error { close(c.closes); return nil }

// TestCloseWhileConnecting: Close does not wait beyond its context for the Send of a queued message. All queued messages end.
func TestCloseWhileConnecting(t *testing.T) {
	s := &connecting{sends: make(chan struct{}, 3), closes: make(chan struct{})}
	v := New(s, Options{})
	v.SetRates(Rates{Peers: map[int]int64{9: slow}})
	var done [3]chan struct{}
	for i := range done {
		done[i] = make(chan struct{})
		m := message(9, 5, i, 10000)
		m.Done = completion{done[i]}
		send(t, v, m)
	}
	ctx, cancel := context.WithCancel(t.Context())
	closed := make(chan error, 1)
	go func() { closed <- v.Close(ctx) }()
	<-s.sends
	cancel()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("Close still waits")
	}
	for _, d := range done {
		<-d
	}
}

// TestCloseUnderLoad: Close ends although other goroutines continue to send.
func TestCloseUnderLoad(t *testing.T) {
	s := &sink{}
	v := New(s, Options{})
	v.SetRates(Rates{Peers: map[int]int64{9: slow}})
	send(t, v, message(9, 5, 0, 10000))
	stop := make(chan struct{})
	var senders sync.WaitGroup
	for range 2 {
		senders.Go(func() {
			for i := 1; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if err := v.Send(message(9, 5, i, 100)); errors.Is(err, van.ErrClosed) {
					return
				}
			}
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := v.Close(ctx); err != nil || ctx.Err() != nil {
		t.Errorf("%v, %v", err, ctx.Err())
	}
	close(stop)
	senders.Wait()
}

// TestShortFrames: frames that Send copies are the caller's when it returns.
func TestShortFrames(t *testing.T) {
	s := &sink{}
	v := New(s, Options{})
	v.SetRates(Rates{Peers: map[int]int64{9: slow}})
	m := message(9, 5, 0, 10000)
	copy(m.Keys.Host(), "original")
	send(t, v, m)
	copy(m.Keys.Host(), "used again"[:8])
	m.Timestamp = 77
	v.SetRates(Rates{})
	s.await(t, 1)
	if got := string(s.last.Keys.Host()); got != "original" || s.last.Timestamp != 0 {
		t.Errorf("key %q of message %d was sent", got, s.last.Timestamp)
	}
}

// TestChangeOfOthers: a change of other rates does not restart the wait of queued messages.
func TestChangeOfOthers(t *testing.T) {
	s := &sink{}
	v := New(s, Options{})
	apps := map[int32]int64{5: quick}
	v.SetRates(Rates{Apps: apps})
	send(t, v, message(9, 5, 0, quick/5))
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for i, end := 0, time.After(60*time.Second); len(s.all()) == 0; i++ {
		v.SetRates(Rates{Apps: apps, Peers: map[int]int64{11: int64(slow + i)}})
		select {
		case <-tick.C:
		case <-end:
			t.Fatal("it waits for ever")
		}
	}
}

// TestFair: a large message of one application leaves before later messages of another application with its own
// rate, though these could leave earlier: they may be endless.
func TestFair(t *testing.T) {
	for name, more := range map[string]int{"now and then": 1, "more than may leave": 40} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &sink{}
			v := New(s, Options{Budget: 10 * quick})
			v.SetRates(Rates{Peers: map[int]int64{9: quick}, Apps: map[int32]int64{7: quick}})
			send(t, v, message(9, 5, 0, quick/5)) // a fifth of a second
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for i, end := 0, time.After(30*time.Second); !slices.Contains(s.all(), "9/5/0"); {
				for range more {
					if err := v.Send(message(9, 7, i, 1000)); err != nil && !errors.Is(err, van.ErrQueueFull) {
						t.Fatal(err)
					}
					i++
				}
				select {
				case <-tick.C:
				case <-end:
					t.Fatal("it waits for ever")
				}
			}
			if got := s.all(); got[0] != "9/5/0" {
				t.Errorf("%d messages before it", slices.Index(got, "9/5/0"))
			}
			if err := v.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestTurns: applications whose messages wait for one peer's rate alternate, also if one began with a backlog.
func TestTurns(t *testing.T) {
	t.Parallel()
	const each, size = 6, 100_000 // a message takes longer than a burst
	s := &sink{hold: make(chan struct{})}
	v := New(s, Options{})
	v.SetRates(Rates{Peers: map[int]int64{9: 10 * size}, Apps: map[int32]int64{7: 1 << 40}})
	for app := 5; app <= 7; app += 2 {
		for i := range each {
			send(t, v, message(9, app, i, size))
		}
	}
	close(s.hold)                       // all others wait behind the first
	got, ahead := s.await(t, 2*each), 0 // messages of application 5
	for i, what := range got {
		if ahead++; strings.HasPrefix(what, "9/7/") {
			ahead -= 2
		}
		if ahead < -1 || ahead > 1 {
			t.Fatalf("after %d messages one application is ahead by %d: %v", i+1, ahead, got)
		}
	}
	if err := v.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestSoonestFirst: messages of an application leave when its own rate allows it, though others of the same peer wait for much longer.
func TestSoonestFirst(t *testing.T) {
	s := &sink{}
	v := New(s, Options{})
	v.SetRates(Rates{Apps: map[int32]int64{5: slow, 6: slow, 7: 1_000_000, 8: slow, 9: slow}})
	for _, app := range []int{5, 6, 7, 8, 9} {
		send(t, v, message(10, app, 0, 100_000)) // longer than a burst
	}
	if got := s.await(t, 1); got[0] != "10/7/0" {
		t.Errorf("%v has left, want the message of application 7", got)
	}
	if err := v.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestBody: the body of a message counts, for the rate and for the budget.
func TestBody(t *testing.T) {
	s := &sink{}
	v := New(s, Options{Budget: 10000})
	v.SetRates(Rates{Peers: map[int]int64{9: slow}})
	simple := func(i int) *van.Message {
		m := message(9, 5, i, 0)
		m.Body = make([]byte, 100_000)
		return m
	}
	send(t, v, simple(0))
	if got := s.all(); len(got) > 0 {
		t.Errorf("%v left at once", got)
	}
	if err := v.Send(simple(1)); !errors.Is(err, van.ErrQueueFull) {
		t.Errorf("%v, want ErrQueueFull", err)
	}
	if n := v.Stats().RefusedSends; n != 1 {
		t.Errorf("%d refused messages are counted, want 1", n)
	}
	v.SetRates(Rates{})
	s.await(t, 1)
}
