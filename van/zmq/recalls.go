package zmq

// Index of the lent values of requests, by timestamp.

import (
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// recalls is a hash table of the slots that are lent for requests.
type recalls struct {
	buckets [1024]*lentSlot // by timestamp
	foreign logx.Sparse
}

// entry is a slot's place in recalls.
type entry struct {
	in            bool
	marks         bool // the peer understands cancel bytes
	app, customer int32
	ts            int32
	prev, next    *lentSlot
}

func bucket(ts int32) int { return int(uint32(ts) % 1024) }

// add inserts s, the slot of msg. marks reports whether the receiver understands cancel bytes.
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
