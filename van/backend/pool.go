package backend

// Reuse of device and pinned buffers.

import (
	"cmp"
	"math/bits"
	"sync"
)

// Pool reuses buffers, because allocating device or pinned memory takes as long as
// sending many values. Sizes are rounded up, by an eighth at most, so that values of
// similar length share buffers. It is safe for concurrent use.
type Pool struct {
	alloc func(n int) (Mem, error)
	free  func(Mem) error
	limit int
	keeps func() bool // true: nothing may be freed now

	mu     sync.Mutex
	idle   map[int][]*Buffer // by size
	size   int               // bytes in all
	closed bool
}

// Buffer is memory of a pool.
type Buffer struct {
	mem  Mem
	pool *Pool
}

// Mem is the buffer's memory, which may be longer than the length passed to Get.
func (b *Buffer) Mem() Mem { return b.mem }

// Put returns the buffer to the pool. It may block only after the pool's Close, and not
// while streams may wait for the CPU.
func (b *Buffer) Put() { b.pool.put(b) }

// NewPool makes a pool of at most limit bytes, in use and idle.
func NewPool(limit int, alloc func(n int) (Mem, error), free func(Mem) error) *Pool {
	return &Pool{alloc: alloc, free: free, limit: limit, keeps: func() bool { return false }, idle: map[int][]*Buffer{}}
}

// For makes the pool free nothing while freeing may block (StreamBlocker); b's Close then
// frees what the pool has. For returns the pool. Call it before the first Get.
func (p *Pool) For(b Backend) *Pool {
	p.keeps = MayBlockOf(b)
	return p
}

// Limit is the number of bytes that the pool keeps at most.
func (p *Pool) Limit() int { return p.limit }

const smallestBuffer = 4096

// rounded is the size of the buffers for n bytes.
func rounded(n int) int {
	if n <= smallestBuffer {
		return smallestBuffer
	}
	step := 1 << max(bits.Len(uint(n-1))-4, bits.Len(smallestBuffer)-1)
	return (n + step - 1) / step * step
}

// Get returns a buffer of at least n bytes, nil when the limit is reached. It may
// take long.
func (p *Pool) Get(n int) (*Buffer, error) {
	size := rounded(n)
	p.mu.Lock()
	if l := p.idle[size]; len(l) > 0 {
		b := l[len(l)-1]
		p.idle[size] = l[:len(l)-1]
		p.mu.Unlock()
		return b, nil
	}
	var old []*Buffer
	keeps := p.keeps()
	if p.size+size > p.limit && !keeps {
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
		if keeps {
			return nil, p.lost(size, err)
		}
		p.mu.Lock()
		old = p.evict(p.limit) // idle buffers of other sizes may use the memory that is short
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
	return &Buffer{mem: m, pool: p}, nil
}

func (p *Pool) lost(size int, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.size -= size
	return err
}

// evict takes idle buffers out of the pool until n bytes are free.
func (p *Pool) evict(n int) (old []*Buffer) {
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

func (p *Pool) drop(old []*Buffer) (err error) {
	for _, b := range old {
		err = cmp.Or(err, p.free(b.mem))
	}
	return err
}

func (p *Pool) put(b *Buffer) {
	p.mu.Lock()
	if !p.closed {
		p.idle[b.mem.Len()] = append(p.idle[b.mem.Len()], b)
		p.mu.Unlock()
		return
	}
	p.size -= b.mem.Len()
	p.mu.Unlock()
	if p.keeps() {
		return
	}
	_ = p.free(b.mem) // the backend may be closed by now, and has then freed it
}

// Close frees the idle buffers; each of the others is freed by its Put. While streams may
// wait for the CPU (For), the backend's Close frees them instead.
func (p *Pool) Close() error {
	p.mu.Lock()
	p.closed = true
	old := p.evict(p.size)
	p.mu.Unlock()
	if p.keeps() {
		return nil
	}
	return p.drop(old)
}
