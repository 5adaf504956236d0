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

// bell is a node's doorbell: its owner sleeps on it, its peers wake it.
type bell struct {
	mem []byte
}

// waiter is one of those who may sleep on a node's bell: the engine's loop, and the caller
// of a Poll.
type waiter uint32

const (
	noWaiter waiter = iota
	loopWaiter
	pollWaiter
)

// Layout of a bell's page.
const (
	offArmed = 0  // u32: the waiter to wake
	offRings = 64 // u32 of each waiter, on a line of its own: counts the rings; a futex
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

// count is what w reads before it polls for the last time, and gives to wait.
func (b *bell) count(w waiter) uint32 { return b.rings(w).Load() }

// arm makes peers wake w, which polls once more before it goes to sleep.
func (b *bell) arm(w waiter) { b.word(offArmed).Store(uint32(w)) }

// disarm tells peers that the owner polls by itself.
func (b *bell) disarm() {
	if w := b.word(offArmed); w.Load() != 0 {
		w.Store(0)
	}
}

// ring wakes the waiter that has armed the bell. What it is to see must have been written
// before.
func (b *bell) ring() {
	armed := b.word(offArmed)
	if w := armed.Load(); w != 0 && w <= uint32(pollWaiter) && armed.CompareAndSwap(w, 0) {
		b.wake(waiter(w))
	}
}

// wake wakes w in any case.
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

// wait sleeps until the bell has rung since count was read, or until limit passes:
// that heals what a peer that writes nonsense to the page could do.
func (b *bell) wait(w waiter, count uint32, limit time.Duration) error {
	ts := unix.NsecToTimespec(limit.Nanoseconds())
	_, _, e := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(b.rings(w))), futexWait, uintptr(count),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
	if e != 0 && !errors.Is(e, unix.EAGAIN) && !errors.Is(e, unix.EINTR) && !errors.Is(e, unix.ETIMEDOUT) {
		return fmt.Errorf("futex: %w", e)
	}
	return nil
}

// doorbell is the bell of this node itself. The receiver, which frees it in the end, uses the
// bell without the lock; everybody else wakes with it.
type doorbell struct {
	mu   sync.Mutex
	bell *bell // nil: there is none, or none any more
	fd   int   // of its page, for peers
}

// open makes the doorbell.
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

// isOpen tells whether there is a doorbell.
func (d *doorbell) isOpen() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.bell != nil
}

// wake wakes w, if there is a doorbell.
func (d *doorbell) wake(w waiter) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.bell != nil {
		d.bell.wake(w)
	}
}

// wakeAll wakes all waiters, if there is a doorbell.
func (d *doorbell) wakeAll() {
	d.wake(loopWaiter)
	d.wake(pollWaiter)
}
