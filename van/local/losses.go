package local

import (
	"sync"
	"sync/atomic"
)

// losses tells the watcher of peers that are lost and come back, in order, on a
// goroutine of its own: a watcher may close the van.
type losses struct {
	watch   atomic.Pointer[func(id int, up bool, cause error)]
	current func(id int, n *outPeer) bool // whether n still is peer id

	mu      sync.Mutex // guards outPeer.down, too
	events  []loss
	telling bool
}

type loss struct {
	n     *outPeer
	id    int
	up    bool
	cause error
}

// tell passes on that n, peer id, is lost, or there again if it was lost.
func (l *losses) tell(n *outPeer, id int, up bool, cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n.down != up {
		return
	}
	n.down = !up
	l.add(loss{n, id, up, cause})
}

// replaced is told that n is peer id now, in place of old. The watcher may have heard
// of the loss of old when it knew of n already, and have taken it for that of n.
func (l *losses) replaced(id int, old, n *outPeer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if old.down {
		l.add(loss{n, id, true, nil})
	}
}

// add queues an event. l.mu is held.
func (l *losses) add(e loss) {
	l.events = append(l.events, e)
	if !l.telling {
		l.telling = true
		go l.run()
	}
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
