package rendezvous

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

func TestTable(t *testing.T) {
	tb := NewSlotTable[string](3, 0)
	if tb.Get(0) != nil || tb.Get(3) != nil || tb.Get(1<<31) != nil || tb.Len() != 0 {
		t.Error("an empty table has something")
	}
	var all []*ReceiveSlot[string]
	for i := range 3 {
		l := &ReceiveSlot[string]{Data: i}
		if err := tb.Add(l, false); err != nil || l.Index() != uint32(i) || tb.Get(uint32(i)) != l {
			t.Fatalf("slot %d has index %d, error %v", i, l.Index(), err)
		}
		all = append(all, l)
	}
	if err := tb.Add(&ReceiveSlot[string]{}, false); !errors.Is(err, ErrNoSlot) {
		t.Errorf("a full table: %v, want %v", err, ErrNoSlot)
	}
	if !tb.End(all[1]) || tb.End(all[1]) || tb.Get(1) != nil || tb.Len() != 2 {
		t.Error("ending once, and twice")
	}
	l := &ReceiveSlot[string]{}
	if err := tb.Add(l, false); err != nil || l.Index() != 1 {
		t.Errorf("index %d, error %v; want that of the one that ended", l.Index(), err)
	}
	// The old one must not end the new one.
	if tb.End(all[1]) || tb.Get(1) != l {
		t.Error("a slot that has ended ends another one")
	}
	var order []uint32
	tb.Each(func(l *ReceiveSlot[string]) { order = append(order, l.Index()) })
	if len(order) != 3 || order[0] != 0 || order[1] != 1 || order[2] != 2 {
		t.Errorf("Each in order %v", order)
	}
}

// TestTableReuse: the index of an ended slot is reused last, so that late messages about
// it do not affect another slot.
func TestTableReuse(t *testing.T) {
	tb := NewSlotTable[int](4, 0)
	var order []uint32
	var held []*ReceiveSlot[int]
	add := func() {
		l := &ReceiveSlot[int]{}
		if err := tb.Add(l, false); err != nil {
			t.Fatal(err)
		}
		order, held = append(order, l.Index()), append(held, l)
	}
	add()
	tb.End(held[0])
	for range 3 {
		add()
	}
	tb.End(held[2])
	tb.End(held[1])
	tb.End(held[3])
	for range 4 {
		add()
	}
	if want := []uint32{0, 1, 2, 3, 0, 2, 1, 3}; !slices.Equal(order, want) {
		t.Errorf("indices %v, want %v", order, want)
	}
}

// TestTableReserve: the reserve is used for control messages only.
func TestTableReserve(t *testing.T) {
	tb := NewSlotTable[int](4, 1)
	lease := func() *ReceiveSlot[int] { return &ReceiveSlot[int]{} }
	last := lease()
	for _, l := range []*ReceiveSlot[int]{lease(), lease(), last} {
		if err := tb.Add(l, false); err != nil {
			t.Fatal(err)
		}
	}
	if err := tb.Add(lease(), false); !errors.Is(err, ErrNoSlot) {
		t.Errorf("the fourth of four, one of which is kept: %v, want %v", err, ErrNoSlot)
	}
	urgent := lease()
	if err := tb.Add(urgent, true); err != nil {
		t.Errorf("an urgent one: %v", err)
	}
	tb.End(urgent)
	if err := tb.Add(lease(), false); !errors.Is(err, ErrNoSlot) {
		t.Errorf("after the end of the urgent one: %v, want %v", err, ErrNoSlot)
	}
	tb.End(last)
	if err := tb.Add(lease(), false); err != nil {
		t.Errorf("after the end of another: %v", err)
	}
}

// TestLeaseHold: at each end of a slot's life, exactly one call frees its memory.
func TestLeaseHold(t *testing.T) {
	tb := NewSlotTable[int](1, 0)
	add := func() *ReceiveSlot[int] {
		l := &ReceiveSlot[int]{}
		if err := tb.Add(l, false); err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := add()
	if ok, over := l.Hold(); !ok || over || !l.Held() {
		t.Error("the first holder")
	}
	if ok, over := l.Hold(); !ok || !over {
		t.Error("the second holder overwrites")
	}
	if last, free := l.Drop(); last || free || !l.Held() {
		t.Error("one of two drops")
	}
	if tb.End(l) {
		t.Error("it ends while it is held, but is free")
	}
	if ok, _ := l.Hold(); ok {
		t.Error("it has ended, but is held again")
	}
	if last, free := l.Drop(); last || !free || l.Held() {
		t.Error("the last holder frees it")
	}
	l = add()
	if ok, _ := l.Hold(); !ok {
		t.Error("Hold")
	}
	if last, free := l.Drop(); !last || free {
		t.Error("the last holder of one that has not ended gives it back")
	}
	if !tb.End(l) {
		t.Error("nobody holds it, but it is not free")
	}
}

// TestTableConcurrent holds, drops and ends concurrently: each memory is freed once.
func TestTableConcurrent(t *testing.T) {
	tb := NewSlotTable[*atomic.Int32](16, 0)
	var made, freed atomic.Int32
	free := func(l *ReceiveSlot[*atomic.Int32]) {
		if l.Memory.Add(1) != 1 {
			t.Error("freed twice")
		}
		freed.Add(1)
	}
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 0))
			for range 5000 {
				if rng.IntN(3) == 0 {
					if tb.Add(&ReceiveSlot[*atomic.Int32]{Memory: new(atomic.Int32)}, false) == nil {
						made.Add(1)
					}
				}
				l := tb.Get(uint32(rng.IntN(16)))
				if l == nil {
					continue
				}
				if ok, _ := l.Hold(); ok {
					if l.Memory.Load() != 0 {
						t.Error("held memory is free")
					}
					if rng.IntN(2) == 0 && tb.End(l) {
						t.Error("held memory is to be freed")
					}
					if _, last := l.Drop(); last {
						free(l)
					}
				} else if tb.End(l) {
					free(l)
				}
			}
		})
	}
	all.Wait()
	tb.Each(func(l *ReceiveSlot[*atomic.Int32]) {
		if tb.End(l) {
			free(l)
		}
	})
	if made.Load() != freed.Load() || tb.Len() != 0 {
		t.Errorf("%d made, %d freed, %d left", made.Load(), freed.Load(), tb.Len())
	}
	for i := range 16 {
		if err := tb.Add(&ReceiveSlot[*atomic.Int32]{}, false); err != nil {
			t.Errorf("index %d is lost: %v", i, err)
		}
	}
}
