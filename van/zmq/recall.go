package zmq

import "github.com/stepaf/stepaf-go/van"

// libzmq reads a lent value when it writes it to the connection. That may be long after Send, even
// after the request was canceled and the memory reused. Between nodes of this library, a request
// with lent values therefore ends with one more frame: a cancel byte, which libzmq reads after all
// other frames of the message. A node that reuses the memory sets the cancel byte first.
//
//   - If libzmq has read the byte before, it has also read the values unchanged.
//   - If not, the receiver sees the byte and drops the message.

const (
	markSent     = 0 // the values are unchanged
	markRecalled = 1 // the request was canceled: the values may have changed
)

// hasMark reports whether a request whose first data frames are those of f ends with a cancel byte.
func hasMark(f *frames, data int) bool {
	for i := range data {
		if int(f.size[i+2]) >= van.CopyBelow {
			return true
		}
	}
	return false
}

// takeMark separates the cancel byte from the frames of a request that a node of this library has sent. It
// returns the number of data frames without it, and its value; markSent if the request needs none.
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

// recall sets the cancel bytes of all messages that are lent for q. It returns how many of the messages have none.
func (l *lent) recall(q van.Requests) (foreign int) {
	if l.held.Load() == 0 {
		return 0
	}
	l.reap() // messages that libzmq has released do not count
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
