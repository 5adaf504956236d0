package core

import (
	"math/rand/v2"
	"testing"
)

// TestBacklog: batches come out in the order in which they went in, however many are
// queued at a time, and a queue that never runs empty does not grow.
func TestBacklog(t *testing.T) {
	for _, most := range []int{1, 2, 7, 4 * keepBacklog} {
		var l backlog
		r := rand.New(rand.NewPCG(1, uint64(most)))
		var in, out uint64
		for range 20 * keepBacklog {
			for n := r.IntN(most + 1); n > 0 && l.len() < most; n-- {
				l.put(Item{ID: in})
				in++
			}
			for n := r.IntN(most + 1); n > 0 && l.len() > min(1, most-1); n-- {
				if it := l.take(); it.ID != out {
					t.Fatalf("at most %d: batch %d came out, want %d", most, it.ID, out)
				}
				out++
			}
			if l.len() != int(in-out) {
				t.Fatalf("at most %d: length %d, want %d", most, l.len(), in-out)
			}
		}
		if limit := max(4*most, 8); cap(l.items) > limit {
			t.Errorf("at most %d: room for %d batches, want at most %d", most, cap(l.items), limit)
		}
		for l.len() > 0 {
			l.take()
		}
		if cap(l.items) > keepBacklog {
			t.Errorf("at most %d: an empty queue keeps room for %d batches, want at most %d", most, cap(l.items), keepBacklog)
		}
	}
}

// TestBacklogReuses: a queue that runs empty each time takes no memory for the next.
func TestBacklogReuses(t *testing.T) {
	var l backlog
	l.put(Item{})
	l.take()
	if n := testing.AllocsPerRun(100, func() {
		l.put(Item{})
		l.take()
	}); n > 0 {
		t.Errorf("%v allocations for one batch, want none", n)
	}
}
