package rdma

import (
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// TestInvalidateOfAnswered: memory that is invalidated at the moment when its answer arrives is not written to afterwards. The race detector finds more
// than the comparison of values.
func TestInvalidateOfAnswered(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	r.serve(s, 100)
	rounds := 2000
	if testing.Short() {
		rounds = 200
	}
	all := make([][]byte, rounds)
	p := (*w.tables.peers.Load())[8]
	for i := range all {
		dst := make([]byte, 100)
		all[i] = dst
		w.must(pull(s, uint64(i), i, dst))
		expected := func() int {
			p.mu.Lock()
			defer p.mu.Unlock()
			return len(p.pulls)
		}
		for end := time.Now().Add(patience); expected() > 0; { // at that moment
			if time.Now().After(end) {
				t.Fatal("no answer came")
			}
		}
		w.Invalidate(backend.Bytes(dst)) // as the loss of another server does
		for k := range dst {
			dst[k] = 77
		}
		select {
		case m := <-w.in:
			m.Release()
		default:
		}
	}
	for i, dst := range all {
		if slices.ContainsFunc(dst, func(b byte) bool { return b != 77 }) {
			t.Errorf("memory %d was written to after it had been taken back", i)
		}
	}
}

// serve answers pulls of n bytes until the test ends.
func (r *rig) serve(s *testNode, n int) {
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case q := <-s.in:
				_ = s.Send(answer(q, value(n, 1)))
				q.Release()
			case <-stop:
				return
			}
		}
	}()
	r.Cleanup(func() { close(stop); <-ended })
}

type doneFunc func()

func (f doneFunc) Sent() { f() }

// TestSplitFails: if one queue pair of a split message fails, the message's memory is released only after the other one has ended, too.
func TestSplitFails(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(func(c *env.Config) { c.QPNum, c.SplitQPLag = 2, true })
	w.must(push(s, 1, 0, value(64<<10, 0)))
	s.next().Release()
	p := (*w.tables.peers.Load())[8]
	r.until("the message has left", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.link.queue.Idle()
	})
	second := p.link.queue.QueuePairs[1].Num()
	r.net.HoldQP(second)
	r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
		if wr.Stack == w.stack && wr.Op == verbs.OpWrite && wr.Len > 0 {
			return verbs.StatusRemoteAccess
		}
		return verbs.StatusOK
	})
	m := push(s, 1, 1, value(64<<10, 1))
	done := make(chan bool, 1)
	m.Done = doneFunc(func() { done <- slices.Contains(r.net.Pending(), second) })
	w.must(m)
	if early := <-done; early {
		t.Error("the memory was released while the second queue pair had not ended")
	}
	r.net.FailWR(nil)
	r.net.Release()
	w.wantDown(s)
}

// TestStarvedRegistersNothing: a node without a free slot registers no memory for requests, however often they arrive.
func TestStarvedRegistersNothing(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8, func(c *env.Config) { c.AddressPoolSize = 4 })
	r.link(w, s)
	for i := range 8 {
		w.must(push(s, 1, i, value(1<<20, i)))
	}
	var held []*van.Message
	r.until("the receiver has given all slots away", func() bool {
		select {
		case m := <-s.in:
			held = append(held, m)
		default:
		}
		return s.budget.slots.Len() == s.budget.slots.Room() && r.starved(s)
	})
	var registered, looks atomic.Int64
	r.net.Fail(func(op fakeverbs.Op) error {
		switch {
		case op.Stack != s.stack:
		case op.Kind == fakeverbs.OpRegister:
			registered.Add(1)
		case op.Kind == fakeverbs.OpPoll:
			looks.Add(1)
		}
		return nil
	})
	r.until("the receiver has looked for free slots again and again", func() bool { return looks.Load() > 300 })
	if n := registered.Load(); n > 0 {
		t.Errorf("%d registrations while no slot was free", n)
	}
	r.net.Fail(nil)
	for _, m := range held {
		m.Release()
	}
	for range 8 - len(held) {
		s.next().Release()
	}
}

// starved reports whether a slot request waits at s.
func (r *rig) starved(s *testNode) bool {
	for _, c := range *s.tables.conns.Load() {
		if c.in != nil {
			c.in.mu.Lock()
			n := len(c.in.slots.waiting[dataPriority])
			c.in.mu.Unlock()
			if n > 0 {
				return true
			}
		}
	}
	return false
}

// TestLongMeta: a message with a moderately long text needs no registration.
func TestLongMeta(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	send := func(n int) {
		m := &van.Message{}
		m.Reset()
		m.Receiver, m.SimpleApp, m.Request, m.Timestamp = s.who.ID, true, true, int32(n)
		m.Body = []byte(strings.Repeat("x", n))
		w.must(m)
		got := s.next()
		if string(got.Body) != string(m.Body) {
			t.Errorf("a text of %d bytes came with %d, or differs", n, len(got.Body))
		}
		got.Release()
	}
	send(10)
	var registered atomic.Int64
	r.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpRegister && op.Stack == w.stack {
			registered.Add(1)
		}
		return nil
	})
	for _, n := range []int{100, 160, 200, 400, 1000, 1500} {
		send(n)
	}
	if n := registered.Load(); n > 0 {
		t.Errorf("%d registrations for texts, want none", n)
	}
	send(3000) // longer than a message's staging memory
	r.net.Fail(nil)
}

// TestIncompleteOfEnded: messages whose other part will not arrive are released, even if they arrive while the connection is being destroyed.
func TestIncompleteOfEnded(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	w.must(push(s, 1, 1, value(5000, 1)))
	m := s.next()
	rx := (*received)(m.Native())
	in := rx.in
	var once atomic.Bool
	r.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpDestroy && op.Stack == s.stack && !once.Swap(true) {
			in.device.exclusive(func() { // as arrived does
				in.order.incomplete = append(in.order.incomplete, rx)
				in.order.hasIncomplete.Store(true)
			})
		}
		return nil
	})
	in.fail(errors.New("the test ends it"))
	r.until("the message is released", func() bool {
		pool := &in.device.pool
		pool.mu.Lock()
		defer pool.mu.Unlock()
		return slices.Contains(pool.free, rx)
	})
	r.net.Fail(nil)
}
