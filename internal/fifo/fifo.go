// Package fifo is a queue that reuses its memory: in steady state it does not allocate.
package fifo

// Queue is a first-in, first-out queue. The zero value is empty. It is not safe for
// concurrent use.
type Queue[T any] struct {
	items []T
	head  int // index of the oldest element in items
}

// keep is the largest capacity, in elements, that an empty queue keeps.
const keep = 256

// Len returns the number of elements in q.
func (q *Queue[T]) Len() int { return len(q.items) - q.head }

// Put appends v. On average it moves at most one element for each element that was taken.
func (q *Queue[T]) Put(v T) {
	if q.head > 0 && len(q.items) == cap(q.items) && q.head >= len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, v)
}

// PutFront puts v before all other elements. It moves all of them if none was taken before.
func (q *Queue[T]) PutFront(v T) {
	if q.head > 0 {
		q.head--
	} else {
		q.items = append(q.items, v)
		copy(q.items[1:], q.items)
	}
	q.items[q.head] = v
}

// Front returns the oldest element; there must be one.
func (q *Queue[T]) Front() T { return q.items[q.head] }

// Take removes and returns the oldest element; there must be one.
func (q *Queue[T]) Take() T {
	v := q.items[q.head]
	var none T
	q.items[q.head] = none
	if q.head++; q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
		if cap(q.items) > keep {
			q.items = nil
		}
	}
	return v
}

// All returns the elements, oldest first, in the queue's own memory. The slice is valid until the next call of a method
// that changes q.
func (q *Queue[T]) All() []T { return q.items[q.head:] }
