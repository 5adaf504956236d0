package engine

import (
	"maps"
	"slices"
	"sync"
)

// Budget bounds the bytes that wait in lanes behind slow deliveries. Several Loops may
// share one. Only items that wait are counted, so a quick delivery does not touch it.
type Budget struct {
	lane, total int64

	mu     sync.Mutex
	used   int64
	paused map[looker]struct{}
}

// looker is a paused lane.
type looker interface{ look() }

// NewBudget makes a Budget of so many bytes for one lane and for all; 0 is no bound. One
// item more than that may wait, however long it is.
func NewBudget(lane, total int64) *Budget {
	return &Budget{lane: lane, total: total, paused: map[looker]struct{}{}}
}

// Used is how many bytes wait in all lanes.
func (b *Budget) Used() int64 {
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// full tells whether nothing is to be added to a lane with so many bytes.
func (b *Budget) full(lane int64) bool {
	return b != nil && (b.lane > 0 && lane >= b.lane || b.total > 0 && b.Used() >= b.total)
}

// roomy tells whether a paused lane with so many bytes is to go on: not for each item
// that has left.
func (b *Budget) roomy(lane int64) bool {
	return b == nil || (b.lane <= 0 || lane <= b.lane/4*3) && (b.total <= 0 || b.Used() <= b.total/4*3)
}

func (b *Budget) add(n int64) {
	if b == nil || n == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used += n
}

// sub takes off n bytes and returns the lanes that were paused until now, if those that
// wait for others may go on.
func (b *Budget) sub(n int64) (again []looker) {
	if b == nil || n == 0 {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if most := b.total / 4 * 3; b.total <= 0 || b.used > most || b.used+n <= most {
		return nil
	}
	return slices.Collect(maps.Keys(b.paused))
}

// note notes whether a lane is paused.
func (b *Budget) note(lane looker, paused bool) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if paused {
		b.paused[lane] = struct{}{}
	} else {
		delete(b.paused, lane)
	}
}
