package engine

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// memory is a source: numbers for one PeerQueue.
type memory struct {
	handsOver bool

	mu    sync.Mutex
	queue []int
	armed Sleeper
	looks int // calls of Sleep

	discarded atomic.Int32
	bells     [4]chan struct{}

	peerQueue PeerQueue[int]
	hand      atomic.Int32
	deliver   func(n int, inPoll bool)
}

func newMemory(handsOver bool, deliver func(int, bool)) *memory {
	m := &memory{handsOver: handsOver, deliver: deliver}
	for i := range m.bells {
		m.bells[i] = make(chan struct{}, 1)
	}
	m.peerQueue.Undelivered = &m.hand
	return m
}

func (m *memory) Take(_ time.Duration, poll bool) (int, *PeerQueue[int], PollResult) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.queue) == 0 || poll && m.hand.Load() != 0 {
		return 0, nil, Nothing
	}
	n := m.queue[0]
	m.queue = m.queue[:copy(m.queue, m.queue[1:])]
	return n, &m.peerQueue, Message
}

func (m *memory) Arm(s Sleeper) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.armed = s
	return len(m.queue) > 0
}

func (m *memory) Disarm() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.armed = 0
}

func (m *memory) Sleep(s Sleeper, arm func() bool, limit time.Duration) {
	m.mu.Lock()
	m.looks++
	m.mu.Unlock()
	if arm() {
		return
	}
	var end <-chan time.Time
	if limit > 0 {
		end = time.After(limit)
	}
	select {
	case <-m.bells[s]:
	case <-end:
	}
}

func (m *memory) Wake(s Sleeper) {
	select {
	case m.bells[s] <- struct{}{}:
	default:
	}
}

func (m *memory) Deliver(n int, inPoll bool) { m.deliver(n, inPoll) }
func (m *memory) Discard(int)                { m.discarded.Add(1) }

// put appends n and wakes the sleeper that has armed.
func (m *memory) put(n int) {
	m.mu.Lock()
	m.queue = append(m.queue, n)
	s := m.armed
	m.armed = 0
	m.mu.Unlock()
	if s == ForLoop {
		s = ByLoop
	}
	if s != 0 {
		m.Wake(s)
	}
}

// feed makes m a source of e and starts it.
func feed(t *testing.T, e *Engine, m Source[int], o ...FeedOptions) *Feed[int] {
	t.Helper()
	if o == nil {
		o = []FeedOptions{{Polls: true, Spins: true, PollArmsLoop: m.(*memory).handsOver}}
	}
	f := NewFeed(e, m, o[0])
	f.Start()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), deadline)
		defer cancel()
		if err := f.Stop(ctx); err != nil {
			t.Errorf("Stop: %v", err)
		}
	})
	return f
}

// TestEverythingIsReceived: Polls of several callers, and the loop while no caller polls, receive
// each message once and in order, for each way in which a source sleeps.
func TestEverythingIsReceived(t *testing.T) {
	for _, spin := range []time.Duration{-1, 0, time.Nanosecond, 50 * time.Microsecond} {
		for _, handsOver := range []bool{false, true} {
			e := New(spin)
			const each = 500
			var got [2]atomic.Int64
			var ms [2]*memory
			for i := range ms {
				ms[i] = newMemory(handsOver, func(n int, _ bool) {
					if want := got[i].Load(); int64(n) != want {
						t.Errorf("spin %s, source %d: got %d, want %d", spin, i, n, want)
					}
					got[i].Add(1)
				})
				feed(t, e, ms[i])
			}
			var wg sync.WaitGroup
			for i, m := range ms {
				wg.Go(func() {
					for n := range each {
						m.put(n)
						done := func() bool { return got[i].Load() > int64(n) }
						if n%3 > 0 {
							e.Poll(done)
						}
						for end := time.Now().Add(deadline); !done(); runtime.Gosched() {
							if time.Now().After(end) {
								t.Errorf("spin %s: no message %d within %s", spin, n, deadline)
								return
							}
						}
					}
				})
			}
			wg.Wait()
		}
	}
}

