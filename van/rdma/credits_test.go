package rdma

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Credits are not lost with an answer. If the peer has refused the answer, it has not received them. Otherwise it is not known whether it
// has, and the connection that they belong to ends.
func TestCreditsOfLostAnswer(t *testing.T) {
	for _, c := range []struct {
		status verbs.Status
		stays  bool
	}{{verbs.StatusRemoteAccess, true}, {verbs.StatusRemoteInvalid, true}, {verbs.StatusRemoteOp, true}, {verbs.StatusRetryExceeded, false}} {
		t.Run(fmt.Sprint(c.status), func(t *testing.T) {
			r := newRig(t)
			w, s := r.pair()
			var armed atomic.Bool
			r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
				if wr.Stack == s.stack && wr.Op == verbs.OpWriteImm && armed.Swap(false) {
					return c.status
				}
				return verbs.StatusOK
			})
			link := func() *link { return (*w.tables.peers.Load())[s.who.ID].currentLink() }
			first := link()
			// arrive sends message i until it arrives: connections may be about to end.
			arrive := func(i int) *van.Message {
				for again := time.NewTicker(100 * time.Millisecond); ; {
					w.wantUpOrSend(s, push(s, 1, i, value(40000, i)))
					for waits := true; waits; {
						select {
						case m := <-s.in:
							if int(m.Timestamp) == i {
								return m
							}
							m.Release()
						case <-again.C:
							waits = false
						}
					}
				}
			}
			// exchange answers a push. It reports whether the answer has carried the slot's credit.
			exchange := func(i int) bool {
				m := arrive(i)
				back := (*s.tables.peers.Load())[w.who.ID].inbound.Load()
				m.Release()
				owed := back != nil && back.owed.count.Load() > 0
				armed.Store(owed)
				a := push(&testNode{who: van.Node{ID: w.who.ID}}, 1, i, nil)
				a.Request = false
				s.wantUpOrSend(w, a)
				return owed && !armed.Swap(false)
			}
			// settle waits until the worker has the returned slots.
			settle := func(i int) {
				r.until("nothing is owed", func() bool {
					back := (*s.tables.peers.Load())[w.who.ID].inbound.Load()
					return back == nil || back.owed.count.Load() == 0
				})
				s.must(control(w, i))
				for came := false; !came; {
					m := w.next()
					came = m.IsControl() && int(m.Timestamp) == i
					m.Release()
				}
			}
			const losses = 8
			for i, n := 0, 0; n < losses; i++ {
				if exchange(i) {
					s.wantDown(w)
					s.wantUp(w)
					n++
				}
				settle(i)
			}
			if n := s.budget.slots.Len(); n >= losses {
				t.Errorf("%d slots are given away, after %d lost answers", n, losses)
			}
			if now := link(); (now == first) != c.stays {
				t.Errorf("the worker's connection stands as it did: %t, want %t", now == first, c.stays)
			}
			if n := s.Stats().Malformed + w.Stats().Malformed; n != 0 {
				t.Errorf("%d malformed messages", n)
			}
		})
	}
}

// TestCreditsOfHalfAMessage: the first queue pair has written a message with its credits, but the second one has not written its part, when the peer refuses the
// next message. The credits are not sent again: the peer may already use them.
func TestCreditsOfHalfAMessage(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(func(c *env.Config) { c.QPNum, c.SplitQPLag = 2, true })
	var refuses atomic.Bool
	var alone atomic.Int64 // credits that were sent without a message
	r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
		switch {
		case wr.Stack != s.stack:
		case wr.Op == verbs.OpSendImm && wr.Imm == immCredits:
			alone.Add(1)
		case wr.Op == verbs.OpWriteImm && refuses.Swap(false):
			return verbs.StatusRemoteOp
		}
		return verbs.StatusOK
	})
	p := (*s.tables.peers.Load())[w.who.ID]
	// said waits until w has the message of s, and with it all earlier messages.
	said := func(i int) {
		s.must(control(w, i))
		for came := false; !came; {
			m := w.next()
			came = m.IsControl() && int(m.Timestamp) == i
			m.Release()
		}
	}
	for i, halves := 0, 0; halves < 4; i++ {
		w.must(push(s, 1, i, value(40000, i)))
		s.next().Release()
		s.must(push(w, 1, i, value(64<<10, i))) // now w has a slot for it
		said(i)
		r.until("nothing is owed, all has left", func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.inbound.Load().owed.count.Load() == 0 && p.link.queue.Idle()
		})
		r.net.HoldQP(p.currentLink().queue.QueuePairs[1].Num())
		w.must(push(s, 1, i, value(40000, i)))
		m, before := s.next(), alone.Load()
		m.Release()
		owed := p.inbound.Load().owed.count.Load() > 0
		s.must(push(w, 1, i, value(64<<10, i)))
		if owed && alone.Load() == before {
			halves++
		}
		refuses.Store(true)
		s.must(control(w, i))
		s.wantDown(w)
		r.net.Release()
		s.wantUp(w)
		said(i)
		r.until("nothing is owed", func() bool { return p.inbound.Load().owed.count.Load() == 0 })
	}
	if n := s.Stats().Malformed + w.Stats().Malformed; n != 0 {
		t.Errorf("%d malformed messages", n)
	}
}
