package engine

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// sources has a list of sent items for each peer, which is read only while MayRead allows it.
type sources struct {
	l          *Loop[item]
	peerQueues []PeerQueue[item]
	mu         sync.Mutex
	queues     [][]item
	turn       int
	wake       chan struct{}
	closed     chan struct{}
	once       sync.Once
}

func newSources(n int, deliver func(item)) *sources {
	s := &sources{peerQueues: make([]PeerQueue[item], n), queues: make([][]item, n), wake: make(chan struct{}, 1), closed: make(chan struct{})}
	for i := range s.peerQueues {
		s.peerQueues[i].ID = i
	}
	s.l = NewLoop(s.recv, deliver)
	s.l.Resumed = func(*PeerQueue[item]) { s.ring() }
	return s
}

func (s *sources) ring() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *sources) send(peer, n int) {
	s.mu.Lock()
	for range n {
		s.queues[peer] = append(s.queues[peer], item{queue: &s.peerQueues[peer], peer: peer})
	}
	s.mu.Unlock()
	s.ring()
}

func (s *sources) left(peer int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queues[peer])
}

func (s *sources) take() (item, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range s.queues {
		s.turn = (s.turn + 1) % len(s.queues)
		if q := s.queues[s.turn]; len(q) > 0 && s.l.MayRead(&s.peerQueues[s.turn]) {
			s.queues[s.turn] = q[1:]
			return q[0], true
		}
	}
	return item{}, false
}

func (s *sources) recv() (item, *PeerQueue[item], bool) {
	for {
		if it, ok := s.take(); ok {
			return it, it.queue, true
		}
		select {
		case <-s.wake:
		case <-s.closed:
			return item{}, nil, false
		}
	}
}

func (s *sources) stop(t *testing.T) {
	t.Helper()
	s.once.Do(func() { close(s.closed) })
	stop(t, s.l, &source{closed: make(chan struct{})})
}

// TestBudgetOfALane: a peer whose handler is stuck is not read beyond the limit of bytes. Other peers
// are read, and the peer is read again when its queue has capacity.
func TestBudgetOfALane(t *testing.T) {
	release, entered, free := make(chan struct{}), make(chan struct{}, 1000), make(chan struct{}, 1000)
	var stuck, paused, most atomic.Int64
	s := newSources(2, func(it item) {
		if it.peer == 1 {
			free <- struct{}{}
			return
		}
		entered <- struct{}{}
		<-release
		stuck.Add(1)
	})
	s.l.Budget, s.l.Weight = NewBudget(1000, 0), func(item) int { return 100 }
	s.l.Paused = func(queue *PeerQueue[item], bytes int64) {
		paused.Add(1)
		most.Store(bytes)
		if queue.ID != 0 {
			t.Errorf("queue %d is paused, want 0", queue.ID)
		}
	}
	s.l.Start()
	s.send(0, 100)
	wait(t, entered, "delivery in the stuck queue")
	waitFor(t, "pause", func() bool { return paused.Load() == 1 })
	// One after the other: if the machine stops briefly within a delivery, items behind it would
	// be queued and pause this queue too, as they should.
	for range 500 {
		s.send(1, 1)
		wait(t, free, "delivery in the other queue")
	}
	if n := s.left(0); n != 100-1-10 || most.Load() != 1000 || s.l.Budget.Used() != 1000 {
		t.Errorf("%d items are left with the peer and %d bytes wait (%d in all), want 89, 1000 and 1000", n, most.Load(), s.l.Budget.Used())
	}
	close(release)
	waitFor(t, "the rest of the stuck queue", func() bool { return stuck.Load() == 100 })
	if s.l.Budget.Used() != 0 || int64(s.l.Pauses()) != paused.Load() {
		t.Errorf("%d bytes wait in the end, %d pauses counted, %d reported", s.l.Budget.Used(), s.l.Pauses(), paused.Load())
	}
	s.stop(t)
}

// TestBudgetOfAll: the queued bytes of all peers with stuck handlers are limited. A peer
// that was paused because of others resumes when their queues shrink. A peer with a quick
// handler is never paused.
func TestBudgetOfAll(t *testing.T) {
	const stuck = 3
	var release [stuck]chan struct{}
	for i := range release {
		release[i] = make(chan struct{})
	}
	free := make(chan struct{}, 1000)
	var got [stuck]atomic.Int64
	s := newSources(stuck+1, func(it item) {
		if it.peer == stuck {
			free <- struct{}{}
			return
		}
		<-release[it.peer]
		got[it.peer].Add(1)
	})
	s.l.Budget, s.l.Weight = NewBudget(0, 1200), func(item) int { return 100 }
	s.l.Start()
	for p := range stuck {
		s.send(p, 50)
	}
	waitFor(t, "pause of all stuck peerQueues", func() bool { return s.l.Pauses() >= stuck })
	if n := s.l.Budget.Used(); n != 1200 {
		t.Errorf("%d bytes wait, want 1200", n)
	}
	s.send(stuck, 100)
	for range 100 {
		wait(t, free, "delivery in the free queue")
	}
	for p := range stuck {
		close(release[p])
		waitFor(t, "the rest of a stuck queue", func() bool { return got[p].Load() == 50 })
		if p == 0 {
			// Queues that are paused because of others resume below three quarters of the limit. The first queue may have
			// held so little that more is still used.
			waitFor(t, "what the other two may have waiting now", func() bool { n := s.l.Budget.Used(); return n > 900 && n <= 1200 })
		}
	}
	s.stop(t)
	if n := s.l.Budget.Used(); n != 0 || len(s.l.Budget.paused) != 0 {
		t.Errorf("%d bytes wait in the end, %d queues are paused", n, len(s.l.Budget.paused))
	}
}