// claimed claims f for a Poll. The first try fails if the loop is suspended while it briefly holds the source.
func claimed(t *testing.T, f *Feed[int]) {
	t.Helper()
	waitFor(t, "a Poll that has the source", f.Claim)
}

// asleep waits until the loop of m sleeps and is woken by new messages.
func (m *memory) asleep(t *testing.T) {
	t.Helper()
	waitFor(t, "sleep", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.armed == ByLoop
	})
}

// TestLeftByPoll: the loop, which was asleep all the time, receives a message that arrives after the
// last poll of a Poll.
func TestLeftByPoll(t *testing.T) {
	var got atomic.Int64
	m := newMemory(true, func(int, bool) { got.Add(1) })
	f := feed(t, New(50*time.Microsecond), m)
	waitFor(t, "a Poll that has the source", func() bool { m.asleep(t); return f.Claim() }) // else the loop, which was woken, may be awake
	m.put(1)
	f.Release(false, false)
	waitFor(t, "what the Poll has left", func() bool { return got.Load() == 1 })
}

// TestClaimGivenUp: a loop that went to sleep because of a claim, which then timed out, is
// woken by new messages.
func TestClaimGivenUp(t *testing.T) {
	var got atomic.Int64
	m := newMemory(true, func(int, bool) { got.Add(1) })
	f := feed(t, New(50*time.Microsecond), m)
	looks := func() int {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.looks
	}
	for i := range 100 { // the loop may not see a claim that is so short
		m.asleep(t)
		before := looks()
		f.Lock()
		f.Wake()
		waitFor(t, "look before the sleep", func() bool { return looks() > before })
		if f.Claim() {
			t.Fatal("a source that somebody holds is given to a Poll")
		}
		f.Unlock()
		m.put(i)
		waitFor(t, "message", func() bool { return got.Load() == int64(i+1) })
	}
}

// TestQuietSource: Polls skip an idle source, one of several,
// until its loop has received a message.
func TestQuietSource(t *testing.T) {
	e := New(50 * time.Microsecond)
	var got atomic.Int64
	quiet := newMemory(false, func(int, bool) { got.Add(1) })
	f := feed(t, e, quiet)
	poll := func(missed bool, help int) {
		t.Helper()
		claimed(t, f)
		for range help {
			quiet.put(0)
			if found := f.PollOnce(0); found != Message {
				t.Errorf("a poll has found %d, want a message", found)
			}
		}
		f.Release(missed, false)
	}
	for range maxMisses - 1 {
		poll(true, 0)
	}
	poll(false, 1)
	got.Store(0)
	for range maxMisses - 1 {
		poll(true, 0)
		poll(false, 0) // tells nothing
	}
	poll(true, 0)
	if f.Claim() {
		t.Error("a quiet source keeps Polls busy")
		f.Release(true, false)
	}
	quiet.put(1)
	waitFor(t, "message", func() bool { return got.Load() == 1 })
	claimed(t, f)
	f.Release(false, false)
}

// TestStopLeavesPolls: Polls do not use a stopped source, and a Poll that sleeps on it is woken.
func TestStopLeavesPolls(t *testing.T) {
	e := New(50 * time.Microsecond)
	m := newMemory(true, func(int, bool) {})
	f := feed(t, e, m)
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if err := f.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if n := len(*e.sources.Load()); n > 0 {
		t.Errorf("Polls still have %d sources", n)
	}
	if len(m.bells[ByPoll]) == 0 {
		t.Error("a Poll that sleeps is not woken")
	}
}

