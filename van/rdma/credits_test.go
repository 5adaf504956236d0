package rdma

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/fakeverbs"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Places that were given back with an answer that was lost are not lost with it. A peer
// that has refused the answer has not heard of them; else nobody knows, and the connection
// that they belong to ends.
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
			link := func() *link { return (*w.peers.Load())[s.who.ID].current() }
			first := link()
			// exchange answers a push. It tells whether the answer has taken the place back.
			exchange := func(i int) bool {
				w.wantUpOrSend(s, push(s, 1, i, value(40000, i)))
				m := s.next()
				back := (*s.peers.Load())[w.who.ID].back.Load()
				m.Release()
				owed := back != nil && back.owed.Load() > 0
				armed.Store(owed)
				a := push(&testNode{who: van.Node{ID: w.who.ID}}, 1, i, nil)
				a.Request = false
				s.wantUpOrSend(w, a)
				return owed && !armed.Swap(false)
			}
			const losses = 8
			for i, n := 0, 0; n < losses; i++ {
				if !exchange(i) {
					w.next().Release()
					continue
				}
				s.wantDown(w)
				s.wantUp(w)
				w.wantUp(s)
				r.until("the peer's connection", func() bool { b := (*s.peers.Load())[w.who.ID].back.Load(); return b != nil && !b.gone.Load() })
				n++
			}
			if n := s.table.Len(); n >= losses {
				t.Errorf("%d places are given away, after %d lost answers", n, losses)
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
