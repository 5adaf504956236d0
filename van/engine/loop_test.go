package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const deadline = 20 * time.Second

type item struct {
	queue *PeerQueue[item]
	peer  int
	seq   int
}

// source is a recv function that reads a channel.
type source struct {
	c      chan item
	closed chan struct{}
	once   sync.Once
}

func newSource() *source { return &source{c: make(chan item, 64), closed: make(chan struct{})} }

func (s *source) recv() (item, *PeerQueue[item], bool) {
	select {
	case it := <-s.c:
		return it, it.queue, true
	case <-s.closed:
		return item{}, nil, false
	}
}

func (s *source) close() { s.once.Do(func() { close(s.closed) }) }

func stop(t *testing.T, l *Loop[item], s *source) {
	t.Helper()
	s.close()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if err := l.Stop(ctx); err != nil {
		t.Fatalf("Stop: %v", err)
	}
}

func wait(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(deadline):
		t.Fatalf("no %s within %s", what, deadline)
	}
}

// waitFor polls for a condition without a signal.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	end := time.After(deadline)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("no %s within %s", what, deadline)
		}
	}
}

// goroutines counts those that run code of this package's Loop.
func goroutines() int {
	buf := make([]byte, 1<<20)
	n := 0
	for _, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(g, "engine.(*Loop[...])") {
			n++
		}
	}
	return n
}

func TestOrderPerLaneWithSlowHandlers(t *testing.T) {
	const peers, each = 8, 400
	peerQueues := make([]PeerQueue[item], peers)
	var next [peers]int
	var inside [peers]atomic.Bool
	var wrong atomic.Pointer[string]
	fail := func(f string, a ...any) { s := fmt.Sprintf(f, a...); wrong.CompareAndSwap(nil, &s) }
	var left atomic.Int64
	left.Store(peers * each)
	done := make(chan struct{})
	src := newSource()
	l := NewLoop(src.recv, func(it item) {
		if inside[it.peer].Swap(true) {
			fail("two deliveries of queue %d at once", it.peer)
		}
		if next[it.peer] != it.seq {
			fail("queue %d: got %d, want %d", it.peer, it.seq, next[it.peer])
		}
		next[it.peer]++
		if it.seq%50 == it.peer {
			time.Sleep(2 * time.Millisecond) // the slow handler itself
		}
		inside[it.peer].Store(false)
		if left.Add(-1) == 0 {
			close(done)
		}
	})
	l.Limit = 200 * time.Microsecond
	l.QueueCap = 32 // so that receiving pauses too
	l.Start()
	for seq := range each {
		for p := range peers {
			src.c <- item{&peerQueues[p], p, seq}
		}
	}
	wait(t, done, "last item")
	stop(t, l, src)
	if s := wrong.Load(); s != nil {
		t.Fatal(*s)
	}
	waitFor(t, "end of the loop's goroutines", func() bool { return goroutines() == 0 })
}

func TestOtherLanesGoOnWhileOneBlocks(t *testing.T) {
	var stuck, free PeerQueue[item]
	release, entered, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var order []int
	const n = 1000
	src := newSource()
	drained := make(chan struct{})
	l := NewLoop(src.recv, func(it item) {
		if it.peer == 0 {
			order = append(order, it.seq)
			if it.seq == 0 {
				close(entered)
				<-release
			}
			if it.seq == n-1 {
				close(drained)
			}
			return
		}
		if it.seq == n-1 {
			close(done)
		}
	})
	l.Start()
	for i := range n {
		src.c <- item{&stuck, 0, i}
		src.c <- item{&free, 1, i}
	}
	wait(t, entered, "delivery in the stuck queue")
	wait(t, done, "delivery in the free queue")
	close(release)
	wait(t, drained, "rest of the stuck queue")
	for i, seq := range order {
		if i != seq {
			t.Fatalf("stuck queue: item %d came as number %d", seq, i)
		}
	}
	stop(t, l, src)
}

