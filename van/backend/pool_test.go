package backend

import (
	"errors"
	"testing"
)

// waitingBackend is one whose streams may wait for the CPU.
type waitingBackend struct {
	Backend
	waits bool
}

func (b *waitingBackend) MayBlock() bool { return b.waits }

// TestPoolKeeps: while streams may wait for the CPU, a pool refuses requests rather than freeing idle buffers.
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
	get(1<<10, true) // an idle buffer
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

// TestPoolCloseKeeps: while streams may wait, a closed pool leaves its buffers to the backend, including buffers
// returned later.
func TestPoolCloseKeeps(t *testing.T) {
	for _, waits := range []bool{false, true} {
		b := &waitingBackend{waits: waits}
		var allocs, frees int
		p := NewPool(1<<20, func(n int) (Mem, error) { allocs++; return Bytes(make([]byte, n)), nil }, func(Mem) error { frees++; return nil }).For(b)
		idle, err := p.Get(100)
		if err != nil {
			t.Fatal(err)
		}
		late, err := p.Get(9000)
		if err != nil {
			t.Fatal(err)
		}
		idle.Put()
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if want := map[bool]int{false: 1, true: 0}[waits]; frees != want {
			t.Errorf("streams may wait: %t: Close frees %d buffers, want %d", waits, frees, want)
		}
		late.Put()
		if want := map[bool]int{false: allocs, true: 0}[waits]; frees != want {
			t.Errorf("streams may wait: %t: %d of %d buffers are freed at the end, want %d", waits, frees, allocs, want)
		}
		if b, err := p.Get(100); b != nil || err != nil {
			t.Errorf("streams may wait: %t: a closed pool gives %v, %v", waits, b, err)
		}
	}
}

// TestPoolAfterFailures: failed allocations use nothing of the limit, also in a pool without idle buffers.
func TestPoolAfterFailures(t *testing.T) {
	for _, waits := range []bool{false, true} {
		failing := true
		p := NewPool(64<<10, func(n int) (Mem, error) {
			if failing {
				return Mem{}, ErrNoMemory
			}
			return Bytes(make([]byte, n)), nil
		}, func(Mem) error { return nil }).For(&waitingBackend{waits: waits})
		for range 100 {
			if b, err := p.Get(16 << 10); b != nil || !errors.Is(err, ErrNoMemory) {
				t.Fatalf("Get without memory: %v, %v", b, err)
			}
		}
		failing = false
		if b, err := p.Get(64 << 10); b == nil || err != nil {
			t.Errorf("streams wait: %t: with memory again: %v, %v, want a buffer", waits, b, err)
		}
	}
}
