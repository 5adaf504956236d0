package local

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// blocks are buffers for received values that have no destination of their own yet. They
// lie outside the Go heap and are used again, the last one first: its pages exist
// and may still be in a cache. Those that the traffic of late has not needed go back
// to the system.
type blocks struct {
	mu     sync.Mutex
	of     map[int]*sizeClass // by length
	kept   int                // bytes that wait for use
	timer  *time.Timer        // runs while there are some
	closed bool
}

// sizeClass has the blocks of one length.
type sizeClass struct {
	free [][]byte
	out  int // in use
	gets int // since idle was counted anew
	idle int // the fewest that a get since then has left: they were not needed
}

const (
	minBlock = 64 << 10
	// keepBlocks is how many bytes an idle van keeps at most.
	keepBlocks = 256 << 20
	// keepTime is how long a block is kept that is not used, up to twice that.
	keepTime = 500 * time.Millisecond
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
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // without it works, too
	}
	return mem[:n], nil
}

// reuse counts a block of size bytes out and returns it if there is one.
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
	// As many as there are: a receiver that holds several at a time has taken them
	// all again by then.
	if s.gets++; s.gets >= s.out+len(s.free) {
		b.trim(s)
	}
	return mem
}

// trim frees the blocks of s that were not needed since the last time. b.mu is held.
func (b *blocks) trim(s *sizeClass) {
	n := min(s.idle, len(s.free))
	for _, mem := range s.free[:n] {
		b.kept -= len(mem)
		_ = unix.Munmap(mem)
	}
	s.free = slices.Delete(s.free, 0, n)
	s.gets, s.idle = 0, len(s.free)
}

// put takes back a block.
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

// tick frees what was not needed for a while.
func (b *blocks) tick() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return
	}
	for size, s := range b.of {
		if s.idle == math.MaxInt { // the last get has found none
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

// close frees the blocks; those still in use are freed when they come back.
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