// TestFreeWaitsForPoll: memory that another goroutine's Poll uses is not freed.
func TestFreeWaitsForPoll(t *testing.T) {
	e := New(50 * time.Microsecond)
	f := feed(t, e, newMemory(true, func(int, bool) {}))
	claimed(t, f)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	if err := f.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := f.Free(ctx, func() { t.Error("freed while a Poll receives") }); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Free: %v, want %v", err, context.DeadlineExceeded)
	}
	f.Release(false, false)
	freed := false
	if err := f.Free(context.Background(), func() { freed = true }); err != nil || !freed {
		t.Errorf("Free after the Poll: %v, freed %t", err, freed)
	}
}

// TestLeave: Polls skip a source that has left a message to the loop until the loop has received
// it, which it does at once.
func TestLeave(t *testing.T) {
	e := New(50 * time.Microsecond)
	var got atomic.Int64
	m := newMemory(false, func(int, bool) { got.Add(1) })
	f := feed(t, e, leaving{m}, FeedOptions{Polls: true})
	waitFor(t, "sleep", f.Parked)
	for i := range int64(100) {
		claimed(t, f)
		m.put(int(i))
		if found := f.PollOnce(0); found != LeaveToLoop {
			t.Fatalf("a Poll finds %d, want %d", found, LeaveToLoop)
		}
		f.Release(false, true)
		if f.until.Load() != 0 {
			t.Fatal("the loop waits for another Poll")
		}
		waitFor(t, "message", func() bool { return got.Load() == i+1 })
		waitFor(t, "end of the delivery", func() bool { return m.hand.Load() == 0 })
	}
}

// leaving is a source that leaves all messages to the loop.
type leaving struct{ *memory }

func (l leaving) Take(slice time.Duration, poll bool) (int, *PeerQueue[int], PollResult) {
	if poll {
		return 0, nil, LeaveToLoop
	}
	return l.memory.Take(slice, poll)
}

// TestPollEndsAtOnce: a Poll ends if its caller has its answer, or if a source is busy or leaves a
// message to the loop. The loop does not wait for the next Poll.
func TestPollEndsAtOnce(t *testing.T) {
	e := New(time.Hour)
	busy := false
	f := NewFeed(e, newMemory(false, func(int, bool) {}), FeedOptions{Polls: true, Busy: func() bool { return busy }})
	left := NewFeed(e, leaving{newMemory(false, func(int, bool) {})}, FeedOptions{Polls: true})
	e.Add(f)
	e.Poll(func() bool { return true })
	if f.until.Load() != 0 {
		t.Error("a Poll that has nothing to wait for is followed by another")
	}
	f.until.Store(1 << 62)
	busy = true
	e.Poll(func() bool { return false })
	if f.until.Load() != 0 {
		t.Error("the loop waits for a Poll though its source is busy")
	}
	e.Add(left)
	e.Poll(func() bool { return false }) // otherwise it spins for an hour
	if left.Claim() {
		t.Error("a Poll takes the source before its loop has taken what was left")
	}
}

// TestPollOfEndless: a Poll returns soon even if messages arrive without end: its caller has a deadline.
func TestPollOfEndless(t *testing.T) {
	var stop atomic.Bool
	e := New(50 * time.Microsecond)
	s := &endless{}
	f := NewFeed(e, s, FeedOptions{Polls: true})
	e.Add(f)
	defer e.Remove(f)
	time.AfterFunc(20*time.Second, func() { stop.Store(true) })
	began := time.Now()
	e.Poll(stop.Load)
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("a Poll took %s, want about %s", d, maxPoll)
	}
}

// TestPollOfParts: a Poll continues while a message arrives in parts.
func TestPollOfParts(t *testing.T) {
	e := New(50 * time.Microsecond)
	f := NewFeed(e, &endless{part: true}, FeedOptions{Polls: true})
	e.Add(f)
	defer e.Remove(f)
	began := time.Now()
	e.Poll(func() bool { return false })
	if d := time.Since(began); d < maxPoll {
		t.Errorf("a Poll ended after %s, while a message came, want %s", d, maxPoll)
	}
}