func TestFullLanePausesWithoutLoss(t *testing.T) {
	var queue PeerQueue[item]
	release := make(chan struct{})
	var got atomic.Int64
	src := &source{c: make(chan item), closed: make(chan struct{})}
	l := NewLoop(src.recv, func(it item) {
		if it.seq == 0 {
			<-release
		}
		if int64(it.seq) != got.Load() {
			t.Errorf("got item %d, want %d", it.seq, got.Load())
		}
		got.Add(1)
	})
	l.QueueCap = 4
	l.Start()
	for i := range 6 { // one in delivery, four queued, one in the receiver's hand
		src.c <- item{&queue, 0, i}
	}
	select {
	case src.c <- item{&queue, 0, 6}:
		t.Error("a seventh item was received although the queue is full")
	case <-time.After(20 * time.Millisecond):
	}
	close(release)
	waitFor(t, "delivery of 6 items", func() bool { return got.Load() == 6 })
	stop(t, l, src)
}

func TestStopDiscardsWhatWaits(t *testing.T) {
	var queue PeerQueue[item]
	release, entered := make(chan struct{}), make(chan struct{})
	var delivered, discarded atomic.Int64
	src := &source{c: make(chan item), closed: make(chan struct{})}
	l := NewLoop(src.recv, func(it item) {
		delivered.Add(1)
		close(entered)
		<-release
	})
	l.QueueCap = 4
	l.Discard = func(item) { discarded.Add(1) }
	l.Start()
	src.c <- item{&queue, 0, 0}
	wait(t, entered, "delivery")
	for i := range 5 {
		src.c <- item{&queue, 0, i + 1}
	}
	src.close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := l.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Stop while a delivery blocks: %v, want %v", err, context.DeadlineExceeded)
	}
	close(release)
	stop(t, l, src)
	if d, x := delivered.Load(), discarded.Load(); d != 1 || x != 5 {
		t.Errorf("delivered %d and discarded %d, want 1 and 5", d, x)
	}
	waitFor(t, "end of the loop's goroutines", func() bool { return goroutines() == 0 })
}

// TestStopInTheLastMoment: goroutines that end together with the context, as in a process that was suspended until then, count as ended.
func TestStopInTheLastMoment(t *testing.T) {
	var queue PeerQueue[item]
	src := newSource()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	entered := make(chan struct{})
	l := NewLoop(src.recv, func(item) {
		close(entered)
		<-ctx.Done()
	})
	l.Start()
	src.c <- item{&queue, 0, 0}
	wait(t, entered, "delivery")
	src.close()
	stopped := make(chan error, 1)
	go func() { stopped <- l.Stop(ctx) }()
	waitFor(t, "Stop", l.stopped.Load)
	cancel()
	if err := <-stopped; err != nil {
		t.Errorf("Stop: %v, though all has ended", err)
	}
	stop(t, l, src)
}

func TestLoopEndsWhenRecvDoes(t *testing.T) {
	src := newSource()
	l := NewLoop(src.recv, func(item) {})
	l.Start()
	src.close()
	waitFor(t, "end of the loop", func() bool { return goroutines() == 0 })
	stop(t, l, src)
	l.Start()
	if n := goroutines(); n != 0 {
		t.Errorf("Start after Stop left %d goroutines, want 0", n)
	}
}

// TestStartAfterStop: a loop that was stopped before Start does not start.
func TestStartAfterStop(t *testing.T) {
	src := newSource()
	l := NewLoop(src.recv, func(item) {})
	var begun atomic.Int32
	l.Begin = func() { begun.Add(1) }
	stop(t, l, src)
	l.Start()
	stop(t, l, src) // waits for the begun delivery
	if n := begun.Load(); n != 0 {
		t.Errorf("%d goroutines have received, want none", n)
	}
}

func TestIdleLoopDoesNotTick(t *testing.T) {
	var queue PeerQueue[item]
	src := newSource()
	got := make(chan struct{}, 1)
	l := NewLoop(src.recv, func(item) { got <- struct{}{} })
	l.Start()
	idle := func() {
		t.Helper()
		waitFor(t, "parking of the watchdog", l.dog.parked.Load)
		before := l.Ticks()
		time.Sleep(20 * l.Limit) // the time in which it must not tick
		if after := l.Ticks(); after != before {
			t.Errorf("the idle loop ticked %d times", after-before)
		}
	}
	idle()
	if n := l.Ticks(); n != 0 {
		t.Errorf("a loop that never received ticked %d times", n)
	}
	src.c <- item{&queue, 0, 0}
	wait(t, got, "delivery")
	waitFor(t, "tick", func() bool { return l.Ticks() > 0 })
	idle()
	stop(t, l, src)
}

