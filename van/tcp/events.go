package tcp

import (
	"errors"
	"sync"

	"github.com/stepaf/stepaf-go/van"
)

// events calls the watcher for each peer that is lost or is back, in order, on a goroutine of its own: a watcher may
// close the van, and may hold locks while it calls the van.
type events struct {
	peers *peers
	watch func(id int, up bool, cause error) // set before Start; may be nil
	gone  func(id int)                       // called first when a peer is lost

	mu      sync.Mutex
	queue   []event
	running bool
}

type event struct {
	n     *peer
	up    bool
	cause error
	then  func() // called after the watcher; may be nil
}

// errBroke is the cause of a loss that the peer reports.
var errBroke = errors.New("its connection broke, and messages may be lost")

// tell queues an event if it changes what the watcher knows of n.
func (e *events) tell(n *peer, up bool, cause error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n.down != up {
		return
	}
	n.down = !up
	e.add(event{n: n, up: up, cause: cause})
}

// broke reports that n's connection to this node broke. It queues n's loss, and n's return unless the watcher already knows n as lost.
// then is called after these events.
func (e *events) broke(n *peer, then func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n.down {
		e.add(event{n: n, up: false, cause: errBroke, then: then})
		return
	}
	e.add(event{n: n, up: false, cause: errBroke})
	e.add(event{n: n, up: true, then: then})
}

// replaced notes that n has replaced old. If the watcher knows old as lost, it may take that for a loss of n, so it is called once more.
func (e *events) replaced(old, n *peer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if old.down {
		e.add(event{n: n, up: true})
	}
}

// inside passes the events of peer id from the van inside to the watcher. It drops a return while the connection for data is broken,
// since a message would fail then. The return is reported when the connection for data is made again.
func (e *events) inside(id int, up bool, cause error) {
	if !up {
		e.peers.lostInside(id, cause)
	}
	if n := e.peers.of(id); up && n != nil {
		e.mu.Lock()
		down := n.down
		e.mu.Unlock()
		if down {
			return
		}
	}
	e.watch(id, up, cause)
}

// add queues an event. e.mu is held.
func (e *events) add(x event) {
	e.queue = append(e.queue, x)
	if !e.running {
		e.running = true
		go e.run()
	}
}

// run calls the watcher until no event is left.
func (e *events) run() {
	for {
		e.mu.Lock()
		if len(e.queue) == 0 {
			e.queue, e.running = nil, false
			e.mu.Unlock()
			return
		}
		x := e.queue[0]
		e.queue = e.queue[1:]
		e.mu.Unlock()
		if e.peers.current(x.n) {
			e.call(&x)
		}
		if x.then != nil {
			x.then()
		}
	}
}

func (e *events) call(x *event) {
	id := int(x.n.id.Load())
	if !x.up {
		e.gone(id)
	}
	if e.watch == nil {
		return
	}
	cause := x.cause
	if cause != nil {
		cause = &van.ConnectionError{Incarnation: x.n.incarnation, Err: cause}
	}
	e.watch(id, x.up, cause)
}
