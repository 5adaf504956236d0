package local

// The queue of peers' losses and returns for the watcher.

import (
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// losses calls the watcher for each peer that is lost or has returned, in order. It uses its own
// goroutine because a watcher may close the van.
type losses struct {
	watch   atomic.Pointer[func(id int, up bool, cause error)]
	current func(id int, n *outPeer) bool // whether n still is peer id

	mu      sync.Mutex // guards outPeer.down, too
	events  []loss     // the watcher has not been called for them
	running bool       // the goroutine that calls it
}

// loss is one event: peer id was lost because of cause, or has returned.
type loss struct {
	n     *outPeer
	id    int
	up    bool
	cause error
}

// tell queues an event if it changes what the watcher knows of n, which is peer id.
func (l *losses) tell(n *outPeer, id int, up bool, cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n.down != up {
		return
	}
	n.down = !up
	n.lost = n.lost || n.down
	l.add(loss{n, id, up, cause})
}

// replaced records that n has replaced old as peer id. If the loss of old was reported or is being reported, the watcher may
// mistake it for a loss of n. It is therefore called once more to report the peer's return. A return of old is not reported any more.
func (l *losses) replaced(id int, old, n *outPeer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if old.lost {
		n.lost = true
		l.add(loss{n, id, true, nil})
	}
}

// add queues an event. The caller holds l.mu.
func (l *losses) add(e loss) {
	l.events = append(l.events, e)
	if !l.running {
		l.running = true
		go l.run()
	}
}

// run calls the watcher until no event is left.
func (l *losses) run() {
	for {
		l.mu.Lock()
		if len(l.events) == 0 {
			l.events, l.running = nil, false
			l.mu.Unlock()
			return
		}
		e := l.events[0]
		l.events = l.events[1:]
		l.mu.Unlock()
		if f := l.watch.Load(); f != nil && l.current(e.id, e.n) {
			cause := e.cause
			if cause != nil {
				cause = &van.ConnectionError{Incarnation: e.n.incarnation, Err: cause}
			}
			(*f)(e.id, e.up, cause)
			if e.up {
				l.mu.Lock()
				e.n.lost = e.n.down
				l.mu.Unlock()
			}
		}
	}
}