// TestStopDiscards: Stop discards the messages that are queued for a handler.
func TestStopDiscards(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	m := newMemory(false, func(n int, _ bool) {
		if n == 0 {
			close(entered)
			<-leave
		}
	})
	f := NewFeed(New(-1), Source[int](m), FeedOptions{})
	f.Start()
	for n := range 3 {
		m.put(n)
	}
	<-entered
	waitFor(t, "others behind it", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return len(m.queue) == 0
	})
	stopped := make(chan error, 1)
	go func() { stopped <- f.Stop(t.Context()) }()
	waitFor(t, "Stop", f.Loop.stopped.Load)
	close(leave)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if n := m.discarded.Load(); n != 2 {
		t.Errorf("%d messages were given back, want 2", n)
	}
}

// endless is a source that always has a message, or part of one.
type endless struct {
	peerQueue PeerQueue[int]
	part      bool
}

func (s *endless) Take(time.Duration, bool) (int, *PeerQueue[int], PollResult) {
	if s.part {
		return 0, nil, Progress
	}
	return 0, &s.peerQueue, Message
}
func (s *endless) Arm(Sleeper) bool                          { return true }
func (s *endless) Disarm()                                   {}
func (s *endless) Sleep(Sleeper, func() bool, time.Duration) {}
func (s *endless) Wake(Sleeper)                              {}
func (s *endless) Deliver(int, bool)                         {}
func (s *endless) Discard(int)                               {}

// TestFailingSource: the loop does not sleep on a source that cannot be slept on, but still
// polls it.
func TestFailingSource(t *testing.T) {
	e := New(50 * time.Microsecond)
	var failing atomic.Bool
	failing.Store(true)
	var got atomic.Int64
	m := newMemory(true, func(int, bool) { got.Add(1) })
	f := feed(t, e, m, FeedOptions{PollArmsLoop: true, CannotSleep: failing.Load})
	for i := range int64(3) {
		m.put(int(i))
		waitFor(t, "message", func() bool { return got.Load() == i+1 })
		if f.Parked() {
			t.Error("the loop sleeps on a source that fails")
		}
	}
	failing.Store(false)
	waitFor(t, "sleep", f.Parked)
}

// TestPollDoesNotAllocate: neither a Poll that receives a message nor one that does not.
func TestPollDoesNotAllocate(t *testing.T) {
	e := New(time.Microsecond)
	got := 0
	m := newMemory(true, func(int, bool) { got++ })
	f := NewFeed(e, m, FeedOptions{Polls: true, PollArmsLoop: true})
	e.Add(f) // without its loop
	want := 0
	done := func() bool { return got >= want }
	if n := testing.AllocsPerRun(500, func() {
		want++
		m.put(want)
		e.Poll(done)
	}); n != 0 || got != want {
		t.Errorf("%v allocations for a Poll, %d of %d received", n, got, want)
	}
}

// looking is a source that records the result of its loop's first spinning poll.
type looking struct {
	*memory
	ran  *atomic.Bool // of a goroutine that the delivery before has woken
	saw  chan bool
	once sync.Once
}

func (l *looking) Take(slice time.Duration, poll bool) (int, *PeerQueue[int], PollResult) {
	if slice > 0 && l.ran != nil {
		l.once.Do(func() { l.saw <- l.ran.Load() })
	}
	return l.memory.Take(slice, poll)
}

// TestLookYields: with few threads, a goroutine that a delivery has woken runs before the loop of a source with LongPolls polls again.
func TestLookYields(t *testing.T) {
	another := alone(t)
	if !onceOfSome(func() bool {
		l := &looking{memory: newMemory(true, nil), saw: make(chan bool, 1)}
		l.deliver = func(int, bool) { l.ran = another() }
		f := NewFeed(New(time.Second), Source[int](l), FeedOptions{Spins: true, PollArmsLoop: true, LongPolls: true})
		f.Start()
		l.put(1)
		saw := <-l.saw
		if err := f.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		return saw
	}) {
		t.Error("the loop polls again while the woken goroutine waits for a thread")
	}
}
