package inproc

// The queue of messages at one address of a Network.

import (
	"sync"
	"sync/atomic"
)

// endpoint is one address of a Network: the messages sent to it and the node that
// listens there.
type endpoint struct {
	addr  string
	conns map[*conn]struct{} // under Network.mu

	mu          sync.Mutex
	filled      sync.Cond
	owner       *node // nil: no node listens
	first, last *inbound
}

// conn is a connection from one node to an address.
type conn struct {
	from     *node
	to       *endpoint
	senderID int          // the id of from when it was opened
	native   bool         // the peer is a node of this library
	peerID   atomic.Int64 // changed by Rename
	queued   atomic.Int64 // messages that wait in the endpoint or in a lane
	down     atomic.Bool  // the peer no longer listens; written under to.mu
}

func newEndpoint(addr string) *endpoint {
	e := &endpoint{addr: addr, conns: map[*conn]struct{}{}}
	e.filled.L = &e.mu
	return e
}

// push appends p unless its connection is down.
func (e *endpoint) push(p *inbound) bool {
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

// pop waits for the next message. It returns nil when owner no longer listens here.
func (e *endpoint) pop(owner *node) *inbound {
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

// waiting counts the queued messages that from has sent.
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

// takeLocked removes queued messages and returns them as a list: messages sent by from,
// or all messages if from is nil. The caller holds mu.
func (e *endpoint) takeLocked(from *node) *inbound {
	var keep, taken inbound
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

// discard frees a list of messages that will not be delivered.
func discard(p *inbound) {
	for p != nil {
		next := p.next
		p.conn.queued.Add(-1)
		p.free()
		p = next
	}
}