// TestPace: the watchdog checks less often while all deliveries are short, but often enough to
// find a slow one within eight Limits, which is two checks.
func TestPace(t *testing.T) {
	p := interval{limit: time.Millisecond}
	p.begin()
	var every []time.Duration
	for i := range 10 * calmTicks {
		if changed := p.calm(); changed != ((i+1)%calmTicks == 0 && i < 2*calmTicks) {
			t.Errorf("check %d: the interval changes: %v", i, changed)
		}
		if i%calmTicks == calmTicks-2 {
			every = append(every, p.every/time.Millisecond)
		}
	}
	if want := []time.Duration{1, 2, 4, 4, 4, 4, 4, 4, 4, 4}; !slices.Equal(every, want) {
		t.Errorf("milliseconds between checks: %d, want %d", every, want)
	}
	p.begin()
	if p.every != p.limit || p.calm() {
		t.Errorf("after a slow delivery it checks every %s, want %s", p.every, p.limit)
	}
}

// TestStuckAfterCalm: a delivery that is stuck after many short ones is found.
func TestStuckAfterCalm(t *testing.T) {
	var stuck, free PeerQueue[item]
	src := newSource()
	release, got := make(chan struct{}), make(chan struct{})
	l := NewLoop(src.recv, func(it item) {
		if it.queue == &stuck {
			<-release
			return
		}
		got <- struct{}{}
	})
	l.Start()
	one := func() {
		src.c <- item{queue: &free}
		wait(t, got, "delivery")
	}
	for l.Ticks() < 4*calmTicks {
		one()
	}
	src.c <- item{queue: &stuck}
	one() // by another goroutine
	close(release)
	stop(t, l, src)
}

func TestNoAllocationPerItem(t *testing.T) {
	var queue PeerQueue[item]
	src := newSource()
	ack := make(chan struct{})
	l := NewLoop(src.recv, func(item) { ack <- struct{}{} })
	l.Start()
	n := testing.AllocsPerRun(2000, func() {
		src.c <- item{&queue, 0, 0}
		<-ack
	})
	stop(t, l, src)
	if n >= 0.5 {
		t.Errorf("%v allocations for each item, want 0", n)
	}
}

func TestQueuedItemsDoNotAllocate(t *testing.T) {
	var queue PeerQueue[item]
	queue.slow.Store(true)
	l := NewLoop(nil, func(item) {})
	l.Budget, l.Weight = NewBudget(1<<20, 1<<20), func(item) int { return 1000 }
	n := testing.AllocsPerRun(100, func() {
		for range 16 {
			if !l.MayRead(&queue) {
				t.Fatal("a queue within its budget is paused")
			}
			l.push(&queue, item{})
		}
		for range 16 {
			l.pop(&queue)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations for 16 items, want 0", n)
	}
}

// TestLongQueue: a queue releases the memory of many items when it is empty.
func TestLongQueue(t *testing.T) {
	for n, keeps := range map[int]bool{keepRing: true, keepRing + 1: false} {
		var queue PeerQueue[item]
		queue.slow.Store(true)
		l := NewLoop(nil, func(item) {})
		for i := range n {
			l.push(&queue, item{seq: i})
		}
		for i := range n {
			if it, ok := l.pop(&queue); !ok || it.seq != i {
				t.Fatalf("item %d, %t, want %d", it.seq, ok, i)
			}
		}
		if _, ok := l.pop(&queue); ok || (len(queue.ring) > 0) != keeps {
			t.Errorf("after %d items an empty queue keeps room for %d", n, len(queue.ring))
		}
	}
}

func BenchmarkLoop(b *testing.B) {
	var queue PeerQueue[item]
	n := 0
	l := NewLoop(func() (item, *PeerQueue[item], bool) {
		n++
		return item{}, &queue, n <= b.N
	}, func(item) {})
	b.ReportAllocs()
	b.ResetTimer()
	l.Start()
	<-l.quit
	_ = l.Stop(context.Background())
}
