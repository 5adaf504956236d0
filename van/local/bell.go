package local

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
)

// bell is a mapped doorbell of a node: its owner sleeps on it, and its peers ring it to wake the owner.
type bell struct {
	mem []byte
}

// waiter names a sleeper on a node's bell: the engine's loop, or the caller of Poll.
type waiter uint32

const (
	noWaiter waiter = iota
	loopWaiter
	pollWaiter
)

// Layout of a bell's page.
const (
	offArmed = 0  // u32: the waiter to wake
	offRings = 64 // u32 of each waiter, in its own cache line: the number of rings; a futex
	bellLen  = 4096
)

// mapBell maps the bell in fd, which stays open.
func mapBell(fd int) (*bell, error) {
	mem, err := unix.Mmap(fd, 0, bellLen, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	return &bell{mem}, nil
}

func (b *bell) unmap() {
	_ = unix.Munmap(b.mem)
	b.mem = nil
}

func (b *bell) word(off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b.mem[off])) }

func (b *bell) rings(w waiter) *atomic.Uint32 { return b.word(offRings * int(w)) }

// count returns the number of rings. w reads it before its last poll and passes it to wait.
func (b *bell) count(w waiter) uint32 { return b.rings(w).Load() }

// arm asks peers to wake w. w must poll once more before it sleeps.
func (b *bell) arm(w waiter) { b.word(offArmed).Store(uint32(w)) }

// disarm tells peers that the owner polls and need not be woken.
func (b *bell) disarm() {
	if w := b.word(offArmed); w.Load() != 0 {
		w.Store(0)
	}
}

// ring wakes the waiter that has armed the bell. The caller must have written the data for the waiter
// before.
func (b *bell) ring() {
	armed := b.word(offArmed)
	if w := armed.Load(); w != 0 && w <= uint32(pollWaiter) && armed.CompareAndSwap(w, 0) {
		b.wake(waiter(w))
	}
}

// wake wakes w even if it has not armed the bell.
func (b *bell) wake(w waiter) {
	n := b.rings(w)
	n.Add(1)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(n)), futexWake, 1, 0, 0, 0)
}

// Operations of futex(2), between processes.
const (
	futexWait = 0
	futexWake = 1
)

// wait sleeps until the bell has rung since count was read, or until limit has passed. The limit
// protects against a peer that writes invalid values to the page.
func (b *bell) wait(w waiter, count uint32, limit time.Duration) error {
	ts := unix.NsecToTimespec(limit.Nanoseconds())
	_, _, e := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(b.rings(w))), futexWait, uintptr(count),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
	if e != 0 && !errors.Is(e, unix.EAGAIN) && !errors.Is(e, unix.EINTR) && !errors.Is(e, unix.ETIMEDOUT) {
		return fmt.Errorf("futex: %w", e)
	}
	return nil
}

// doorbell owns the bell of this node. The receiver uses the bell without the lock, and frees it last.
// All other goroutines hold the lock.
type doorbell struct {
	mu   sync.Mutex
	bell *bell // nil: not opened, or closed
	fd   int   // of its page, for peers
}

// open creates the doorbell.
func (d *doorbell) open() error {
	fd, err := memfd.New(bellLen)
	if err != nil {
		return err
	}
	b, err := mapBell(fd)
	if err != nil {
		_ = unix.Close(fd)
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bell, d.fd = b, fd
	return nil
}

// close frees the doorbell.
func (d *doorbell) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.bell != nil {
		d.bell.unmap()
		d.bell = nil
		_ = unix.Close(d.fd)
		d.fd = -1
	}
}

// wake wakes w if the doorbell is open.
func (d *doorbell) wake(w waiter) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.bell != nil {
		d.bell.wake(w)
	}
}

// wakeAll wakes all waiters if the doorbell is open.
func (d *doorbell) wakeAll() {
	d.wake(loopWaiter)
	d.wake(pollWaiter)
}
