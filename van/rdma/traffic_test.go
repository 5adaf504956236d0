package rdma

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestManyKeys sends more keys than there are slots.
func TestManyKeys(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(func(c *env.Config) { c.AddressPoolSize = 200 })
	const keys = 1000
	for i := range keys {
		w.must(push(s, uint64(i), i, value(3000, i)))
	}
	for i := range keys {
		s.wantValue(i, value(3000, i))
	}
	if n := s.budget.slots.Len(); n > 150 {
		t.Errorf("%d slots for %d keys of one size", n, keys)
	}
}

// TestSlotsRunOut lets a node hold all messages until there is no slot left, then releases them.
func TestSlotsRunOut(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(func(c *env.Config) { c.AddressPoolSize = 8 })
	const n = 40
	for i := range n {
		w.must(push(s, 1, i, value(3000, i)))
	}
	var held []*van.Message
	for len(held) < s.budget.slots.Room() {
		held = append(held, s.next())
	}
	r.until("a slot request waits", func() bool {
		found := false
		for _, c := range *s.tables.conns.Load() {
			if c.in != nil {
				c.in.mu.Lock()
				found = found || len(c.in.slots.waiting[dataPriority]) > 0
				c.in.mu.Unlock()
			}
		}
		return found
	})
	for i := range n {
		m := (*van.Message)(nil)
		if len(held) > 0 {
			m, held = held[0], held[1:]
		} else {
			m = s.next()
		}
		if int(m.Timestamp) != i || !slices.Equal(m.Vals.Host(), value(3000, i)) {
			t.Fatalf("timestamp %d, want %d, or the value has changed", m.Timestamp, i)
		}
		m.Release()
	}
}

// TestOneShotsRunOut sends many control messages through few slots.
func TestOneShotsRunOut(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(func(c *env.Config) { c.AddressPoolSize = 3 })
	for i := range 300 {
		w.must(control(s, i))
	}
	for i := range 300 {
		m := s.next()
		if int(m.Timestamp) != i {
			t.Fatalf("timestamp %d, want %d", m.Timestamp, i)
		}
		m.Release()
	}
	r.until("the slots are free", func() bool { return s.budget.slots.Len() == 0 })
}

// TestNoReceiveMemory makes registrations of the receiver fail for a while.
func TestNoReceiveMemory(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	w.must(push(s, 1, 1, value(5000, 1)))
	s.wantValue(1, value(5000, 1))
	s.stack.Limit(s.stack.Registered() + 100<<10)
	m := push(s, 2, 2, value(200<<10, 2))
	m.Done = w
	w.must(m)
	w.wantDown(s, "no memory for", fmt.Sprint(256<<10))
	w.wantUp(s)
	r.until("Done", func() bool { return w.dones.Load() == 1 })
	w.must(push(s, 1, 3, value(5000, 3)))
	s.wantValue(3, value(5000, 3))
	s.stack.Limit(1 << 40)
	w.must(push(s, 2, 4, value(200<<10, 4)))
	s.wantValue(4, value(200<<10, 4))
}

// TestNoReceiveMemoryReleases: each time that there is no memory for a slot, the slot's resources are released: the memory of its meta, its index, and its share of
// the slots for control messages.
func TestNoReceiveMemoryReleases(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	w.must(push(s, 1, 1, value(5000, 1)))
	s.wantValue(1, value(5000, 1))
	places, left := s.budget.slots.Room(), 0
	s.budget.slots.Each(func(*receiveSlot) { left++ })
	leased, shots := s.budget.registered.Load(), s.incomingOf(9).slots.oneShots.Load()
	s.stack.Limit(s.stack.Registered() + 100<<10)
	for i := range 4 {
		m := push(s, 2, 2+i, value(200<<10, 2))
		m.Body = value(10_000, 1) // its meta needs memory of its own
		w.must(m)
		w.wantDown(s, "no memory for")
		w.wantUp(s)
	}
	r.until("nothing is left of the slots", func() bool {
		n := 0
		s.budget.slots.Each(func(*receiveSlot) { n++ })
		return s.budget.registered.Load() <= leased && n <= left && s.budget.slots.Room() == places && s.incomingOf(9).slots.oneShots.Load() <= shots
	})
	s.stack.Limit(1 << 40)
	w.must(push(s, 2, 10, value(200<<10, 4)))
	s.wantValue(10, value(200<<10, 4))
}

// TestFewSlots has a receiver with memory for two more slots, and a burst that requests many: the burst uses the existing slots, of its own key and of others.
func TestFewSlots(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	w.must(push(s, 1, 0, value(200<<10, 0)))
	s.wantValue(0, value(200<<10, 0))
	s.stack.Limit(s.stack.Registered() + 600<<10)
	const n = 20
	for i := 1; i <= n; i++ {
		w.must(push(s, uint64(i%2), i, value(200<<10, i)))
	}
	for i := 1; i <= n; i++ {
		s.wantValue(i, value(200<<10, i))
	}
	w.wantNoLoss()
}

