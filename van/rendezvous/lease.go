package rendezvous

import (
	"errors"
	"sync"
	"sync/atomic"
)

// ErrNoLease: every index is in use.
var ErrNoLease = errors.New("all places are given away")

// Lease is a place in this node's memory that one connection's peer may write to. T
// is the transport's own part: memory and registration.
type Lease[T any] struct {
	Memory T
	Owner  any // the connection
	Route  Route
	Data   int // bytes, as asked for
	// OneShot leases end with their first message.
	OneShot bool

	index   uint32
	lasting bool // counts against what is not kept for urgent ones
	// state is the number of holders (messages that lie there), and whether the
	// peer may still use the place.
	state atomic.Int32
}

const ended = 1 << 30

// Index names the lease in notifications.
func (l *Lease[T]) Index() uint32 { return l.index }

// Hold counts a message that lies in the place. It reports false when the lease has
// ended or, with more than one message there, true and overwritten.
func (l *Lease[T]) Hold() (ok, overwritten bool) {
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

// Drop ends a Hold. free says that the lease has ended before and that this was the
// last holder, so that the caller frees its memory.
func (l *Lease[T]) Drop() (ended_, free bool) {
	s := l.state.Add(-1)
	return s&ended != 0, s == ended
}

// Holders is the number of messages that lie there.
func (l *Lease[T]) Holders() int { return int(l.state.Load() &^ ended) }

// Held tells whether a message lies there.
func (l *Lease[T]) Held() bool { return l.state.Load()&^ended > 0 }

// Table is the leases of one node, by index. Get needs no lock.
type Table[T any] struct {
	entries []atomic.Pointer[Lease[T]]
	reserve int // entries that only urgent leases get
	mu      sync.Mutex
	free    []uint32
	used    int // entries that have ever been used
	lasting int // leases that are not urgent
}

// NewTable makes a Table of up to n leases, reserve of them for urgent ones only.
func NewTable[T any](n, reserve int) *Table[T] {
	return &Table[T]{entries: make([]atomic.Pointer[Lease[T]], n), reserve: reserve}
}

// Add gives l an index. The error is ErrNoLease. urgent ones, those of control messages,
// also get what is kept for them.
func (t *Table[T]) Add(l *Lease[T], urgent bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !urgent && t.lasting >= len(t.entries)-t.reserve:
		return ErrNoLease
	case t.used < len(t.entries): // the one freed last longest
		l.index = uint32(t.used)
		t.used++
	case len(t.free) > 0:
		l.index = t.free[0]
		t.free = t.free[1:]
	default:
		return ErrNoLease
	}
	if l.lasting = !urgent; l.lasting {
		t.lasting++
	}
	t.entries[l.index].Store(l)
	return nil
}

// Get returns the lease with this index, or nil.
func (t *Table[T]) Get(index uint32) *Lease[T] {
	if index >= uint32(len(t.entries)) {
		return nil
	}
	return t.entries[index].Load()
}

// End takes l out. free says that no message lies there, so that the caller frees its
// memory; otherwise the last Drop says so. Ending twice does nothing.
func (t *Table[T]) End(l *Lease[T]) (free bool) {
	if !t.entries[l.index].CompareAndSwap(l, nil) {
		return false
	}
	t.mu.Lock()
	t.free = append(t.free, l.index)
	if l.lasting {
		t.lasting--
	}
	t.mu.Unlock()
	for {
		s := l.state.Load()
		if l.state.CompareAndSwap(s, s|ended) {
			return s == 0
		}
	}
}

// Each calls f for every lease, in order of the index.
func (t *Table[T]) Each(f func(*Lease[T])) {
	for i := range t.entries {
		if l := t.entries[i].Load(); l != nil {
			f(l)
		}
	}
}

// Room is the number of leases, in all, that there can be of those that are not urgent.
func (t *Table[T]) Room() int { return len(t.entries) - t.reserve }

// Len is the number of leases.
func (t *Table[T]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.used - len(t.free)
}
