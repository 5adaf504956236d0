package local

import (
	"sync"
	"sync/atomic"
)

// losses tells the watcher of peers that are lost and come back, in order, on a
// goroutine of its own: a watcher may close the van.
type losses struct {
	watch   atomic.Pointer[func(id int, up bool, cause error)]
	current func(id int, n *neighbour) bool // whether n still is peer id

	mu      sync.Mutex
	down    map[int]bool
	events  []loss
	telling bool
}

type loss struct {
	n     *neighbour
	id    int
	up    bool
	cause error
}

// tell passes on that n, peer id, is lost, or there again if it was lost.
func (l *losses) tell(n *neighbour, id int, up bool, cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down[id] == !up {
		return
	}
	if l.down == nil {
		l.down = map[int]bool{}
	}
	l.down[id] = !up
	l.events = append(l.events, loss{n, id, up, cause})
	if !l.telling {
		l.telling = true
		go l.run()
	}
}

// forget makes the next loss of peer id one to tell of.
func (l *losses) forget(id int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.down, id)
}

func (l *losses) run() {
	for {
		l.mu.Lock()
		if len(l.events) == 0 {
			l.events, l.telling = nil, false
			l.mu.Unlock()
			return
		}
		e := l.events[0]
		l.events = l.events[1:]
		l.mu.Unlock()
		if f := l.watch.Load(); f != nil && l.current(e.id, e.n) {
			(*f)(e.id, e.up, e.cause)
		}
	}
}