// wantNoLoss checks that the watcher was notified of no loss.
func (n *testNode) wantNoLoss() {
	n.r.Helper()
	for len(n.changes) > 0 {
		if c := <-n.changes; !c.up {
			n.r.Errorf("%s was told: %v", van.NodeName(n.who.ID), c.cause)
		}
	}
}

// TestNoSendMemory makes registrations of the sender fail, for values and pull tensors.
func TestNoSendMemory(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	w.must(push(s, 1, 1, value(5000, 1)))
	s.wantValue(1, value(5000, 1))
	w.stack.Limit(w.stack.Registered())
	w.must(pull(s, 2, 2, make([]byte, 100<<10)))
	w.wantDown(s, "memory for the answer, 102400 bytes")
	w.wantUp(s)
	w.must(push(s, 2, 3, value(100<<10, 4)))
	w.wantDown(s, "value of 102400 bytes")
	w.wantUp(s)
	w.stack.Limit(1 << 40)
	w.must(push(s, 2, 4, value(100<<10, 4)))
	s.wantValue(4, value(100<<10, 4))
}

// TestPlacedAnswer writes an answer into the pull tensor, also split.
func TestPlacedAnswer(t *testing.T) {
	for _, split := range []bool{false, true} {
		t.Run(fmt.Sprintf("split %t", split), func(t *testing.T) {
			r := newRig(t)
			w, s := r.pair(func(c *env.Config) { c.SplitQPLag = split })
			dst := make([]byte, 300<<10)
			for i := range 5 {
				w.must(pull(s, 1, i, dst))
				q := s.next()
				v := value(len(dst), i)
				s.must(answer(q, v))
				q.Release()
				m := w.next()
				if !m.Placed || m.Vals.Addr() != backend.Bytes(dst).Addr() || !slices.Equal(dst, v) {
					t.Fatalf("round %d: the answer was not put into the tensor", i)
				}
				m.Release()
			}
			if n := w.Stats().LentValues; n != 0 {
				t.Errorf("%d regions are in use", n)
			}
		})
	}
}

// TestLateAnswer: after Invalidate, a late answer cannot be written to the memory.
func TestLateAnswer(t *testing.T) {
	t.Run("asked", func(t *testing.T) {
		r := newRig(t)
		w, s := r.pair()
		dst := make([]byte, 100<<10)
		w.must(pull(s, 1, 1, dst))
		q := s.next()
		w.Invalidate(backend.Bytes(dst))
		registered := w.stack.Registered()
		s.must(answer(q, value(len(dst), 1)))
		q.Release()
		// The worker, whose memory it was, may be the first to end the connection.
		s.wantChange("the peer is down: remote access error, or disconnected", func(c change) bool {
			return c.id == w.who.ID && !c.up && (strings.Contains(c.cause.Error(), "remote access error") || strings.Contains(c.cause.Error(), "disconnected"))
		})
		s.wantUp(w)
		if slices.Contains(dst, 8) || slices.Max(dst) != 0 {
			t.Error("the answer has come to memory that was taken back")
		}
		if n := w.Stats().LentValues; n != 0 {
			t.Errorf("%d regions are in use", n)
		}
		// The next pull works again.
		w.wantUpOrSend(s, pull(s, 1, 2, dst))
		q = s.next()
		s.must(answer(q, value(len(dst), 2)))
		q.Release()
		for m := w.next(); ; m = w.next() {
			done := m.Timestamp == 2 && m.Placed && slices.Equal(dst, value(len(dst), 2))
			m.Release()
			if done {
				break
			}
		}
		if w.stack.Registered() < registered {
			t.Error("the memory is not registered again")
		}
	})
	t.Run("waiting", func(t *testing.T) {
		r := newRig(t)
		w, s := r.node(9), r.make(8)
		// The server does not listen yet: the request waits.
		self := s.who
		port := 40000
		s.who.Port = port
		w.connect(s)
		dst := make([]byte, 100<<10)
		w.must(pull(s, 1, 1, dst))
		w.Invalidate(backend.Bytes(dst))
		s.who = self
		s.listenOn(port)
		s.Start(func(m *van.Message) { s.in <- m.Retain() })
		q := s.next()
		if q.Option != 0 {
			t.Error("the request names memory that was taken back")
		}
		q.Release()
		if n := w.Stats().LentValues; n != 0 {
			t.Errorf("%d regions are in use", n)
		}
	})
}

// wantUpOrSend sends m as soon as the connection is up again.
func (n *testNode) wantUpOrSend(to *testNode, m *van.Message) {
	n.r.Helper()
	n.r.until("the message can be sent", func() bool {
		err := n.Send(m)
		if err != nil && !errors.Is(err, van.ErrPeerLost) {
			n.r.Fatal(err)
		}
		return err == nil
	})
}

