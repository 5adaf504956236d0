package local

import (
	"bytes"
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// purpose is the request that a message is one of; the zero purpose is none.
type purpose struct {
	is                bool
	app, customer, ts int32
}

func sentFor(m *van.Meta) purpose {
	if !m.Request {
		return purpose{}
	}
	return purpose{true, m.AppID, m.CustomerID, m.Timestamp}
}

func (r purpose) in(q *van.Requests) bool {
	return r.is && r.app == q.App && r.customer == q.Customer && r.ts >= q.First && r.ts-q.First < q.Count
}

// purposes counts messages by request.
type purposes map[purpose]int

func (s *purposes) add(r purpose) {
	if *s == nil {
		*s = purposes{}
	}
	(*s)[r]++
}

func (s purposes) remove(r purpose) {
	if n := s[r]; n > 1 {
		s[r] = n - 1
	} else {
		delete(s, r)
	}
}

func (s purposes) have(q *van.Requests) bool {
	for ts := q.First; len(s) > 0 && ts-q.First < q.Count; ts++ {
		if s[purpose{true, q.App, q.Customer, ts}] > 0 {
			return true
		}
	}
	return false
}

// recall gives back what is lent for the requests q: a receiver that reads it all the same
// finds that it has been taken back; of a stream the rest is sent from a copy; what is
// queued is dropped.
func (l *outLink) recall(q *van.Requests) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return
	}
	for i := range l.slots {
		if a := &l.slots[i]; a.busy && a.of.in(q) {
			l.seg.gen(uint32(i)).Store(0) // first: the reader looks at it after it has read
			l.unsent -= a.bytes
			device, seq := a.device, a.seq
			a.end()
			a.busy, a.device, a.seq = true, device, seq // until it is acknowledged
		}
	}
	if s := &l.stream; s.busy && s.of.in(q) {
		for i := s.part; i < partCount; i++ {
			m := s.mems[i]
			if m.Len() > 0 {
				s.mems[i] = backend.Bytes(bytes.Clone(m.Host()))
			}
			m.Release()
		}
		s.of = purpose{}
		if done := s.done; done != nil {
			s.done = nil
			done.Sent()
		}
	}
	if l.queued.have(q) {
		l.queue = slices.DeleteFunc(l.queue, func(x *queued) bool {
			if !x.loan.of.in(q) || !x.rec.lends() && !x.rec.streams() {
				return false
			}
			l.unsent -= int64(len(x.bytes)) + x.loan.bytes
			l.queued.remove(x.loan.of)
			x.loan.end()
			return true
		})
	}
}
