package local

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bell is a node's doorbell: its owner sleeps on it, its peers wake it.
type bell struct {
	mem []byte
}

// Layout of a bell's page.
const (
	offArmed = 0  // u32: the owner sleeps, or is about to
	offRings = 64 // u32: counts the rings; the futex
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

// count is what to read before the last look, and to give to wait.
func (b *bell) count() uint32 { return b.word(offRings).Load() }

// arm makes peers ring. Look once more before going to sleep.
func (b *bell) arm() { b.word(offArmed).Store(1) }

// disarm tells peers that the owner looks by itself.
func (b *bell) disarm() {
	if w := b.word(offArmed); w.Load() != 0 {
		w.Store(0)
	}
}

// ring wakes the owner if it has armed its bell. What it is to see must have been
// written before.
func (b *bell) ring() {
	if w := b.word(offArmed); w.Load() != 0 && w.CompareAndSwap(1, 0) {
		b.wake()
	}
}

// wake wakes the owner in any case.
func (b *bell) wake() {
	w := b.word(offRings)
	w.Add(1)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWake, 1, 0, 0, 0)
}

// Operations of futex(2), between processes.
const (
	futexWait = 0
	futexWake = 1
)

// wait sleeps until the bell has rung since count was read, or until limit passes:
// that heals what a peer that writes nonsense to the page could do.
func (b *bell) wait(count uint32, limit time.Duration) error {
	ts := unix.NsecToTimespec(limit.Nanoseconds())
	_, _, e := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(b.word(offRings))), futexWait, uintptr(count),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
	if e != 0 && !errors.Is(e, unix.EAGAIN) && !errors.Is(e, unix.EINTR) && !errors.Is(e, unix.ETIMEDOUT) {
		return fmt.Errorf("futex: %w", e)
	}
	return nil
}
