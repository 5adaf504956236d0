package engine

import (
	"maps"
	"slices"
	"sync"
)

// Budget limits the bytes that are queued behind slow deliveries. Several Loops may
// share one. Only queued items count, so a quick delivery does not touch it.
type Budget struct {
	perQueue, total int64

	mu     sync.Mutex
	used   int64
	paused map[pausedQueue]struct{}
}

// pausedQueue is a paused PeerQueue.
type pausedQueue interface{ recheck() }

// NewBudget makes a Budget with a limit in bytes for one queue and for all queues; 0 is no limit. A
// queue may exceed the limit by one item of any length.
func NewBudget(perQueue, total int64) *Budget {
	return &Budget{perQueue: perQueue, total: total, paused: map[pausedQueue]struct{}{}}
}

// Used returns the number of queued bytes in all queues.
func (b *Budget) Used() int64 {
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// full reports whether a queue that holds n bytes may not grow.
func (b *Budget) full(n int64) bool {
	return b != nil && (b.perQueue > 0 && n >= b.perQueue || b.total > 0 && b.Used() >= b.total)
}

// mayResume reports whether a paused queue that holds n bytes may resume: at three quarters of the limits,
// so that a queue does not resume and pause for each item.
func (b *Budget) mayResume(n int64) bool {
	return b == nil || (b.perQueue <= 0 || n <= b.perQueue/4*3) && (b.total <= 0 || b.Used() <= b.total/4*3)
}

func (b *Budget) add(n int64) {
	if b == nil || n == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used += n
}

// sub subtracts n bytes. If the total falls to three quarters of its limit, sub returns all paused queues, to be rechecked.
func (b *Budget) sub(n int64) (recheck []pausedQueue) {
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

// note records whether a queue is paused.
func (b *Budget) note(queue pausedQueue, paused bool) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if paused {
		b.paused[queue] = struct{}{}
	} else {
		delete(b.paused, queue)
	}
}
