package testcluster

// What is left when all clusters of a test have ended.

import (
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
)

// lending is a van around the in-process one that counts the received data messages that somebody holds.
type lending struct {
	van.Van
	all *lents
}

// Unwrap implements van.Wrapper.
func (v lending) Unwrap() van.Van { return v.Van }

// Start implements van.Van.
func (v lending) Start(recv van.Receiver) {
	v.Van.Start(func(m *van.Message) {
		if !m.IsControl() && m.Owner() != nil {
			v.all.lend(m)
		}
		recv(m)
	})
}

// lents are the received messages of a cluster that somebody holds.
type lents struct {
	mu   sync.Mutex
	n    int
	free []*lent // used again: many tests count allocations
}

func (a *lents) lend(m *van.Message) {
	a.mu.Lock()
	if a.n++; len(a.free) == 0 {
		a.free = append(a.free, &lent{all: a})
	}
	l := a.free[len(a.free)-1]
	a.free = a.free[:len(a.free)-1]
	a.mu.Unlock()
	l.owner, l.native = m.Owner(), m.Native()
	m.Adopt(l, l.native)
}

// held is how many there are.
func (a *lents) held() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.n
}

// lent owns a received message in the place of its transport.
type lent struct {
	all    *lents
	owner  van.Owner
	native unsafe.Pointer
}

// Free implements van.Owner.
func (l *lent) Free(m *van.Message) {
	m.Adopt(l.owner, l.native)
	l.owner.Free(m)
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	l.all.n--
	l.all.free = append(l.all.free, l)
}

// inProc makes the in-process van of a node, one that counts what it has received unless it is to be fast.
func (c *Cluster) inProc() van.Factory {
	f := c.o.Network.Factory()
	if c.fast {
		return f
	}
	return func(o van.Options) (van.Van, error) {
		v, err := f(o)
		if err != nil {
			return nil, err
		}
		return lending{v, &c.lents}, nil
	}
}

// nothingHeld fails the test if somebody holds a received message when all nodes are closed.
func (c *Cluster) nothingHeld(t testing.TB) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(20 * time.Second); c.lents.held() != 0; {
		select {
		case <-tick.C:
		case <-end:
			t.Errorf("all nodes are closed, and %d received messages are held", c.lents.held())
			return
		}
	}
}

// clusters are those that there are, in tests that run at the same time, too.
var clusters struct {
	sync.Mutex
	n      int
	before map[string][]string // goroutines, when the first of them was made
}

// begun notes that a cluster is made.
func begun() {
	clusters.Lock()
	defer clusters.Unlock()
	if clusters.n++; clusters.n == 1 {
		clusters.before = goroutines()
	}
}

// over fails the test if the library's goroutines do not end with the nodes of the last cluster.
func over(t testing.TB) {
	clusters.Lock()
	defer clusters.Unlock()
	if clusters.n--; clusters.n > 0 {
		return
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(20 * time.Second); ; {
		left := ""
		for what, l := range goroutines() {
			if len(l) > len(clusters.before[what]) {
				left = l[len(l)-1]
			}
		}
		if left == "" {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Errorf("all nodes are closed, and this goroutine is left:\n%s", left)
			return
		}
	}
}

// goroutines are the stacks of the library's, by what they run. Tests' own, and those of pretended devices, do not count.
func goroutines() map[string][]string {
	const library = "github.com/stepaf/stepaf-go/"
	b := make([]byte, 1<<20)
	n := runtime.Stack(b, true)
	for ; n == len(b); n = runtime.Stack(b, true) {
		b = make([]byte, 2*len(b))
	}
	found := map[string][]string{}
	for s := range strings.SplitSeq(string(b[:n]), "\n\n") {
		at := strings.LastIndex(s, library)
		if at < 0 || strings.Contains(s, "_test.go:") || strings.Contains(s, library+"van/vantest.") || strings.Contains(s, "testing.tRunner") {
			continue
		}
		what, _, _ := strings.Cut(s[at:], "\n")
		what, _, _ = strings.Cut(what, " in goroutine")
		found[what] = append(found[what], s)
	}
	return found
}
