package local

import (
	"fmt"
	"math/bits"
	"sync"

	"golang.org/x/sys/unix"
)

// blocks are buffers for received values that have no place of their own yet. They
// lie outside the Go heap and are used again, the last one first: its pages exist
// and may still be in a cache.
type blocks struct {
	mu     sync.Mutex
	free   map[int][][]byte // by length
	kept   int              // bytes in free
	closed bool
}

const (
	minBlock = 64 << 10
	// keepBlocks is how many bytes an idle van keeps at most.
	keepBlocks = 256 << 20
	// hugeFrom is the length from which huge pages are asked for: reading into them
	// takes half the time.
	hugeFrom = 2 << 20
)

// blockLen is the length of a block for n bytes: in steps of an eighth, so that
// values of nearly the same length use the same blocks.
func blockLen(n int) int {
	if n <= minBlock {
		return minBlock
	}
	step := 1 << max(bits.Len(uint(n-1))-4, 12)
	return (n + step - 1) &^ (step - 1)
}

// get returns n bytes with undefined contents, to be given back to put.
func (b *blocks) get(n int) ([]byte, error) {
	size := blockLen(n)
	b.mu.Lock()
	if l := b.free[size]; len(l) > 0 {
		mem := l[len(l)-1]
		l[len(l)-1] = nil
		b.free[size] = l[:len(l)-1]
		b.kept -= size
		b.mu.Unlock()
		return mem[:n], nil
	}
	b.mu.Unlock()
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("no memory to receive %d bytes: mmap: %w", n, err)
	}
	if size >= hugeFrom {
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // without it works, too
	}
	return mem[:n], nil
}

// put takes back a block.
func (b *blocks) put(mem []byte) {
	mem = mem[:cap(mem)]
	b.mu.Lock()
	if !b.closed && b.kept+len(mem) <= keepBlocks {
		if b.free == nil {
			b.free = map[int][][]byte{}
		}
		b.free[len(mem)] = append(b.free[len(mem)], mem)
		b.kept += len(mem)
		b.mu.Unlock()
		return
	}
	b.mu.Unlock()
	_ = unix.Munmap(mem)
}

// close frees the blocks; those still in use are freed when they come back.
func (b *blocks) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for _, l := range b.free {
		for _, mem := range l {
			_ = unix.Munmap(mem)
		}
	}
	b.free, b.kept = nil, 0
}
