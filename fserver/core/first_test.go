package core

import (
	"sync/atomic"
	"testing"
)

// The first message to a peer waits again after the loss of the peer, and only the messages that go to that peer.
func TestFirstSends(t *testing.T) {
	f := &firstSends{sent: make([]atomic.Bool, 3)}
	f.left.Store(3)
	expect := func(want bool, ranks ...int) {
		t.Helper()
		if got := f.pending(ranks...); got != want {
			t.Fatalf("pending(%v) = %t, want %t", ranks, got, want)
		}
	}
	expect(true)
	f.done(1)
	expect(false, 1)
	expect(true, 0, 1)
	expect(false, 7, -1) // refused later
	f.done(7, -1)
	f.done()
	expect(false)
	f.lost(2)
	f.lost(2)
	f.lost(9)
	expect(true)
	expect(false, 0, 1)
	f.done(2)
	expect(false)
	expect(false, 2)
}
