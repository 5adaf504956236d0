package zmq

// What is lent for requests, by timestamp.

import (
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// recalls finds what is lent for requests.
type recalls struct {
	buckets [1024]*lentSlot // by timestamp
	foreign logx.Sparse
}

// entry is a slot's place in recalls.
type entry struct {
	in            bool
	marks         bool // the peer knows marks
	app, customer int32
	ts            int32
	prev, next    *lentSlot
}

func bucket(ts int32) int { return int(uint32(ts) % 1024) }

// add lists s, lent for a message whose receiver knows marks or does not.
func (r *recalls) add(s *lentSlot, msg *van.Message, marks bool) {
	first := &r.buckets[bucket(msg.Timestamp)]
	s.entry = entry{in: true, marks: marks, app: msg.AppID, customer: msg.CustomerID, ts: msg.Timestamp, next: *first}
	if *first != nil {
		(*first).entry.prev = s
	}
	*first = s
}

func (r *recalls) remove(s *lentSlot) {
	e := &s.entry
	if !e.in {
		return
	}
	if e.next != nil {
		e.next.entry.prev = e.prev
	}
	if e.prev != nil {
		e.prev.entry.next = e.next
	} else {
		r.buckets[bucket(e.ts)] = e.next
	}
	*e = entry{}
}
