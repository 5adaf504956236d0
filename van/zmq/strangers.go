package zmq

// The unauthenticated connections by host and age.

import (
	"container/heap"
	"container/list"
	"net/netip"
)

// strangers is a heap of the hosts that have unauthenticated connections of one kind. The first host has the most
// connections; of hosts with equally many, the host with the oldest connection is first.
type strangers struct {
	n     int
	hosts []*host
	of    map[netip.Addr]*host
}

// host is the list of connections of one kind from one address.
type host struct {
	addr  netip.Addr
	conns list.List // of *incoming, the oldest first
	at    int       // index in the heap
}

func (h *host) oldest() *incoming { return h.conns.Front().Value.(*incoming) }

func (s *strangers) Len() int { return len(s.hosts) }

func (s *strangers) Less(i, k int) bool {
	a, b := s.hosts[i], s.hosts[k]
	if a.conns.Len() != b.conns.Len() {
		return a.conns.Len() > b.conns.Len()
	}
	return a.conns.Len() > 0 && a.oldest().since.Before(b.oldest().since)
}

func (s *strangers) Swap(i, k int) {
	s.hosts[i], s.hosts[k] = s.hosts[k], s.hosts[i]
	s.hosts[i].at, s.hosts[k].at = i, k
}

func (s *strangers) Push(h any) { s.hosts = append(s.hosts, h.(*host)) }

func (s *strangers) Pop() any {
	last := len(s.hosts) - 1
	h := s.hosts[last]
	s.hosts[last] = nil
	s.hosts = s.hosts[:last]
	return h
}

func (s *strangers) add(in *incoming) {
	h := s.of[in.host]
	if h == nil {
		if s.of == nil {
			s.of = map[netip.Addr]*host{}
		}
		h = &host{addr: in.host, at: len(s.hosts)}
		s.of[in.host] = h
		heap.Push(s, h)
	}
	s.n++
	in.line, in.entry = s, h.conns.PushBack(in)
	heap.Fix(s, h.at)
}

func (s *strangers) remove(in *incoming) {
	h := s.of[in.host]
	s.n--
	h.conns.Remove(in.entry)
	in.line, in.entry = nil, nil
	if h.conns.Len() > 0 {
		heap.Fix(s, h.at)
		return
	}
	delete(s.of, h.addr)
	heap.Remove(s, h.at)
}

// next returns the connection to close next, or nil: the oldest connection of the host with the most connections, so that hosts with
// few connections keep them. spare has the number of connections that a host keeps in any case.
func (s *strangers) next(spare map[netip.Addr]int) *incoming {
	next := -1
	for i, h := range s.hosts {
		if h.conns.Len() > spare[h.addr] && (next < 0 || s.Less(i, next)) {
			next = i
		}
		if next == 0 { // the first of the heap
			break
		}
	}
	if next < 0 {
		return nil
	}
	return s.hosts[next].oldest()
}

// all lists the connections.
func (s *strangers) all() (l []*incoming) {
	for _, h := range s.hosts {
		for e := h.conns.Front(); e != nil; e = e.Next() {
			l = append(l, e.Value.(*incoming))
		}
	}
	return l
}
