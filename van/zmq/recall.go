package zmq

import "github.com/stepaf/stepaf-go/van"

// A value that is lent to libzmq is read when it leaves, which may be long after Send, and
// after its request has been given up and the memory used for something else. So a request
// with lent values has, between nodes of this library, one frame more: a mark of one byte,
// which libzmq reads after all frames before it. A node that takes memory back sets the
// mark first: if the mark has left before, the values have, too, as they were sent; if not,
// the receiver drops the message.

const (
	markSent     = 0 // the frames are as they were sent
	markRecalled = 1 // they are not
)

// hasMark tells whether a request with data frames as f has them ends with a mark.
func hasMark(f *frames, data int) bool {
	for i := range data {
		if int(f.size[i+2]) >= van.CopyBelow {
			return true
		}
	}
	return false
}

// takeMark returns the number of data frames without the mark, if there has to be one, of
// a request that came from a node of this library with so many, and what the mark says.
func takeMark(f *frames, frames int) (data int, mark byte, err error) {
	switch {
	case !hasMark(f, frames):
		return frames, markSent, nil
	case !hasMark(f, frames-1):
		return 0, 0, &van.FieldError{Field: "frames", Value: f.len(), Want: "a mark behind values"}
	}
	b := f.bytes(f.len() - 1)
	if len(b) != 1 || b[0] > markRecalled {
		return 0, 0, &van.FieldError{Field: "mark", Value: len(b), Want: "1 byte, 0 or 1"}
	}
	return frames - 1, b[0], nil
}

// recall sets the marks of what is lent for q, and returns how many messages have none.
func (l *lent) recall(q van.Requests) (foreign int) {
	if l.held.Load() == 0 {
		return 0
	}
	l.reap() // so that what has left does not count
	l.mu.Lock()
	defer l.mu.Unlock()
	for ts := q.First; ts-q.First < q.Count; ts++ {
		for s := l.lent.buckets[bucket(ts)]; s != nil; s = s.entry.next {
			switch e := &s.entry; {
			case e.ts != ts || e.app != q.App || e.customer != q.Customer:
			case e.marks:
				s.recall()
			default:
				foreign++
			}
		}
	}
	return foreign
}
