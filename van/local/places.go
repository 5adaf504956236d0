package local

import (
	"encoding/binary"
	"slices"
	"sync"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// places are where received values are wanted: the memory that pull requests in
// flight have named, and the buffers registered for pushes.
type places struct {
	mu      sync.Mutex
	into    map[request]backend.Mem
	writing []backend.Mem // answers are being written there
	idle    sync.Cond     // with mu: writing has become shorter
	pushes  map[push]backend.Mem
}

// request names a pull in flight.
type request struct {
	peer                int
	app, customer, time int32
}

// push names what a peer pushes.
type push struct {
	peer int
	key  uint64
}

func newPlaces() *places {
	p := &places{into: map[request]backend.Mem{}, pushes: map[push]backend.Mem{}}
	p.idle.L = &p.mu
	return p
}

func requestOf(peer int, m *van.Meta) request {
	return request{peer, m.AppID, m.CustomerID, m.Timestamp}
}

// expect makes msg.Into, if it is memory of the host, the place of the answer to a
// pull that is about to be sent. Small answers come without it.
func (p *places) expect(msg *van.Message) bool {
	if !msg.Request || msg.Push || msg.Into.Len() < streamFrom || !msg.Into.OnHost() {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.into[requestOf(msg.Receiver, &msg.Meta)] = msg.Into
	return true
}

// drop forgets what msg, which could not be sent, has named.
func (p *places) drop(msg *van.Message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.into, requestOf(msg.Receiver, &msg.Meta))
}

// find returns where n bytes of values of a received message are wanted. With
// landing set, the place must be given to settle when the values are there.
func (p *places) find(msg *van.Message, n int) (dst backend.Mem, landing, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case msg.Request && msg.Push && msg.Keys.Len() == 8:
		dst = p.pushes[push{msg.Sender, binary.LittleEndian.Uint64(msg.Keys.Host())}]
		if dst.Len() < n || !dst.OnHost() {
			return backend.Mem{}, false, false
		}
		return dst.Sub(0, n), false, true
	case !msg.Request && !msg.Push:
		r := requestOf(msg.Sender, &msg.Meta)
		dst, ok = p.into[r]
		delete(p.into, r)
		if !ok || dst.Len() != n {
			return backend.Mem{}, false, false
		}
		p.writing = append(p.writing, dst)
		return dst, true, true
	}
	return backend.Mem{}, false, false
}

// settle ends the writing to a landing that find has returned.
func (p *places) settle(dst backend.Mem) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.writing {
		if p.writing[i].Addr() == dst.Addr() {
			last := len(p.writing) - 1
			p.writing[i], p.writing[last] = p.writing[last], backend.Mem{}
			p.writing = p.writing[:last]
			break
		}
	}
	p.idle.Broadcast()
}

// revoke takes back memory, once nobody writes to it any more.
func (p *places) revoke(mem backend.Mem) {
	overlaps := func(m backend.Mem) bool {
		return m.Addr() < mem.Addr()+uint64(mem.Len()) && mem.Addr() < m.Addr()+uint64(m.Len())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for r, m := range p.into {
		if overlaps(m) {
			delete(p.into, r)
		}
	}
	for slices.ContainsFunc(p.writing, overlaps) {
		p.idle.Wait()
	}
}

// forget drops what peer was asked for: it will not answer any more.
func (p *places) forget(peer int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for r := range p.into {
		if r.peer == peer {
			delete(p.into, r)
		}
	}
}

// register makes dst the place of what peer pushes under key.
func (p *places) register(peer int, key uint64, dst backend.Mem) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pushes[push{peer, key}] = dst
}
