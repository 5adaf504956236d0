package local

import "github.com/stepaf/stepaf-go/van"

// request is the request that a message belongs to; the zero request is none.
type request struct {
	is                bool
	app, customer, ts int32
}

func requestOf(m *van.Meta) request {
	if !m.Request {
		return request{}
	}
	return request{true, m.AppID, m.CustomerID, m.Timestamp}
}

func (r request) in(q *van.Requests) bool {
	return r.is && r.app == q.App && r.customer == q.Customer && r.ts >= q.First && r.ts-q.First < q.Count
}

// requestCounts counts messages by request.
type requestCounts map[request]int

func (s *requestCounts) add(r request) {
	if *s == nil {
		*s = requestCounts{}
	}
	(*s)[r]++
}

func (s requestCounts) remove(r request) {
	if n := s[r]; n > 1 {
		s[r] = n - 1
	} else {
		delete(s, r)
	}
}

func (s requestCounts) have(q *van.Requests) bool {
	for ts := q.First; len(s) > 0 && ts-q.First < q.Count; ts++ {
		if s[request{true, q.App, q.Customer, ts}] > 0 {
			return true
		}
	}
	return false
}
