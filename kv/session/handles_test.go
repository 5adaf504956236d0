package session

import (
	"slices"
	"testing"
)

// TestKilledOnce: each killed handle, and no other, is sent to the ranks once.
func TestKilledOnce(t *testing.T) {
	s := &Session{handles: handles{live: map[uint64]bool{}}}
	var all []*Handle
	for id := range uint64(maxKills + 2) {
		all = append(all, &Handle{s: s, id: id + 1})
		s.handles.add(id + 1)
	}
	s.Kill(all[0], all[0], nil, &Handle{s: &Session{}, id: 2}, &Handle{s: s, id: 1 << 40})
	if got := s.handles.killed(); !slices.Equal(got, []uint64{1}) {
		t.Fatalf("one handle was killed twice at once: the next message gives up %v", got)
	}
	s.handles.told(1)
	s.Kill(all[0])
	if got := s.handles.killed(); len(got) != 0 {
		t.Fatalf("a handle was killed again after the ranks had been told: the next message gives up %v", got)
	}
	s.Kill(all...)
	for _, want := range []struct{ first, n int }{{2, maxKills}, {maxKills + 2, 1}, {0, 0}} {
		got := s.handles.killed()
		if len(got) != want.n || want.n > 0 && got[0] != uint64(want.first) {
			t.Fatalf("the next message gives up %d handles from %v, want %d from %d", len(got), got[:min(len(got), 1)], want.n, want.first)
		}
		s.handles.told(len(got))
	}
	if len(s.handles.live) != 0 {
		t.Errorf("%d handles are still in use", len(s.handles.live))
	}
}
