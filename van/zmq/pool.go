package zmq

import (
	"sync"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
)

// pool reuses messages together with their memory in C.
type pool struct {
	mu     sync.Mutex
	free   []*van.Message
	closed bool
}

// poolCap limits the number of messages that an idle receiver keeps.
const poolCap = 256

func (p *pool) get() *van.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		m := p.free[n-1]
		p.free = p.free[:n-1]
		return m
	}
	m := &van.Message{}
	m.Adopt(p, unsafe.Pointer(newFrames()))
	return m
}

// Free returns a message to the pool. It must have no other references.
func (p *pool) Free(m *van.Message) {
	p.clear(m)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.free) >= poolCap {
		(*frames)(m.Native()).free()
		return
	}
	p.free = append(p.free, m)
}

// clear empties m, so that a receive can fill it.
func (p *pool) clear(m *van.Message) {
	f := (*frames)(m.Native())
	f.release()
	m.Reset()
	m.Adopt(p, unsafe.Pointer(f))
}

// close frees the pooled messages. Messages that are still in use are freed when they are released.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, m := range p.free {
		(*frames)(m.Native()).free()
	}
	p.free = nil
}
