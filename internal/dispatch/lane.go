package dispatch

import (
	"sync"
	"sync/atomic"
)

// Lane is the order of one peer: its items are delivered one after the other, in
// the order in which they were received. The zero Lane is ready for use. A Lane
// belongs to one Loop and must not be copied.
type Lane[T any] struct {
	// slow says that a goroutine without the receiving role delivers here, so that
	// items have to queue. It is set and cleared under mu.
	slow atomic.Bool

	mu      sync.Mutex
	ring    []T // len is 0 or a power of two
	head, n int
	waiting bool          // the receiver waits for room
	room    chan struct{} // one token when there is room; made when first needed
}

// keepRing is the ring size, in items, up to which an empty lane keeps its ring.
const keepRing = 256

// push appends v. It reports slow=false, without appending, when the lane is not
// slow any more, and full=true when it has limit items.
func (l *Lane[T]) push(v T, limit int) (slow, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.slow.Load() {
		return false, false
	}
	if l.n >= limit {
		if l.room == nil {
			l.room = make(chan struct{}, 1)
		}
		l.waiting = true
		return true, true
	}
	if l.n == len(l.ring) {
		l.grow()
	}
	l.ring[(l.head+l.n)&(len(l.ring)-1)] = v
	l.n++
	return true, false
}

func (l *Lane[T]) grow() {
	ring := make([]T, max(16, 2*len(l.ring)))
	k := copy(ring, l.ring[l.head:])
	copy(ring[k:], l.ring[:l.head])
	l.ring, l.head = ring, 0
}

// pop takes the oldest item. When there is none, the lane stops being slow.
func (l *Lane[T]) pop() (v T, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waiting {
		l.waiting = false
		select {
		case l.room <- struct{}{}:
		default:
		}
	}
	var zero T
	if l.n == 0 {
		if len(l.ring) > keepRing {
			l.ring, l.head = nil, 0
		}
		l.slow.Store(false)
		return zero, false
	}
	v, l.ring[l.head] = l.ring[l.head], zero
	l.head = (l.head + 1) & (len(l.ring) - 1)
	l.n--
	return v, true
}
