package rendezvous

import (
	"errors"
	"sync"
	"sync/atomic"
)

// ErrNoSlot: all indexes are in use.
var ErrNoSlot = errors.New("all slots are in use")

// ReceiveSlot is a slot in this node's memory that one connection's peer may write to. T
// is the transport's own part: memory and registration.
type ReceiveSlot[T any] struct {
	Memory T
	Owner  any // the connection
	Route  Route
	Data   int // bytes, as requested
	// OneShot says that the slot ends with its first message.
	OneShot bool

	index    uint32
	ordinary bool // it is not urgent, and so must not use the reserve
	// state is the number of holders (messages that lie there), and whether the
	// peer may still use the slot.
	state atomic.Int32
}

const ended = 1 << 30

// Index returns the slot's number in notifications.
func (l *ReceiveSlot[T]) Index() uint32 { return l.index }

// Hold counts a message that lies in the slot. ok is false if the slot has ended.
// overwritten says that another message lies there already.
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

// Drop ends a Hold. For the last holder, either last is true, and the peer may use the slot again, or free is
// true, because the slot has ended, and the caller must free its memory.
func (l *ReceiveSlot[T]) Drop() (last, free bool) {
	s := l.state.Add(-1)
	return s == 0, s == ended
}

// Holders returns the number of messages that lie in the slot.
func (l *ReceiveSlot[T]) Holders() int { return int(l.state.Load() &^ ended) }

// Held reports whether a message lies in the slot.
func (l *ReceiveSlot[T]) Held() bool { return l.state.Load()&^ended > 0 }

// SlotTable is the table of one node's slots by index. Get needs no lock.
type SlotTable[T any] struct {
	entries  []atomic.Pointer[ReceiveSlot[T]]
	reserve  int // entries for urgent slots only
	mu       sync.Mutex
	free     []uint32
	used     int // entries that have been used so far
	ordinary int // slots that are not urgent
}

// NewSlotTable makes a table of up to n slots, reserve of them for urgent slots only.
func NewSlotTable[T any](n, reserve int) *SlotTable[T] {
	return &SlotTable[T]{entries: make([]atomic.Pointer[ReceiveSlot[T]], n), reserve: reserve}
}

// Add assigns an index to l. The error is ErrNoSlot. Urgent slots, those of control messages,
// may also use the reserve.
func (t *SlotTable[T]) Add(l *ReceiveSlot[T], urgent bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !urgent && t.ordinary >= len(t.entries)-t.reserve:
		return ErrNoSlot
	case t.used < len(t.entries): // an unused index first, then the one that has been free longest
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

// End removes l. If free is true, no message lies there, and the caller must free its
// memory. Otherwise the last Drop returns free. A second End does nothing.
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

// Room returns the maximum number of slots that are not urgent.
func (t *SlotTable[T]) Room() int { return len(t.entries) - t.reserve }

// Len returns the number of slots.
func (t *SlotTable[T]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.used - len(t.free)
}
