package engine

import (
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/wake"
)

// PeerQueue is the order of one peer: its items are delivered one after the other, in
// the order in which they were received. The zero PeerQueue is ready for use. A PeerQueue
// belongs to one Loop and must not be copied.
type PeerQueue[T any] struct {
	// ID names the peer to Loop.Paused and Loop.Resumed. It is set before the PeerQueue is
	// used.
	ID int

	// Undelivered, if not nil, counts the items of this lane, and of others that share it, that
	// the loop of a Feed has received and not delivered. It is set before the PeerQueue is used.
	Undelivered *atomic.Int32

	// slow says that a goroutine without the receiving role delivers here, so that
	// items have to queue. It is set and cleared under mu.
	slow atomic.Bool

	mu      sync.Mutex
	ring    []waiting[T] // len is 0 or a power of two
	head, n int
	bytes   int64         // of the items in ring
	loop    *Loop[T]      // once it was paused
	paused  bool          // its items are not to be received
	held    bool          // the receiver waits for room
	room    chan struct{} // one token when there is room; made when first needed
}

// waiting is an item in a lane.
type waiting[T any] struct {
	item  T
	bytes int64
}

// keepRing is the ring size, in items, up to which an empty lane keeps its ring.
const keepRing = 256

// handed says that an item was delivered or discarded.
func (l *PeerQueue[T]) handed() {
	if l.Undelivered != nil {
		l.Undelivered.Add(-1)
	}
}

// push appends v if lane is slow. It reports slow=false, without appending, when the lane
// is not slow any more, and full=true when it has no room: it is paused then.
func (l *Loop[T]) push(lane *PeerQueue[T], v T) (slow, full bool) {
	lane.mu.Lock()
	if !lane.slow.Load() {
		lane.mu.Unlock()
		return false, false
	}
	began := l.pause(lane)
	if full = lane.paused; full {
		if lane.room == nil {
			lane.room = make(chan struct{}, 1)
		}
		lane.held = true
	} else {
		w := waiting[T]{item: v}
		if l.Weight != nil {
			w.bytes = int64(l.Weight(v))
		}
		lane.put(w)
		l.Budget.add(w.bytes)
	}
	lane.mu.Unlock()
	if began {
		l.began(lane)
	}
	return true, full
}

// keep makes the lane that of a goroutine without the receiving role, which drains it later.
func (l *PeerQueue[T]) keep() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slow.Store(true)
}

func (l *PeerQueue[T]) put(w waiting[T]) {
	if l.n == len(l.ring) {
		l.grow()
	}
	l.ring[(l.head+l.n)&(len(l.ring)-1)] = w
	l.n++
	l.bytes += w.bytes
}

func (l *PeerQueue[T]) grow() {
	ring := make([]waiting[T], max(16, 2*len(l.ring)))
	k := copy(ring, l.ring[l.head:])
	copy(ring[k:], l.ring[:l.head])
	l.ring, l.head = ring, 0
}

// pop takes the oldest item. When there is none, the lane stops being slow.
func (l *Loop[T]) pop(lane *PeerQueue[T]) (v T, ok bool) {
	lane.mu.Lock()
	var w waiting[T]
	if lane.n == 0 {
		if len(lane.ring) > keepRing {
			lane.ring, lane.head = nil, 0
		}
		lane.slow.Store(false)
	} else {
		w, lane.ring[lane.head] = lane.ring[lane.head], w
		lane.head = (lane.head + 1) & (len(lane.ring) - 1)
		lane.n--
		lane.bytes -= w.bytes
		ok = true
	}
	others := l.Budget.sub(w.bytes)
	resumed := l.resume(lane)
	lane.mu.Unlock()
	if resumed && l.Resumed != nil {
		l.Resumed(lane)
	}
	for _, p := range others {
		p.look()
	}
	return w.item, ok
}

// MayRead tells whether the next item of lane's peer may be received. If not, Resumed
// says when it may: until then whoever can leaves it where it is, so that it takes no
// memory here. An item that is received all the same is not lost: the loop waits with it
// until the lane has room, and other lanes wait, too. MayRead is for who has the receiving
// role.
func (l *Loop[T]) MayRead(lane *PeerQueue[T]) bool { return !lane.slow.Load() || l.mayRead(lane) }

func (l *Loop[T]) mayRead(lane *PeerQueue[T]) bool {
	lane.mu.Lock()
	began := lane.slow.Load() && l.pause(lane)
	paused := lane.paused
	lane.mu.Unlock()
	if began {
		l.began(lane)
	}
	return !paused
}

// pause pauses lane, which is slow, if it has no room. It tells whether that is new.
// lane.mu is held.
func (l *Loop[T]) pause(lane *PeerQueue[T]) bool {
	if lane.paused || lane.n < l.QueueCap && !l.Budget.full(lane.bytes) {
		return false
	}
	// First the entry, then another look: who makes room after the look finds the entry.
	lane.paused, lane.loop = true, l
	l.Budget.note(lane, true)
	return !l.resume(lane)
}

// began says that lane is paused.
func (l *Loop[T]) began(lane *PeerQueue[T]) {
	l.pauses.Add(1)
	if l.Paused == nil {
		return
	}
	lane.mu.Lock()
	bytes := lane.bytes
	lane.mu.Unlock()
	l.Paused(lane, bytes)
}

// resume ends lane's pause if there is room again, and tells whether it did. lane.mu is
// held.
func (l *Loop[T]) resume(lane *PeerQueue[T]) bool {
	room := lane.n <= l.QueueCap/4*3 && l.Budget.roomy(lane.bytes) || !lane.slow.Load()
	if !lane.paused || !room {
		return false
	}
	lane.paused = false
	l.Budget.note(lane, false)
	if lane.held {
		lane.held = false
		wake.Put(lane.room)
	}
	return true
}

// look is told that there is room in the budget.
func (l *PeerQueue[T]) look() {
	l.mu.Lock()
	loop := l.loop
	resumed := loop.resume(l)
	l.mu.Unlock()
	if resumed && loop.Resumed != nil {
		loop.Resumed(l)
	}
}
