package links

import (
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// lossState is what the watcher knows of a peer. Losses.mu guards it.
type lossState struct {
	down bool // the latest event, queued or delivered, is a loss
	lost bool // a loss was queued, and the watcher has not been called for a later return
}

// Losses calls the node's watcher (van.PeerWatcher) for each peer that is lost or back, in order, on a goroutine of its
// own: a watcher may close the van, and may hold locks while it calls the van.
type Losses struct {
	// Current reports whether a peer still is the process that has its id. The watcher is not called for others.
	Current func(*Peer) bool
	// Gone, if not nil, is called with a lost peer's id before the watcher.
	Gone func(id int)

	watch atomic.Pointer[func(id int, up bool, cause error)]

	mu      sync.Mutex // guards the loss of all peers, too
	events  []event    // the watcher has not been called for them
	running bool       // the goroutine that calls it
}

type event struct {
	peer  *Peer
	up    bool
	cause error
	then  func() // called after the watcher; may be nil
}

// Watch sets the watcher.
func (q *Losses) Watch(f func(id int, up bool, cause error)) { q.watch.Store(&f) }

// Tell queues an event if it changes what the watcher knows of p. The caller may hold locks.
func (q *Losses) Tell(p *Peer, up bool, cause error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if p.loss.down == up {
		q.add(event{peer: p, up: up, cause: cause})
	}
}

// Broken queues the loss of p, and the return of p unless the watcher knows p as lost already. then is called after these
// events.
func (q *Losses) Broken(p *Peer, cause error, then func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if p.loss.down {
		q.add(event{peer: p, cause: cause, then: then})
		return
	}
	q.add(event{peer: p, cause: cause})
	q.add(event{peer: p, up: true, then: then})
}

// Replaced records that p has replaced old. If the watcher was or is being called for the loss of old, it may mistake that for
// a loss of p. It is therefore called once more, for p's return, and no more for a return of old.
func (q *Losses) Replaced(old, p *Peer) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if old.loss.lost {
		p.loss.lost = true
		q.add(event{peer: p, up: true})
	}
}

// Down reports whether p is lost, as far as events have been queued.
func (q *Losses) Down(p *Peer) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return p.loss.down
}

// add queues an event. q.mu is held.
func (q *Losses) add(e event) {
	s := &e.peer.loss
	s.down = !e.up
	s.lost = s.lost || s.down
	q.events = append(q.events, e)
	if !q.running {
		q.running = true
		go q.run()
	}
}

// run calls the watcher until no event is left.
func (q *Losses) run() {
	for {
		q.mu.Lock()
		if len(q.events) == 0 {
			q.events, q.running = nil, false
			q.mu.Unlock()
			return
		}
		e := q.events[0]
		q.events = q.events[1:]
		q.mu.Unlock()
		if q.Current(e.peer) {
			q.call(&e)
		}
		if e.then != nil {
			e.then()
		}
	}
}

func (q *Losses) call(e *event) {
	id := e.peer.ID()
	if !e.up && q.Gone != nil {
		q.Gone(id)
	}
	if f := q.watch.Load(); f != nil {
		cause := e.cause
		if cause != nil {
			cause = &van.ConnectionError{Incarnation: e.peer.incarnation, Err: cause}
		}
		(*f)(id, e.up, cause)
	}
	if e.up {
		q.mu.Lock()
		s := &e.peer.loss
		s.lost = s.down
		q.mu.Unlock()
	}
}