// TestBudgetOfAllWakesAll: all queues that the total has paused are rechecked when it has capacity: which of them
// gets the next message is not known.
func TestBudgetOfAllWakesAll(t *testing.T) {
	b := NewBudget(0, 400)
	b.add(400)
	b.note(new(PeerQueue[item]), true)
	b.note(new(PeerQueue[item]), true)
	if n := len(b.sub(90)); n != 0 {
		t.Errorf("%d queues are rechecked at %d bytes of 400, want none before three quarters", n, b.Used())
	}
	if n := len(b.sub(20)); n != 2 {
		t.Errorf("%d queues are rechecked at %d bytes of 400, want both", n, b.Used())
	}
	if n := len(b.sub(20)); n != 0 {
		t.Errorf("%d queues are rechecked once more", n)
	}
}

// TestBudgetOfAllTells: Resumed is called for a queue that others have paused, once there is capacity.
func TestBudgetOfAllTells(t *testing.T) {
	var full, paused PeerQueue[item]
	l := NewLoop(nil, func(item) {})
	l.Budget, l.Weight = NewBudget(0, 400), func(item) int { return 100 }
	var resumed []*PeerQueue[item]
	l.Resumed = func(queue *PeerQueue[item]) { resumed = append(resumed, queue) }
	full.slow.Store(true)
	paused.slow.Store(true)
	for range 4 {
		l.push(&full, item{})
	}
	if l.MayRead(&paused) {
		t.Fatal("a queue may be read though the budget of all is used up")
	}
	l.pop(&full)
	if len(resumed) != 1 || resumed[0] != &paused || !l.MayRead(&paused) {
		t.Errorf("%d queues resumed, want the one that was paused", len(resumed))
	}
}

// TestBudgetNotAsked: if a transport receives without calling MayRead, the loop waits with the item and
// loses nothing.
func TestBudgetNotAsked(t *testing.T) {
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
	l.Budget, l.Weight = NewBudget(400, 0), func(item) int { return 100 }
	l.Start()
	for i := range 6 { // one in delivery, four queued, one with the receiver
		src.c <- item{&queue, 0, i}
	}
	waitFor(t, "pause", func() bool { return l.Pauses() == 1 })
	if n := l.Budget.Used(); n != 400 {
		t.Errorf("%d bytes wait, want 400", n)
	}
	close(release)
	waitFor(t, "delivery of 6 items", func() bool { return got.Load() == 6 })
	stop(t, l, src)
}

// TestBudgetLosesNoWakeUp: each paused queue is resumed, also if pauses and free capacity coincide.
func TestBudgetLosesNoWakeUp(t *testing.T) {
	const peers, each = 6, 3000
	var left atomic.Int64
	left.Store(peers * each)
	done := make(chan struct{})
	var n atomic.Int64
	s := newSources(peers, func(it item) {
		if n.Add(1)%500 == 0 {
			time.Sleep(time.Millisecond) // the slow handler itself
		}
		if left.Add(-1) == 0 {
			close(done)
		}
	})
	s.l.Limit = 100 * time.Microsecond
	s.l.QueueCap = 16
	s.l.Budget, s.l.Weight = NewBudget(1000, 2000), func(item) int { return 100 }
	s.l.Start()
	for range each {
		for p := range peers {
			s.send(p, 1)
		}
	}
	wait(t, done, "last item")
	s.stop(t)
	if n := s.l.Budget.Used(); n != 0 {
		t.Errorf("%d bytes wait in the end", n)
	}
}

// TestTakeOver: a delivery that ends while its role is taken finds its queue
// slow, and so drains it.
func TestTakeOver(t *testing.T) {
	var queue PeerQueue[item]
	src := newSource()
	release, got := make(chan struct{}), make(chan struct{}, 1)
	first := true
	l := NewLoop(src.recv, func(it item) {
		if it.seq == 0 {
			<-release
			return
		}
		got <- struct{}{}
	})
	l.taken = func() {
		if first {
			first = false
			close(release)
			time.Sleep(50 * time.Millisecond) // in which the delivery ends and must go no further
		}
	}
	l.Start()
	src.c <- item{&queue, 0, 0}
	src.c <- item{&queue, 0, 1}
	wait(t, got, "delivery of the second item")
	stop(t, l, src)
}
