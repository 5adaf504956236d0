package datamsg

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// RecvBuffers is the memory that a server has registered for pushes, by sender and key. Some vans receive values
// directly into it; for others, and with PS_RESEND, Place copies. It is safe for concurrent use.
type RecvBuffers struct {
	node *cluster.Node
	used atomic.Bool                               // a buffer is registered
	seen atomic.Pointer[map[bufferKey]backend.Mem] // a copy of m; nil after m has changed

	mu sync.Mutex
	m  map[bufferKey]backend.Mem
}

type bufferKey struct {
	sender int
	key    uint64
}

// NewRecvBuffers returns an empty set of buffers for a node.
func NewRecvBuffers(n *cluster.Node) *RecvBuffers {
	return &RecvBuffers{node: n, m: map[bufferKey]backend.Mem{}}
}

// RecvBuffer is the memory for pushes of the worker with the given group rank under a key.
type RecvBuffer struct {
	Worker int
	Key    uint64
	Dst    backend.Mem
}

// Register registers all buffers, or none if one is invalid or registered already. If the van refuses a buffer, the
// buffers before it stay registered, and the error says so. Registered memory is retained until the process ends. Call
// Register before the worker's first push of the key.
func (b *RecvBuffers) Register(buffers ...RecvBuffer) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.check(buffers); err != nil {
		return err
	}
	reg, direct := van.As[van.BufferRegistrar](b.node.Van())
	direct = direct && !b.node.App().Config().Resend // a repeated push must not reach a buffer before van/resend has recognized it
	for i, p := range buffers {
		k := b.keyOf(p)
		if direct {
			if err := reg.RegisterRecvBuffer(k.sender, p.Key, p.Dst); err != nil {
				if i > 0 {
					err = fmt.Errorf("worker %d, key %d: %w (the %d before it of %d stay registered)", p.Worker, p.Key, err, i, len(buffers))
				}
				return err
			}
		}
		p.Dst.Retain()
		b.m[k] = p.Dst
		b.used.Store(true)
		b.seen.Store(nil)
	}
	return nil
}

func (b *RecvBuffers) keyOf(p RecvBuffer) bufferKey {
	return bufferKey{b.node.Topology().WorkerInstance(p.Worker), p.Key}
}

// check returns the reason why buffers cannot be registered. The caller holds b.mu.
func (b *RecvBuffers) check(buffers []RecvBuffer) error {
	first := make(map[bufferKey]int, len(buffers))
	for i, p := range buffers {
		if p.Worker < 0 || p.Worker >= b.node.Topology().NumWorkers {
			return fmt.Errorf("register receive buffer: %w: worker rank %d, want 0 to %d", van.ErrInvalid, p.Worker, b.node.Topology().NumWorkers-1)
		}
		k := b.keyOf(p)
		if _, taken := b.m[k]; taken {
			return fmt.Errorf("register receive buffer: %w: worker %d, key %d has one already", van.ErrInvalid, p.Worker, p.Key)
		}
		if j, twice := first[k]; twice {
			return fmt.Errorf("register receive buffer: %w: worker %d, key %d is there twice, at %d and %d", van.ErrInvalid, p.Worker, p.Key, j, i)
		}
		first[k] = i
	}
	return nil
}

// find looks a buffer up without a lock, since pushes of all workers call it. The first push after a Register copies m.
func (b *RecvBuffers) find(k bufferKey) (backend.Mem, bool) {
	if !b.used.Load() {
		return backend.Mem{}, false
	}
	m := b.seen.Load()
	if m == nil {
		b.mu.Lock()
		c := maps.Clone(b.m)
		b.seen.Store(&c)
		b.mu.Unlock()
		m = &c
	}
	mem, ok := (*m)[k]
	return mem, ok
}

// Place returns the memory of a value that sender has pushed under key: the registered buffer, to which Place copies vals unless the van
// has received it there (placed), or vals. owned reports that it is the registered buffer, so that the message is no longer needed.
func (b *RecvBuffers) Place(sender int, key uint64, vals backend.Mem, placed bool) (mem backend.Mem, owned bool, err error) {
	if placed {
		return vals, true, nil
	}
	dst, ok := b.find(bufferKey{sender, key})
	if !ok {
		return vals, false, nil
	}
	if vals.Len() > dst.Len() {
		return vals, false, fmt.Errorf("%w: %s pushed %d bytes under key %d, the registered receive buffer has %d",
			van.ErrInvalid, van.NodeName(sender), vals.Len(), key, dst.Len())
	}
	dst = dst.Sub(0, vals.Len())
	return dst, true, b.node.Backend().Copy(dst, vals)
}
