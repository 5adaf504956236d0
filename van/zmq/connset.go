package zmq

// The unauthenticated connections by host and age.

import (
	"container/list"
	"net/netip"
)

// connSet is the set of unauthenticated connections of one kind.
type connSet struct {
	n  int
	of map[netip.Addr]*list.List // by host: of *incoming, the oldest first; no list is empty
}

func oldest(l *list.List) *incoming { return l.Front().Value.(*incoming) }

func (s *connSet) add(in *incoming) {
	l := s.of[in.host]
	if l == nil {
		if s.of == nil {
			s.of = map[netip.Addr]*list.List{}
		}
		l = list.New()
		s.of[in.host] = l
	}
	s.n++
	in.line, in.entry = s, l.PushBack(in)
}

func (s *connSet) remove(in *incoming) {
	l := s.of[in.host]
	s.n--
	l.Remove(in.entry)
	in.line, in.entry = nil, nil
	if l.Len() == 0 {
		delete(s.of, in.host)
	}
}

// next returns the connection to close next, or nil: the oldest connection of the host with the most connections, so that hosts with
// few connections keep them. Of hosts with equally many, it is the host with the oldest connection. spare has the number of connections
// that a host keeps in any case.
func (s *connSet) next(spare map[netip.Addr]int) (next *incoming) {
	most := 0
	for host, l := range s.of {
		if n := l.Len(); n > spare[host] && (n > most || n == most && oldest(l).since.Before(next.since)) {
			most, next = n, oldest(l)
		}
	}
	return next
}

// all lists the connections.
func (s *connSet) all() (all []*incoming) {
	for _, l := range s.of {
		for e := l.Front(); e != nil; e = e.Next() {
			all = append(all, e.Value.(*incoming))
		}
	}
	return all
}
