package cluster

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van/env"
)

// memberRequests returns the requests of an application of a cluster with three workers.
func memberRequests() *Inbound {
	b := NewInbound()
	b.self = &nodeInfo{cfg: env.Default()}
	b.self.cfg.NumWorkers, b.self.cfg.GroupSize = 3, 1
	return b
}

// TestCancellationsAreForgotten: a cancellation is found while messages of its request may arrive, for its own process
// only, and costs nothing afterwards.
func TestCancellationsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ws := memberRequests()
		ws.addCancellation(Canceled{Sender: 9, Customer: 2, First: 5, Count: 3}, 1)
		for _, x := range []struct {
			sender       int
			epoch        uint32
			customer, ts int32
			want         bool
		}{
			{9, 1, 2, 5, true}, {9, 1, 2, 7, true},
			{9, 1, 2, 4, false}, {9, 1, 2, 8, false}, // before and after
			{9, 2, 2, 5, false}, // of the replacement process
			{9, 1, 3, 5, false}, // of another customer
			{11, 1, 2, 5, false},
		} {
			if got := ws.wasCanceled(x.sender, x.epoch, x.customer, x.ts); got != x.want {
				t.Errorf("sender %d, epoch %d, customer %d, timestamp %d: given up is %t, want %t", x.sender, x.epoch, x.customer, x.ts, got, x.want)
			}
		}
		time.Sleep(cancelMemory)
		if !ws.wasCanceled(9, 1, 2, 5) {
			t.Error("forgotten too early")
		}
		time.Sleep(time.Millisecond)
		if ws.wasCanceled(9, 1, 2, 5) {
			t.Error("not forgotten")
		}
		if n := ws.of(9).canceled.Load(); n != 0 {
			t.Errorf("%d are remembered still, for which each request takes a lock", n)
		}
	})
}

// TestCancellationsShareNoLock: the cancellations of one worker do not make requests of the others wait for each other.
func TestCancellationsShareNoLock(t *testing.T) {
	ws := memberRequests()
	ws.addCancellation(Canceled{Sender: 9, Count: 1}, 1)
	ws.addCancellation(Canceled{Sender: 11, Count: 1}, 1)
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.of(9).mu.Lock()
	defer ws.of(9).mu.Unlock()
	if !ws.wasCanceled(11, 1, 0, 0) || ws.wasCanceled(13, 1, 0, 0) {
		t.Error("want what 11 has given up, and nothing of 13")
	}
}

// TestCancellationsAreBounded: the newest cancellations of one sender are remembered.
func TestCancellationsAreBounded(t *testing.T) {
	ws := memberRequests()
	for ts := range int32(maxCancellations + 1) {
		ws.addCancellation(Canceled{Sender: 9, First: ts, Count: 1}, 1)
	}
	if ws.wasCanceled(9, 1, 0, 0) || !ws.wasCanceled(9, 1, 0, 1) || !ws.wasCanceled(9, 1, 0, maxCancellations) {
		t.Errorf("want the last %d", maxCancellations)
	}
}
