package rdma

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// TestPauses: the pause between attempts to connect begins with 10 ms and doubles up to a second. It is multiplied by a random factor from half to one
// and a half, so that not all nodes connect at once. After a connection it begins with 10 ms again. The attempts continue until the peer is disconnected,
// with one line in the log.
func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		block := func(c *env.Config) { c.BusyPoll = env.AlwaysBlock } // a poller that spins would spin forever here
		w, s := r.node(9, block), r.node(8, block)
		var mu sync.Mutex
		var attempts []time.Time // no time passes during an attempt
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
			if n := w.lines(again, van.NodeName(8), "no process listens"); n != round {
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
			if wr.Stack == w.stack && wr.Len >= 8000 { // a control message that fails is not a loss yet
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
