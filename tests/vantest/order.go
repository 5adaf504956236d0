package vantest

// Tests of order and of independence: each message once, in order, and no peer delays
// another.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// tally checks that each of some senders' messages 0 to each-1 comes once, in
// order unless lossy, and that no two of one sender are handed up at once.
type tally struct {
	w      *world
	each   int
	from   map[int]*sequence
	left   atomic.Int64
	done   chan struct{}
	errors chan error
}

type sequence struct {
	busy atomic.Bool
	mu   sync.Mutex // for lossy vans
	next int
	seen []bool
}

func newTally(w *world, each int, senders ...int) *tally {
	t := &tally{w: w, each: each, from: map[int]*sequence{}, done: make(chan struct{}), errors: make(chan error, 16)}
	for _, id := range senders {
		t.from[id] = &sequence{seen: make([]bool, each)}
	}
	t.left.Store(int64(each * len(senders)))
	return t
}

func (t *tally) fail(format string, a ...any) {
	select {
	case t.errors <- fmt.Errorf(format, a...):
	default: // enough of them
	}
}

func (t *tally) receive(m *van.Message) {
	s := t.from[m.Sender]
	if s == nil {
		t.fail("message from unexpected sender %d", m.Sender)
		return
	}
	if s.busy.Swap(true) {
		t.fail("two messages of %d handed up at once", m.Sender)
	}
	defer s.busy.Store(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	i := int(m.Timestamp)
	if v := m.Vals.Host(); len(v) != 8 || binary.LittleEndian.Uint64(v) != uint64(i) {
		t.fail("message %d of %d carries %x", i, m.Sender, v)
	}
	switch {
	case i < 0 || i >= t.each:
		t.fail("message %d of %d was not sent", i, m.Sender)
		return
	case s.seen[i]:
		t.fail("message %d of %d came twice", i, m.Sender)
		return
	case i != s.next && !t.w.suite.Lossy:
		t.fail("message %d of %d came when %d was due", i, m.Sender, s.next)
	}
	s.seen[i] = true
	s.next = i + 1
	if t.left.Add(-1) == 0 {
		close(t.done)
	}
}

func (t *tally) wait() {
	t.w.Helper()
	select {
	case <-t.done:
	case err := <-t.errors:
		t.w.Fatal(err)
	case <-time.After(Limit):
		t.w.Fatalf("%d messages are missing after %s", t.left.Load(), Limit)
	}
	select {
	case err := <-t.errors:
		t.w.Fatal(err)
	default:
	}
}

// numbers returns the frames of message i.
func numbers(i int) [][]byte {
	return [][]byte{make([]byte, 8), binary.LittleEndian.AppendUint64(nil, uint64(i))}
}

// sendAll sends each messages to every peer, from a goroutine of its own for
// each peer, all of which are added to senders.
func (n *node) sendAll(senders *sync.WaitGroup, each int, request bool, peers ...*node) {
	for _, p := range peers {
		senders.Go(func() {
			for i := range each {
				if err := n.send(data(p.self.ID, i, request, numbers(i)...)); err != nil {
					n.w.Errorf("Send to %s: %v", van.NodeName(p.self.ID), err)
					return
				}
			}
		})
	}
}

// count is how many messages a sender sends to test order.
func (w *world) count() int {
	switch {
	case w.suite.Lossy:
		return 300
	case Race:
		return 1000
	}
	return 10_000
}

func manyToOne(w *world) {
	each := w.count()
	t := newTally(w, each, 9, 11, 13)
	server := w.node(8, t.receive)
	var workers []*node
	for _, id := range []int{9, 11, 13} {
		worker := w.node(id, nil)
		link(worker, server)
		workers = append(workers, worker)
	}
	var senders sync.WaitGroup
	for _, worker := range workers {
		worker.sendAll(&senders, each, true, server)
	}
	senders.Wait()
	t.wait()
}

// oneToMany lets two servers and two workers send to each other in both
// directions at once.
func oneToMany(w *world) {
	each := w.count() / 4
	var nodes []*node
	var tallies []*tally
	for i, id := range []int{8, 10, 9, 11} {
		peers := []int{9, 11}
		if i >= 2 {
			peers = []int{8, 10}
		}
		t := newTally(w, each, peers...)
		n := w.make(id)
		n.knowsID = true
		n.bind(func(m *van.Message) {
			if m.Timestamp < 0 { // a greeting
				n.collect(m)
				return
			}
			t.receive(m)
		})
		nodes, tallies = append(nodes, n), append(tallies, t)
	}
	servers, workers := nodes[:2], nodes[2:]
	for _, s := range servers {
		for _, worker := range workers {
			link(worker, s)
		}
	}
	w.greet(workers, servers)
	var senders sync.WaitGroup
	for _, s := range servers {
		s.sendAll(&senders, each, false, workers...)
	}
	for _, k := range workers {
		k.sendAll(&senders, each, true, servers...)
	}
	senders.Wait()
	for _, t := range tallies {
		t.wait()
	}
}

func blockedReceiver(w *world) {
	blocked, entered := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(blocked) })
	var once sync.Once
	const each = 500
	free, stuck := newTally(w, each, 11), newTally(w, each, 9)
	server := w.node(8, func(m *van.Message) {
		if m.Sender == 11 {
			free.receive(m)
			return
		}
		once.Do(func() { close(entered); <-blocked })
		stuck.receive(m)
	})
	a, b := w.node(9, nil), w.node(11, nil)
	link(a, server)
	link(b, server)
	defer release() // so that the van can be closed after a failure
	var senders sync.WaitGroup
	a.sendAll(&senders, each, true, server)
	w.wait(entered, "message in the receiver that blocks")
	b.sendAll(&senders, each, true, server)
	free.wait()
	release()
	stuck.wait()
	senders.Wait()
}

func blockedPeer(w *world) {
	release, entered := make(chan struct{}), make(chan struct{})
	var once sync.Once
	stuck := w.node(8, func(*van.Message) { once.Do(func() { close(entered) }); <-release })
	const each = 200
	t := newTally(w, each, 9)
	free := w.node(10, t.receive)
	worker := w.node(9, nil)
	link(worker, stuck)
	link(worker, free)
	defer close(release)
	worker.must(data(8, 0, true, numbers(0)...))
	w.wait(entered, "message in the peer that blocks")
	for i := range 2000 {
		m := data(8, i+1, true, make([]byte, 8), make([]byte, 1024))
		start := time.Now()
		err := worker.Send(m)
		if d := time.Since(start); d > 5*time.Second {
			w.Fatalf("Send to a peer that takes nothing took %s", d)
		}
		if err != nil && !errors.Is(err, van.ErrQueueFull) {
			w.Fatalf("Send to a peer that takes nothing: %v, want success or %v", err, van.ErrQueueFull)
		}
	}
	var senders sync.WaitGroup
	worker.sendAll(&senders, each, true, free)
	t.wait()
	senders.Wait()
}
