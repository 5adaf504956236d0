package stage

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// buffer is memory of a pool. While it carries a received message it is that
// message's owner.
type buffer struct {
	mem    backend.Mem
	pool   *pool
	owner  van.Owner
	native unsafe.Pointer
}

// Free gives the message back to the transport that it came from, and the buffer to
// its pool.
func (b *buffer) Free(m *van.Message) {
	owner, native := b.owner, b.native
	b.owner, b.native = nil, nil
	b.pool.put(b)
	m.Adopt(owner, native)
	owner.Free(m)
}

// pool keeps buffers for use again: allocating device or pinned memory takes as long
// as sending many values. Sizes are rounded up, by an eighth at most, so that values of
// about the same length share buffers.
type pool struct {
	alloc func(n int) (backend.Mem, error)
	free  func(backend.Mem) error
	limit int // bytes in all, in use and idle

	mu     sync.Mutex
	idle   map[int][]*buffer // by size
	size   int               // bytes in all
	closed bool
}

func newPool(limit int, alloc func(int) (backend.Mem, error), free func(backend.Mem) error) *pool {
	return &pool{alloc: alloc, free: free, limit: limit, idle: map[int][]*buffer{}}
}

const smallest = 4096

// rounded is the size of the buffers for n bytes.
func rounded(n int) int {
	if n <= smallest {
		return smallest
	}
	step := 1 << max(bits.Len(uint(n-1))-4, bits.Len(smallest)-1)
	return (n + step - 1) / step * step
}

// get returns a buffer of at least n bytes, nil when the limit leaves no room. It may
// take long.
func (p *pool) get(n int) (*buffer, error) {
	size := rounded(n)
	p.mu.Lock()
	if l := p.idle[size]; len(l) > 0 {
		b := l[len(l)-1]
		p.idle[size] = l[:len(l)-1]
		p.mu.Unlock()
		return b, nil
	}
	var old []*buffer
	if p.size+size > p.limit {
		old = p.evict(p.size + size - p.limit)
	}
	if p.closed || p.size+size > p.limit {
		p.mu.Unlock()
		return nil, p.drop(old)
	}
	p.size += size
	p.mu.Unlock()
	if err := p.drop(old); err != nil {
		return nil, p.lost(size, err)
	}
	m, err := p.alloc(size)
	if err != nil {
		p.mu.Lock()
		old = p.evict(p.limit) // the device's memory is short; ours may be in the way
		p.mu.Unlock()
		if len(old) == 0 {
			return nil, p.lost(size, err)
		}
		if e := p.drop(old); e != nil {
			return nil, p.lost(size, e)
		}
		if m, err = p.alloc(size); err != nil {
			return nil, p.lost(size, err)
		}
	}
	return &buffer{mem: m, pool: p}, nil
}

func (p *pool) lost(size int, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.size -= size
	return err
}

// evict takes idle buffers out of the pool until n bytes are free.
func (p *pool) evict(n int) (old []*buffer) {
	for size, l := range p.idle {
		for len(l) > 0 && n > 0 {
			old = append(old, l[len(l)-1])
			l = l[:len(l)-1]
			n -= size
			p.size -= size
		}
		if p.idle[size] = l; len(l) == 0 {
			delete(p.idle, size)
		}
	}
	return old
}

func (p *pool) drop(old []*buffer) error {
	var first error
	for _, b := range old {
		if err := p.free(b.mem); first == nil {
			first = err
		}
	}
	return first
}

// put takes b back. It does not block before close.
func (p *pool) put(b *buffer) {
	p.mu.Lock()
	if !p.closed {
		p.idle[b.mem.Len()] = append(p.idle[b.mem.Len()], b)
		p.mu.Unlock()
		return
	}
	p.size -= b.mem.Len()
	p.mu.Unlock()
	_ = p.free(b.mem) // the backend may be closed by now, and has then freed it
}

// close frees what is idle; the rest frees itself when it comes back.
func (p *pool) close() error {
	p.mu.Lock()
	p.closed = true
	old := p.evict(p.size)
	p.mu.Unlock()
	return p.drop(old)
}
