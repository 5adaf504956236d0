package inproc

import (
	"sync"
	"sync/atomic"
)

// endpoint is one address of a Network: what was sent there, and who listens.
type endpoint struct {
	addr  string
	conns map[*conn]struct{} // under Network.mu

	mu          sync.Mutex
	filled      sync.Cond
	owner       *node // nil: nobody listens
	first, last *parcel
}

// conn is a connection from one node to an address.
type conn struct {
	from     *node
	to       *endpoint
	senderID int          // the id of from when it was opened
	peerID   atomic.Int64 // changed by Rename
	queued   atomic.Int64 // messages that wait in the endpoint or in a lane
	down     atomic.Bool  // the peer has gone; written under to.mu
}

func newEndpoint(addr string) *endpoint {
	e := &endpoint{addr: addr, conns: map[*conn]struct{}{}}
	e.filled.L = &e.mu
	return e
}

// push appends p unless its connection is down.
func (e *endpoint) push(p *parcel) bool {
	e.mu.Lock()
	if p.conn.down.Load() {
		e.mu.Unlock()
		return false
	}
	p.conn.queued.Add(1)
	if e.last == nil {
		e.first = p
	} else {
		e.last.next = p
	}
	e.last = p
	e.mu.Unlock()
	e.filled.Signal()
	return true
}

// pop waits for the next parcel. It returns nil when owner does not listen here
// any more.
func (e *endpoint) pop(owner *node) *parcel {
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		if e.owner != owner {
			return nil
		}
		if p := e.first; p != nil {
			e.first, p.next = p.next, nil
			if e.first == nil {
				e.last = nil
			}
			return p
		}
		e.filled.Wait()
	}
}

// waiting counts what from has sent and nobody has taken.
func (e *endpoint) waiting(from *node) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for p := e.first; p != nil; p = p.next {
		if p.conn.from == from {
			n++
		}
	}
	return n
}

// takeLocked removes and returns, as a list, what waits here: everything, or
// only what from has sent. The caller holds mu.
func (e *endpoint) takeLocked(from *node) *parcel {
	var keep, taken parcel
	k, t := &keep, &taken
	for p := e.first; p != nil; p = p.next {
		if from == nil || p.conn.from == from {
			t.next, t = p, p
		} else {
			k.next, k = p, p
		}
	}
	k.next, t.next = nil, nil
	e.first, e.last = keep.next, nil
	if e.first != nil {
		e.last = k
	}
	return taken.next
}

// lose frees a list of parcels that nobody will receive.
func lose(p *parcel) {
	for p != nil {
		next := p.next
		p.conn.queued.Add(-1)
		p.free()
		p = next
	}
}
