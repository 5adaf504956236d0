package rdma

import (
	"slices"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestClasses: all queue pairs of a connection have the traffic class that is set for the peer when the connection is made. A change is reported as applied
// when the connection has been made again.
func TestClasses(t *testing.T) {
	r := newRig(t)
	var mu sync.Mutex
	connects := map[*fakeverbs.Stack][]int{}
	r.net.Trace(func(x fakeverbs.Record) {
		if x.Kind == fakeverbs.RecordCM && x.Event == fakeverbs.EventConnect {
			mu.Lock()
			connects[x.Stack] = append(connects[x.Stack], x.TOS)
			mu.Unlock()
		}
	})
	made := func(n *testNode) []int {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(connects[n.stack])
	}
	w, s := r.node(9, func(c *env.Config) { c.QPNum = 2 }), r.node(8)
	w.SetTrafficClasses(map[int]int{8: 46})
	if now, ever := w.TrafficClassApplied(8); now || !ever {
		t.Errorf("without a connection: marked %t, ever %t", now, ever)
	}
	w.connect(s)
	s.connect(w)
	link := func() *link { return (*w.tables.peers.Load())[8].currentLink() }
	r.until("a connection", func() bool { return link() != nil && (*s.tables.peers.Load())[9].currentLink() != nil })
	if now, _ := w.TrafficClassApplied(8); !now {
		t.Error("the connection is not marked")
	}
	if got := made(w); len(got) < 2 || slices.ContainsFunc(got, func(tos int) bool { return tos != 46<<2 }) {
		t.Errorf("the worker's queue pairs have types of service %v, want %d", got, 46<<2)
	}
	if got := made(s); len(got) == 0 || slices.ContainsFunc(got, func(tos int) bool { return tos != 0 }) {
		t.Errorf("the server's queue pairs have types of service %v, want none", got)
	}

	before := len(made(w))
	w.SetTrafficClasses(map[int]int{8: 10})
	if now, ever := w.TrafficClassApplied(8); now || !ever {
		t.Errorf("after a change: marked %t, ever %t; want the next connection to have it", now, ever)
	}
	old := link()
	old.fail(van.ErrPeerLost)
	r.until("the next connection", func() bool { l := link(); return l != nil && l != old })
	if now, _ := w.TrafficClassApplied(8); !now {
		t.Error("the next connection is not marked")
	}
	if got := made(w)[before:]; len(got) < 2 || slices.ContainsFunc(got, func(tos int) bool { return tos != 10<<2 }) {
		t.Errorf("the next queue pairs have types of service %v, want %d", got, 10<<2)
	}
}

// TestNoClass: with a provider that refuses the class there is a connection even so, and a log line.
func TestNoClass(t *testing.T) {
	r := newRig(t, func(c *fakeverbs.Config) { c.NoTOS = true })
	w, s := r.node(9), r.node(8)
	w.SetTrafficClasses(map[int]int{8: 46})
	w.connect(s)
	s.connect(w)
	r.until("a connection", func() bool { return (*w.tables.peers.Load())[8].currentLink() != nil })
	if now, ever := w.TrafficClassApplied(8); now || ever {
		t.Errorf("marked %t, ever %t", now, ever)
	}
}
