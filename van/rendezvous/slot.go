package rendezvous

import (
	"errors"
	"sync"
	"sync/atomic"
)

// ErrNoSlot: every index is in use.
var ErrNoSlot = errors.New("all slots are given away")

// ReceiveSlot is a slot in this node's memory that one connection's peer may write to. T
// is the transport's own part: memory and registration.
type ReceiveSlot[T any] struct {
	Memory T
	Owner  any // the connection
	Route  Route
	Data   int // bytes, as asked for
	// OneShot slots end with their first message.
	OneShot bool

	index    uint32
	ordinary bool // counts against what is not kept for urgent ones
	// state is the number of holders (messages that lie there), and whether the
	// peer may still use the slot.
	state atomic.Int32
}

const ended = 1 << 30

// Index names the slot in notifications.
func (l *ReceiveSlot[T]) Index() uint32 { return l.index }

// Hold counts a message that lies in the slot. It reports false when the slot has
// ended or, with more than one message there, true and overwritten.
func (l *ReceiveSlot[T]) Hold() (ok, overwritten bool) {
	for {
		s := l.state.Load()
		if s&ended != 0 {
			return false, false
		}
		if l.state.CompareAndSwap(s, s+1) {
			return true, s > 0
		}
	}
}

// Drop ends a Hold. Of the last holder, and of no other, it says so: last where the peer may use the slot again, free
// where the slot has ended before, so that the caller frees its memory.
func (l *ReceiveSlot[T]) Drop() (last, free bool) {
	s := l.state.Add(-1)
	return s == 0, s == ended
}

// Holders is the number of messages that lie there.
func (l *ReceiveSlot[T]) Holders() int { return int(l.state.Load() &^ ended) }

// Held tells whether a message lies there.
func (l *ReceiveSlot[T]) Held() bool { return l.state.Load()&^ended > 0 }

// SlotTable is the slots of one node, by index. Get needs no lock.
type SlotTable[T any] struct {
	entries  []atomic.Pointer[ReceiveSlot[T]]
	reserve  int // entries that only urgent slots get
	mu       sync.Mutex
	free     []uint32
	used     int // entries that have ever been used
	ordinary int // slots that are not urgent
}

// NewSlotTable makes a Table of up to n slots, reserve of them for urgent ones only.
func NewSlotTable[T any](n, reserve int) *SlotTable[T] {
	return &SlotTable[T]{entries: make([]atomic.Pointer[ReceiveSlot[T]], n), reserve: reserve}
}

// Add gives l an index. The error is ErrNoSlot. urgent ones, those of control messages,
// also get what is kept for them.
func (t *SlotTable[T]) Add(l *ReceiveSlot[T], urgent bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !urgent && t.ordinary >= len(t.entries)-t.reserve:
		return ErrNoSlot
	case t.used < len(t.entries): // the one freed last longest
		l.index = uint32(t.used)
		t.used++
	case len(t.free) > 0:
		l.index = t.free[0]
		t.free = t.free[1:]
	default:
		return ErrNoSlot
	}
	if l.ordinary = !urgent; l.ordinary {
		t.ordinary++
	}
	t.entries[l.index].Store(l)
	return nil
}

// Get returns the slot with this index, or nil.
func (t *SlotTable[T]) Get(index uint32) *ReceiveSlot[T] {
	if index >= uint32(len(t.entries)) {
		return nil
	}
	return t.entries[index].Load()
}

// End takes l out. free says that no message lies there, so that the caller frees its
// memory; otherwise the last Drop says so. Ending twice does nothing.
func (t *SlotTable[T]) End(l *ReceiveSlot[T]) (free bool) {
	if !t.entries[l.index].CompareAndSwap(l, nil) {
		return false
	}
	t.mu.Lock()
	t.free = append(t.free, l.index)
	if l.ordinary {
		t.ordinary--
	}
	t.mu.Unlock()
	return l.state.Or(ended) == 0
}

// Each calls f for every slot, in order of the index.
func (t *SlotTable[T]) Each(f func(*ReceiveSlot[T])) {
	for i := range t.entries {
		if l := t.entries[i].Load(); l != nil {
			f(l)
		}
	}
}

// Room is the number of slots, in all, that there can be of those that are not urgent.
func (t *SlotTable[T]) Room() int { return len(t.entries) - t.reserve }

// Len is the number of slots.
func (t *SlotTable[T]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.used - len(t.free)
}