// TestRetainBeyondClose keeps messages of all kinds until the van is closed.
func TestRetainBeyondClose(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	registered := make([]byte, 10000)
	if err := s.RegisterRecvBuffer(w.who.ID, 3, backend.Bytes(registered)); err != nil {
		t.Fatal(err)
	}
	body := func(m *van.Message, n int) *van.Message {
		m.Body = []byte(strings.Repeat("b", n))
		return m
	}
	all := []*van.Message{
		push(s, 1, 0, value(100, 0)),
		push(s, 2, 1, value(5000, 1)),
		push(s, 3, 2, value(10000, 2)),
		body(push(s, 1, 3, value(100, 3)), 3000),
		body(push(s, 1, 4, value(5000, 4)), 3000),
		body(push(s, 1, 5, value(5000, 5)), 100),
	}
	for _, m := range all {
		w.must(m)
	}
	var got []*van.Message
	for range all {
		got = append(got, s.next())
	}
	w.close()
	s.close()
	for _, l := range r.net.Leaks() {
		t.Errorf("leaked: %s", l)
	}
	for i, m := range got {
		want := all[i]
		if m.Timestamp != want.Timestamp || string(m.Vals.Host()) != string(want.Vals.Host()) || string(m.Body) != string(want.Body) ||
			le.Uint64(m.Keys.Host()) != want.Key {
			t.Errorf("message %d has changed", i)
		}
		m.Release()
	}
}

// TestSplitOrder delivers the second queue pair's part before and after the meta.
func TestSplitOrder(t *testing.T) {
	for _, first := range []int{0, 1} {
		t.Run(fmt.Sprintf("queue pair %d first", first), func(t *testing.T) {
			r := newRig(t)
			w, s := r.pair(func(c *env.Config) { c.SplitQPLag = true })
			w.must(push(s, 1, 0, value(40000, 0)))
			s.wantValue(0, value(40000, 0))
			p := (*w.tables.peers.Load())[s.who.ID]
			p.mu.Lock()
			qps := p.link.queue.QueuePairs
			p.mu.Unlock()
			for _, q := range qps {
				r.net.HoldQP(q.Num())
			}
			for i := range 3 {
				w.must(push(s, 1, 1+i, value(40000+i, 1+i)))
			}
			w.must(push(s, 2, 4, value(100, 4))) // not split
			for range 100 {
				r.net.Step(qps[first].Num())
			}
			select {
			case m := <-s.in:
				t.Errorf("timestamp %d came with half of its parts", m.Timestamp)
			default:
			}
			r.net.Release(qps[1-first].Num())
			for i := range 3 {
				s.wantValue(1+i, value(40000+i, 1+i))
			}
			s.wantValue(4, value(100, 4))
		})
	}
}

// TestSplitLost loses the connection while a message waits for its other part. A control message does not wait for that part: its sender knows that it has arrived, and
// does not send it again.
func TestSplitLost(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w, s := r.pair(func(c *env.Config) { c.SplitQPLag = true })
	w.must(push(s, 1, 0, value(40000, 0)))
	s.wantValue(0, value(40000, 0))
	p := (*w.tables.peers.Load())[s.who.ID]
	p.mu.Lock()
	qps := p.link.queue.QueuePairs
	p.mu.Unlock()
	r.net.HoldQP(qps[1].Num())
	w.must(push(s, 1, 1, value(40000, 1)))
	held := func() (n int) {
		for _, c := range *s.tables.conns.Load() {
			if c.in != nil && c.in.order.hasIncomplete.Load() {
				n++
			}
		}
		return n
	}
	r.until("the message waits for its part", func() bool { return held() == 1 })
	w.must(control(s, 2))
	if m := s.next(); !m.IsControl() || m.Timestamp != 2 {
		t.Errorf("%s came, want the control message with timestamp 2", m.Meta.String())
	}
	w.kill(true)
	r.until("the connection has ended", func() bool { return len(*s.tables.conns.Load()) <= 1 })
	select {
	case m := <-s.in:
		t.Errorf("timestamp %d came with half of its parts", m.Timestamp)
		m.Release()
	default:
	}
}

