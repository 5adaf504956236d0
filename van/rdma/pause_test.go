package rdma

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/fakeverbs"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// TestPauses: between two attempts to connect there are 10 ms at first, twice as many each time up to a second, and each
// time half to one and a half of that, so that not all nodes come at once; after a connection they begin with 10 ms again.
// That goes on until the peer leaves, with one line in the log.
func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		block := func(c *env.Config) { c.BusyPoll = env.AlwaysBlock } // who looks for a while would look for ever
		w, s := r.node(9, block), r.node(8, block)
		var mu sync.Mutex
		var attempts []time.Time // no time passes during one
		r.net.Fail(func(op fakeverbs.Op) error {
			mu.Lock()
			defer mu.Unlock()
			if now := time.Now(); op.Kind == fakeverbs.OpConnect && op.Stack == w.stack && (len(attempts) == 0 || attempts[len(attempts)-1] != now) {
				attempts = append(attempts, now)
			}
			return nil
		})
		taken := func() []time.Time {
			mu.Lock()
			defer mu.Unlock()
			all := attempts
			attempts = nil
			return all
		}
		const again = "rdma: no connection yet, trying again"
		rejected := func(round int) {
			t.Helper()
			time.Sleep(30 * time.Second)
			all := taken()
			if len(all) < 20 {
				t.Fatalf("%d attempts in half a minute, want more", len(all))
			}
			want := 10 * time.Millisecond
			shorter, longer := 0, 0
			for i := range all[1:] {
				if pause := all[i+1].Sub(all[i]); pause < want/2 || pause >= want*3/2 {
					t.Errorf("pause %d is of %s, want half to one and a half of %s", i, pause, want)
				}
				if want = min(2*want, time.Second); all[i+1].Sub(all[i]) > time.Second {
					longer++
				} else if want == time.Second && i > 8 {
					shorter++
				}
			}
			if shorter == 0 || longer == 0 {
				t.Errorf("of the last pauses %d are of less than a second and %d of more, want some of each", shorter, longer)
			}
			if n := w.lines(again, van.NodeName(8), "nobody listens"); n != round {
				t.Errorf("%d lines say that there is no connection yet and why, want %d", n, round)
			}
		}
		r.net.RejectNext(1<<30, 8)
		w.connect(s)
		rejected(1)
		r.net.RejectNext(0, 0)
		w.wantUp(s)

		r.net.RejectNext(1<<30, 8)
		var once sync.Once
		r.net.FailWR(func(wr fakeverbs.WR) (st verbs.Status) {
			if wr.Stack == w.stack {
				once.Do(func() { st = verbs.StatusRetryExceeded })
			}
			return st
		})
		taken()
		_ = w.Send(push(s, 1, 1, value(8000, 1))) // it fails, now or later
		w.wantDown(s, "retries exceeded")
		rejected(2)

		w.Disconnect(s.who.ID)
		synctest.Wait()
		taken()
		time.Sleep(time.Minute)
		if all := taken(); len(all) > 0 {
			t.Errorf("%d attempts after the peer has left", len(all))
		}
	})
}
