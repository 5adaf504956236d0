package backend

import "testing"

// waitingBackend is one whose streams may wait for the CPU.
type waitingBackend struct {
	Backend
	waits bool
}

func (b *waitingBackend) MayBlock() bool { return b.waits }

// TestPoolKeeps: while streams may wait for the CPU a pool has no room rather than free
// what is idle.
func TestPoolKeeps(t *testing.T) {
	b := &waitingBackend{waits: true}
	var allocs, frees int
	failing := error(nil)
	p := NewPool(20<<10, func(n int) (Mem, error) {
		if failing != nil {
			return Mem{}, failing
		}
		allocs++
		return Bytes(make([]byte, n)), nil
	}, func(Mem) error { frees++; return nil }).For(b)
	get := func(n int, want bool) {
		t.Helper()
		x, err := p.Get(n)
		if (x != nil) != want || err != nil && failing == nil {
			t.Fatalf("Get of %d bytes: %v, %v", n, x, err)
		}
		if x != nil {
			x.Put()
		}
	}
	get(12<<10, true)
	get(4<<10, true)
	get(16<<10, false) // beyond the limit
	failing = ErrNoMemory
	get(1<<10, true) // one that is idle
	if l := p.idle[4096]; len(l) != 1 {
		t.Fatalf("%d buffers are idle", len(l))
	}
	p.limit = 1 << 20
	get(16<<10, false)
	if frees != 0 || allocs != 2 {
		t.Errorf("%d allocated, %d freed", allocs, frees)
	}
	failing, p.limit, b.waits = nil, 20<<10, false
	get(16<<10, true)
	if frees == 0 {
		t.Error("nothing is freed where no stream waits")
	}
	if err := p.Close(); err != nil || frees != allocs {
		t.Errorf("closed: %d of %d freed, %v", frees, allocs, err)
	}
}