// TestOverwritten is a peer that overwrites a value in use, as StepMesh may. Both messages are delivered.
func TestOverwritten(t *testing.T) {
	h := newHostileWorld(t, false)
	r := h.c.ask(slotRequest{metaLen: 400, dataNum: 2, data: [4]uint64{8, 600}, origin: 1, key: 6})
	for i := range 2 {
		h.c.notify(0, r.index, r.meta, r.metaKey, encode(h.rig, push(h.s, 6, i, value(600, i)), nil))
		m := h.s.next()
		if int(m.Timestamp) != i || m.Vals.Len() != 600 {
			t.Errorf("timestamp %d with %d bytes, want %d with 600", m.Timestamp, m.Vals.Len(), i)
		}
		defer m.Release()
	}
	for _, c := range *h.s.tables.conns.Load() {
		if c.in != nil && c.in.handshake.node == 11 {
			h.until("the warning", func() bool {
				c.in.mu.Lock()
				defer c.in.mu.Unlock()
				return c.in.slots.warned
			})
			h.s.says("rdma: a peer has overwritten a value that is still in use")
		}
	}
	h.ends(0)
}

// TestCloseWhileDialling closes nodes that connect to an unused address, to a silent one, and to each other.
func TestCloseWhileDialling(t *testing.T) {
	for i := range 8 {
		r := newRig(t, func(c *fakeverbs.Config) { c.EventDelay, c.Seed = 300e3, uint64(i) })
		a, b := r.node(9), r.node(8)
		if err := a.Connect(context.Background(), 10, van.Node{ID: 10, Hostname: "10.77.9.9", Port: 1}); err != nil {
			t.Fatal(err)
		}
		a.connect(b)
		b.connect(a)
		if i%2 == 0 {
			b.wantUp(a)
		}
		m := push(b, 1, 1, value(5000, 1))
		m.Done = a
		a.must(m)
		var both sync.WaitGroup
		both.Go(func() {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			if err := a.Close(ctx); err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("Close: %v", err)
			}
		})
		both.Go(b.close)
		both.Wait()
		r.until("Done", func() bool { return a.dones.Load() == 1 })
	}
}

// TestStorm reconnects again and again, with traffic.
func TestStorm(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	stop := make(chan struct{})
	var all sync.WaitGroup
	sent := 0
	all.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			m := push(s, uint64(i%7), i, value(2500, i))
			m.Done = w
			if w.Send(m) == nil {
				sent++
			}
		}
	})
	all.Go(func() {
		for {
			select {
			case m := <-s.in:
				m.Release()
			case <-stop:
				return
			}
		}
	})
	for i := range 25 {
		if i%3 == 0 {
			w.Disconnect(s.who.ID)
		}
		w.connect(s)
		if i%2 == 0 {
			w.wantUp(s)
		}
	}
	close(stop)
	all.Wait()
	w.close()
	r.until("Done for all", func() bool { return int(w.dones.Load()) >= sent })
	if n := int(w.dones.Load()); n != sent {
		t.Errorf("Done was called %d times for %d messages", n, sent)
	}
}

// TestManySenders sends from many goroutines: the order of each is kept, and every message arrives once.
func TestManySenders(t *testing.T) {
	r := newRig(t, func(c *fakeverbs.Config) { c.Jitter, c.Seed = 20e3, 3 })
	w, s := r.pair(func(c *env.Config) { c.SplitQPLag = true })
	const senders, each = 8, 40
	var all sync.WaitGroup
	for g := range senders {
		all.Go(func() {
			for i := range each {
				size := 50 << (i % 10)
				m := push(s, uint64(g), g*each+i, value(size, i))
				m.Done = w
				if i%9 == 0 {
					m = control(s, g*each+i)
				}
				if err := w.Send(m); err != nil {
					t.Error(err)
				}
			}
		})
	}
	last := map[[2]int]int{}
	for range senders * each {
		m := s.next()
		ts := int(m.Timestamp)
		g, i, lane := ts/each, ts%each, 0
		if !m.IsControl() {
			lane = 1
			if !slices.Equal(m.Vals.Host(), value(50<<(i%10), i)) {
				t.Fatalf("the value of timestamp %d has changed", ts)
			}
		}
		if prev, ok := last[[2]int{g, lane}]; ok && prev >= i {
			t.Fatalf("message %d of sender %d came after %d", i, g, prev)
		}
		last[[2]int{g, lane}] = i
		m.Release()
	}
	all.Wait()
	want := senders * (each - (each+8)/9)
	r.until("Done for all", func() bool { return int(w.dones.Load()) >= want })
	if n := int(w.dones.Load()); n != want {
		t.Errorf("Done was called %d times, want %d", n, want)
	}
	if m := s.Stats().Malformed + w.Stats().Malformed; m != 0 {
		t.Errorf("%d malformed messages", m)
	}
}

// TestKilledWhilePolled kills a server whose worker waits for answers.
func TestKilledWhilePolled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w, s := r.pair()
	dst := make([]byte, 50<<10)
	w.must(pull(s, 1, 1, dst))
	s.next().Release()
	s.kill(true)
	w.wantDown(s)
	w.delivery.engine.Poll(func() bool { return false })
	w.Invalidate(backend.Bytes(dst))
	if n := w.Stats().LentValues; n != 0 {
		t.Errorf("%d regions are in use", n)
	}
}
