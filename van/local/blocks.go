package local

// Memory for received values without a destination of their own.

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// blocks is a pool of buffers outside the Go heap. The buffer that was returned last is reused
// first: its pages are mapped and may still be in a cache. Buffers that recent traffic
// has not needed are returned to the system.
type blocks struct {
	mu     sync.Mutex
	of     map[int]*sizeClass // by length
	kept   int                // bytes of free blocks
	timer  *time.Timer        // of tick; nil when no block is free
	closed bool
}

// sizeClass has the blocks of one length.
type sizeClass struct {
	free [][]byte
	out  int // blocks in use
	gets int // calls of get since the last trim
	idle int // the fewest free blocks at the end of one of these calls, so the number of unneeded blocks
}

const (
	minBlock = 64 << 10
	// keepBlocks is the maximum number of bytes in free blocks.
	keepBlocks = 256 << 20
	// keepTime is the time between two ticks: an unused block is freed after one or two.
	keepTime = 500 * time.Millisecond
	// hugeFrom is the length from which blocks request huge pages. Reading into huge pages takes half the
	// time.
	hugeFrom = 2 << 20
)

// blockLen rounds n up to the length of a block. Lengths differ by about an eighth, so
// that values of similar length share blocks.
func blockLen(n int) int {
	if n <= minBlock {
		return minBlock
	}
	step := 1 << max(bits.Len(uint(n-1))-4, 12)
	return (n + step - 1) &^ (step - 1)
}

// get returns n bytes with undefined contents. The caller returns them with put.
func (b *blocks) get(n int) ([]byte, error) {
	size := blockLen(n)
	if mem := b.reuse(size); mem != nil {
		return mem[:n], nil
	}
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		b.mu.Lock()
		b.of[size].out--
		b.mu.Unlock()
		return nil, fmt.Errorf("no memory to receive %d bytes: mmap: %w", n, err)
	}
	if size >= hugeFrom {
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // a failure only costs speed
	}
	return mem[:n], nil
}

// reuse counts a block of size bytes as in use. It returns a free block, or nil if there is none.
func (b *blocks) reuse(size int) (mem []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.of[size]
	if s == nil {
		s = &sizeClass{}
		if b.of == nil {
			b.of = map[int]*sizeClass{}
		}
		b.of[size] = s
	}
	s.out++
	if len(s.free) == 0 {
		s.gets, s.idle = 0, math.MaxInt
		return nil
	}
	mem = s.free[len(s.free)-1]
	s.free[len(s.free)-1] = nil
	s.free = s.free[:len(s.free)-1]
	b.kept -= size
	s.idle = min(s.idle, len(s.free))
	// After so many calls, a receiver that holds several blocks at a time has used each of them
	// again.
	if s.gets++; s.gets >= s.out+len(s.free) {
		b.trim(s)
	}
	return mem
}

// trim frees the blocks of s that were not needed since the last trim. The caller holds b.mu.
func (b *blocks) trim(s *sizeClass) {
	n := min(s.idle, len(s.free))
	for _, mem := range s.free[:n] {
		b.kept -= len(mem)
		_ = unix.Munmap(mem)
	}
	s.free = slices.Delete(s.free, 0, n)
	s.gets, s.idle = 0, len(s.free)
}

// put returns a block to the pool.
func (b *blocks) put(mem []byte) {
	mem = mem[:cap(mem)]
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.of[len(mem)]
	s.out--
	if b.closed || b.kept+len(mem) > keepBlocks {
		_ = unix.Munmap(mem)
		return
	}
	s.free = append(s.free, mem)
	b.kept += len(mem)
	if b.timer == nil {
		b.timer = time.AfterFunc(keepTime, b.tick)
	}
}

// tick frees the blocks that were not needed since the last tick.
func (b *blocks) tick() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return
	}
	for size, s := range b.of {
		if s.idle == math.MaxInt { // no get has found a free block since the last trim
			s.idle = 0
		}
		b.trim(s)
		if s.out == 0 && len(s.free) == 0 {
			delete(b.of, size)
		}
	}
	if b.timer = nil; b.kept > 0 {
		b.timer = time.AfterFunc(keepTime, b.tick)
	}
}

// close frees the free blocks. Blocks in use are freed when they are returned.
func (b *blocks) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if b.timer != nil {
		b.timer.Stop()
	}
	for _, s := range b.of {
		for _, mem := range s.free {
			_ = unix.Munmap(mem)
		}
		s.free = nil
	}
	b.kept = 0
}
