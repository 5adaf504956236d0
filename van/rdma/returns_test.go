package rdma

import (
	"testing"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// shortQueues makes queues so short that one message in flight fills them.
func shortQueues(c *env.Config) { c.RDMAStartDepth, c.RDMARxDepth = 1, c.QPNum }

// fullLink gives w n free slots at s. s asks for all of them while w's queue is full. It returns w's peer for s, which has a message in flight.
func fullLink(w, s *testNode, n int) *peer {
	r := w.r
	r.Helper()
	hoard(w, s, n, 3000)
	p := (*w.tables.peers.Load())[s.who.ID]
	for waits := true; waits; {
		r.until("all slots are free", func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.link.queue.Idle() && s.incomingOf(w.who.ID).owed.count.Load() == 0
		})
		for _, q := range p.currentLink().queue.QueuePairs {
			r.net.HoldQP(q.Num())
		}
		w.must(push(s, 1, 1000, value(3000, 7)))
		p.mu.Lock()
		waits = p.sender.Waiting() > 0
		p.mu.Unlock()
		if waits { // for a message of the transport's own, which was in flight
			r.net.Release()
			s.wantValue(1000, value(3000, 7))
		}
	}
	slotSet{s.incomingOf(w.who.ID)}.requestReclaim(maxIndex, 0, clock.Now()|1<<62) // even if it was asked just before
	r.until("the slots are given up", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.sender.Returns()) >= n-1
	})
	return p
}

// Returns of slots that find the queue full are sent later, each once. No other message that could send them is in flight.
func TestReturnsWaitForQueue(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(shortQueues)
	const n = maxCredits + 7 // more than one SEND can return
	p := fullLink(w, s, n)
	p.mu.Lock()
	said, waiting := p.link.queue.CanBegin(0), p.sender.Waiting()
	p.mu.Unlock()
	if said || waiting != 0 {
		t.Fatalf("there is room: %t, %d messages wait; want neither", said, waiting)
	}
	r.net.Release()
	s.wantValue(1000, value(3000, 7))
	r.until("the slots have come back", func() bool {
		left := 0
		s.budget.slots.Each(func(l *receiveSlot) {
			if !l.OneShot && l.Route.Class != 0 {
				left++
			}
		})
		return left == 0
	})
	if n := s.Stats().Malformed; n != 0 {
		t.Errorf("%d notices were refused, want each slot to come back once", n)
	}
	for i := range 3 {
		w.must(push(s, 1, i, value(3000, i)))
		s.wantValue(i, value(3000, i))
	}
}

// Returns of slots that were not sent before their connection broke are not sent on the next one, where the same numbers may belong to other slots.
func TestReturnsEndWithTheConnection(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(shortQueues)
	p := fullLink(w, s, 8)
	old := p.currentLink()
	old.fail(van.ErrPeerLost)
	w.wantDown(s)
	r.net.Release()
	w.wantUp(s)
	p.mu.Lock()
	left := len(p.sender.Returns())
	p.mu.Unlock()
	if left != 0 {
		t.Errorf("%d slots of the connection before are still to be returned", left)
	}
	for i := range 4 {
		w.must(push(s, 1, i, value(3000, i)))
	}
	for i := range 4 {
		m := s.nextWith(int32(i))
		if string(m.Vals.Host()) != string(value(3000, i)) {
			t.Errorf("value %d has changed", i)
		}
		m.Release()
	}
	if n := s.Stats().Malformed; n != 0 {
		t.Errorf("%d notices were refused, want none", n)
	}
}
