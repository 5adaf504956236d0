package rdma

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// TestIdleNodeDeregisters: a node with nothing to do, and without connections to probe, deregisters memory that it has not used for a while.
func TestIdleNodeDeregisters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		block := func(c *env.Config) { c.BusyPoll = env.AlwaysBlock } // a poller that spins would spin forever here
		w, s := r.node(9, block), r.node(8, block)
		w.times.sleep = maxSleep
		r.link(w, s)
		v := value(300<<10, 1)
		w.must(push(s, 1, 1, v))
		s.wantValue(1, v)
		w.Disconnect(s.who.ID)
		s.Disconnect(w.who.ID)
		time.Sleep(20 * time.Second)
		before := w.stack.Registered()
		time.Sleep(30 * time.Second) // longer than conn.maxIdle for the first messages, and less than the long limits
		if now := w.stack.Registered(); now > before-len(v) {
			t.Errorf("%d bytes are registered, %d some time before, want less by %d", now, before, len(v))
		}
	})
}

// TestHousekeepingAfterSleep: the loop does housekeeping before it sleeps. The first poll after the sleep has the time of the last poll
// before it, and causes no further housekeeping.
func TestHousekeepingAfterSleep(t *testing.T) {
	w, _ := newRig(t).pair()
	d := w.device0()
	d.exclusive(func() {
		now := clock.Now()
		d.housekeep(now, true)
		d.housekeep(now-1, false)
		if d.housekeptAt != now {
			t.Errorf("housekeeping is done again with a time %d ns before the last one", now-d.housekeptAt)
		}
		d.evictedAt = now
		d.housekeep(now-1, true)
		if d.evictedAt != now {
			t.Errorf("unused regions are searched again with a time %d ns before the last one", now-d.evictedAt)
		}
	})
}

// If the receiver holds more messages than there are slots, more slots are requested after a few milliseconds, even if nothing else happens.
func TestMoreSlotsWhileIdle(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	vals := make([]byte, 100)
	many := rendezvous.Eager(0)
	var took []time.Duration // of messages for which there was no slot
	for i := range many + 6 {
		began := time.Now()
		if err := p.worker.Send(tensor(serverID, i, 1, true, true, vals)); err != nil {
			t.Fatal(err)
		}
		defer p.next(p.atServer).Release()
		if i >= many {
			took = append(took, time.Since(began))
			p.until("sleep", (*p.worker.tables.devices.Load())[0].sleeping.Load)
		}
	}
	if slices.Sort(took); took[2] > 500*time.Millisecond { // one or two may be slow on a paused machine
		t.Errorf("messages took %s, want some milliseconds", took)
	}
}
